"""Which learning rate a model is reported with. Validation scores decide; nothing else is shown to this file.

Two ways, both reported: each seed with the rate that was best for it (as the paper words it), and all seeds with the
rate whose mean was best. Of equals the lowest rate is taken. A grid with a hole is not chosen from: the missing
fine-tuning might have been the best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

Cell = tuple[float, int]  # learning rate, seed


@dataclass(frozen=True)
class Choice:
    by_mean: float
    by_seed: dict[int, float]


def choose(validation: Mapping[Cell, float]) -> Choice | None:
    """The rates chosen by a full grid of validation scores; None if some are missing."""
    rates = sorted({lr for lr, _ in validation})
    seeds = sorted({seed for _, seed in validation})
    if not rates or len(validation) != len(rates) * len(seeds):
        return None

    def mean(lr: float) -> float:
        # Exact before it is rounded: the same scores in another order of seeds are equals.
        return math.fsum(validation[lr, seed] for seed in seeds) / len(seeds)

    return Choice(
        by_mean=max(rates, key=mean),
        by_seed={seed: max(rates, key=lambda lr, seed=seed: validation[lr, seed]) for seed in seeds},
    )
