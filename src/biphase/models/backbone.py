"""Backbones are transformers' own classes; the attention, the loss and the direction are ours.

`LanguageModel` is a thin view of such a model: the trunk gives hidden states, the head is one matrix that runs
on labelled positions only. The same weights serve causal and masked training, import and export.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    EuroBertConfig,
    EuroBertForMaskedLM,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING
from transformers.utils.logging import disable_progress_bar

from biphase.batch import Batch
from biphase.errors import ModelError
from biphase.loss import cross_entropy_sum
from biphase.models.attention import NAME, Sight, without_attention_dropout
from biphase.randomness import salt
from biphase.specs import Hub, Size


class LanguageModel(nn.Module):
    """A transformers model as trunk and head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.trunk = [model.base_model]  # in a list: a second name for the same weights, not a second module
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or head.bias is not None:
            raise ModelError(
                f"{type(model).__name__} has no plain linear head without bias; such models are not supported yet"
            )

    @property
    def head(self) -> Tensor:
        return self.model.get_output_embeddings().weight

    def compile_trunk(self) -> None:
        """Compile the layers. Shapes are fixed by the data: one graph per direction, each with and without gradients."""
        # All models of a process share dynamo's limit of graphs per function, and graphs are used again by the next
        # model of the same shape. Past the limit compiled code would silently become eager: so raise it, and say so.
        dynamo: Any = torch._dynamo.config
        dynamo.recompile_limit = 64
        dynamo.fail_on_recompile_limit_hit = True
        self.trunk = [torch.compile(self.model.base_model, dynamic=False)]

    def hidden(self, ids: Tensor, positions: Tensor, sight: Sight) -> Tensor:
        """(B, T) → (B, T, d)"""
        return self.trunk[0](
            input_ids=ids, position_ids=positions, use_cache=False, sight=sight
        ).last_hidden_state

    def forward(
        self, ids: Tensor, positions: Tensor, sight: Sight, label_at: Tensor, labels: Tensor
    ) -> Tensor:
        """The sum of the losses at the labelled positions."""
        hidden = self.hidden(ids, positions, sight).flatten(0, 1)
        return cross_entropy_sum(hidden[label_at], self.head, labels)

    def loss_sum(self, batch: Batch, sight: Sight) -> Tensor:
        return self(batch.ids, batch.positions, sight, batch.label_at, batch.labels)


def from_scratch(size: Size, *, vocab: int, mask_id: int, length: int, seed: int) -> LanguageModel:
    """A new model of `size`, its weights a function of the seed alone (drawn on the CPU, in fp32)."""
    config = EuroBertConfig(
        vocab_size=vocab,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=length,
        initializer_range=size.init_std,
        rms_norm_eps=size.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": size.rope_base},
        tie_word_embeddings=size.tied,
        # With a pad token, torch would freeze its embedding at zero, and the paper's pad token is the end token.
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        mask_token_id=mask_id,
    )
    config._attn_implementation = NAME
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(salt(seed, "weights"))
        return LanguageModel(EuroBertForMaskedLM(config).float())


def from_hub(hub: Hub, *, vocab: int, length: int, attention_dropout: bool = True) -> LanguageModel:
    """An existing model, in fp32, with our attention. A vocabulary that grew gets the mean embedding."""
    if hub.local:  # a bar is for downloads; files here are read in a moment
        disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(**hub.address, trust_remote_code=False)
        if not attention_dropout:
            without_attention_dropout(config)
        masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING
        family = AutoModelForMaskedLM if masked else AutoModelForCausalLM
        model = family.from_pretrained(
            **hub.address, config=config, attn_implementation=NAME, dtype=torch.float32, use_safetensors=True
        )
    except (OSError, ValueError) as wrong:
        first = str(wrong).strip().splitlines()[0]
        raise ModelError(
            f"{hub.source} cannot be loaded: {first}; check the name, or give a local folder"
        ) from None
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest and length > longest:
        raise ModelError(
            f"{hub.source} reads at most {longest:,} tokens, rows have {length:,}; say packing=Chunks({longest})"
        )
    # A pad token's embedding would get no gradient, and the pad token is often the end token.
    embedding: Any = model.get_input_embeddings()
    embedding.padding_idx = None
    _grow(model, vocab)
    return LanguageModel(model)


def _grow(model: Any, vocab: int) -> None:
    """Make room for added tokens, each the exact mean of the others: no chance, so every process agrees."""
    had = model.get_input_embeddings().weight.shape[0]
    if vocab <= had:
        return
    model.resize_token_embeddings(vocab, mean_resizing=False)
    with torch.no_grad():
        for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            weight[had:] = weight[:had].mean(0)
