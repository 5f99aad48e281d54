"""Which of several models are not shown worse than the best: multiple comparisons with the best (Hsu 1984, 1996)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from biphase.report.statistics.intervals import Floats
from biphase.report.statistics.moderated import Cells

NODES = 32  # of each quadrature


@dataclass(frozen=True)
class BestSet:
    """The models that may be best, and simultaneous intervals of each mean minus the best of the others."""

    leader: int  # the highest mean
    contenders: tuple[int, ...]  # not shown worse than the best; with 95% probability the best is among them
    low: Floats  # (cells): at most 0, unless the model is shown to be best; −low: what it may lose
    high: Floats  # (cells): 0 if the model is shown worse than the best


def best(cells: Cells, level: float = 0.95) -> BestSet:
    """The contenders among cells of one task or family. Cells without mean or variance are left out."""
    mean, v, df = cells.mean, cells.variance / np.maximum(cells.n, 1), cells.df
    known = [one for one in range(mean.size) if np.isfinite(mean[one]) and v[one] > 0]
    if len(known) < 2:
        raise ValueError("fewer than two models have a mean and a variance: there is nothing to compare")
    low, high = np.full(mean.size, np.nan), np.full(mean.size, np.nan)
    reach: dict[int, Floats] = {}
    for one in known:
        others = [other for other in known if other != one]
        # The fewest degrees of freedom of any: with unequal ones this is careful, as in `contrast_of`.
        critical = dunnett(np.sqrt(v[one] / (v[one] + v[others])), float(df[known].min()), level)
        reach[one] = critical * np.sqrt(v[one] + v)
        high[one] = max(0.0, float(np.min(mean[one] - mean[others] + reach[one][others])))
    contenders = tuple(one for one in known if high[one] > 0)
    for one in known:
        rivals = [other for other in contenders if other != one]
        gaps = [mean[one] - mean[other] - reach[other][one] for other in rivals]
        low[one] = min(0.0, *gaps) if rivals else 0.0
    return BestSet(max(known, key=lambda one: mean[one]), contenders, low, high)


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
