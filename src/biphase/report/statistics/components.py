"""Variance components: how much noise comes from pretraining seeds, fine-tuning seeds and test examples.

The score of a cell (one pretraining seed, one fine-tuning seed) is the mean over its test examples, and all cells are
scored on the same examples. The mean squares of the table of scores estimate the effect of seeds. The covariance of
the cells over examples estimates what another test set would change, and how much of the apparent effect of seeds is
due to this test set. Variances are estimated by the method of moments; a negative estimate is reported as 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from biphase.report.statistics.intervals import Floats, kept

Values = NDArray[np.float32] | NDArray[np.float64]
Source = Literal[
    "pretraining seed",
    "fine-tuning seed",
    "pretraining × fine-tuning seed",
    "test example",
    "seeds × test example",
]
SOURCES_OF_NOISE: tuple[Source, ...] = get_args(Source)


@dataclass(frozen=True)
class Component:
    """One source of noise."""

    source: Source
    single: (
        float  # its variance in one score; NaN: it cannot be estimated, because there is one seed of its kind
    )


@dataclass(frozen=True)
class Decomposition:
    """The variance components of a score."""

    pretraining_seeds: int
    finetuning_seeds: int
    examples: int
    components: tuple[Component, ...]


def decompose(values: Values | Sequence[Values]) -> Decomposition:
    """Decompose the noise of one model, or of a paired difference.

    Values have the shape (pretraining seeds, fine-tuning seeds, examples). A fourth axis of length three holds counts
    for micro F1; for the difference of two such arrays, pass the difference of their `linear`. Several arrays are
    several tasks with the same seeds and other examples; their unweighted mean is decomposed. A cell with any NaN is
    missing; of an incomplete table, the part that `complete` keeps is used.
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
    return Decomposition(
        pretraining_seeds=len(table),
        finetuning_seeds=table.shape[1],
        examples=sum(one.shape[2] for one in cells),
        components=_components(table, [one[np.ix_(rows, columns)] for one in cells]),
    )


def linear(counts: Values) -> Floats:
    """Linearize counts (…, examples, 3) of correct, predicted and true into values whose mean is micro F1.

    Each value is F1 plus the example's first-order influence on it, so the noise of F1 over examples becomes that of
    a mean.
    """
    right = counts[..., 0].astype(np.float64)
    named = counts[..., 1].astype(np.float64) + counts[..., 2]
    size = named.mean(axis=-1, keepdims=True)
    size = np.where(size == 0, 1.0, size)  # nothing predicted and nothing true: F1 is 0
    f1 = 2 * right.mean(axis=-1, keepdims=True) / size
    return f1 + (2 * right - f1 * named) / size


def linear_correlations(pairs: Values, metric: str) -> Floats:
    """As `linear`, of pairs (…, examples, 2) of predicted and true number, for the correlation `metric`.

    The influence of an example on Spearman's correlation includes that on the ranks of the others.
    """
    values = np.full(pairs.shape[:-1], np.nan)
    for place in np.ndindex(pairs.shape[:-2]):
        if not np.isfinite(pairs[place]).all():
            continue
        x, y = pairs[place].T.astype(np.float64)
        found = []
        if "pearson" in metric:
            u, v = x - x.mean(), y - y.mean()
            found.append(_influence(u, v, u * v, u * u, v * v))
        if "spearman" in metric:
            u, v = (one - one.mean() for one in (_below(x, np.ones(len(x))), _below(y, np.ones(len(y)))))
            shared = u * v - _below(x, v) - _below(y, u)
            found.append(_influence(u, v, shared, u * u - 2 * _below(x, u), v * v - 2 * _below(y, v)))
        values[place] = np.mean(found, axis=0)
    return values


def _influence(u: Floats, v: Floats, shared: Floats, left: Floats, right: Floats) -> Floats:
    """The correlation of centred numbers plus each example's influence on it, from that on the three second moments."""
    spreads = (u @ u / len(u)), (v @ v / len(v))
    if min(spreads) <= 1e-20:  # all equal: the correlation is 0 by definition
        return np.zeros(len(u))
    scale = np.sqrt(spreads[0] * spreads[1])
    r = u @ v / len(u) / scale
    sides = sum((one - one.mean()) / spread for one, spread in zip((left, right), spreads, strict=True))
    return r + (shared - shared.mean()) / scale - r / 2 * sides


def _below(values: Floats, weights: Floats) -> Floats:
    """For each value the sum of the weights of lower values, half of those of equal ones included, over their number."""
    _, which = np.unique(values, return_inverse=True)
    of_each = np.bincount(which, weights=weights)
    return (of_each.cumsum() - of_each / 2)[which] / len(values)


def _components(table: Floats, tasks: list[Floats]) -> tuple[Component, ...]:
    """Solve the expected mean squares of the table of scores, and of their covariance over examples, for the variances.

    A mean square is divided by the number of cells: it is the variance that a source and all finer ones add to the mean.
    """
    pretrained, tuned = table.shape
    cells = table.size

    def square(of: Floats, pretraining: bool, finetuning: bool) -> float:
        """A projection of the cells: onto the means over a factor, or onto the deviations."""
        df = (pretrained - 1 if pretraining else 1) * (tuned - 1 if finetuning else 1)
        if df == 0:
            return 0.0
        projection = np.kron(_projection(pretrained, pretraining), _projection(tuned, finetuning))
        return float((projection * of).sum()) / df / cells

    deviations = (table - table.mean()).reshape(-1)
    seen = np.outer(deviations, deviations)
    # Covariance of the cells' scores over test sets of this size; different tasks are independent.
    redrawn = np.sum(
        [np.atleast_2d(np.cov(one.reshape(cells, -1))) / (one.shape[2] * len(tasks) ** 2) for one in tasks],
        axis=0,
    )
    seeds, rest = square(seen, True, True), square(redrawn, True, True)
    by_pretraining, by_tuning = square(redrawn, True, False), square(redrawn, False, True)
    # What both the seeds and the examples contain, so that it is not counted twice.
    overlap = max(0.0, by_pretraining + by_tuning - rest)
    # In one cell: pretraining × example, fine-tuning × example, and the residual of both.
    mixed = pretrained * max(0.0, by_pretraining - rest) + tuned * max(0.0, by_tuning - rest) + cells * rest
    variances: tuple[tuple[Source, float, bool], ...] = (  # of one score, and whether it can be estimated
        (
            "pretraining seed",
            pretrained * (square(seen, True, False) - seeds - by_pretraining + rest),
            pretrained > 1,
        ),
        ("fine-tuning seed", tuned * (square(seen, False, True) - seeds - by_tuning + rest), tuned > 1),
        ("pretraining × fine-tuning seed", cells * (seeds - rest), pretrained > 1 and tuned > 1),
        ("test example", square(redrawn, False, False) - overlap, True),
        ("seeds × test example", mixed, cells > 1),
    )
    return tuple(
        Component(source, max(0.0, variance) if known else math.nan) for source, variance, known in variances
    )


def _projection(levels: int, differences: bool) -> Floats:
    mean = np.full((levels, levels), 1 / levels)
    return np.eye(levels) - mean if differences else mean
