"""Curves with uncertain coefficients: where two of them cross, where one has its optimum, and what to measure next.

A curve is a polynomial fitted to scores over x: the logarithm of steps, or the share of CLM in a budget. Every answer
is the set of x that a test does not reject, cut to the region that was asked about. Such a set is an interval inside
the region if the data determine the answer, and reaches to an end of the region, is in two pieces, or is the whole
region if they do not (Fieller 1954). It is never replaced by an estimate with a standard error, which would be
narrow just where the answer is not determined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from biphase.report.statistics.intervals import Floats, quantile

POINTS = 1001  # of the grid over a region
GRADIENT = 0.8  # share of the error rate that `optimum` gives to the slope at a point; the ends get the rest


@dataclass(frozen=True)
class FittedCurve:
    """A fitted polynomial, with the noise of its coefficients.

    `seeds` is the covariance over seeds, if there are enough of them. It has few degrees of freedom, so it counts, with
    its own quantile, only where it exceeds what the scatter of single points explains.
    """

    coefficients: Floats  # constant first
    scatter: tuple[Floats, float]  # covariance, degrees of freedom
    seeds: tuple[Floats, float] | None
    covers: str  # the sources of noise that intervals cover

    def along(self, directions: Floats, alpha: float) -> tuple[Floats, Floats]:
        """Sums of coefficients weighted by directions (…, coefficients), and their half widths at 1 − alpha."""
        variance, reach = self._reach(directions, *self.scatter, alpha)
        if self.seeds:
            between, far = self._reach(directions, *self.seeds, alpha)
            reach = np.where(between > variance, np.maximum(reach, far), reach)
        return directions @ self.coefficients, np.sqrt(reach)

    def _reach(
        self, directions: Floats, covariance: Floats, df: float, alpha: float
    ) -> tuple[Floats, Floats]:
        variance = ((directions @ covariance) * directions).sum(axis=-1)
        return variance, quantile(df, alpha) ** 2 * variance

    def at(self, x: Floats, alpha: float) -> tuple[Floats, Floats]:
        return self.along(x[..., None] ** np.arange(self.coefficients.size), alpha)

    def slope(self, x: Floats, alpha: float) -> tuple[Floats, Floats]:
        powers = np.arange(self.coefficients.size)
        return self.along(powers * x[..., None] ** np.maximum(powers - 1, 0), alpha)

    def rise(self, start: Floats, end: Floats, alpha: float) -> tuple[Floats, Floats]:
        """The curve at `end` minus the curve at `start`."""
        powers = np.arange(self.coefficients.size)
        return self.along(end[..., None] ** powers - start[..., None] ** powers, alpha)


@dataclass(frozen=True)
class Located:
    """The x that are not rejected, as intervals within a region; empty: none."""

    estimate: float  # NaN: no such x in the region
    pieces: tuple[tuple[float, float], ...]
    region: tuple[float, float]

    @property
    def bounded(self) -> bool:
        """Whether it is one interval that ends before both ends of the region do."""
        return len(self.pieces) == 1 and not self.open_below and not self.open_above

    @property
    def open_below(self) -> bool:
        return bool(self.pieces) and self.pieces[0][0] <= self.region[0]

    @property
    def open_above(self) -> bool:
        return bool(self.pieces) and self.pieces[-1][1] >= self.region[1]


# ---------------------------------------------------------------- fitting


def fit_cells(
    x: ArrayLike, mean: ArrayLike, variance: ArrayLike, df: float, degree: int, covers: str
) -> FittedCurve:
    """Least squares through means of known variances, such as `Cells.variance / n`, or sums of two of those.

    Where the means scatter about the polynomial more than their variances explain, the polynomial is not the whole
    truth: the covariance is then enlarged by the ratio, and has the degrees of freedom of the scatter.
    """
    xs, ys, v = (np.asarray(one, dtype=np.float64) for one in (x, mean, variance))
    design = _design(xs, degree)
    solve = np.linalg.pinv(design)
    coefficients, left = solve @ ys, xs.size - degree - 1
    covariance = (solve * v) @ solve.T
    if left > 0:
        residual = np.eye(xs.size) - design @ solve
        ratio = float(np.square(residual @ ys).sum() / (np.square(residual) @ v).sum())
        if ratio > 1:
            covariance, df = covariance * ratio, min(df, left)
    return FittedCurve(coefficients, (covariance, df), None, covers)


def fit_seeds(x: ArrayLike, scores: ArrayLike, degree: int) -> FittedCurve:
    """The mean curve of pretraining seeds, from complete scores (seeds, points). A seed may differ in level and shape.

    From three seeds on the variance is the larger one of that of the seeds' own curves and of what the scatter about
    the mean curve explains. With one or two seeds it is the scatter alone, about curves that differ in level only, and
    the answer is about these seeds, not about the recipe.
    """
    xs, table = np.asarray(x, dtype=np.float64), np.atleast_2d(np.asarray(scores, dtype=np.float64))
    seeds, points = table.shape
    design = _design(xs, degree)
    each = table @ np.linalg.pinv(design).T
    coefficients = each.mean(axis=0)
    # Shape alone: levels of seeds differ, and no answer depends on them.
    shape = design[:, 1:] - design[:, 1:].mean(axis=0)
    fitted = shape @ coefficients[1:]
    scatter = table - table.mean(axis=1, keepdims=True) - fitted
    df = seeds * (points - 1) - degree
    if df < 1:
        raise ValueError(
            f"{points} points of {seeds} seeds do not determine the scatter about degree {degree}"
        )
    rest = np.zeros((degree + 1, degree + 1))
    rest[1:, 1:] = np.linalg.inv(shape.T @ shape) * (np.square(scatter).sum() / df / seeds)
    if seeds < 3:
        which = "this pretraining seed" if seeds == 1 else "these two pretraining seeds"
        return FittedCurve(coefficients, (rest, df), None, f"the scatter of {which}, not other ones")
    return FittedCurve(coefficients, (rest, df), (np.cov(each.T) / seeds, seeds - 1), "pretraining seeds")


def fit_each(x: ArrayLike, scores: ArrayLike, degree: int, covers: str) -> FittedCurve:
    """The mean of the curves that are fitted to each seed by itself, from complete scores (seeds, points).

    The noise is that of the seeds' curves alone, so it holds however the points of one seed depend on each other.
    """
    table = np.asarray(scores, dtype=np.float64)
    each = table @ np.linalg.pinv(_design(np.asarray(x, dtype=np.float64), degree)).T
    return FittedCurve(each.mean(axis=0), (np.cov(each.T) / len(table), len(table) - 1), None, covers)


def _design(x: Floats, degree: int) -> Floats:
    if np.unique(x).size <= degree:
        raise ValueError(f"{np.unique(x).size} points do not determine a polynomial of degree {degree}")
    return x[:, None] ** np.arange(degree + 1)


# ---------------------------------------------------------------- crossing


def crossing(gap: FittedCurve, region: tuple[float, float], level: float = 0.95) -> Located:
    """Where the gap between two curves may be 0: Fieller's set, within a region.

    The estimate is the last crossing from below, or NaN.
    """
    grid = np.linspace(*region, POINTS)
    value, half = gap.at(grid, 1 - level)
    turns = np.flatnonzero((value[:-1] < 0) & (value[1:] >= 0))
    inside = np.abs(value) <= half
    for end in (0, 1):  # the estimates are inside, however little noise there is
        inside[np.flatnonzero((value[:-1] < 0) != (value[1:] < 0)) + end] = True
    estimate = math.nan
    if turns.size:
        last = turns[-1]
        estimate = float(np.interp(0.0, value[last : last + 2], grid[last : last + 2]))
    return Located(estimate, _pieces(grid, inside), region)


# ---------------------------------------------------------------- optimum


def optimum(curve: FittedCurve, region: tuple[float, float], level: float = 0.95) -> Located:
    """Where the maximum within a region may be (after Peterson, Cahya and del Castillo 2002).

    A point cannot be the maximum if the curve still rises there, or falls, or if it is lower than an end of the region.
    So each point is tested by the slope at it and by its differences from both ends, which share the error rate. The
    set covers the maximum with at least the level, also if it is an end of the region or the curve has a minimum.
    """
    grid = np.linspace(*region, POINTS)
    value, half = curve.slope(grid, GRADIENT * (1 - level))
    rises, falls = value > half, value < -half
    rises[-1] = falls[0] = False  # beyond the ends is nothing
    lower = np.zeros(POINTS, dtype=bool)
    for end in region:
        rise, half = curve.rise(grid, np.full(POINTS, end), (1 - GRADIENT) * (1 - level))
        lower |= (rise > half) & (grid != end)
    height, _ = curve.at(grid, 1 - level)
    return Located(float(grid[np.argmax(height)]), _pieces(grid, ~(rises | falls | lower)), region)


def nearly_best(
    curve: FittedCurve, region: tuple[float, float], loss: float, level: float = 0.95
) -> tuple[tuple[float, float], ...]:
    """The x that lose less than `loss` against any other x in the region, as intervals; empty: none is shown to."""
    grid = np.linspace(*region, 201)
    start, end = np.meshgrid(grid, grid, indexing="ij")
    rise, half = curve.rise(start, end, 1 - level)
    return _pieces(grid, (rise + half).max(axis=1) < loss)


def next_point(x: Sequence[float], candidates: Sequence[float], where: Located) -> dict[float, float]:
    """By how many percent each candidate would reduce the optimum's standard error.

    The standard error of a quadratic's optimum is that of its slope there over its curvature. Only the slope's depends
    on the points, so curvature and noise cancel. As the optimum is not known, it is averaged over where it may be.
    """
    pieces = where.pieces or (where.region,)
    places = np.concatenate([np.linspace(low, high, 21) for low, high in pieces])

    def error(points: Sequence[float]) -> float:
        design = _design(np.asarray(points, dtype=np.float64), 2)[:, 1:]
        centred = design - design.mean(axis=0)
        covariance = np.linalg.inv(centred.T @ centred)
        directions = np.stack([np.ones_like(places), 2 * places], axis=-1)
        return float(np.sqrt(((directions @ covariance) * directions).sum(axis=-1)).mean())

    now = error(x)
    return {float(one): 100 * (1 - error([*x, one]) / now) for one in candidates}


def _pieces(grid: Floats, kept: NDArray[np.bool_]) -> tuple[tuple[float, float], ...]:
    """The runs of kept grid points as intervals."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], kept, [False]]).astype(np.int8)))
    return tuple(
        (float(grid[start]), float(grid[end - 1])) for start, end in zip(edges[::2], edges[1::2], strict=True)
    )
