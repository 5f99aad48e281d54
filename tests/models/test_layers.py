"""Layers that keep only their input give the same loss and the same gradients, whatever their family tells them."""

import copy

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from biphase.attention import NAME, pattern_of
from biphase.errors import ModelError
from biphase.models.backbone import LanguageModel, stack_of
from biphase.objectives import Batch
from biphase.randomness import salt

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 32,
}  # fmt: skip


def llama():
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def gpt2():
    """With dropout, which must fall alike both times."""
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=32, attn_pdrop=0.0)
    )


def bert():
    return BertForMaskedLM(BertConfig(**SHAPE, attention_probs_dropout_prob=0.0))


def opt():
    shape = {
        "vocab_size": 64,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    return OPTForCausalLM(OPTConfig(**shape, max_position_embeddings=32, word_embed_proj_dim=32))


def made(make):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = make()
    model.config._attn_implementation = NAME
    model.get_input_embeddings().padding_idx = None
    return LanguageModel(model).train()


def batch(*, causal):
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(4, 64, (2, 16), generator=draw)
    segments = (torch.arange(16) >= 9).long().expand(2, 16)
    at = torch.arange(0, 32, 3)
    positions = torch.cat([torch.arange(9), torch.arange(7)]).expand(2, 16)
    return Batch(ids, positions, segments, None, at, ids.flatten()[at], len(at), causal, torch.arange(2))


def learned(model, one):
    torch.manual_seed(salt(0, "dropout"))
    loss = model.loss_sum(one, pattern_of(one, varlen=False))
    loss.backward()
    return loss.detach(), [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("make", [llama, gpt2, bert, opt], ids=lambda make: make.__name__)
def test_computing_again_changes_nothing(make, causal):
    plain, again = made(make), made(make)
    assert plain.prepare(CPU, "fp32") == again.prepare(CPU, "fp32", recompute=True) == "plain"
    calls = []
    stack_of(again.model.base_model)[1][0].register_forward_pre_hook(lambda *_: calls.append(1))
    (loss, grads), (same, others) = learned(plain, batch(causal=causal)), learned(again, batch(causal=causal))
    assert len(calls) == 2, "once forward, once for the backward pass"
    assert torch.equal(loss, same)
    assert len(grads) == len(others)
    assert all(torch.equal(one, other) for one, other in zip(grads, others, strict=True))


def test_a_model_whose_layers_cannot_be_computed_again_is_refused():
    model = made(llama)
    model.model.base_model.supports_gradient_checkpointing = False
    with pytest.raises(ModelError, match="--recompute: the layers of LlamaModel"):
        model.prepare(CPU, "fp32", recompute=True)


@pytest.mark.parametrize("way", ["cut", "recompute"])
def test_eight_bits_are_refused_where_our_kernels_are_not_taken(way):
    with pytest.raises(ModelError, match="precision='fp8' cannot be had with --"):
        made(llama).prepare(CPU, "fp8", **{way: True})


def test_the_stack_is_the_longest_list():
    name, blocks = stack_of(made(bert).model)
    assert name == "bert.encoder.layer"
    assert len(blocks) == 3
    assert stack_of(copy.deepcopy(torch.nn.Linear(2, 2))) == ("", [])
