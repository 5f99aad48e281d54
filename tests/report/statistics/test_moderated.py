"""Moderated variances, contrasts of cells, claims of several parts, comparisons with the best, planned looks."""

import math

import numpy as np
import pytest
from scipy import stats

from biphase.report.statistics.moderated import (
    Cells,
    ClaimTest,
    Looks,
    as_estimate,
    cells_of,
    contenders,
    contrast_of,
    dunnett,
    every,
    holm_distinct,
    seed_values,
)


def drawn(sd, seeds=3, studies=400, seed=0):
    sds = np.asarray(sd, dtype=float)
    return np.random.default_rng(seed).normal(size=(studies, sds.size, seeds)) * sds[:, None]


def contrast(cells, weights, margin=0.0, level=0.95):
    """`contrast_of` for the cells whose weight is not 0."""
    used = np.flatnonzero(weights)
    w = np.asarray(weights, dtype=float)[used]
    variances = w**2 * cells.variance[used] / np.maximum(cells.n[used], 1)
    return contrast_of(np.sum(w * cells.mean[used]), variances, cells.df[used], margin, level)


def test_equal_variances_borrow_and_unequal_ones_do_not():
    alike = cells_of(drawn(np.ones(20)))
    unlike = cells_of(drawn(np.geomspace(0.03, 30, 20)))
    assert np.median(alike.df) > 10
    assert np.median(unlike.df) < 4
    assert np.median(alike.variance) == pytest.approx(1.0, abs=0.3)


def test_a_noisy_cell_stays_noisy():
    values = drawn([1] * 9 + [10])
    cells = cells_of(values)
    own = values.var(axis=-1, ddof=1)
    assert (cells.variance >= own * (1 - 1e-12)).all()
    assert np.median(cells.variance[:, 9]) > 30


def test_neither_scale_nor_order_nor_other_studies_matter():
    values = drawn([1, 2, 0.5, 1, 3], studies=3)
    cells, scaled, turned = cells_of(values), cells_of(100 * values + 7), cells_of(values[:, ::-1])
    assert scaled.variance == pytest.approx(1e4 * cells.variance, rel=1e-6)
    assert scaled.df == pytest.approx(cells.df, rel=1e-6)
    assert turned.variance[:, ::-1] == pytest.approx(cells.variance, rel=1e-9)
    for one, study in enumerate(values):
        assert cells_of(study).variance == pytest.approx(cells.variance[one], rel=1e-9)


def test_single_and_equal_values_get_the_variance_of_the_others():
    values = drawn(np.ones(8), studies=1)[0]
    values[0, 1:] = np.nan  # one value
    values[1] = 5.0  # equal values
    cells = cells_of(values)
    assert cells.n.tolist() == [1, 3, 3, 3, 3, 3, 3, 3]
    assert cells.variance[0] == pytest.approx(cells.variance[1])
    assert 0.2 < cells.variance[0] < 5
    assert cells.df[0] < cells.df[2]
    assert np.isfinite(contrast(cells, [1, -1, 0, 0, 0, 0, 0, 0]).above)


def test_no_variance_at_all_is_not_known():
    cells = cells_of(np.ones((3, 3)))
    test = contrast(cells, [1, -1, 0])
    assert np.isnan([test.above, test.below, test.low, test.high, test.se]).all()
    assert math.isnan(as_estimate(test, 3, "seeds").p)
    assert np.isnan(cells_of(np.full((2, 3), np.nan)).mean).all()


def test_other_cells_can_be_learnt_from():
    scores, rates = drawn(np.ones(3), studies=1)[0], drawn(np.ones(21), studies=1, seed=1)[0]
    assert cells_of(scores, rates).df.min() > cells_of(scores).df.max()


def test_pretraining_seeds_are_the_values_where_there_are_several():
    table = np.array([[1.0, 2.0, 3.0], [5.0, np.nan, 7.0], [np.nan, np.nan, np.nan]])
    assert seed_values(table, several=True).tolist() == [2.0, 6.0]
    assert seed_values(table[[0, 2]], several=False).tolist() == [1.0, 2.0, 3.0]


# ---------------------------------------------------------------- contrasts


def cells(mean, variance, df, n):
    return Cells(*(np.asarray(one, dtype=float) for one in (mean, variance, df, n)))


def test_equal_degrees_of_freedom_give_the_t_test():
    test = contrast(cells([5, 3, 9], [4, 4, 4], [7, 7, 7], [3, 3, 3]), [1, -1, 0])
    se = math.sqrt(8 / 3)
    assert test.se == pytest.approx(se)
    assert test.above == pytest.approx(stats.t.sf(2 / se, 7), rel=1e-6)
    assert test.above + test.below == pytest.approx(1)
    assert test.high - test.value == pytest.approx(stats.t.ppf(0.975, 7) * se)


@pytest.mark.parametrize("margin", [-0.5, 0.0, 1.0, 3.0])
def test_p_values_and_intervals_agree(margin):
    some = cells([5, 3, 4], [4, 1, 9], [3, 12, 40], [3, 5, 2])
    p = contrast(some, [1, -0.5, -0.5], margin)
    edge = contrast(some, [1, -0.5, -0.5], margin, level=1 - 2 * float(min(p.above, p.below)))
    end = edge.low if p.value > margin else edge.high
    assert end == pytest.approx(margin, abs=1e-5)


def test_far_effects_have_small_p_values_and_no_warning():
    test = contrast(cells([500, 3], [1e-4, 1], [3, 400], [3, 3]), [1, -1])
    assert 0 < test.above < 1e-5
    assert test.below == pytest.approx(1)


@pytest.mark.parametrize("variances", [(1, 1), (1, 25), (100, 1)])
def test_contrasts_of_few_seeds_hold_their_level(variances):
    """Without help from other cells: exactly where Satterthwaite's approximation fails."""
    chance = np.random.default_rng(0)
    v = np.array(variances, dtype=float)
    estimated = v * chance.chisquare(2, (20_000, 2)) / 2
    value = chance.normal(size=20_000) * math.sqrt(v.sum())
    test = contrast_of(value, estimated, np.full((20_000, 2), 2.0))
    for level in (0.05, 0.01, 0.004):
        assert np.mean(test.above <= level) < level + 3 * math.sqrt(level / 20_000)


def test_an_estimate_has_the_same_interval():
    test = contrast(cells([5, 3], [4, 1], [3, 12], [3, 5]), [1, -1])
    one = as_estimate(test, 3, "fine-tuning seeds")
    assert (one.low, one.high) == (float(test.low), float(test.high))
    assert one.p == pytest.approx(2 * float(test.above))
    assert one.low == pytest.approx(one.mean - stats.t.ppf(0.975, one.df) * one.se, rel=1e-6)


# ---------------------------------------------------------------- claims


def test_every_part_must_hold_and_any_refutes():
    assert every([0.01, 0.04], [0.99, 0.96]) == ClaimTest(0.04, 1.0, 2, 0)
    assert every([0.01, 0.999], [0.99, 0.001]).refuted == pytest.approx(0.002)
    assert every([0.01, math.nan], [0.99, math.nan]) == ClaimTest(0.01, 0.99, 1, 1)
    assert math.isnan(every([math.nan], [math.nan]).reproduced)


@pytest.mark.parametrize(
    ("claims", "adjusted"),
    [
        ([(0.01, "a"), (0.02, "b")], [0.02, 0.02]),
        (
            [(0.01, "a"), (0.02, "b"), (0.02, "ab"), (0.01, "a")],
            [0.02] * 4,
        ),  # what is repeated is not counted
        ([(0.01, "a"), (0.2, "a")], [0.01, 0.2]),  # with a premise: no surer than its premise
        ([(0.2, "a"), (0.01, "a")], [0.2, 0.01]),
        ([(0.01, "a"), (0.02, "ab")], [0.02, 0.02]),  # a part of its own
        ([(0.03, "a"), (0.02, "ab")], [0.04, 0.04]),
        ([(math.nan, "a"), (0.04, "b")], [math.nan, 0.04]),  # not tested, so not counted
    ],
)
def test_distinct_claims_are_corrected_for(claims, adjusted):
    tests = [ClaimTest(reproduced, 1.0, 1, 0) for reproduced, _ in claims]
    found = holm_distinct(tests, [frozenset(parts) for _, parts in claims])
    assert [reproduced for reproduced, _ in found] == pytest.approx(adjusted, nan_ok=True)


# ---------------------------------------------------------------- comparisons with the best


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


# ---------------------------------------------------------------- planned looks


@pytest.mark.parametrize("seeds", [(3, 5, 10), (2, 3, 5), (3, 4, 5, 6, 8, 10)])
def test_looks_spend_the_whole_error_rate_and_no_more(seeds):
    levels = {one: Looks(seeds).level(one) for one in seeds}
    assert sum(levels.values()) == pytest.approx(0.05)
    assert min(levels.values()) > 0
    values = np.random.default_rng(0).normal(size=(20_000, seeds[-1]))
    p = [
        stats.ttest_1samp(values[:, :one], 0, axis=1, alternative="greater").pvalue <= levels[one]
        for one in seeds
    ]
    assert np.any(p, axis=0).mean() < 0.05 + 3 * math.sqrt(0.05 / 20_000)


def test_the_spending_of_looks_is_that_of_the_literature():
    looks = Looks((1 * 2, 2 * 2, 3 * 2, 4 * 2, 5 * 2), alpha=0.025)
    spent = [looks.spent(one) for one in looks.seeds]
    # Lan and DeMets 1983: five equal looks, one-sided 0.025
    assert spent == pytest.approx([0.00000, 0.00039, 0.00381, 0.01221, 0.02500], abs=2e-5)


@pytest.mark.parametrize("seeds", [(), (1, 3), (5, 3), (3, 3)])
def test_looks_that_make_no_sense_are_refused(seeds):
    with pytest.raises(ValueError, match="increasing"):
        Looks(seeds)
    with pytest.raises(ValueError, match="3, 5"):
        Looks((3, 5)).level(4)
