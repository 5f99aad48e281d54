"""The tables of docs/statistics.md: printed by `pytest -m campaign -s` on this file, and compared with the page.

The page may differ from a simulation by its error and no more.
"""

import math

import numpy as np
import pytest
from page_tables import percent, show
from scipy import stats
from scipy.special import ndtr, ndtri, stdtrit

from biphase.report.statistics.components import decompose
from biphase.report.statistics.intervals import (
    both,
    detectable_by,
    interval,
    over_seeds,
    quantile,
    resample,
    students,
)

pytestmark = pytest.mark.campaign


def satterthwaite(rows, columns, rest, dfs):
    """Squared half width by the variance as it comes out, however small."""
    variance = np.maximum(rows + columns - rest, 0)
    spread = sum(square**2 / df for square, df in zip((rows, columns, rest), dfs, strict=True))
    return stdtrit(np.maximum(variance**2 / spread, 0.5), 0.975) ** 2 * variance


def bounded(rows, columns, rest, dfs):
    """By a variance no smaller than that of either factor."""
    variance = np.maximum(np.maximum(rows, columns), rows + columns - rest)
    spread = sum(square**2 / df for square, df in zip((rows, columns, rest), dfs, strict=True))
    return stdtrit(np.maximum(variance**2 / spread, min(dfs[:2])), 0.975) ** 2 * variance


def ours(rows, columns, rest, dfs):
    return both(students(rows, dfs[0]), students(columns, dfs[1]), shared=rest, df=max(dfs[:2]))(0.05)


def test_seeds_crossed():
    ratios = (0, 0.1, 0.3, 1, 3, 10, 30, 100, 1000)
    made = []
    for shape in ((2, 2), (2, 3), (2, 5), (3, 3), (3, 5), (5, 5), (2, 10), (10, 10)):
        chance = np.random.default_rng(shape)
        dfs = (shape[0] - 1, shape[1] - 1, (shape[0] - 1) * (shape[1] - 1))
        chis = [chance.chisquare(df, 100_000) / df for df in dfs]
        cells = []
        for method in (satterthwaite, bounded, ours):
            shares = []
            for first in ratios:
                for second in ratios:
                    expected = 1 + shape[1] * first, 1 + shape[0] * second, 1
                    squares = (e * chi for e, chi in zip(expected, chis, strict=True))
                    half = np.sqrt(method(*squares, dfs) / (expected[0] + expected[1] - 1))
                    shares.append(np.mean(2 * ndtr(half) - 1))
            cells.append(" / ".join(map(percent, (min(shares), np.mean(shares), max(shares)))))
        assert min(shares) > 0.949
        made.append((f"{shape[0]} × {shape[1]}", *cells))
    show(("seeds", "Satterthwaite", "Satterthwaite, bounded", "used"), made, error=0.2)


def test_seeds_that_are_not_normal():
    shapes = {
        "normal": lambda chance, size: chance.normal(size=size),
        "uniform": lambda chance, size: chance.uniform(-1, 1, size),
        "heavy tails (t, 3 df)": lambda chance, size: chance.standard_t(3, size),
        "skewed (exponential)": lambda chance, size: chance.exponential(size=size) - 1,
        "one seed in ten fails (−10 sd)": lambda chance, size: (
            chance.normal(size=size) - 10 * ((chance.random(size) < 0.1) - 0.1)
        ),
    }
    made = []
    for name, draw in shapes.items():
        cells = []
        for n in (2, 3, 5, 10):
            values = draw(np.random.default_rng(n), (100_000, n))
            half = quantile(n - 1, 0.05) * values.std(axis=1, ddof=1) / math.sqrt(n)
            cells.append(np.mean(np.abs(values.mean(axis=1)) <= half))
        if name == "normal":
            assert cells == pytest.approx([0.95] * 4, abs=0.003)
        made.append((name, *map(percent, cells)))
    show(("scores of seeds", "2", "3", "5", "10"), made, error=0.4)


def between(low, high, zero, one):
    """Values of which some are 0, some 1, and the rest between."""
    return lambda chance, size: np.select(
        [(kind := chance.random(size)) < zero, kind < zero + one], [0, 1], chance.beta(low, high, size)
    )


def differing(better, worse, whole=False):
    """A difference of two models: 0 but for these shares of the examples."""

    def draw(chance, size):
        kind, much = chance.random(size), 1 if whole else chance.random(size)
        return np.where(kind < better, much, np.where(kind < better + worse, -much, 0))

    return draw


POPULATIONS = {
    "normal": (lambda chance, size: chance.normal(size=size), 0),
    "NDCG, 15% at 0, 35% at 1": (between(1.5, 1, 0.15, 0.35), 0.65),
    "NDCG, 50% at 0, 3% at 1": (between(0.8, 3, 0.5, 0.03), 0.03 + 0.47 * 0.8 / 3.8),
    "exponential": (lambda chance, size: chance.exponential(size=size), 1),
    "accuracy 80%": (between(1, 1, 0.2, 0.8), 0.8),
    "accuracy 90%": (between(1, 1, 0.1, 0.9), 0.9),
    "difference, 30% not 0": (differing(0.18, 0.12), 0.03),
    "difference, 20% not 0, one-sided": (differing(0.2, 0), 0.1),
    "difference of accuracies, 15% not 0": (differing(0.1, 0.05, whole=True), 0.05),
    "difference of accuracies, 7% not 0": (differing(0.05, 0.02, whole=True), 0.03),
}


def rivals(values, draws):
    """Student's t, and the bootstrap's percentile, basic and BCa intervals."""
    count, n = values.shape
    mean, se = values.mean(axis=1), values.std(axis=1, ddof=1) / math.sqrt(n)
    ordered = np.sort(draws, axis=0)

    def at(share):
        place = np.clip(share * (len(draws) + 1) - 1, 0, len(draws) - 1) * np.ones(count)
        return ordered[np.rint(place).astype(int), np.arange(count)]

    low, high, t = at(0.025), at(0.975), quantile(n - 1, 0.05)
    half = t * se
    bias = ndtri(
        np.clip(
            ((draws < mean - 1e-6).mean(axis=0) + (draws <= mean + 1e-6).mean(axis=0)) / 2, 1e-3, 1 - 1e-3
        )
    )
    centred = values - mean[:, None]
    pull = (centred**3).sum(axis=1) / np.maximum(6 * (centred**2).sum(axis=1) ** 1.5, 1e-12)
    bca = (at(ndtr(bias + (bias + z) / (1 - pull * (bias + z)))) for z in (-1.96, 1.96))
    return {
        "t": (mean - half, mean + half),
        "percentile": (low, high),
        "basic": (2 * mean - high, 2 * mean - low),
        "BCa": tuple(bca),
    }


def test_examples_resampled():
    made = []
    for name, (draw, mean) in POPULATIONS.items():
        cells = []
        for n, count in ((43, 8000), (200, 4000), (1000, 2000)):
            chance = np.random.default_rng(n)
            hits = {}
            for part in range(8):
                values = draw(chance, (count // 8, n)).astype(np.float64)
                draws = resample(values, seed=f"{name} {part}")
                found = {**rivals(values, draws), "used": interval(draws, values.mean(axis=1), examples=n)}
                for method, (low, high) in found.items():
                    hits.setdefault(method, []).append((low <= mean) & (mean <= high))
                known = np.ptp(values, axis=1) > 0
                hits.setdefault("known", []).append(known)
            # Where all values are equal ours says that it does not know: neither a hit nor a miss.
            share = {method: np.mean(some) for method, some in hits.items()}
            share["used"] /= share["known"]
            cells.append(share)
        assert min(cells[0]["used"], cells[1]["used"], cells[2]["used"]) > (
            0.94 if "7%" not in name else 0.9
        ), name
        methods = ("t", "percentile", "basic", "BCa", "used")
        made.append(
            (
                name,
                *(percent(cells[0][method]) for method in methods),
                *(percent(one["used"]) for one in cells[1:]),
            )
        )
    show(
        ("values", "t, n = 43", "percentile", "basic", "BCa", "used", "used, n = 200", "used, n = 1000"),
        made,
        error=1.2,
    )


DESIGNS = {  # sds of p, f, p × f, example, p × example, f × example, rest
    "everything": (0.1, 0.1, 0.05, 1, 0.5, 0.5, 0.5),
    "no seed matters": (0, 0, 0, 1, 0, 0, 1),
    "rest alone": (0, 0, 0, 0, 0, 0, 1),
    "seeds on examples": (0, 0, 0, 0, 1, 1, 0.3),
    "pretraining": (1, 0.05, 0.05, 1, 0.5, 0.5, 0.5),
    "fine-tuning": (0.05, 1, 0.05, 1, 0.5, 0.5, 0.5),
    "pretraining and test set": (0.2, 0.001, 0, 1, 0, 0, 0.1),
}


def designed(chance, p, f, n, sds):
    """One table of values, and what its widest interval should cover: with one pretraining seed, this one's mean."""
    shapes = [(p, 1, 1), (1, f, 1), (p, f, 1), (1, 1, n), (p, 1, n), (1, f, n), (p, f, n)]
    effects = [sd * chance.normal(size=shape) for sd, shape in zip(sds, shapes, strict=True)]
    return sum(effects), effects[0].mean() if p == 1 else 0.0


def test_what_is_random():
    made, count = [], 1500
    for p, f, n in ((1, 5, 43), (1, 5, 300), (2, 5, 43), (3, 3, 300), (5, 5, 43)):
        shares = []
        for design, sds in DESIGNS.items():
            chance = np.random.default_rng([p, f, n, *design.encode()])
            hits = []
            for _ in range(count):
                values, target = designed(chance, p, f, n, sds)
                widest = decompose(values).widest
                hits.append(widest.low <= target <= widest.high)
            shares.append(np.mean(hits))
        assert min(shares) > 0.95 - 4 * math.sqrt(0.95 * 0.05 / count)
        made.append((f"{p} × {f} × {n}", f"{percent(min(shares))} to {percent(max(shares))}"))
    show(("seeds × examples", "covered"), made, error=1.0)


def test_power():
    made = []
    for n, level in ((2, 0.05), (3, 0.05), (5, 0.05), (5, 0.002), (10, 0.05)):
        effect = detectable_by(1 / math.sqrt(n), n - 1, level)
        values = np.random.default_rng(n).normal(effect, 1, (40_000, n))
        share = np.mean(stats.ttest_1samp(values, 0, axis=1).pvalue < level)
        assert share == pytest.approx(0.8, abs=0.016)
        made.append((f"{n} seeds, level {level:g}", f"{effect:.2f}", percent(share)))
    show(("design", "effect in sd", "simulated power"), made, error=1.5)


def test_two_seeds_are_covered_exactly():
    """As the fast tests ask, at the precision that this file has time for."""
    rows = np.random.default_rng(0).normal(size=(40_000, 2))
    share = np.mean([one.low <= 0 <= one.high for one in map(over_seeds, rows)])
    assert share == pytest.approx(0.95, abs=3 * math.sqrt(0.95 * 0.05 / 40_000))
