"""The scores of a study with their intervals: every model on every task, and on every family of tasks.

Several intervals stand beside a mean, since each answers another question. Over fine-tuning seeds: would the same
model and the same test set give this again? Over test examples: would another test set? Over both: would either? Where
a recipe was pretrained with several seeds, the first covers those too, and says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from biphase.report.evidence import Baseline, Evidence, Floats, Resamples, ScoreGrid
from biphase.report.recipes import Model
from biphase.report.statistics.components import Decomposition, decompose
from biphase.report.statistics.intervals import Estimate, across, interval, kept, of_scores
from biphase.text import collapse, listed, no_interval, rate


@dataclass(frozen=True)
class Score:
    """One model on one task, or on one family: the mean of its tasks, seed by seed. Between 0 and 1."""

    model: str
    on: str  # a task or a family
    metric: str  # of a task; a family mixes those of its tasks
    seeds: Estimate  # NaN where nothing is complete
    by_seed: Floats  # (pretraining seeds, fine-tuning seeds); NaN: missing
    examples: tuple[float, float] | None  # over test examples: a bootstrap interval
    no_examples: str  # why there is none, where there is a score
    noise: (
        Decomposition | None
    )  # of a family: which noise is how large, and the intervals over several of them
    done: int  # leaves
    of: int
    planned: bool  # on each of its tasks
    baselines: dict[str, Baseline] = field(default_factory=dict)  # by name: the mean over its tasks
    constant: int = 0  # of its chosen fine-tunings, those that predict the same for every test example
    others: dict[str, float] = field(default_factory=dict)  # the means of a task's other metrics

    @property
    def known(self) -> bool:
        return bool(np.isfinite(self.seeds.mean))

    @property
    def no_interval(self) -> str:
        """Why there is no interval over seeds; empty where there is one, or no score."""
        return no_interval(self.seeds.n) if self.known and not np.isfinite(self.seeds.low) else ""

    @property
    def collapse(self) -> str:
        """A warning where models predict the same for every test example."""
        return collapse(self.constant)


@dataclass(frozen=True)
class Estimates:
    """All scores of a study: by model and task, and by model and family."""

    tasks: dict[tuple[str, str], Score]
    families: dict[tuple[str, str], Score]


def estimate(evidence: Evidence, draws: Resamples | None = None) -> Estimates:
    """The scores of every model. `draws`: those that others also ask, so that they are made once."""
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
    over_examples = _over_examples(evidence, draws, model, tasks, matrix) if known else ""
    return Score(
        model=model.name,
        on=on,
        metric=", ".join(metrics),
        seeds=of_scores(across(matrix)),
        by_seed=matrix,
        examples=None if isinstance(over_examples, str) else over_examples,
        no_examples=over_examples if isinstance(over_examples, str) else "",
        noise=_noise(evidence, model, tasks) if known and decomposed else None,
        done=sum(grid.done for grid in grids),
        of=sum(grid.of for grid in grids),
        planned=all(grid.of for grid in grids),
        baselines=_baselines(evidence, model, tasks),
        constant=sum(grid.constant_seeds for grid in grids),
        others=_others(evidence, model, *tasks) if known and len(tasks) == 1 else {},
    )


def _baselines(evidence: Evidence, model: Model, tasks: tuple[str, ...]) -> dict[str, Baseline]:
    """Those that every task has for the metric its rates are chosen by."""
    grids = [[evidence.grids[result, task] for result in model.results] for task in tasks]
    each = [
        {
            name: known[grid.metric]
            for grid in some
            for name, known in grid.baselines.items()
            if grid.metric in known
        }
        for some in grids
    ]
    shared = [name for name in each[0] if all(name in one for one in each)]
    return {
        name: Baseline(
            ", ".join(dict.fromkeys(one[name].what for one in each)),
            float(np.mean([one[name].test for one in each])),
        )
        for name in shared
    }


def _others(evidence: Evidence, model: Model, task: str) -> dict[str, float]:
    """The metrics that did not choose, as far as every seed that counts has them."""
    grids = [evidence.grids[result, task] for result in model.results]
    names = dict.fromkeys(name for grid in grids for name in grid.test if name != grid.metric)
    rows, columns = kept(evidence.scores(model, task))
    means = {name: float(evidence.scores(model, task, name)[np.ix_(rows, columns)].mean()) for name in names}
    return {name: mean for name, mean in means.items() if np.isfinite(mean)}


def _over_examples(
    evidence: Evidence, draws: Resamples, model: Model, tasks: tuple[str, ...], matrix: Floats
) -> tuple[float, float] | str:
    """The mean over the seeds that count, on redrawn test sets; or why it cannot be had."""
    rows, columns = kept(matrix)
    each = [draws.of(model, task) for task in tasks]
    drawn = [one for one in each if one is not None]
    if len(drawn) < len(each):
        return "no values by example in this store"
    mean = np.mean([one[:, rows][:, :, columns].mean(axis=(1, 2)) for one in drawn], axis=0)
    fewest = min(evidence.examples(model, task) for task in tasks)
    if fewest < 2:
        return "fewer than two test examples"
    if not np.isfinite(mean).all():
        return "no values by example of some seeds in this store"
    point = np.asarray(matrix[np.ix_(rows, columns)].mean())
    low, high = interval(mean, point, examples=fewest)
    if not np.isfinite(low):
        return "the same score on every redrawn test set"
    return max(float(low), 0.0), min(float(high), 1.0)


def _noise(evidence: Evidence, model: Model, tasks: tuple[str, ...]) -> Decomposition | None:
    values = [evidence.values(model, task) for task in tasks]
    known = [one for one in values if one is not None]
    if len(known) < len(values) or any(one.shape[2] < 2 for one in known):
        return None
    complete = np.all([np.isfinite(one).all(axis=tuple(range(2, one.ndim))) for one in known], axis=0)
    return decompose(known) if kept(np.where(complete, 1.0, np.nan))[1].size else None


# ---------------------------------------------------------------- edges
# Was the grid of learning rates wide enough? Where its last rate wins, a better one may lie beyond it.


def edges(evidence: Evidence) -> str:
    """Tasks on which an end of the grid wins more often than all other rates together; empty where there are none."""
    told = [words for task in evidence.tasks for words in _of(evidence, task)]
    if not told:
        return ""
    return f"A better learning rate may lie beyond the grid: {listed(told)}."


def _of(evidence: Evidence, task: str) -> Iterator[str]:
    won: Counter[str] = Counter()
    for (_, name), grid in evidence.grids.items():
        if name == task and len(grid.lrs) > 2 and all(all(row) for row in grid.keys):  # the whole grid
            won.update(_end(grid, seed, at) for seed, at in grid.chosen.items())
    for end, times in won.items():
        if end and 2 * times > won.total():
            yield f"on {task} the {end}, won {times:,} of {won.total():,} times"


def _end(grid: ScoreGrid, seed: int, at: int) -> str:
    """Which end of the grid won for a seed; none where another rate did as well: ties go to the lowest."""
    scores = grid.validation[grid.metric][:, grid.seeds.index(seed)]
    alone = (scores == scores[at]).sum() == 1
    for which, end in (("lowest", min(grid.lrs)), ("highest", max(grid.lrs))):
        if alone and grid.lrs[at] == end:
            return f"{which}, {rate(end)}"
    return ""
