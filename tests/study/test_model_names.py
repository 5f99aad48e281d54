"""A model as the command line names it."""

import json

import pytest

from biphase import Hub
from biphase.errors import SpecError
from biphase.store import Store
from biphase.study.archive import PINS
from biphase.study.load import run_named

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def bare(tmp_path):
    return Store(tmp_path / "store")


def refused(words, model, store, **how):
    with pytest.raises(SpecError, match=words) as caught:
        run_named(str(model), store, **how)
    assert "\n" not in str(caught.value)


def test_a_folder_is_a_start_by_its_whole_path(bare, tmp_path, monkeypatch):
    (tmp_path / "my model").mkdir()
    (tmp_path / "my model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    made = run_named("./my model", bare, windows="full")
    assert made.start == Hub(str(tmp_path / "my model"), windows="full")
    assert (made.name, made.stages) == ("my-model", ())
    assert run_named("my model", bare).start == Hub(str(tmp_path / "my model"))


def test_of_a_gguf_the_file_must_be_there_and_no_configuration(bare, tmp_path):
    (tmp_path / "a.gguf").touch()
    assert run_named(str(tmp_path), bare, gguf="a.gguf").start == Hub(str(tmp_path), gguf="a.gguf")
    refused(r"has no file b\.gguf; of the GGUF there: --gguf a\.gguf", tmp_path, bare, gguf="b.gguf")
    refused(r"has no config\.json; .*; of the GGUF there: --gguf a\.gguf", tmp_path, bare)
    refused("gguf is the name of a file there", tmp_path, bare, gguf="../a.gguf")


def test_a_name_alone_means_the_commit_that_the_store_knows(bare):
    bare.root.mkdir()
    (bare.root / PINS).write_text(json.dumps({"org/some.model": COMMIT}))
    made = run_named("org/some.model", bare, gguf="q.gguf")
    assert made.start == Hub("org/some.model", revision=COMMIT, gguf="q.gguf")
    assert made.name == "some.model"
    said = run_named(f"org/some.model@{'a' * 40}", bare)
    assert said.start == Hub("org/some.model", revision="a" * 40), "what is said counts"


def test_how_a_hub_model_is_read_is_not_for_a_state(plan, finished):
    whole = plan.results["clm"]
    assert run_named(whole[:8], finished).name == "clm"
    for how in ({"gguf": "a.gguf"}, {"windows": "full"}):
        refused("is a model trained here: --gguf and --windows are for others", whole[:8], finished, **how)


@pytest.mark.parametrize("model", ["abc12", "a/b/c", "hf://a/b@1", "nowhere"])
def test_what_is_nothing_is_refused_with_what_could_be(bare, model):
    refused(
        "there is no model .*: type a local folder, owner/name@commit, or the first digits of", model, bare
    )
