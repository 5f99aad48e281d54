"""Parcels from other machines into a store.

A parcel is read twice: first all of it is checked and nothing is written, then its results are published one by one, by
the store's own rename. So a parcel that is refused changes nothing, a merge that is killed leaves whole results only, and
merging again goes on where it ended. What is in the store stays: a result that is there with other content, as when two
machines computed the same one, is named and kept as it is.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from biphase.data.identity import cards, link_path
from biphase.errors import StoreError, one_line
from biphase.files import Store, publish, read_sealed, sealed, verify, write_json
from biphase.metadata import LEAF, WRONG
from biphase.records import decode, encode
from biphase.study import parcel
from biphase.study.identities import corpora_of, remember_fingerprints
from biphase.study.leaves import read_leaf
from biphase.study.parcel import Parcel
from biphase.study.pins import remember
from biphase.study.plan import PLAN, Plan
from biphase.study.sound import Judge

KINDS = {"leaves": "scores", "states": "states", "shards": "corpora"}


@dataclass
class Merged:
    """What came of merging a parcel."""

    study: str
    plan: Path
    added: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS.values(), 0))
    already: int = 0  # results that were here, the same
    bytes: int = 0  # that were added to the store
    kept: list[str] = field(default_factory=list)  # what is here with other content, and stays


@dataclass(frozen=True)
class Checked:
    """A parcel that was read whole, and the plan that its study makes."""

    parcel: Parcel
    plan: Plan


def check(path: Path) -> Checked:
    """Read the whole parcel and refuse what is not as it should be. Writes nothing."""
    found = Parcel.open(path)
    judge = Judge(found.study)
    folder = ""
    contents = found.contents()  # it refuses by itself what is damaged
    while (some := next(contents, None)) is not None:
        folder, files = some
        with _refusing(path, folder or "study"):
            if folder:
                judge.result(folder, files)
            else:
                judge.loose(*files.popitem())
    with _refusing(path, "what is in it"):
        plan = judge.finish()
    return Checked(found, plan)


@contextlib.contextmanager
def _refusing(path: Path, where: str) -> Generator[None]:
    try:
        yield
    except WRONG as wrong:
        raise StoreError(
            f"{path} is no sound ledger: {where} is not as biphase writes it ({one_line(wrong)[:400]}); nothing was "
            "taken from it: pack it again with the version that made it, or with this one"
        ) from None


def merge(checked: Checked, store: Store) -> Merged:
    """Publish what the store does not have yet. Its plan is the one that was made again, not the archive's own."""
    found = checked.parcel
    merged = Merged(found.study, store.studies / found.study / PLAN)
    _merge_plan(checked.plan, store, merged)
    for folder, files in found.contents():
        if folder:
            _merge_result(folder, files, store, merged)
        else:
            name, content = files.popitem()
            if name != parcel.PLAN:
                _merge_loose(name, content, store, merged)
    return merged


# ---------------------------------------------------------------- results


def _merge_result(folder: str, files: dict[str, bytes], store: Store, merged: Merged) -> None:
    kind, at = folder.split("/")[-2:]
    place = store.root / kind / at
    receipt = folder.startswith("receipts/")
    if fault := store.fault(place):
        merged.kept.append(f"{kind}/{at[:8]}: damaged here, and left as it is ({fault})")
        return
    if store.knows(place):
        try:
            here = verify(store.told(place), contents=False)
        except StoreError as wrong:
            merged.kept.append(f"{kind}/{at[:8]}: damaged here, and left as it is ({one_line(wrong)})")
            return
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
            merged.bytes += sum(len(content) for content in files.values())
        else:  # somebody was faster
            merged.already += 1


def _kept(kind: str, at: str, files: dict[str, bytes], store: Store) -> str:
    """In which way a result that is here is another one."""
    told = "computed twice"
    if kind == "leaves":
        try:
            same = read_leaf(store, at)["scores"] == json.loads(files[LEAF])["scores"]
        except StoreError as wrong:
            return f"{kind}/{at[:8]}: damaged here, and left as it is ({one_line(wrong)})"
        told += ", with the same scores" if same else ", with other scores"
    return f"{kind}/{at[:8]}: {told}"


# ---------------------------------------------------------------- the study and its names


def _merge_plan(plan: Plan, store: Store, merged: Merged) -> None:
    if not merged.plan.is_file():
        merged.plan.parent.mkdir(parents=True, exist_ok=True)
        write_json(merged.plan, sealed(plan.to_json()))
    elif read_sealed(merged.plan).get("study") != encode(plan.study):
        merged.kept.append(
            f"studies/{merged.study}/{PLAN}: another version of the study; give biphase report the study's file"
        )


def _merge_loose(name: str, content: bytes, store: Store, merged: Merged) -> None:
    said = json.loads(content)
    study = store.studies / merged.study
    if name == parcel.FINGERPRINTS:
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
    """Which text a hub corpus is changes the keys of all that is trained on it, so it comes only where nothing was."""
    linked = said["source"], said["heldout"]
    records = [card for card in cards(store) if isinstance(card.get("corpus"), dict)]
    here = {
        card.get("fingerprint")
        for card in records
        if (card["corpus"].get("source"), card["corpus"].get("heldout")) == linked
    }
    if here - {said["fingerprint"]}:
        merged.kept.append(f"{said['source']}: other text here than there; merge into a store of its own")
    elif path.is_file():
        if read_sealed(path).get("fingerprint") != said["fingerprint"]:
            merged.kept.append(
                f"{said['source']}: linked to another folder here; merge into a store of its own"
            )
    elif reader := _reader_here(path, store, merged.study):
        merged.kept.append(f"{said['source']}: {reader} reads it from the hub; merge into a store of its own")
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, sealed(said))


def _reader_here(link: Path, store: Store, but: str) -> str:
    """Another study of this store that is planned on the corpus of a link, though nothing of it is computed yet."""
    for path in sorted(store.studies.glob(f"*/{PLAN}")):
        with contextlib.suppress(*WRONG):  # who reads that plan says what is wrong with it
            corpora = corpora_of(decode(read_sealed(path)["study"])) if path.parent.name != but else ()
            if link in {link_path(corpus, store) for corpus in corpora}:
                return f"studies/{path.parent.name}"
    return ""
