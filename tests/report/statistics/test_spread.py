"""The spread of a score over choices, seed by seed; a hole anywhere is a hole."""

import numpy as np
import pytest

from biphase.report.statistics.intervals import rate_spread, spread


def test_the_spread_is_that_of_each_pair_of_seeds():
    stack = np.array(
        [[[1.0, 5.0]], [[4.0, 5.5]], [[2.0, 9.0]]]
    )  # three choices, one pretraining seed, two others
    assert spread(stack).tolist() == [[3.0, 4.0]]


def test_rates_are_the_second_axis():
    by_rate = np.random.default_rng(0).normal(size=(2, 6, 5))
    for place in np.ndindex(2, 5):
        rates = by_rate[place[0], :, place[1]]
        assert rate_spread(by_rate)[place] == rates.max() - rates.min()


def test_a_missing_choice_makes_the_seed_missing_and_no_other():
    by_rate = np.ones((1, 3, 2))
    by_rate[0, 1, 1] = np.nan
    made = rate_spread(by_rate)
    assert made[0, 0] == 0
    assert np.isnan(made[0, 1])


@pytest.mark.parametrize("choices", [0, 1])
def test_without_a_choice_there_is_no_spread(choices):
    made = spread(np.ones((choices, 2, 3)))
    assert made.shape == (2, 3)
    assert np.isnan(made).all()


@pytest.mark.parametrize(("choices", "expected"), [(3, 1.69), (4, 2.06), (6, 2.53)])
def test_noise_alone_spreads_as_the_file_says(choices, expected):
    noise = np.random.default_rng(choices).normal(size=(choices, 300_000))
    assert spread(noise).mean() == pytest.approx(expected, abs=0.01)
