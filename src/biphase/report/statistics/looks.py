"""Planned looks: a study may be judged at declared numbers of seeds, and still be wrong no more often than it says.

Looking again after every new seed, until something is significant, finds effects that are not there. If the looks are
declared before results, each may spend a part of the error rate (Lan and DeMets 1983). A look then tests at the level
that was spent since the look before: the probability of an error at any look is at most the sum. The usual boundaries
are a little higher. They follow from the joint normal distribution of the looks, and with t-tests of 3, 5 and 10 seeds
they are wrong up to 1.2 times as often as declared; the sum holds for any test, and for Holm's procedure over claims.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Spending = Literal["late", "even"]


@dataclass(frozen=True)
class Looks:
    """Numbers of seeds at which a study is judged, the last one final.

    `late` spends little before the end, as O'Brien and Fleming's boundaries; `even` spends about alike on every seed,
    as Pocock's, for studies that hope to stop early.
    """

    seeds: tuple[int, ...]
    spending: Spending = "late"
    alpha: float = 0.05  # one-sided

    def __post_init__(self) -> None:
        if not self.seeds or min(self.seeds) < 2 or any(one >= other for one, other in pairwise(self.seeds)):
            raise ValueError(f"looks at {self.seeds} seeds: increasing numbers of two or more are expected")

    def level(self, seeds: int) -> float:
        """The level of the tests at the look with this many seeds."""
        if seeds not in self.seeds:
            raise ValueError(
                f"no look is planned at {seeds} seeds, only at {', '.join(map(str, self.seeds))}"
            )
        before = max((one for one in self.seeds if one < seeds), default=0)
        return self.spent(seeds) - self.spent(before)

    def spent(self, seeds: int) -> float:
        """The error rate spent up to this many seeds."""
        from scipy.special import ndtr, ndtri

        share = min(1.0, seeds / self.seeds[-1])
        if not share:
            return 0.0
        if self.spending == "late":
            return float(2 * ndtr(ndtri(self.alpha / 2) / math.sqrt(share)))
        return self.alpha * math.log1p((math.e - 1) * share)
