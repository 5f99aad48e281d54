"""Datasets and corpora that are replaced while a study runs: old scores are never reported for new data."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from common import sentences
from faults.kinds import plan_of
from faults.tiny import write_study

from biphase.data.corpus import HashMemory
from biphase.store import Store
from biphase.study.ledger import finetunings


@pytest.fixture
def mine(calm, tmp_path) -> tuple[Path, Store]:
    """The study with input files of its own, finished."""
    study = write_study(tmp_path / "input", sentences(300))
    store = calm.copied(tmp_path / "store")
    assert left(study, store) == 0
    return study, store


def left(study: Path, store: Store) -> int:
    """Return the number of missing checkpoints and trials in a new plan."""
    plan = plan_of(study, store)
    trials = [trial.key for training in finetunings(plan) for trial in training.trials]
    return sum(not store.has(store.checkpoints / key) for key in plan.jobs) + sum(
        not store.has(store.trials / key) for key in trials
    )


def turned(content: bytes, chance: random.Random) -> bytes:
    """Other rows of the same length: two digits change places, or one becomes another."""
    places = [n for n, byte in enumerate(content) if chr(byte).isdigit() and chr(content[n + 1]) == '"']
    place = chance.choice(places)
    other = chance.choice([digit for digit in b"0123456789" if digit != content[place]])
    return content[:place] + bytes([other]) + content[place + 1 :]


def replace(path: Path, chance: random.Random, *, by_rename: bool = False) -> None:
    """Other content, of the same size and with the same time of change, as archives with fixed times give it.

    Either in place or, as tar, rsync and most programs do, by a rename.
    """
    was = path.stat()
    draft = path.with_suffix(".new") if by_rename else path
    draft.write_bytes(turned(path.read_bytes(), chance))
    draft.replace(path)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (was.st_size, was.st_mtime_ns)


def fool(store: Store, path: Path, digest: str) -> None:
    """Let the memory of hashes vouch for a file as it is now with the hash that it had: no stamp is perfect."""
    memory = HashMemory(store)
    memory.sha256(path)
    memory.remember(path, digest)
    memory.save()


@pytest.mark.parametrize(
    ("name", "by_rename"), [("tasks/beasts/test.jsonl", False), ("text/train.jsonl", True)]
)
def test_a_replaced_file_of_the_same_size_and_time_has_another_key(mine, name, by_rename):
    study, store = mine
    replace(study.parent / name, random.Random(0), by_rename=by_rename)
    plan = plan_of(study, store)
    assert left(study, store) == (8 * len(plan.results) // 2 if "tasks" in name else len(plan.jobs) + 24)


def test_a_trial_is_not_computed_on_unplanned_data(mine, verb):
    study, store = mine
    path = study.parent / "tasks" / "beasts" / "train.jsonl"
    digest = HashMemory(store).sha256(path)
    before = {folder.name for folder in store.trials.iterdir()}
    missing = next(trial.key for training in finetunings(plan_of(study, store)) for trial in training.trials)
    store.discard(store.trials / missing)
    path.write_bytes(turned(path.read_bytes(), random.Random(1)))
    fool(store, path, digest)
    assert left(study, store) == 1, "the memory is fooled"
    code, _, err = verb("run", study, "--store", store.root, "--quiet")
    assert code == 2
    assert "beasts" in err.splitlines()[-1]
    assert len(err.splitlines()[-1]) < 500
    assert {folder.name for folder in store.trials.iterdir()} == before - {missing}
    assert left(study, store) == 12, "what was read is remembered: the next plan is of the files as they are"
    assert verb("run", study, "--store", store.root, "--quiet")[0] == 0
    assert left(study, store) == 0


def test_verify_ignores_cached_hashes(mine, verb):
    study, store = mine
    path = study.parent / "tasks" / "numbers" / "test.jsonl"
    digest = HashMemory(store).sha256(path)
    replace(path, random.Random(2))
    for words in (["status"], ["plan"]):
        fool(store, path, digest)
        done = json.loads(verb(*words, study, "--store", store.root, "--json")[1])
        assert tuned(done) == 24, "the memory is fooled"
        done = json.loads(verb(*words, study, "--store", store.root, "--json", "--verify")[1])
        assert tuned(done) == 12
    fool(store, path, digest)
    assert verb("run", study, "--store", store.root, "--quiet", "--verify")[0] == 0
    assert left(study, store) == 0


def tuned(facts: dict) -> int:
    return facts["finetunings_done"] if "finetunings_done" in facts else facts["finetunings"]["done"]
