"""Variance components against plain sums, and scores linearized so that they have components."""

import math

import numpy as np
import pytest

from biphase.report.statistics.components import decompose, linear, linear_correlations
from biphase.report.statistics.intervals import resample
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
    chance, p, f, n = np.random.default_rng(0), 3, 4, 30
    shapes = [(p, 1, 1), (1, f, 1), (p, f, 1), (1, 1, n), (p, 1, n), (1, f, n), (p, f, n)]
    sds = (1, 1, 0.8, 2, 1, 1, 1)
    values = sum(sd * chance.normal(size=shape) for sd, shape in zip(sds, shapes, strict=True))
    found, plain = {one.source: one for one in decompose(values).components}, by_plain_sums(values)
    assert tuple(found) == SOURCES
    assert min(plain.values()) > 0  # none of them is cut off at 0
    for source in SOURCES[:4]:
        assert found[source].single == pytest.approx(plain[source])
    assert found["seeds × test example"].single == pytest.approx(
        plain["p × example"] + plain["f × example"] + plain["rest"]
    )


def test_a_negative_variance_is_0():
    # Seeds that undo each other on every example: less between them than their examples make likely.
    values = np.random.default_rng(2).normal(size=(1, 1, 50))
    values = np.concatenate([values, -values], axis=1)
    values -= values.mean(axis=2, keepdims=True)
    assert decompose(values).components[1].single == 0


@pytest.mark.parametrize(
    ("shape", "sources"),
    [
        ((1, 4, 20), {"fine-tuning seed", "test example", "seeds × test example"}),
        ((4, 1, 30), {"pretraining seed", "test example", "seeds × test example"}),
        ((1, 1, 30), {"test example"}),
    ],
)
def test_one_seed_says_nothing_of_the_noise_of_its_kind(shape, sources):
    made = decompose(np.random.default_rng(3).normal(size=shape))
    assert (made.pretraining_seeds, made.finetuning_seeds, made.examples) == shape
    assert {one.source for one in made.components if math.isfinite(one.single)} == sources


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


def test_several_tasks_share_seeds_and_not_examples():
    chance = np.random.default_rng(8)
    one, other = (np.broadcast_to(chance.normal(size=n), (2, 3, n)) for n in (40, 90))  # seeds that agree
    assert decompose([one]) == decompose(one)
    made, parts = decompose([one, other]), [decompose(task) for task in (one, other)]
    expected = [
        sum(some) / 4 for some in zip(*([c.single for c in part.components] for part in parts), strict=True)
    ]
    assert [c.single for c in made.components] == pytest.approx(expected, abs=1e-15)
    assert made.examples == 130


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
