"""Power: the probability to find an effect, and the smallest effect that is found with a given probability.

An effect is found if its test is significant: Student's t-test for one row of seeds, or the test that corresponds to
the crossed interval for several pretraining seeds. An sd of 0 gives NaN, because it says nothing about further seeds;
with fewer than two values nothing is ever found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from biphase.report.statistics.intervals import Estimate, both, quantile, students

NODES = (
    32  # quadrature nodes for each mean square in `power_crossed`; 64 change the power by less than 0.0002
)


@dataclass(frozen=True)
class Noise:
    """The sds of a score, or of a paired difference, by source."""

    pretraining: float
    finetuning: float
    rest: float  # residual: pretraining × fine-tuning seed


def power_of(effect: float, sd: float, n: int, level: float = 0.05) -> float:
    """The power of the two-sided t-test of n values with this true sd, for a true mean of `effect`."""
    _check(level, sd)
    if n < 2:
        return 0.0
    return _power(abs(effect) / (sd / math.sqrt(n)), n - 1, level) if sd > 0 else math.nan


def detectable(sd: float, n: int, level: float = 0.05, power: float = 0.8) -> float:
    """The smallest true mean that the two-sided t-test of n values with this sd finds with this power."""
    return detectable_by(sd / math.sqrt(max(1, n)), n - 1, level, power)


def detectable_by(se: float, df: float, level: float = 0.05, power: float = 0.8) -> float:
    """As `detectable`, for a mean with this standard error and degrees of freedom."""
    _check(level, se, power)
    if df <= 0:
        return math.inf
    return se * _distance(df, level, power) if se > 0 else math.nan


def detectable_in(estimate: Estimate, level: float = 0.05, power: float = 0.8) -> float:
    """The effect that the seeds of this estimate could have found, if their sd is the true one."""
    return math.inf if estimate.n < 2 else detectable_by(estimate.se, estimate.df, level, power)


def power_crossed(effect: float, noise: Noise, pretrained: int, tuned: int, level: float = 0.05) -> float:
    """The power of the test of `across`, for a true mean of `effect` and these numbers of seeds.

    With one pretraining seed its noise is part of the measured effect, not of the error, so the test is the t-test
    over fine-tuning seeds; and vice versa.
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
    # Each mean square is its expectation times an independent chi² / df: Gauss-Legendre over their quantiles.
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
    """The smallest true mean that the test of `across` finds with this power. See `power_crossed`."""
    scale = max(noise.pretraining, noise.finetuning, noise.rest)
    _check(level, scale, power)
    if max(pretrained, tuned) < 2:
        return math.inf
    if math.isnan(power_crossed(scale, noise, pretrained, tuned, level)):
        return math.nan
    return scale * _reaching(power, lambda far: power_crossed(far * scale, noise, pretrained, tuned, level))


def _power(distance: float, df: float, level: float) -> float:
    """The power of a t-test for a true mean at this many standard errors: both tails of the noncentral t."""
    from scipy.stats import nct

    critical = quantile(df, level)
    wrong_sign = float(nct.cdf(-critical, df, distance))
    # scipy returns NaN if this tail is too small for it.
    return float(nct.sf(critical, df, distance)) + (0.0 if math.isnan(wrong_sign) else wrong_sign)


@cache
def _distance(df: float, level: float, power: float) -> float:
    """The number of standard errors at which a t-test finds a true mean with this power."""
    return _reaching(power, lambda distance: _power(distance, df, level))


def _reaching(power: float, of: Callable[[float], float]) -> float:
    """The argument at which an increasing function of x ≥ 0 reaches `power`."""
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
