"""Holm's adjustment: worked by hand, against closed testing, and by the false findings it lets through."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr

from biphase.report.statistics.intervals import holm

P_VALUES = st.lists(st.sampled_from([0.0, 0.001, 0.01, 0.02, 0.05, 0.5, 1.0]) | st.floats(0, 1), max_size=6)


def closed(p_values):
    """By definition: a test holds if every set of tests that it is in has a small Bonferroni p-value."""
    places = range(len(p_values))
    sets = [some for size in range(1, len(p_values) + 1) for some in combinations(places, size)]
    by_set = {some: min(1.0, len(some) * min(p_values[place] for place in some)) for some in sets}
    return [max(p for some, p in by_set.items() if place in some) for place in places]


def test_worked_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([0.03]) == [0.03]
    assert holm([]) == []


def test_a_test_that_was_not_made_does_not_count():
    adjusted = holm([0.01, math.nan, 0.04, math.nan])
    assert [adjusted[0], adjusted[2]] == holm([0.01, 0.04]) == [0.02, 0.04]
    assert np.isnan([adjusted[1], adjusted[3]]).all()


@given(P_VALUES)
def test_it_is_closed_testing_with_bonferroni(p_values):
    assert holm(p_values) == pytest.approx(closed(p_values), abs=1e-12)


@pytest.mark.parametrize("wrong", [-0.1, 1.1, math.inf])
def test_what_is_no_p_value_is_refused(wrong):
    with pytest.raises(ValueError, match="p-value"):
        holm([0.5, wrong])


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("true_effects", [0, 8])
def test_any_false_finding_is_rarer_than_the_level(correlation, true_effects):
    count, tests = 4000, 12
    chance = np.random.default_rng(12)
    shared = chance.normal(size=(count, 1))
    z = math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * chance.normal(size=(count, tests))
    z[:, :true_effects] += 4
    p_values = 2 * ndtr(-np.abs(z))
    adjusted = np.array([holm(row) for row in p_values.tolist()])
    false = (adjusted[:, true_effects:] < 0.05).any(axis=1).mean()
    assert false <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / count)
    assert (p_values[:, true_effects:] < 0.05).any(axis=1).mean() > 0.07  # which they are not without it
    if correlation == 0 and true_effects == 0:
        assert false >= 0.05 - 3 * math.sqrt(0.05 * 0.95 / count)
    if true_effects:
        assert (adjusted[:, :true_effects] < 0.05).mean() > (12 * p_values[:, :true_effects] < 0.05).mean()
