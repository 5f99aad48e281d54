"""Evidence made of arrays, so that a test knows every number a figure should show."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from biphase.papers.gisserot2025 import PAPER
from biphase.report.build import figures
from biphase.report.estimates import Estimates, estimate
from biphase.report.evidence import Evidence
from biphase.report.figures.crossings import gaps
from biphase.report.figures.description import Figure, Series
from biphase.report.recipes import Model
from biphase.specs import Task
from biphase.store import Store
from biphase.study.plan import Plan

STEP = 0.5  # percent between one seed and the next; they are spread evenly around the mean
LOST = 3.0  # percent for each rate further from the best, which is the second

Mean = Callable[[Model, Task], float | None]


def paper_mean(model: Model, task: Task) -> float:
    """One more than the paper's value, and where that is not known a number of the model's own."""
    known = PAPER.published.family_mean(model.recipe, task.family)
    if known is not None:
        return known + 1.0
    return 60.0 + model.recipe.steps / 10_000 + model.recipe.causal_share + (model.recipe.ratio or 0.0)


@pytest.fixture(scope="session")
def evidence_of(evidence_of) -> Callable[[Plan, Store, Mean], Evidence]:
    """Every model scores `mean` percent on a task, its seeds around it; None: nothing of it is there."""

    def told(plan: Plan, store: Store, mean: Mean) -> Evidence:
        def score(model: Model, task: Task, shape: tuple[int, int]) -> np.ndarray:
            value = mean(model, task)
            rates, seeds = (np.arange(count) for count in shape)
            scores = STEP * (seeds - seeds.mean()) - LOST * np.abs(rates - min(1, rates[-1]))[:, None]
            return scores + (np.nan if value is None else value)

        return evidence_of(plan, score, store=store, seconds=60.0, machines=({"device": "NVIDIA H200"},))

    return told


@pytest.fixture(scope="session")
def paper(evidence_of, plan_of, tmp_path_factory: pytest.TempPathFactory) -> tuple[Evidence, Estimates]:
    """The paper's study with every score there, and nothing of its pretraining."""
    evidence = evidence_of(plan_of("paper"), Store(tmp_path_factory.mktemp("paper")), paper_mean)
    return evidence, estimate(evidence)


@pytest.fixture(scope="session")
def figures_by_id() -> Callable[[Evidence], dict[str, Figure]]:
    """The figures of evidence by id, in the order of the page."""

    def made(evidence: Evidence) -> dict[str, Figure]:
        estimates = estimate(evidence)
        return {figure.id: figure for figure in figures(evidence, estimates, gaps(evidence, estimates))}

    return made


@pytest.fixture(scope="session")
def by_id(paper: tuple[Evidence, Estimates], figures_by_id) -> dict[str, Figure]:
    return figures_by_id(paper[0])


@pytest.fixture(scope="session")
def mean_of() -> Mean:
    return paper_mean


@pytest.fixture(scope="session")
def drawn() -> Callable[[Figure, str, str], Series]:
    """The series of one name in the panel of one title; of several the first that shows points."""

    def find(figure: Figure, panel: str, name: str) -> Series:
        series = [one for some in figure.panels if some.title == panel for one in some.series]
        return next(one for one in series if one.name == name and one.draws != "line")

    return find
