"""Parcels from other machines into a store.

A parcel is read twice: first all of it is checked and nothing is written, then its results are published one by one, by
the store's own rename. So a parcel that is refused changes nothing, a merge that is killed leaves whole results only, and
merging again goes on where it ended. What is in the store stays: a result that is there with other content, as when two
machines computed the same one, is named and kept as it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from biphase.data.identity import cards
from biphase.errors import BiphaseError, StoreError, one_line
from biphase.files import Store, publish, read_sealed, sealed, told_json, verify, write_json
from biphase.records import decode, key
from biphase.specs import Corpus, Pretrain, Study
from biphase.study import parcel
from biphase.study.identities import remember_fingerprints
from biphase.study.parcel import Parcel
from biphase.study.pins import COMMIT, remember
from biphase.study.plan import PLAN

KINDS = {"leaves": "scores", "states": "states", "shards": "corpora"}


@dataclass
class Merged:
    """What came of merging a parcel."""

    study: str
    plan: Path
    added: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS.values(), 0))
    already: int = 0  # results that were here, the same
    kept: list[str] = field(default_factory=list)  # what is here with other content, and stays


def check(path: Path) -> Parcel:
    """Read the whole parcel and refuse what is not as it should be. Writes nothing."""
    found = Parcel.open(path)
    for folder, files in found.contents():
        try:
            if folder:
                _check_result(folder, files)
            else:
                _check_loose(found.study, *files.popitem())
        except (BiphaseError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as wrong:
            where = folder or "study"
            raise StoreError(
                f"{path} is no sound ledger: {where} is not as biphase writes it ({one_line(wrong)}); nothing was taken "
                "from it: pack it again with the version that made it, or with this one"
            ) from None
    return found


def merge(found: Parcel, store: Store) -> Merged:
    """Publish what the store does not have yet."""
    merged = Merged(found.study, store.studies / found.study / PLAN)
    for folder, files in found.contents():
        if folder:
            _merge_result(folder, files, store, merged)
        else:
            _merge_loose(*files.popitem(), store, merged)
    return merged


# ---------------------------------------------------------------- results


def _merge_result(folder: str, files: dict[str, bytes], store: Store, merged: Merged) -> None:
    kind, at = folder.split("/")[-2:]
    place = store.root / kind / at
    receipt = folder.startswith("receipts/")
    if store.knows(place):
        here = verify(store.told(place), contents=False)
        other = [
            name for name in files if name in here and here[name]["sha256"] != sha256(files[name]).hexdigest()
        ]
        if other:
            merged.kept.append(_kept(kind, at, files, store))
            return
        if receipt or store.has(place):
            merged.already += 1
            return
    with store.attempt(f"merge-{at}") as built:
        for name, content in files.items():
            (built / name).write_bytes(content)
        if publish(built, store.receipt(place) if receipt else place):
            merged.added[KINDS[kind]] += 1
        else:  # somebody was faster
            merged.already += 1


def _kept(kind: str, at: str, files: dict[str, bytes], store: Store) -> str:
    """In which way a result that is here is another one."""
    told = "computed twice"
    if kind == "leaves":
        here = told_json(store.told(store.leaves / at), "leaf.json")
        same = here.get("scores") == json.loads(files["leaf.json"])["scores"]
        told += ", with the same scores" if same else ", with other scores"
    return f"{kind}/{at[:8]}: {told}"


# ---------------------------------------------------------------- the study and its names


def _merge_loose(name: str, content: bytes, store: Store, merged: Merged) -> None:
    said = json.loads(content)
    study = store.studies / merged.study
    if name == parcel.PLAN:
        if not merged.plan.is_file():
            study.mkdir(parents=True, exist_ok=True)
            write_json(merged.plan, sealed(said))
        elif read_sealed(merged.plan).get("study") != said["study"]:
            merged.kept.append(
                f"studies/{merged.study}/{PLAN}: another version of the study; give biphase report the study's file"
            )
    elif name == parcel.FINGERPRINTS:
        remember_fingerprints(merged.study, said, store)
    elif name == parcel.PINS:
        for source, commit in said.items():
            pinned = remember(source, commit, store)
            if pinned != commit:
                merged.kept.append(
                    f"pins.json: {source} is pinned to {pinned[:8]}, and to {commit[:8]} there"
                )
    elif name.startswith("corpora/"):
        _merge_link(store.root / name, said, store, merged)
    else:
        path = study / "failures" / Path(name).name
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, said)


def _merge_link(path: Path, said: dict[str, Any], store: Store, merged: Merged) -> None:
    """A link changes the keys of all that is trained on its corpus, so it comes only where nothing was."""
    used = {card["fingerprint"] for card in cards(store) if card["corpus"]["source"] == said["source"]}
    if used - {said["fingerprint"]}:
        merged.kept.append(f"{said['source']}: other text here than there; merge into a store of its own")
    elif not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, sealed(said))
    elif read_sealed(path)["fingerprint"] != said["fingerprint"]:
        merged.kept.append(f"{said['source']}: linked to another folder here; merge into a store of its own")


# ---------------------------------------------------------------- what a parcel may say


def _need(true: Any, why: str) -> None:
    if not true:
        raise StoreError(why)


def _check_result(folder: str, files: dict[str, bytes]) -> None:
    """Whoever reads the store later relies on these fields."""
    kind, at = folder.split("/")[-2:]
    if kind == "leaves":
        about = json.loads(files["leaf.json"])
        _need(about["key"] == at, "it is the leaf of another key")
        numbers = [about["lr"], about["seed"], *about["seconds"].values(), *about["examples"].values()]
        for part in ("validation", "test"):
            _need(about["metric"] in about["scores"][part], f"it has no {about['metric']}")
            numbers += about["scores"][part].values()
        _need_numbers(numbers)
        _need(all(isinstance(about[name], str) for name in ("model", "metric")), "a name is missing")
        _need({"task", "trained_on", "finetune", "machine"} <= about.keys(), "a field is missing")
    elif kind == "states":
        about = json.loads(files["state.json"])
        _need(about["key"] == at, "it is the state of another key")
        _need(isinstance(decode(about["run"]), Pretrain), "it has no run")
        _need_numbers(
            [
                about["origin_step"],
                about["epochs"],
                *(about["progress"][name] for name in ("step", "seconds")),
            ]
        )
        lines = [json.loads(line) for line in files["metrics.jsonl"].decode().splitlines()]
        _need_numbers([line["step"] for line in lines])
    else:
        about = json.loads(files["card.json"])
        _need(isinstance(decode(about["corpus"]), Corpus), "it has no corpus")
        _need_numbers([about["train_tokens"], about["unigram_entropy"]])


def _need_numbers(values: Iterable[Any]) -> None:
    _need(all(isinstance(one, int | float) and math.isfinite(one) for one in values), "a number is missing")


def _check_loose(study: str, name: str, content: bytes) -> None:
    said = json.loads(content)
    parcel.as_json(said)  # it must be possible to write it again: no NaN, no depths
    if name == parcel.PLAN:
        made = decode(said["study"])
        _need(isinstance(made, Study) and made.name == study, f"{name} is of another study")
        _need(all(isinstance(state["key"], str) for state in said["states"]), f"{name} has no keys")
    elif name == parcel.FINGERPRINTS:
        _need(set(said) == {"task", "hub", "reads"}, f"{name} says something else")
        _need(
            all(isinstance(one, str) for some in said.values() for one in some.values()),
            f"{name} has no keys",
        )
    elif name == parcel.PINS:
        _need(all(COMMIT.fullmatch(commit) for commit in said.values()), f"{name} pins to no commit")
    elif name.startswith("corpora/"):
        _need({"source", "heldout", "folder", "fingerprint"} == set(said), f"{name} is no link")
        _need(all(isinstance(one, str) for one in said.values()), f"{name} is no link")
        linked = key({"source": said["source"], "heldout": said["heldout"]})
        _need(Path(name).stem == f"link-{linked}", f"{name} links another corpus")
    else:
        _need(said["key"] == Path(name).stem and isinstance(said["error"], str), f"{name} is no failure")
