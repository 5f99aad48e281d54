"""Tiny untrained decoders in folders, as transformers writes them and as a GGUF file; and the verbs in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
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
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()

    def make(family: str = "Llama", **fields) -> Path:
        folder = tmp_path_factory.mktemp("decoders") / family.lower()
        config = getattr(transformers, f"{family}Config")(**(SHAPE | fields))
        with torch.random.fork_rng():
            torch.manual_seed(1)
            getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
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
    file = gguf.GGUFWriter(str(folder / "tiny.gguf"), "llama")
    file.add_block_count(SHAPE["num_hidden_layers"])
    file.add_context_length(SHAPE["max_position_embeddings"])
    file.add_embedding_length(SHAPE["hidden_size"])
    file.add_feed_forward_length(SHAPE["intermediate_size"])
    file.add_head_count(SHAPE["num_attention_heads"])
    file.add_head_count_kv(SHAPE["num_key_value_heads"])
    file.add_layer_norm_rms_eps(1e-6)
    file.add_rope_freq_base(10_000.0)
    file.add_rope_dimension_count(SHAPE["hidden_size"] // SHAPE["num_attention_heads"])
    file.add_vocab_size(SHAPE["vocab_size"])
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
        file.add_tensor(_gguf_name(name), _turned(name, value).numpy())
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


def _turned(name: str, value: Any) -> Any:
    """GGUF holds the two halves of a rotation side by side."""
    if "q_proj" in name or "k_proj" in name:
        heads = SHAPE["num_attention_heads"] if "q_proj" in name else SHAPE["num_key_value_heads"]
        value = value.view(heads, 2, -1, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
    return value.contiguous()
