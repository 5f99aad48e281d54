"""Tiny models of transformers' families by name, with random weights from a fixed seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from biphase.attention import NAME
from biphase.errors import ModelError
from biphase.models.backbone import LanguageModel

VOCAB, CONTEXT = 64, 64
PLAIN = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": CONTEXT,
}  # fmt: skip
# Without a pad token, or torch would keep its embedding at zero.
DECODER = {
    **PLAIN,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
WITHOUT_GROUPS = {name: value for name, value in DECODER.items() if name != "num_key_value_heads"}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
GPT = {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "bert": PLAIN,
    "roberta": PLAIN | {"type_vocab_size": 1},
    "distilbert": {
        "vocab_size": VOCAB, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48,
        "max_position_embeddings": CONTEXT,
    },
    "modernbert": PLAIN | ENDS,
    "eurobert": DECODER | {"mask_token_id": 3},
    "gpt2": GPT,
    "gptj": GPT | {"rotary_dim": 4},
    "gpt_neox": WITHOUT_GROUPS,
    "phi": DECODER,
    "gemma2": DECODER | {"head_dim": 8},
    "gemma3_text": DECODER | {"head_dim": 8},
    "qwen3": DECODER | {"head_dim": 8},
    "opt": {
        "vocab_size": VOCAB, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT, "word_embed_proj_dim": 32, "bos_token_id": 0, "eos_token_id": 0,
        "pad_token_id": None,
    },
}  # fmt: skip
MASKED = ("bert", "roberta", "distilbert", "modernbert", "eurobert")


def config(family: str, **fields: Any) -> Any:
    return AutoConfig.for_model(family, **{**FIELDS.get(family, DECODER), **fields})


def _from_config(auto: Any, family: str, seed: int, fields: dict[str, Any]) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return auto.from_config(config(family, **fields), attn_implementation="eager").float()


def with_head(family: str, *, seed: int = 0, **fields: Any) -> Any:
    """A model with its language-model head, as transformers has it."""
    auto = AutoModelForMaskedLM if family in MASKED else AutoModelForCausalLM
    return _from_config(auto, family, seed, fields)


def trunk(family: str, *, seed: int = 0, **fields: Any) -> Any:
    """A model without its head, as transformers has it."""
    return _from_config(AutoModel, family, seed, fields)


def language_model(family: str, *, windows: bool = True, **fields: Any) -> LanguageModel:
    """A model with our attention, in evaluation mode."""
    return ours(with_head(family, **fields), windows=windows)


def ours(model: Any, *, windows: bool = True) -> LanguageModel:
    model.set_attn_implementation(NAME)
    return LanguageModel(model.eval(), windows=windows)


def stirred(model: Any, by: float = 0.2, *, seed: int = 0) -> Any:
    """Add noise to all weights, in place: then none is 0 or 1, and biases and norms count too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * by)
    return model


def refused(call, *args, error=ModelError, **options):
    """The message of a refusal, which is one line."""
    with pytest.raises(error) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
