"""Intervals over seeds and over test examples, Holm's correction, and detectable effects.

One row of fine-tuning seeds gives Student's t-interval (`over_seeds`). Several pretraining seeds, each fine-tuned with
the same fine-tuning seeds, form a crossed table (`across`): the effect of a pretraining seed on its whole row and of a
fine-tuning seed on its whole column does not average out over the cells, so cells are not treated as independent.

Where no interval can be computed it is NaN, never narrow: for one value, and for values that are all equal, because
their spread is below the resolution of the test set.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from biphase.tasks.metrics import CORRELATIONS, correlation_with

Floats = NDArray[np.float64]
# The squared half width of an interval as a function of alpha, the probability to miss the true mean.
Reach = Callable[[float], float]

ROUNDING = 1e-12  # values that differ by less are equal: the difference is rounding of sums
SMALLEST_P = 1e-12  # lower bound of p-values of crossed tables


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval and p-value. NaN: not known."""

    mean: float
    sd: float  # of the averaged values
    n: int  # number of averaged values
    low: float
    high: float
    p: float  # two-sided, for a true mean of 0; below 1 − level exactly if the interval excludes 0
    covers: str  # the sources of noise that the interval covers, as text
    se: float = math.nan  # standard error of the mean
    df: float = math.nan  # low and high are mean ∓ t(df) · se


def over_seeds(values: Floats, level: float = 0.95, covers: str = "fine-tuning seeds") -> Estimate:
    """Student's t-interval of a mean. Missing values are left out; `n` counts the rest."""
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
    """The mean over (pretraining seeds, fine-tuning seeds), with an interval that covers both.

    With one pretraining seed the interval covers fine-tuning seeds only, and `covers` says so. Of an incomplete table,
    the part that `complete` returns is used.
    """
    table = complete(matrix)
    cells = table.reshape(-1)
    if len(table) <= 1:
        return over_seeds(cells, level)
    if table.shape[1] <= 1:
        return over_seeds(cells, level, covers="pretraining seeds")
    first, second = (levels - 1 for levels in table.shape)
    rows, columns, rest = (square / table.size for square in mean_squares(table))
    reach = both(students(rows, first), students(columns, second), shared=rest, df=max(first, second))
    se = math.sqrt(max(rows, columns, rest, rows + columns - rest))
    mean, sd, covers = average(cells), deviation(cells), "pretraining and fine-tuning seeds"
    if not se > ROUNDING * max(1.0, abs(mean)):
        return Estimate(mean, sd, cells.size, math.nan, math.nan, math.nan, covers)
    half = math.sqrt(reach(1 - level))
    p, df = chance(reach, mean), fitting_df(half / se, 1 - level)
    return Estimate(mean, sd, cells.size, mean - half, mean + half, p, covers, se, df)


def complete(matrix: Floats) -> Floats:
    """The complete part of a table: rows with any score, and columns with a score in all of those rows."""
    table = np.asarray(matrix, dtype=np.float64)
    if table.ndim != 2:
        raise ValueError(
            f"a table of {table.ndim} axes where (pretraining seeds, fine-tuning seeds) is expected"
        )
    rows, columns = kept(table)
    return table[np.ix_(rows, columns)]


def kept(table: Floats) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The row and column indices that `complete` keeps."""
    there = np.isfinite(table)
    rows = np.flatnonzero(there.any(axis=1))
    return rows, np.flatnonzero(there[rows].all(axis=0)) if rows.size else rows


def mean_squares(table: Floats) -> tuple[float, float, float]:
    """The mean squares of rows, columns and residual in a full table with one value in each cell."""
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
    """The reach of a mean whose variance was estimated with `df` degrees of freedom."""
    return lambda alpha: quantile(df, alpha) ** 2 * variance


def both(first: Reach, second: Reach, shared: float, df: float) -> Reach:
    """The reach of a mean with two sources of noise, whose estimated variances both contain `shared`.

    Squared half widths add up, each with the quantile of its own degrees of freedom (Banerjee 1960: coverage is never
    below the level, whatever the true variances). The part counted twice is subtracted with the smallest of the
    quantiles, that of `df`. The result is at least the reach of either source, and at least that of a normal with
    variance `shared`; otherwise row means and column means that happen to be equal would give a width of 0. One
    variance with Satterthwaite's degrees of freedom covers too little in small tables: see docs/statistics.md.
    """

    def reach(alpha: float) -> float:
        one, other = first(alpha), second(alpha)
        least, twice = (quantile(of, alpha) ** 2 * shared for of in (math.inf, df))
        # numpy functions, so that a simulation can pass arrays of a million tables.
        return np.maximum(np.maximum(one, other), np.maximum(least, one + other - twice))

    return reach


def of_scores(one: Estimate, least: float = 0.0) -> Estimate:
    """Clip the interval of a score to [least, 1]. No true mean lies outside, so the coverage is unchanged."""
    return replace(one, low=max(one.low, least), high=min(one.high, 1.0)) if math.isfinite(one.low) else one


def average(values: Floats) -> float:
    return float(values.mean()) if values.size else math.nan


def deviation(values: Floats) -> float:
    """The sample sd; NaN for fewer than two values, 0 for equal ones."""
    if values.size < 2:
        return math.nan
    equal = np.ptp(values) <= ROUNDING * max(1.0, float(np.abs(values).max()))
    return 0.0 if equal else float(np.std(values, ddof=1))


def chance(reach: Reach, mean: float) -> float:
    """The p-value that corresponds to an interval: the alpha at which it just touches 0."""
    from scipy.optimize import brentq

    def gap(log_alpha: float) -> float:
        return reach(math.exp(log_alpha)) - mean**2

    lowest = math.log(SMALLEST_P)
    if gap(lowest) <= 0:
        return SMALLEST_P
    return math.exp(brentq(gap, lowest, 0.0, xtol=1e-12)) if gap(0.0) < 0 else 1.0


def quantile(df: float, alpha: float) -> float:
    """The two-sided quantile of Student's t for probability alpha; the normal quantile for df = inf."""
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


# ---------------------------------------------------------------- resampling
# The bootstrap over test examples. The resamples of a task depend only on its name and its number of examples, so all
# models and seeds are scored on the same resamples, in one call or in several. Differences of resampled scores are
# therefore paired, and a mean over seeds or tasks is the mean of their resampled scores.


Values = NDArray[np.float32] | NDArray[np.float64]

DRAWS = 1000
BLOCK = 64 * 2**20  # bytes of weights at a time
RESOLUTION = 2e-6  # relative; a smaller spread is rounding of float32 sums


def resample(values: Values, *, seed: str, draws: int = DRAWS, metric: str = "") -> Floats:
    """The scores (resamples, K) of values (K, examples) or counts (K, examples, 3) on resampled examples.

    Of pairs of numbers (K, examples, 2) it is the correlation that `metric` names. `seed` is the task's name. A row with
    NaN gives NaN and does not affect other rows.
    """
    if metric in CORRELATIONS:
        return _correlations(values, metric, _weights(seed, values.shape[1], draws))
    parts = _parts(values)
    sums = [np.empty((draws, len(values))) for _ in parts]
    done = 0
    for weights in _weights(seed, values.shape[1], draws):
        block = slice(done, done + len(weights))
        for part, total in zip(parts, sums, strict=True):
            with np.errstate(invalid="ignore"):
                total[block] = weights @ part.T
        done += len(weights)
    return _scored(sums, values.shape[1])


def _correlations(values: Values, metric: str, every: Iterator[NDArray[np.float32]]) -> Floats:
    # Rows of one task have the same true numbers, whose ranks take as long as those of the predicted ones.
    golds, of_row = np.unique(values[..., 1], axis=0, return_inverse=True)
    blocks = []
    for weights in every:
        block = np.empty((len(weights), len(values)))
        for which, gold in enumerate(golds):
            scored = correlation_with(metric, gold, weights)
            for row in np.flatnonzero(of_row.ravel() == which):
                block[:, row] = scored(values[row, :, 0])
        blocks.append(block)
    return np.concatenate(blocks)


def interval(draws: Floats, point: Floats, *, examples: int, level: float = 0.95) -> tuple[Floats, Floats]:
    """The bootstrap interval of points (…) from their resampled scores (resamples, …).

    On each side it takes the wider of two intervals. One is point ∓ t · se, which is inaccurate for skewed scores. The
    other is BCa, widened by the ratio of t to normal quantiles (Hesterberg 2015), which follows skew but is too narrow
    for differences that are mostly 0. Together they hold their level even for 43 queries: see docs/statistics.md.
    NaN: the resampled scores do not differ.
    """
    from scipy.special import ndtr

    wide = quantile(examples - 1, 1 - level)
    small = np.sqrt(
        examples / (examples - 1)
    )  # resampling gives the population variance, not the sample variance
    centred = draws - draws.mean(axis=0)
    sd = np.sqrt(np.square(centred).mean(axis=0))
    known = sd > RESOLUTION * np.maximum(1, np.abs(point))
    sd = np.where(known, sd, np.nan)
    half = wide * small * sd
    # For a mean, bias correction and acceleration are equal: a sixth of the skewness of the resampled scores.
    skew = (centred**3).mean(axis=0) / sd**3 / 6
    ordered = np.sort(draws, axis=0)
    low, high = (
        _at(ordered, ndtr(skew + (skew + z) / (1 - skew * (skew + z)))) for z in (-small * wide, small * wide)
    )
    return np.minimum(point - half, low), np.maximum(point + half, high)


def _parts(values: Values) -> list[NDArray[np.float32]]:
    """The arrays that are summed over examples: the values; or correct, and predicted + true."""
    if values.ndim == 2:
        return [values.astype(np.float32, copy=False)]
    if values.ndim != 3 or values.shape[2] != 3:
        raise ValueError(
            f"values of shape {values.shape} where (K, examples) or (K, examples, 3) is expected"
        )
    return [
        values[:, :, 0].astype(np.float32),
        (values[:, :, 1] + values[:, :, 2]).astype(np.float32, copy=False),
    ]


def _scored(sums: list[Floats], examples: int) -> Floats:
    if len(sums) == 1:
        return sums[0] / examples
    right, named = sums
    # As seqeval: 0 if nothing is found correctly, also if there was nothing to find.
    return np.divide(2 * right, named, out=np.where(np.isnan(named), np.nan, 0.0), where=named > 0)


def _weights(seed: str, examples: int, draws: int) -> Iterator[NDArray[np.float32]]:
    """How often each example occurs in each resample, (resamples, examples), in blocks to bound memory."""
    digest = hashlib.sha256(f"{seed}:{examples}".encode()).digest()
    chance = np.random.default_rng(int.from_bytes(digest[:16]))
    rows = max(1, min(draws, BLOCK // (4 * examples)))
    block = np.empty((rows, examples), dtype=np.float32)
    for first in range(0, draws, rows):
        some = block[: min(rows, draws - first)]
        for row in some:
            row[:] = np.bincount(chance.integers(0, examples, examples), minlength=examples)
        yield some


def _at(ordered: Floats, share: Floats) -> Floats:
    """The quantile of sorted resampled scores at a share, for each point at its own share."""
    most = len(ordered) - 1
    place = np.clip(np.nan_to_num(share) * (most + 2) - 1, 0, most)
    below = np.floor(place).astype(np.intp)[None]
    lower, upper = (np.take_along_axis(ordered, at, axis=0)[0] for at in (below, np.minimum(below + 1, most)))
    return np.where(np.isnan(share), np.nan, lower + (place - below[0]) * (upper - lower))


# ---------------------------------------------------------------- multiple tests
# Holm's procedure bounds the probability of any false positive. It makes no assumption about the dependence of the
# tests, which suits claims that share models, tasks and seeds.


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm-adjusted p-values, in the order given. NaN (no test was made) stays NaN and does not count.

    The smallest p-value is multiplied by the number of tests, the next by one less, and so on; the results are made
    monotonic.
    """
    adjusted = [math.nan] * len(p_values)
    made = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    largest = 0.0
    for rank, (p, place) in enumerate(made):
        if not 0 <= p <= 1:
            raise ValueError(f"a p-value of {p:g} is not between 0 and 1")
        largest = max(largest, min(1.0, (len(made) - rank) * p))
        adjusted[place] = largest
    return adjusted


# ---------------------------------------------------------------- power
# The smallest effect that a test finds with a given probability. An sd of 0 gives NaN, because it says nothing about
# further seeds; with fewer than two values nothing is ever found.


def detectable_by(se: float, df: float, level: float = 0.05, power: float = 0.8) -> float:
    """The smallest true mean that a two-sided t-test finds with this power, by its standard error and df."""
    if not 0 < level < power < 1:
        raise ValueError(f"level {level:g} and power {power:g}: 0 < level < power < 1 is expected")
    if se < 0:
        raise ValueError(f"a standard error of {se:g} is below 0")
    if df <= 0:
        return math.inf
    return se * _distance(df, level, power) if se > 0 else math.nan


@cache
def _distance(df: float, level: float, power: float) -> float:
    """The number of standard errors at which a t-test finds a true mean with this power."""
    from scipy.optimize import brentq

    far = 1.0
    while _power(far, df, level) < power:
        far *= 2
    return float(brentq(lambda distance: _power(distance, df, level) - power, 0.0, far, xtol=1e-9))


def _power(distance: float, df: float, level: float) -> float:
    """The power of a t-test for a true mean at this many standard errors: both tails of the noncentral t."""
    from scipy.stats import nct

    critical = quantile(df, level)
    wrong_sign = float(nct.cdf(-critical, df, distance))
    # scipy returns NaN if this tail is too small for it.
    return float(nct.sf(critical, df, distance)) + (0.0 if math.isnan(wrong_sign) else wrong_sign)
