"""The models that are not shown worse than the best include the best."""

import math

import numpy as np
import pytest
from page_tables import percent, show
from scipy import stats

from biphase.report.statistics.best import best, dunnett
from biphase.report.statistics.moderated import Cells, cells_of

STANDINGS = {  # true means, sds
    "all equal": ([0, 0, 0, 0, 0], [1, 1, 1, 1, 1]),
    "one best by 3 sd": ([3, 0, 0, 0, 0], [1, 1, 1, 1, 1]),
    "two best by 3 sd": ([3, 3, 0, 0, 0], [1, 1, 1, 1, 1]),
    "the best is four times as noisy": ([1, 0, 0, 0, 0], [4, 1, 1, 1, 1]),
    "the others are four times as noisy": ([1, 0, 0, 0, 0], [1, 4, 4, 4, 4]),
    "a ladder of 1 sd": ([4, 3, 2, 1, 0], [1, 1, 1, 1, 1]),
}


def measured(means, sds, studies, rates=3, seeds=3):
    """For each study: the contenders, and whether all intervals hold. The first rate is the reported one."""
    true, chance = np.array(means, dtype=float), np.random.default_rng([*means, *sds])
    scale = np.array(sds, dtype=float)[:, None, None]
    values = true[:, None, None] + scale * chance.normal(size=(studies, len(means), rates, seeds))
    every = cells_of(values[:, :, 0], values.reshape(studies, -1, seeds))
    gaps = np.array([one - np.delete(true, place).max() for place, one in enumerate(true)])
    for place in range(studies):
        arrays = (getattr(every, name)[place] for name in ("mean", "variance", "df", "n"))
        found = best(Cells(*arrays, np.array(1.0), np.array(1.0)))
        yield found, bool(((found.low <= gaps + 1e-9) & (gaps <= found.high + 1e-9)).all())


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


def some(mean, sd=1.0, n=3):
    size = len(mean)
    arrays = np.array(mean, dtype=float), np.full(size, sd**2), np.full(size, 20.0), np.full(size, float(n))
    return Cells(*arrays, np.array(1.0), np.array(1.0))


def test_a_clear_winner_stands_alone_and_intervals_say_by_how_much():
    found = best(some([90, 80, 79]))
    assert (found.leader, found.contenders) == (0, (0,))
    assert found.low[0] == 0
    assert found.high[0] > 10
    assert found.high[1] == 0
    assert found.low[1] < -10


def test_a_lead_of_nothing_is_no_lead():
    found = best(some([80.14, 80.0, 70.0]))
    assert (found.leader, found.contenders) == (0, (0, 1))
    assert found.low[1] < 0 < found.high[1]


def test_missing_models_are_left_out():
    mean = np.array([80.0, np.nan, 70.0])
    found = best(Cells(mean, np.ones(3), np.full(3, 9.0), np.array([3.0, 0, 3]), np.array(1), np.array(1)))
    assert found.contenders == (0,)
    assert np.isnan(found.low[1])
    with pytest.raises(ValueError, match="fewer than two"):
        best(some([80.0]))


@pytest.mark.parametrize("name", ["all equal", "one best by 3 sd"])
def test_the_best_is_among_the_contenders(name):
    means, sds = STANDINGS[name]
    share = np.mean([0 in found.contenders for found, _ in measured(means, sds, 60)])
    assert share >= 0.95 - 3 * math.sqrt(0.05 / 60)


@pytest.mark.campaign
def test_contenders():
    rows = []
    for name, (means, sds) in STANDINGS.items():
        found = list(measured(means, sds, 1000))
        within = np.mean([0 in one.contenders for one, _ in found])
        covered = np.mean([holds for _, holds in found])
        size = np.mean([len(one.contenders) for one, _ in found])
        assert min(within, covered) > 0.95 - 3 * math.sqrt(0.05 / 1000)
        rows.append((name, percent(within), percent(covered), f"{size:.1f}"))
    show(("five models, three seeds", "best among them", "all intervals hold", "contenders"), rows, error=2.0)
