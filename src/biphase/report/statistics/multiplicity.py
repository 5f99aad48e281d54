"""Many tests at once: Holm's adjustment, under which the chance of any false finding stays below the level.

It asks nothing of how the tests depend on each other, which suits claims that share models, tasks and seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values in the order given. NaN, a test that was not made, stays NaN and does not count.

    The smallest is multiplied by the number of tests, the next by one less, and so on; none falls below a smaller one.
    """
    adjusted = [math.nan] * len(p_values)
    made = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    largest = 0.0
    for rank, (p, place) in enumerate(made):
        if not 0 <= p <= 1:
            raise ValueError(f"a p-value of {p:g} is not between 0 and 1")
        largest = max(largest, min(1.0, (len(made) - rank) * p))
        adjusted[place] = largest
    return adjusted
