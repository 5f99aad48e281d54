"""A trunk of the usual shape as transformers' own EuroBERT: an encoder class with a masked head and task heads.

No architecture is named: what decides is whether every weight has its place there by name and shape. Whether it also
means the same there is seen when the folder is read again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import EuroBertConfig, EuroBertModel

from biphase.models.windows import narrowest

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SETTINGS = ("max_position_embeddings", "rms_norm_eps", "rope_parameters")


def as_eurobert(trunk: Any, family: Any, head: dict[str, Tensor], **fields: Any) -> Any | None:
    """`family` (a class of EuroBERT's) with the weights of a trunk and of a head; None where they do not fit."""
    weights = dict(trunk.state_dict())
    config = _config(trunk.config, weights, **fields)
    if config is None:
        return None
    with torch.device("meta"):  # names and shapes only
        made = family(config)
    if family is not EuroBertModel:
        weights = {f"model.{name}": weight for name, weight in weights.items()} | head
    wanted = made.state_dict()
    for name, place in wanted.items():
        if name not in weights and name.endswith(".bias"):  # a family with biases on some matrices only
            weights[name] = torch.zeros(place.shape)
    shapes = {name: tuple(one.shape) for name, one in weights.items()}
    if shapes != {name: tuple(one.shape) for name, one in wanted.items()}:
        return None
    made.load_state_dict({name: one.detach().float().cpu() for name, one in weights.items()}, assign=True)
    made.tie_weights()
    return made


def _config(config: Any, weights: dict[str, Tensor], **fields: Any) -> EuroBertConfig | None:
    said: dict[str, Any] = {name: getattr(config, name, None) for name in (*SIZES, *SETTINGS)}
    rope: Any = said["rope_parameters"]
    if any(value is None for value in said.values()) or any(isinstance(one, dict) for one in rope.values()):
        return None  # a field is called otherwise, or positions differ from layer to layer
    # It has no windows: it is the same model only as far as the narrowest of them reaches.
    said["max_position_embeddings"] = min(said["max_position_embeddings"], narrowest(config) or math.inf)
    said["vocab_size"] = len(weights["embed_tokens.weight"]) if "embed_tokens.weight" in weights else 0
    try:
        return EuroBertConfig(
            **said,
            num_key_value_heads=getattr(config, "num_key_value_heads", None),
            head_dim=getattr(config, "head_dim", None),
            hidden_act=getattr(config, "hidden_act", "silu"),
            initializer_range=getattr(config, "initializer_range", None) or 0.02,
            tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
            attention_bias=any(".self_attn." in name and name.endswith(".bias") for name in weights),
            mlp_bias=any(".mlp." in name and name.endswith(".bias") for name in weights),
            use_cache=False,
            **fields,
        )
    except Exception:  # a value that the strict configuration does not take: another shape
        return None
