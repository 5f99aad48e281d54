"""Tian et al. (2025): "WSM: Decay-Free Learning Rate Schedule via Checkpoint Merging for LLM Pre-training" (ICLR 2026).

`PAPER` holds its claims W1 to W4; study.py has the runs. The paper trains a mixture of experts of 16.3B parameters and
scores more than 20 benchmarks without fine-tuning; here a claim is about the mean of all tasks of the study.

Sources of the numbers: the abstract (arXiv:2507.17634); its Tables 1 and 4 as two published summaries of the paper give
them alike, and Table 3 as one of them does. The tables themselves could not be looked up.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from biphase.papers.claims import claim
from biphase.report.contrasts import On, Paper, Pattern, Quantity, above
from biphase.report.recipes import Model, Published, Recipe, run_of
from biphase.report.selectors import Compare, Which
from biphase.specs import Merge, Pretrain

CLOSE = 0.5  # points: the margin of "no worse"
MANY, FEW = 6, 3  # checkpoints


def _steps(run: Pretrain) -> list[int]:
    """The steps of the checkpoints of one run that are averaged, the last first; empty if it is no such average."""
    start = run.start
    if run.stages or not isinstance(start, Merge) or len({part.run for part in start.parts}) > 1:
        return []
    return [part.total_steps for part in start.by_steps]


def window(run: Pretrain) -> float:
    """The steps that an average covers: each checkpoint stands for those since the one before."""
    steps = _steps(run)
    return (steps[0] - steps[-1]) * len(steps) / (len(steps) - 1)


def _weights(run: Pretrain) -> list[float]:
    """The weights of an average in the order of steps."""
    start = run.start
    assert isinstance(start, Merge)
    weights = dict(zip(start.parts, start.weights, strict=True))
    return [weights[part] for part in reversed(start.by_steps)]


def _equal(run: Pretrain, least: int, most: float = math.inf) -> bool:
    """Whether so many checkpoints are averaged, and all count alike."""
    return least <= len(_steps(run)) <= most and max(_weights(run)) - min(_weights(run)) < 1e-6


def _falling(recipe: Recipe, run: Pretrain) -> bool:
    """Whether earlier checkpoints count more, as if the rate had fallen steeply at first."""
    steps = _steps(run)
    return (
        len(steps) >= MANY and not _equal(run, MANY) and _weights(run) == sorted(_weights(run), reverse=True)
    )


def _decayed(recipe: Recipe, run: Pretrain) -> bool:
    return bool(run.stages) and not recipe.merged and recipe.decayed


MEAN = Which(
    lambda recipe, run: _equal(run, MANY),
    order=lambda recipe, run: -window(run),
)
WEIGHTED = Which(_falling, order=lambda recipe, run: -window(run))
SPARSE = Which(
    lambda recipe, run: _equal(run, 2, FEW),
    order=lambda recipe, run: -window(run),
)
LATE = Which(
    lambda recipe, run: _equal(run, 2, FEW),
    order=lambda recipe, run: window(run),
)
DECAYED = Which(_decayed)


def if_windows(fit: Callable[[float], bool]) -> Pattern:
    """The first above the second, if the window of the second is such a share of that of the first."""

    def quantity(on: On, first: Model, second: Model) -> Quantity | None:
        wide, narrow = (window(run_of(on.study.plan, model.results[0])[0]) for model in (first, second))
        return on.gap(first, second) if fit(narrow / wide) else None

    return replace(above(on=None), quantity=quantity)


# A merge has no schedule of its own, and the run that it averages no decay.
IGNORED = ("merge", "decay", "shape", "floor")
NEEDS = "needs an undecayed run and "


PAPER = Paper(
    authors="Tian, Wang, Zhao, Chen, Liu, Liu, Mao, Zhao, Zhang, Zhou",
    title="WSM: Decay-Free Learning Rate Schedule via Checkpoint Merging for LLM Pre-training",
    venue="arXiv:2507.17634, ICLR 2026",
    address="https://arxiv.org/abs/2507.17634",
    statements=(
        claim(
            "W1",
            "The mean of checkpoints at a constant learning rate scores above a run whose rate decays",
            gist="The mean of the last checkpoints minus the decayed run, mean over tasks",
            contrast="mean of at least 6 checkpoints, the widest window − a run that decays, equal steps; mean over tasks",
            needs=NEEDS + "the mean of its last checkpoints (Merge), and a run of equal steps that decays",
            models=Compare((MEAN, DECAYED), IGNORED),
            paper="63.95 against 62.67 (Table 1: mean of all benchmarks, best checkpoints)",
            caveats=("The paper's gain is on high-quality text that both branches change to.",),
        ),
        claim(
            "W2",
            "The longer the window that is averaged, the better",
            gist="The mean over a long window minus that over a short one, mean over tasks",
            contrast="mean of at least 6 checkpoints − mean of 2 or 3 whose window is at most half as wide; mean over tasks",
            needs=NEEDS + "means over a long and over a short window of its last checkpoints",
            models=Compare((MEAN, LATE), IGNORED),
            contrasts=(if_windows(lambda share: share <= 1 / 2),),
            paper="no numbers seen: the abstract calls the duration the most critical factor",
        ),
        claim(
            "W3",
            "In one window more checkpoints are better than two or three",
            gist="The mean of many checkpoints minus that of few in one window, mean over tasks",
            contrast="mean of at least 6 checkpoints − mean of 2 or 3 with the same window, within a tenth; mean over tasks",
            needs=NEEDS + "means of many and of two or three checkpoints of one window",
            models=Compare((MEAN, SPARSE), IGNORED),
            contrasts=(if_windows(lambda share: abs(share - 1) < 0.1),),
            paper="63.78 for 8, 62.77 for 2 checkpoints of 80B tokens (Table 4)",
        ),
        claim(
            "W4",
            "Weights that emulate a 1−√ decay are no worse than equal ones",
            gist="The weighted mean minus the mean, which must exceed −0.5, mean over tasks",
            contrast="mean of at least 6 checkpoints, earlier ones counting more − mean with equal weights > −0.5 points; mean over tasks",
            needs=NEEDS + "two means of its last checkpoints, one of them with weights that fall",
            models=Compare((WEIGHTED, MEAN), IGNORED),
            contrasts=(above(on=None, margin=-CLOSE),),
            paper="64.06 against 63.95 (Table 3)",
            caveats=("No worse means: less than 0.5 points below.",),
        ),
    ),
    published=Published(),
    tasks={"SC": (), "TC": (), "QA": (), "IR": ()},
    protocol="standard",
)
