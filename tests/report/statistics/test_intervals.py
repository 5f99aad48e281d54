"""Intervals over seeds hold their level and agree with their p-values; Holm's adjustment; detectable effects."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.special import ndtr

from biphase.report.statistics.intervals import (
    across,
    both,
    complete,
    detectable_by,
    holm,
    over_seeds,
    quantile,
    students,
)

VALUES = st.integers(-1000, 1000).map(lambda value: value / 100)


def tables(rows, columns):
    return st.tuples(rows, columns).flatmap(
        lambda shape: st.lists(VALUES, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]).map(
            lambda values: np.array(values).reshape(shape)
        )
    )


@pytest.mark.parametrize("level", [0.8, 0.95, 0.99])
@pytest.mark.parametrize("n", [2, 3, 5, 20])
def test_a_row_of_seeds_gets_scipys_t(n, level):
    values = np.random.default_rng(n).normal(0.3, 1, n)
    made, theirs = over_seeds(values, level), stats.ttest_1samp(values, 0)
    low, high = theirs.confidence_interval(level)
    assert (made.low, made.high, made.p) == pytest.approx((low, high, theirs.pvalue), rel=1e-10)
    assert (made.mean, made.sd, made.n) == pytest.approx((values.mean(), values.std(ddof=1), n))
    assert (made.se, made.df) == pytest.approx((stats.sem(values), n - 1))


def test_missing_values_are_left_out_and_counted_out():
    with_holes = over_seeds(np.array([0.5, np.nan, 0.7, np.nan, 0.9]))
    assert with_holes == over_seeds(np.array([0.5, 0.7, 0.9]))
    assert with_holes.n == 3


def test_one_value_has_a_mean_and_no_interval_and_none_has_nothing():
    one, none = over_seeds(np.array([0.5, np.nan])), over_seeds(np.array([np.nan]))
    assert (one.mean, one.n) == (0.5, 1)
    assert np.isnan([one.sd, one.low, one.high, one.p, one.se, one.df]).all()
    assert none.n == 0
    assert np.isnan([none.mean, none.low, none.high, none.p]).all()


@pytest.mark.parametrize(
    "values", [[0.25, 0.25], [0.0, 0.0, 0.0], [0.1 + 0.2, 0.3, 0.3], [[0.3, 0.1 + 0.2], [0.3, 0.3]]]
)
def test_equal_values_have_no_interval_instead_of_one_without_width(values):
    values = np.array(values)
    made = over_seeds(values) if values.ndim == 1 else across(values)
    assert made.mean == pytest.approx(values.mean())
    assert made.sd == 0
    assert np.isnan([made.low, made.high, made.p]).all()


def test_a_crossed_table_worked_by_hand():
    # Row means 1.5 and 4.5, column means 2 and 4, residuals ±0.5: mean squares 9, 4 and 1.
    made = across(np.array([[1.0, 2.0], [3.0, 6.0]]))
    t = 12.706204736  # of one degree of freedom
    half = t * math.sqrt((9 + 4 - 1) / 4)
    assert (made.low, made.high) == pytest.approx((3 - half, 3 + half), rel=1e-9)
    assert made.se == pytest.approx(math.sqrt(3))
    assert made.df == pytest.approx(1)
    assert made.n == 4


def test_unequal_factors_each_have_their_own_quantile():
    table = np.random.default_rng(0).normal(size=(2, 5)) + np.array([[0.0], [3.0]]) + np.arange(5)
    rows = 5 * table.mean(axis=1).var(ddof=1)
    columns = 2 * table.mean(axis=0).var(ddof=1)
    rest = (table.var() * 10 - rows - 4 * columns) / 4
    assert columns > rest
    first, second = (stats.t.ppf(0.975, df) ** 2 for df in (1, 4))
    half = math.sqrt((first * rows + second * (columns - rest)) / 10)
    assert across(table).high - table.mean() == pytest.approx(half)


def test_what_neither_factor_explains_does_not_narrow_the_interval():
    # Means of rows and of columns are equal by accident, and cells still differ: a mean square of 0.01.
    made = across(np.array([[0.1, 0.2], [0.2, 0.1]]))
    assert made.high - made.mean == pytest.approx(1.959964 * math.sqrt(0.01 / 4))
    assert made.se == pytest.approx(math.sqrt(0.01 / 4))
    # Rows differ, columns by less than the rest: rows alone remain.
    table = np.array([[4.0, 3.9, 4.1], [-4.0, -3.8, -4.3]])
    rows, columns = 3 * table.mean(axis=1).var(ddof=1), 2 * table.mean(axis=0).var(ddof=1)
    assert columns < (table.var() * 6 - rows - 2 * columns) / 2
    made = across(table)
    assert made.high - made.mean == pytest.approx(quantile(1, 0.05) * math.sqrt(rows / 6))
    assert made.se == pytest.approx(math.sqrt(rows / 6))


def test_it_says_what_it_covers():
    table = np.random.default_rng(1).normal(size=(3, 4))
    assert across(table).covers == "pretraining and fine-tuning seeds"
    assert across(table[:1]) == over_seeds(table[0])
    assert across(table[:1]).covers == "fine-tuning seeds"
    assert across(table[:, :1]) == over_seeds(table[:, 0], covers="pretraining seeds")
    assert across(table[:1, :1]).n == 1


def test_of_a_table_with_holes_rows_with_any_score_and_columns_full_in_those_are_used():
    nan = np.nan
    table = np.array([[1.0, 2.0, nan, 4.0], [nan, nan, nan, nan], [5.0, nan, 7.0, 9.0]])
    assert complete(table).tolist() == [[1.0, 4.0], [5.0, 9.0]]
    assert across(table) == across(np.array([[1.0, 4.0], [5.0, 9.0]]))
    # One row alone keeps all its seeds.
    assert across(table[:2]) == over_seeds(np.array([1.0, 2.0, 4.0]))
    nothing = across(np.array([[1.0, nan], [nan, 2.0]]))
    assert nothing.n == 0
    assert math.isnan(nothing.mean)
    assert across(np.full((2, 3), nan)).n == 0


@pytest.mark.parametrize("level", [0.9, 0.95, 0.99])
@given(table=tables(st.integers(1, 4), st.integers(1, 4)))
def test_the_interval_excludes_0_exactly_where_p_is_small(table, level):
    made = across(table, level)
    if math.isnan(made.p):
        assert math.isnan(made.low)
        return
    excludes = made.low > 0 or made.high < 0
    assert 0 < made.p <= 1
    assert excludes == (made.p < 1 - level) or made.p == pytest.approx(1 - level, abs=1e-9)


@given(table=tables(st.integers(2, 4), st.integers(2, 4)), factor=st.sampled_from([0.01, 3.0, 100.0]))
def test_neither_order_nor_scale_nor_the_names_of_the_factors_matter(table, factor):
    made = across(table)
    others = (
        across(table[::-1]),
        across(table[:, ::-1]),
        across(table.T),
        across(-table),
        across(table * factor),
    )
    for other, scale in zip(others, (1, 1, 1, -1, factor), strict=True):
        bounds = sorted((scale * made.low, scale * made.high))
        assert [other.low, other.high] == pytest.approx(bounds, rel=1e-6, abs=1e-9, nan_ok=True)
        assert other.p == pytest.approx(made.p, rel=1e-6, nan_ok=True)


def test_tables_of_the_wrong_shape_are_refused():
    with pytest.raises(ValueError, match="across"):
        over_seeds(np.zeros((2, 2)))
    with pytest.raises(ValueError, match="3 axes"):
        across(np.zeros((2, 2, 2)))


RATIOS = (0, 0.1, 0.5, 1, 3, 10, 100)


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (2, 5), (3, 3), (3, 5), (5, 5), (3, 40), (10, 10)])
def test_whatever_the_variances_the_crossed_interval_holds_its_level(shape):
    """Asked of mean squares directly, 40,000 tables at a time; the mean, which they do not depend on, integrated out."""
    chance = np.random.default_rng(shape)
    dfs = (shape[0] - 1, shape[1] - 1, (shape[0] - 1) * (shape[1] - 1))
    chis = [chance.chisquare(df, 40_000) / df for df in dfs]
    shares = []
    for first in RATIOS:
        for second in RATIOS:
            expected = 1 + shape[1] * first, 1 + shape[0] * second, 1
            rows, columns, rest = (e * chi for e, chi in zip(expected, chis, strict=True))
            reach = both(students(rows, dfs[0]), students(columns, dfs[1]), shared=rest, df=max(dfs[:2]))
            shares.append(
                np.mean(2 * stats.norm.cdf(np.sqrt(reach(0.05) / (expected[0] + expected[1] - 1))) - 1)
            )
    assert min(shares) >= 0.9485
    assert max(shares) <= 0.998


# ---------------------------------------------------------------- multiple tests


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


# ---------------------------------------------------------------- power


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


def test_the_effect_of_a_textbook_and_what_has_none():
    # R: power.t.test(34, 0.5, type="one.sample") has a power of 0.8078
    assert detectable(1, 34, 0.05, 0.8078) == pytest.approx(0.5, abs=5e-4)
    assert detectable(1, 1) == detectable_by(1, 0) == detectable_by(1, -1) == math.inf
    assert all(math.isnan(detectable(unknown, 5)) for unknown in (0.0, math.nan))
    for level, power in ((0.0, 0.8), (0.9, 0.8), (0.05, 1.0)):
        with pytest.raises(ValueError, match="0 < level < power < 1"):
            detectable(1, 5, level, power)
    with pytest.raises(ValueError, match="below 0"):
        detectable(-1, 5)
