"""Early discarding (`Finetune.discard`): what two stages cost, what they lose, and that their intervals hold."""

import math

import numpy as np
from scipy.special import ndtr, stdtrit

from biphase import Discard
from biphase.study.ledger import best_rates, extension

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
