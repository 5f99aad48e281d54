"""`biphase export` as it is typed: one folder, whole or not at all, and one line for every mistake."""

import shutil
import sys

import pytest

from biphase.cli import main
from biphase.errors import SpecError, StoreError
from biphase.export.folder import SavedTrial, building, find
from biphase.store import Store, publish, read_json, write_json


@pytest.fixture
def verb(monkeypatch, capsys, trained):
    """Type a command in this process; gives its exit code, what it printed, and what it told."""

    def typed(*words, store=None):
        monkeypatch.setattr(
            sys, "argv", ["biphase", "export", *map(str, words), "--store", str(store or trained.store.root)]
        )
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
        said = capsys.readouterr()
        return code, said.out, said.err

    return typed


def test_a_state_by_its_first_digits(verb, trained, tmp_path):
    place = tmp_path / "new" / "folder"
    code, out, err = verb(trained.results["masked"][:10], place)
    assert code == 0, err
    assert out.startswith(
        f"{place}: EuroBertForMaskedLM; read again by transformers, its numbers differ by at most"
    )
    assert (place / "model.safetensors").is_file()
    assert [path.name for path in place.parent.iterdir()] == ["folder"]


def test_an_empty_folder_may_be_there(verb, trained, tmp_path):
    (tmp_path / "empty").mkdir()
    assert verb(trained.results["masked"][:10], tmp_path / "empty")[0] == 0
    assert (tmp_path / "empty" / "README.md").is_file()


def test_nothing_is_written_over(verb, trained, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    code, out, err = verb(trained.results["masked"][:10], tmp_path / "mine")
    assert (code, out) == (2, "")
    assert (
        err
        == f"error: {tmp_path / 'mine'} is not empty, and an export never writes over anything; type another folder\n"
    )
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    (tmp_path / "file").write_text("x")
    assert "is a file" in verb(trained.results["masked"][:10], tmp_path / "file")[2]


@pytest.mark.parametrize(
    ("digits", "line"),
    [
        ("xyz", "'xyz' is no key: type the first 6 or more digits"),
        ("abc", "'abc' is no key"),
        ("../../etc", "is no key"),
        ("0" * 12, "names no one result of"),
    ],
)
def test_what_is_no_key_is_refused(digits, line, verb, tmp_path):
    code, out, err = verb(digits, tmp_path / "out")
    assert (code, out) == (2, "")
    assert line in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_digits_that_several_results_share_are_refused(trained, tmp_path):
    store = Store(tmp_path)
    key = trained.results["masked"]
    shutil.copytree(trained.store.checkpoints / key, store.checkpoints / key)
    trial = next(iter(trained.store.trials.iterdir()))
    alike = store.trials / f"{key[:12]}{trial.name[12:]}"
    built = shutil.copytree(trial, tmp_path / "built")
    write_json(built / "trial.json", read_json(built / "trial.json") | {"key": alike.name})
    (built / "manifest.json").unlink()
    publish(built, alike)
    with pytest.raises(SpecError, match="2 results begin with it; type more digits"):
        find(key[:8], store)
    assert find(key, store).key == key
    assert isinstance(find(alike.name, store), SavedTrial)
    (store.checkpoints / key / "manifest.json").unlink()  # no manifest, no result
    with pytest.raises(StoreError, match=f"{key}.*no manifest"):
        find(key, store)


def test_options_that_do_not_belong_together(verb, trained, tmp_path):
    trial = next(iter(trained.store.trials.iterdir())).name
    code, _, err = verb(trial, tmp_path / "out", "--task", "kinds")
    assert code == 2
    assert "is the key of a fine-tuned model already; leave out --task" in err
    code, _, err = verb(trained.results["masked"], tmp_path / "out", "--public")
    assert code == 2
    assert "type --push owner/name" in err


def test_without_the_shards_the_refusal_says_what_to_do(verb, trained, tmp_path):
    store = Store(tmp_path / "carried")
    key = trained.results["masked"]
    shutil.copytree(trained.store.checkpoints / key, store.checkpoints / key)
    code, _, err = verb(key, tmp_path / "out", store=store.root)
    assert code == 2
    assert "type: biphase tokenize CORPUS" in err
    assert not (tmp_path / "out").exists()


def test_a_damaged_state_is_not_exported(verb, trained, tmp_path):
    store = Store(tmp_path / "damaged")
    key = trained.results["masked"]
    shutil.copytree(trained.store.checkpoints / key, store.checkpoints / key)
    shutil.copytree(trained.store.shards, store.shards, symlinks=True)
    with (store.checkpoints / key / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\0\0\x80\x3f")
    code, _, err = verb(key, tmp_path / "out", store=store.root)
    assert code == 2
    assert "has changed since it was written" in err
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


# ---------------------------------------------------------------- whole or not at all


def test_what_fails_on_its_way_leaves_nothing(tmp_path):
    def half():
        with building(tmp_path / "out") as folder:
            (folder / "half.txt").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half()
    assert not list(tmp_path.iterdir())


def test_whoever_was_faster_keeps_the_place(tmp_path):
    place = tmp_path / "out"

    def slow():
        with building(place) as folder:
            (folder / "mine.txt").write_text("mine")
            place.mkdir()
            (place / "other.txt").write_text("other")

    with pytest.raises(SpecError, match="is not empty"):
        slow()
    assert [path.name for path in tmp_path.rglob("*.txt")] == ["other.txt"]
