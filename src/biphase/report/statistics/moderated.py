"""Tests of contrasts with few seeds: variances that borrow from other cells, the set of the best, claims of several parts.

A cell is one model at one learning rate (or its score at the chosen rate), measured with n seeds. Two or three seeds
hardly determine a variance, but a study has many cells of the same task, and their variances resemble each other. So
each variance is combined with what all cells of the task say (limma's empirical Bayes, Smyth 2004):

    s² | σ² ~ σ² χ²(d) / d,    1/σ² ~ χ²(d0) / (d0 s0²),    d = n − 1

d0 says how much the cells resemble each other. limma plugs in one estimate of it; `moderate` averages over what d0
and s0² could be, so cells that differ, or are few, add fewer degrees of freedom. A cell's own variance is never
lowered, only raised: a cell that is noisier than the others stays noisy. docs/statistics.md compares this with limma
and with paired tests.

Contrasts are unpaired: seeds share almost no noise between models. Where they do share some, an unpaired test is too
careful, never too bold. The two exceptions are handled by the caller: tasks of one model that share pretraining seeds
are combined seed by seed first, and with several pretraining seeds a value is the mean of its fine-tunings
(`seed_values`). All functions take arrays of any leading shape, so a simulation can pass thousands of studies.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from biphase.report.statistics.intervals import Estimate, Floats, fitting_df, holm

# What is integrated over: d0 on a logarithmic grid, from "cells say little of each other" to "all variances equal", and
# ln s0² around its likeliest value, in standard errors.
PRIOR_DF = np.geomspace(1.5, 1024, 12)
AROUND = np.linspace(-3.5, 3.5, 11)
# The rates of a model share its seeds, so their variances are not independent: the likelihood is taken to this power.
INDEPENDENT = 0.6
FLOOR = 1e-6  # of the mean variance, for numerical reasons
BLOCK = 2**22  # numbers in memory at a time
HALVINGS = 30  # of the bracket of a p-value
SMALLEST_P = 1e-14


# ---------------------------------------------------------------- cells


@dataclass(frozen=True)
class Cells:
    """Means of cells with moderated variances, as arrays (…, cells). NaN: not known."""

    mean: Floats
    variance: Floats  # of one value, not of the mean
    df: Floats  # degrees of freedom of the variance
    n: Floats  # number of values


def seed_values(scores: Floats, *, several: bool) -> Floats:
    """The independent values of a table of (pretraining seeds, fine-tuning seeds).

    With `several` pretraining seeds in a study these are the means of their fine-tunings, one for each. Otherwise the
    values are the fine-tunings, and whatever is said covers fine-tuning seeds only. Missing scores are NaN and are left
    out.
    """
    known = np.isfinite(scores)
    return np.nanmean(scores[known.any(axis=1)], axis=1) if several and known.any() else scores[known]


def padded(rows: list[Floats]) -> Floats:
    """Rows of different lengths as one array, padded with NaN."""
    table = np.full((len(rows), max(1, *(len(row) for row in rows))), np.nan)
    for row, values in zip(table, rows, strict=True):
        row[: len(values)] = values
    return table


def cells_of(values: ArrayLike, others: ArrayLike | None = None) -> Cells:
    """The cells of one task from values (…, cells, seeds), NaN where a seed is missing.

    `others`: cells (…, others, seeds) that variances are learnt from instead. If the learning rate of each seed is
    chosen on validation, `values` are the scores at the chosen rates, and `others` those of every model and rate.
    """
    mean, n, variance = _moments(values)
    prior = None if others is None else _moments(others)
    fitted = None if prior is None else (prior[2], prior[1] - 1)
    moderated, df = moderate(variance, np.maximum(n - 1, 0.0), fitted)
    return Cells(mean, np.where(n > 0, moderated, np.nan), df, n)


def _moments(values: ArrayLike) -> tuple[Floats, Floats, Floats]:
    """Mean, number and variance of values (…, seeds) without NaN."""
    scores = np.asarray(values, dtype=np.float64)
    known = np.isfinite(scores)
    n = known.sum(axis=-1).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(known, scores, 0.0).sum(axis=-1) / n
        squares = np.square(np.where(known, scores - mean[..., None], 0.0)).sum(axis=-1)
        variance = np.where(n > 1, squares / (n - 1), np.nan)
    # Sums of equal numbers differ by rounding.
    variance = np.where(variance <= (1e-12 * np.maximum(1.0, np.abs(mean))) ** 2, 0.0, variance)
    return np.where(n > 0, mean, np.nan), n, variance


def moderate(
    variance: ArrayLike, df: ArrayLike, others: tuple[ArrayLike, ArrayLike] | None = None
) -> tuple[Floats, Floats]:
    """Moderated variances and their degrees of freedom (…, cells).

    `others`: variances and degrees of freedom to learn the prior from, if not from these. A cell without a variance
    gets the one that the others predict: NaN, for a single value; or 0, because equal values say nothing about noise
    below the resolution of the test set. The result is NaN where no cell has a variance.
    """
    own, free = _flat(variance, df)
    from_cells, from_free = (own, free) if others is None else _flat(*others)
    rows = max(1, BLOCK // (own.shape[1] * PRIOR_DF.size * AROUND.size))
    blocks = [slice(at, at + rows) for at in range(0, len(own), rows)]
    parts = [_moderate(own[at], free[at], from_cells[at], from_free[at]) for at in blocks]
    posterior, posterior_df = (np.concatenate(part) for part in zip(*parts, strict=True))
    return posterior.reshape(np.shape(variance)), posterior_df.reshape(np.shape(variance))


def _flat(variance: ArrayLike, df: ArrayLike) -> tuple[Floats, Floats]:
    """Arrays (studies, cells); a cell without a variance has variance 0 and 0 degrees of freedom."""
    own = np.asarray(variance, dtype=np.float64)
    free = np.broadcast_to(np.asarray(df, dtype=np.float64), own.shape)
    flat = -1, own.shape[-1]
    return np.where(own > 0, own, 0.0).reshape(flat), np.where(own > 0, free, 0.0).reshape(flat)


def _moderate(own: Floats, free: Floats, others: Floats, others_free: Floats) -> tuple[Floats, Floats]:
    """As `moderate`, for arrays (studies, cells)."""
    from scipy.special import digamma, polygamma

    scale = (others * others_free).sum(axis=-1) / np.maximum(others_free.sum(axis=-1), 1.0)
    known = scale > 0
    scale = np.where(known, scale, 1.0)
    relative = own / scale[:, None]
    prior, weight = _priors(np.maximum(others / scale[:, None], FLOOR), others_free)  # (studies, d0, s0²)
    shares = weight[:, None]  # (studies, 1, d0, s0²), for every cell
    f = (PRIOR_DF + free[..., None])[..., None]
    pooled = (PRIOR_DF[:, None] * prior[:, None] + (free * relative)[..., None, None]) / f
    # Given the prior, ln σ² has mean ln pooled − ψ(f/2) + ln(f/2) and variance ψ′(f/2). The mixture over priors is
    # replaced by the one scaled inverse χ² that has the same mean and variance of ln σ².
    logs = np.log(pooled) - digamma(f / 2) + np.log(f / 2)
    mean = (shares * logs).sum(axis=(-1, -2))
    spread = (shares * (np.square(logs - mean[..., None, None]) + polygamma(1, f / 2))).sum(axis=(-1, -2))
    df = 2 * trigamma_inverse(spread)
    variance = np.maximum(np.exp(mean + digamma(df / 2) - np.log(df / 2)), relative) * scale[:, None]
    return np.where(known[:, None], variance, np.nan), np.where(known[:, None], df, np.nan)


def _priors(own: Floats, free: Floats) -> tuple[Floats, Floats]:
    """Possible s0² for each possible d0, and the probability of each, as (studies, d0, s0²).

    The likelihood of a cell's s² is that of s0² F(d, d0). Unlike the moments of ln s², which limma uses, it is hardly
    affected by a variance near 0, as coarse metrics give by chance.
    """
    from scipy.special import gammaln

    d0 = PRIOR_DF[:, None]
    own, free = own[:, None, :], free[:, None, :]  # (studies, d0, cells)
    centre, error = _likeliest(own, free, d0)
    logs = centre[..., None] + error[..., None] * AROUND
    ratio = (free * own / d0)[..., None] / np.exp(logs)[:, :, None, :]
    half = ((free + d0) / 2)[..., None]
    likelihood = (
        gammaln(half)
        - gammaln(d0[..., None] / 2)
        - (free / 2)[..., None] * (logs[:, :, None, :] + np.log(d0)[..., None])
        - half * np.log1p(ratio)
    ).sum(axis=2)
    likelihood = INDEPENDENT * likelihood + np.log(error)[..., None]
    weight = np.exp(likelihood - likelihood.max(axis=(-1, -2), keepdims=True))
    return np.exp(logs), weight / weight.sum(axis=(-1, -2), keepdims=True)


def _likeliest(own: Floats, free: Floats, d0: Floats) -> tuple[Floats, Floats]:
    """The likeliest ln s0² for each d0, and its standard error, by Newton's method from the pooled variance 1."""
    log = np.zeros(np.broadcast_shapes(own.shape, d0.shape)[:-1])
    information = np.ones_like(log)
    for _ in range(25):
        ratio = free * own / (d0 * np.exp(log)[..., None])
        share = ratio / (1 + ratio)
        score = ((free + d0) / 2 * share - free / 2).sum(axis=-1)
        information = ((free + d0) / 2 * share * (1 - share)).sum(axis=-1)
        log = log + np.clip(score / np.maximum(information, 1e-6), -1.0, 1.0)
    return log, 1 / np.sqrt(np.maximum(INDEPENDENT * information, 1e-2))


def trigamma_inverse(value: Floats) -> Floats:
    """The x at which trigamma(x) is this value, by Newton's method (Smyth 2004, appendix)."""
    from scipy.special import polygamma

    at = 0.5 + 1 / value
    for _ in range(10):
        tri = polygamma(1, at)
        at = at + tri * (1 - tri / value) / polygamma(2, at)
    return at


# ---------------------------------------------------------------- contrasts


@dataclass(frozen=True)
class ContrastTest:
    """A weighted sum of cells with its interval, and p-values for both directions, as arrays (…)."""

    value: Floats
    se: Floats
    low: Floats
    high: Floats
    above: Floats  # one-sided p-value for exceeding the margin
    below: Floats  # one-sided p-value for falling below it


def contrast_of(
    value: Floats, variances: Floats, dfs: Floats, margin: float = 0.0, level: float = 0.95
) -> ContrastTest:
    """Test a value whose variance is a sum of independently estimated parts (…, parts), each with its own df.

    Squared half widths add up, each with the quantile of its own degrees of freedom (Banerjee 1960). This covers at
    least the level whatever the true variances are. Satterthwaite's single df does not: with three seeds and unequal
    variances it rejects up to twice as often as it should at the levels that Holm's procedure asks for.
    """
    from scipy.special import stdtr

    total = variances.sum(axis=-1)
    known = total > 0
    se = np.sqrt(np.where(known, total, np.nan))
    some = np.where(known[..., None], variances, np.nan)
    away = np.abs(value - margin)
    # The p-value lies between those of the fewest and of the most degrees of freedom of a part that matters.
    matters = np.where(variances > 0, dfs, np.nan)
    with np.errstate(invalid="ignore"):
        few = np.fmin.reduce(matters, axis=-1)
        most = np.fmax.reduce(matters, axis=-1)
    high = np.log(np.maximum(stdtr(few, -away / se), SMALLEST_P))
    low = np.log(np.maximum(stdtr(most, -away / se), SMALLEST_P))
    for _ in range(HALVINGS if np.any(high - low > 1e-9) else 0):
        middle = (low + high) / 2
        wide = _reach(some, dfs, np.exp(middle)) > away**2
        low, high = np.where(wide, middle, low), np.where(wide, high, middle)
    one = np.exp((low + high) / 2)
    above = np.where(value > margin, one, 1 - one)
    half = np.sqrt(_reach(some, dfs, np.full(value.shape, (1 - level) / 2)))
    return ContrastTest(value, se, value - half, value + half, above, 1 - above)


def _reach(variances: Floats, dfs: Floats, tail: Floats) -> Floats:
    """The squared half width of the interval that leaves out `tail` on either side."""
    from scipy.special import stdtrit

    finite = np.where(np.isfinite(dfs), dfs, 1.0)
    return np.where(variances > 0, np.square(stdtrit(finite, tail[..., None])) * variances, variances).sum(
        axis=-1
    )


def as_estimate(test: ContrastTest, n: int, covers: str, level: float = 0.95) -> Estimate:
    """A single contrast as an `Estimate`, with the two-sided p-value of its margin. Its sd is that of n such values."""
    se, half = float(test.se), float(test.high - test.value)
    if not se > 0:
        return Estimate(float(test.value), math.nan, n, math.nan, math.nan, math.nan, covers)
    p = min(1.0, 2 * min(float(test.above), float(test.below)))
    df = fitting_df(half / se, 1 - level)
    sd = se * math.sqrt(n)
    return Estimate(float(test.value), sd, n, float(test.low), float(test.high), p, covers, se, df)


# ---------------------------------------------------------------- comparisons with the best


NODES = 32  # of each quadrature


def contenders(cells: Cells, level: float = 0.95) -> tuple[int, ...]:
    """The cells of one task that are not shown worse than the best; at this level the best is among them.

    Multiple comparisons with the best (Hsu 1984, 1996). Cells without mean or variance are left out.
    """
    mean, v = cells.mean, cells.variance / np.maximum(cells.n, 1)
    known = np.flatnonzero(np.isfinite(mean) & (v > 0))
    if known.size < 2:
        raise ValueError("fewer than two models have a mean and a variance: there is nothing to compare")
    df = float(cells.df[known].min())  # with unequal ones this is careful, as in `contrast_of`
    found = []
    for one in known:
        others = known[known != one]
        critical = dunnett(np.sqrt(v[one] / (v[one] + v[others])), df, level)
        if np.min(mean[one] - mean[others] + critical * np.sqrt(v[one] + v[others])) > 0:
            found.append(int(one))
    return tuple(found)


def dunnett(loadings: Floats, df: float, level: float = 0.95) -> float:
    """The one-sided critical value of several comparisons with one control (Dunnett 1955).

    The comparisons correlate by the products of their `loadings`: √(v / (v + v_j)) for a control of variance v.
    """
    from scipy.optimize import brentq
    from scipy.special import chdtri, ndtr

    points, weights = np.polynomial.hermite_e.hermegauss(NODES)
    shares, share_weights = np.polynomial.legendre.leggauss(NODES)
    scale = np.sqrt(chdtri(df, (1 - shares) / 2) / df)  # of the estimated standard errors
    rest = np.sqrt(1 - np.square(loadings))

    def missed(critical: float) -> float:
        bounds = critical * scale[:, None, None] + points[:, None] * loadings
        within = ndtr(bounds / rest).prod(axis=-1) @ weights / weights.sum()
        return float(within @ share_weights / 2) - level

    far = 2.0
    while missed(far) < 0:
        far *= 2
    return float(brentq(missed, 0.0, far, xtol=1e-6))


# ---------------------------------------------------------------- claims


@dataclass(frozen=True)
class ClaimTest:
    """A claim from the p-values of its parts. NaN: no part is known."""

    reproduced: float  # p-value for "every part holds"
    refuted: float  # p-value for "some part is reversed"
    known: int
    missing: int  # a claim with missing parts is never called reproduced


def every(above: Sequence[float], below: Sequence[float]) -> ClaimTest:
    """A claim all of whose parts must hold: the largest p-value; refuted by any of them: k times the smallest."""
    pairs = [pair for pair in zip(above, below, strict=True) if not math.isnan(pair[0])]
    if not pairs:
        return ClaimTest(math.nan, math.nan, 0, len(above))
    reproduced = max(one for one, _ in pairs)
    refuted = min(1.0, len(pairs) * min(one for _, one in pairs))
    return ClaimTest(reproduced, refuted, len(pairs), len(above) - len(pairs))


def holm_distinct(
    tests: Sequence[ClaimTest], parts: Sequence[frozenset[Hashable]]
) -> list[tuple[float, float]]:
    """Holm-adjusted p-values (reproduced, refuted) of claims, each set of parts counted once.

    `parts`: what each claim tests, one key for each test. A claim that repeats others, alone or together, is not
    counted: it is reproduced exactly if all of those are, so it cannot add a false positive. It gets the largest of
    their adjusted p-values, and is refuted by the smallest.
    """
    known = [place for place, test in enumerate(tests) if test.known]
    covered: dict[int, list[int]] = {}
    counted: list[int] = []
    for place in sorted(known, key=lambda place: (len(parts[place]), tests[place].reproduced)):
        within = [other for other in counted if parts[other] <= parts[place]]
        if within and frozenset().union(*(parts[other] for other in within)) == parts[place]:
            covered[place] = within
        else:
            counted.append(place)
    adjusted = [(math.nan, math.nan)] * len(tests)
    for side in (0, 1):
        p_values = [(tests[place].reproduced, tests[place].refuted)[side] for place in counted]
        for place, p in zip(counted, holm(p_values), strict=True):
            adjusted[place] = (p, adjusted[place][1]) if side == 0 else (adjusted[place][0], p)
    for place, within in covered.items():
        # Its own p-value is larger where it also needs a premise.
        reproduced = max(tests[place].reproduced, *(adjusted[one][0] for one in within))
        adjusted[place] = reproduced, min(adjusted[one][1] for one in within)
    return adjusted


# ---------------------------------------------------------------- planned looks
# Planned looks: a study may be judged at declared numbers of seeds, and still be wrong no more often than it says.
#
# Looking again after every new seed, until something is significant, finds effects that are not there. If the looks are
# declared before results, each may spend a part of the error rate (Lan and DeMets 1983). A look then tests at the level
# that was spent since the look before: the probability of an error at any look is at most the sum. The usual boundaries
# are a little higher. They follow from the joint normal distribution of the looks, and with t-tests of 3, 5 and 10 seeds
# they are wrong up to 1.2 times as often as declared; the sum holds for any test, and for Holm's procedure over claims.


@dataclass(frozen=True)
class Looks:
    """Numbers of seeds at which a study is judged, the last one final.

    Little is spent before the end, as by O'Brien and Fleming's boundaries.
    """

    seeds: tuple[int, ...]
    alpha: float = 0.05  # one-sided

    def __post_init__(self) -> None:
        if not self.seeds or min(self.seeds) < 2 or any(one >= other for one, other in pairwise(self.seeds)):
            raise ValueError(f"looks at {self.seeds} seeds: increasing numbers of two or more are expected")

    def level(self, seeds: int) -> float:
        """The level of the tests at the look with this many seeds."""
        if seeds not in self.seeds:
            raise ValueError(
                f"no look is planned at {seeds} seeds, only at {', '.join(map(str, self.seeds))}"
            )
        before = max((one for one in self.seeds if one < seeds), default=0)
        return self.spent(seeds) - self.spent(before)

    def spent(self, seeds: int) -> float:
        """The error rate spent up to this many seeds."""
        from scipy.special import ndtr, ndtri

        share = min(1.0, seeds / self.seeds[-1])
        return float(2 * ndtr(ndtri(self.alpha / 2) / math.sqrt(share))) if share else 0.0
