"""Encoders: packing, parity with transformers on packed texts, loading and its refusals, probes, task heads."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from families import tiny
from families.tiny import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel, LlamaForCausalLM

from biphase.attention import AttentionPattern, segment_mask
from biphase.models.backbone import probe
from biphase.models.encoder import (
    ROW,
    EmbeddingHead,
    TextHead,
    TokenHead,
    encoder_from_hub,
    initialise,
    mean_pool,
    pack,
    probe_attention,
    probe_own,
)
from biphase.specs import Hub

CPU = torch.device("cpu")
VOCAB, CONTEXT, WINDOW = 64, 160, 6


# ---------------------------------------------------------------- packing


ANY_LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)


def numbered(lengths):
    """Texts in which each token is another number, so that a lost, doubled or moved token shows."""
    return np.split(np.arange(1, sum(lengths) + 1, dtype=np.int32), np.cumsum(lengths)[:-1])


def owner_of_positions(packed):
    """(B, T) the text of each position; −1 for padding."""
    owner = torch.full((packed.ids.numel(),), -1)
    owner[packed.at] = packed.owner
    return owner.view_as(packed.ids)


@settings(deadline=None, max_examples=100)
@given(ANY_LENGTHS, st.booleans())
def test_every_token_is_packed_once_in_order(lengths, varlen):
    packed = pack(numbered(lengths), varlen=varlen)
    count, width = sum(lengths), packed.ids.shape[1]
    ids, positions, segments = (getattr(packed, name).flatten() for name in ("ids", "positions", "segments"))
    assert len(packed) == len(lengths)
    assert packed.longest == max(lengths)
    assert packed.lengths.tolist() == list(lengths)
    assert ids[packed.at].tolist() == list(range(1, count + 1))
    assert packed.owner.tolist() == [text for text, length in enumerate(lengths) for _ in range(length)]
    assert positions[packed.at].tolist() == [at for length in lengths for at in range(length)]
    padding = owner_of_positions(packed).flatten() < 0
    assert padding.sum() == len(ids) - count
    assert (ids[padding] == 0).all()
    assert (segments[padding] == -1).all()
    # A row and a segment together name one text.
    text = (packed.at // width) * 10_000 + segments[packed.at]
    assert len(set(zip(text.tolist(), packed.owner.tolist(), strict=True))) == len(lengths)
    for number in range(len(lengths)):
        at = packed.at[packed.owner == number]
        assert (at.diff() == 1).all()
        assert at[0] // width == at[-1] // width
    if varlen:
        assert packed.ids.shape == (1, count)
        assert packed.boundaries.dtype == torch.int32
        assert packed.boundaries.tolist() == [0, *np.cumsum(lengths).tolist()]
        assert packed.pattern.boundaries is packed.boundaries
        assert packed.pattern.longest == max(lengths)
        assert packed.pattern.mask is None
    else:
        assert packed.boundaries is None
        assert width <= max(*lengths, ROW)
        assert torch.equal(packed.ids, pack(numbered(lengths), varlen=False).ids)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.booleans())
def test_a_packed_text_attends_to_itself_only(lengths, causal):
    packed = pack(numbered(lengths), varlen=False, causal=causal)
    owner = owner_of_positions(packed)
    allowed = owner[:, :, None] == owner[:, None, :]
    if causal:
        allowed &= torch.ones_like(allowed[0]).tril()
    assert packed.pattern.causal == causal
    assert torch.equal(packed.pattern.mask[:, 0], allowed)


# ---------------------------------------------------------------- parity


LENGTHS = (20, 7, 150, 1, 12, 33)  # the third fills a row of its own, longer than every window
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
GEMMA = {  # as EmbeddingGemma: a decoder made bidirectional, with windows
    "use_bidirectional_attention": True, "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
TRUNKS = {
    "bert": DROPOUT,
    "roberta": DROPOUT,
    "distilbert": {},
    "modernbert": {"local_attention": 2 * WINDOW, "global_attn_every_n_layers": 2},
    "eurobert": {},
    "gemma3_text": GEMMA,
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "gpt2": {},
}
DECODERS = ("llama", "qwen3", "mistral", "gpt2")
EVERY = pytest.mark.parametrize("family", TRUNKS)


def trunk(family):
    """A random trunk in which every weight counts, of two layers or three."""
    length = "n_positions" if family == "gpt2" else "max_position_embeddings"
    depth = {} if family in ("gpt2", "distilbert") else {"num_hidden_layers": 3}
    model = tiny.trunk(family, **{length: CONTEXT, **depth, **TRUNKS[family]})
    return tiny.stirred(model.eval(), 0.05)


def both(family, folder):
    """A model as transformers has it, and as we load it from its folder."""
    theirs = trunk(family)
    theirs.save_pretrained(folder)
    return theirs, encoder_from_hub(Hub(str(folder))).eval()


def texts(lengths=LENGTHS):
    generator = np.random.default_rng(3)
    return [generator.integers(4, VOCAB, length) for length in lengths]


def alone(model, text):
    """The hidden states that transformers gives for one text, with bidirectional attention."""
    options = {}
    if model.config.model_type in DECODERS:
        positions = torch.arange(len(text))
        reach = getattr(model.config, "sliding_window", None) or len(text)
        near = (positions[:, None] - positions[None, :]).abs() < reach
        options = {"attention_mask": torch.zeros(near.shape).masked_fill(~near, float("-inf"))[None, None]}
    return model(input_ids=torch.from_numpy(text)[None], **options).last_hidden_state[0]


def read(encoder, some, *, layout="rows"):
    """The hidden states of all tokens, text after text."""
    if layout == "alone":
        return torch.cat([read(encoder, [text]) for text in some])
    packed = pack(some, varlen=layout == "one row")
    # The varlen kernel runs on a GPU only; a mask by the same segments is equivalent.
    pattern = AttentionPattern(False, mask=segment_mask(packed.segments, causal=False))
    return encoder(packed.ids, packed.positions, pattern).flatten(0, 1)[packed.at]


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


@EVERY
@torch.no_grad()
def test_packed_texts_equal_transformers_on_each_text_alone(family, tmp_path):
    theirs, ours = both(family, tmp_path)
    right = torch.cat([alone(theirs, text) for text in texts()])
    for layout in ("rows", "one row", "alone"):
        close(read(ours, texts(), layout=layout), right)
    assert ours.context == (CONTEXT - 2 if family == "roberta" else CONTEXT)
    longest = texts((ours.context,))
    close(read(ours, longest), alone(theirs, longest[0]))


@EVERY
def test_every_parameter_gets_a_gradient(family, tmp_path):
    """A pooler or an unused embedding would be weights that decay and never learn."""
    _, ours = both(family, tmp_path)
    read(ours, texts()).square().sum().backward()
    assert not [name for name, weight in ours.named_parameters() if weight.grad is None]


# ---------------------------------------------------------------- loading


def saved(model, folder, change=lambda weights: None):
    """A folder with the model, whose weights `change` edits."""
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return Hub(str(folder))


SMALL = {"vocab_size": VOCAB, "hidden_size": 32}
UNSUITED = {
    "bloom": (SMALL | {"n_layer": 2, "n_head": 4}, "cannot be replaced"),
    # Its embeddings mix neighbouring tokens, whatever attention does.
    "mobilebert": ({"vocab_size": VOCAB, "num_hidden_layers": 1}, "boundary"),
    "gpt2": (tiny.GPT | {"n_positions": 2}, "IndexError"),  # too short: fails in transformers itself
}


@pytest.mark.parametrize("family", UNSUITED)
def test_an_unsuited_model_is_refused(family, tmp_path):
    fields, reason = UNSUITED[family]
    model = AutoModel.from_config(AutoConfig.for_model(family, **fields))
    assert reason in refused(encoder_from_hub, saved(model, tmp_path))


def test_missing_damaged_and_pickled_weights_are_refused(tmp_path):
    assert "cannot be loaded" in refused(encoder_from_hub, Hub(str(tmp_path / "nowhere")))
    name = "encoder.layer.1.attention.self.query.weight"
    hub = saved(trunk("bert"), tmp_path, lambda weights: weights.pop(name))
    message = refused(encoder_from_hub, hub)
    assert "lacks 1" in message
    assert name in message
    name = "embeddings.word_embeddings.weight"
    hub = saved(trunk("bert"), tmp_path, lambda weights: weights.update({name: torch.ones(3, 32)}))
    assert name in refused(encoder_from_hub, hub)
    (tmp_path / "model.safetensors").write_bytes(b"not a model")
    assert "cannot be loaded" in refused(encoder_from_hub, hub)
    saved(trunk("bert"), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "safetensors" in refused(encoder_from_hub, hub)


def test_code_beside_a_model_is_never_run(tmp_path, monkeypatch):
    """A type that transformers knows but has no plain model for, with a class of its own in the folder."""
    monkeypatch.setattr("builtins.input", lambda *prompt: "y")
    config = {"model_type": "bridgetower_text_model", "auto_map": {"AutoModel": "modeling_evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Evil: ...\n"
    (tmp_path / "modeling_evil.py").write_text(code)
    save_file({"x": torch.zeros(1)}, str(tmp_path / "model.safetensors"))
    message = refused(encoder_from_hub, Hub(str(tmp_path)))
    assert "auto_map" in message
    assert "trust_remote_code" not in message
    assert not (tmp_path / "ran").exists()


def test_weights_outside_the_folder_are_not_read(tmp_path):
    hub = saved(tiny.with_head("llama"), tmp_path)
    (tmp_path / "deeper").mkdir()
    (tmp_path / "model.safetensors").rename(tmp_path / "deeper" / "other.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"transformers_weights": "deeper/other.safetensors"})
    )
    assert "deeper/other.safetensors" in refused(encoder_from_hub, hub)


def test_an_adapter_beside_a_model_is_merged(tmp_path):
    from peft import LoraConfig, get_peft_model

    ids = torch.arange(5)[None]

    def hidden(alpha):
        config = json.loads((tmp_path / "adapter_config.json").read_text()) | {"lora_alpha": alpha}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        encoder = encoder_from_hub(Hub(str(tmp_path))).eval()
        assert not [name for name, _ in encoder.named_parameters() if "lora" in name]
        assert all(weight.requires_grad for weight in encoder.parameters())
        encoder.trunk.save_pretrained(tmp_path / "again")
        assert load_file(tmp_path / "again" / "model.safetensors").keys() == encoder.trunk.state_dict().keys()
        with torch.no_grad():
            return encoder(ids, ids, AttentionPattern(True))

    model = tiny.with_head("llama")
    model.save_pretrained(tmp_path)
    config = LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        adapted = get_peft_model(model, config)
    adapted.save_pretrained(tmp_path)
    with torch.no_grad():
        right = adapted.base_model.model.eval().model(ids).last_hidden_state
    assert torch.allclose(hidden(8), right, atol=1e-5)
    assert not torch.allclose(hidden(80), right, atol=1e-3)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    assert "adapter_model.safetensors" in refused(hidden, 8)


def test_the_context_of_longrope_ends_where_rotations_depend_on_the_batch(tmp_path):
    scaled = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    lengths = {"original_max_position_embeddings": 32, "max_position_embeddings": 128}
    model = tiny.trunk("phi3", **lengths, pad_token_id=0, rope_parameters=scaled)
    assert encoder_from_hub(saved(model, tmp_path)).context == 32


# ---------------------------------------------------------------- probes


ABOUT = {"vocab": VOCAB, "name": "Odd", "device": CPU}


def sharp(family, **fields):
    """A model with attention sharp enough for positions to count."""
    model = tiny.with_head(family, **fields)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)
    return tiny.ours(model)


class Reader:
    """Reads as a plain model does, or with one fault."""

    def __init__(self, fault="none"):
        # Rotary positions are distances, so a common offset would not show; learned positions show it.
        self.model = tiny.language_model("gpt2") if fault == "counts_on" else sharp("llama")
        self.fault = fault

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
        hidden = self.none(ids, positions, pattern)
        return hidden + hidden.roll(1, 1) * (torch.arange(ids.shape[1]) > 0)[None, :, None]

    def looks_ahead_one_across_texts(self, ids, positions, pattern):
        hidden = self.none(ids, positions, pattern)
        if pattern.causal:
            return hidden
        return hidden + hidden.roll(-1, 1) * (torch.arange(ids.shape[1]) < ids.shape[1] - 1)[None, :, None]

    def is_not_finite(self, ids, positions, pattern):
        return self.none(ids, positions, pattern) / 0


FAULTS = {
    "counts_on": "counts positions",
    "leaks": "future",
    "is_blind": "blind",
    "ignores_segments": "boundary",
    "looks_back_one": "boundary",
    "looks_ahead_one_across_texts": "boundary",
    "is_not_finite": "not finite",
}


def test_the_probe_passes_plain_models_and_returns_the_width():
    assert probe_attention(Reader(), **ABOUT, causal=True) == 32
    assert probe_attention(Reader("leaks"), **ABOUT, causal=False) == 32  # an encoder need not be causal
    probe(tiny.language_model("gpt2"), vocab=VOCAB)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_probe_refuses_each_fault_with_its_own_message(fault):
    message = refused(probe_attention, Reader(fault), **ABOUT, causal=True)
    assert message.startswith("Odd ")
    assert FAULTS[fault] in message


class Scaled(LlamaForCausalLM):
    """Its own forward does to its logits what ours does not."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.01
        return output


def test_the_probe_refuses_other_numbers_than_the_models_own():
    model = sharp("llama")
    probe_own(model.model, model.logits, **ABOUT)
    other = Scaled(model.model.config).eval()
    other.load_state_dict(model.model.state_dict())
    assert "other numbers" in refused(probe_own, other, model.logits, **ABOUT)
    windows = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention"] * 2}
    model = sharp("qwen2", **windows)
    probe(model, vocab=VOCAB)
    for layer in model.model.base_model.layers:
        layer.self_attn.sliding_window = None  # eager attention takes it from the mask, ours from here
    assert "other numbers" in refused(probe, model, vocab=VOCAB)


# ---------------------------------------------------------------- task heads


WIDTH, LABELS = 6, 3
LAYOUTS = pytest.mark.parametrize("varlen", [True, False], ids=["one row", "rows"])


def hidden_states(lengths=(4, 1, 90, 60, 7), *, varlen=False):
    """Random hidden states of packed texts; those of padding are huge, so that none may count."""
    generator = torch.Generator().manual_seed(sum(lengths))
    packed = pack(numbered(lengths), varlen=varlen)
    hidden = torch.full((*packed.ids.shape, WIDTH), 1e30)
    hidden.flatten(0, 1)[packed.at] = torch.randn(sum(lengths), WIDTH, generator=generator)
    return hidden, packed


def by_text(hidden, packed):
    return hidden.flatten(0, 1)[packed.at].split(packed.lengths.tolist())


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=20), st.booleans())
def test_pooling_is_the_mean_over_the_tokens_of_a_text(lengths, varlen):
    hidden, packed = hidden_states(lengths, varlen=varlen)
    right = torch.stack([text.double().mean(0) for text in by_text(hidden, packed)])
    torch.testing.assert_close(mean_pool(hidden, packed).double(), right, rtol=1e-5, atol=1e-6)


@LAYOUTS
@torch.no_grad()
def test_heads_compute_their_definitions(varlen):
    hidden, packed = hidden_states(varlen=varlen)
    means = torch.stack([text.mean(0) for text in by_text(hidden, packed)])
    head = TextHead(WIDTH, LABELS)
    initialise(head, std=0.5, seed=1)
    head.dense.bias += 0.3
    head.out.bias -= 0.2
    right = nn.functional.gelu(means @ head.dense.weight.T + 0.3) @ head.out.weight.T - 0.2
    torch.testing.assert_close(head(hidden, packed), right)
    head = TokenHead(WIDTH, LABELS)
    initialise(head, std=0.5, seed=1)
    tokens = torch.cat(by_text(hidden, packed))
    torch.testing.assert_close(head(hidden, packed), tokens @ head.out.weight.T)
    assert not list(EmbeddingHead().parameters())
    vectors = EmbeddingHead()(hidden, packed)
    torch.testing.assert_close(vectors, means / means.norm(dim=1, keepdim=True))
