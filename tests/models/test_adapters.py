"""LoRA: only its small matrices learn, and merged they give what they gave beside the model."""

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from biphase.attention import NAME, AttentionPattern
from biphase.errors import ModelError
from biphase.models.backbone import LanguageModel, add_adapter, freeze_embeddings, merge_adapter
from biphase.specs import LoRA

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 40,
}  # fmt: skip
NO_ENDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def llama(*, tied=False):
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **NO_ENDS, tie_word_embeddings=tied))


def gpt2():
    """Its matrices are kept the other way round, and its head is its embedding."""
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40}
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, bos_token_id=0, eos_token_id=0, **shape))


def bert():
    """Its head has a layer of its own, which is not the trunk's."""
    return BertForMaskedLM(BertConfig(**SHAPE))


EVERY = pytest.mark.parametrize("make", [llama, gpt2, bert], ids=lambda make: make.__name__)


def made(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
    model.set_attn_implementation(NAME)
    return LanguageModel(model.eval())


@torch.no_grad()
def logits(model):
    ids = torch.randint(4, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    return model.logits(ids, torch.arange(12).expand(2, 12), AttentionPattern(False))


def stir(model):
    """As after some training: peft's second matrices begin at 0, where the adapter would change nothing."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)


@EVERY
def test_only_the_small_matrices_are_trained_and_they_begin_as_nothing(make):
    model = made(make)
    before = logits(model)
    matrices = sum(
        1 for one in model.model.base_model.modules() if type(one).__name__ in ("Linear", "Conv1D")
    )
    if make is bert:
        matrices -= model.model.base_model.pooler is not None
    add_adapter(model, LoRA(rank=3), seed=1)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    assert len(trained) == 2 * matrices
    assert all("lora_" in name and 3 in one.shape for name, one in trained.items())
    assert torch.equal(logits(model), before)


@EVERY
def test_merged_it_gives_what_it_gave_and_is_a_plain_model_again(make):
    model = made(make)
    plain, names = logits(model), list(model.state_dict())
    kinds = {name: type(one) for name, one in model.named_modules()}
    add_adapter(model, LoRA(rank=2, alpha=6), seed=1)
    stir(model)
    beside = logits(model)
    assert (beside - plain).abs().max() > 0.05, "the adapter must matter"
    merge_adapter(model)
    torch.testing.assert_close(logits(model), beside, rtol=1e-4, atol=1e-4)
    assert list(model.state_dict()) == names
    assert {name: type(one) for name, one in model.named_modules()} == kinds
    assert all(one.requires_grad for one in model.parameters())
    assert not hasattr(model.model.base_model, "peft_config")


@pytest.mark.parametrize(("rank", "alpha"), [(2, 6), (4, 2)])
def test_what_is_merged_is_the_product_of_the_small_matrices_times_alpha_over_rank(rank, alpha):
    model = made(llama)
    plain = model.model.model.layers[1].mlp.up_proj.weight.detach().clone()
    add_adapter(model, LoRA(rank=rank, alpha=alpha), seed=1)
    stir(model)
    small = {
        name: one.detach().clone() for name, one in model.named_parameters() if ".1.mlp.up_proj.lora_" in name
    }
    first, second = (next(one for name, one in small.items() if f"lora_{part}" in name) for part in "AB")
    merge_adapter(model)
    merged = model.model.model.layers[1].mlp.up_proj.weight.detach()
    torch.testing.assert_close(merged, plain + alpha / rank * second @ first, rtol=1e-5, atol=1e-5)


def test_a_merged_model_can_be_given_an_adapter_again():
    model = made(llama)
    add_adapter(model, LoRA(rank=2), seed=1)
    merge_adapter(model)
    add_adapter(model, LoRA(rank=4), seed=1)
    assert {min(one.shape) for one in model.parameters() if one.requires_grad} == {4}


def test_the_matrices_are_a_function_of_the_seed_alone():
    drawn = []
    for seed, state in ((1, 5), (1, 6), (2, 5)):
        model = made(llama)
        torch.manual_seed(state)
        before = torch.get_rng_state()
        add_adapter(model, LoRA(rank=2), seed=seed)
        assert torch.equal(before, torch.get_rng_state())
        drawn.append(torch.cat([one.detach().flatten() for one in model.parameters() if one.requires_grad]))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("targets", [("q_proj",), ("self_attn.q_proj", "down_proj")])
def test_targets_name_the_layers_that_get_one(targets):
    model = made(llama)
    add_adapter(model, LoRA(rank=2, targets=targets), seed=1)
    adapted = {name.split(".lora_")[0] for name, one in model.named_parameters() if one.requires_grad}
    assert len(adapted) == 2 * len(targets)  # in each of two layers
    assert all(name.endswith(targets) for name in adapted)


@pytest.mark.parametrize("wrong", ["query", "embed_tokens", "lm_head", "input_layernorm", "proj"])
def test_a_target_that_is_no_matrix_of_the_trunk_is_refused_in_one_line(wrong):
    """Also beside a right one, where peft would pass over it."""
    with pytest.raises(
        ModelError, match=rf"no matrix called {wrong}; it has down_proj, .*v_proj$"
    ) as refused:
        add_adapter(made(llama), LoRA(targets=("q_proj", wrong)), seed=1)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_frozen_embedding_stays_and_only_a_head_of_its_own_learns(tied):
    model = made(lambda: llama(tied=tied))
    freeze_embeddings(model)
    frozen = {name for name, one in model.named_parameters() if not one.requires_grad}
    assert frozen == {"model.model.embed_tokens.weight"}
    assert (model.head is model.model.get_input_embeddings().weight) == tied
    assert model.head.requires_grad == (not tied)
    ids = torch.randint(4, 64, (1, 12))
    loss = model(ids, torch.arange(12)[None], AttentionPattern(False), torch.arange(12), ids.flatten())
    loss.backward()
    for name, one in model.named_parameters():
        assert (one.grad is None) == (name in frozen), name


def test_the_bias_of_a_tied_head_learns_where_the_embedding_is_frozen():
    model = made(bert)
    freeze_embeddings(model)
    assert not model.head.requires_grad
    bias = model.model.cls.predictions.bias
    assert isinstance(bias, nn.Parameter)
    assert bias.requires_grad
