"""From numbers to verdicts. Pure rules; docs/statistics.md says why they are these.

A part is one test. Every part of a claim must hold, so the p-value of a claim is the largest of its parts' (a part with
the wrong sign counts as 1), and Holm corrects for the number of claims that were tested.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Verdict = Literal["reproduced", "direction only", "not reproduced", "underpowered", "not tested"]
Supports = Literal["yes", "direction", "against", "underpowered", "missing"]

ALPHA = 0.05  # for all claims of a study together
WORTH_FINDING = 0.5  # points: the effect a test should be able to find where the paper gives none


def claim_p(parts: Sequence[tuple[float, float]]) -> float:
    """Of parts as (how far beyond the margin, p), missing ones (NaN) left out; NaN if none is there."""
    known = [p if excess > 0 else 1.0 for excess, p in parts if not math.isnan(p)]
    return max(known, default=math.nan)


def level_of_parts(adjusted: Sequence[float]) -> float:
    """The level of single parts in claims that Holm's procedure did not reach: that of the step at which it stopped.

    A claim that is not reproduced then always has a part that falls short of it.
    """
    left = sum(p > ALPHA for p in adjusted)
    return ALPHA / max(1, left)


def sought(paper: float | None, margin: float) -> float:
    """The effect a test should be able to find: the paper's, counted from the margin."""
    return WORTH_FINDING if paper is None else abs(paper - margin)


def supports(excess: float, p: float, *, level: float, detectable: float, effect: float) -> Supports:
    """What one part says. `excess`: the estimate minus its margin; `effect`: what it should be able to find."""
    if math.isnan(p):
        return "missing"
    if p <= level:
        return "yes" if excess > 0 else "against"
    if detectable > effect:
        return "underpowered"
    return "direction" if excess > 0 else "against"


def verdict(parts: Sequence[Supports], p_holm: float) -> Verdict:
    """Of a claim, from what its parts say."""
    if all(one == "missing" for one in parts):
        return "not tested"
    if p_holm <= ALPHA:
        return "reproduced"
    if "against" in parts:
        return "not reproduced"
    return "underpowered" if "underpowered" in parts else "direction only"
