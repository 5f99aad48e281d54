"""Where ticks stand: at round numbers, with labels no nearer to each other than a narrow panel allows."""

from __future__ import annotations

import math
from collections.abc import Iterable

from biphase.report.figures.description import Numbers

MOST = 6  # ticks on an axis of one panel among four


def from_zero(last: float) -> Numbers:
    """Round steps from 0 up to `last`."""
    if last <= 0:
        return (0.0,)
    rough = last / (MOST - 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * many for many in (1, 2, 5, 10) if unit * many >= rough)
    return tuple(step * n for n in range(int(last / step + 1e-9) + 1))


def on_log(values: Iterable[float]) -> Numbers:
    """Round numbers between the least and the greatest of these: 1, 2, 5 or 1, 3 of each power of ten, or less."""
    known = [value for value in values if math.isfinite(value) and value > 0]
    if not known:
        return ()
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    for digits in ((1, 2, 5), (1, 3), (1,)):
        every = [digit * 10.0**power for power in range(low, high + 1) for digit in digits]
        ticks = tuple(one for one in every if min(known) <= one * 1.0001 and one <= max(known) * 1.0001)
        if len(ticks) <= MOST:
            return ticks
    return ticks[:: -(-len(ticks) // MOST)]


def spaced(ticks: Numbers, labels: Iterable[str], apart: float, *, log: bool = False) -> tuple[str, ...]:
    """The labels, but for those too near to the one before: `apart` is a share of the axis."""
    places = [math.log10(tick) for tick in ticks] if log else list(ticks)
    whole = (max(places) - min(places)) if places else 0.0
    made: list[str] = []
    last = -math.inf
    for place, label in zip(places, labels, strict=True):
        near = place - last < apart * whole
        made.append("" if near else label)
        last = last if near else place
    return tuple(made)
