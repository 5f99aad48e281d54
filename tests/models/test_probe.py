"""Each thing that a model must not do is found before training, and said in its own line."""

import re
from dataclasses import replace

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from biphase.attention import NAME, AttentionPattern
from biphase.errors import ModelError
from biphase.models.backbone import LanguageModel, probe
from biphase.models.encoder import PROBE_LENGTH, PROBE_TOLERANCE, probe_attention, probe_own

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CPU = torch.device("cpu")
ABOUT = {"vocab": 64, "name": "Odd", "device": CPU}


def llama():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation=NAME)).eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(4)  # attention is to be sharp enough for positions to count
    return LanguageModel(model)


def gpt2():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shape = {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 40,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        made = GPT2LMHeadModel(GPT2Config(vocab_size=64, **shape, attn_implementation=NAME))
    return LanguageModel(made.eval())


class Reader:
    """Reads as a plain model does, or with one fault."""

    def __init__(self, fault="none"):
        # Rotary positions are distances: what is counted on in all of a text changes nothing there.
        self.model, self.fault = gpt2() if fault == "counts_on" else llama(), fault

    def __call__(self, ids, positions, pattern):
        return getattr(self, self.fault)(ids, positions, pattern)

    def none(self, ids, positions, pattern):
        return self.model.hidden(ids, positions, pattern)

    def counts_on(self, ids, positions, pattern):
        return self.none(ids, torch.arange(ids.shape[1])[None], pattern)

    def leaks(self, ids, positions, pattern):
        return self.none(ids, positions, replace(pattern, causal=False))

    def is_blind(self, ids, positions, pattern):
        return self.none(ids, positions, AttentionPattern(True))

    def ignores_segments(self, ids, positions, pattern):
        return self.none(ids, positions, replace(pattern, mask=None))

    def looks_back_one(self, ids, positions, pattern):
        """As a convolution or a recurrence does, beside attention that is right."""
        read = self.none(ids, positions, pattern)
        return read + read.roll(1, 1) * (torch.arange(ids.shape[1]) > 0)[None, :, None]

    def looks_ahead_one_across_texts(self, ids, positions, pattern):
        read = self.none(ids, positions, pattern)
        if pattern.causal:
            return read
        return read + read.roll(-1, 1) * (torch.arange(ids.shape[1]) < ids.shape[1] - 1)[None, :, None]

    def is_not_finite(self, ids, positions, pattern):
        return self.none(ids, positions, pattern) / 0


FAULTS = {
    "counts_on": "counts positions on from one text to the next",
    "leaks": "sees the future in causal mode",
    "is_blind": "stays blind to later tokens",
    "ignores_segments": "looks across the boundary of a text",
    "looks_back_one": "looks across the boundary of a text",
    "looks_ahead_one_across_texts": "looks across the boundary of a text",
    "is_not_finite": "numbers that are not finite",
}


def test_a_plain_model_passes_and_its_width_is_told():
    assert probe_attention(Reader(), **ABOUT, causal=True) == 32
    probe(gpt2(), vocab=64)


@pytest.mark.parametrize(("fault", "line"), FAULTS.items(), ids=FAULTS)
def test_each_fault_is_refused_with_its_own_line(fault, line):
    with pytest.raises(ModelError, match=f"^Odd .*{line}") as refused:
        probe_attention(Reader(fault), **ABOUT, causal=True)
    assert "\n" not in str(refused.value)


def test_an_encoder_need_not_be_causal():
    assert probe_attention(Reader("leaks"), **ABOUT, causal=False) == 32


class Scaled(LlamaForCausalLM):
    """Its own forward does to its logits what ours does not know of."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 1.01
        return out


class Broken(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        raise RuntimeError("give me\na picture")


def test_a_model_that_gives_other_numbers_than_its_own_class_is_refused():
    model = llama()
    probe_own(model.model, model.logits, **ABOUT)
    other = Scaled(model.model.config).eval()
    other.load_state_dict(model.model.state_dict())
    with pytest.raises(ModelError, match="gives other numbers than by itself") as refused:
        probe_own(other, model.logits, **ABOUT)
    assert "\n" not in str(refused.value)


def test_an_argument_of_its_attention_that_is_ignored_is_found():
    """A window that our attention is not told of."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        said = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention"] * 2}
        made = Qwen2ForCausalLM(Qwen2Config(**SHAPE, **said, attn_implementation=NAME)).eval()
        with torch.no_grad():
            for weight in made.parameters():
                weight.mul_(4)
    model = LanguageModel(made)
    probe(model, vocab=64)
    for layer in made.base_model.layers:
        layer.self_attn.sliding_window = None  # eager attention takes it from the mask, ours from here
    with pytest.raises(ModelError, match="gives other numbers than by itself"):
        probe(model, vocab=64)


def test_a_forward_that_fails_is_told_in_one_line_and_the_attention_is_ours_again():
    model = Broken(LlamaConfig(**SHAPE, attn_implementation=NAME))
    with pytest.raises(ModelError, match=r"cannot read a plain text.*give me a picture") as refused:
        probe_own(model, Reader(), **ABOUT)
    assert "\n" not in str(refused.value)
    assert model.config._attn_implementation == NAME


def test_a_probe_leaves_the_model_as_it_was():
    model = llama().train()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    torch.manual_seed(3)
    generator = torch.get_rng_state()
    probe(model, vocab=64)
    assert torch.equal(generator, torch.get_rng_state())
    assert model.training
    assert model.model.config._attn_implementation == NAME
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_the_tolerance_is_far_below_what_a_fault_changes():
    """Rounding is a thousand times smaller; and the texts of the probe are long enough to hold two."""
    model = llama()
    ids, places = torch.arange(4, 4 + PROBE_LENGTH)[None], torch.arange(PROBE_LENGTH)[None]
    with torch.no_grad():
        both, one_way = (model.hidden(ids, places, AttentionPattern(causal)) for causal in (False, True))
    assert (both - one_way).abs().max() > 30 * PROBE_TOLERANCE * both.abs().max()


def test_every_refusal_names_the_model():
    model = llama()
    model.hidden = lambda ids, positions, pattern: Reader("leaks")(ids, positions, pattern)
    with pytest.raises(ModelError, match=re.escape("LlamaForCausalLM sees the future")):
        probe(model, vocab=64)
