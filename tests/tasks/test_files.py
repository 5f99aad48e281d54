"""The files of a task: patterns mean what they say, the content counts, and the hub's cache is enough."""

import json
from dataclasses import replace

import pytest

from biphase.data.corpus import Absent
from biphase.errors import DataError, SpecError
from biphase.specs import Classify, Retrieve, Splits, Task
from biphase.specs.sources import HubPlace
from biphase.store import Store
from biphase.tasks.files import files_of, matching, parts_of, task_fingerprint, task_key

FORM = Classify("{text}", ("a", "b"))
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TEST_HALF = Splits("qrels/train*", "", "qrels/test*", cut=0.5, cut_from="test")


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def fill(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text,label\n{name},a\n")
    return folder


def mine(source, **fields):
    return Task("mine", **{"form": FORM, "source": str(source), **fields})


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of the hub as its library leaves it: files, and the list of all that the repository has."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    def make(repository, *names, listed=(), commit=COMMIT):
        folder = tmp_path / "cache" / f"datasets--{repository.replace('/', '--')}"
        fill(folder / "snapshots" / commit, *names)
        (folder / "trees").mkdir(parents=True)
        files = {name: {"size": 1, "blob_id": "0" * 40} for name in (*names, *listed)}
        (folder / "trees" / f"{commit}.json").write_text(json.dumps({"format_version": 1, "files": files}))
        return folder / "snapshots" / commit

    return make


SHARDS = "train-00001-of-00002.csv train-00000-of-00002.csv train_extra/more.csv train.md .train.csv"
FOLDERS = "corpus/corpus-00000-of-00001.csv corpus_old/x.csv queries/q.csv corpus/deep/x.csv"


@pytest.mark.parametrize(
    ("there", "pattern", "found"),
    [
        (SHARDS, "train*", "train-00000-of-00002.csv train-00001-of-00002.csv"),
        ("test.csv.gz data/test.csv", "test*", "test.csv.gz"),
        ("test.csv.gz data/test.csv", "test.csv", "test.csv.gz"),
        ("test.csv.gz data/test.csv", "data/*", "data/test.csv"),
        ("test.csv.gz data/test.csv", "d?ta/test*", "data/test.csv"),
        ("train.csv train.txt", "train*", "train.csv"),
        ("[1]/train.csv 1/train.csv", "[1]/train.csv", "[1]/train.csv"),  # it exists
        (FOLDERS, "corpus*", "corpus/corpus-00000-of-00001.csv"),
        (FOLDERS, "queries", "queries/q.csv"),
        (FOLDERS, "pairs*", ""),
        ("train/a.arrow train/state.json train/dataset_info.json", "train*", ""),  # of save_to_disk
    ],
)
def test_a_pattern_means_the_same_files_in_a_folder_and_on_the_hub(there, pattern, found, cache, tmp_path):
    folder = fill(tmp_path / "data", *there.split())
    assert [path.relative_to(folder).as_posix() for path in matching(folder, pattern)] == found.split()
    if found:
        snapshot = cache("owner/one", *there.split())
        paths = files_of(mine(f"hf://owner/one@{COMMIT}", splits=Splits(pattern, pattern, pattern)))["test"]
        assert [path.relative_to(snapshot).as_posix() for path in paths] == found.split()


@pytest.mark.parametrize(
    ("there", "train", "error", "words"),
    [
        (
            "train.csv train.jsonl",
            "train*",
            DataError,
            r"kinds \(train.csv, train.jsonl\).*name.*e.g. 'train.csv'",
        ),
        ("train.csv train.csv.gz", "train*", DataError, "same rows"),
        ("training.csv zebra.csv", "tran*", Absent, r"matches 'tran\*' .*there are training.csv"),
        ("", "train*", Absent, "nothing like"),
        ("", "**/train*", DataError, r"\*\*.*not known"),
    ],
)
def test_a_pattern_without_files_or_with_too_many_is_refused(there, train, error, words, tmp_path):
    folder = fill(tmp_path / "data", *there.split())
    with pytest.raises(error, match=words) as caught:
        files_of(mine(folder, splits=Splits(train=train)))
    assert str(folder) in str(caught.value) or "**" in train


def test_one_file_is_the_train_part_and_the_others_stand_beside_it(tmp_path):
    fill(tmp_path, "rows.csv", "held.csv", "train.csv")
    splits = Splits(test="held*")
    found = files_of(mine(tmp_path / "rows.csv", splits=splits))
    assert {part: paths[0].name for part, paths in found.items()} == {"train": "rows.csv", "test": "held.csv"}
    for words, fields in (
        ("the source", {"splits": Splits(train="train.csv", test="held*")}),
        ("retrieval needs", {"form": Retrieve(), "splits": splits}),
    ):
        with pytest.raises(SpecError, match=words):
            files_of(mine(tmp_path / "rows.csv", **fields))


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({}, "train test"),
        ({"form": Retrieve(pairs="pairs*"), "splits": TEST_HALF}, "test queries corpus pairs"),
        ({"form": Retrieve(pairs="pairs*"), "splits": TEST_HALF, "trained_on": "y"}, "test queries corpus"),
        ({"trained_on": "y"}, "train test"),  # validation is cut from train
        ({"splits": Splits("", "v", "t"), "trained_on": "y"}, "validation test"),
        ({"form": Retrieve(queries="")}, "train test corpus"),
    ],
)
def test_only_the_parts_that_are_used_are_looked_for(fields, parts):
    assert set(parts_of(mine("./x", **fields))) == set(parts.split())


def test_a_cut_from_nothing_is_refused_with_what_to_type():
    for task in (
        mine("./x", form=Retrieve(pairs="pairs*")),
        mine("./x", splits=Splits(train=""), trained_on="y"),
    ):
        with pytest.raises(SpecError, match=r"train.*part.*Splits\(cut_from='test', cut=0.5\)"):
            parts_of(task)
    with pytest.raises(SpecError, match="names no"):
        parts_of(mine("./x", form=Retrieve(corpus="")))


# ---------------------------------------------------------------- identity


def test_the_content_counts_and_not_the_place_or_the_name(tmp_path, store):
    one = fill(tmp_path / "one", "train.csv", "test.csv")
    two = fill(tmp_path / "two", "train.csv", "test.csv")
    before = task_key(mine(one), store)
    assert task_key(replace(mine(two), name="other"), store) == before
    moved = mine(tmp_path, splits=Splits("one/train.csv", "", "two/test*"))
    assert task_fingerprint(moved, store) == task_fingerprint(mine(one), store)
    assert task_key(moved, store) == before
    (two / "train.csv").write_text("text,label\nelse,a\n")
    assert task_key(mine(two), store) != before
    assert task_key(mine(one), store) == before


def test_whatever_changes_the_examples_or_the_training_changes_the_key_and_nothing_else_does(tmp_path, store):
    source = fill(tmp_path / "data", "train.csv", "test.csv", "validation.csv")
    own = Splits(validation="validation*")
    changes = [
        {},
        {"form": replace(FORM, label="other")},
        {"form": replace(FORM, text="{text}!")},
        {"form": Classify("{text}", ("b", "a"))},
        *({"splits": Splits(**field)} for field in ({"seed": 1}, {"cut": 0.1}, {"cut_from": "test"}, {"rows": (1, 0, 0)})),
        *({field: value} for field, value in (("steps", 7), ("epochs", 1), ("epochs", 2), ("batch", 7))),
    ]  # fmt: skip
    assert len({task_key(mine(source, **fields), store) for fields in changes}) == len(changes)
    borrowed = {"splits": replace(own, train="", rows=(5, 0, 0)), "trained_on": "y", "batch": 1}
    for one, other in (
        ({"splits": own}, {"splits": replace(own, seed=1, cut=0.2, cut_from="test")}),
        ({"epochs": 1}, {"epochs": 1, "steps": 7}),
        ({"splits": own, "trained_on": "x"}, borrowed),
    ):
        assert task_key(mine(source, **one), store) == task_key(mine(source, **other), store)


def test_a_hub_task_is_its_pinned_places_however_they_are_written(store):
    one = mine(f"hf://owner/name@{COMMIT}/data")
    spelled = mine("./nowhere", splits=Splits(f"{one.source}/train*", "", f"{one.source}/test*"))
    assert task_key(one, store) == task_key(spelled, store)
    assert task_key(one, store) != task_key(mine(f"hf://owner/name@{COMMIT[::-1]}/data"), store)
    unpinned = mine("hf://owner/name/data")  # it can be planned, not read
    assert task_key(unpinned, store) != task_key(one, store)
    with pytest.raises(DataError, match=r"commit.*owner/name is pinned.*task.pin.*hf download owner/name"):
        files_of(unpinned)


# ---------------------------------------------------------------- the hub


def test_a_hub_address_is_taken_apart():
    assert HubPlace.of("", f"hf://o/n@{COMMIT}/a/b*") == HubPlace("o/n", COMMIT, "a/b*")
    assert HubPlace.of("", "hf://o/n/a") == HubPlace("o/n", "", "a")
    for wrong in ("hf://o", "hf://o/", "hf:///n@1/x", "hf://o/n@/x"):
        with pytest.raises(SpecError, match="is not hf://owner/name@revision/path"):
            HubPlace.of("task", wrong)
    for wrong in ("hf://o/n@1/../x", "hf://o/n@1//etc/x", "hf://o/n@1/~/x"):
        with pytest.raises(SpecError, match="leaves the repository"):
            HubPlace.of("task", wrong)


def test_what_is_in_the_cache_needs_no_network_and_a_part_may_be_local(cache, tmp_path):
    cache("owner/one", "sst2/train.csv", "sst2/README.md", listed=["rte/train.csv"])
    cache("owner/two", "qrels/test.tsv", "qrels/deep/test.tsv")
    local = fill(tmp_path / "copy", "dev.csv")
    splits = Splits(validation=f"{local}/dev*", test=f"hf://owner/two@{COMMIT}/qrels/test*")
    found = files_of(mine(f"hf://owner/one@{COMMIT}/sst2", splits=splits))
    assert found["validation"] == (local / "dev.csv",)
    assert [path.parts[-3:] for path in found["train"]] == [(COMMIT, "sst2", "train.csv")]
    assert [path.parts[-3:] for path in found["test"]] == [(COMMIT, "qrels", "test.tsv")]
    assert all(path.is_file() for paths in found.values() for path in paths)


@pytest.mark.parametrize("copied", [False, True], ids=["absent", "broken off"])
def test_a_hub_that_cannot_be_reached_is_one_line_with_the_way_around_it(copied, cache):
    if copied:
        cache("owner/one", "train-0-of-2.csv", "test.csv", listed=["train-1-of-2.csv"])
    with pytest.raises(DataError) as caught:
        files_of(mine(f"hf://owner/one@{COMMIT}"))
    text = str(caught.value)
    assert f"hf download owner/one --repo-type dataset --revision {COMMIT} --local-dir FOLDER/one" in text
    assert "--data FOLDER" in text
    assert "\n" not in text
