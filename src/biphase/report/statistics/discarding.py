"""Early discarding of learning rates: screen all of them briefly, fine-tune a few in full.

Stage 1 fine-tunes every rate with screening seeds, which are never reported, for a part of the schedule, and ranks the
rates by validation. Stage 2 fine-tunes the best k with fresh seeds. Stage 2 is independent of stage 1, so intervals
over its seeds hold for the kept rates; and with one k for all models, "best of k rates" is the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from biphase.report.statistics.intervals import Floats


def kept_rates(validation: Floats, keep: int) -> tuple[int, ...]:
    """The positions of the best rates by mean validation score (rates, seeds), ascending. A failed seed is NaN.

    Of equal means the first is kept; a rate with any failed seed ranks behind all others.
    """
    if not 1 <= keep <= len(validation):
        raise ValueError(f"{keep} of {len(validation)} learning rates cannot be kept")
    mean = np.where(np.isfinite(validation).all(axis=-1), np.nan_to_num(validation).mean(axis=-1), -np.inf)
    return tuple(sorted(int(one) for one in np.argsort(-mean, kind="stable")[:keep]))


def extension(rates: Sequence[float], kept: Sequence[int]) -> tuple[float, ...]:
    """The rates by which a grid is extended: one beyond each end that was kept, at the distance of its neighbour."""
    if len(rates) < 2:
        return ()
    lower = (rates[0] ** 2 / rates[1],) if 0 in kept else ()
    upper = (rates[-1] ** 2 / rates[-2],) if len(rates) - 1 in kept else ()
    return lower + upper


def cost(rates: int, seeds: int, keep: int, screening: int, share: float) -> float:
    """The cost of both stages in full fine-tunings; without discarding it is rates × seeds."""
    return rates * screening * share + keep * seeds
