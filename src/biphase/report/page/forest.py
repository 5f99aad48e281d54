"""The parts of a claim as a forest plot: one small drawing for each row of its table, all on one scale.

A dot is our estimate with its interval over seeds, a pale bar the interval over test examples, a hollow diamond the
paper's number, a dashed line the margin that must be exceeded. Intervals that would squeeze everything else (two seeds
give very long ones) are cut, and an arrow says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from markupsafe import Markup

from biphase.report.claims import Part
from biphase.report.numerals import interval, signed

WIDTH, HEIGHT = 210, 24
EDGE = 10  # room for half a diamond and the arrows
LONGEST = 2.5  # intervals count for the scale up to so many times what the points span


@dataclass(frozen=True)
class Mark:
    """What one row shows, in points."""

    mean: float
    low: float = math.nan
    high: float = math.nan
    examples: tuple[float, float] | None = None
    paper: float | None = None
    margin: float = 0.0


def mark(part: Part) -> Mark:
    seeds = part.estimate
    return Mark(seeds.mean, seeds.low, seeds.high, part.examples, part.paper, part.margin)


class Scale:
    """Points of percent → pixels, the same for all rows of a table."""

    def __init__(self, marks: Iterable[Mark], width: int = WIDTH) -> None:
        self.width = width
        every = list(marks)
        points = [0.0, *(value for one in every for value in _known(one.mean, one.paper, one.margin))]
        low, high = min(points), max(points)
        reach = LONGEST * ((high - low) or 1.0)
        ends = [end for one in every for end in _known(one.low, one.high)]
        self.low = min([low, *(max(end, low - reach) for end in ends)])
        self.high = max([high, *(min(end, high + reach) for end in ends)])
        if self.low == self.high:
            self.low, self.high = self.low - 1, self.high + 1

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(EDGE + share * (self.width - 2 * EDGE), 1)

    def inside(self, value: float) -> bool:
        return self.low <= value <= self.high

    def clipped(self, value: float) -> float:
        return self.at(min(max(value, self.low), self.high))

    def ticks(self) -> list[float]:
        """Round numbers, nought among them."""
        step = _round_step((self.high - self.low) / 4)
        first = math.ceil(self.low / step)
        return [step * n for n in range(first, math.floor(self.high / step) + 1)]


def _known(*values: float | None) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _round_step(about: float) -> float:
    power = 10.0 ** math.floor(math.log10(about))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= about * 0.999)


def drawing(one: Mark, scale: Scale) -> Markup:
    """One row."""
    middle = HEIGHT / 2
    marks = [f'<line class="zero" x1="{scale.at(0)}" x2="{scale.at(0)}" y1="0" y2="{HEIGHT}"/>']
    if one.margin and math.isfinite(one.margin):
        at = scale.at(one.margin)
        marks.append(f'<line class="margin" x1="{at}" x2="{at}" y1="0" y2="{HEIGHT}"/>')
    if one.examples and all(math.isfinite(end) for end in one.examples):
        low, high = (scale.clipped(end) for end in one.examples)
        marks.append(f'<line class="examples" x1="{low}" x2="{high}" y1="{middle}" y2="{middle}"/>')
    if one.paper is not None:
        marks.append(f'<path class="paper" d="M{scale.at(one.paper)} {middle - 7}l7 7-7 7-7-7z"/>')
    if math.isfinite(one.low) and math.isfinite(one.high):
        marks.append(_whisker(one.low, one.high, scale, middle))
    if math.isfinite(one.mean):
        marks.append(f'<circle class="mean" cx="{scale.at(one.mean)}" cy="{middle}" r="3.5"/>')
    label = f"{signed(one.mean)} {interval(one.low, one.high, sign=True)}"
    label += "" if one.paper is None else f", paper {signed(one.paper)}"
    body = Markup("").join(Markup(drawn) for drawn in marks)
    return Markup(
        '<svg class="forest" viewBox="0 0 {w} {h}" role="img" aria-label="{label}">{body}</svg>'
    ).format(w=scale.width, h=HEIGHT, label=label, body=body)


def _whisker(low: float, high: float, scale: Scale, middle: float) -> str:
    """The interval; an end that is cut off points on, one that is not has a cap."""
    left, right = scale.clipped(low), scale.clipped(high)
    path = f"M{left} {middle}H{right}"
    path += f"M{left} {middle - 4}v8" if scale.inside(low) else f"M{left + 4} {middle - 4}l-4 4 4 4"
    path += f"M{right} {middle - 4}v8" if scale.inside(high) else f"M{right - 4} {middle - 4}l4 4-4 4"
    return f'<path class="seeds" d="{path}"/>'


def axis(scale: Scale) -> Markup:
    """The numbers that belong to the rows."""
    ticks = scale.ticks()
    smallest = min((abs(tick) for tick in ticks if tick), default=1.0)
    digits = max(0, -math.floor(math.log10(smallest) + 1e-9))
    marks = [
        Markup('<text x="{x}" y="12">{text}</text>').format(x=scale.at(tick), text=signed(tick, digits))
        for tick in ticks
    ]
    body = Markup("").join(marks)
    return Markup('<svg class="forest axis" viewBox="0 0 {w} 20" aria-hidden="true">{body}</svg>').format(
        w=scale.width, body=body
    )
