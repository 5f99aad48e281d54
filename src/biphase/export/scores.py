"""The scores that a store holds of one model: chosen by validation, told with intervals. Nothing is computed again."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from biphase.errors import SpecError, StoreError, nearest
from biphase.export.found import SavedLeaf
from biphase.files import Store
from biphase.records import decode, encode, key
from biphase.study.leaves import published, read_leaf
from biphase.study.scores import with_interval
from biphase.study.select import Cell, choose


@dataclass(frozen=True)
class Grid:
    """One model on one task, fine-tuned in one way: every learning rate and seed that is there."""

    task: str
    metric: str
    about: dict[str, Any]  # one of its leaves; all say the same of the task and the manner
    leaves: dict[Cell, SavedLeaf]

    @property
    def rate(self) -> float | None:
        """The learning rate whose mean validation score is best; None while a cell of the grid is missing."""
        scores = {cell: one.about["scores"]["validation"][self.metric] for cell, one in self.leaves.items()}
        choice = choose(scores)
        return None if choice is None else choice.by_mean

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for _, seed in self.leaves})

    def chosen(self) -> SavedLeaf | None:
        """The leaf of that rate and the first seed."""
        return None if self.rate is None else self.leaves[self.rate, self.seeds[0]]

    def words(self) -> str:
        """The mean test score over seeds at that rate, in percent, with its interval."""
        if self.rate is None:
            return "incomplete"
        test = [self.leaves[self.rate, seed].about["scores"]["test"][self.metric] for seed in self.seeds]
        return with_interval(test)


def grids_of(model: str, store: Store) -> list[Grid]:
    """Every grid of leaves that the store holds of a model, by the name of the task."""
    found: dict[str, dict[Cell, SavedLeaf]] = defaultdict(dict)
    for leaf in published(store):
        try:
            about = read_leaf(store, leaf)
        except StoreError:  # `status` names it; it may be of any model
            continue
        # One that was fine-tuned reading forwards only says nothing of an encoder.
        if about["model"] == model and not about["finetune"].get("causal"):
            alike = key([about["task"], about["trained_on"], _manner(about)])
            found[alike][about["lr"], about["seed"]] = SavedLeaf(leaf, about)
    made = []
    for leaves in found.values():
        about = next(iter(leaves.values())).about
        made.append(Grid(about["task"]["name"], about["metric"], about, leaves))
    return sorted(made, key=lambda one: (one.task, one.about["finetune"]["protocol"]))


def _manner(about: dict[str, Any]) -> dict[str, Any]:
    """How it was fine-tuned; what a leaf does not say, since it is older than the field, is as usual."""
    return encode(decode({**about["finetune"], "tasks": [about["trained_on"] or about["task"]]}))


def leaf_for_task(model: str, task: str, store: Store) -> SavedLeaf:
    """The leaf of a model on the task of that name, chosen by validation scores alone."""
    every = grids_of(model, store)
    grids = [one for one in every if one.task == task]
    if not grids:
        names = dict.fromkeys(one.task for one in every)
        hint = nearest(task, names) if names else "fine-tune it first: biphase evaluate KEY --tasks NAME"
        raise SpecError(f"--task {task}: {model[:8]} has no scores on it in {store.leaves}; {hint}")
    if len(grids) > 1:
        keys = ", ".join(one.key[:8] for grid in grids if (one := grid.chosen()) is not None)
        raise SpecError(
            f"--task {task}: {model[:8]} was fine-tuned on it in {len(grids)} ways; type the key of a leaf instead, "
            f"e.g. {keys or next(iter(grids[0].leaves.values())).key[:8]}"
        )
    chosen = grids[0].chosen()
    if chosen is None:
        raise SpecError(
            f"--task {task}: some learning rates or seeds of {model[:8]} are missing, and the best may be among them; "
            "finish the study, or type the key of a leaf"
        )
    return chosen
