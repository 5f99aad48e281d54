"""Every result of a study as a run that somebody may ask about: its recipe, its way, its cost, where it stands."""

from __future__ import annotations

from dataclasses import dataclass

from biphase.errors import StoreError
from biphase.files import Store
from biphase.metadata import read_lines
from biphase.report.evidence import Evidence
from biphase.report.pretraining import Piece, about_state, cost
from biphase.report.recipes import Recipe, recipe_of
from biphase.study.plan import Plan


@dataclass(frozen=True)
class Run:
    """One result. What is not known yet is None, or empty."""

    name: str
    model: str  # the name it is reported under
    seed: int
    recipe: Recipe
    key: str
    way: tuple[Piece, ...]  # from the root
    flops: float | None
    seconds: float | None
    joules: float | None
    devices: int
    device: str
    epochs: float | None
    heldout: dict[str, float]  # objective → the last loss that was measured
    standing: str  # done, running, failed, ready, waiting
    leaves: tuple[int, int]  # done, planned
    wrong: str = ""  # why what its state says cannot be trusted


def runs(evidence: Evidence) -> list[Run]:
    """The results of every model, in the order of the plan."""
    plan = evidence.plan
    by_key = {piece.key: piece for piece in evidence.pieces}
    models = {result: model.name for model in evidence.models.values() for result in model.results}
    return [_run(evidence, name, models[name], by_key) for name in plan.results if name in models]


def _run(evidence: Evidence, name: str, model: str, by_key: dict[str, Piece]) -> Run:
    plan, store = evidence.plan, evidence.store
    at = plan.results[name]
    recipe = recipe_of(plan, name)
    grids = [evidence.grids[name, task] for task in evidence.tasks]
    spent = cost(plan, store, name)
    try:
        about, heldout, wrong = about_state(plan, store, name), last_heldout(plan, store, name), ""
    except StoreError as damage:  # told by its place in the store: where the store lies is nobody's business
        about, heldout, wrong = {}, {}, str(damage).replace(f"{store.root}/", "")
    progress = about.get("progress", {})
    return Run(
        name=name,
        model=model,
        seed=recipe.seed,
        recipe=recipe,
        key=at,
        way=tuple(by_key[state.key] for state in plan.path(at)),
        flops=spent.flops,
        seconds=spent.seconds,
        joules=progress.get("joules"),
        devices=int(progress.get("world", 1)),
        device=spent.device,
        epochs=about.get("epochs"),
        heldout=heldout,
        standing=by_key[at].standing if at in by_key else "done",
        leaves=(sum(grid.done for grid in grids), sum(grid.of for grid in grids)),
        wrong=wrong,
    )


def last_heldout(plan: Plan, store: Store, result: str) -> dict[str, float]:
    """The held-out losses measured last on the way to a result.

    Curves are long and few of their lines hold these, so the others are not parsed.
    """
    for state in reversed(plan.path(plan.results[result])):
        folder = store.told(store.states / state.key)
        if store.has(folder):
            measured = [line for line in read_lines(folder, b'"heldout"') if "heldout" in line]
            return measured[-1]["heldout"] if measured else {}
    return {}
