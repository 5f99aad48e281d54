"""Which class a model is written as: EuroBERT where it means the same there, else its own, else not at all."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    Cohere2Config,
    Cohere2ForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
    RobertaForMaskedLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from biphase import Hub
from biphase.attention import NAME, AttentionPattern
from biphase.data.tokenizer import load_saved
from biphase.errors import ModelError
from biphase.export.checkpoint import last_hidden, write_encoder
from biphase.export.writing import (
    LEAST,
    TOLERANCE,
    Form,
    Probes,
    Readback,
    deviation,
    load,
    ours,
    probe_texts,
    tokenizer_of,
    write_model,
)
from biphase.models.backbone import LanguageModel, from_hub, probe
from biphase.models.backbone import TokenizerInfo as Known
from biphase.models.hub import windows_of

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 2,
}
GROUPED = SHAPE | {"num_key_value_heads": 2}
GPT2 = {
    "vocab_size": 320,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def untrained(family, config, *, windows=True, **fields):
    """A model in which every weight matters, with our attention."""
    made = config(**fields)
    made._attn_implementation = NAME
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = family(made).float().eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.15)
    return LanguageModel(model, windows=windows).eval()


@pytest.fixture(scope="session")
def words(shards):
    return tokenizer_of(load_saved(shards / "tokenizer"), bos=False, context=60)


def written_config(folder):
    return json.loads((folder / "config.json").read_text())


def agrees(model, folder, words, **more):
    """As a stranger would see it: hidden states of a padded batch and of a long text alone, by plain AutoModel."""
    loaded = load(folder, AutoModel, **more)
    draw = np.random.default_rng(7)
    ids = torch.from_numpy(draw.integers(3, 320, (2, 60)))
    mask = torch.ones_like(ids)
    mask[1, 9:], ids[1, 9:] = 0, words.pad
    with torch.no_grad():
        padded = loaded(input_ids=ids, attention_mask=mask).last_hidden_state
        alone = loaded(input_ids=ids[:1]).last_hidden_state
        right = [
            model.hidden(
                ids[row : row + 1, :length], torch.arange(length)[None], AttentionPattern(causal=False)
            )[0]
            for row, length in ((0, 60), (1, 9))
        ]
    both = torch.cat([padded[0], padded[1, :9], alone[0]])
    return torch.allclose(both, torch.cat([right[0], right[1], right[0]]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "config", "fields"),
    [
        (LlamaForCausalLM, LlamaConfig, GROUPED | {"attention_bias": True, "mlp_bias": True}),
        (LlamaForCausalLM, LlamaConfig, GROUPED | {"head_dim": 12, "tie_word_embeddings": True}),
        (Qwen2ForCausalLM, Qwen2Config, GROUPED),  # biases on some matrices only
        (MistralForCausalLM, MistralConfig, GROUPED | {"sliding_window": None}),
    ],
)
def test_what_has_the_usual_shape_becomes_eurobert(family, config, fields, words, tmp_path):
    model = untrained(family, config, **fields)
    written = write_encoder(model, words, tmp_path)
    assert (written.architecture, written.native, written.edits) == ("EuroBertForMaskedLM", True, {})
    assert agrees(model, tmp_path, words)
    assert agrees(model, tmp_path, words, attn_implementation="eager")


FACTORS = {
    "embedding_multiplier": 1.7,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.4,
    "logits_scaling": 2.5,
}


@pytest.mark.parametrize(
    ("family", "config", "fields"),
    [
        (GraniteForCausalLM, GraniteConfig, GROUPED | FACTORS | {"tie_word_embeddings": True}),
        (GemmaForCausalLM, GemmaConfig, GROUPED | {"head_dim": 12}),  # 1 + weight in norms, scaled embeddings
        (Phi3ForCausalLM, Phi3Config, GROUPED),  # fused matrices
        (Ernie4_5ForCausalLM, Ernie4_5Config, GROUPED | {"use_bias": True}),  # interleaved rotary pairs
        (SmolLM3ForCausalLM, SmolLM3Config, GROUPED | {"no_rope_layers": [1, 1]}),
    ],
)
def test_another_notation_of_the_usual_shape_becomes_eurobert(family, config, fields, words, tmp_path):
    model = untrained(family, config, **fields)
    written = write_encoder(model, words, tmp_path)
    assert (written.architecture, written.native, written.edits) == ("EuroBertForMaskedLM", True, {})
    assert agrees(model, tmp_path, words)
    back = from_hub(Hub(str(tmp_path)), Known(320, 1, mask_is_new=False), length=60).eval()
    ids, places = torch.arange(3, 63)[None], torch.arange(60)[None]
    with torch.no_grad():
        for causal in (True, False):
            first, second = (one.logits(ids, places, AttentionPattern(causal)) for one in (model, back))
            assert torch.allclose(first, second, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "config", "masked"),
    [
        (BertLMHeadModel, BertConfig, "BertForMaskedLM"),
        (RobertaForCausalLM, RobertaConfig, "RobertaForMaskedLM"),
    ],
)
def test_a_decoder_whose_family_has_a_masked_class_gets_it(family, config, masked, words, tmp_path):
    model = untrained(family, config, **SHAPE | {"max_position_embeddings": 67, "is_decoder": True})
    written = write_encoder(model, words, tmp_path)
    assert (written.architecture, written.edits) == (masked, {})
    assert agrees(model, tmp_path, words)


def weak(family, config, **fields):
    """A model as it is initialized: attention is so even that positions hardly show in its numbers."""
    made = config(**fields, initializer_range=1e-3)
    made._attn_implementation = NAME
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LanguageModel(family(made).float()).eval()


@pytest.mark.parametrize(
    ("family", "config", "fields"),
    [
        (SmolLM3ForCausalLM, SmolLM3Config, {"no_rope_layers": [1, 1, 1, 0]}),
        (SmolLM3ForCausalLM, SmolLM3Config, {"no_rope_layers": [0, 1, 1, 1]}),
        (SmolLM3ForCausalLM, SmolLM3Config, {"no_rope_layers": [0, 0, 0, 0]}),
        (GlmForCausalLM, GlmConfig, {"head_dim": 8}),  # half of each head is rotated
        (
            Phi3ForCausalLM,
            Phi3Config,
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ),
    ],
)
def test_a_difference_that_weak_weights_hide_is_found(family, config, fields, words, tmp_path):
    model = weak(family, config, **GROUPED | {"num_hidden_layers": 4} | fields)
    written = write_encoder(model, words, tmp_path)
    assert (written.architecture, written.native) == (family.__name__, False)
    assert written.edits == {"is_causal": False, "use_cache": False}
    assert not (tmp_path / "generation_config.json").exists()
    with pytest.raises(ValueError, match="AutoModelForMaskedLM"):
        AutoModelForMaskedLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("family", "config", "fields"),
    [
        (BertForMaskedLM, BertConfig, SHAPE),
        (RobertaForMaskedLM, RobertaConfig, SHAPE | {"max_position_embeddings": 67}),
        (
            ModernBertForMaskedLM,
            ModernBertConfig,
            SHAPE | {"local_attention": 12, "cls_token_id": 0, "sep_token_id": 0},
        ),
    ],
)
def test_encoders_stay_what_they_are(family, config, fields, words, tmp_path):
    model = untrained(family, config, **fields)
    written = write_encoder(model, words, tmp_path)
    assert (written.architecture, written.native, written.edits) == (family.__name__, False, {})
    assert agrees(model, tmp_path, words)
    rotary = family is ModernBertForMaskedLM  # whose rotary base transformers 4 looks for in another field
    assert (weights_format(tmp_path) == "pt", written.needs == "") == (not rotary, not rotary)


def weights_format(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return file.metadata()["format"]


def test_gpt2_reads_both_ways_by_its_configuration(words, tmp_path):
    model = untrained(GPT2LMHeadModel, GPT2Config, **GPT2)
    written = write_encoder(model, words, tmp_path)
    assert written.edits["is_causal"] is False
    assert agrees(model, tmp_path, words)
    assert f"transformers>={LEAST}" in weights_format(tmp_path), (
        "transformers 4 takes no format it does not know"
    )
    assert LEAST in written.needs


def test_the_least_version_is_the_one_that_is_installed_at_least():
    from importlib.metadata import requires

    (said,) = (one for one in requires("biphase") if one.startswith("transformers"))
    assert f">={LEAST}" in said


# ---------------------------------------------------------------- windows


def test_a_window_to_both_sides_reaches_as_far_as_it_was_trained_to(words, tmp_path):
    model = untrained(MistralForCausalLM, MistralConfig, **GROUPED, sliding_window=6)
    written = write_encoder(model, words, tmp_path)
    assert written.architecture == "MistralForCausalLM"
    assert (
        written_config(tmp_path)["sliding_window"] == 5
    )  # transformers counts both sides without the token itself
    assert agrees(model, tmp_path, words)
    wrong = written_config(tmp_path) | {"sliding_window": 6}
    (tmp_path / "config.json").write_text(json.dumps(wrong))
    assert not agrees(model, tmp_path, words)


@pytest.mark.parametrize(
    ("family", "config", "native"),
    [(MistralForCausalLM, MistralConfig, True), (Cohere2ForCausalLM, Cohere2Config, False)],
)
def test_windows_that_were_opened_stay_open(family, config, native, words, tmp_path):
    model = untrained(family, config, windows=False, **GROUPED, sliding_window=6)
    written = write_encoder(model, words, tmp_path)
    assert written.native is native  # without windows the first has the usual shape
    assert agrees(model, tmp_path, words)


def test_windows_of_a_configuration_are_found_by_their_names():
    said = windows_of(ModernBertConfig(local_attention=12))
    assert set(said.values()) <= {12, 6, 7}
    assert said
    assert windows_of(LlamaConfig()) == {}
    assert windows_of(MistralConfig(sliding_window=None)) == {}


# ---------------------------------------------------------------- refusals


def test_what_does_not_read_as_trained_is_refused_and_leaves_nothing(words, tmp_path):
    model = untrained(LlamaForCausalLM, LlamaConfig, **GROUPED)
    texts = probe_texts(model.model.config, words)
    asked = Readback(AutoModel, ours(model.reader[0], texts), last_hidden)
    with pytest.raises(
        ModelError, match="Llama cannot be exported: LlamaForCausalLM with its own configuration differs by"
    ):
        write_model(tmp_path, [Form(model.model, (asked,))], words, title="Llama")  # causal, as it came
    assert not list(tmp_path.iterdir())


def test_a_head_that_means_something_else_is_no_agreement(words, tmp_path):
    model = untrained(LlamaForCausalLM, LlamaConfig, **GROUPED)
    texts = probe_texts(model.model.config, words)
    right = ours(model.reader[0], texts)
    wrong = Probes(texts, tuple(one + 1 for one in right.numbers))
    asked = (
        Readback(AutoModel, right, last_hidden),
        Readback(AutoModelForCausalLM, wrong, lambda said: said.logits[..., :32]),
    )
    both = ({"is_causal": False},)
    with pytest.raises(ModelError, match="differs by"):
        write_model(tmp_path, [Form(model.model, asked, both)], words, title="Llama")


def test_the_deviation_is_that_of_the_worst_token():
    texts = (np.array([5]), np.array([5, 6, 7]))
    right = Probes(texts, (torch.ones(1, 4), torch.ones(3, 4)))

    def off(at, by, *, padded):
        def read(input_ids, attention_mask=None):
            said = torch.ones(*input_ids.shape, 4)
            assert (attention_mask is None) == (len(input_ids) == 1)
            if len(input_ids) > 1:
                said[0, 1:] = torch.nan  # behind a text's end nothing counts
            if padded == (len(input_ids) > 1) and input_ids.shape[1] == 3:
                said[-1, at] += by
            return said

        return read

    for padded in (True, False):  # a model may err in one of them only
        assert deviation(right, off(2, 0.0, padded=padded), pad=0) == 0
        assert deviation(right, off(2, 0.5, padded=padded), pad=0) == pytest.approx(0.5)
        assert deviation(right, off(1, torch.nan, padded=padded), pad=0) == float("inf")
    assert TOLERANCE < 1e-3


def test_a_folder_is_asked_with_both_attentions(words, tmp_path):
    model = untrained(LlamaForCausalLM, LlamaConfig, **GROUPED)
    seen = []

    class Noting:
        """AutoModel, with a look at how each forward attends."""

        @staticmethod
        def from_pretrained(*args, **more):
            loaded, said = AutoModel.from_pretrained(*args, **more)
            loaded.register_forward_pre_hook(lambda one, inputs: seen.append(one.config._attn_implementation))
            return loaded, said

    asked = Readback(Noting, ours(model.reader[0], probe_texts(model.model.config, words)), last_hidden)
    write_model(tmp_path, [Form(model.model, (asked,), ({"is_causal": False},))], words, title="Llama")
    assert set(seen) == {"sdpa", "eager"}


def test_probe_texts_are_longer_than_the_widest_window(words):
    long = replace(words, context=2048)
    lengths = {name: max(map(len, probe_texts(one, long))) for name, one in {
        "none": LlamaConfig(), "narrow": MistralConfig(sliding_window=16), "wide": MistralConfig(sliding_window=700),
        "wider": MistralConfig(sliding_window=4096),
    }.items()}  # fmt: skip
    assert lengths == {"none": 256, "narrow": 256, "wide": 732, "wider": 2048}
    every = np.concatenate(probe_texts(LlamaConfig(), long))
    assert not set(every) & words.special


def test_a_window_comes_back_as_wide_as_it_went(words, tmp_path):
    model = untrained(MistralForCausalLM, MistralConfig, **GROUPED, sliding_window=6)
    write_encoder(model, words, tmp_path)
    back = from_hub(Hub(str(tmp_path)), Known(320, 1, mask_is_new=False), length=60).eval()
    probe(back, vocab=320)
    ids, places = torch.arange(3, 63)[None], torch.arange(60)[None]
    with torch.no_grad():
        first, second = (one.hidden(ids, places, AttentionPattern(causal=False)) for one in (model, back))
    assert torch.allclose(first, second, rtol=1e-4, atol=1e-5)


def test_what_a_configuration_writes_down_otherwise_comes_back_as_it_is(words, tmp_path):
    """One that is told to read both ways narrows its window when it is made, and saves the wide one."""
    shape = GROUPED | {"head_dim": 8, "sliding_window": 20, "use_bidirectional_attention": True}
    model = untrained(
        Gemma3ForCausalLM, Gemma3TextConfig, **shape, layer_types=["sliding_attention", "full_attention"]
    )
    write_encoder(model, words, tmp_path)
    back = from_hub(Hub(str(tmp_path)), Known(320, 1, mask_is_new=False), length=60).eval()
    ids, places = torch.arange(3, 63)[None], torch.arange(60)[None]
    with torch.no_grad():
        first, second = (one.hidden(ids, places, AttentionPattern(causal=False)) for one in (model, back))
    assert torch.allclose(first, second, rtol=1e-4, atol=1e-5)


def test_eurobert_reads_no_further_than_the_window_that_it_cannot_have(words, tmp_path):
    model = untrained(
        MistralForCausalLM,
        MistralConfig,
        **(GROUPED | {"sliding_window": 64, "max_position_embeddings": 512}),
    )
    written = write_encoder(model, words, tmp_path)  # trained on rows of 60: inside its window
    assert written.native
    assert json.loads((tmp_path / "config.json").read_text())["max_position_embeddings"] == 64
