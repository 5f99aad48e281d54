"""The tokenizer beside a model: SentencePiece models are converted so that they cut text as before, or are refused."""

import importlib.util
import json
import shutil
import sys

import pytest

from biphase.errors import ModelError
from biphase.models.hub import load_tokenizer
from biphase.specs import Hub

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
def model(sentencepiece, tmp_path):
    """A folder with such a file and a configuration of Llama's; what else the tokenizer's own one says."""

    def make(kind, **said):
        shutil.copy(sentencepiece / f"{kind}.model", tmp_path / "tokenizer.model")
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
        if said:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
        return Hub(str(tmp_path))

    return make


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("bpe", {}),  # transformers takes such a folder without a word, and leaves out the first space
        ("bpe", {"tokenizer_class": "LlamaTokenizer"}),
        ("unigram", {"tokenizer_class": "T5Tokenizer"}),
    ],
)
def test_a_converted_tokenizer_cuts_text_as_its_file_does(kind, said, model, sentencepiece):
    from sentencepiece import SentencePieceProcessor

    own = SentencePieceProcessor(model_file=str(sentencepiece / f"{kind}.model"))
    made = load_tokenizer(model(kind, **said)).backend_tokenizer
    for text in (*TEXTS, "the night sat on a bird", *(["Zürich ☃"] if kind == "bpe" else [])):
        assert made.encode(text, add_special_tokens=False).tokens == own.encode(text, out_type=str)


def test_what_transformers_would_cut_otherwise_is_refused(model):
    with pytest.raises(ModelError, match=r"tokenizer\.model.*tokenizer\.json") as refused:
        load_tokenizer(model("unigram", tokenizer_class="LlamaTokenizer"))
    assert "\n" not in str(refused.value)


def test_a_package_that_is_not_there_is_named(model, monkeypatch, capfd):
    """As on a machine without it: nothing can be imported under that name, and it is not found there."""
    found = importlib.util.find_spec
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    absent = lambda name, *more: None if name == "sentencepiece" else found(name, *more)  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", absent)
    monkeypatch.setattr("biphase.models.hub.find_spec", absent)
    with pytest.raises(ModelError, match=r"pip install sentencepiece$") as refused:
        load_tokenizer(model("bpe", tokenizer_class="LlamaTokenizer"))
    assert "\n" not in str(refused.value)
    assert capfd.readouterr() == ("", ""), "one line is all that is said"


def test_code_of_a_tokenizer_is_never_run(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    told = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Evil: ...\n")
    with pytest.raises(ModelError, match="code of its own") as refused:
        load_tokenizer(Hub(str(tmp_path)))
    assert "trust_remote_code" not in str(refused.value)
    assert not (tmp_path / "ran").exists()
