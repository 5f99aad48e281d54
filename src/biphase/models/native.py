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
from collections.abc import Callable, Iterator, Mapping
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
ALIKE = (
    1e-3  # relative tolerance per vector; one layer of 36 without rotation makes a difference of 0.02 or more
)
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
EMBEDDING = "embed_tokens.weight"
_THRESHOLD = re.compile("clip|limit|cap(ping)?$")

Weights = dict[str, Tensor]


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
    head = {f"lm_head.{name}": one for name, one in last.named_parameters()}
    native = as_eurobert(model.reader[0], length, EuroBertForMaskedLM, head, scale=output.scale, **fields)
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
        made = family(config)
    inside: Any = made.base_model
    inside.rotary_emb = type(inside.rotary_emb)(config)  # needs real buffers, not meta tensors
    placed = _placed(trunk.state_dict(), inside)
    prefix = "" if family is EuroBertModel else "model."

    def all_of(weights: Weights, scale: float = 1.0) -> Weights:
        scaled = {name: one if scale == 1 else one * scale for name, one in head.items()}
        return {f"{prefix}{name}": one for name, one in weights.items()} | scaled

    if placed is None or not _fits(all_of(placed), made):
        return None
    for interleaved in (False, True):
        rewrite = partial(_rewritten, trunk=trunk, width=inside.config.head_dim, interleaved=interleaved)
        if _computes_the_same(encoder, inside, rewrite):
            return lambda: _filled(made, all_of(rewrite(placed), scale))
    return None


def _own_family(model: Any) -> Any | None:
    """Convert a decoder to its own family's masked class; None if there is none or the weights do not fit."""
    family: Any = MODEL_FOR_MASKED_LM_MAPPING.get(type(model.config), None)
    if family is None or isinstance(model, family):
        return None
    config = copy.deepcopy(model.config)
    config.is_decoder = False
    with torch.device("meta"):
        made = family(config)
    weights = model.state_dict()
    return _filled(made, weights) if _fits(weights, made) else None


def _fits(weights: Weights, made: Any) -> bool:
    """Return whether weights and model match by name and shape, allowing for missing biases."""
    wanted = {name: tuple(one.shape) for name, one in made.state_dict().items()}
    return {name: tuple(one.shape) for name, one in _with_biases(weights, wanted).items()} == wanted


def _filled(made: Any, weights: Weights) -> Any:
    """Load weights into `made`, a model on the meta device."""
    weights = _with_biases(weights, {name: tuple(one.shape) for name, one in made.state_dict().items()})
    made.load_state_dict({name: one.detach().float().cpu() for name, one in weights.items()}, assign=True)
    made.tie_weights()
    return made


def _with_biases(weights: Weights, wanted: Mapping[str, tuple[int, ...]]) -> Weights:
    """Add zero biases for matrices without one: some families have biases on some matrices only."""
    lacking = [name for name in wanted if name.endswith(".bias") and name not in weights]
    return weights | {name: torch.zeros(wanted[name]) for name in lacking}


# ---------------------------------------------------------------- EuroBERT's notation


def _config(encoder: Encoder, length: int, **fields: Any) -> EuroBertConfig | None:
    trunk: Any = encoder.trunk
    config, weights = trunk.config, trunk.state_dict()
    said: dict[str, Any] = {name: getattr(config, name, None) for name in (*SIZES, *SETTINGS)}
    rope: Any = said["rope_parameters"]
    if any(value is None for value in said.values()) or any(isinstance(one, dict) for one in rope.values()):
        return None  # a field has another name, or rope parameters differ between layers
    if any(value and _THRESHOLD.search(name) for name, value in config.to_dict().items()):
        return None  # clipping of large values would not show in the comparison
    # EuroBERT has no windows, so the models are equivalent only for texts within the narrowest one.
    reach = (narrowest(config) if encoder.windows else None) or math.inf
    if reach < length:
        return None
    said["max_position_embeddings"] = min(said["max_position_embeddings"], reach)
    said["vocab_size"] = trunk.get_input_embeddings().weight.shape[0]
    said["rms_norm_eps"] /= _embedding_factor(trunk) ** 2
    said |= {
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
            return EuroBertConfig(**(said | fields))
    except Exception:  # a value that the strict configuration rejects
        return None


def _placed(weights: Weights, native: Any) -> Weights | None:
    """Return a backbone's weights under EuroBERT's names; None if names or shapes (except vocab size) do not fit."""
    wanted = {name: tuple(one.shape) for name, one in native.state_dict().items()}
    parts = {place: part for name, one in weights.items() for place, part in _split(name, one, wanted)}
    parts = _with_biases(parts, wanted)
    fits = {name: tuple(one.shape) for name, one in parts.items()}
    if EMBEDDING in fits:
        fits[EMBEDDING] = (wanted[EMBEDDING][0], *fits[EMBEDDING][1:])
    return parts if fits == wanted else None


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
    made: Weights = {}
    for name, part in weights.items():
        matrix = name.split(".")[-2]
        if interleaved and matrix in ("q_proj", "k_proj"):
            part = part.unflatten(0, (-1, width))[:, order].flatten(0, 1)
        factor = factors.get(matrix, 1.0)
        part = part if factor == 1 else part * factor
        made[name] = part + offset if offset and "norm" in matrix else part
    return made


def _split(name: str, weight: Tensor, wanted: Mapping[str, tuple[int, ...]]) -> list[tuple[str, Tensor]]:
    """Split a fused matrix into its parts; return any other weight unchanged."""
    for fused, matrices in FUSED.items():
        places = [name.replace(fused, one) for one in matrices]
        if f".{fused}." in name and all(place in wanted for place in places):
            rows = [wanted[place][0] for place in places]
            if sum(rows) == len(weight):
                return list(zip(places, weight.split(rows), strict=True))
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
    theirs = Encoder(native, context=longest)
    drawn = _drawn(trunk, count)
    embeddings = [one.get_input_embeddings() for one in (trunk, native)]
    padding, training = [one.padding_idx for one in embeddings], encoder.training
    try:
        for one in embeddings:
            one.padding_idx = None  # the random embedding has fewer rows than the vocabulary
        states = [
            functional_call(
                one.eval(),
                {f"trunk.{name}": weight for name, weight in some.items()},
                (ids, positions, pattern),
            )
            for one, some in ((encoder, drawn), (theirs, rewrite(_placed(drawn, native) or {})))
        ]
    except Exception:  # a forward that needs more than these weights
        return False
    finally:
        for one, number in zip(embeddings, padding, strict=True):
            one.padding_idx = number
        encoder.train(training)
    ours, others = states
    apart = (ours - others).norm(dim=-1) / ours.norm(dim=-1)
    return bool((apart <= ALIKE).all())


def _drawn(trunk: Any, rows: int) -> Weights:
    """Return random weights for a backbone, the same for all layers, with `rows` embedding rows."""
    draw, made = torch.Generator().manual_seed(0), {}
    embedding = trunk.get_input_embeddings().weight
    drawn: Weights = {}
    for name, one in trunk.named_parameters():
        role = re.sub(r"\d+", "", name)
        if role not in made:
            shape = (rows, *one.shape[1:]) if one is embedding else one.shape
            made[role] = torch.randn(shape, generator=draw)
            if one.ndim == 1:
                made[role] = 1 + 0.3 * made[role]
            elif one is not embedding:
                made[role] *= GAIN / math.sqrt(shape[-1])
        drawn[name] = made[role]
    return drawn
