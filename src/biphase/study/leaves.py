"""The leaves of a plan: every result × task × learning rate × seed, and what the store knows of them. No torch.

grid       a result and a task that is trained on: all its learning rates and seeds
training   one fine-tuning of a grid
leaf       the scores of a training on a task: the one it was trained on, or one that borrows its model
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from biphase.errors import StoreError
from biphase.files import Store
from biphase.holders import Holder
from biphase.keys import leaf_key, training_key
from biphase.leases import Leases
from biphase.metadata import read_leaf_file
from biphase.specs import Finetune, Task
from biphase.specs.claims import CHOSEN
from biphase.study import ledger
from biphase.study.plan import Plan

VALUES = "values.safetensors"
PREDICTIONS = "predictions.safetensors"  # of trials of this version on


@dataclass(frozen=True)
class Leaf:
    key: str
    task: Task
    metric: str  # that learning rates are chosen by


@dataclass(frozen=True)
class Training:
    """One fine-tuning, and the leaves that are scored with it."""

    key: str
    model: str  # key of a state or a root
    task: Task
    lr: float
    seed: int
    leaves: tuple[Leaf, ...]

    def title(self, plan: Plan) -> str:
        """As a person says it: which result, on which task, how."""
        names = [name for name, key in plan.results.items() if key == self.model]
        how = "zero-shot" if self.task.zero_shot else f"lr {self.lr:g} · seed {self.seed}"
        return f"{', '.join(names)} · {self.task.name} · {how}"


def trainings(plan: Plan, models: Collection[str] | None = None) -> Iterator[Training]:
    """The fine-tunings of a plan, grid after grid, in the order in which models become ready."""
    for model in (*plan.roots, *plan.states):
        if model not in plan.tuned or (models is not None and model not in models):
            continue
        for task, scored in lenders(plan.tuned[model]).items():
            yield from _grid(plan, plan.tuned[model], model, task, scored)


def lenders(spec: Finetune) -> dict[Task, tuple[Task, ...]]:
    """The tasks that are trained on → those that are scored with their models."""
    scored = {task: tuple(one for one in spec.tasks if spec.lender(one) is task) for task in spec.tasks}
    return {task: some for task, some in scored.items() if some}


def _grid(plan: Plan, spec: Finetune, model: str, task: Task, scored: tuple[Task, ...]) -> Iterator[Training]:
    for lr in spec.lrs:
        for seed in spec.seeds:
            key = training_key(model, plan.tasks[task.name], spec, lr=lr, seed=seed)
            leaves = tuple(
                Leaf(
                    leaf_key(key, plan.tasks[one.name], spec.documents if one.family == "IR" else ""),
                    one,
                    CHOSEN[one.family][spec.protocol],
                )
                for one in scored
            )
            yield Training(key, model, task, lr, seed, leaves)


def finished(training: Training, store: Store) -> bool:
    return all(store.knows(store.leaves / leaf.key) for leaf in training.leaves)


def unfinished(store: Store) -> dict[str, int]:
    """Trainings that have checkpoints → the step of the last one."""
    found: dict[str, int] = {}
    for place in store.unfinished.glob("*-*"):
        training, _, step = place.name.rpartition("-")
        if store.has(place) and step.isdecimal():
            found[training] = max(int(step), found.get(training, 0))
    return found


def kept(plan: Plan, store: Store) -> dict[str, tuple[Training, int]]:
    """The trainings of a plan that go on from a checkpoint, and from which step."""
    saved = unfinished(store)
    some = (one for one in trainings(plan) if one.key in saved) if saved else ()
    return {one.key: (one, saved[one.key]) for one in some if not finished(one, store)}


def settled(plan: Plan, store: Store, tuned: Count | Survey) -> set[str]:
    """The states that need not be computed: those done, but for those whose weights are elsewhere and needed here."""
    done, whole = ledger.done_keys(plan, store), ledger.keys_with_weights(plan, store)
    told = done - whole
    if not told:
        return done
    left = trainings(plan, told) if tuned.done < tuned.of else ()
    unscored = {one.model for one in left if not finished(one, store)}
    return done - set(plan.left(whole, told=told, unscored=unscored))


@dataclass(frozen=True)
class Count:
    """How many of something are done."""

    done: int
    of: int


def count(plan: Plan, store: Store, models: Collection[str] | None = None) -> Count:
    """Fine-tunings done and planned; of all models, or of these."""
    every = list(trainings(plan, models))
    there = store.leaves.is_dir() or store.receipts.is_dir()
    return Count(sum(there and finished(one, store) for one in every), len(every))


@dataclass(frozen=True)
class Survey:
    """The fine-tunings of a plan, as they stand."""

    done: int
    of: int
    running: dict[str, tuple[Training, Holder]]
    failed: dict[str, tuple[Training, str]]
    damaged: dict[str, str]  # those of the failed whose published scores cannot be read, and why
    kept: dict[str, tuple[Training, int]]  # stopped on their way, at this step; not running, and not failed
    seconds_left: float | None  # at the speed measured so far, on as many workers as compute now


def survey(plan: Plan, store: Store) -> Survey:
    every = list(trainings(plan))
    holders = {key: one for key, one in Leases(store.leases).holders().items() if one.alive is not False}
    noted = ledger.failures(plan, store)
    took: list[float] = []
    left: list[Training] = []
    damaged: dict[str, str] = {}
    for one in every:
        if finished(one, store):
            try:
                took.append(
                    sum(
                        sum(read_leaf(store, leaf.key, leaf.metric)["seconds"].values())
                        for leaf in one.leaves
                    )
                )
            except StoreError as wrong:
                damaged[one.key] = str(wrong)
            continue
        left.append(one)
        if fault := next(filter(None, (store.fault(store.leaves / leaf.key) for leaf in one.leaves)), ""):
            damaged[one.key] = fault
    running = {one.key: (one, holders[one.key]) for one in left if one.key in holders}
    errors = {one.key: noted[one.key]["error"] for one in left if one.key in noted} | damaged
    failed = {
        one.key: (one, errors[one.key]) for one in every if one.key in errors and one.key not in running
    }
    stopped = {key: one for key, one in kept(plan, store).items() if key not in running and key not in failed}
    each = sum(took) / len(took) if took else 0.0
    seconds_left = each * len(left) / max(1, len(running)) if took else None
    return Survey(len(took), len(every), running, failed, damaged, stopped, seconds_left)


def read_leaf(store: Store, key: str, metric: str = "") -> dict[str, Any]:
    """What a trial says of itself, checked; a StoreError where it is damaged, or scored by another metric than `metric`."""
    place = store.told(store.leaves / key)
    about = read_leaf_file(place)
    if metric and about["metric"] != metric:
        raise StoreError(
            f"{place} was scored by {about['metric']}, and {metric} is planned; remove it and run the study again"
        )
    return about


def published(store: Store, digits: str = "") -> list[str]:
    """The keys of all leaves of a store that begin with these digits, in order."""
    receipts = store.receipts / store.leaves.name
    return sorted({*store.named(store.leaves, digits), *store.named(receipts, digits)})
