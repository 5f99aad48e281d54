"""Loading from a hub or folder: the paper's checkpoints as EuroBERT, and converted tokenizers."""

import json
import shutil

import pytest
import torch
from families.tiny import refused
from safetensors.torch import save_file
from transformers import EuroBertConfig, EuroBertForMaskedLM

from biphase.models.hub import language_model, load_tokenizer, trunk
from biphase.specs import Hub

# ---------------------------------------------------------------- the paper's checkpoints


LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, VOCAB = 3, 32, 4, 2, 48, 64
HEAD_WIDTH = HIDDEN // HEADS
HEAD = "lm_head.weight"
IDS = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 40, "rms_norm_eps": 1e-5,
    "pad_token_id": 6,
}  # fmt: skip
# A config.json as the published class writes it.
PUBLISHED = SHAPE | {
    "architectures": ["SLModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_sl_model.SLModelConfig",
        "AutoModel": "modeling_sl_model.SLModel",
    },
    "bos_token_id": 5,
    "classifier_pooling": "mean",
    "eos_token_id": 6,
    "head_dim": HEAD_WIDTH,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "is_causal": False,
    "mask_token_id": 7,
    "mlp_bias": False,
    "model_type": "sl_model",
    "pretraining_tp": 1,
    "retrieval_pooling": "mean",
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.48.3",
    "use_cache": False,
}


def original(**fields):
    """A tiny model of the paper's shape, none of whose weights is 0 or 1."""
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    model = EuroBertForMaskedLM(EuroBertConfig(**SHAPE | rope | fields)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return model


def of_the_class(weights):
    """The names of the published class, whose trunk is saved alone."""
    return {name.removeprefix("model."): weight for name, weight in weights.items() if name != HEAD}


@pytest.fixture
def published(tmp_path):
    """Writes a folder of a published model: `published(weights, hidden_size=…)`."""

    def write(weights, config=PUBLISHED, **fields):
        (tmp_path / "config.json").write_text(json.dumps(config | fields))
        weights = {name: weight.contiguous() for name, weight in weights.items()}
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
        return Hub(str(tmp_path))

    return write


@torch.no_grad()
def hidden(model):
    model.set_attn_implementation("sdpa")
    return model.eval().base_model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).last_hidden_state


@pytest.mark.parametrize("fields", [{}, {"attention_bias": True, "mlp_bias": True}], ids=["", "biases"])
@pytest.mark.parametrize("layout", [of_the_class, dict])
def test_hidden_states_are_equal_bit_for_bit(layout, fields, published):
    model = original(**fields)
    hub = published(layout(model.state_dict()), **fields, is_causal=True)  # the direction is ignored
    loaded = trunk(hub)
    assert torch.equal(hidden(loaded), hidden(model))
    for name in (*SHAPE, "bos_token_id", "eos_token_id", "mask_token_id"):
        assert getattr(loaded.config, name) == PUBLISHED[name], name
    assert loaded.config.classifier_pooling == "mean"
    if layout is dict:
        assert torch.equal(language_model(hub).lm_head.weight, model.lm_head.weight)
    else:
        assert "without a head" in refused(language_model, hub)


UP = "layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("weights", "fact"),
    [
        ({UP: None}, UP),
        ({UP: torch.zeros(FFN, HIDDEN - 1)}, UP),
        ({"classifier.weight": torch.zeros(HIDDEN)}, "'classifier.weight'"),
        ({"layers.0.self_attn.q_norm.weight": torch.zeros(HIDDEN)}, "q_norm.weight"),
    ],
)
def test_a_missing_misshapen_or_unknown_weight_is_refused_by_name(weights, fact, published):
    weights = of_the_class(original().state_dict()) | weights
    hub = published({name: weight for name, weight in weights.items() if weight is not None})
    assert fact in refused(trunk, hub)


def test_a_tied_head_that_differs_is_refused(published):
    """transformers would take it without a word."""
    whole = original().state_dict()
    assert "tie_word_embeddings" in refused(language_model, published(whole, tie_word_embeddings=True))
    same = {**whole, "lm_head.weight": whole["model.embed_tokens.weight"].clone()}
    tied = language_model(published(same, tie_word_embeddings=True))
    assert torch.equal(tied.lm_head.weight, tied.model.embed_tokens.weight)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "wide"),
        ("rope_scaling", {"rope_type": "no such kind"}),
        ("num_hidden_layers", LAYERS - 1),
        ("num_key_value_heads", HEADS),
    ],
)
def test_a_config_that_does_not_fit_the_weights_is_refused(field, value, published):
    refused(trunk, published(of_the_class(original().state_dict()), **{field: value}))


# ---------------------------------------------------------------- tokenizers


TEXTS = (
    "the cat sat on the mat",
    "a dog ran over the hill to the long road",
    "two birds sing in the old tree at night",
)


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory):
    """Files of a BPE and of a unigram model of a few texts."""
    from sentencepiece import SentencePieceTrainer

    folder = tmp_path_factory.mktemp("sentencepiece")
    for kind in ("bpe", "unigram"):
        SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS * 100),
            model_prefix=str(folder / kind),
            model_type=kind,
            vocab_size=320,
            byte_fallback=kind == "bpe",
            hard_vocab_limit=False,
            minloglevel=2,
        )
    return folder


@pytest.fixture
def folder(sentencepiece, tmp_path):
    """Makes a folder with such a file, Llama's type in its configuration, and a tokenizer configuration."""

    def make(kind, **config):
        shutil.copy(sentencepiece / f"{kind}.model", tmp_path / "tokenizer.model")
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
        if config:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return Hub(str(tmp_path))

    return make


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("bpe", {}),  # transformers accepts such a folder, and omits the first space
        ("bpe", {"tokenizer_class": "LlamaTokenizer"}),
        ("unigram", {"tokenizer_class": "T5Tokenizer"}),
    ],
)
def test_a_converted_tokenizer_gives_the_pieces_of_its_file(kind, config, folder, sentencepiece):
    from sentencepiece import SentencePieceProcessor

    original = SentencePieceProcessor(model_file=str(sentencepiece / f"{kind}.model"))
    tokenizer = load_tokenizer(folder(kind, **config)).backend_tokenizer
    for text in (*TEXTS, "the night sat on a bird", *(["Zürich ☃"] if kind == "bpe" else [])):
        assert tokenizer.encode(text, add_special_tokens=False).tokens == original.encode(text, out_type=str)


def test_a_conversion_with_other_pieces_is_refused(folder):
    message = refused(load_tokenizer, folder("unigram", tokenizer_class="LlamaTokenizer"))
    assert "tokenizer.model" in message
    assert "tokenizer.json" in message


def test_code_of_a_tokenizer_is_never_run(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    config = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Evil: ...\n")
    message = refused(load_tokenizer, Hub(str(tmp_path)))
    assert "auto_map" in message
    assert "trust_remote_code" not in message
    assert not (tmp_path / "ran").exists()
