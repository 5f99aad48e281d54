"""Where the numbers come from: data and its fingerprints, the protocol, machines, versions, seconds, energy.

Everything is read from the ledger. The only thing that is not is the version of biphase that wrote the report.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from biphase.errors import StoreError
from biphase.files import Store
from biphase.metadata import read_state
from biphase.presets import corpus_of
from biphase.records import encode, key
from biphase.report.evidence import Evidence
from biphase.report.numerals import listed, rate
from biphase.specs import Finetune, Pretrain
from biphase.study.corpora import card_of
from biphase.study.datasets import kept
from biphase.study.plan import Plan
from biphase.version import code_version
from biphase.wording import counted, duration, short


@dataclass(frozen=True)
class Data:
    """A corpus or a dataset."""

    name: str
    what: str  # corpus, or the family of a task
    source: str
    key: str  # of its shards, or of the dataset as it is asked; empty: not known here
    note: str
    about: tuple[tuple[str, str], ...] = ()  # what it was read as, where this store has it


@dataclass(frozen=True)
class Machine:
    """A device and the software on it, with what it computed."""

    device: str
    software: str
    pieces: int
    leaves: int


@dataclass(frozen=True)
class Provenance:
    version: str
    study: str  # the hash of everything the study says
    data: tuple[Data, ...]
    machines: tuple[Machine, ...]
    protocol: tuple[tuple[str, str], ...]
    spent: tuple[tuple[str, str], ...]
    joules: float | None
    metered: tuple[int, int]  # pieces whose joules are known, and those that are done

    @property
    def energy(self) -> str:
        """In words; empty where no device told."""
        if not self.joules:
            return ""
        some = "" if self.metered[0] == self.metered[1] else " of {:,} of {:,} pieces".format(*self.metered)
        return (
            f"{self.joules / 3.6e6:,.2f} kWh for the pretraining{some}, "
            "as the GPUs reported it, with all that ran on them meanwhile"
        )


def provenance(evidence: Evidence) -> Provenance:
    plan, store = evidence.plan, evidence.store
    finetune = plan.study.finetune
    joules = [piece.joules for piece in evidence.pieces if piece.joules is not None]
    return Provenance(
        version=code_version(),
        study=key(encode(plan.study)),
        data=(*_corpora(plan, store), *_datasets(evidence)),
        machines=_machines(evidence),
        protocol=_protocol(finetune, evidence) if finetune else (),
        spent=_spent(evidence),
        joules=sum(joules) or None,
        metered=(len(joules), sum(piece.standing == "done" for piece in evidence.pieces)),
    )


# ---------------------------------------------------------------- data


def _corpora(plan: Plan, store: Store) -> Iterable[Data]:
    for corpus in dict.fromkeys(corpus_of(run) for run in _lineage(plan) if run.corpus):
        at, card = card_of(corpus, store)
        tokens = (
            f"{card['train_tokens']:,} tokens to train on" if card else "its shards are not in this store"
        )
        yield Data(corpus.name, "corpus", corpus.source, at, tokens)


def _lineage(plan: Plan) -> Iterable[Pretrain]:
    for run in plan.study.runs:
        at: object = run
        while isinstance(at, Pretrain):
            yield at
            at = at.start


def _datasets(evidence: Evidence) -> Iterable[Data]:
    described = kept(evidence.plan.study.name, evidence.store)
    for name, task in evidence.tasks.items():
        examples = max(
            (grid.examples for (_, on), grid in evidence.grids.items() if on == name),
            default=0,
        )
        note = counted(examples, "test example") if examples else "not scored yet"
        if task.trained_on:
            note += f"; scored with the model of {task.trained_on}"
        one = described.get(name)
        about = (*one.about, *(("warning", said) for said in one.warnings)) if one else ()
        yield Data(name, task.family, task.source, evidence.plan.tasks[name], note, about)


# ---------------------------------------------------------------- machines, time, energy


def _machines(evidence: Evidence) -> tuple[Machine, ...]:
    """By device and software; most used first, then by name."""
    plan, store = evidence.plan, evidence.store
    trained = Counter(_words(one) for one in _progress(plan, store).values())
    tuned = Counter(_words({"machine": one}) for grid in evidence.grids.values() for one in grid.machines)
    every = sorted({*trained, *tuned}, key=lambda one: (-trained[one] - tuned[one], one))
    return tuple(Machine(*one, trained[one], tuned[one]) for one in every)


def _words(progress: dict[str, Any]) -> tuple[str, str]:
    about = progress.get("machine", {})
    software = [
        f"{name} {about[name]}"
        for name in sorted(about)
        if name not in ("device", "compiled", "path", "joules")
    ]
    if about.get("compiled") == "True" or about.get("path") == "compiled":
        software.append("compiled")
    if about.get("path") == "fused":
        software.append("fused kernels")
    return about.get("device") or "not recorded", ", ".join(software)


def _progress(plan: Plan, store: Store) -> dict[str, dict[str, Any]]:
    """What each state that is there says of its making; one that was changed since it was written says nothing."""
    found = {}
    for at in plan.states:
        folder = store.told(store.states / at)
        if store.has(folder):
            with contextlib.suppress(StoreError):
                found[at] = read_state(folder)["progress"]
    return found


def _spent(evidence: Evidence) -> tuple[tuple[str, str], ...]:
    trained = evidence.pieces
    known = [piece.seconds * piece.devices for piece in trained if piece.seconds is not None]
    tuned = [float(np.nansum(grid.seconds)) for grid in evidence.grids.values()]
    tokens = sum(piece.tokens for piece in trained if piece.standing == "done")
    flops = [piece.flops for piece in trained if piece.standing == "done"]
    made = (
        [("Pretraining", f"{_hours(sum(known))} over all processes, {counted(len(known), 'piece')}")]
        if known
        else []
    )
    if tokens:
        counts = "" if None in flops else f", {sum(one for one in flops if one):.3g} model FLOPs"
        made.append(("Trained on", f"{short(tokens)} tokens{counts}"))
    if any(tuned):
        made.append(("Fine-tuning", f"{_hours(sum(tuned))} over all processes, {evidence.count[0]:,} scores"))
    return tuple(made)


def _hours(seconds: float) -> str:
    """Devices are paid by the hour, however many days that makes."""
    return duration(seconds) if seconds < 36_000 else f"{seconds / 3600:,.0f} h"


# ---------------------------------------------------------------- protocol


def _protocol(spec: Finetune, evidence: Evidence) -> tuple[tuple[str, str], ...]:
    metrics = dict.fromkeys(grid.metric for grid in evidence.grids.values() if grid.metric)
    return (
        ("Protocol", spec.protocol),
        ("Precision", spec.precision),
        ("Learning rates", ", ".join(rate(lr) for lr in spec.lrs)),
        ("Fine-tuning seeds", ", ".join(str(seed) for seed in spec.seeds)),
        (
            "Choice of the rate",
            "for each seed the rate with the best validation score; of equals the lowest. Test scores play no part",
        ),
        ("Scores that choose", listed(list(metrics)) or "none yet"),
        ("Retrieval among", "judged documents only" if spec.documents == "judged" else "all documents"),
        ("Warm-up", f"{spec.warmup * 100:g}% of the steps, then down in a line to 0"),
        ("Longest input", f"{spec.length:,} tokens" if spec.length else "99% of the model's context"),
    )
