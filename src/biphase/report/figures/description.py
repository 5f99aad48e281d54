"""A figure as data: panels, axes and series, and what each series means. No colour and no library.

Two renderers read this, one for the page and one for print, so a number cannot differ between them. A series says by
its role what it shows (causal, masked, the paper …); the palette says how that looks, once for all figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Numbers = tuple[float, ...]
Marker = Literal["circle", "square", "triangle", "diamond", "cross", "down", "hexagon", "none"]
Dash = Literal["solid", "dash", "dot", "dashdot"]
Shade = Literal["-soft", "-half-soft", "", "-half-deep", "-deep"]
Side = Literal["right", "above"]
Draws = Literal["line", "points", "both", "bars", "text"]


@dataclass(frozen=True)
class Look:
    """How a series is told from the others. The palette decides it by what the series stands for."""

    role: str  # what it means: a name of the palettes
    shade: Shade = ""  # of that colour
    marker: Marker = "circle"
    dash: Dash = "solid"
    hollow: bool = False
    width: float = 1.0  # of the line, 1 being usual
    size: float = 1.0  # of the markers

    @property
    def colour(self) -> str:
        """The name of its colour in the palettes."""
        return f"{self.role}{self.shade}"


@dataclass(frozen=True)
class Series:
    """Points that mean one thing. An interval that is not known is NaN; a point that is not known is not here."""

    name: str  # in the legend; series of one name are one entry
    look: Look
    x: Numbers
    y: Numbers
    draws: Draws = "both"
    low: Numbers = ()
    high: Numbers = ()
    band: bool = False  # the interval as an area, not as bars
    hover: tuple[str, ...] = ()  # of each point; its first line is what it is
    labels: tuple[str, ...] = ()  # beside each point
    side: Side = "right"  # of its point that a label stands on
    views: tuple[Numbers, ...] = ()  # x in each view of the figure, the first being `x`
    legend: bool = True


@dataclass(frozen=True)
class Axis:
    """What is measured along one side, in what steps."""

    title: str = ""
    scale: Literal["linear", "log"] = "linear"
    ticks: Numbers = ()
    labels: tuple[str, ...] = ()  # of the ticks
    range: tuple[float, float] | None = None
    grid: bool = True
    shown: bool = True


@dataclass(frozen=True)
class Vertical:
    """A line at one x, and what happens there."""

    x: float  # in the first view of a figure: in the others it is not drawn
    label: str = ""


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    verticals: tuple[Vertical, ...] = ()
    rows: int = 0  # of a list with labels, which needs room for each; 0: as high as panels are
    label_room: int = 0  # letters of the longest label beyond the last point


@dataclass(frozen=True)
class View:
    """Another way to measure x: the same points over tokens, FLOPs or seconds."""

    name: str
    axis: Axis


@dataclass(frozen=True)
class Figure:
    """What a report shows under one id."""

    id: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    views: tuple[View, ...] = ()

    @property
    def entries(self) -> tuple[Series, ...]:
        """One series for each name of the legend; none where a single name would say nothing."""
        found: dict[str, Series] = {}
        for panel in self.panels:
            for series in panel.series:
                if series.legend:
                    found.setdefault(series.name, series)
        paper = found.pop(PAPER, None)
        last = (paper,) if paper else ()
        return (*found.values(), *last) if len(found) > 1 or paper else ()


PAPER = "paper"  # the name of reference marks
