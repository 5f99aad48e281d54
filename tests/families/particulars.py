"""What shrinking by the names of fields cannot know of a family."""

from __future__ import annotations

from typing import Any

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
