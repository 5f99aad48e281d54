"""Early discarding (`Finetune.discard`): what two stages cost, what they lose, and that their intervals hold."""

import math

import numpy as np
from scipy.special import ndtr, stdtrit

from biphase import Discard
from biphase.study.ledger import best_rates, extension

RATES, SEEDS, NOISE = 6, 5, 0.5
DISCARD = Discard()
SCREENING = len(DISCARD.seeds)


def step_of(lr):
    """The place of a learning rate in a grid that doubles from 1e-5 on."""
    return round(math.log2(lr / 1e-5))


def two_stages(chance):
    """The cost in full fine-tunings, the regret in points, and the coverage, for a model with a random best rate.

    A rate loses half a point for each squared step from the best. Two rates are kept.
    """
    top = chance.uniform(-0.5, RATES - 0.5)
    short: dict[tuple[float, int], float | None] = {}

    def truth(lr):
        return -0.5 * (step_of(lr) - top) ** 2

    def screen(rates):
        for lr in rates:
            scores = truth(lr) + NOISE * chance.normal(size=SCREENING)
            short.update(((lr, seed), float(score)) for seed, score in enumerate(scores))
        return best_rates(short, 2)

    grid = [float(f"{1e-5 * 2.0**step:.3g}") for step in range(RATES)]
    kept = screen(grid)
    if beyond := extension(grid, kept):
        kept = screen(beyond)
    true = np.array([truth(lr) for lr in kept])
    validation, test = true[:, None] + NOISE * chance.normal(size=(2, 2, SEEDS))
    values = np.take_along_axis(test, validation.argmax(axis=0)[None], axis=0)[0]
    first = ndtr((true[0] - true[1]) / (NOISE * math.sqrt(2)))  # the probability that validation chooses it
    expected = first * true[0] + (1 - first) * true[1]
    half = stdtrit(SEEDS - 1, 0.975) * values.std(ddof=1) / math.sqrt(SEEDS)
    cost = len(short) * DISCARD.share + 2 * SEEDS
    return cost, max(map(truth, grid)) - true.max(), abs(values.mean() - expected) <= half


def test_intervals_of_the_second_stage_hold():
    chance = np.random.default_rng([0, 2])
    cost, regret, covered = np.mean([two_stages(chance) for _ in range(400)], axis=0)
    assert 13 <= cost <= 14, "two extended ends cost one fine-tuning"
    assert regret < 0.1
    assert covered > 0.95 - 3 * math.sqrt(0.05 / 400)
