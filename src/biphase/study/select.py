"""The choice of the learning rate that a model is reported with, from validation scores only.

Two rules, both reported: per seed, the rate that was best for it (as in the paper), and one rate for all seeds,
with the best mean. Ties go to the lowest rate. No choice is made from an incomplete grid, since the missing
fine-tuning might have been the best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

Cell = tuple[float, int]  # (learning rate, seed)


@dataclass(frozen=True)
class Choice:
    by_mean: float
    by_seed: dict[int, float]


def choose(validation: Mapping[Cell, float]) -> Choice | None:
    """Choose learning rates from a full grid of validation scores; None if some are missing."""
    rates = sorted({lr for lr, _ in validation})
    seeds = sorted({seed for _, seed in validation})
    if not rates or len(validation) != len(rates) * len(seeds):
        return None

    def mean(lr: float) -> float:
        # `fsum` is exact, so that the order of seeds does not break ties.
        return math.fsum(validation[lr, seed] for seed in seeds) / len(seeds)

    return Choice(
        by_mean=max(rates, key=mean),
        by_seed={seed: max(rates, key=lambda lr, seed=seed: validation[lr, seed]) for seed in seeds},
    )
