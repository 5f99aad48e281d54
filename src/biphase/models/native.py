"""Converts a decoder to one of transformers' encoder classes with a masked-language-model head, if they are equivalent.

Two classes are tried: the masked class of the decoder's own family (e.g. a BERT trained as a decoder), and EuroBERT,
which is a Llama without a causal mask. For EuroBERT, weights are rewritten where only the notation differs: fused
matrices are split, constant factors are multiplied into the weights, interleaved rotary pairs are reordered.

No architecture is named. Weights must fit by name and shape, and both models must compute the same with the same random
weights. Random weights are used because those of a trained model can hide a difference: nearly uniform attention does
not show whether a layer rotates its queries and keys. They make attention sharp, and positions up to the maximum are
tested.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import EuroBertConfig, EuroBertForMaskedLM, EuroBertModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from biphase.attention import NAME, AttentionPattern
from biphase.models.backbone import LanguageModel
from biphase.models.encoder import Encoder
from biphase.models.hub import narrowest, quietly

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SETTINGS = ("max_position_embeddings", "rms_norm_eps", "rope_parameters")
PROBED = 64  # tokens in the comparison
GAIN = 2.0  # gain of the random matrices: attention scores get a standard deviation of about 4
TOLERANCE = 1e-3  # relative, per vector; one layer of 36 without rotation makes a difference of 0.02 or more
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
EMBEDDING = "embed_tokens.weight"
_THRESHOLD = re.compile("clip|limit|cap(ping)?$")

Weights = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


def is_masked(architecture: str) -> bool:
    """Return whether a class name is that of a masked language model."""
    return architecture in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()


def masked_forms(model: LanguageModel, length: int, **fields: Any) -> Iterator[Callable[[], Any]]:
    """Yield a constructor for each class with a masked head that is equivalent for texts of up to `length` tokens.

    `fields` override EuroBERT's configuration.
    """
    own = _own_family(model.model)
    if own is not None:
        yield lambda: own
    output = model.output
    if output.transforms or output.cap is not None:
        return
    if output.scale != 1:
        fields["tie_word_embeddings"] = False  # the scaled head differs from the embedding
    last = model.model.get_output_embeddings()
    head = {f"lm_head.{name}": weight for name, weight in last.named_parameters()}
    native = as_eurobert(model.encoder, length, EuroBertForMaskedLM, head, scale=output.scale, **fields)
    if native is not None:
        yield native


def as_eurobert(
    encoder: Encoder, length: int, family: Any, head: Weights, *, scale: float = 1.0, **fields: Any
) -> Callable[[], Any] | None:
    """Return a constructor of `family` (a EuroBERT class) from a backbone and a scaled head; None if not equivalent."""
    trunk: Any = encoder.trunk
    config = _config(encoder, length, **fields)
    if config is None:
        return None
    with torch.device("meta"):  # names and shapes only
        native = family(config)
    backbone: Any = native.base_model
    backbone.rotary_emb = type(backbone.rotary_emb)(config)  # needs real buffers, not meta tensors
    renamed = _renamed(trunk.state_dict(), backbone)
    prefix = "" if family is EuroBertModel else "model."

    def with_head(weights: Weights, scale: float = 1.0) -> Weights:
        scaled = {name: weight if scale == 1 else weight * scale for name, weight in head.items()}
        return {f"{prefix}{name}": weight for name, weight in weights.items()} | scaled

    if renamed is None or not _fits(with_head(renamed), native):
        return None
    for interleaved in (False, True):
        rewrite = partial(_rewritten, trunk=trunk, width=backbone.config.head_dim, interleaved=interleaved)
        if _computes_the_same(encoder, backbone, rewrite):
            return lambda: _filled(native, with_head(rewrite(renamed), scale))
    return None


def _own_family(model: Any) -> Any | None:
    """Convert a decoder to its own family's masked class; None if there is none or the weights do not fit."""
    family: Any = MODEL_FOR_MASKED_LM_MAPPING.get(type(model.config), None)
    if family is None or isinstance(model, family):
        return None
    config = copy.deepcopy(model.config)
    config.is_decoder = False
    with torch.device("meta"):
        masked = family(config)
    weights = model.state_dict()
    return _filled(masked, weights) if _fits(weights, masked) else None


def _shapes(weights: Weights) -> Shapes:
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def _fits(weights: Weights, model: Any) -> bool:
    """Return whether weights and model match by name and shape, allowing for missing biases."""
    shapes = _shapes(model.state_dict())
    return _shapes(_with_biases(weights, shapes)) == shapes


def _filled(model: Any, weights: Weights) -> Any:
    """Load weights into `model`, which is on the meta device."""
    weights = _with_biases(weights, _shapes(model.state_dict()))
    model.load_state_dict(
        {name: weight.detach().float().cpu() for name, weight in weights.items()}, assign=True
    )
    model.tie_weights()
    return model


def _with_biases(weights: Weights, shapes: Shapes) -> Weights:
    """Add zero biases for matrices without one: some families have biases on some matrices only."""
    missing = [name for name in shapes if name.endswith(".bias") and name not in weights]
    return weights | {name: torch.zeros(shapes[name]) for name in missing}


# ---------------------------------------------------------------- EuroBERT's notation


def _config(encoder: Encoder, length: int, **fields: Any) -> EuroBertConfig | None:
    trunk: Any = encoder.trunk
    config, weights = trunk.config, trunk.state_dict()
    values: dict[str, Any] = {name: getattr(config, name, None) for name in (*SIZES, *SETTINGS)}
    rope: Any = values["rope_parameters"]
    if any(value is None for value in values.values()) or any(
        isinstance(part, dict) for part in rope.values()
    ):
        return None  # a field has another name, or rope parameters differ between layers
    if any(value and _THRESHOLD.search(name) for name, value in config.to_dict().items()):
        return None  # clipping of large values would not show in the comparison
    # EuroBERT has no windows, so the models are equivalent only for texts within the narrowest one.
    reach = (narrowest(config) if encoder.windows else None) or math.inf
    if reach < length:
        return None
    values["max_position_embeddings"] = min(values["max_position_embeddings"], reach)
    values["vocab_size"] = trunk.get_input_embeddings().weight.shape[0]
    values["rms_norm_eps"] /= _embedding_factor(trunk) ** 2
    values |= {
        "num_key_value_heads": getattr(config, "num_key_value_heads", None),
        "head_dim": getattr(config, "head_dim", None),
        "hidden_act": getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", "silu"),
        "initializer_range": getattr(config, "initializer_range", None) or 0.02,
        "attention_bias": any(".self_attn." in name and name.endswith(".bias") for name in weights),
        "mlp_bias": any(".mlp." in name and name.endswith(".bias") for name in weights),
        "tie_word_embeddings": bool(getattr(config, "tie_word_embeddings", False)),
        "use_cache": False,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), None),
        "mask_token_id": 0,
    }
    try:
        with quietly():
            return EuroBertConfig(**(values | fields))
    except Exception:  # a value that the strict configuration rejects
        return None


def _renamed(weights: Weights, native: Any) -> Weights | None:
    """Return a backbone's weights under EuroBERT's names; None if names or shapes (except vocab size) do not fit."""
    expected = _shapes(native.state_dict())
    parts = dict(part for name, weight in weights.items() for part in _split(name, weight, expected))
    parts = _with_biases(parts, expected)
    shapes = _shapes(parts)
    if EMBEDDING in shapes:
        shapes[EMBEDDING] = (expected[EMBEDDING][0], *shapes[EMBEDDING][1:])
    return parts if shapes == expected else None


def _rewritten(weights: Weights, *, trunk: Any, width: int, interleaved: bool) -> Weights:
    """Rewrite weights under EuroBERT's names in EuroBERT's conventions; `width` is the head dimension.

    A factor on the embedding scales the whole residual stream, and the norms remove it again. So what is added to the
    stream is divided by it instead, and the embedding can stay tied to the head. `interleaved` says that rotary pairs
    are adjacent.
    """
    layer = trunk.layers[0]
    added = getattr(layer, "residual_multiplier", 1.0) / _embedding_factor(trunk)
    scores = getattr(layer.self_attn, "scaling", width**-0.5) * width**0.5
    factors = {"q_proj": scores, "o_proj": added, "down_proj": added}
    offset = _norm_offset(layer.input_layernorm)
    order = torch.arange(width).view(-1, 2).T.flatten()  # 0, 2, 4, … 1, 3, 5, …
    rewritten: Weights = {}
    for name, weight in weights.items():
        matrix = name.split(".")[-2]
        if interleaved and matrix in ("q_proj", "k_proj"):
            weight = weight.unflatten(0, (-1, width))[:, order].flatten(0, 1)
        factor = factors.get(matrix, 1.0)
        weight = weight if factor == 1 else weight * factor
        rewritten[name] = weight + offset if offset and "norm" in matrix else weight
    return rewritten


def _split(name: str, weight: Tensor, shapes: Shapes) -> list[tuple[str, Tensor]]:
    """Split a fused matrix into its parts; return any other weight unchanged."""
    for fused, matrices in FUSED.items():
        names = [name.replace(fused, matrix) for matrix in matrices]
        if f".{fused}." in name and all(part in shapes for part in names):
            rows = [shapes[part][0] for part in names]
            if sum(rows) == len(weight):
                return list(zip(names, weight.split(rows), strict=True))
    return [(name, weight)]


def _embedding_factor(trunk: Any) -> float:
    """Return the factor by which a family multiplies its embeddings."""
    factor = getattr(trunk.get_input_embeddings(), "scalar_embed_scale", None)
    return float(factor or getattr(trunk, "embedding_multiplier", None) or 1.0)


def _norm_offset(norm: Any) -> float:
    """Return the offset that a family adds to norm weights: 1 if zero weights leave a vector of ones unchanged."""
    zeros = torch.zeros_like(norm.weight)
    return float(functional_call(norm, {"weight": zeros}, torch.ones_like(zeros)).mean().round())


# ---------------------------------------------------------------- the same function


@torch.no_grad()
def _computes_the_same(encoder: Encoder, native: Any, rewrite: Callable[[Weights], Weights]) -> bool:
    """Return whether both models give the same hidden states with the same random weights."""
    trunk: Any = encoder.trunk
    longest = min(encoder.context, native.config.max_position_embeddings)
    count = min(PROBED, longest)
    near = torch.arange(count // 2)
    positions = torch.cat([near, torch.linspace(len(near), longest - 1, count - len(near)).long()])[None]
    ids, pattern = torch.arange(count)[None], AttentionPattern(causal=False)
    native.config._attn_implementation = NAME
    weights, other = _random_weights(trunk, count), Encoder(native, context=longest)
    embeddings = [model.get_input_embeddings() for model in (trunk, native)]
    padding, training = [embedding.padding_idx for embedding in embeddings], encoder.training
    try:
        for embedding in embeddings:
            embedding.padding_idx = None  # the random embedding has fewer rows than the vocabulary
        ours, theirs = (
            functional_call(
                reader.eval(),
                {f"trunk.{name}": tensor for name, tensor in tensors.items()},
                (ids, positions, pattern),
            )
            for reader, tensors in (
                (encoder, weights),
                (other, rewrite(_renamed(weights, native) or {})),
            )
        )
    except Exception:  # a forward that needs more than these weights
        return False
    finally:
        for embedding, index in zip(embeddings, padding, strict=True):
            embedding.padding_idx = index
        encoder.train(training)
    apart = (ours - theirs).norm(dim=-1) / ours.norm(dim=-1)
    return bool((apart <= TOLERANCE).all())


def _random_weights(trunk: Any, rows: int) -> Weights:
    """Return random weights for a backbone, the same for all layers, with `rows` embedding rows."""
    generator = torch.Generator().manual_seed(0)
    embedding = trunk.get_input_embeddings().weight
    by_role: Weights = {}
    weights: Weights = {}
    for name, parameter in trunk.named_parameters():
        role = re.sub(r"\d+", "", name)
        if role not in by_role:
            shape = (rows, *parameter.shape[1:]) if parameter is embedding else parameter.shape
            by_role[role] = torch.randn(shape, generator=generator)
            if parameter.ndim == 1:
                by_role[role] = 1 + 0.3 * by_role[role]
            elif parameter is not embedding:
                by_role[role] *= GAIN / math.sqrt(shape[-1])
        weights[name] = by_role[role]
    return weights
