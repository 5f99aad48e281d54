"""Every kind of file of a store, hurt in every way: seen, named, and recovered or refused; never a wrong result."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from faults.damage import TRIES, hurt, take_away
from faults.kinds import KINDS, Place, half_done, plan_of
from faults.tiny import ended

from biphase.errors import StoreError
from biphase.files import Store, read_sealed
from biphase.leases import Leases
from biphase.records import KEY_LENGTH

EVERY = [(kind, damage, seed) for kind in KINDS for damage, seed in TRIES]
# In every run of the tests some kinds are hurt, in all ways; the campaign takes every kind in every way.
FEW = [(kind, *TRIES[place % len(TRIES)]) for place, kind in enumerate(KINDS) if place % 3 == 0]


@pytest.fixture
def said(calm, verb, monkeypatch):
    """Type every verb that reads a store; each ends well, or in one line that tells. Gives what was said, and codes."""
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


def numbers(told: dict[str, Any]) -> dict[Any, Any]:
    """The results in what `status --json` tells, those that are there."""
    scores = {(row["result"], row["task"]): row["test"] for row in told["scores"] if row["test"]}
    losses = {(name, step): one for name, some in told["heldout"].items() for step, one in some.items()}
    return scores | losses


def reported(folder: Path) -> dict[Any, Any]:
    """Every score of every leaf in a report, those that are there."""
    with (folder / "leaves.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {row["key"]: (row["validation"], row["test"]) for row in rows if row["test"]}


@pytest.fixture(scope="module")
def truth(calm, tmp_path_factory) -> dict[str, dict[Any, Any]]:
    """The numbers of the undisturbed store."""
    from biphase.report.build import build
    from biphase.study.summary import status_json

    plan, folder = plan_of(calm.study, calm.store), tmp_path_factory.mktemp("truth")
    build(plan, calm.store, folder, static=False)
    told = json.loads(json.dumps(status_json(plan, calm.store)))
    return {"status": numbers(told), "report": reported(folder)}


def untrue(told: dict[Any, Any], truth: dict[Any, Any]) -> dict[Any, Any]:
    return {name: one for name, one in told.items() if truth.get(name) != one}


def look(calm, said, truth, store: Store, folder: Path) -> str:
    """What the verbs that compute nothing say of a damaged store. Whatever numbers they give are the true ones."""
    plan = store.studies / "faults" / "plan.json"
    shown = ""
    for words in (
        ["status", calm.study],
        ["status", calm.study, "--json"],
        ["status", plan, "--json"],
        ["plan", calm.study],
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


def check(calm, said, truth, tmp_path: Path, kind: str, damage: str, seed: int) -> None:
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


@pytest.mark.parametrize(("kind", "damage", "seed"), FEW)
def test_a_damaged_file_is_seen_and_changes_no_result(calm, said, truth, tmp_path, kind, damage, seed):
    check(calm, said, truth, tmp_path, kind, damage, seed)


@pytest.mark.campaign
@pytest.mark.parametrize(("kind", "damage", "seed"), [one for one in EVERY if one not in FEW])
def test_no_damage_to_any_file_changes_a_result(calm, said, truth, tmp_path, kind, damage, seed):
    check(calm, said, truth, tmp_path, kind, damage, seed)


def test_no_turned_bit_of_a_sealed_file_is_believed(calm, tmp_path):
    """A plan, a link or fingerprints stand alone, without a manifest: they carry their own hash."""
    whole = calm.store.studies / "faults" / "plan.json"
    said, path = read_sealed(whole), tmp_path / "plan.json"
    seen = 0
    for seed in range(300):
        path.write_bytes(whole.read_bytes())
        hurt(path, "flipped", seed)
        try:
            found = read_sealed(path)
        except StoreError:
            seen += 1
        else:
            assert {name: found[name] for name in said} == said  # it fell where it says nothing
    assert seen > 250
