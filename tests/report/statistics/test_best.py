"""The models that are not shown worse than the best include the best."""

import math

import numpy as np
import pytest
from page_tables import percent, show
from scipy import stats

from biphase.report.statistics.moderated import Cells, cells_of, contenders, dunnett

STANDINGS = {  # true means, sds
    "all equal": ([0, 0, 0, 0, 0], [1, 1, 1, 1, 1]),
    "one best by 3 sd": ([3, 0, 0, 0, 0], [1, 1, 1, 1, 1]),
    "two best by 3 sd": ([3, 3, 0, 0, 0], [1, 1, 1, 1, 1]),
    "the best is four times as noisy": ([1, 0, 0, 0, 0], [4, 1, 1, 1, 1]),
    "the others are four times as noisy": ([1, 0, 0, 0, 0], [1, 4, 4, 4, 4]),
    "a ladder of 1 sd": ([4, 3, 2, 1, 0], [1, 1, 1, 1, 1]),
}


def measured(means, sds, studies, rates=3, seeds=3):
    """The contenders of each study. The first rate is the reported one."""
    true, chance = np.array(means, dtype=float), np.random.default_rng([*means, *sds])
    scale = np.array(sds, dtype=float)[:, None, None]
    values = true[:, None, None] + scale * chance.normal(size=(studies, len(means), rates, seeds))
    every = cells_of(values[:, :, 0], values.reshape(studies, -1, seeds))
    studied = zip(every.mean, every.variance, every.df, every.n, strict=True)
    return [contenders(Cells(*arrays)) for arrays in studied]


@pytest.mark.parametrize(
    ("others", "df", "critical"),  # Dunnett 1955, one-sided 5%
    [(1, 5, 2.02), (2, 5, 2.44), (4, 5, 2.85), (3, 10, 2.34), (5, 20, 2.39), (9, 60, 2.48)],
)
def test_critical_values_are_those_of_the_tables(others, df, critical):
    assert dunnett(np.full(others, math.sqrt(0.5)), df) == pytest.approx(critical, abs=0.006)


def test_critical_values_lie_between_one_comparison_and_independent_ones():
    one, many = stats.t.ppf(0.95, 8), stats.t.ppf(1 - 0.05 / 4, 8)
    for loadings in ([0.1, 0.1, 0.1, 0.1], [0.9, 0.5, 0.2, 0.7], [0.99, 0.99, 0.99, 0.99]):
        assert one < dunnett(np.array(loadings), 8) < many + 1e-3


@pytest.mark.parametrize(
    ("means", "best"), [([90, 80, 79], (0,)), ([80.14, 80, 70], (0, 1)), ([80, math.nan, 70], (0,))]
)
def test_the_contenders_are_those_close_to_the_best(means, best):
    n = np.where(np.isnan(means), 0.0, 3.0)
    assert contenders(Cells(np.array(means), np.ones(3), np.full(3, 20.0), n)) == best


def test_a_single_model_is_compared_with_none():
    with pytest.raises(ValueError, match="fewer than two"):
        contenders(Cells(*(np.array([number]) for number in (80.0, 1.0, 9.0, 3.0))))


@pytest.mark.parametrize("name", ["all equal", "one best by 3 sd"])
def test_the_best_is_among_the_contenders(name):
    means, sds = STANDINGS[name]
    share = np.mean([0 in found for found in measured(means, sds, 60)])
    assert share >= 0.95 - 3 * math.sqrt(0.05 / 60)


@pytest.mark.campaign
def test_contenders():
    rows = []
    for name, (means, sds) in STANDINGS.items():
        found = measured(means, sds, 1000)
        within = np.mean([0 in one for one in found])
        assert within > 0.95 - 3 * math.sqrt(0.05 / 1000)
        rows.append((name, percent(within), f"{np.mean([len(one) for one in found]):.1f}"))
    show(("five models, three seeds", "best among them", "contenders"), rows, error=2.0)
