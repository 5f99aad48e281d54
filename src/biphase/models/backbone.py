"""The blocks of a model: what is sharded, compiled and recomputed one at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import EuroBertConfig, EuroBertForMaskedLM
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from biphase.attention import NAME, AttentionPattern
from biphase.errors import ModelError, one_line
from biphase.fast.trunk import Joined
from biphase.loss import cross_entropy_sum
from biphase.models import hub as hub_models
from biphase.models.encoder import Encoder, context_of, refuse_own_attention
from biphase.models.hub import refuse_larger
from biphase.models.probe import probe_attention, probe_own
from biphase.objectives import Batch
from biphase.protocol import words_of_a_row
from biphase.randomness import salt
from biphase.specs import Hub, Size


def stack_of(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """The name and the blocks of a model's longest list of modules."""
    lists = [(name, list(one)) for name, one in model.named_modules() if isinstance(one, nn.ModuleList)]
    return max(lists, key=lambda one: len(one[1]), default=("", []))


def recompute_layers(encoder: Encoder, *, compiled: bool) -> None:
    """Let blocks keep only their input for the backward pass, and compute again what they need."""
    trunk: Any = encoder.trunk
    said = encoder.said

    def again(layer: Callable[..., Any], *args: Any) -> Any:
        # Some families' layers learn from `said` who may see whom; by the backward pass it says nothing any more.
        pattern = said.pattern

        def computed(*args: Any) -> Any:
            before, said.pattern = said.pattern, pattern
            try:
                return layer(*args)
            finally:
                said.pattern = before

        return checkpoint(computed, *args, use_reentrant=False)

    def again_compiled(layer: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(layer, *args, use_reentrant=False)  # the graph holds the second pass, too

    name = type(trunk).__name__
    if not getattr(trunk, "supports_gradient_checkpointing", False):
        raise ModelError(f"--recompute: the layers of {name} cannot be computed twice; leave it out")
    trunk._set_gradient_checkpointing(True, again_compiled if compiled else again)


# ---------------------------------------------------------------- rope
# The base of the rotary positions of a model: longer texts ask for a larger one.
#
# Of a model whose layers differ in it (windows and whole texts), only those that see whole texts change: a window never
# grows. The rotations are buffers, changed in place, so a compiled model follows.


WINDOWS = ("sliding_attention", "chunked_attention")


def set_rope_base(model: Any, base: float) -> None:
    """Turn positions by `base` from now on, also in the model's configuration."""
    config = model.config
    said = getattr(config, "rope_parameters", None)
    tables = [
        module for _, module in model.named_modules() if any("inv_freq" in name for name, _ in _own(module))
    ]
    if not isinstance(said, dict) or not tables:
        raise ModelError(f"{type(model).__name__} has no rotary positions; leave out rope_base")
    nested = {kind: one for kind, one in said.items() if isinstance(one, dict)}
    changed = [one for kind, one in nested.items() if kind not in WINDOWS] if nested else [said]
    for one in changed:
        one["rope_theta"] = float(base)
    for table in tables:
        fresh = type(table)(config=config)
        for (name, buffer), (same, value) in zip(_own(table), _own(fresh), strict=True):
            if name != same or buffer.shape != value.shape:
                raise ModelError(
                    f"{type(model).__name__} makes its rotary positions in a way that is not known here"
                )
            with torch.no_grad():
                buffer.copy_(value)


def rope_base_of(model: Any) -> float:
    """The base that texts as a whole are turned by; 0 where there is none."""
    said = getattr(model.config, "rope_parameters", None) or {}
    nested = [one for kind, one in said.items() if isinstance(one, dict) and kind not in WINDOWS]
    return float((nested[0] if nested else said).get("rope_theta") or 0.0)


def _own(module: Any) -> list[tuple[str, torch.Tensor]]:
    return list(module.named_buffers(recurse=False))


# ---------------------------------------------------------------- output
# From hidden states to logits, read off a model instead of known by its name.
#
# Families differ in what stands behind the trunk: a matrix alone, a layer before it, a bias, scaled logits, capped ones.
# All are   logits = cap·tanh(scale·(W·f(hidden) + b) / cap)   with parts that may be missing. `f` is the model's own code
# with its trunk and its last matrix taken out; scale and cap are measured by feeding that matrix's place with known
# numbers. So the loss can run on labelled positions only, a slice of logits at a time, for all of them.


SMALL, LARGE = 1e-3, 1e6  # far below and far above any cap
CLOSE = 1e-4


class _Hidden(BaseModelOutputWithPastAndCrossAttentions):
    """What a trunk gives: hidden states, and of everything else that a family looks for, nothing."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Trunk(nn.Module):
    """In the trunk's place: the hidden states are what it is given. Its parts are itself, its numbers the trunk's."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = [trunk]  # in a list: not a module of this one

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["trunk"][0], name)
        return self if isinstance(value, nn.Module) else value

    def forward(self, *args: Any, inputs_embeds: Any, **kwargs: Any) -> Any:
        return _Hidden(last_hidden_state=inputs_embeds)


class _Matrix(nn.Module):
    """In the last matrix's place: keeps what it is given, and gives what it is told, or the same."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.given: Tensor | None = None
        self.told: Tensor | None = None
        self.weight, self.bias = [weight], [bias]  # some heads look at them

    def forward(self, hidden: Tensor) -> Tensor:
        self.given = hidden
        return hidden if self.told is None else self.told


class Output:
    """The way from hidden states to logits of one model. Holds no weights of its own."""

    def __init__(self, model: Any) -> None:
        self.model = model
        name = type(model).__name__
        if not isinstance(self._last, nn.Linear):
            raise ModelError(
                f"{name} has no matrix that turns hidden states into words; give a language model"
            )
        if model.base_model is model:
            raise ModelError(f"{name} is not split into a trunk and a head, so it cannot be trained here")
        self.shell, self.matrix = _without_ends(model, self._last)
        self.scale, self.cap, self.transforms = 1.0, None, False
        if not self.weight.is_meta:  # a model of which only the shape is wanted has no numbers
            self.scale, self.cap = self._measured(name)
            self.transforms = not torch.equal(*self._through_transform())

    @property
    def _last(self) -> Any:
        return self.model.get_output_embeddings()

    @property
    def weight(self) -> Tensor:
        return self._last.weight

    @property
    def bias(self) -> Tensor | None:
        """As the loss takes it: scaled like the logits."""
        bias = self._last.bias
        return None if bias is None else bias * self.scale

    def rows(self, hidden: Tensor) -> Tensor:
        """What the last matrix is multiplied with, scaled. (P, d) → (P, d')"""
        if self.transforms:
            self._run(hidden)
            assert self.matrix.given is not None
            hidden, self.matrix.given = self.matrix.given[0], None
        return hidden if self.scale == 1 else hidden * self.scale

    def logits(self, hidden: Tensor) -> Tensor:
        """All logits of some rows: for probes and for looking at a few words."""
        logits = nn.functional.linear(self.rows(hidden), self.weight, self.bias)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def _run(self, rows: Tensor) -> Tensor:
        # A mask, lest a family look for padding among ids that are not there.
        ones = torch.ones(1, len(rows), dtype=torch.long, device=rows.device)
        return self.shell(inputs_embeds=rows[None], attention_mask=ones).logits[0]

    @torch.no_grad()
    def _through_transform(self) -> tuple[Tensor, Tensor]:
        """Rows before and after what stands between the trunk and the last matrix, without dropout."""
        between = any(True for _ in self.shell.parameters())  # weights of its own, so its own width as well
        width = self.model.config.hidden_size if between else self._last.in_features
        rows = torch.linspace(-1, 1, 2 * width, device=self.weight.device).view(2, -1)
        was_training = self.shell.training
        self.shell.eval()
        try:
            self._run(rows)
            assert self.matrix.given is not None
            return rows, self.matrix.given[0]
        finally:
            self.matrix.given = None
            self.shell.train(was_training)

    @torch.no_grad()
    def _measured(self, name: str) -> tuple[float, float | None]:
        """The scale and the cap that logits go through after the last matrix."""
        before, _ = self._through_transform()

        def after(values: list[float]) -> Tensor:
            self.matrix.told = torch.tensor(values, dtype=torch.float32, device=before.device)[
                None, None
            ].expand(1, len(before), -1)
            try:
                return self._run(before)[0].float()
            finally:
                self.matrix.told = self.matrix.given = None

        small, large = after([SMALL, LARGE]).tolist()
        scale = small / SMALL
        cap = None if not scale or abs(large / LARGE / scale - 1) < CLOSE else large
        values = [-700.0, -30.0, -3.0, -0.5, 0.0, 0.1, 2.0, 50.0, 900.0]
        plain = torch.tensor(values, device=before.device) * scale
        expected = plain if cap is None else cap * torch.tanh(plain / cap)
        if not scale or not torch.allclose(after(values), expected, rtol=CLOSE, atol=CLOSE):
            raise ModelError(
                f"{name} does something with its logits that is neither a scale nor a cap; it cannot be trained here"
            )
        # What fp32 made of a number such as 1 / 8 or 0.0625 is that number again.
        return float(f"{scale:.6g}"), None if cap is None else float(f"{cap:.6g}")


def _without_ends(model: Any, last: nn.Module) -> tuple[Any, _Matrix]:
    """A copy of the model's shell that shares its weights, with stand-ins for its trunk and its last matrix."""
    trunk, matrix = model.base_model, _Matrix(last.weight, last.bias)  # ty: ignore[invalid-argument-type]

    def copied(module: nn.Module) -> nn.Module:
        if module is trunk:
            return _Trunk(trunk)
        if module is last:
            return matrix
        if not any(one is trunk or one is last for one in module.modules()):
            return module
        shell = copy.copy(module)
        shell._modules = {name: one and copied(one) for name, one in module._modules.items()}
        return shell

    return copied(model), matrix


# ---------------------------------------------------------------- backbone
# Backbones are transformers' own classes; the attention, the loss and the direction are ours.
#
# `LanguageModel` is a thin view of such a model: the trunk gives hidden states, the head runs on labelled positions
# only. The same weights serve causal and masked training, import and export.


class LanguageModel(nn.Module):
    """A transformers model as trunk and head."""

    def __init__(self, model: Any, *, windows: bool = True) -> None:
        super().__init__()
        self.model = model
        # In a list: a second name for the same weights, not a second module.
        self.reader = [Encoder(model.base_model, context=context_of(model.base_model), windows=windows)]
        self.output = Output(model)
        self.head_copy: Joined | None = None  # of the last matrix in 16 bits, where it is kept
        self.note = ""  # for whoever trains it

    @property
    def head(self) -> Tensor:
        return self.output.weight

    def compile_trunk(self, *, by_block: bool = False) -> None:
        """Compile the layers. Shapes are fixed by the data: one graph per direction, each with and without gradients."""
        # All models of a process share dynamo's limit of graphs per function, and graphs are used again by the next
        # model of the same shape. Past the limit compiled code would silently become eager: so raise it, and say so.
        dynamo: Any = torch._dynamo.config
        dynamo.recompile_limit = 64
        dynamo.fail_on_recompile_limit_hit = True
        if by_block:  # between blocks weights come and go
            for block in stack_of(self.model.base_model)[1]:
                block.compile(dynamic=False)
        else:
            self.reader[0].call = [torch.compile(self.model.base_model, dynamic=False)]

    def prepare(
        self,
        device: torch.device,
        precision: str,
        *,
        compiled: bool | None = None,
        cut: bool = False,
        recompute: bool = False,
    ) -> str:
        """Choose how to compute on `device`, once the weights are there.

        "fused" on a GPU in 16 or 8 bits where the family is known; else "compiled" on a GPU; else "plain". `compiled` asks
        for the compiler, or forbids it. Weights that are `cut` over processes, and layers that `recompute` what they need
        again, leave out the first.
        """
        self.head_copy = None
        in_fp8 = precision == "fp8"  # which the compiler does not know how to do
        if in_fp8 and (cut or recompute):
            raise ModelError(
                f"precision='fp8' cannot be had with --{'shard' if cut else 'recompute'}; leave that out, or say precision='bf16'"
            )
        suits = not (cut or recompute or compiled)
        if (in_fp8 or suits) and self.reader[0].prepare(device, precision) == "fused":
            fused = self.reader[0].fused
            assert fused is not None
            weight = self.model.get_output_embeddings().weight
            words = words_of_a_row(len(weight), device.type)
            self.head_copy = Joined(weight, dtype=fused.dtype, rows=words)
            fused.watch(self.head_copy)
            return "fused"
        by_compiler = compiled or (compiled is None and device.type == "cuda")
        if recompute:
            recompute_layers(self.reader[0], compiled=by_compiler)
        if by_compiler:
            self.compile_trunk(by_block=cut)
            return "compiled"
        return "plain"

    def copies(self) -> dict[int, Tensor]:
        """Copies of its weights in 16 bits, by the address of the weight."""
        return self.reader[0].copies()

    def refresh(self, copied: bool = False) -> None:
        """The weights have changed: make anew what was made of them; their 16-bit copies unless `copied` already."""
        self.reader[0].refresh(copied)

    def _apply(self, *args: Any, **kwargs: Any) -> LanguageModel:
        """Moved or cast: copies of the weights are no longer theirs."""
        self.reader[0].fused = self.head_copy = None
        return super()._apply(*args, **kwargs)

    def hidden(self, ids: Tensor, positions: Tensor, pattern: AttentionPattern) -> Tensor:
        """(B, T) → (B, T, d)"""
        return self.reader[0](ids, positions, pattern)

    def logits(self, ids: Tensor, positions: Tensor, pattern: AttentionPattern) -> Tensor:
        """(B, T) → (B, T, V)"""
        hidden = self.hidden(ids, positions, pattern)
        return self.output.logits(hidden.flatten(0, 1)).view(*ids.shape, -1)

    def forward(
        self, ids: Tensor, positions: Tensor, pattern: AttentionPattern, label_at: Tensor, labels: Tensor
    ) -> Tensor:
        """The sum of the losses at the labelled positions."""
        output, fused = self.output, self.reader[0].fused
        if fused is None or self.head_copy is None:
            rows, head = self.hidden(ids, positions, pattern).flatten(0, 1)[label_at], None
        else:
            rows, head = fused(ids, positions, pattern, only=label_at), self.head_copy.whole
        return cross_entropy_sum(
            output.rows(rows), output.weight, labels, bias=output.bias, cap=output.cap, head=head
        )

    def loss_sum(self, batch: Batch, pattern: AttentionPattern) -> Tensor:
        return self(batch.ids, batch.positions, pattern, batch.label_at, batch.labels)


def from_scratch(size: Size, *, vocab: int, mask_id: int, length: int, seed: int) -> LanguageModel:
    """A new model of `size`, its weights a function of the seed alone (drawn on the CPU, in fp32)."""
    config = EuroBertConfig(
        vocab_size=vocab,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=length,
        initializer_range=size.init_std,
        rms_norm_eps=size.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": size.rope_base},
        tie_word_embeddings=size.tied,
        # With a pad token, torch would freeze its embedding at zero, and the paper's pad token is the end token.
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        mask_token_id=mask_id,
    )
    config._attn_implementation = NAME
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(salt(seed, "weights"))
        return LanguageModel(EuroBertForMaskedLM(config).float())


@dataclass(frozen=True)
class TokenizerInfo:
    """What a model must know of the tokenizer it is trained with."""

    vocab: int
    mask: int
    mask_is_new: bool = True  # no text the model has read had this token
    spare: frozenset[int] = frozenset()  # special tokens that no text has


def from_hub(hub: Hub, words: TokenizerInfo | None, *, length: int, stretched: bool = False) -> LanguageModel:
    """An existing model, in fp32, with our attention. A mask token it has never read gets the mean embedding.

    `words`: of the tokenizer it is trained with; None leaves its vocabulary as it is. `stretched`: the base of its
    rotary positions changes, so rows may be longer than it was made for.
    """
    made = hub_models.language_model(hub)
    # A pad token's embedding would get no gradient, and the pad token is often the end token.
    made.get_input_embeddings().padding_idx = None
    refuse_own_attention(made.base_model, hub.source)
    longest = context_of(made.base_model)
    if length > longest and stretched and rope_base_of(made):
        made.config.max_position_embeddings = length
    elif length > longest:
        raise ModelError(
            f"{hub.source} reads at most {longest:,} tokens, rows have {length:,}; say packing=Chunks({longest}) "
            f"(adapt --length {longest}), or change its positions: Stage(…, rope_base=…) (adapt --rope-base …)"
        )
    try:
        if words is not None:
            rows = made.get_input_embeddings().weight.shape[0]
            refuse_larger(words.vocab, words.spare | {words.mask}, rows, hub.source)
            _grow(made, words)
        return LanguageModel(made, windows=hub.windows == "symmetric")
    except ModelError:
        raise
    except Exception as wrong:  # a head made for other purposes fails in its own way
        raise ModelError(
            f"{hub.source} ({type(made).__name__}) cannot be trained here ({one_line(wrong)}); give another model"
        ) from None


def _grow(model: Any, words: TokenizerInfo) -> None:
    """Make room for added tokens; each row that is new is the exact mean of those that were there before.

    No chance, so every process agrees. A mask token in a slot that the vocabulary kept free is new, too.
    """
    had = model.get_input_embeddings().weight.shape[0]
    before = {name: len(table) for name, table in model.named_parameters() if table.ndim}
    if words.vocab > had:
        model.resize_token_embeddings(words.vocab, mean_resizing=False)
    new = list(range(had, words.vocab))
    if words.mask_is_new and words.mask < had:
        new.append(words.mask)
    if not new:
        return
    head = model.get_output_embeddings()
    ends = [model.get_input_embeddings().weight, getattr(head, "weight", None), getattr(head, "bias", None)]
    # A family may have more tables of words than these, and lets them grow by itself.
    grown = [one for name, one in model.named_parameters() if one.ndim and len(one) != before.get(name)]
    old = torch.ones(max(had, words.vocab), dtype=torch.bool)
    old[new] = False
    with torch.no_grad():
        tables = {id(one): one for one in (*ends, *grown) if one is not None and len(one) == len(old)}
        for table in tables.values():
            table[~old] = table[old].mean(0)


@torch.no_grad()
def probe(model: LanguageModel, *, vocab: int) -> None:
    """Refuse a model that cannot be causal, bidirectional and segment-blind by argument, or is not what its class is."""
    was_training = model.training
    model.eval()
    about: dict[str, Any] = {"vocab": vocab, "name": type(model.model).__name__, "device": model.head.device}
    try:
        probe_attention(model.hidden, **about, causal=True)
        probe_own(model.model, model.logits, **about)
    finally:
        model.train(was_training)
