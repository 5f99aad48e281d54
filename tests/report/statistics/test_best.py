"""The models that are not shown worse than the best include the best."""

import math

import numpy as np
import pytest
from scipy import stats

from biphase.report.statistics.moderated import Cells, cells_of, contenders, dunnett


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


@pytest.mark.parametrize("lead", [0, 3])
def test_the_best_is_among_the_contenders(lead):
    """Five models, the first ahead by so many sd; three rates, of which the first is the reported one."""
    chance = np.random.default_rng([lead, 0, 0, 0, 0])
    values = np.array([lead, 0, 0, 0, 0.0])[:, None, None] + chance.normal(size=(60, 5, 3, 3))
    cells = cells_of(values[:, :, 0], values.reshape(60, -1, 3))
    studies = zip(cells.mean, cells.variance, cells.df, cells.n, strict=True)
    share = np.mean([0 in contenders(Cells(*arrays)) for arrays in studies])
    assert share >= 0.95 - 3 * math.sqrt(0.05 / 60)
