"""Early discarding (`Finetune.discard`): what two stages cost, what they lose, and that their intervals hold."""

import csv
import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from page_tables import percent, show
from scipy.special import ndtr, stdtrit

from biphase import Discard
from biphase.study.ledger import best_rates, extension

TRIALS = Path(__file__).parents[3] / "docs" / "results" / "replica" / "trials.csv"
RATES, SEEDS = 6, 5
DISCARD = Discard()
SCREENING, SHARE = len(DISCARD.seeds), DISCARD.share


def rate(step):
    """The learning rate so many steps of the grid above its lowest."""
    return float(f"{1e-5 * 2.0**step:.3g}")


def step_of(lr):
    return round(math.log2(lr / 1e-5))


def covers(values, truth):
    """Whether the 95% t-interval of a mean over seeds (…, seeds) holds the truth."""
    half = stdtrit(SEEDS - 1, 0.975) * values.std(axis=-1, ddof=1) / math.sqrt(SEEDS)
    return np.abs(values.mean(axis=-1) - truth) <= half


# ---------------------------------------------------------------- synthetic scores


def two_stages(studies, moved, keep, noise=0.5, validation_noise=0.5):
    """The cost in full fine-tunings, the regret in points, and the coverage, for models with random best rates.

    A rate loses half a point for each squared step from the best. In the short schedule the best rate is `moved`
    steps higher.
    """
    chance = np.random.default_rng([round(10 * moved), keep])
    costs, regret, covered = [], [], []
    for _ in range(studies):
        top = chance.uniform(-0.5, RATES - 0.5)
        short: dict[tuple[float, int], float | None] = {}

        def screen(rates, top=top, short=short):
            for lr in rates:
                scores = -0.5 * (step_of(lr) - top - moved) ** 2 + noise * chance.normal(size=SCREENING)
                short.update(((lr, seed), float(score)) for seed, score in enumerate(scores))
            return best_rates(short, keep)

        grid = [rate(step) for step in range(RATES)]
        kept = screen(grid)
        if beyond := extension(grid, kept):
            kept = screen(beyond)
        best = max(-0.5 * (step - top) ** 2 for step in range(RATES))
        true = np.array([-0.5 * (step_of(lr) - top) ** 2 for lr in kept])
        validation = true[:, None] + validation_noise * chance.normal(size=(keep, SEEDS))
        test = true[:, None] + noise * chance.normal(size=(keep, SEEDS))
        values = np.take_along_axis(test, validation.argmax(axis=0)[None], axis=0)[0]
        costs.append(len(short) * SHARE + keep * SEEDS)
        regret.append(best - true.max())
        covered.append(covers(values, expected(true, validation_noise)))
    return float(np.mean(costs)), float(np.mean(regret)), float(np.mean(covered))


def expected(true, noise):
    """The mean score of the rate that validation chooses, of one or two rates."""
    if len(true) == 1:
        return true[0]
    first = ndtr((true[0] - true[1]) / (noise * math.sqrt(2)))
    return first * true[0] + (1 - first) * true[1]


def test_intervals_of_the_second_stage_hold():
    cost, regret, covered = two_stages(400, 0.0, 2)
    assert 13 <= cost <= 14, "two extended ends cost one fine-tuning"
    assert regret < 0.1
    assert covered > 0.95 - 3 * math.sqrt(0.05 / 400)


# ---------------------------------------------------------------- the replica's scores
# Its ledger has every rate and seed at the full schedule. A cell's true scores are its means over seeds; its noise is
# drawn from the residuals of all cells of the task, validation and test of one fine-tuning together. The short schedule
# is not in the ledger: it is the full one's validation with `louder` times its noise, and with the scores of the rates
# `moved` steps below, because short schedules prefer higher rates.


def replica():
    """Task → validation and test scores (models, rates, seeds, 2) of the replica's models with three rates."""
    cells: dict[tuple[str, str], dict[tuple[str, str], tuple[float, float]]] = {}
    with TRIALS.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            scores = float(row["validation"]), float(row["test"])
            cells.setdefault((row["task"], row["model"]), {})[row["rate"], row["seed"]] = scores
    found: dict[str, list[np.ndarray]] = {}
    for (task, _), some in cells.items():
        rates, seeds = (sorted({key[which] for key in some}, key=float) for which in (0, 1))
        if len(rates) == 3 and len(some) == 9:
            found.setdefault(task, []).append(
                np.array([[some[rate, seed] for seed in seeds] for rate in rates])
            )
    return {task: np.array(some) for task, some in found.items()}


def on_the_replica(scores, louder, moved, keep=2, studies=2_000):
    """The regret of each model in test points, and the coverage, if `keep` of its three rates had been kept.

    The last number is the coverage if all rates had been fine-tuned.
    """
    chance = np.random.default_rng([louder, moved, keep])
    true = scores.mean(axis=2)  # (models, rates, validation and test)
    residuals = (scores - true[:, :, None]).reshape(-1, 2) * math.sqrt(
        scores.shape[2] / (scores.shape[2] - 1)
    )

    def noise(*shape):
        return residuals[chance.integers(0, len(residuals), shape)]

    def chosen(of_model, rates, seeds):
        """Test scores at the rate that validation chooses for each seed: (studies, seeds)."""
        drawn = of_model[rates, None] + noise(studies, len(rates), seeds)
        choice = drawn[..., 0].argmax(axis=1)
        return np.take_along_axis(drawn[..., 1], choice[:, None], axis=1)[:, 0]

    regret, covered, with_all = [], [], []
    for of_model in true:
        subsets = list(combinations(range(3), keep))
        expectation = {rates: chosen(of_model, list(rates), 20).mean() for rates in (*subsets, (0, 1, 2))}
        steps = np.maximum(np.arange(3) - moved, 0)
        short = of_model[steps, None, 0] + louder * noise(studies, 3, SCREENING)[..., 0]
        kept = [best_rates(_cells(table), keep) for table in short]
        regret.append(expectation[0, 1, 2] - np.mean([expectation[rates] for rates in kept]))
        for rates in subsets:
            hits = covers(chosen(of_model, list(rates), SEEDS), expectation[rates])
            covered += [float(hits.mean())] * kept.count(rates)
        every = [0, 1, 2]
        with_all.append(covers(chosen(of_model, every, SEEDS), expectation[0, 1, 2]).mean())
    return regret, float(np.mean(covered)), float(np.mean(with_all))


def _cells(table):
    return {(place, seed): float(score) for (place, seed), score in np.ndenumerate(table)}


def test_the_replica_would_have_lost_little():
    scores = replica()
    assert set(scores) == {"sst2", "conll2003", "squad", "nq_boolq"}
    for task, some in scores.items():
        regret, covered, with_all = on_the_replica(some, louder=1, moved=0, studies=200)
        assert np.mean(regret) < 0.2, task
        assert covered > with_all - 0.05, task


# ---------------------------------------------------------------- tables of docs/statistics.md


@pytest.mark.campaign
def test_two_stages():
    rows = []
    for moved in (0.0, 0.5, 1.0, 2.0):
        for keep in (1, 2):
            cost, regret, covered = two_stages(3000, moved, keep)
            assert covered > 0.95 - 4 * math.sqrt(0.05 / 3000)
            rows.append((f"{moved:.1f}", f"{keep}", f"{cost:.1f} of 30.0", f"{regret:.2f}", percent(covered)))
    show(
        ("short schedule's best rate, steps higher", "kept", "runs", "regret, points", "covered"),
        rows,
        error=1.6,
    )
    rows = []
    for task, scores in replica().items():
        for louder, moved in ((1, 0), (4, 0), (4, 1)):
            regret, covered, with_all = on_the_replica(scores, louder, moved)
            points = (f"{round(value, 2) + 0.0:.2f}" for value in (np.mean(regret), max(regret)))
            rows.append((task, f"×{louder}", f"{moved}", *points, percent(covered), percent(with_all)))
    show(
        ("replica, two of three rates kept", "noise of the short schedule", "its best rate, steps higher",
         "mean regret, points", "largest", "covered", "covered with all rates"),
        rows,
        error=0.01,
    )  # fmt: skip
