"""Tiny random models of every family: what a real checkpoint has, small.

A configuration is shrunk by the names of its fields. The kinds of layers it has by default all occur: windows that
are shorter than the texts of the tests beside layers that see everything. No weight is 0 or 1, so that every
parameter and every argument of a family shows in what it computes.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB, CONTEXT, WINDOW = 320, 64, 6
LARGEST = 3_000_000  # parameters: what a family keeps at its own size makes it unfit for tests
STIR = 0.15  # how far each weight is moved

MASKED = ("bert", "roberta", "modernbert", "eurobert")

SMALL: dict[str, Any] = {
    # how wide
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_dim"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "input_embedding_size", "lru_width", "attention_hidden_size"), 32),
    **dict.fromkeys(("embedding_size", "output_embedding_size"), 24),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "dff"), 48),
    **dict.fromkeys(("d_inner", "dim_ff", "feed_forward_size", "ffn_hidden_size", "dense_intermediate_size"), 48),
    **dict.fromkeys(("intermediate_size_mlp", "shared_intermediate_size"), 48),
    # how deep
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    "num_layers_per_stack": 2,
    # how many heads
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "dim_head", "d_head", "attention_head_size"), 8),
    **dict.fromkeys(("v_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("rotary_dim", "qk_rope_head_dim"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 12),
    # how long
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), CONTEXT),
    **dict.fromkeys(("original_max_position_embeddings", "max_target_positions", "context_length"), CONTEXT),
    **dict.fromkeys(("model_max_length",), CONTEXT),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size"), WINDOW),
    **dict.fromkeys(("sliding_window_size", "attention_chunk_size"), WINDOW),
    "local_attention": 2 * WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 1,
    # which words
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0),
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
    "mask_token_id": 1,
    "pad_token_id": 2,
    # factors that many families leave at 1, where nobody would see them ignored
    "attention_multiplier": 0.4,
    "embedding_multiplier": 1.7,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.5,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 4.0,
    "query_pre_attn_scalar": 12,
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    "first_k_dense_replace": 1,
    # recurrences
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 4),
    # indexes of sparse attention
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 4,
}  # fmt: skip

# What shrinking by the names of fields cannot know of a family.
PICTURES, SOUND = "it reads pictures too", "it reads or speaks sound"
NOT_TEXT: dict[str, str] = {
    "emu3": PICTURES, "fuyu": PICTURES, "git": PICTURES, "got_ocr2": PICTURES, "mllama": PICTURES,
    **{name: f"{PICTURES}; its text part is {name}_text" for name in ("gemma3", "llama4", "qwen3_5", "qwen3_5_moe")},
    **{name: f"{PICTURES}; its text part is {name}_text" for name in ("gemma3n", "gemma4", "gemma4_unified", "qwen4_exp")},
    "phi4_multimodal": "it reads pictures and sound too",
    **dict.fromkeys(("moss_transcribe_diarize", "musicgen", "musicgen_melody"), SOUND),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "it drafts from the hidden states of another model"),
    "blt": "it reads bytes in patches that a second model cuts",
}  # fmt: skip

ATTENTION_AND_CONVOLUTION = ["conv", "full_attention"]
BOTH = ["sliding_attention", "full_attention"]
# Heads share one latent key; the width of a head is that of its rotary part.
LATENT = {"head_dim": 4, "num_key_value_heads": 4}

# `...` leaves a field as the family has it.
OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32"), LATENT),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "kimi_linear", "longcat_flash", "minicpm3"), LATENT),
    "bamba": {"attn_layer_indices": [1], "layer_types": ..., "layers_block_type": ...},
    "cohere_compass_text": {"logit_scale": 0.3, "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base, "mrope_section": [1, 1, 2]} for kind, base in zip(BOTH, (1e4, 1e5), strict=True)}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}, "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2}},
    "doge": {"num_experts": ...},
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {"num_hidden_layers": 4, "layer_types": BOTH * 2, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "laurel_rank": 4},
    "gemma4_text": {"hidden_size_per_layer_input": 8, "num_experts": ..., "global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "layer_types": ..., "layers_block_type": ...},
    "lfm2": {"layer_types": ATTENTION_AND_CONVOLUTION},
    "lfm2_moe": {"layer_types": ATTENTION_AND_CONVOLUTION, "num_dense_layers": 1},
    "mamba2": {"head_dim": 16, "num_heads": 4, "n_groups": 1},
    "moshi": {"sliding_window": ...},  # which its attention does not look at
    "nemotron_h": {"mamba_head_dim": 16, "n_groups": 1},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 2, "hc_lowrank": 4},
    "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16], "lsh_attn_chunk_length": 8, "local_attn_chunk_length": 8, "num_buckets": 4},
    "roc_bert": {"pronunciation_vocab_size": 16, "shape_vocab_size": 16, "pronunciation_embed_dim": 8, "shape_embed_dim": 8},
    "xlm": {"causal": True, "mask_token_id": ..., "pad_token_id": ...},
    "xmod": {"default_language": "en_XX"},
    "youtu": {**LATENT, "pad_token_id": None},  # loading zeroes a pad token's embedding, whatever the file says
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16, "kv_channels": 8, "mamba_headdim": 16, "n_mamba_heads": 4},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 8},
}  # fmt: skip

KINDS = ("layer_types", "layers_block_type", "mlp_layer_types")  # one entry for each layer


class CannotBuild(Exception):
    """No tiny model of this family exists; the text says why."""


@dataclass(frozen=True)
class Family:
    """A model type as one of transformers' mappings makes it."""

    model_type: str
    masked: bool = False  # as a masked language model

    def __str__(self) -> str:
        return f"{self.model_type} (masked)" if self.masked else self.model_type


FAMILIES = (
    *(Family(name) for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)),
    *(Family(name, masked=True) for name in MASKED),
)


def small_config(family: Family) -> PreTrainedConfig:
    """Its configuration, small."""
    name = family.model_type
    if name in NOT_TEXT:
        raise CannotBuild(NOT_TEXT[name])
    try:
        return _shrunk(family)
    except Exception as wrong:  # configurations check themselves, each in its own way
        raise CannotBuild(f"its configuration cannot be made small ({_first_line(wrong)})") from wrong


def build(family: Family) -> Any:
    """The model itself, with weights that are a function of the family's name alone."""
    config = small_config(family)
    make = AutoModelForMaskedLM if family.masked else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            size = sum(weight.numel() for weight in make.from_config(config).parameters())
        if size > LARGEST:
            raise CannotBuild(f"{size:,} parameters at its smallest")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(str(family).encode()))
            model = make.from_config(config, dtype=torch.float32)
            _stir(model)
    except CannotBuild:
        raise
    except Exception as wrong:  # a model refuses sizes in its own way
        raise CannotBuild(f"no small one can be built ({_first_line(wrong)})") from wrong
    return model.eval()


def reaches(config: PreTrainedConfig) -> list[int | None]:
    """How far each layer of a tiny model sees, in tokens; None for as far as the text goes."""
    fields = config.to_dict()
    kinds = fields.get("layer_types")
    if kinds is None:  # a window without a list of layers is every layer's
        return [WINDOW - 1 if fields.get("sliding_window") == WINDOW else None] * config.num_hidden_layers
    window = WINDOW if fields.get("local_attention") and config.model_type == "modernbert" else WINDOW - 1
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _shrunk(family: Family) -> PreTrainedConfig:
    kind = CONFIG_MAPPING[family.model_type]
    usual = kind().to_dict()
    small = {field: value for field, value in SMALL.items() if field in usual}
    if "is_decoder" in usual:
        small["is_decoder"] = not family.masked
    small |= _layers(usual) | OVERRIDES.get(family.model_type, {})
    return kind(**{field: value for field, value in small.items() if value is not ...})


def _layers(usual: dict[str, Any]) -> dict[str, Any]:
    """Every kind of layer once, at least two layers; sliding ones where a family can have them."""
    lists = {field: usual[field] for field in KINDS if isinstance(usual.get(field), list)}
    if not lists:
        return {}
    if "sliding_window" in usual and set(lists.get("layer_types", ())) == {"full_attention"}:
        lists["layer_types"] = ["sliding_attention", "full_attention"]
    kinds = {field: list(dict.fromkeys(every)) for field, every in lists.items()}
    depth = max(2, *(len(every) for every in kinds.values()))
    layers: dict[str, Any] = {field: (every * depth)[:depth] for field, every in kinds.items()}
    return {"num_hidden_layers": depth, **layers}


def _stir(model: Any) -> None:
    """Move every weight, those that begin as 0 or 1 too."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * STIR)


def _first_line(wrong: Exception) -> str:
    lines = [line.strip() for line in str(wrong).splitlines() if line.strip()]
    return f"{type(wrong).__name__}: {(lines or [''])[0][:160]}"
