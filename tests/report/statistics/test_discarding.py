"""Early discarding: what two stages cost, what they lose, and that their intervals hold."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
from page_tables import percent, show
from scipy.special import ndtr, stdtrit

from biphase.report.statistics.discarding import cost, extension, kept_rates

TRIALS = Path(__file__).parents[3] / "docs" / "results" / "replica" / "trials.csv"
RATES, SEEDS, SCREENING, SHARE = 6, 5, 2, 0.25


def test_the_best_rates_are_kept():
    validation = np.array([[1.0, 2.0], [5.0, 4.0], [3.0, 4.0], [9.0, np.nan]])
    assert kept_rates(validation, 2) == (1, 2)
    assert kept_rates(validation, 4) == (0, 1, 2, 3)
    assert kept_rates(np.ones((3, 2)), 1) == (0,)
    with pytest.raises(ValueError, match="cannot be kept"):
        kept_rates(validation, 5)


def test_a_kept_end_extends_the_grid():
    rates = (1e-4, 2e-4, 4e-4)
    assert extension(rates, (1,)) == ()
    assert extension(rates, (1, 2)) == pytest.approx((8e-4,))
    assert extension(rates, (0, 2)) == pytest.approx((5e-5, 8e-4))
    assert extension((1e-4,), (0,)) == ()


def test_thirteen_runs_instead_of_thirty():
    assert cost(RATES, SEEDS, 2, SCREENING, SHARE) == 13


def two_stages(studies, moved, keep, noise=0.5, validation_noise=0.5):
    """The regret in points, and the coverage of the 95% interval, for models with random best rates.

    A rate loses half a point for each squared step from the best. In the short schedule the best rate is `moved`
    steps higher. Where a rate at the end of the grid is kept, the next one beyond it is tried in both stages.
    """
    chance = np.random.default_rng([round(10 * moved), keep])
    regret, covered = [], []
    for _ in range(studies):
        top = chance.uniform(-0.5, RATES - 0.5)
        places = list(range(RATES))
        score = dict.fromkeys(places, 0.0)
        kept: tuple[int, ...] = ()
        for _ in range(2):  # the second time, with the extended grid
            for place in places:
                short = -0.5 * (place - top - moved) ** 2 + noise * chance.normal(size=SCREENING)
                score[place] = score.get(place) or float(short.mean())
            table = np.array([[score[place]] for place in places])
            kept = tuple(places[one] for one in kept_rates(table, keep))
            places = sorted({*places, *(end for end in (kept[0] - 1, kept[-1] + 1) if not 0 <= end < RATES)})
        best = max(-0.5 * (place - top) ** 2 for place in range(RATES))
        true = np.array([-0.5 * (place - top) ** 2 for place in kept])
        validation = true[:, None] + validation_noise * chance.normal(size=(keep, SEEDS))
        test = true[:, None] + noise * chance.normal(size=(keep, SEEDS))
        values = np.take_along_axis(test, validation.argmax(axis=0)[None], axis=0)[0]
        half = stdtrit(SEEDS - 1, 0.975) * values.std(ddof=1) / math.sqrt(SEEDS)
        regret.append(best - true.max())
        covered.append(abs(values.mean() - expected(true, validation_noise)) <= half)
    return float(np.mean(regret)), float(np.mean(covered))


def expected(true, noise):
    """The mean score of the rate that validation chooses, of one or two rates."""
    if len(true) == 1:
        return true[0]
    first = ndtr((true[0] - true[1]) / (noise * math.sqrt(2)))
    return first * true[0] + (1 - first) * true[1]


def test_intervals_of_the_second_stage_hold():
    regret, covered = two_stages(400, 0.0, 2)
    assert regret < 0.1
    assert covered > 0.95 - 3 * math.sqrt(0.05 / 400)


def replica():
    """Validation and test scores (rates, seeds) of every model and task of the replica with three rates."""
    cells: dict[tuple[str, str], dict[tuple[str, str], tuple[float, float]]] = {}
    with TRIALS.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            scores = float(row["validation"]), float(row["test"])
            cells.setdefault((row["task"], row["model"]), {})[row["rate"], row["seed"]] = scores
    for (task, _), some in cells.items():
        rates, seeds = (sorted({key[which] for key in some}) for which in (0, 1))
        if len(rates) == 3 and len(some) == 9:
            yield task, np.array([[some[rate, seed] for seed in seeds] for rate in rates])


def replica_regret():
    """By task: test points lost when one seed screens three rates, two are kept, and the other seeds are reported."""
    lost: dict[str, list[float]] = {}
    for task, scores in replica():
        for screen in range(3):
            fresh = [seed for seed in range(3) if seed != screen]
            kept = list(kept_rates(scores[:, [screen], 0], 2))
            results = []
            for rates in (list(range(3)), kept):
                choice = scores[rates][:, fresh, 0].argmax(axis=0)
                results.append(scores[rates][choice, fresh, 1].mean())
            lost.setdefault(task, []).append(results[0] - results[1])
    return lost


def test_the_replica_would_have_lost_little():
    lost = replica_regret()
    assert set(lost) == {"sst2", "conll2003", "squad", "nq_boolq"}
    assert max(np.mean(some) for some in lost.values()) < 0.2


@pytest.mark.campaign
def test_two_stages():
    rows = []
    for moved in (0.0, 0.5, 1.0, 2.0):
        for keep in (1, 2):
            regret, covered = two_stages(3000, moved, keep)
            assert covered > 0.95 - 4 * math.sqrt(0.05 / 3000)
            full = cost(RATES, SEEDS, keep, SCREENING, SHARE)
            rows.append((f"{moved:.1f}", f"{keep}", f"{full:.1f} of 30.0", f"{regret:.2f}", percent(covered)))
    show(
        ("short schedule's best rate, steps higher", "kept", "runs", "regret, points", "covered"),
        rows,
        error=1.6,
    )
    lost = replica_regret()
    rows = [(task, f"{np.mean(some):.2f}", f"{np.max(some):.2f}") for task, some in lost.items()]
    show(("replica, two of three rates kept", "mean regret, points", "largest"), rows, error=0.01)
