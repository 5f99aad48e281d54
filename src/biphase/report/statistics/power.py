"""What a study can see: the chance to find an effect, and the smallest effect that is found with a given chance.

An effect is found where its test is significant: Student's t for a row of seeds, the test that belongs to the crossed
interval for several pretraining seeds. An sd of 0 says nothing about the next seeds, so its answer is NaN; of fewer
than two values nothing is ever found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from biphase.report.statistics.intervals import Estimate, both, quantile, students

NODES = 32  # for each mean square in `power_crossed`; with 64 the power moves by less than 0.0002


@dataclass(frozen=True)
class Noise:
    """The sds of a score, or of a paired difference, by where they come from."""

    pretraining: float
    finetuning: float
    rest: float  # of a fine-tuning of a pretraining beyond what either seed does everywhere


def power_of(effect: float, sd: float, n: int, level: float = 0.05) -> float:
    """The chance that the two-sided t-test of n values with this true sd finds a true mean of `effect`."""
    _check(level, sd)
    if n < 2:
        return 0.0
    return _power(abs(effect) / (sd / math.sqrt(n)), n - 1, level) if sd > 0 else math.nan


def detectable(sd: float, n: int, level: float = 0.05, power: float = 0.8) -> float:
    """The smallest true mean that the two-sided t-test of n values with this sd finds with this power."""
    return detectable_by(sd / math.sqrt(max(1, n)), n - 1, level, power)


def detectable_by(se: float, df: float, level: float = 0.05, power: float = 0.8) -> float:
    """The same, of a mean whose standard error was found with so many degrees of freedom."""
    _check(level, se, power)
    if df <= 0:
        return math.inf
    return se * _distance(df, level, power) if se > 0 else math.nan


def detectable_in(estimate: Estimate, level: float = 0.05, power: float = 0.8) -> float:
    """What the seeds of this estimate could have found, if the spread they showed is the true one."""
    return math.inf if estimate.n < 2 else detectable_by(estimate.se, estimate.df, level, power)


def power_crossed(effect: float, noise: Noise, pretrained: int, tuned: int, level: float = 0.05) -> float:
    """The chance that `across` finds a true mean of `effect` with so many pretraining and fine-tuning seeds.

    With one pretraining seed its noise is part of what is measured, not of what is tested, and the test is that of
    the fine-tuning seeds; and the other way round.
    """
    from scipy.special import chdtri, ndtr

    _check(level, min(noise.pretraining, noise.finetuning, noise.rest))
    if pretrained < 2:
        return power_of(effect, math.hypot(noise.finetuning, noise.rest), tuned, level)
    if tuned < 2:
        return power_of(effect, math.hypot(noise.pretraining, noise.rest), pretrained, level)
    rest = noise.rest**2
    expected = rest + tuned * noise.pretraining**2, rest + pretrained * noise.finetuning**2, rest
    se = math.sqrt((expected[0] + expected[1] - rest) / (pretrained * tuned))
    if not se > 0:
        return math.nan
    dfs = pretrained - 1, tuned - 1, (pretrained - 1) * (tuned - 1)
    # A mean square is its expectation times chi² / df, whatever the others are: Gauss's rule over their quantiles.
    places, weights = np.polynomial.legendre.leggauss(NODES)
    grid = np.meshgrid(*(chdtri(df, (1 - places) / 2) / df for df in dfs), indexing="ij")
    rows, columns, left = (e * g / (pretrained * tuned) for e, g in zip(expected, grid, strict=True))
    reach = both(students(rows, dfs[0]), students(columns, dfs[1]), shared=left, df=max(dfs[:2]))
    half, away = np.sqrt(reach(level)) / se, abs(effect) / se
    found = ndtr(away - half) + ndtr(-away - half)
    return float(np.einsum("ijk,i,j,k", found, weights, weights, weights) / 8)


def detectable_crossed(
    noise: Noise, pretrained: int, tuned: int, level: float = 0.05, power: float = 0.8
) -> float:
    """The smallest true mean that `across` finds with this power. See `power_crossed`."""
    scale = max(noise.pretraining, noise.finetuning, noise.rest)
    _check(level, scale, power)
    if max(pretrained, tuned) < 2:
        return math.inf
    if math.isnan(power_crossed(scale, noise, pretrained, tuned, level)):
        return math.nan
    return scale * _reaching(power, lambda far: power_crossed(far * scale, noise, pretrained, tuned, level))


def _power(distance: float, df: float, level: float) -> float:
    """Of a t-test, of a true mean so many standard errors from 0: both tails of the noncentral t."""
    from scipy.stats import nct

    critical = quantile(df, level)
    wrong_sign = float(nct.cdf(-critical, df, distance))
    # scipy says NaN where this tail is too small for it.
    return float(nct.sf(critical, df, distance)) + (0.0 if math.isnan(wrong_sign) else wrong_sign)


@cache
def _distance(df: float, level: float, power: float) -> float:
    """How many standard errors from 0 a true mean must be for a t-test to find it with this power."""
    return _reaching(power, lambda distance: _power(distance, df, level))


def _reaching(power: float, of: Callable[[float], float]) -> float:
    """Where a function that rises from 0 on has the value `power`."""
    from scipy.optimize import brentq

    far = 1.0
    while of(far) < power:
        far *= 2
    return float(brentq(lambda distance: of(distance) - power, 0.0, far, xtol=1e-9))


def _check(level: float, sd: float, power: float = 0.8) -> None:
    if not 0 < level < power < 1:
        raise ValueError(f"level {level:g} and power {power:g}: 0 < level < power < 1 is expected")
    if sd < 0:
        raise ValueError(f"an sd of {sd:g} is below 0")
