"""Language models: transformers' own classes with our attention and loss, LoRA adapters, and `biphase.load`.

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

The checkpoints of a LoRA run contain the model with separate adapter matrices. When the model is evaluated or exported,
they are merged, which gives a plain model of its original class.

`load` reads a saved model that predicts masked tokens and returns hidden states. It works for every model that biphase
trains, even if transformers has no class with a masked-language-model head for the model's family.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import EuroBertConfig, EuroBertForMaskedLM
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.pytorch_utils import Conv1D

from biphase.attention import NAME, AttentionPattern
from biphase.errors import ModelError, SpecError, one_line
from biphase.fast.trunk import Joined, cross_entropy_sum
from biphase.models import hub as hub_models
from biphase.models.encoder import (
    Encoder,
    context_of,
    eval_mode,
    probe_attention,
    probe_own,
    refuse_own_attention,
)
from biphase.models.hub import load_tokenizer, merge_adapters, refuse_larger
from biphase.objectives import Batch
from biphase.protocol import padded_vocab
from biphase.randomness import salt
from biphase.specs import Config, Hub, LoRA, Size


def stack_of(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """Return the name and the modules of a model's longest ModuleList: its transformer blocks."""
    lists = [(name, list(part)) for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    return max(lists, key=lambda named: len(named[1]), default=("", []))


def recompute_layers(encoder: Encoder, *, compiled: bool) -> None:
    """Enable activation checkpointing: blocks keep only their input and recompute the rest in the backward pass."""
    trunk: Any = encoder.trunk
    current = encoder.current

    def recomputed(layer: Callable[..., Any], *args: Any) -> Any:
        # Some families' layers read the attention pattern from `current`, which is empty by the backward pass.
        pattern = current.pattern

        def with_pattern(*args: Any) -> Any:
            before, current.pattern = current.pattern, pattern
            try:
                return layer(*args)
            finally:
                current.pattern = before

        return checkpoint(with_pattern, *args, use_reentrant=False)

    def recomputed_compiled(layer: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(layer, *args, use_reentrant=False)  # the compiled graph contains the recomputation

    name = type(trunk).__name__
    if not getattr(trunk, "supports_gradient_checkpointing", False):
        raise ModelError(f"--recompute: the layers of {name} cannot be computed twice; leave it out")
    trunk._set_gradient_checkpointing(True, recomputed_compiled if compiled else recomputed)


# ---------------------------------------------------------------- rope


WINDOWS = ("sliding_attention", "chunked_attention")


def set_rope_base(model: Any, base: float) -> None:
    """Set the base of the rotary position embedding in a model and its config."""
    config = model.config
    rope = getattr(config, "rope_parameters", None)
    tables = [module for module in model.modules() if any("inv_freq" in name for name, _ in _buffers(module))]
    if not isinstance(rope, dict) or not tables:
        raise ModelError(f"{type(model).__name__} has no rotary positions; leave out rope_base")
    for parameters in _full_attention(rope):
        parameters["rope_theta"] = float(base)
    for table in tables:
        fresh = type(table)(config=config)
        for (name, buffer), (same, value) in zip(_buffers(table), _buffers(fresh), strict=True):
            if name != same or buffer.shape != value.shape:
                raise ModelError(
                    f"{type(model).__name__} makes its rotary positions in a way that is not known here"
                )
            with torch.no_grad():
                buffer.copy_(value)


def rope_base_of(model: Any) -> float:
    """Return the rope base of the full-attention layers; 0 if there is none."""
    parameters = _full_attention(getattr(model.config, "rope_parameters", None) or {})
    return float(parameters[0].get("rope_theta") or 0.0) if parameters else 0.0


def _full_attention(rope: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rope parameters of the layers without a window; they are nested if layers differ."""
    nested = {kind: parameters for kind, parameters in rope.items() if isinstance(parameters, dict)}
    return [nested[kind] for kind in nested if kind not in WINDOWS] if nested else [rope]


def _buffers(module: Any) -> list[tuple[str, torch.Tensor]]:
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
    """Replaces the last matrix: records its input, and returns `result`, or its input if that is None."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.given: Tensor | None = None
        self.result: Tensor | None = None
        self.weight, self.bias = [weight], [bias]  # some heads read these attributes

    def forward(self, hidden: Tensor) -> Tensor:
        self.given = hidden
        return hidden if self.result is None else self.result


class Output:
    """Computes logits from a model's hidden states. Holds no weights of its own.

    `shell` is the model with its backbone and its last matrix replaced, the latter by `matrix`.
    """

    def __init__(self, model: Any, shell: Any, matrix: _Matrix) -> None:
        self.model, self.shell, self.matrix = model, shell, matrix
        self.scale: float = 1.0
        self.cap: float | None = None
        self.transforms = False  # whether there are layers between backbone and last matrix

    @classmethod
    def of(cls, model: Any) -> Output:
        """Measure the output of a model; raise ModelError if it is of no known form."""
        name, last = type(model).__name__, model.get_output_embeddings()
        if not isinstance(last, nn.Linear):
            raise ModelError(
                f"{name} has no matrix that turns hidden states into words; give a language model"
            )
        if model.base_model is model:
            raise ModelError(f"{name} is not split into a trunk and a head, so it cannot be trained here")
        output = cls(model, *_without_ends(model, last))
        if not output.weight.is_meta:  # a model on the meta device has shapes only
            output.scale, output.cap = output._measured(name)
            output.transforms = not torch.equal(*output._through_transform())
        return output

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
            hidden = self._given(hidden)
        return hidden if self.scale == 1 else hidden * self.scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the full logits of some rows, for probes and predictions of a few tokens."""
        logits = nn.functional.linear(self.rows(hidden), self.weight, self.bias)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def _given(self, rows: Tensor) -> Tensor:
        """Return what the last matrix is given for some hidden states."""
        self._run(rows)
        given, self.matrix.given = self.matrix.given, None
        assert given is not None
        return given[0]

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
        with eval_mode(self.shell):
            return rows, self._given(rows)

    @torch.no_grad()
    def _measured(self, name: str) -> tuple[float, float | None]:
        """Measure the scale and the cap applied to logits after the last matrix."""
        before, _ = self._through_transform()

        def after(values: list[float]) -> Tensor:
            row = torch.tensor(values, dtype=torch.float32, device=before.device)
            self.matrix.result = row.expand(1, len(before), -1)
            try:
                return self._run(before)[0].float()
            finally:
                self.matrix.result = self.matrix.given = None

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
        if not any(part is trunk or part is last for part in module.modules()):
            return module
        shell = copy.copy(module)
        shell._modules = {name: part and copied(part) for name, part in module._modules.items()}
        return shell

    return copied(model), matrix


# ---------------------------------------------------------------- language model


class LanguageModel(nn.Module):
    """A transformers language model as a backbone and a head."""

    def __init__(self, model: Any, *, windows: bool = True) -> None:
        super().__init__()
        self.model = model
        # In a list, so that it is not registered as a submodule with the same weights.
        self._encoder = [Encoder(model.base_model, context=context_of(model.base_model), windows=windows)]
        self.output = Output.of(model)
        self.head_copy: Joined | None = None  # 16-bit copy of the last matrix, on the fused path
        self.compiled: Any = None  # the compiled backbone, on the path of that name

    @property
    def encoder(self) -> Encoder:
        return self._encoder[0]

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
            self.compiled = torch.compile(self.model.base_model, dynamic=False)
            self.use_compiled(True)

    def use_compiled(self, yes: bool) -> None:
        """Use the compiled backbone, if there is one, or the plain one: each shape of texts would be compiled anew."""
        if self.compiled is not None:
            self.encoder.call = [self.compiled if yes else self.model.base_model]

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

        "fused" (our kernels) on a GPU in bf16 if the family is supported; else "compiled" on a GPU; else
        "plain". `compiled` forces or forbids torch.compile. Weights that are sharded (`cut`) and activation
        checkpointing (`recompute`) exclude "fused".
        """
        self.head_copy = None
        suits = not (cut or recompute or compiled)
        if suits and self.encoder.prepare(device, precision) == "fused":
            fused = self.encoder.fused
            assert fused is not None
            weight = self.model.get_output_embeddings().weight
            rows = padded_vocab(len(weight), device.type)
            self.head_copy = Joined(weight, dtype=fused.dtype, rows=rows)
            fused.watch(self.head_copy)
            return "fused"
        by_compiler = compiled or (compiled is None and device.type == "cuda")
        if recompute:
            recompute_layers(self.encoder, compiled=by_compiler)
        if by_compiler:
            self.compile_trunk(by_block=cut)
            return "compiled"
        return "plain"

    def _apply(self, *args: Any, **kwargs: Any) -> LanguageModel:
        """Drop the copies when the model is moved or cast, since they belong to the old weights."""
        self.encoder.fused = self.head_copy = None
        return super()._apply(*args, **kwargs)

    def hidden(self, ids: Tensor, positions: Tensor, pattern: AttentionPattern) -> Tensor:
        """Return the hidden states. (B, T) → (B, T, d)"""
        return self.encoder(ids, positions, pattern)

    def logits(self, ids: Tensor, positions: Tensor, pattern: AttentionPattern) -> Tensor:
        """Return the full logits, for probes. (B, T) → (B, T, V)"""
        hidden = self.hidden(ids, positions, pattern)
        return self.output.logits(hidden.flatten(0, 1)).view(*ids.shape, -1)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        pattern: AttentionPattern,
        label_at: Tensor,
        labels: Tensor,
        z_loss: float = 0.0,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of the losses at the labelled positions, each times its weight.

        A loss is −log p(label) plus `z_loss` times the squared log-sum-exp.
        """
        output, fused = self.output, self.encoder.fused
        if fused is None or self.head_copy is None:
            rows, head = self.hidden(ids, positions, pattern).flatten(0, 1)[label_at], None
        elif len(label_at) == ids.numel():  # all in order
            rows, head = fused(ids, positions, pattern).flatten(0, 1), self.head_copy.whole
        else:
            rows, head = fused(ids, positions, pattern, only=label_at), self.head_copy.whole
        return cross_entropy_sum(
            output.rows(rows),
            output.weight,
            labels,
            bias=output.bias,
            cap=output.cap,
            head=head,
            z_loss=z_loss,
            weights=weights,
        )

    def loss_sum(self, batch: Batch, pattern: AttentionPattern, *, z_loss: float = 0.0) -> Tensor:
        return self(batch.ids, batch.positions, pattern, batch.label_at, batch.labels, z_loss, batch.weights)


# ---------------------------------------------------------------- construction


def config_fields(size: Size, *, vocab: int, length: int) -> dict[str, Any]:
    """Return the configuration of a size under transformers' names."""
    return {
        "vocab_size": vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "max_position_embeddings": length,
        "initializer_range": size.init_std,
        "rms_norm_eps": size.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": size.rope_base},
        # With a pad token, torch would keep its embedding at zero, and EuroBERT's pad token is the end token.
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), None),
    }


def from_scratch(
    start: Size | Config,
    *,
    vocab: int,
    mask_id: int,
    length: int,
    seed: int,
    pad_id: int = 0,
    stretched: bool = False,
) -> LanguageModel:
    """Build a new model for rows of `length` tokens.

    Its weights depend on the seed alone (initialized on the CPU in fp32). Those of a Config are as its class in
    transformers initializes them, and `stretched` is as for `from_hub`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(salt(seed, "weights"))
        if isinstance(start, Size):
            fields = config_fields(start, vocab=vocab, length=length)
            config = EuroBertConfig(**fields, tie_word_embeddings=start.tied, mask_token_id=mask_id)
            config._attn_implementation = NAME
            return LanguageModel(EuroBertForMaskedLM(config).float())
        model = hub_models.new_model(start, vocab=vocab, mask_id=mask_id, pad_id=pad_id)
    longer = "or a larger max_position_embeddings"
    return _adopted(model, f"Config {start.name!r}", None, length=length, stretched=stretched, longer=longer)


@dataclass(frozen=True)
class TokenizerInfo:
    """What a model needs to know of the tokenizer it is trained with."""

    vocab: int
    mask: int
    mask_is_new: bool = True  # the model was never trained on this token
    spare: frozenset[int] = frozenset()  # special tokens that occur in no text


def from_hub(
    hub: Hub, tokenizer: TokenizerInfo | None, *, length: int, stretched: bool = False
) -> LanguageModel:
    """Load an existing model in fp32 with our attention. A new mask token gets the mean embedding.

    `tokenizer` is the one it is trained with; None leaves its vocabulary unchanged. `stretched` says that its rope base
    will change, so that rows may be longer than its context.
    """
    return _adopted(
        hub_models.language_model(hub),
        hub.source,
        tokenizer,
        length=length,
        stretched=stretched,
        windows=hub.windows == "symmetric",
        longer="or change its positions: Stage(…, rope_base=…) (adapt --length, --rope-base)",
    )


def _adopted(
    model: Any,
    source: str,
    tokenizer: TokenizerInfo | None,
    *,
    length: int,
    stretched: bool,
    windows: bool = True,
    longer: str,
) -> LanguageModel:
    """Return a transformers model as a LanguageModel; raise ModelError if its class is unsupported or it is too short.

    `longer` is what to write for longer rows.
    """
    # Otherwise the pad token's embedding gets no gradient, and the pad token is often the end token.
    model.get_input_embeddings().padding_idx = None
    refuse_own_attention(model.base_model, source)
    longest = context_of(model.base_model)
    if length > longest and stretched and rope_base_of(model):
        model.config.max_position_embeddings = length
    elif length > longest:
        raise ModelError(
            f"{source} reads at most {longest:,} tokens, rows have {length:,}; say packing=Chunks({longest}), {longer}"
        )
    try:
        if tokenizer is not None:
            rows = model.get_input_embeddings().weight.shape[0]
            refuse_larger(tokenizer.vocab, tokenizer.spare | {tokenizer.mask}, rows, source)
            _grow(model, tokenizer)
        return LanguageModel(model, windows=windows)
    except ModelError:
        raise
    except Exception as wrong:  # heads made for other purposes raise many types
        raise ModelError(
            f"{source} ({type(model).__name__}) cannot be trained here ({one_line(wrong)}); give another model"
        ) from None


def _grow(model: Any, tokenizer: TokenizerInfo) -> None:
    """Add vocab rows for new tokens; each new row is the mean of the existing rows.

    The mean is deterministic, so all processes agree. A mask token in a reserved slot of the vocabulary counts as new.
    """
    had = model.get_input_embeddings().weight.shape[0]
    before = {name: len(table) for name, table in model.named_parameters() if table.ndim}
    if tokenizer.vocab > had:
        model.resize_token_embeddings(tokenizer.vocab, mean_resizing=False)
    new = list(range(had, tokenizer.vocab))
    if tokenizer.mask_is_new and tokenizer.mask < had:
        new.append(tokenizer.mask)
    if not new:
        return
    head = model.get_output_embeddings()
    ends = [model.get_input_embeddings().weight, getattr(head, "weight", None), getattr(head, "bias", None)]
    # Some families have more tables with vocab rows, which `resize_token_embeddings` has grown.
    grown = [
        table for name, table in model.named_parameters() if table.ndim and len(table) != before.get(name)
    ]
    old = torch.ones(max(had, tokenizer.vocab), dtype=torch.bool)
    old[new] = False
    with torch.no_grad():
        tables = {
            id(table): table for table in (*ends, *grown) if table is not None and len(table) == len(old)
        }
        for table in tables.values():
            table[~old] = table[old].mean(0)


@torch.no_grad()
def probe(model: LanguageModel, *, vocab: int) -> None:
    """Raise ModelError unless the attention pattern controls the model's direction and segments.

    Also checks that the model computes the same with our attention as with its own class's.
    """
    name, device = type(model.model).__name__, model.head.device
    try:
        with eval_mode(model):
            probe_attention(model.hidden, vocab=vocab, name=name, device=device, causal=True)
            probe_own(model.model, model.logits, vocab=vocab, name=name, device=device)
    except ModelError:
        raise
    except Exception as wrong:  # sizes that do not fit each other, forwards made for other inputs: many types
        raise ModelError(f"{name} cannot read packed text ({one_line(wrong)}); give another model") from None


# ---------------------------------------------------------------- adapters


def add_adapter(model: LanguageModel, spec: LoRA, *, seed: int) -> None:
    """Add LoRA matrices, initialized from the seed, and freeze all other parameters."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ModelError("LoRA needs the package peft; type: pip install peft") from None
    trunk: Any = model.model.base_model
    _refuse_unknown(trunk, spec)
    targets = list(spec.targets) or "all-linear"
    config = LoraConfig(r=spec.rank, lora_alpha=spec.alpha, target_modules=targets)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # GPT-2 stores its matrices transposed; peft handles that and warns each time.
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
            torch.manual_seed(salt(seed, "adapter"))
            inject_adapter_in_model(config, trunk)
    except ValueError as wrong:
        raise ModelError(f"LoRA(targets={spec.targets}): {one_line(wrong)}") from None
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def _refuse_unknown(trunk: Any, spec: LoRA) -> None:
    """Raise ModelError if a target is not the name of a matrix: peft ignores a wrong name beside a right one.

    Embeddings are not allowed: with a tied head, merging would also change the head, which was trained without it.
    """
    matrices = [name for name, module in trunk.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    unknown = [
        target for target in spec.targets if not any(f".{name}".endswith(f".{target}") for name in matrices)
    ]
    if unknown:
        names = sorted({name.rpartition(".")[2] for name in matrices})
        raise ModelError(
            f"LoRA(targets={spec.targets}): {type(trunk).__name__} has no matrix called {unknown[0]}; "
            f"it has {', '.join(names)}"
        )


def merge_adapter(model: LanguageModel) -> None:
    """Merge the adapter matrices into the weights, and make all parameters trainable."""
    merge_adapters(model.model.base_model)
    model.requires_grad_(True)


def freeze_embeddings(model: LanguageModel) -> None:
    """Freeze the embedding, and with it a tied head."""
    model.model.get_input_embeddings().requires_grad_(False)


# ---------------------------------------------------------------- biphase.load


class LoadedModel:
    """A bidirectional language model in fp32 on the CPU, with its tokenizer."""

    def __init__(self, model: LanguageModel, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer

    @property
    def mask_token(self) -> str:
        token = self.tokenizer.mask_token
        if token is None:
            raise ModelError(
                "the model's tokenizer has no mask token; export an adapted model, which has one"
            )
        return token

    @torch.no_grad()
    def hidden_states(self, text: str) -> Tensor:
        """Return the hidden states of a text, (tokens, width), as `AutoModel` gives them."""
        return self.model.hidden(*self._inputs(text))[0]

    @torch.no_grad()
    def fill_mask(self, text: str, top: int = 5, *, shifted: bool = False) -> list[list[tuple[str, float]]]:
        """Return, for each mask token of the text, the `top` most probable tokens with their probabilities.

        Set `shifted` for a model trained with MNTP, which predicts a token at the position before it.
        """
        ids, positions, pattern = self._inputs(text)
        at = (ids[0] == self.tokenizer.convert_tokens_to_ids(self.mask_token)).nonzero()[:, 0]
        if not len(at):
            raise SpecError(
                f"there is no mask token in {text!r}; write {self.mask_token} where a word is asked for"
            )
        hidden = self.model.hidden(ids, positions, pattern)[0]
        logits = self.model.output.logits(hidden[(at - int(shifted)).clamp(min=0)])
        if not 1 <= top <= logits.shape[-1]:
            raise SpecError(
                f"top={top}: the model knows {logits.shape[-1]:,} tokens; ask for 1 of them or more"
            )
        likely = logits.softmax(-1).topk(top)
        return [
            [(self.tokenizer.decode([token]), share) for token, share in zip(tokens, shares, strict=True)]
            for tokens, shares in zip(likely.indices.tolist(), likely.values.tolist(), strict=True)
        ]

    def _inputs(self, text: str) -> tuple[Tensor, Tensor, AttentionPattern]:
        ids = torch.tensor([self.tokenizer(text)["input_ids"]])
        longest = self.model.encoder.context
        if ids.shape[1] > longest:
            raise SpecError(f"the text has {ids.shape[1]:,} tokens and the model reads {longest:,}; cut it")
        return ids, torch.arange(ids.shape[1])[None], AttentionPattern(causal=False)


def load(folder: str | Path) -> LoadedModel:
    """Load a model from a folder that `biphase export` or transformers wrote; no code in the folder is run."""
    path = Path(folder).expanduser().resolve()
    if not path.is_dir():
        raise ModelError(
            f"there is no folder {folder}; give that of a model, or download one first: hf download NAME --local-dir FOLDER"
        )
    hub = Hub(str(path))
    model = from_hub(hub, None, length=1).eval()
    probe(model, vocab=len(model.head))
    return LoadedModel(model, load_tokenizer(hub))
