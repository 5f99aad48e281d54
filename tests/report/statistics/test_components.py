"""Variance components against plain sums, intervals for every choice of what is random, and their coverage."""

import math
from itertools import product

import numpy as np
import pytest

from biphase.report.statistics.components import decompose, linear, linear_correlations
from biphase.report.statistics.intervals import across, over_seeds, resample
from biphase.tasks.metrics import correlation, entity_f1

SOURCES = (
    "pretraining seed",
    "fine-tuning seed",
    "pretraining × fine-tuning seed",
    "test example",
    "seeds × test example",
)


@pytest.mark.parametrize("metric", ["pearson", "spearman", "pearson_spearman"])
def test_the_linearized_correlation_has_its_mean_and_the_noise_of_its_resamples(metric):
    chance = np.random.default_rng(8)
    true = chance.integers(0, 11, 400) / 2
    pairs = np.stack([np.stack([true + chance.normal(0, 2, 400), true], -1) for _ in range(2)])
    pairs[1, :, 0] = np.round(pairs[1, :, 0])  # with many ties
    values = linear_correlations(pairs, metric)
    once = np.ones(400)
    assert values.mean(axis=1) == pytest.approx([correlation(metric, *row.T, once) for row in pairs])
    draws = resample(pairs, seed="x", draws=3_000, metric=metric)
    assert values.std(axis=1) / 20 == pytest.approx(draws.std(axis=0), rel=0.07)


def drawn(chance, shape, sds):
    """Values (count, P, F, n) with the seven sds of a crossed design, and the mean for each choice of what is random."""
    count, p, f, n = shape
    shapes = [(p, 1, 1), (1, f, 1), (p, f, 1), (1, 1, n), (p, 1, n), (1, f, n), (p, f, n)]
    a, b, ab, c, ac, bc, rest = (
        sd * chance.normal(size=(count, *s)) for sd, s in zip(sds, shapes, strict=True)
    )
    a_, b_, ab_, c_, ac_, bc_ = (one.mean(axis=(1, 2, 3)) for one in (a, b, ab, c, ac, bc))
    targets = {
        "fine-tuning seeds": a_ + c_ + ac_,
        "pretraining seeds": b_ + c_ + bc_,
        "test examples": a_ + b_ + ab_,
        "fine-tuning seeds and test examples": a_,
        "pretraining and fine-tuning seeds": c_,
        "all": np.zeros(count),
    }
    return a + b + ab + c + ac + bc + rest, targets


def by_plain_sums(values):
    """The variances of a three-way crossed design, mean square by mean square, as a textbook writes them."""
    shape = values.shape
    means = {
        kept: values.mean(axis=tuple(axis for axis in range(3) if axis not in kept), keepdims=True)
        for kept in [(), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]
    }

    def mean_square(of):
        effect = sum(
            (-1) ** (len(of) - len(kept)) * means[kept]
            for kept in means
            if set(kept) <= set(of)
        )  # fmt: skip
        df = math.prod(shape[axis] - 1 for axis in of)
        return float((np.broadcast_to(effect, shape) ** 2).sum()) / df

    p, f, n = shape
    a, b, c, ab, ac, bc, rest = (
        mean_square(of) for of in [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]
    )
    return {
        "pretraining seed": (a - ab - ac + rest) / (f * n),
        "fine-tuning seed": (b - ab - bc + rest) / (p * n),
        "pretraining × fine-tuning seed": (ab - rest) / n,
        "test example": (c - ac - bc + rest) / (p * f) / n,
        "p × example": (ac - rest) / f / n,
        "f × example": (bc - rest) / p / n,
        "rest": rest / n,
    }


def test_the_variances_are_those_of_plain_sums():
    values = drawn(np.random.default_rng(0), (1, 3, 4, 30), (1, 1, 0.8, 2, 1, 1, 1))[0][0]
    found, plain = {one.source: one for one in decompose(values).components}, by_plain_sums(values)
    assert tuple(found) == SOURCES
    assert min(plain.values()) > 0  # none of them is cut off at 0
    for source in SOURCES[:4]:
        assert found[source].single == pytest.approx(plain[source])
    assert found["seeds × test example"].single == pytest.approx(
        plain["p × example"] + plain["f × example"] + plain["rest"]
    )
    assert found["seeds × test example"].mean == pytest.approx(
        plain["p × example"] / 3 + plain["f × example"] / 4 + plain["rest"] / 12
    )
    for source, draws in zip(SOURCES[:4], (3, 4, 12, 1), strict=True):
        assert found[source].mean == pytest.approx(plain[source] / draws)


def test_on_average_the_variances_are_those_put_in():
    sds = (0.5, 0.4, 0.3, 2.0, 0.5, 0.7, 1.0)
    values = drawn(np.random.default_rng(1), (60, 8, 8, 40), sds)[0]
    single = np.mean([[one.single for one in decompose(some).components] for some in values], axis=0)
    expected = [0.25, 0.16, 0.09, 4 / 40, (0.25 + 0.49 + 1) / 40]
    assert single == pytest.approx(expected, rel=0.2)


def test_a_negative_variance_is_0():
    # Seeds that undo each other on every example: less between them than their examples make likely.
    values = np.random.default_rng(2).normal(size=(1, 1, 50))
    values = np.concatenate([values, -values], axis=1)
    values -= values.mean(axis=2, keepdims=True)
    tuning = decompose(values).components[1]
    assert (tuning.single, tuning.mean) == (0, 0)


def test_seeds_are_intervals_of_their_means_and_of_their_table():
    values = np.random.default_rng(3).normal(size=(3, 4, 20))
    table, made = values.mean(axis=2), decompose(values)
    assert made.mean == pytest.approx(table.mean())
    assert (made.pretraining_seeds, made.finetuning_seeds, made.examples) == (3, 4, 20)
    assert made.intervals["fine-tuning seeds"] == over_seeds(table.mean(axis=0))
    assert made.intervals["pretraining seeds"] == over_seeds(table.mean(axis=1), covers="pretraining seeds")
    assert made.intervals["pretraining and fine-tuning seeds"] == across(table)
    examples, other = (
        made.intervals["test examples"],
        over_seeds(values.mean(axis=(0, 1)), covers="test examples"),
    )
    assert (examples.low, examples.high, examples.p) == pytest.approx((other.low, other.high, other.p))
    assert (examples.sd, examples.n, examples.df) == pytest.approx((other.sd, 20, 19), rel=1e-5)
    # Fine-tuning seeds and examples, with the pretraining seeds as they are, are a crossed table too.
    two_way, plain = made.intervals["fine-tuning seeds and test examples"], across(values.mean(axis=0))
    assert (two_way.low, two_way.high, two_way.p) == pytest.approx((plain.low, plain.high, plain.p))


def test_one_pretraining_seed_is_said_not_to_be_covered():
    made = decompose(np.random.default_rng(5).normal(size=(1, 5, 30)))
    for name in ("pretraining seeds", "pretraining and fine-tuning seeds", "all"):
        assert np.isnan([made.intervals[name].low, made.intervals[name].high, made.intervals[name].p]).all()
        assert made.intervals[name].covers == "not covered: there is one pretraining seed"
    known = {one.source for one in made.components if math.isfinite(one.mean)}
    assert known == {"fine-tuning seed", "test example", "seeds × test example"}
    assert math.isfinite(made.intervals["fine-tuning seeds and test examples"].low)


def test_one_fine_tuning_seed_leaves_pretraining_seeds_and_examples():
    made = decompose(np.random.default_rng(6).normal(size=(4, 1, 30)))
    known = {name for name, one in made.intervals.items() if math.isfinite(one.low)}
    assert known == {"pretraining seeds", "test examples"}
    assert made.intervals["all"].covers == "not covered: there is one fine-tuning seed"
    single = decompose(np.random.default_rng(6).normal(size=(1, 1, 30)))
    assert {name for name, one in single.intervals.items() if math.isfinite(one.low)} == {"test examples"}
    assert (
        single.intervals["all"].covers
        == "not covered: there is one pretraining seed and one fine-tuning seed"
    )
    assert {one.source for one in single.components if math.isfinite(one.mean)} == {"test example"}


def test_missing_cells_are_left_out_by_the_rule_of_the_table():
    values = np.random.default_rng(7).normal(size=(3, 4, 20))
    holed = values.copy()
    holed[1] = np.nan
    holed[2, 3, 5] = np.nan
    assert decompose(holed) == decompose(values[[0, 2]][:, :3])
    with pytest.raises(ValueError, match="nothing to decompose"):
        decompose(np.full((2, 2, 5), np.nan))
    with pytest.raises(ValueError, match="fewer than two examples"):
        decompose(np.zeros((2, 2, 1)))


def test_without_any_spread_there_is_no_interval():
    values = np.full((2, 3, 10), 0.1) + np.full((2, 3, 10), 0.2)
    values[:, :, ::2] = 0.3  # equal but for rounding
    for one in decompose(values).intervals.values():
        assert one.mean == pytest.approx(0.3)
        assert np.isnan([one.low, one.high, one.p]).all()
    # Seeds that agree on every example leave the noise of the examples.
    found = decompose(np.broadcast_to(np.arange(10.0), (2, 3, 10))).intervals
    assert math.isnan(found["pretraining and fine-tuning seeds"].low)
    assert found["all"].low == pytest.approx(found["test examples"].low)


def test_several_tasks_share_seeds_and_not_examples():
    chance = np.random.default_rng(8)
    one, other = chance.normal(size=(2, 3, 40)), chance.normal(size=(2, 3, 90))
    assert decompose([one]) == decompose(one)
    made = decompose([one, other])
    table = (one.mean(axis=2) + other.mean(axis=2)) / 2
    assert made.intervals["pretraining and fine-tuning seeds"] == across(table)
    examples, parts = (
        made.intervals["test examples"],
        [decompose(task).intervals["test examples"] for task in (one, other)],
    )
    assert examples.se == pytest.approx(math.hypot(*(part.se for part in parts)) / 2)
    assert examples.high - examples.mean == pytest.approx(
        math.hypot(*(part.high - part.mean for part in parts)) / 2
    )
    assert examples.n == made.examples == 130


def entity_counts(chance, shape):
    said, true = chance.integers(0, 4, (2, *shape))
    return np.stack([chance.integers(0, np.minimum(said, true) + 1), said, true], axis=-1).astype(np.float32)


def test_counts_become_values_with_the_mean_and_the_noise_of_f1():
    counts = entity_counts(np.random.default_rng(9), (3, 400))
    values = linear(counts)
    assert values.mean(axis=1) == pytest.approx([entity_f1(one.astype(int)) for one in counts])
    draws = resample(counts, seed="conll", draws=4000)
    assert values.std(axis=1) / 20 == pytest.approx(draws.std(axis=0), rel=0.05)
    # A sentence that weighs a little more moves F1 by what its value says.
    weights = np.ones((400, 1))
    weights[5] += 1e-4
    f1 = [2 * right / (said + true) for right, said, true in
          (np.sum(counts[0].astype(np.float64) * weight, axis=0) for weight in (1.0, weights))]  # fmt: skip
    assert (f1[1] - f1[0]) * 400 / 1e-4 == pytest.approx(values[0, 5] - f1[0], rel=1e-2)
    assert (linear(np.zeros((2, 5, 3))) == 0).all()
    grid = entity_counts(np.random.default_rng(9), (2, 3, 50))
    assert decompose(grid) == decompose(linear(grid))


@pytest.mark.parametrize(
    ("shape", "sds"),
    [((1, 5, 43), (0, 0.1, 0, 1, 0, 0.5, 0.5)), ((3, 3, 60), (0.1, 0.1, 0.05, 1, 0.3, 0.3, 0.5)),
     ((2, 5, 60), (0.3, 0.05, 0, 1, 0.2, 0.2, 0.3))],
)  # fmt: skip
def test_every_choice_of_what_is_random_is_covered(shape, sds):
    count = 250
    values, targets = drawn(np.random.default_rng(10), (count, *shape), sds)
    found = [decompose(one).intervals for one in values]
    margin = 3 * math.sqrt(0.95 * 0.05 / count)
    for name, target in targets.items():
        if math.isnan(found[0][name].low):
            continue
        share = np.mean(
            [one[name].low <= mean <= one[name].high for one, mean in zip(found, target, strict=True)]
        )
        assert share >= 0.95 - margin, name
        if name in ("fine-tuning seeds", "pretraining seeds", "test examples"):  # these are Student's own
            assert share <= 0.95 + margin, name


def test_ignoring_what_is_random_covers_too_little():
    """Why the choice matters: an interval over seeds does not speak of another test set, nor of another pretraining."""
    values, targets = drawn(np.random.default_rng(11), (120, 3, 5, 60), (0.3, 0.02, 0, 1, 0, 0, 0.3))
    found = [decompose(one).intervals for one in values]
    for narrow, (broad, target) in product(("fine-tuning seeds",), targets.items()):
        share = np.mean(
            [one[narrow].low <= mean <= one[narrow].high for one, mean in zip(found, target, strict=True)]
        )
        assert (share > 0.9) == (broad == narrow), broad
