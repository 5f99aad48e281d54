"""The paper's own checkpoints, whose class is custom code on the hub, as transformers' EuroBERT.

The class (`SLModel`, model_type `sl_model`) is a Llama block without a causal mask: EuroBERT under another name. So
nothing of the repository is run: its config and its weights are mapped by name, and a name that means nothing here is
refused. Besides the names of the class, those of the code that trained the models are known (`blocks`, fused
`qkv_proj`, `fc_1`), since the converter between the two was never published.

Its direction (`is_causal`) is left out, because direction is an argument here; so is how it pools, because the heads
are ours, and they pool by the mean as the paper's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import EuroBertConfig, EuroBertForMaskedLM, GenerationConfig, PreTrainedConfig

from biphase.errors import ModelError, one_line

MODEL_TYPE = "sl_model"
HEAD = "lm_head.weight"
STORED = (torch.bfloat16, torch.float16, torch.float32)

# What the config says of the model. An absent field has the default of the published class, which is EuroBERT's.
SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps",
    "bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id", "tie_word_embeddings", "attention_bias",
    "attention_dropout", "mlp_bias",
)  # fmt: skip
ROTARY = ("rope_theta", "rope_scaling", "rope_parameters")
ROPE_BASE = 250_000.0  # where none is said; the one default that differs from EuroBERT's
# What says nothing of the numbers that come out of the trunk.
BESIDE = {
    "auto_map", "torch_dtype", "pretraining_tp", "is_causal", "is_decoder", "classifier_pooling", "retrieval_pooling",
    "bos_token", "eos_token", "pad_token", "mask_token",
}  # fmt: skip

# The names of the code that trained the models → EuroBERT's.
TRAINED_AS = {
    "embedding": "embed_tokens",
    "blocks": "layers",
    "final_layernorm": "norm",
    "attn": "self_attn",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "out_proj": "o_proj",
    "fc_1": "gate_proj",
    "fc_2": "up_proj",
    "proj": "down_proj",
}
FUSED = "qkv_proj"


def is_published(config: Mapping[str, Any]) -> bool:
    """Is this config.json of the paper's custom class?"""
    classes = config.get("auto_map")
    named = classes.get("AutoConfig") if isinstance(classes, Mapping) else None
    return config.get("model_type") == MODEL_TYPE or str(named).split(".")[-1] == "SLModelConfig"


def eurobert(
    config: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[EuroBertConfig, dict[str, Tensor]]:
    """A published model as EuroBERT: its config, and its weights in fp32 under the names of EuroBertForMaskedLM.

    The head may be absent, as in an export of the trunk alone; everything else must be there and fit.
    """
    native = _config(config)
    if native.num_hidden_layers > len(weights):  # before a model of that size is built to look at
        raise ModelError(
            f"the config says {native.num_hidden_layers:,} layers and there are {len(weights):,} weights; "
            "download the model again"
        )
    try:
        with torch.device("meta"):
            wanted = {
                name: tuple(one.shape) for name, one in EuroBertForMaskedLM(native).state_dict().items()
            }
    except Exception as wrong:  # sizes that do not go together fail in many ways
        raise _no_model(wrong) from None
    placed = _placed(native, weights, wanted)
    lacking = [name for name in wanted if name not in placed and name != HEAD]
    if lacking:
        raise ModelError(
            f"{len(lacking)} of the model's weights are missing, {lacking[0]} among them; download the model again"
        )
    if native.tie_word_embeddings and HEAD in placed:
        if not torch.equal(placed[HEAD], placed["model.embed_tokens.weight"]):
            raise ModelError(
                f"the config ties the head to the embedding and {HEAD} is another; set tie_word_embeddings to false"
            )
        placed[HEAD] = placed["model.embed_tokens.weight"]
    return native, placed


def _config(config: Mapping[str, Any]) -> EuroBertConfig:
    """The same shape in EuroBERT's words."""
    generic = PreTrainedConfig().to_dict() | GenerationConfig().to_dict()
    for name, value in config.items():
        known = name in SHAPE or name in ROTARY or name in BESIDE or name in generic or name.startswith("_")
        if value and not known:  # what is switched off changes nothing
            raise ModelError(
                f"the config's field {name!r} is none of the published models', so what it does here is unknown; "
                "remove it if it changes nothing"
            )
    try:
        rotary = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        rotary.setdefault("rope_theta", config.get("rope_theta") or ROPE_BASE)
        rotary.setdefault("rope_type", rotary.pop("type", "default"))
        shape = {name: config[name] for name in SHAPE if name in config}
        return EuroBertConfig(**shape, rope_parameters=rotary, classifier_pooling="mean", use_cache=False)
    except Exception as wrong:  # transformers checks kinds and values, and raises many kinds itself
        raise _no_model(wrong) from None


def _no_model(wrong: Exception) -> ModelError:
    return ModelError(f"the config describes no model ({one_line(wrong)}); download its config.json again")


def _placed(
    native: EuroBertConfig, weights: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Every weight at its place in EuroBERT, in fp32."""
    placed: dict[str, Tensor] = {}
    for said, tensor in weights.items():
        if tensor.dtype not in STORED:
            raise ModelError(
                f"weight {said!r} is stored as {str(tensor.dtype).removeprefix('torch.')}; "
                "only bf16, fp16 and fp32 are read: give the model as it was published"
            )
        for name, part in _parts(native, said, tensor):
            if name not in wanted:
                raise ModelError(
                    f"weight {said!r} has no place in EuroBERT; give a checkpoint of the paper, without other heads"
                )
            if name in placed:
                raise ModelError(f"weight {said!r} is there twice, under two names; remove one of them")
            if tuple(part.shape) != wanted[name]:
                raise ModelError(
                    f"weight {said!r} gives {name} the shape {list(part.shape)}, and the config asks for "
                    f"{list(wanted[name])}; look at config.json"
                )
            placed[name] = part.float()
    return placed


def _parts(native: EuroBertConfig, said: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """A weight with its name in EuroBERT; queries, keys and values that are one matrix there are three here."""
    words = said.removeprefix("model.").split(".")
    words = [TRAINED_AS.get(word, word) for word in words]
    name = ".".join(words if words[0] == "lm_head" else ["model", *words])
    if FUSED not in words:
        return [(name, tensor)]
    shape: Any = native  # transformers fills in what may be None in its annotations
    heads, kv_heads, width = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    rows = [heads * width, kv_heads * width, kv_heads * width]
    if tensor.ndim == 0 or tensor.shape[0] != sum(rows):
        raise ModelError(
            f"weight {said!r} has the shape {list(tensor.shape)}, and the config asks for {sum(rows)} rows: "
            f"{rows[0]} of queries, {rows[1]} of keys and of values; look at config.json"
        )
    names = [name.replace(FUSED, one) for one in ("q_proj", "k_proj", "v_proj")]
    return list(zip(names, tensor.split(rows), strict=True))
