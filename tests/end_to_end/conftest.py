"""Tiny untrained decoders in folders, as transformers writes them and as a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

END = "<|end_of_text|>"


@pytest.fixture(scope="session")
def tokenizer_json(shards: Path) -> dict[str, Any]:
    """The tokenizer.json of the tiny corpus, without a mask token: its place is a word that never occurs."""
    made = json.loads((shards / "tokenizer" / "tokenizer.json").read_text())
    made["added_tokens"] = [one for one in made["added_tokens"] if one["content"] != "<|mask|>"]
    made["model"]["vocab"]["spare"] = made["model"]["vocab"].pop("<|mask|>")
    return made


@pytest.fixture(scope="session")
def decoder(tokenizer_json, tmp_path_factory: pytest.TempPathFactory):
    """Makes a folder with a decoder: `decoder("Mistral", sliding_window=4)`."""
    from families import tiny
    from transformers.utils import logging

    logging.disable_progress_bar()

    def make(family: str = "Llama", **fields) -> Path:
        folder = tmp_path_factory.mktemp("decoders") / family.lower()
        tokens = {"vocab_size": 320, "bos_token_id": 0, "eos_token_id": 0}
        tiny.with_head(family.lower(), seed=1, **tokens, **fields).save_pretrained(folder)
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json))
        named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
        (folder / "tokenizer_config.json").write_text(json.dumps(named))
        return folder

    return make


@pytest.fixture(scope="session")
def llama(decoder) -> Path:
    return decoder()


@pytest.fixture(scope="session")
def gguf_folder(llama: Path, tokenizer_json, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same Llama as a GGUF file and nothing else."""
    import gguf
    from safetensors.torch import load_file

    folder = tmp_path_factory.mktemp("gguf")
    shape = json.loads((llama / "config.json").read_text())
    file = gguf.GGUFWriter(str(folder / "tiny.gguf"), "llama")
    file.add_block_count(shape["num_hidden_layers"])
    file.add_context_length(shape["max_position_embeddings"])
    file.add_embedding_length(shape["hidden_size"])
    file.add_feed_forward_length(shape["intermediate_size"])
    file.add_head_count(shape["num_attention_heads"])
    file.add_head_count_kv(shape["num_key_value_heads"])
    file.add_layer_norm_rms_eps(1e-6)
    file.add_rope_freq_base(10_000.0)
    file.add_rope_dimension_count(shape["hidden_size"] // shape["num_attention_heads"])
    file.add_vocab_size(shape["vocab_size"])
    special = {one["id"] for one in tokenizer_json["added_tokens"]}
    known = {number: word for word, number in tokenizer_json["model"]["vocab"].items()}
    known |= {one["id"]: one["content"] for one in tokenizer_json["added_tokens"]}
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("llama-bpe")
    file.add_token_list([known[number] for number in range(len(known))])
    file.add_token_types([3 if number in special else 1 for number in range(len(known))])
    file.add_token_merges([" ".join(pair) for pair in tokenizer_json["model"]["merges"]])
    file.add_bos_token_id(0)
    file.add_eos_token_id(0)
    for name, value in load_file(llama / "model.safetensors").items():
        file.add_tensor(_gguf_name(name), _turned(name, value, shape).numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return folder


PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    for ours, theirs in PARTS.items():
        name = name.replace(ours, theirs)
    return name


def _turned(name: str, value: Any, shape: dict[str, Any]) -> Any:
    """GGUF holds the two halves of a rotation side by side."""
    if "q_proj" in name or "k_proj" in name:
        heads = shape["num_attention_heads"] if "q_proj" in name else shape["num_key_value_heads"]
        value = value.view(heads, 2, -1, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
    return value.contiguous()
