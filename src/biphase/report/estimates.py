"""The scores of a study with their intervals: every model on every task and on every family of tasks.

A `Score` has several intervals, because each answers another question. The interval over fine-tuning seeds: would the
same model give this score again on the same test set? Over test examples: would another test set give it? Where a
recipe was pretrained with several seeds, the interval over seeds covers those too, and `Estimate.covers` says so.

`edges` warns where the grid of learning rates was too narrow.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from biphase.report.evidence import Baseline, Evidence, Floats, Resamples, ScoreGrid, over_examples
from biphase.report.recipes import Model
from biphase.report.statistics.components import Decomposition, decompose, linear_correlations
from biphase.report.statistics.intervals import Estimate, across, kept, of_scores
from biphase.tasks.metrics import CORRELATIONS
from biphase.text import collapse, listed, no_interval, rate


@dataclass(frozen=True)
class Score:
    """The score of one model on a task, or on a family (the mean of its tasks for each seed). Between 0 and 1."""

    model: str
    on: str  # a task or a family
    metric: str  # of a task; for a family, those of its tasks
    seeds: Estimate  # NaN if no seed is complete
    by_seed: Floats  # (pretraining seeds, fine-tuning seeds); NaN: missing
    examples: tuple[float, float] | None  # bootstrap interval over test examples
    no_examples: str  # why there is no interval over examples, where there is a score
    noise: Decomposition | None  # variance components of a family's score
    done: int  # finished trials
    of: int
    planned: bool  # whether trials are planned on each of its tasks
    baselines: dict[str, Baseline] = field(default_factory=dict)  # by name; the mean over its tasks
    constant: int = 0  # chosen fine-tunings that predict the same for every test example
    others: dict[str, float] = field(default_factory=dict)  # means of a task's other metrics

    @property
    def known(self) -> bool:
        return bool(np.isfinite(self.seeds.mean))

    @property
    def no_interval(self) -> str:
        """Why there is no interval over seeds; empty if there is one, or no score."""
        return no_interval(self.seeds.n) if self.known and not np.isfinite(self.seeds.low) else ""

    @property
    def not_above(self) -> str:
        """A warning if the mean does not exceed a baseline, with the best of those."""
        beaten = [one for one in self.baselines.values() if self.known and self.seeds.mean <= one.test]
        return f"not above {max(beaten, key=lambda one: one.test).what}" if beaten else ""

    @property
    def collapse(self) -> str:
        """A warning if models predict the same for every test example."""
        return collapse(self.constant)


@dataclass(frozen=True)
class Estimates:
    """All scores of a study, by (model, task) and by (model, family)."""

    tasks: dict[tuple[str, str], Score]
    families: dict[tuple[str, str], Score]


def estimate(evidence: Evidence, draws: Resamples | None = None) -> Estimates:
    """Compute the scores of every model. `draws`: resampled scores shared with other callers."""
    draws = draws or Resamples(evidence)
    models = evidence.models.values()
    tasks = {
        (model.name, task): _score(evidence, draws, model, task, (task,))
        for task in evidence.tasks
        for model in models
    }
    families: dict[tuple[str, str], Score] = {
        (model.name, family): _score(evidence, draws, model, family, names, decomposed=True)
        for family, names in evidence.families.items()
        for model in models
    }
    return Estimates(tasks, families)


def _score(
    evidence: Evidence,
    draws: Resamples,
    model: Model,
    on: str,
    tasks: tuple[str, ...],
    *,
    decomposed: bool = False,
) -> Score:
    grids = [evidence.grids[result, task] for result in model.results for task in tasks]
    matrix = evidence.on(model, tasks)
    metrics = dict.fromkeys(grid.metric for grid in grids if grid.metric)
    known = kept(matrix)[1].size > 0
    least = evidence.least_score(tasks)
    examples: tuple[float, float] | str = ""
    if known:
        sizes = [evidence.examples(model, task) for task in tasks]
        examples = over_examples(draws.of(model, tasks), matrix, sizes)
    return Score(
        model=model.name,
        on=on,
        metric=", ".join(metrics),
        seeds=of_scores(across(matrix), least),
        by_seed=matrix,
        examples=None if isinstance(examples, str) else (max(examples[0], least), min(examples[1], 1.0)),
        no_examples=examples if isinstance(examples, str) else "",
        noise=_noise(evidence, model, tasks) if known and decomposed else None,
        done=sum(grid.done for grid in grids),
        of=sum(grid.of for grid in grids),
        planned=all(grid.of for grid in grids),
        baselines=_baselines(evidence, model, tasks),
        constant=sum(grid.constant_seeds for grid in grids),
        others=_others(evidence, model, *tasks) if known and len(tasks) == 1 else {},
    )


def _baselines(evidence: Evidence, model: Model, tasks: tuple[str, ...]) -> dict[str, Baseline]:
    """The baselines that every task has for its main metric, averaged over tasks."""
    each: list[dict[str, Baseline]] = []
    for task in tasks:
        grids = [evidence.grids[result, task] for result in model.results]
        found = [(name, known, grid.metric) for grid in grids for name, known in grid.baselines.items()]
        each.append({name: known[metric] for name, known, metric in found if metric in known})
    return {
        name: Baseline(
            ", ".join(dict.fromkeys(one[name].what for one in each)),
            float(np.mean([one[name].test for one in each])),
        )
        for name in each[0]
        if all(name in one for one in each)
    }


def _others(evidence: Evidence, model: Model, task: str) -> dict[str, float]:
    """The means of the task's other metrics, where every complete seed has them."""
    grids = [evidence.grids[result, task] for result in model.results]
    names = dict.fromkeys(name for grid in grids for name in grid.test if name != grid.metric)
    rows, columns = kept(evidence.scores(model, task))
    means = {name: float(evidence.scores(model, task, name)[np.ix_(rows, columns)].mean()) for name in names}
    return {name: mean for name, mean in means.items() if np.isfinite(mean)}


def _noise(evidence: Evidence, model: Model, tasks: tuple[str, ...]) -> Decomposition | None:
    """The variance components of a mean over tasks; None if per-example values are missing."""
    values = [evidence.values(model, task) for task in tasks]
    known = [one for one in values if one is not None]
    if len(known) < len(values) or any(one.shape[2] < 2 for one in known):
        return None
    complete = np.all([np.isfinite(one).all(axis=tuple(range(2, one.ndim))) for one in known], axis=0)
    metrics = [evidence.metric(task) for task in tasks]
    known = [
        linear_correlations(one, metric) if metric in CORRELATIONS else one
        for one, metric in zip(known, metrics, strict=True)
    ]
    return decompose(known) if kept(np.where(complete, 1.0, np.nan))[1].size else None


# ---------------------------------------------------------------- edges of the grid of learning rates
# If the lowest or highest rate is best most of the time, a better rate may lie outside the grid.


def edges(evidence: Evidence) -> str:
    """Name the tasks on which one end of the grid wins more than half of the time; empty if there are none."""
    winners = []
    for task in evidence.tasks:
        won: Counter[str] = Counter()
        for (_, name), grid in evidence.grids.items():
            # Every rate is planned for every seed, or was screened.
            whole = grid.screened or all(all(row) for row in grid.keys)
            if name == task and len(grid.lrs) > 2 and whole:
                won.update(_end(grid, seed, at) for seed, at in grid.chosen.items())
        for end, times in won.items():
            if end and 2 * times > won.total():
                winners.append(f"on {task} the {end}, won {times:,} of {won.total():,} times")
    return f"A better learning rate may lie beyond the grid: {listed(winners)}." if winners else ""


def _end(grid: ScoreGrid, seed: int, at: int) -> str:
    """The end of the grid that won for a seed; empty if another rate won or tied, as ties go to the lowest rate."""
    scores = grid.validation[grid.metric][:, grid.seeds.index(seed)]
    every = grid.screened or grid.lrs
    ends, lr = {every[0]: "lowest", every[-1]: "highest"}, grid.lrs[at]
    alone = (scores == scores[at]).sum() == 1
    return f"{ends[lr]}, {rate(lr)}" if alone and lr in ends else ""
