"""Every kind of file of a store, hurt in every way: seen, named, and recovered or refused; never a wrong result."""

from __future__ import annotations

import csv
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from faults.damage import TRIES, hurt, take_away
from faults.kinds import KINDS, Place, half_done, plan_of
from faults.tiny import ended

from biphase import BPE, Corpus
from biphase.data.tokenize import tokenize
from biphase.errors import StoreError
from biphase.leases import Leases
from biphase.records import KEY_LENGTH
from biphase.store import Store, publish, read_checked, verify
from biphase.study.ledger import finetunings

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
    said, path = read_checked(whole), tmp_path / "plan.json"
    seen = 0
    for seed in range(300):
        path.write_bytes(whole.read_bytes())
        hurt(path, "flipped", seed)
        try:
            found = read_checked(path)
        except StoreError:
            seen += 1
        else:
            assert {name: found[name] for name in said} == said  # it fell where it says nothing
    assert seen > 250


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
        text = store.root.with_name("other.jsonl")
        text.write_text("".join(json.dumps({"text": f"another text, line {n}"}) + "\n" for n in range(60)))
        other = tokenize(Corpus("other", str(text), BPE(300)), store, processes=1, report=lambda line: None)
        one, place = other, next(path for path in folder.iterdir() if path != other)
    elif kind.startswith("metadata"):
        for path in sorted((store.root / kind.split("/")[1]).iterdir())[:4]:
            with store.attempt("receipt") as built:
                for light in ("checkpoint.json", "metrics.jsonl", "trial.json"):
                    if (path / light).is_file():
                        shutil.copy(path / light, built / light)
                publish(built, store.metadata_of(path))
            shutil.rmtree(path)
        one, place = chance.sample(sorted(folder.iterdir()), 2)
    else:
        one, place = chance.sample(sorted(folder.iterdir()), 2)
    MISPLACINGS[how](one, place)
    return [one, place] if how == "swapped" else [place]


def check_misplaced(calm, said, truth, tmp_path: Path, kind: str, how: str, seed: int) -> None:
    """No verb believes such a folder: it is named, no number comes from it, and nothing is built on it."""
    store = calm.copied(tmp_path / "store")
    if seed % 2:
        half_done(calm.study, store)
    wrong = misplace(calm, store, kind, how, seed)
    shown = look(calm, said, truth, store, tmp_path / "report")
    code, out, err = said("run", calm.study, "--store", store.root, "--quiet")
    plan = plan_of(calm.study, store)
    used = set(plan.jobs) | {trial.key for one in finetunings(plan) for trial in one.trials}
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
    # What was only on the way to finished results is not made again.
    assert {name: one for name, one in calm.ended.items() if name in after} == {
        name: one for name, one in after.items() if name in calm.ended
    }
    assert (
        untrue(
            numbers(json.loads(said("status", calm.study, "--store", store.root, "--json")[1])),
            truth["status"],
        )
        == {}
    )


PLACED = ("checkpoints", "trials", "shards", "metadata/checkpoints", "metadata/trials")


@pytest.mark.parametrize(
    ("kind", "how", "seed"),
    [
        ("checkpoints", "swapped", 0),
        ("checkpoints", "copied over", 1),
        ("trials", "copied into", 0),
        ("trials", "swapped", 1),
        ("shards", "swapped", 1),
        ("metadata/trials", "copied over", 0),
    ],
)
def test_a_folder_under_another_key_is_named_and_not_believed(calm, said, truth, tmp_path, kind, how, seed):
    check_misplaced(calm, said, truth, tmp_path, kind, how, seed)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", PLACED)
@pytest.mark.parametrize("how", MISPLACINGS)
def test_no_folder_under_another_key_is_believed(calm, said, truth, tmp_path, kind, how):
    first = random.randrange(10**6)
    for seed in range(first, first + 4):
        print(kind, how, seed)  # shown if it fails
        check_misplaced(calm, said, truth, tmp_path / str(seed), kind, how, seed)


def test_a_trunk_swapped_with_an_end_is_refused_and_nothing_is_trained_on_it(calm, said, tmp_path):
    store = calm.copied(tmp_path / "store")
    plan = half_done(calm.study, store)
    trunk, end = (state.key for state in plan.path(plan.results["clm"])[-2:])
    _swap(store.checkpoints / trunk, store.checkpoints / end)
    before = {path.name for path in store.checkpoints.iterdir()}
    code, out, err = said("run", calm.study, "--store", store.root, "--quiet")
    assert code == 1
    assert f"{store.checkpoints / trunk} holds" in out
    assert f"rm -r {store.checkpoints / trunk}" in out
    assert {path.name for path in store.checkpoints.iterdir()} == before
    code, out, err = said("export", end[:8], tmp_path / "model", "--store", store.root)
    assert code == 2
    assert str(store.checkpoints / end) in err
    _swap(store.checkpoints / trunk, store.checkpoints / end)  # back, as the line says too
    assert said("run", calm.study, "--store", store.root, "--quiet")[0] == 0
    assert ended(store.root) == calm.ended


# ---------------------------------------------------------------- a trunk that a branch begins from

TRUNK_FILES = (
    "checkpoint.json",
    "metrics.jsonl",
    "model.safetensors",
    "optimizer.safetensors",
    "manifest.json",
)


def check_trunk(calm, said, tmp_path: Path, name: str, damage: str, seed: int) -> None:
    """It is refused and named; nothing is trained in its place; once it is taken away, all ends as undisturbed."""
    store = calm.copied(tmp_path / "store")
    plan = plan_of(calm.study, store)
    path = [state.key for state in plan.path(plan.results["two"])]
    shared = {state.key for state in plan.path(plan.results["clm"])}
    trunk, branch = [key for key in path if key in shared][-1], [key for key in path if key not in shared]
    for key in branch:
        shutil.rmtree(store.checkpoints / key)
    before = (store.checkpoints / trunk / name).read_bytes()
    hurt(store.checkpoints / trunk / name, damage, seed)
    code, out, err = said("run", calm.study, "--store", store.root, "--quiet")
    if (store.checkpoints / trunk / name).is_file() and (
        store.checkpoints / trunk / name
    ).read_bytes() == before:
        return  # a bit of an empty file
    assert code == 1
    assert str(store.checkpoints / trunk) in out
    assert not [key for key in branch if (store.checkpoints / key).exists()], (
        "nothing was trained without its trunk"
    )
    shutil.rmtree(store.checkpoints / trunk)
    code, out, err = said("run", calm.study, "--store", store.root, "--quiet")
    assert code == 0, out + err
    assert ended(store.root) == calm.ended, "held-out losses and all"


@pytest.mark.parametrize(("name", "damage"), [("checkpoint.json", "flipped"), ("manifest.json", "cut")])
def test_a_damaged_trunk_is_refused_and_not_trained_again_in_silence(calm, said, tmp_path, name, damage):
    check_trunk(calm, said, tmp_path, name, damage, 0)


@pytest.mark.campaign
@pytest.mark.parametrize("name", TRUNK_FILES)
@pytest.mark.parametrize(("damage", "seed"), TRIES)
def test_no_damage_to_a_trunk_is_trained_over(calm, said, tmp_path, name, damage, seed):
    check_trunk(calm, said, tmp_path, name, damage, seed)
