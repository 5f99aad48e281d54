"""What of a study goes into a parcel: everything that a report elsewhere needs, and nothing heavy.

Published results only, each checked against its manifest: leaves with their values by example and predictions;
states as receipts, without weights and moments; the cards of corpora; why jobs failed. What is damaged is left out
and named. Tracebacks stay here: they tell of this machine and not of the study.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from biphase.data.identity import corpus_fingerprint, link_path, read_link
from biphase.errors import SpecError, StoreError, one_line
from biphase.files import Store, read_verified, verify
from biphase.keys import Identities
from biphase.metadata import WRONG
from biphase.presets import corpus_of
from biphase.study import ledger, parcel
from biphase.study.identities import corpora_of, fingerprints_of
from biphase.study.leaves import finished, trainings
from biphase.study.parcel import FOLDERS, LARGEST, LARGEST_OTHER, OPTIONAL, Source, as_json, write_parcel
from biphase.study.pins import pins_of
from biphase.study.plan import Plan
from biphase.study.sound import Judge


@dataclass
class Packed:
    """What went into a parcel."""

    study: str
    scores: int = 0
    scores_planned: int = 0
    bare: int = 0  # scores without their values by example
    states: int = 0
    states_planned: int = 0
    corpora: int = 0
    failures: int = 0
    bytes: int = 0  # of the file
    unpacked: int = 0
    left_out: list[str] = field(default_factory=list)  # why


def pack(
    plan: Plan,
    store: Store,
    identities: Identities,
    path: Path,
    *,
    results: Collection[str] | None = None,  # keys; None: all
    examples: bool = True,
) -> Packed:
    """Write what the store knows of a plan, or of some of its results, into one file."""
    packed = Packed(plan.study.name)
    sources = [
        Source.of(parcel.PLAN, as_json(plan.to_json())),
        Source.of(parcel.FINGERPRINTS, as_json(fingerprints_of(plan.study, identities))),
        *_names(plan, store),
        *_failures(plan, store, results, packed),
        *_corpora(plan, store, identities, packed),
        *_states(plan, store, results, packed),
        *_leaves(plan, store, results, packed, examples=examples),
    ]
    if not packed.scores and not packed.states:
        raise SpecError(
            f"nothing of {packed.study} is in {store.root} yet; compute some of it: biphase run STUDY"
        )
    packed.bytes = write_parcel(path, packed.study, sources)
    packed.unpacked = sum(one.item.bytes for one in sources)
    return packed


def _names(plan: Plan, store: Store) -> Iterable[Source]:
    """What the study's names stand for in this store: models on the hub, corpora read from a folder, but not where it is."""
    pins = pins_of(plan.study, store)
    if pins:
        yield Source.of(parcel.PINS, as_json(pins))
    linked = {
        link_path(corpus, store).name: {
            "source": corpus.source,
            "heldout": corpus.heldout,
            "fingerprint": corpus_fingerprint(
                corpus, store
            ),  # as the plan has it: the folder may have changed
        }
        for corpus in corpora_of(plan.study)
        if corpus.hub and read_link(corpus, store)
    }
    for name, told in sorted(linked.items()):
        yield Source.of(f"corpora/{name}", as_json(told))


def _failures(plan: Plan, store: Store, results: Collection[str] | None, packed: Packed) -> Iterable[Source]:
    """Why jobs that are not done failed."""
    done = ledger.done_keys(plan, store)
    left = {key for key in _state_keys(plan, results) if key not in done}
    left |= {one.key for one in trainings(plan, results) if not finished(one, store)}
    for key, noted in sorted(ledger.failures(plan, store).items()):
        if key in left:
            packed.failures += 1
            kept = {name: str(noted.get(name, "")) for name in ("key", "error", "at")}
            yield Source.of(f"study/failures/{key}.json", as_json(kept))


def _state_keys(plan: Plan, results: Collection[str] | None) -> list[str]:
    if results is None:
        return list(plan.states)
    wanted = {state.key for key in results for state in plan.path(key)}
    return [key for key in plan.states if key in wanted]


def _corpora(plan: Plan, store: Store, identities: Identities, packed: Packed) -> Iterable[Source]:
    runs = {corpus_of(state.run): state.run for state in plan.states.values()}
    for key in dict.fromkeys(identities.data(run) for run in runs.values()):
        made = _folder(store, store.shards / key, "receipts/shards", packed)
        packed.corpora += bool(made)
        yield from made


def _states(plan: Plan, store: Store, results: Collection[str] | None, packed: Packed) -> Iterable[Source]:
    for key in _state_keys(plan, results):
        made = _folder(store, store.states / key, "receipts/states", packed)
        packed.states_planned += 1
        packed.states += bool(made)
        yield from made


def _leaves(
    plan: Plan, store: Store, results: Collection[str] | None, packed: Packed, *, examples: bool
) -> Iterable[Source]:
    for training in trainings(plan, results):
        for leaf in training.leaves:
            place = store.leaves / leaf.key
            whole = examples and store.has(place)
            made = _folder(store, place, "leaves" if whole else "receipts/leaves", packed)
            packed.scores_planned += 1
            packed.scores += bool(made)
            packed.bare += bool(made) and not whole
            yield from made


def _folder(store: Store, place: Path, kind: str, packed: Packed) -> list[Source]:
    """The light files of a result; none where it is not there, or not what was published."""
    if not store.knows(place):
        packed.left_out += [fault] if (fault := store.fault(place)) else []
        return []
    told, folder = store.told(place), f"{kind}/{place.name}"
    try:
        there = verify(told, contents=False)
        names = [*FOLDERS[kind], *(name for name in OPTIONAL.get(kind, ()) if name in there)]
        for name in names:
            if there[name]["bytes"] > (most := LARGEST.get(name, LARGEST_OTHER)):
                raise StoreError(f"{name} has more than {most:,} bytes")
        files = {name: read_verified(told, name) for name in names}
        Judge(packed.study).result(folder, files)  # what would be refused elsewhere is not packed
    except WRONG as wrong:
        packed.left_out.append(f"{folder}: {one_line(wrong)}")
        return []
    return [
        Source.of(f"{folder}/{name}", content, lambda name=name: read_verified(told, name))
        for name, content in files.items()
    ]
