"""Where curves cross, where one has its optimum: sets that hold what they say, and say when they do not know."""

import math

import numpy as np
import pytest

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


def test_the_set_holds_the_crossing():
    """A gap that rises in a straight line; six numbers of steps, three seeds, a noise of 1."""
    chance, found = np.random.default_rng(1), []
    for _ in range(150):
        values = 3 * (STEPS - 6.5) + chance.normal(size=(3, STEPS.size))
        curve = fit_cells(STEPS, values.mean(axis=0), np.full(STEPS.size, 1 / 3), 20.0, 1, "seeds")
        where = crossing(curve, WITHIN)
        found.append((any(low - 0.01 <= 6.5 <= high + 0.01 for low, high in where.pieces), where.bounded))
    held, bounded = np.mean(found, axis=0)
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


@pytest.mark.parametrize(("top", "peak"), [(0.4, 0.4), (-0.3, 0.0)])
def test_the_optimum_is_covered(top, peak):
    """Inside of the region and beyond its end. Trunks differ in level, tilt and bend; noise of half a point."""
    chance, found = np.random.default_rng([3, 5]), []

    def truth(x):
        return 80 - 8 * np.square(x - top)

    for _ in range(80):
        level, tilt, bend = (chance.normal(size=(3, 1)) for _ in range(3))
        shapes = 0.5 * (tilt * (SPLITS - 0.5) + 2 * bend * np.square(SPLITS - 0.5))
        curve = fit_seeds(SPLITS, truth(SPLITS) + level + shapes + 0.5 * chance.normal(size=(3, 5)), 2)
        held = any(low - 1e-3 <= peak <= high + 1e-3 for low, high in optimum(curve, REGION).pieces)
        ends = [end for piece in nearly_best(curve, REGION, 1.0) for end in piece]
        found.append((held, all(truth(peak) - truth(end) <= 1.0 + 1e-9 for end in ends)))
    assert np.min(np.mean(found, axis=0)) > 0.95 - 3 * math.sqrt(0.05 / 80)


def test_the_next_split_is_where_it_helps():
    where = Located(0.4, ((0.3, 0.5),), REGION)
    gains = next_point(SPLITS, (0.1, 0.4, 0.6), where)
    assert all(gain > 0 for gain in gains.values())
    assert gains[0.1] == max(gains.values())
