"""Every model of a task sees the same resamples; scores on them are the metric's own; intervals hold their level."""

import math

import numpy as np
import pytest
from scipy import stats

from biphase.report.statistics.intervals import interval, resample
from biphase.tasks.metrics import entity_f1


def drawn(seed, examples, draws):
    """How often each example is in each resample: the scores of models that are right on one example each."""
    return np.rint(resample(np.eye(examples, dtype=np.float32), seed=seed, draws=draws) * examples).astype(
        int
    )


def counts(models, examples, seed=0):
    chance = np.random.default_rng(seed)
    said, true = chance.integers(0, 4, (2, models, examples))
    return np.stack([chance.integers(0, np.minimum(said, true) + 1), said, true], axis=2).astype(np.float32)


def test_a_resample_has_as_many_examples_each_equally_likely():
    times = drawn("sst2", 30, 20_000)
    assert (times.sum(axis=1) == 30).all()
    assert times.mean(axis=0) == pytest.approx(np.ones(30), abs=0.04)
    assert times.var(axis=0) == pytest.approx(np.full(30, 29 / 30), abs=0.06)
    assert np.cov(times[:, 0], times[:, 1])[0, 1] == pytest.approx(-1 / 30, abs=0.03)


def test_draws_of_counts_are_entity_f1_over_the_resampled_sentences():
    of = counts(2, 20)
    times = drawn("conll", 20, 30)
    made = resample(of, seed="conll", draws=30)
    expected = [[entity_f1(np.repeat(one.astype(int), row, axis=0)) for one in of] for row in times]
    assert made == pytest.approx(np.array(expected), abs=1e-12)
    nothing = np.zeros((2, 4, 3))
    nothing[1, :, 1] = 2
    assert (resample(nothing, seed="x", draws=5) == 0).all(), "nothing is found rightly, or there is nothing"


def test_draws_of_number_pairs_are_correlations_over_the_resampled_examples():
    pairs = np.random.default_rng(3).integers(0, 6, (2, 25, 2)).astype(float)
    times = drawn("stsb", 25, 30)
    for metric, of in (("pearson", stats.pearsonr), ("spearman", stats.spearmanr)):
        made = resample(pairs, seed="stsb", draws=30, metric=metric)
        expected = [[of(*np.repeat(one, row, axis=0).T)[0] for one in pairs] for row in times]
        assert made == pytest.approx(np.array(expected), abs=1e-9)
    holed = pairs.copy()
    holed[0, 4] = np.nan
    made = resample(holed, seed="stsb", draws=9, metric="pearson_spearman")
    assert np.isnan(made[:, 0]).all()
    assert np.isfinite(made[:, 1]).all()
    of_one_task = np.stack([*pairs, pairs[0]])
    of_one_task[1, :, 1] = pairs[0, :, 1]  # the true numbers are shared by some rows
    made = resample(of_one_task, seed="stsb", draws=30, metric="pearson_spearman")
    alone = [resample(row[None], seed="stsb", draws=30, metric="pearson_spearman") for row in of_one_task]
    assert (made == np.concatenate(alone, axis=1)).all()


def test_models_are_paired_however_they_are_asked_for():
    values = np.random.default_rng(1).integers(0, 2, (4, 300)).astype(np.float32)
    together = resample(values, seed="mnli", draws=100)
    alone = [resample(values[[model]], seed="mnli", draws=100)[:, 0] for model in range(4)]
    assert (together == np.stack(alone, axis=1)).all()
    assert (resample(values, seed="mnli", draws=60) == together[:60]).all()
    assert (resample(values, seed="qqp", draws=100) != together).any(axis=0).all()
    shorter = resample(values[:, :299], seed="mnli", draws=100)
    assert abs(np.corrcoef(shorter[:, 0], together[:, 0])[0, 1]) < 0.4


@pytest.mark.parametrize("of", [np.random.default_rng(4).random((3, 30)), counts(3, 30)])
def test_a_missing_model_is_missing_and_disturbs_no_other(of):
    holed = of.copy()
    holed[1, 7] = np.nan
    made, whole = resample(holed, seed="a", draws=9), resample(of, seed="a", draws=9)
    assert np.isnan(made[:, 1]).all()
    assert made[:, [0, 2]] == pytest.approx(whole[:, [0, 2]], abs=1e-9)
    low, high = interval(made, made.mean(axis=0), examples=30)
    assert np.isnan([low[1], high[1]]).all()
    assert np.isfinite([low[0], high[2]]).all()


def test_the_shares_of_draws_are_those_of_bca():
    """With no small sample to widen for, and scipy's own BCa beside it."""
    values = np.random.default_rng(7).exponential(size=(1, 800))
    low, high = interval(resample(values, seed="a", draws=20_000), values.mean(axis=1), examples=800)
    theirs = stats.bootstrap(
        (values[0],), np.mean, n_resamples=8000, method="BCa", rng=np.random.default_rng(0)
    )
    assert high[0] == pytest.approx(theirs.confidence_interval.high, abs=0.003)
    assert low[0] <= theirs.confidence_interval.low + 0.001


@pytest.mark.parametrize("value", [0.0, 0.3, 1.0])
def test_values_that_do_not_differ_have_no_interval(value):
    values = np.full((1, 1234), value, dtype=np.float32)
    low, high = interval(resample(values, seed="a", draws=50), values.mean(axis=1), examples=1234)
    assert np.isnan([low[0], high[0]]).all()


def test_points_of_any_shape_each_have_their_own_interval():
    values = np.random.default_rng(8).random((6, 43)) ** np.arange(1, 7)[:, None]
    draws, points = resample(values, seed="a"), values.mean(axis=1)
    low, high = interval(draws.reshape(-1, 2, 3), points.reshape(2, 3), examples=43)
    for model in range(6):
        alone = interval(draws[:, model], points[model], examples=43)
        assert (low.flat[model], high.flat[model]) == pytest.approx(alone, abs=1e-12)
    wider = interval(draws, points, examples=43, level=0.99)
    assert (wider[0] < low.reshape(-1)).all()
    assert (wider[1] > high.reshape(-1)).all()


def queries(chance, shape):
    """NDCG@10 as a small test set shows it: some 0, many 1, the rest between."""
    kind = chance.random(shape)
    return np.where(kind < 0.15, 0, np.where(kind < 0.5, 1, chance.beta(1.5, 1, shape)))


def skewed(chance, shape):
    return chance.exponential(0.1, shape)


def mostly_equal(chance, shape):
    """A difference of two models: 0 on seven queries of ten."""
    kind = chance.random(shape)
    return np.where(kind < 0.7, 0, np.where(kind < 0.82, -chance.random(shape), chance.random(shape)))


@pytest.mark.parametrize(("values", "mean"), [(queries, 0.65), (skewed, 0.1), (mostly_equal, 0.03)])
def test_43_queries_are_covered_as_often_as_said(values, mean):
    count, chance = 2000, np.random.default_rng(43)
    assert values(chance, 1_000_000).mean() == pytest.approx(mean, abs=0.001)
    of = values(chance, (count, 43)).astype(np.float32)
    hits = []
    for part in np.split(of, 4):  # each with resamples of its own
        low, high = interval(resample(part, seed=f"{len(hits)}"), part.mean(axis=1), examples=43)
        hits.append((low <= mean) & (mean <= high))
    share = np.mean(hits)
    assert share >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / count)
    assert share <= 0.975
