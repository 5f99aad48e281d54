"""The detectable effect is where the power, simulated or of a textbook, reaches what was asked."""

import math

import numpy as np
import pytest
from scipy import stats

from biphase.report.statistics.intervals import detectable_by


def detectable(sd, n, *level_and_power):
    return detectable_by(sd / math.sqrt(n), n - 1, *level_and_power)


@pytest.mark.parametrize("n", [2, 3, 5, 30])
@pytest.mark.parametrize(("level", "power"), [(0.05, 0.8), (0.002, 0.5), (0.3, 0.95)])
def test_the_detectable_effect_is_found_as_often_as_asked(n, level, power):
    smallest = detectable(0.7, n, level, power)
    values = np.random.default_rng(n).normal(smallest, 0.7, (20_000, n))
    share = np.mean(stats.ttest_1samp(values, 0, axis=1).pvalue < level)
    assert share == pytest.approx(power, abs=3 * math.sqrt(power * (1 - power) / 20_000))
    assert detectable(1.4, n, level, power) == pytest.approx(2 * smallest)


def test_the_effect_of_a_textbook_case():
    # R: power.t.test(34, 0.5, type="one.sample") has a power of 0.8078
    assert detectable(1, 34, 0.05, 0.8078) == pytest.approx(0.5, abs=5e-4)
    known = (1.9600 + 0.8416) / math.sqrt(20_000)  # the normal's quantiles of 97.5% and 80%
    assert detectable(1, 20_000) == pytest.approx(known, rel=1e-3), (
        "an estimated sd is as good as a known one"
    )


def test_too_few_values_find_nothing_and_no_spread_says_nothing():
    assert detectable(1, 1) == detectable_by(1, 0) == detectable_by(1, -1) == math.inf
    assert all(math.isnan(detectable(unknown, 5)) for unknown in (0.0, math.nan))


@pytest.mark.parametrize(("level", "power"), [(0.0, 0.8), (0.9, 0.8), (0.05, 1.0)])
def test_what_makes_no_sense_is_refused(level, power):
    with pytest.raises(ValueError, match="0 < level < power < 1"):
        detectable(1, 5, level, power)
    with pytest.raises(ValueError, match="below 0"):
        detectable(-1, 5)


def test_more_power_needs_a_larger_effect_at_any_level():
    for n in (2, 3, 5, 31, 1001):
        for level in (0.05, 0.001):
            effects = [detectable(1, n, level, power) for power in np.linspace(1.1 * level, 0.999, 20)]
            assert np.isfinite(effects).all()
            assert (np.diff(effects) > 0).all()
