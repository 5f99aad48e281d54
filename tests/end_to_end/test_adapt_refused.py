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
        code, out, told = verb("adapt", *words, "--store", tmp_path / "store", "--steps", 2)
        assert code == 2, told
        assert out == ""
        lines = told.strip().splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith("error: ")
        assert not (tmp_path / "store" / "studies").exists(), "nothing was begun"
        return lines[0]

    return typed


def test_what_makes_no_sense_gets_one_line(refused, llama, text):
    assert "say which text to learn from: --corpus builtin" in refused(llama)
    assert "there is no corpus and no file './absent.jsonl'" in refused(llama, "--corpus", "./absent.jsonl")
    assert "--objective mln: did you mean 'mlm'?" in refused(llama, *text, "--objective", "mln")
    assert "must be 'symmetric' or 'full'" in refused(llama, *text, "--windows", "half")
    assert "layer_decay must lie in (0, 1]" in refused(llama, *text, "--layer-decay", "0")
    assert "rope_base must be at least 1" in refused(llama, *text, "--rope-base", "0.5")
    assert "there is no task and no file 'nowhere'" in refused(llama, *text, "--tasks", "nowhere")
    assert "is not there" in refused(llama, *text[:2], "--heldout", "absent.jsonl")


def test_what_is_no_model_gets_one_line(refused, llama, gguf_folder, text, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "empty has no config.json; give the folder of a" in refused(tmp_path / "empty", *text)
    assert "of the GGUF there: --gguf tiny.gguf" in refused(gguf_folder, *text)
    assert "there is no model './nowhere'" in refused("./nowhere", *text)
    absent = refused(gguf_folder, *text, "--gguf", "absent.gguf")
    assert "has no file absent.gguf; of the GGUF there: --gguf tiny.gguf" in absent
    assert "has no file a.gguf; give the folder that has it" in refused(llama, *text, "--gguf", "a.gguf")
    assert "gguf is the name of a file there" in refused(llama, *text, "--gguf", "../a.gguf")
    assert "'main' is a branch and moves; give the commit" in refused("org/model@main", *text)
    assert "which commit of org/model is meant cannot be found out" in refused("org/model", *text)
    assert "no checkpoint abcdef12" in refused("abcdef12", *text)


def test_a_tokenizer_that_cannot_be_used_gets_one_line(refused, llama, words, text, tmp_path):
    shutil.copytree(llama, tmp_path / "endless")
    other = json.dumps(words).replace("<|end_of_text|>", "<|other|>")
    (tmp_path / "endless" / "tokenizer.json").write_text(other)
    (tmp_path / "endless" / "tokenizer_config.json").write_text("{}")
    assert "does not say which token ends a text; put" in refused(tmp_path / "endless", *text)
    for path in (tmp_path / "endless").glob("tokenizer*"):
        path.unlink()
    said = refused(tmp_path / "endless", *text)
    assert "has no tokenizer that can be loaded" in said
    assert "put its tokenizer.json beside it" in said


UNPINNED = """
from biphase import MLM, WSD, Corpus, Hub, Pretrain, Pretrained, Stage, Study

corpus = Corpus("tiny", {source!r}, Pretrained({tokenizer!r}))
study = Study("unpinned", runs=(Pretrain("a", Hub("owner/name"), corpus, (Stage(MLM(0.4), 40),), WSD(1e-4, 2, 8)),))
"""


def test_a_study_of_a_hub_model_plans_offline_and_asks_for_its_commit_when_it_runs(
    verb, corpus, llama, tmp_path
):
    study = tmp_path / "unpinned.py"
    study.write_text(UNPINNED.format(source=corpus.source, tokenizer=str(llama)))
    code, out, told = verb("plan", study, "--store", tmp_path / "store")
    assert code == 0, told
    assert "mlm 40%" in out
    code, out, told = verb("run", study, "--store", tmp_path / "store")
    assert (code, out) == (2, "")
    (line,) = told.strip().splitlines()
    assert "error: which commit of owner/name is meant cannot be found out" in line
    assert "Hub('owner/name', revision='<commit>')" in line
    assert not (tmp_path / "store" / "pins.json").exists()
