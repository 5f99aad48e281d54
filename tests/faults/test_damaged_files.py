"""Every kind of file of a store, damaged in every way, is named and recovered or refused; no result changes."""

from __future__ import annotations

import csv
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from common import write_lines
from faults.damage import TRIES, campaign_but, hurt, take_away
from faults.kinds import KINDS, Place, half_done, leave_metadata, plan_of
from faults.tiny import ended

from biphase import BPE, Corpus
from biphase.data.tokenize import tokenize
from biphase.errors import StoreError
from biphase.leases import Leases
from biphase.records import KEY_LENGTH
from biphase.store import Store, verify
from biphase.study.ledger import finetunings

EVERY = [(kind, damage, seed) for kind in KINDS for damage, seed in TRIES]
# Every run of the tests damages some kinds, the campaign every kind in every way.
FEW = [(kind, *TRIES[place % len(TRIES)]) for place, kind in enumerate(KINDS) if place % 3 == 0]


@pytest.fixture
def said(calm, verb, monkeypatch):
    """Run a verb that reads a store; it succeeds, or fails with one line."""
    monkeypatch.setitem(Leases.__init__.__kwdefaults__, "stale_seconds", 1.0)  # to wait for the silent
    monkeypatch.setitem(Leases.__init__.__kwdefaults__, "beat_seconds", 0.2)

    def typed(*words: Any) -> tuple[int, str, str]:
        code, out, err = verb(*words)
        assert "Traceback" not in out + err
        assert code in (0, 1, 2)
        if code == 2:
            assert err.splitlines()[-1].startswith("error: "), err
            assert sum(line.startswith("error: ") for line in err.splitlines()) == 1
        return code, out, err

    return typed


def numbers(status: dict[str, Any]) -> dict[Any, Any]:
    """The results in what `status --json` tells, those that are there."""
    scores = {(row["result"], row["task"]): row["test"] for row in status["scores"] if row["test"]}
    losses = {
        (name, step): losses for name, curve in status["heldout"].items() for step, losses in curve.items()
    }
    return scores | losses


def reported(folder: Path) -> dict[Any, Any]:
    """Every score of every trial in a report, those that are there."""
    with (folder / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {row["key"]: (row["validation"], row["test"]) for row in rows if row["test"]}


@pytest.fixture(scope="module")
def truth(calm, tmp_path_factory) -> dict[str, dict[Any, Any]]:
    """The numbers of the undisturbed store."""
    from biphase.report.build import build
    from biphase.study.describe import status_json

    plan, folder = plan_of(calm.study, calm.store), tmp_path_factory.mktemp("truth")
    build(plan, calm.store, folder, static=False)
    status = json.loads(json.dumps(status_json(plan, calm.store)))
    return {"status": numbers(status), "report": reported(folder)}


def untrue(status: dict[Any, Any], truth: dict[Any, Any]) -> dict[Any, Any]:
    return {name: value for name, value in status.items() if truth.get(name) != value}


def look(calm, said, truth, store: Store, folder: Path) -> str:
    """What the verbs that compute nothing say of a damaged store. Whatever numbers they give are the true ones."""
    plan = store.studies / "faults" / "plan.json"
    shown = ""
    for words in (
        ["status", calm.study],
        ["status", calm.study, "--json"],
        ["status", plan, "--json"],
        ["plan", calm.study, "--device", "h200"],
        ["report", calm.study, "--no-print", "--out", folder],
        ["ledger", "pack", calm.study, folder.with_suffix(".tar.zst")],
    ):
        code, out, err = said(*words, "--store", store.root)
        shown += out + err
        if code == 0 and "--json" in words:
            assert untrue(numbers(json.loads(out)), truth["status"]) == {}
        if code == 0 and words[0] == "report":
            assert untrue(reported(folder), truth["report"]) == {}
            shown += (folder / "report.md").read_text()
    return shown


@pytest.mark.parametrize(("kind", "damage", "seed"), campaign_but(FEW, EVERY))
def test_a_damaged_file_is_named_and_changes_no_result(calm, said, truth, tmp_path, kind, damage, seed):
    store = calm.copied(tmp_path / "store")
    plan = half_done(calm.study, store)
    place = KINDS[kind].where(plan, store)
    was = place.path.read_bytes()
    hurt(place.path, damage, seed)
    shown = look(calm, said, truth, store, tmp_path / "report")
    code, out, err = said("run", calm.study, "--store", store.root, "--quiet")
    shown += out + err
    whole = place.path.is_file() and place.path.read_bytes() == was  # no bit was turned, or it was made anew
    if KINDS[kind].memory:
        assert code == 0 or damage == "a folder", shown
    elif not whole and not (damage == "deleted" and code == 0) and not (KINDS[kind].by_others and code == 0):
        assert named(place, shown), shown
    if code:
        assert named(place, out + err), out + err
    take_away(place.remove)
    code, out, err = said("run", calm.study, "--store", store.root, "--quiet")
    assert code == 0, err
    assert ended(store.root) == calm.ended


def named(place: Place, shown: str) -> bool:
    """Is the file named, or the result it belongs to?"""
    key = place.remove.name
    return str(place.path) in shown or (len(key) == KEY_LENGTH and key[:6] in shown)


# ---------------------------------------------------------------- folders under other keys


def _swap(one: Path, other: Path) -> None:
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def _copy_over(one: Path, other: Path) -> None:
    shutil.rmtree(other)
    shutil.copytree(one, other)


def _copy_into(one: Path, other: Path) -> None:
    """As `cp -r one/. other` does: what only the other had stays beside it."""
    shutil.copytree(one, other, dirs_exist_ok=True)


MISPLACINGS = {"swapped": _swap, "copied over": _copy_over, "copied into": _copy_into}


def misplace(calm, store: Store, kind: str, how: str, seed: int) -> list[Path]:
    """Put folders of one kind under each other's keys; gives those that are wrong now."""
    chance = random.Random(f"{kind} {how} {seed}")
    folder = store.root / kind
    if kind == "shards":  # a second corpus beside that of the study
        lines = ({"text": f"another text, line {n}"} for n in range(60))
        text = write_lines(store.root.with_name("other.jsonl"), lines)
        other = tokenize(Corpus("other", str(text), BPE(300)), store, processes=1, report=lambda line: None)
        one, place = other, next(path for path in folder.iterdir() if path != other)
    else:
        if kind.startswith("metadata"):
            for path in sorted((store.root / kind.split("/")[1]).iterdir())[:4]:
                leave_metadata(store, path)
        one, place = chance.sample(sorted(folder.iterdir()), 2)
    MISPLACINGS[how](one, place)
    return [one, place] if how == "swapped" else [place]


PLACED = ("checkpoints", "trials", "shards", "metadata/checkpoints", "metadata/trials")
MISPLACED_FEW = [
    ("checkpoints", "swapped", 0), ("checkpoints", "copied over", 1), ("trials", "copied into", 0),
    ("trials", "swapped", 1), ("shards", "swapped", 1), ("metadata/trials", "copied over", 0),
]  # fmt: skip
MISPLACED = [(kind, how, seed) for kind in PLACED for how in MISPLACINGS for seed in range(4)]


@pytest.mark.parametrize(("kind", "how", "seed"), campaign_but(MISPLACED_FEW, MISPLACED))
def test_a_folder_under_another_key_is_named_and_not_used(calm, said, truth, tmp_path, kind, how, seed):
    store = calm.copied(tmp_path / "store")
    if seed % 2:
        half_done(calm.study, store)
    wrong = misplace(calm, store, kind, how, seed)
    shown = look(calm, said, truth, store, tmp_path / "report")
    code, out, err = said("run", calm.study, "--store", store.root, "--quiet")
    plan = plan_of(calm.study, store)
    used = set(plan.jobs) | {trial.key for training in finetunings(plan) for trial in training.trials}
    used |= {path.name for path in calm.store.shards.iterdir()}
    for place in wrong:
        if place.name in used:
            assert str(place) in shown + out + err
            with pytest.raises(StoreError, match=place.name):
                verify(place)
    for place in wrong:
        take_away(place)
    code, out, err = said("run", calm.study, "--store", store.root, "--quiet")
    assert code == 0, err
    after = ended(store.root)
    # Ancestors of finished results are not computed again.
    assert all(after[name] == result for name, result in calm.ended.items() if name in after)
    status = json.loads(said("status", calm.study, "--store", store.root, "--json")[1])
    assert untrue(numbers(status), truth["status"]) == {}
