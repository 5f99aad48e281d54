"""Another base of the rotary positions: the model is then the one that would have been built with it."""

import copy

import pytest
import torch
from transformers import (
    EuroBertConfig,
    EuroBertForMaskedLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
)

from biphase.errors import ModelError
from biphase.models.backbone import rope_base_of, set_rope_base

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
MIXED = ["sliding_attention", "full_attention"]
OLD, NEW = 10_000.0, 300.0


def plain(base):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base}}


def llama(base):
    return LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2, **plain(base)))


def llama3(base):
    """Frequencies that are scaled by their wavelength, as Llama 3.1 has them."""
    said = {
        "rope_type": "llama3", "rope_theta": base, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2, rope_parameters=said))


def eurobert(base):
    return EuroBertForMaskedLM(EuroBertConfig(**SHAPE, num_key_value_heads=2, mask_token_id=3, **plain(base)))


def gpt_neox(base):
    """Only a part of each head is turned."""
    said = {"rope_parameters": {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 0.5}}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE, **said))


def gemma3(base, windows=500.0):
    said = {
        kind: {"rope_type": "default", "rope_theta": one}
        for kind, one in zip(MIXED, (windows, base), strict=True)
    }
    kinds = {"sliding_window": 5, "layer_types": MIXED, "rope_parameters": said}
    return Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, num_key_value_heads=2, head_dim=8, **kinds))


def modernbert(base, windows=500.0):
    said = {
        kind: {"rope_type": "default", "rope_theta": one}
        for kind, one in zip(MIXED, (windows, base), strict=True)
    }
    kinds = {"local_attention": 8, "layer_types": MIXED, "rope_parameters": said}
    return ModernBertForMaskedLM(ModernBertConfig(**SHAPE | ENDS, **kinds))


MIXED_FAMILIES = (gemma3, modernbert)
EVERY = pytest.mark.parametrize(
    "make", [llama, llama3, eurobert, gpt_neox, *MIXED_FAMILIES], ids=lambda make: make.__name__
)


@torch.no_grad()
def logits(model):
    ids = torch.randint(4, 64, (2, 40), generator=torch.Generator().manual_seed(1))
    return model.eval()(input_ids=ids).logits


def stirred(make, base):
    """Weights large enough for attention, and so for positions, to count."""
    model = make(base)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return model


@EVERY
def test_a_changed_model_is_the_one_built_with_that_base(make):
    model, built = stirred(make, OLD), stirred(make, NEW)
    before = logits(model)
    assert (before - logits(built)).abs().max() > 1e-2, "the base must matter"
    set_rope_base(model, NEW)
    assert torch.equal(logits(model), logits(built))
    assert rope_base_of(model) == NEW
    set_rope_base(model, OLD)
    assert torch.equal(logits(model), before)


@EVERY
def test_the_configuration_says_it(make):
    """What is written from it is built with the new base."""
    model = stirred(make, OLD)
    set_rope_base(model, NEW)
    again = type(model)(copy.deepcopy(model.config))
    again.load_state_dict(model.state_dict())
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("make", MIXED_FAMILIES, ids=lambda make: make.__name__)
def test_layers_with_windows_keep_their_base(make):
    model = stirred(make, OLD)
    set_rope_base(model, NEW)
    said = model.config.rope_parameters
    assert {kind: said[kind]["rope_theta"] for kind in MIXED} == {MIXED[0]: 500.0, MIXED[1]: NEW}
    wrong = stirred(lambda base: make(base, windows=NEW), NEW)
    assert not torch.equal(logits(model), logits(wrong)), "the windows' base must matter"


def test_the_buffers_stay_the_same_tensors():
    """A compiled model reads them where they were."""
    model = stirred(llama, OLD)
    places = {name: one.data_ptr() for name, one in model.named_buffers()}
    set_rope_base(model, NEW)
    assert {name: one.data_ptr() for name, one in model.named_buffers()} == places


def test_learned_positions_have_no_base():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=64))
    assert rope_base_of(model) == 0
    with pytest.raises(ModelError, match="no rotary positions; leave out rope_base") as refused:
        set_rope_base(model, NEW)
    assert "\n" not in str(refused.value)
