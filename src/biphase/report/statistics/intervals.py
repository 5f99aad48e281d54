"""Intervals over seeds: what a mean over seeds says of the mean over all seeds there could be.

One row of fine-tuning seeds gives Student's t. Several pretraining seeds, each fine-tuned with the same fine-tuning
seeds, are a crossed table: what a pretraining seed does to its whole row and what a fine-tuning seed does to its whole
column does not average out over the cells, so cells are not counted as if they were independent.

An interval that cannot be had is NaN, never narrow: of one value, and of values that are all equal, whose spread is
below what the test set can resolve.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# Half an interval's width, squared, for a chance `alpha` to miss. It grows as alpha falls.
Reach = Callable[[float], float]

ROUNDING = 1e-12  # values that differ by less are equal: their last digits are those of sums
SMALLEST_P = 1e-12  # of a crossed table; a smaller one is said to be this


@dataclass(frozen=True)
class Estimate:
    """A mean and how far it can be trusted. NaN: not known."""

    mean: float
    sd: float  # of the values that were averaged
    n: int  # how many they are
    low: float
    high: float
    p: float  # two-sided, of a true mean of 0; below 1 − level exactly where the interval excludes 0
    covers: str  # the noise that the interval allows for, as a person says it
    se: float = math.nan  # of the mean
    df: float = math.nan  # low and high are mean ∓ t(df) · se


def over_seeds(values: Floats, level: float = 0.95, covers: str = "fine-tuning seeds") -> Estimate:
    """Student's t-interval of a mean. Missing values are left out, and `n` says how many stayed."""
    from scipy.special import stdtr

    row = np.asarray(values, dtype=np.float64)
    if row.ndim != 1:
        raise ValueError(f"values of {row.ndim} axes where one row of seeds is expected: take `across`")
    row = row[np.isfinite(row)]
    mean, sd, df = average(row), deviation(row), row.size - 1
    if not sd > 0:
        return Estimate(mean, sd, row.size, math.nan, math.nan, math.nan, covers)
    se = sd / math.sqrt(row.size)
    half = quantile(df, 1 - level) * se
    p = float(2 * stdtr(df, -abs(mean) / se))
    return Estimate(mean, sd, row.size, mean - half, mean + half, p, covers, se, df)


def across(matrix: Floats, level: float = 0.95) -> Estimate:
    """The mean over (pretraining seeds, fine-tuning seeds), with an interval for both.

    With one pretraining seed the interval is over fine-tuning seeds alone, and says so. Of a table with holes the part
    that `complete` names is taken.
    """
    table = complete(matrix)
    cells = table.reshape(-1)
    if len(table) <= 1:
        return over_seeds(cells, level)
    if table.shape[1] <= 1:
        return over_seeds(cells, level, covers="pretraining seeds")
    variance, reach = crossed(table)
    covers = "pretraining and fine-tuning seeds"
    return estimate(average(cells), deviation(cells), cells.size, math.sqrt(variance), reach, covers, level)


def complete(matrix: Floats) -> Floats:
    """The part of a table without holes that is used: rows with any score, columns with a score in all of those."""
    table = np.asarray(matrix, dtype=np.float64)
    if table.ndim != 2:
        raise ValueError(
            f"a table of {table.ndim} axes where (pretraining seeds, fine-tuning seeds) is expected"
        )
    rows, columns = kept(table)
    return table[np.ix_(rows, columns)]


def kept(table: Floats) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The places of the rows and columns that `complete` takes."""
    there = np.isfinite(table)
    rows = np.flatnonzero(there.any(axis=1))
    return rows, np.flatnonzero(there[rows].all(axis=0)) if rows.size else rows


def crossed(table: Floats) -> tuple[float, Reach]:
    """The variance of a full table's mean if both its rows and its columns are random, and how far it reaches."""
    first, second = (levels - 1 for levels in table.shape)
    rows, columns, rest = (square / table.size for square in mean_squares(table))
    reach = both(students(rows, first), students(columns, second), shared=rest, df=max(first, second))
    return joined(rows, columns, rest), reach


def joined(first: float, second: float, shared: float) -> float:
    """Two estimated variances that both contain `shared`, as one, which is no less than any of the three."""
    return max(first, second, shared, first + second - shared)


def mean_squares(table: Floats) -> tuple[float, float, float]:
    """Of rows, of columns, and of what neither explains, in a full table with one value in each cell."""
    rows, columns = table.shape
    mean = table.mean()
    row = table.mean(axis=1) - mean
    column = table.mean(axis=0) - mean
    rest = table - mean - row[:, None] - column
    return (
        float(columns * (row @ row) / (rows - 1)),
        float(rows * (column @ column) / (columns - 1)),
        float(np.square(rest).sum() / ((rows - 1) * (columns - 1))),
    )


def students(variance: float, df: float) -> Reach:
    """Of a mean whose variance was estimated with so many degrees of freedom."""
    return lambda alpha: quantile(df, alpha) ** 2 * variance


def both(first: Reach, second: Reach, shared: float, df: float) -> Reach:
    """Of a mean with two sources of noise, whose estimated variances both contain `shared`.

    Squared half widths add up, each with the quantile of its own degrees of freedom (Banerjee 1960: never below the
    level, whatever the true variances). What was counted twice comes off at the smallest of the quantiles, that of
    `df`. The whole reaches no less far than either part, nor than a normal with the variance they share, or means of
    rows and of columns that happen to be equal would leave nothing. One variance with Satterthwaite's degrees of
    freedom instead covers too little in small tables: docs/statistics.md has the figures.
    """

    def reach(alpha: float) -> float:
        one, other = first(alpha), second(alpha)
        least, twice = (quantile(of, alpha) ** 2 * shared for of in (math.inf, df))
        # numpy's: so that a simulation can ask of a million tables at once.
        return np.maximum(np.maximum(one, other), np.maximum(least, one + other - twice))

    return reach


def estimate(mean: float, sd: float, n: int, se: float, reach: Reach, covers: str, level: float) -> Estimate:
    """A mean with the interval of this reach and the degrees of freedom that fit it; with none if `se` is 0 or NaN."""
    if not se > ROUNDING * max(1.0, abs(mean)):
        return Estimate(mean, sd, n, math.nan, math.nan, math.nan, covers)
    half = math.sqrt(reach(1 - level))
    p, df = chance(reach, mean), fitting_df(half / se, 1 - level)
    return Estimate(mean, sd, n, mean - half, mean + half, p, covers, se, df)


def of_scores(one: Estimate) -> Estimate:
    """The interval of a score between 0 and 1 as far as scores go: no true mean lies beyond, so it covers as often."""
    return replace(one, low=max(one.low, 0.0), high=min(one.high, 1.0)) if math.isfinite(one.low) else one


def average(values: Floats) -> float:
    return float(values.mean()) if values.size else math.nan


def deviation(values: Floats) -> float:
    """The sd of values; NaN for one, and 0 for equal ones."""
    if values.size < 2:
        return math.nan
    equal = np.ptp(values) <= ROUNDING * max(1.0, float(np.abs(values).max()))
    return 0.0 if equal else float(np.std(values, ddof=1))


def chance(reach: Reach, mean: float) -> float:
    """The p-value that belongs to an interval: the chance to miss at which it just touches 0."""
    from scipy.optimize import brentq

    def gap(log_alpha: float) -> float:
        return reach(math.exp(log_alpha)) - mean**2

    lowest = math.log(SMALLEST_P)
    if gap(lowest) <= 0:
        return SMALLEST_P
    return math.exp(brentq(gap, lowest, 0.0, xtol=1e-12)) if gap(0.0) < 0 else 1.0


def quantile(df: float, alpha: float) -> float:
    """Student's t that is exceeded, on the two sides together, with probability alpha; of inf, the normal one."""
    from scipy.special import stdtrit

    return float(-stdtrit(df, alpha / 2))


def fitting_df(ratio: float, alpha: float) -> float:
    """The degrees of freedom whose quantile is this ratio of half width to standard error."""
    from scipy.optimize import brentq

    fewest, most = 1.0, 1e6
    if ratio <= quantile(most, alpha):
        return most
    if ratio >= quantile(fewest, alpha):
        return fewest
    return float(brentq(lambda df: quantile(df, alpha) - ratio, fewest, most, xtol=1e-9))
