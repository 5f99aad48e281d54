"""Language models: transformers' own classes with our attention and loss.

`LanguageModel` is a thin wrapper: the backbone gives hidden states, and the head runs on labelled positions only. The
same weights serve causal and masked training, import and export. `from_scratch` and `from_hub` build one, `probe`
checks one before training.

`Output` is the way from hidden states to logits, determined from the model instead of from its name. Model families
differ in what follows the backbone: a matrix alone, a layer before it, a bias, scaled or capped logits. All are

    logits = cap·tanh(scale·(W·f(hidden) + b) / cap)

with some parts missing. `f` is the model's own code with its backbone and its last matrix replaced; scale and cap are
measured by feeding known numbers in place of that matrix's output. The loss can therefore run on labelled positions
only, one slice of logits at a time, for every family.

`set_rope_base` changes the base of the rotary position embedding, which longer texts need. In a model whose layers use
different bases (windowed and full attention), only the full-attention layers change, since a window does not grow.
The rotations are buffers that are changed in place, so a compiled model uses the new ones.
"""

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
from biphase.fast.trunk import Joined, cross_entropy_sum
from biphase.models import hub as hub_models
from biphase.models.encoder import Encoder, context_of, refuse_own_attention
from biphase.models.hub import refuse_larger
from biphase.models.probe import probe_attention, probe_own
from biphase.objectives import Batch
from biphase.protocol import padded_vocab
from biphase.randomness import salt
from biphase.specs import Hub, Size


def stack_of(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """Return the name and the modules of a model's longest ModuleList: its transformer blocks."""
    lists = [(name, list(one)) for name, one in model.named_modules() if isinstance(one, nn.ModuleList)]
    return max(lists, key=lambda one: len(one[1]), default=("", []))


def recompute_layers(encoder: Encoder, *, compiled: bool) -> None:
    """Enable activation checkpointing: blocks keep only their input and recompute the rest in the backward pass."""
    trunk: Any = encoder.trunk
    said = encoder.said

    def again(layer: Callable[..., Any], *args: Any) -> Any:
        # Some families' layers read the attention pattern from `said`, which is empty by the backward pass.
        pattern = said.pattern

        def computed(*args: Any) -> Any:
            before, said.pattern = said.pattern, pattern
            try:
                return layer(*args)
            finally:
                said.pattern = before

        return checkpoint(computed, *args, use_reentrant=False)

    def again_compiled(layer: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(layer, *args, use_reentrant=False)  # the compiled graph contains the recomputation

    name = type(trunk).__name__
    if not getattr(trunk, "supports_gradient_checkpointing", False):
        raise ModelError(f"--recompute: the layers of {name} cannot be computed twice; leave it out")
    trunk._set_gradient_checkpointing(True, again_compiled if compiled else again)


# ---------------------------------------------------------------- rope


WINDOWS = ("sliding_attention", "chunked_attention")


def set_rope_base(model: Any, base: float) -> None:
    """Set the base of the rotary position embedding in a model and its config."""
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
    """Return the rope base of the full-attention layers; 0 if there is none."""
    said = getattr(model.config, "rope_parameters", None) or {}
    nested = [one for kind, one in said.items() if isinstance(one, dict) and kind not in WINDOWS]
    return float((nested[0] if nested else said).get("rope_theta") or 0.0)


def _own(module: Any) -> list[tuple[str, torch.Tensor]]:
    return list(module.named_buffers(recurse=False))


# ---------------------------------------------------------------- output


SMALL, LARGE = 1e-3, 1e6  # far below and far above any cap
CLOSE = 1e-4


class _Hidden(BaseModelOutputWithPastAndCrossAttentions):
    """A backbone's output with hidden states only; every other attribute that a head reads is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Trunk(nn.Module):
    """Replaces the backbone: returns `inputs_embeds` as hidden states.

    Its submodules are itself; its other attributes are the backbone's.
    """

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = [trunk]  # in a list, so that it is not registered as a submodule

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["trunk"][0], name)
        return self if isinstance(value, nn.Module) else value

    def forward(self, *args: Any, inputs_embeds: Any, **kwargs: Any) -> Any:
        return _Hidden(last_hidden_state=inputs_embeds)


class _Matrix(nn.Module):
    """Replaces the last matrix: records its input, and returns `told`, or its input if that is None."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.given: Tensor | None = None
        self.told: Tensor | None = None
        self.weight, self.bias = [weight], [bias]  # some heads read these attributes

    def forward(self, hidden: Tensor) -> Tensor:
        self.given = hidden
        return hidden if self.told is None else self.told


class Output:
    """Computes logits from a model's hidden states. Holds no weights of its own."""

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
        if not self.weight.is_meta:  # a model on the meta device has shapes only
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
        """The head's bias, scaled like the logits, as the loss expects it."""
        bias = self._last.bias
        return None if bias is None else bias * self.scale

    def rows(self, hidden: Tensor) -> Tensor:
        """Return the scaled input of the last matrix. (P, d) → (P, d')"""
        if self.transforms:
            self._run(hidden)
            assert self.matrix.given is not None
            hidden, self.matrix.given = self.matrix.given[0], None
        return hidden if self.scale == 1 else hidden * self.scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the full logits of some rows, for probes and predictions of a few tokens."""
        logits = nn.functional.linear(self.rows(hidden), self.weight, self.bias)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def _run(self, rows: Tensor) -> Tensor:
        # Pass a mask, since some families would otherwise look for padding in the input ids, which are None.
        ones = torch.ones(1, len(rows), dtype=torch.long, device=rows.device)
        return self.shell(inputs_embeds=rows[None], attention_mask=ones).logits[0]

    @torch.no_grad()
    def _through_transform(self) -> tuple[Tensor, Tensor]:
        """Return test rows before and after the layers between backbone and last matrix, without dropout."""
        between = any(True for _ in self.shell.parameters())  # such layers may change the width
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
        """Measure the scale and the cap applied to logits after the last matrix."""
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
        # Round away fp32 errors, so that e.g. 0.0625 is exact.
        return float(f"{scale:.6g}"), None if cap is None else float(f"{cap:.6g}")


def _without_ends(model: Any, last: nn.Module) -> tuple[Any, _Matrix]:
    """Return a shallow copy of the model that shares its weights, with backbone and last matrix replaced."""
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


# ---------------------------------------------------------------- language model


class LanguageModel(nn.Module):
    """A transformers language model as a backbone and a head."""

    def __init__(self, model: Any, *, windows: bool = True) -> None:
        super().__init__()
        self.model = model
        # In a list, so that it is not registered as a submodule with the same weights.
        self.reader = [Encoder(model.base_model, context=context_of(model.base_model), windows=windows)]
        self.output = Output(model)
        self.head_copy: Joined | None = None  # 16-bit copy of the last matrix, on the fused path
        self.note = ""  # a message for the user before training

    @property
    def head(self) -> Tensor:
        return self.output.weight

    def compile_trunk(self, *, by_block: bool = False) -> None:
        """Compile the backbone, with `by_block` each block separately.

        Shapes are fixed by the data, so there is one graph per attention direction, each with and without gradients.
        """
        # All models of a process share dynamo's limit of graphs per function, and the next model of the same shape
        # reuses graphs. Beyond the limit code would silently run eagerly, so raise the limit and fail if it is hit.
        dynamo: Any = torch._dynamo.config
        dynamo.recompile_limit = 64
        dynamo.fail_on_recompile_limit_hit = True
        if by_block:  # FSDP gathers and frees weights between blocks
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
        """Choose the compute path on `device`, after the weights were moved there, and return its name.

        "fused" (our kernels) on a GPU in bf16 or fp8 if the family is supported; else "compiled" on a GPU; else
        "plain". `compiled` forces or forbids torch.compile. Weights that are sharded (`cut`) and activation
        checkpointing (`recompute`) exclude "fused".
        """
        self.head_copy = None
        in_fp8 = precision == "fp8"  # supported by the fused path only
        if in_fp8 and (cut or recompute):
            raise ModelError(
                f"precision='fp8' cannot be had with --{'shard' if cut else 'recompute'}; leave that out, or say precision='bf16'"
            )
        suits = not (cut or recompute or compiled)
        if (in_fp8 or suits) and self.reader[0].prepare(device, precision) == "fused":
            fused = self.reader[0].fused
            assert fused is not None
            weight = self.model.get_output_embeddings().weight
            words = padded_vocab(len(weight), device.type)
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
        """Return the 16-bit copies of the weights, by the address of the weight."""
        return self.reader[0].copies()

    def refresh(self, copied: bool = False) -> None:
        """Update what is derived from the weights after they changed; `copied`: the 16-bit copies are up to date."""
        self.reader[0].refresh(copied)

    def _apply(self, *args: Any, **kwargs: Any) -> LanguageModel:
        """Drop the copies when the model is moved or cast, since they belong to the old weights."""
        self.reader[0].fused = self.head_copy = None
        return super()._apply(*args, **kwargs)

    def hidden(self, ids: Tensor, positions: Tensor, pattern: AttentionPattern) -> Tensor:
        """Return the hidden states. (B, T) → (B, T, d)"""
        return self.reader[0](ids, positions, pattern)

    def logits(self, ids: Tensor, positions: Tensor, pattern: AttentionPattern) -> Tensor:
        """Return the full logits, for probes. (B, T) → (B, T, V)"""
        hidden = self.hidden(ids, positions, pattern)
        return self.output.logits(hidden.flatten(0, 1)).view(*ids.shape, -1)

    def forward(
        self, ids: Tensor, positions: Tensor, pattern: AttentionPattern, label_at: Tensor, labels: Tensor
    ) -> Tensor:
        """Return the sum of the losses at the labelled positions."""
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
    """Build a new model of `size`; its weights depend on the seed alone (initialized on the CPU in fp32)."""
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
        # With a pad token, torch would keep its embedding at zero, and the paper's pad token is the end token.
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
    """What a model needs to know of the tokenizer it is trained with."""

    vocab: int
    mask: int
    mask_is_new: bool = True  # the model was never trained on this token
    spare: frozenset[int] = frozenset()  # special tokens that occur in no text


def from_hub(hub: Hub, words: TokenizerInfo | None, *, length: int, stretched: bool = False) -> LanguageModel:
    """Load an existing model in fp32 with our attention. A new mask token gets the mean embedding.

    `words` describes the tokenizer it is trained with; None leaves its vocabulary unchanged. `stretched` says that its
    rope base will change, so that rows may be longer than its context.
    """
    made = hub_models.language_model(hub)
    # Otherwise the pad token's embedding gets no gradient, and the pad token is often the end token.
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
    except Exception as wrong:  # heads made for other purposes raise many types
        raise ModelError(
            f"{hub.source} ({type(made).__name__}) cannot be trained here ({one_line(wrong)}); give another model"
        ) from None


def _grow(model: Any, words: TokenizerInfo) -> None:
    """Add vocab rows for new tokens; each new row is the mean of the existing rows.

    The mean is deterministic, so all processes agree. A mask token in a reserved slot of the vocabulary counts as new.
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
    # Some families have more tables with vocab rows, which `resize_token_embeddings` has grown.
    grown = [one for name, one in model.named_parameters() if one.ndim and len(one) != before.get(name)]
    old = torch.ones(max(had, words.vocab), dtype=torch.bool)
    old[new] = False
    with torch.no_grad():
        tables = {id(one): one for one in (*ends, *grown) if one is not None and len(one) == len(old)}
        for table in tables.values():
            table[~old] = table[old].mean(0)


@torch.no_grad()
def probe(model: LanguageModel, *, vocab: int) -> None:
    """Raise ModelError unless the attention pattern controls the model's direction and segments.

    Also checks that the model computes the same with our attention as with its own class's.
    """
    was_training = model.training
    model.eval()
    about: dict[str, Any] = {"vocab": vocab, "name": type(model.model).__name__, "device": model.head.device}
    try:
        probe_attention(model.hidden, **about, causal=True)
        probe_own(model.model, model.logits, **about)
    finally:
        model.train(was_training)
