"""Every kind of file that the project keeps in a store: where one stands, and what else must be there to read it.

`half_done` prepares a store whose next run must read all of them: the last run and its scores are missing, so shards,
its parent's checkpoint and their tokenizer are read; one other trial is missing, so that another checkpoint is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from biphase.report.evidence import gather
from biphase.store import Store, publish, with_checksum
from biphase.study.ledger import finetunings
from biphase.study.load import load
from biphase.study.plan import FINGERPRINTS, Plan, fingerprints_of, identities, make_plan

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True)
class Place:
    """A file of a kind, and what a person takes away when it is damaged."""

    path: Path
    remove: Path


@dataclass(frozen=True)
class Kind:
    where: Callable[[Plan, Store], Place]
    memory: bool = False  # nothing depends on it: without it, or with nonsense in it, all goes on
    by_others: bool = False  # what it says is checked where it is used: no other commit has that number


def plan_of(study: Path, store: Store) -> Plan:
    loaded = load(study)
    return make_plan(loaded.study, identities(store), loaded.question)


def half_done(study: Path, store: Store) -> Plan:
    plan = plan_of(study, store)
    last = plan.results["on"]
    for training in finetunings(plan):
        first = training.model == plan.results["clm"] and (training.lr, training.seed) == (1e-3, 0)
        if training.model == last or (first and training.task.name == "numbers"):
            for trial in training.trials:
                shutil.rmtree(store.trials / trial.key)
    for job in plan.path(last):
        if job.key not in {other.key for other in plan.path(plan.results["clm"])}:
            shutil.rmtree(store.checkpoints / job.key)
    return plan


# ---------------------------------------------------------------- results


def _checkpoint(plan: Plan, store: Store) -> Path:
    return store.checkpoints / plan.results["clm"]


def _trial(plan: Plan, store: Store) -> Path:
    grid = gather(plan, store).grids["two", "beasts"]
    return store.trials / grid.keys[grid.chosen[0]][0]  # one whose values a report reads


def _shards(plan: Plan, store: Store) -> Path:
    return next(store.shards.iterdir())


def _metadata_of_checkpoint(plan: Plan, store: Store) -> Path:
    return leave_metadata(store, store.checkpoints / plan.results["two"])


def _metadata_of_trial(plan: Plan, store: Store) -> Path:
    return leave_metadata(store, _trial(plan, store))


def _file(folder: Callable[[Plan, Store], Path], name: str) -> Kind:
    def where(plan: Plan, store: Store) -> Place:
        place = folder(plan, store)
        return Place(place / name, place)

    return Kind(where)


def leave_metadata(store: Store, folder: Path) -> Path:
    """Replace a result by its metadata-only copy, and return the folder of the copy."""
    copy = store.metadata_of(folder)
    with store.attempt("metadata") as built:
        for light in ("checkpoint.json", "metrics.jsonl", "trial.json"):
            if (folder / light).is_file():
                shutil.copy(folder / light, built / light)
        publish(built, copy)
    shutil.rmtree(folder)
    return copy


# ---------------------------------------------------------------- what stands beside results


def _written(
    name: str, content: Callable[[Plan, Store], str], *, memory: bool = False, by_others: bool = False
) -> Kind:
    """A file of the store under a name with {study}, {training job} or {tuning} in it."""

    def where(plan: Plan, store: Store) -> Place:
        tuning = next(training.key for training in finetunings(plan) if training.model == plan.results["on"])
        known = {"study": plan.study.name, "training job": plan.results["on"], "tuning": tuning}
        path = store.root / name.format(**known)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(content(plan, store))
        return Place(path, path)

    return Kind(where, memory, by_others)


def _failure(plan: Plan, store: Store) -> str:
    return json.dumps({"key": plan.results["on"], "error": "it rained", "traceback": "", "at": "2026"})


def _lease(plan: Plan, store: Store) -> str:
    dead = {"beat": "0" * 12, "owner": "f" * 32, "host": "elsewhere", "boot": "b", "namespace": "n"}
    return json.dumps(dead | {"pid": 1, "started": "1", "since": "2026-01-01T00:00:00Z"}) + "\n"


def _takeover(plan: Plan, store: Store) -> str:
    return (
        json.dumps({"key": plan.results["on"], "reason": "dead", "from": "a:1", "by": "b:2", "beats": 3})
        + "\n"
    )


def _fingerprints(plan: Plan, store: Store) -> str:
    return json.dumps(with_checksum(fingerprints_of(plan.study, identities(store))))


def _device(plan: Plan, store: Store) -> str:
    from biphase.study.devices import SHIPPED

    return (SHIPPED / "h200" / "bf16.json").read_text()


KINDS: dict[str, Kind] = {
    "tokens": _file(_shards, "train-00000.bin"),
    "held-out tokens": _file(_shards, "heldout-00000.bin"),
    "card of a corpus": _file(_shards, "card.json"),
    "manifest of a corpus": _file(_shards, "manifest.json"),
    "tokenizer": _file(_shards, "tokenizer/tokenizer.json"),
    "tokenizer's configuration": _file(_shards, "tokenizer/tokenizer_config.json"),
    "weights": _file(_checkpoint, "model.safetensors"),
    "optimizer state": _file(_checkpoint, "optimizer.safetensors"),
    "checkpoint": _file(_checkpoint, "checkpoint.json"),
    "losses": _file(_checkpoint, "metrics.jsonl"),
    "manifest of a checkpoint": _file(_checkpoint, "manifest.json"),
    "trial": _file(_trial, "trial.json"),
    "values": _file(_trial, "values.safetensors"),
    "predictions": _file(_trial, "predictions.safetensors"),
    "manifest of a trial": _file(_trial, "manifest.json"),
    "metadata of a checkpoint": _file(_metadata_of_checkpoint, "checkpoint.json"),
    "losses of metadata": _file(_metadata_of_checkpoint, "metrics.jsonl"),
    "manifest of metadata": _file(_metadata_of_checkpoint, "manifest.json"),
    "metadata of a trial": _file(_metadata_of_trial, "trial.json"),
    "pins": _written("pins.json", lambda plan, store: json.dumps({"owner/name": COMMIT}), by_others=True),
    "fingerprints": _written(f"studies/{{study}}/{FINGERPRINTS}", _fingerprints, memory=True),
    "device": _written("devices/h200/bf16.json", _device),
    "plan": _written("studies/{study}/plan.json", lambda plan, store: "", memory=True),
    "plan of another study": _written(
        "studies/other/plan.json",
        lambda plan, store: json.dumps(with_checksum({"jobs": [{"key": "0" * 32}]})),
    ),
    "failure": _written("studies/{study}/failures/{training job}.json", _failure, memory=True),
    "live losses": _written(
        "studies/{study}/live/{training job}.jsonl", lambda plan, store: '{"step": 1}\n', memory=True
    ),
    "lease of a training job": _written("leases/{training job}.lease", _lease, memory=True),
    "lease of a fine-tuning": _written("leases/{tuning}.lease", _lease, memory=True),
    "takeovers": _written("leases/takeovers.jsonl", _takeover, memory=True),
    "lock": _written("leases/.lock", lambda plan, store: "", memory=True),
    "hashes of files": _written("corpora/cache.json", lambda plan, store: "", memory=True),
    "page": _written("studies/{study}/report/report.html", lambda plan, store: "a page", memory=True),
}
