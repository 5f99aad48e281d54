"""What `biphase adapt` refuses: in one line, with what to type, before anything is computed."""

import json
import shutil

import pytest


@pytest.fixture
def text(corpus):
    """The corpus as it is said on the command line."""
    return ("--corpus", corpus.source, "--heldout", corpus.heldout)


@pytest.fixture
def refused(verb, tmp_path):
    """A command that is refused in one line; gives it."""

    def typed(*words):
        code, out, err = verb("adapt", *words, "--store", tmp_path / "store", "--steps", 2)
        assert code == 2, err
        assert out == ""
        lines = err.strip().splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith("error: ")
        assert not (tmp_path / "store" / "studies").exists(), "nothing was begun"
        return lines[0]

    return typed


CORPUS = ("--corpus", "{corpus}", "--heldout", "{heldout}")


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (("{llama}",), "--corpus builtin"),
        (("{llama}", "--corpus", "./absent.jsonl"), "./absent.jsonl"),
        (("{llama}", *CORPUS[:2], "--heldout", "absent.jsonl"), "absent.jsonl"),
        (("{llama}", *CORPUS, "--objective", "mln"), "'mlm'"),
        (("{llama}", *CORPUS, "--windows", "half"), "'symmetric' or 'full'"),
        (("{llama}", *CORPUS, "--layer-decay", "0"), "layer_decay"),
        (("{llama}", *CORPUS, "--rope-base", "0.5"), "rope_base"),
        (("{llama}", *CORPUS, "--tasks", "nowhere"), "'nowhere'"),
        (("{llama}", *CORPUS, "--gguf", "a.gguf"), "a.gguf"),
        (("{llama}", *CORPUS, "--gguf", "../a.gguf"), "gguf"),
        (("{empty}", *CORPUS), "config.json"),
        (("{gguf}", *CORPUS), "--gguf tiny.gguf"),
        (("{gguf}", *CORPUS, "--gguf", "absent.gguf"), "--gguf tiny.gguf"),
        (("./nowhere", *CORPUS), "'./nowhere'"),
        (("org/model@main", *CORPUS), "'main'"),
        (("org/model", *CORPUS), "org/model"),
        (("abcdef12", *CORPUS), "abcdef12"),
    ],
    ids=lambda value: " ".join(value[:1] + value[-2:]) if isinstance(value, tuple) else "",
)
def test_a_wrong_option_or_model_is_refused(refused, llama, gguf_folder, corpus, tmp_path, words, facts):
    (tmp_path / "empty").mkdir()
    paths = {
        "llama": llama, "gguf": gguf_folder, "empty": tmp_path / "empty", "corpus": corpus.source,
        "heldout": corpus.heldout,
    }  # fmt: skip
    assert facts in refused(*(word.format(**paths) for word in words))


def test_a_tokenizer_without_an_end_token_or_files_is_refused(refused, llama, words, text, tmp_path):
    shutil.copytree(llama, tmp_path / "endless")
    other = json.dumps(words).replace("<|end_of_text|>", "<|other|>")
    (tmp_path / "endless" / "tokenizer.json").write_text(other)
    (tmp_path / "endless" / "tokenizer_config.json").write_text("{}")
    assert "which token" in refused(tmp_path / "endless", *text)
    for path in (tmp_path / "endless").glob("tokenizer*"):
        path.unlink()
    assert "tokenizer.json" in refused(tmp_path / "endless", *text)


UNPINNED = """
from biphase import MLM, WSD, Corpus, Hub, Pretrain, Pretrained, Stage, Study

corpus = Corpus("tiny", {source!r}, Pretrained({tokenizer!r}))
study = Study("unpinned", runs=(Pretrain("a", Hub("owner/name"), corpus, (Stage(MLM(0.4), 40),), WSD(1e-4, 2, 8)),))
"""


def test_an_unpinned_hub_model_is_planned_offline_and_refused_by_run(verb, corpus, llama, tmp_path):
    study = tmp_path / "unpinned.py"
    study.write_text(UNPINNED.format(source=corpus.source, tokenizer=str(llama)))
    code, out, err = verb("plan", study, "--store", tmp_path / "store")
    assert code == 0, err
    assert "mlm 40%" in out
    code, out, err = verb("run", study, "--store", tmp_path / "store")
    assert (code, out) == (2, "")
    (line,) = err.strip().splitlines()
    assert "Hub('owner/name', revision='<commit>')" in line
    assert not (tmp_path / "store" / "pins.json").exists()
