"""Which noise is how large: of pretraining seeds, fine-tuning seeds, test examples; and an interval for any of them.

The score of a cell (a pretraining seed, a fine-tuning seed) is the mean of its test examples, and all cells answer the
same examples. Mean squares of the table of scores say what seeds do. The covariance of the cells over the examples
says what another test set would do, and how much of what seeds seem to do is due to this one. Variances are found by
the method of moments; one that comes out negative is said to be 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from biphase.report.statistics.intervals import (
    Estimate,
    Floats,
    Reach,
    across,
    both,
    crossed,
    estimate,
    joined,
    kept,
    over_seeds,
    students,
)

Values = NDArray[np.float32] | NDArray[np.float64]
Source = Literal[
    "pretraining seed",
    "fine-tuning seed",
    "pretraining × fine-tuning seed",
    "test example",
    "seeds × test example",
]
Random = Literal[
    "fine-tuning seeds",
    "pretraining seeds",
    "test examples",
    "fine-tuning seeds and test examples",
    "pretraining and fine-tuning seeds",
    "all",
]


@dataclass(frozen=True)
class Component:
    """One source of noise. NaN: it cannot be told apart with one seed of its kind."""

    source: Source
    single: float  # the variance it brings to the score of one fine-tuning on a test set of this size
    mean: float  # the variance it brings to the reported mean


@dataclass(frozen=True)
class Decomposition:
    """A mean, where its noise comes from, and its interval for each choice of what is random."""

    mean: float
    pretraining_seeds: int
    finetuning_seeds: int
    examples: int
    components: tuple[Component, ...]
    intervals: dict[Random, Estimate]


@dataclass(frozen=True)
class Squares:
    """Mean squares over the number of cells: what a source, and every finer one, brings to the variance of the mean."""

    pretraining: float
    finetuning: float
    seeds: float  # what neither explains
    examples: tuple[tuple[float, int], ...]  # of each task, and its degrees of freedom
    pretraining_examples: float
    finetuning_examples: float
    rest: float

    @property
    def overlap(self) -> float:
        """What both the table of seeds and the examples show: it must not count twice."""
        return max(0.0, self.pretraining_examples + self.finetuning_examples - self.rest)

    @property
    def redrawn(self) -> float:
        """The variance of the mean over test sets, with the seeds as they are."""
        return sum(variance for variance, _ in self.examples)

    def reach(self, alpha: float) -> float:
        """Of the mean over test sets. Tasks differ in degrees of freedom, so each has its own quantile."""
        return sum(students(variance, df)(alpha) for variance, df in self.examples)


def decompose(values: Values | Sequence[Values], level: float = 0.95) -> Decomposition:
    """Of one model, or of a paired difference, on a task: values are (pretraining seeds, fine-tuning seeds, examples).

    A fourth axis of three holds counts for micro F1; the difference of two such is a difference of their `linear`.
    Several arrays are several tasks, and their unweighted mean is meant: the same seeds, other examples. A cell with
    any NaN is missing; of a table with holes the part that `complete` takes is used.
    """
    tasks = [values] if isinstance(values, np.ndarray) else list(values)
    cells = [linear(one) if one.ndim == 4 else one.astype(np.float64) for one in tasks]
    if any(one.shape[2] < 2 for one in cells):
        raise ValueError("a test set of fewer than two examples: nothing can be said of another one")
    scores = np.mean([one.mean(axis=2) for one in cells], axis=0)
    rows, columns = kept(scores)
    if not columns.size:
        raise ValueError(
            "no fine-tuning seed is complete for all pretraining seeds: there is nothing to decompose"
        )
    table = scores[np.ix_(rows, columns)]
    squares = _squares(table, [one[np.ix_(rows, columns)] for one in cells])
    return Decomposition(
        mean=float(table.mean()),
        pretraining_seeds=len(table),
        finetuning_seeds=table.shape[1],
        examples=sum(one.shape[2] for one in cells),
        components=_components(squares, *table.shape),
        intervals=_intervals(squares, table, level),
    )


def linear(counts: Values) -> Floats:
    """Counts (…, examples, 3) of right, said and true as one value an example, whose mean is micro F1.

    F1, plus what the example moves it by to first order (its influence): so the noise of F1 over examples is that of
    a mean.
    """
    right = counts[..., 0].astype(np.float64)
    named = counts[..., 1].astype(np.float64) + counts[..., 2]
    size = named.mean(axis=-1, keepdims=True)
    size = np.where(size == 0, 1.0, size)  # nothing said and nothing there: F1 is 0
    f1 = 2 * right.mean(axis=-1, keepdims=True) / size
    return f1 + (2 * right - f1 * named) / size


def _squares(table: Floats, tasks: list[Floats]) -> Squares:
    """A mean square is the size of a projection of the cells: onto means over a factor, or onto what differs from them."""
    pretrained, tuned = table.shape

    def square(of: Floats, pretraining: bool, finetuning: bool) -> float:
        df = (pretrained - 1 if pretraining else 1) * (tuned - 1 if finetuning else 1)
        if df == 0:
            return 0.0
        projection = np.kron(_projection(pretrained, pretraining), _projection(tuned, finetuning))
        return float((projection * of).sum()) / df / table.size

    deviations = (table - table.mean()).reshape(-1)
    seen = np.outer(deviations, deviations)
    # The covariance of the cells' scores over test sets of this size; those of several tasks are independent.
    redrawn = [
        np.atleast_2d(np.cov(one.reshape(table.size, -1))) / (one.shape[2] * len(tasks) ** 2) for one in tasks
    ]
    every = np.sum(redrawn, axis=0)
    return Squares(
        pretraining=square(seen, True, False),
        finetuning=square(seen, False, True),
        seeds=square(seen, True, True),
        examples=tuple(
            (square(one, False, False), task.shape[2] - 1) for one, task in zip(redrawn, tasks, strict=True)
        ),
        pretraining_examples=square(every, True, False),
        finetuning_examples=square(every, False, True),
        rest=square(every, True, True),
    )


def _projection(levels: int, differences: bool) -> Floats:
    mean = np.full((levels, levels), 1 / levels)
    return np.eye(levels) - mean if differences else mean


def _components(squares: Squares, pretrained: int, tuned: int) -> tuple[Component, ...]:
    """The expected mean squares, solved for the variances."""
    several, cells = pretrained > 1 and tuned > 1, pretrained * tuned
    pretraining = squares.pretraining - squares.seeds - squares.pretraining_examples + squares.rest
    finetuning = squares.finetuning - squares.seeds - squares.finetuning_examples + squares.rest
    examples = squares.redrawn - squares.overlap
    # In one cell: pretraining × example, fine-tuning × example, and the rest of both.
    mixed = (
        pretrained * max(0.0, squares.pretraining_examples - squares.rest)
        + tuned * max(0.0, squares.finetuning_examples - squares.rest)
        + cells * squares.rest
    )

    def component(source: Source, mean: float, draws: int, *, known: bool) -> Component:
        mean = max(0.0, mean) if known else math.nan
        return Component(source, draws * mean, mean)

    return (
        component("pretraining seed", pretraining, pretrained, known=pretrained > 1),
        component("fine-tuning seed", finetuning, tuned, known=tuned > 1),
        component("pretraining × fine-tuning seed", squares.seeds - squares.rest, cells, known=several),
        component("test example", examples, 1, known=True),
        Component("seeds × test example", *((mixed, squares.overlap) if cells > 1 else (math.nan, math.nan))),
    )


def _intervals(squares: Squares, table: Floats, level: float) -> dict[Random, Estimate]:
    """Each source as random or as given. What is given is averaged over, and stays as it is in every redraw."""
    pretrained, tuned = table.shape
    single = [name for name, n in (("pretraining seed", pretrained), ("fine-tuning seed", tuned)) if n == 1]
    covers = f"not covered: there is one {' and one '.join(single)}"
    none = Estimate(float(table.mean()), math.nan, table.size, math.nan, math.nan, math.nan, covers)
    tuning = over_seeds(table.mean(axis=0), level) if tuned > 1 else none
    seeds = none if single else across(table, level)
    examples, se = sum(df + 1 for _, df in squares.examples), math.sqrt(squares.redrawn)
    by_tuning = squares.finetuning, students(squares.finetuning, tuned - 1), squares.finetuning_examples
    return {
        "fine-tuning seeds": tuning,
        "pretraining seeds": over_seeds(table.mean(axis=1), level, "pretraining seeds")
        if pretrained > 1
        else none,
        "test examples": estimate(
            none.mean, se * math.sqrt(examples), examples, se, squares.reach, "test examples", level
        ),
        "fine-tuning seeds and test examples": _and_examples(tuning, squares, by_tuning, level)
        if tuned > 1
        else none,
        "pretraining and fine-tuning seeds": seeds,
        "all": none if single else _and_examples(seeds, squares, (*crossed(table), squares.overlap), level),
    }


def _and_examples(
    seeds: Estimate, squares: Squares, by_seeds: tuple[float, Reach, float], level: float
) -> Estimate:
    """An estimate over seeds made one over test examples too: variance and reach of the seeds, and what both show."""
    variance, reach, overlap = by_seeds
    most = max(seeds.n - 1, *(df for _, df in squares.examples))
    whole = both(reach, squares.reach, shared=overlap, df=most)
    se = math.sqrt(joined(variance, squares.redrawn, overlap))
    return estimate(seeds.mean, seeds.sd, seeds.n, se, whole, f"{seeds.covers} and test examples", level)
