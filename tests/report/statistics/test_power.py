"""The predicted power is the simulated one; the detectable effect is where it reaches what was asked."""

import math

import numpy as np
import pytest
from scipy import stats

from biphase.report.statistics.intervals import (
    Noise,
    across,
    detectable,
    detectable_by,
    detectable_crossed,
    detectable_in,
    over_seeds,
    power_crossed,
    power_of,
)


@pytest.mark.parametrize(
    ("effect", "sd", "n", "level"),
    [(0.0, 1.0, 5, 0.05), (1.0, 1.0, 5, 0.05), (2.0, 1.0, 5, 0.01), (0.3, 0.2, 3, 0.05), (8.0, 1.0, 2, 0.05),
     (0.5, 1.0, 30, 0.05), (-1.0, 1.0, 5, 0.05), (0.2, 1.0, 4, 0.3)],
)  # fmt: skip
def test_predicted_power_is_simulated_power(effect, sd, n, level):
    values = np.random.default_rng(n).normal(effect, sd, (20_000, n))
    share = np.mean(stats.ttest_1samp(values, 0, axis=1).pvalue < level)
    predicted = power_of(effect, sd, n, level)
    assert share == pytest.approx(predicted, abs=3 * math.sqrt(predicted * (1 - predicted) / 20_000))


def test_power_of_a_textbook_case():
    assert power_of(0.5, 1, 34) == pytest.approx(
        0.8078, abs=5e-4
    )  # R: power.t.test(34, 0.5, type="one.sample")
    assert power_of(0, 1, 5) == pytest.approx(0.05, abs=1e-9)


@pytest.mark.parametrize("n", [2, 3, 5, 10, 100])
@pytest.mark.parametrize("level", [0.05, 0.002])
@pytest.mark.parametrize("power", [0.5, 0.8, 0.95])
def test_the_detectable_effect_has_the_power_asked_for(n, level, power):
    smallest = detectable(0.7, n, level, power)
    assert power_of(smallest, 0.7, n, level) == pytest.approx(power, abs=1e-6)
    assert detectable(1.4, n, level, power) == pytest.approx(2 * smallest)


def test_with_many_values_an_estimated_sd_is_as_good_as_a_known_one():
    known = (1.9600 + 0.8416) / math.sqrt(20_000)  # the normal's quantiles of 97.5% and 80%
    assert detectable(1, 20_000) == pytest.approx(known, rel=1e-3)


def test_too_few_values_find_nothing_and_no_spread_says_nothing():
    assert detectable(1, 1) == detectable(1, 0) == detectable_by(1, 0) == math.inf
    assert power_of(100, 1, 1) == 0
    for unknown in (0.0, math.nan):
        assert math.isnan(detectable(unknown, 5))
        assert math.isnan(power_of(1, unknown, 5))


@pytest.mark.parametrize(("level", "power"), [(0.0, 0.8), (0.9, 0.8), (0.05, 1.0)])
def test_what_makes_no_sense_is_refused(level, power):
    with pytest.raises(ValueError, match="0 < level < power < 1"):
        detectable(1, 5, level, power)
    with pytest.raises(ValueError, match="below 0"):
        power_of(1, -1, 5)
    with pytest.raises(ValueError, match="below 0"):
        power_crossed(1, Noise(1, -1, 1), 2, 2)


def test_power_rises_with_the_effect_and_is_a_number_everywhere():
    for n in (2, 3, 5, 31, 1001):
        for level in (0.05, 0.001):
            powers = [power_of(effect, 1, n, level) for effect in np.geomspace(0.001, 300, 60)]
            assert np.isfinite(powers).all()
            assert (np.diff(powers) >= -1e-9).all()
            assert powers[0] == pytest.approx(level, rel=0.02)


def test_an_estimate_says_what_its_seeds_could_have_found():
    values = np.array([0.1, 0.3, 0.2, 0.5])
    assert detectable_in(over_seeds(values)) == pytest.approx(detectable(values.std(ddof=1), 4))
    assert detectable_in(over_seeds(values[:1])) == math.inf
    assert math.isnan(detectable_in(over_seeds(np.ones(3))))
    table = across(np.random.default_rng(0).normal(size=(3, 5)))
    assert detectable_in(table) == detectable_by(table.se, table.df) > 0


@pytest.mark.parametrize(
    ("sds", "shape", "effect"),
    [
        ((1, 1, 1), (2, 5), 12.0),
        ((0.3, 0.2, 0.5), (3, 5), 1.2),
        ((0, 0, 1), (5, 5), 0.6),
        ((1, 0.5, 0), (5, 3), 2.0),
    ],
)
def test_the_power_of_a_crossed_test_is_that_of_simulated_tables(sds, shape, effect):
    count, chance = 700, np.random.default_rng(7)
    shapes = ((count, shape[0], 1), (count, 1, shape[1]), (count, *shape))
    drawn = effect + sum(sd * chance.normal(size=size) for sd, size in zip(sds, shapes, strict=True))
    share = np.mean([across(one).p < 0.05 for one in drawn])
    predicted = power_crossed(effect, Noise(*sds), *shape)
    assert 0.3 < predicted < 0.97
    assert share == pytest.approx(predicted, abs=3 * math.sqrt(predicted * (1 - predicted) / count))


def test_the_detectable_effect_of_a_crossed_table():
    noise = Noise(0.4, 0.3, 0.2)
    smallest = detectable_crossed(noise, 3, 5, power=0.9)
    assert power_crossed(smallest, noise, 3, 5) == pytest.approx(0.9, abs=1e-6)
    assert detectable_crossed(noise, 5, 5) < detectable_crossed(noise, 3, 5) < detectable_crossed(noise, 2, 5)
    # Two pretraining seeds cost more than they bring unless their noise matters: one more is another question.
    assert detectable_crossed(noise, 1, 5) == pytest.approx(detectable(math.hypot(0.3, 0.2), 5))
    assert detectable_crossed(noise, 4, 1) == pytest.approx(detectable(math.hypot(0.4, 0.2), 4))
    assert detectable_crossed(noise, 1, 1) == math.inf
    assert math.isnan(detectable_crossed(Noise(0, 0, 0), 3, 5))
    assert math.isnan(detectable_crossed(Noise(1, 0, 0), 1, 5))
