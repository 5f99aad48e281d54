"""How much a score depends on a choice: its spread over learning rates, or over masking ratios, seed by seed.

A spread holds noise too. Of K equally good choices with noise of sd σ each, max − min is 1.69 σ on average for K = 3,
2.06 σ for 4 and 2.53 σ for 6. So a spread is not compared with 0 but with that of another model over the same choices,
paired by seed, where noise of the same size is on both sides.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def spread(stack: Floats) -> Floats:
    """max − min over the first axis (choices, …): NaN where any is missing, or where there is no choice."""
    return (
        np.full(stack.shape[1:], np.nan) if len(stack) < 2 else np.max(stack, axis=0) - np.min(stack, axis=0)
    )


def rate_spread(by_rate: Floats) -> Floats:
    """(pretraining seeds, learning rates, fine-tuning seeds) → max − min over rates, of each pair of seeds."""
    return spread(np.moveaxis(by_rate, 1, 0))
