"""Where curves cross, where one has its optimum: sets that hold what they say, and say when they do not know."""

import math

import numpy as np
import pytest
from page_tables import percent, show

from biphase.report.statistics.curves import (
    FittedCurve,
    Located,
    crossing,
    fit_cells,
    fit_seeds,
    nearly_best,
    next_point,
    optimum,
)

REGION = (0.0, 1.0)
STEPS = np.log(np.array([100.0, 200, 500, 1000, 2000, 3800]))
WITHIN = (float(STEPS[0]), float(STEPS[-1]))


def known(coefficients, sd, df=20.0):
    """A curve whose coefficients have independent noise of this sd."""
    size = len(coefficients)
    return FittedCurve(np.array(coefficients, dtype=float), (np.eye(size) * sd**2, df), None, "seeds")


# ---------------------------------------------------------------- crossing


def test_a_clear_crossing_is_bounded():
    found = crossing(known([-1, 2], 0.05), REGION)
    assert found.estimate == pytest.approx(0.5)
    assert found.bounded
    # Fieller's limits: (a + b x)² = t² (v + v x²)
    low, high = found.pieces[0]
    for x in (low, high):
        assert (-1 + 2 * x) ** 2 == pytest.approx(2.086**2 * 0.05**2 * (1 + x * x), rel=0.05)


def test_a_crossing_without_noise_is_located():
    found = crossing(known([-1, 2.001], 0.0), REGION)
    ((low, high),) = found.pieces
    assert low < 1 / 2.001 < high
    assert high - low < 0.01


def test_what_is_not_determined_is_not_bounded():
    late = crossing(known([-1, 1.1], 0.1), REGION)
    assert late.open_above
    assert not late.open_below
    assert not late.bounded
    unknown = crossing(known([0.0, 0.01], 1.0), REGION)
    assert unknown.pieces == (REGION,)
    never = crossing(known([1, 1], 0.05), REGION)
    assert (never.pieces, never.bounded) == ((), False)
    assert math.isnan(never.estimate)


def test_two_crossings_are_two_pieces():
    found = crossing(known([0.15, -0.8, 0.8], 0.004), REGION)
    assert len(found.pieces) == 2
    assert found.estimate == pytest.approx(0.75, abs=0.02)


def gap_of(shape, noise, chance, seeds=3):
    """Means and variances of a gap at each number of steps."""
    values = shape(STEPS) + noise * chance.normal(size=(seeds, STEPS.size))
    return values.mean(axis=0), np.full(STEPS.size, noise**2 / seeds)


GAPS = {  # gap over ln steps, degree of the fit, where it is 0
    "linear, steep": (lambda x: 3 * (x - 6.5), 1, 6.5),
    "linear, flat": (lambda x: 0.3 * (x - 6.5), 1, 6.5),
    "linear, late": (lambda x: 1.5 * (x - 8.0), 1, 8.0),
    "levelling off": (lambda x: 4 * (np.exp(-(5.5 - 4.6)) - np.exp(-(x - 4.6))), 2, 5.5),
    "levelling off, as a line": (lambda x: 4 * (np.exp(-(5.5 - 4.6)) - np.exp(-(x - 4.6))), 1, 5.5),
}


def crossings(shape, degree, at, studies):
    """Shares of studies: the set holds the crossing; it is bounded; seeds that cross agree with it by their t-interval."""
    chance, hits, bounded, naive = np.random.default_rng(degree), 0, 0, []
    for _ in range(studies):
        mean, variance = gap_of(shape, 1.0, chance)
        found = crossing(fit_cells(STEPS, mean, variance, 20.0, degree, "seeds"), WITHIN)
        hits += any(low - 0.01 <= at <= high + 0.01 for low, high in found.pieces)
        bounded += found.bounded
        naive.append(by_seed(shape, at, chance))
    known = [one for one in naive if one is not None]
    return hits / studies, bounded / studies, np.mean(known) if known else math.nan


def by_seed(shape, at, chance):
    """Whether the t-interval over the seeds that cross at all holds the crossing; None: fewer than two cross."""
    values = shape(STEPS) + chance.normal(size=(3, STEPS.size))
    places = []
    for row in values:
        turns = np.flatnonzero((row[:-1] <= 0) & (row[1:] > 0))
        if turns.size:
            last = turns[-1]
            places.append(np.interp(0.0, row[last : last + 2], STEPS[last : last + 2]))
    if len(places) < 2:
        return None
    half = {2: 12.706, 3: 4.303}[len(places)] * np.std(places, ddof=1) / math.sqrt(len(places))
    return abs(np.mean(places) - at) <= half


def test_the_set_holds_the_crossing():
    held, bounded, _ = crossings(*GAPS["linear, steep"], 150)
    assert held > 0.95 - 3 * math.sqrt(0.05 / 150)
    assert bounded > 0.9


def test_scatter_about_the_line_widens_the_set():
    smooth = fit_cells([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], np.full(5, 0.01), 20.0, 1, "")
    bent = fit_cells([0, 1, 2, 3, 4], [0, 1, 4, 9, 16], np.full(5, 0.01), 20.0, 1, "")
    assert bent.scatter[0][1, 1] > 50 * smooth.scatter[0][1, 1]
    assert (smooth.scatter[1], bent.scatter[1]) == (20.0, 3)
    with pytest.raises(ValueError, match="do not determine"):
        fit_cells([1, 1], [0, 1], [1, 1], 5.0, 1, "")


# ---------------------------------------------------------------- optimum

SPLITS = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
HILLS = {  # curvature, where it would be flat, the best split within the region
    "inside, 8 points": (-8.0, 0.4, 0.4),
    "inside, 2 points": (-2.0, 0.4, 0.4),
    "at the end": (-8.0, 0.0, 0.0),
    "beyond the end": (-8.0, -0.3, 0.0),
    "a valley": (8.0, 0.8, 0.0),
}


def trunks(chance, seeds, curvature, top, shapes):
    """Scores (seeds, splits): each trunk has its level (sd 1) and, by `shapes`, a tilt and a bend; noise of 0.5."""
    own = [chance.normal(size=(seeds, 1)) for _ in range(3)]
    tilt = shapes * (own[1] * (SPLITS - 0.5) + 2 * own[2] * np.square(SPLITS - 0.5))
    noise = 0.5 * chance.normal(size=(seeds, SPLITS.size))
    return 80 + curvature * np.square(SPLITS - top) + own[0] + tilt + noise


def found_splits(seeds, hill, shapes, studies, loss=1.0):
    """Shares: the optimum is covered; the mean length; nothing called nearly best loses more; anything is."""
    curvature, top, peak = hill
    chance, tally = np.random.default_rng([seeds, round(10 * shapes)]), []

    def lost(x):
        return curvature * ((peak - top) ** 2 - (x - top) ** 2)

    for _ in range(studies):
        curve = fit_seeds(SPLITS, trunks(chance, seeds, curvature, top, shapes), 2)
        where = optimum(curve, REGION)
        flat = nearly_best(curve, REGION, loss)
        held = any(low - 1e-3 <= peak <= high + 1e-3 for low, high in where.pieces)
        length = sum(high - low for low, high in where.pieces)
        right = all(lost(end) <= loss + 1e-9 for piece in flat for end in piece)
        tally.append((held, length, right, bool(flat)))
    return np.mean(tally, axis=0)


def test_the_best_split_is_found_and_bounded():
    curve = fit_seeds(SPLITS, 80 - 8 * np.square(SPLITS - 0.4) + np.array([[0.0], [1], [2]]) + bumps(), 2)
    where = optimum(curve, REGION)
    assert where.estimate == pytest.approx(0.4, abs=0.05)
    assert where.bounded
    assert curve.covers == "pretraining seeds"
    low, high = nearly_best(curve, REGION, 1.0)[0]
    assert 0.0 < low < 0.4 < high < 0.8
    assert nearly_best(curve, REGION, 1e-6) == ()


def bumps():
    return 0.05 * np.random.default_rng(1).normal(size=(3, SPLITS.size))


def test_few_seeds_answer_for_themselves_only():
    table = 80 - 8 * np.square(SPLITS - 0.4) + bumps()
    assert "this pretraining seed" in fit_seeds(SPLITS, table[:1], 2).covers
    assert "two" in fit_seeds(SPLITS, table[:2], 2).covers
    with pytest.raises(ValueError, match="scatter"):
        fit_seeds(SPLITS[:3], table[:1, :3], 2)


def test_four_published_splits_do_not_locate_the_best():
    """The paper's 610m models at 42k steps on sequence classification; single runs, so one trunk."""
    shares, scores = [0, 10 / 42, 21 / 42, 32 / 42], [87.00, 87.85, 87.57, 87.06]
    curve = fit_seeds(shares, [scores], 2)
    where = optimum(curve, (0.0, shares[-1]))
    assert where.estimate == pytest.approx(0.376, abs=0.002)
    assert where.pieces == ((0.0, pytest.approx(shares[-1])),)
    assert nearly_best(curve, where.region, 0.5) == ()
    gains = next_point(shares, (0.1, 0.4, 0.6), where)
    assert max(gains, key=gains.get) == 0.4


def test_noise_alone_locates_nothing():
    table = 80 + np.random.default_rng(2).normal(size=(3, SPLITS.size))
    where = optimum(fit_seeds(SPLITS, table, 2), REGION)
    assert not where.bounded
    assert sum(high - low for low, high in where.pieces) > 0.8


@pytest.mark.parametrize("hill", ["inside, 8 points", "beyond the end"])
def test_the_optimum_is_covered(hill):
    held, _, right, _ = found_splits(3, HILLS[hill], 0.5, 80)
    assert min(held, right) > 0.95 - 3 * math.sqrt(0.05 / 80)


def test_the_next_split_is_where_it_helps():
    where = Located(0.4, ((0.3, 0.5),), REGION)
    gains = next_point(SPLITS, (0.1, 0.4, 0.6), where)
    assert all(gain > 0 for gain in gains.values())
    assert gains[0.1] == max(gains.values())


@pytest.mark.campaign
def test_crossings():
    rows = []
    for name, gap in GAPS.items():
        held, bounded, naive = crossings(*gap, 2000)
        if "as a line" not in name:
            assert held > 0.95 - 4 * math.sqrt(0.05 / 2000), name
        rows.append((name, percent(held), percent(bounded), percent(naive)))
    show(("gap over ln steps", "Fieller", "bounded", "seeds that cross"), rows, error=2.0)


@pytest.mark.campaign
def test_optima():
    rows = []
    for name, hill in HILLS.items():
        for seeds, shapes in ((3, 0.0), (3, 0.5), (3, 2.0), (5, 0.5), (5, 2.0)):
            held, length, right, said = found_splits(seeds, hill, shapes, 600)
            assert min(held, right) > 0.92, (name, seeds, shapes)
            rows.append(
                (
                    name,
                    f"{seeds}",
                    f"{shapes:.1f}",
                    percent(held),
                    f"{length:.2f}",
                    percent(right),
                    percent(said),
                )
            )
    header = (
        "best split", "seeds", "sd of shapes", "covered", "mean length", "nearly best is right", "says nearly best",
    )  # fmt: skip
    show(header, rows, error=4.0)
