"""Evidence made of arrays, so that a test knows every number a figure should show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from biphase.keys import Identities
from biphase.papers.gisserot2025 import PAPER
from biphase.presets import corpus_of
from biphase.report.estimates import Estimates, estimate
from biphase.report.evidence import Evidence, ScoreGrid
from biphase.report.figures.description import Figure, Series
from biphase.report.recipes import Model, models
from biphase.specs import Task
from biphase.store import Store
from biphase.study.load import load
from biphase.study.plan import Plan, make_plan

STUDIES = Path(__file__).parents[3] / "studies"
OUTSIDE = Identities(data=lambda run: corpus_of(run).name, hub=lambda hub: f"{hub.source}@{hub.revision}")
STEP = 0.5  # percent between one seed and the next; they are spread evenly around the mean
LOST = 3.0  # percent for each rate further from the best, which is the second

Mean = Callable[[Model, Task], float | None]


def study_plan(name: str) -> Plan:
    loaded = load(STUDIES / f"{name}.py")
    return make_plan(loaded.study, OUTSIDE, loaded.question)


def told(plan: Plan, store: Store, mean: Mean) -> Evidence:
    """Every model scores `mean` percent on a task, its seeds around it; None: nothing of it is there."""
    finetune = plan.study.finetune
    assert finetune is not None
    tasks = {task.name: task for task in finetune.tasks}
    lrs, seeds = tuple(sorted(finetune.lrs)), tuple(sorted(finetune.seeds))
    around = STEP * (np.arange(len(seeds)) - (len(seeds) - 1) / 2)
    best = min(1, len(lrs) - 1)
    lost = LOST * np.abs(np.arange(len(lrs)) - best)
    grids = {}
    for model in models(plan).values():
        for result in model.results:
            for task in tasks.values():
                value = mean(model, task)
                scores = np.nan if value is None else (value + around[None] - lost[:, None]) / 100
                whole = np.broadcast_to(scores, (len(lrs), len(seeds))).copy()
                grids[result, task.name] = ScoreGrid(
                    result=result,
                    task=task,
                    metric="" if value is None else "accuracy",
                    lrs=lrs,
                    seeds=seeds,
                    keys=tuple(tuple(f"{result}-{task.name}-{lr:g}-{seed}" for seed in seeds) for lr in lrs),
                    validation={} if value is None else {"accuracy": whole},
                    test={} if value is None else {"accuracy": whole},
                    seconds=np.where(np.isfinite(whole), 60.0, np.nan),
                    examples=100,
                    machines=() if value is None else ({"device": "NVIDIA H200"},),
                )
    return Evidence(plan, store, models(plan), tasks, grids, {}, published=PAPER.published)


def paper_mean(model: Model, task: Task) -> float:
    """One more than the paper's value, and where that is not known a number of the model's own."""
    known = PAPER.published.family_mean(model.recipe, task.family)
    if known is not None:
        return known + 1.0
    return 60.0 + model.recipe.steps / 10_000 + model.recipe.causal_share + (model.recipe.ratio or 0.0)


@pytest.fixture(scope="session")
def evidence_of() -> Callable[[Plan, Store, Mean], Evidence]:
    return told


@pytest.fixture(scope="session")
def plan_named() -> Callable[[str], Plan]:
    return study_plan


@pytest.fixture(scope="session")
def paper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Evidence, Estimates]:
    """The paper's study with every score there, and nothing of its pretraining."""
    evidence = told(study_plan("paper"), Store(tmp_path_factory.mktemp("paper")), paper_mean)
    return evidence, estimate(evidence)


@pytest.fixture(scope="session")
def mean_of() -> Mean:
    return paper_mean


@pytest.fixture(scope="session")
def drawn() -> Callable[[Figure, str, str], Series]:
    """The series of one name in the panel of one title; of several the first that shows points."""

    def find(figure: Figure, panel: str, name: str) -> Series:
        found = [
            series
            for one in figure.panels
            if one.title == panel
            for series in one.series
            if series.name == name
        ]
        return next(series for series in found if series.draws != "line")

    return find
