"""Figures for print: SVG and PDF at the width of a two-column page, in 8 point type, legible in grey.

The same figure gives the same bytes: no date, a fixed hash salt, and the fonts that come with matplotlib.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from biphase.report.figures.description import PALETTES, Axis, Dash, Figure, Marker, Panel, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Sheet

WIDTH = 6.9  # inches: the text width of a two-column page
HEIGHT = 1.32  # of a panel
TITLE, LINE, RIGHT = 0.2, 0.15, 0.13  # above panels; of a line of text; right of the last panel
ROW = 0.125  # of a list row
KEY = 0.62  # of the line and the gap beside a legend entry
LETTER, TICK, LABEL = 0.066, 0.062, 0.05  # the width of a character in the legend, at a tick, in a label
COLOURS = PALETTES["light"]
MARKERS: dict[Marker, str] = {
    "circle": "o",
    "square": "s",
    "triangle": "^",
    "down": "v",
    "diamond": "D",
    "hexagon": "h",
    "cross": "X",
    "none": "",
}
DASHES: dict[Dash, Any] = {
    "solid": "-",
    "dash": (0, (4.5, 1.6)),
    "dot": (0, (1.2, 1.6)),
    "dashdot": (0, (4.5, 1.6, 1.2, 1.6)),
}
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "axes.labelcolor": COLOURS["text"],
    "axes.edgecolor": COLOURS["muted"],
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.color": COLOURS["muted"],
    "ytick.color": COLOURS["muted"],
    "xtick.labelcolor": COLOURS["text"],
    "ytick.labelcolor": COLOURS["text"],
    "xtick.major.size": 2,
    "ytick.major.size": 2,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "text.color": COLOURS["text"],
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "legend.columnspacing": 1.6,
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
    "axes.unicode_minus": True,
}


def draw(figure: Figure, folder: Path) -> list[Path]:
    """Write FOLDER/<id>.svg and .pdf; a figure with views has a pair for each."""
    from matplotlib import rc_context

    folder.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    for name, one in _printed(figure):
        with rc_context(STYLE | {"svg.hashsalt": name}), warnings.catch_warnings():
            # Characters that the font lacks are drawn as boxes; a warning for each of them would only be noise.
            warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")
            sheet = sheet_of(one)
            for form, metadata in (("svg", {"Date": None}), ("pdf", {"CreationDate": None})):
                path = folder / f"{name}.{form}"
                sheet.savefig(path, format=form, metadata=metadata)
                made.append(path)
    return made


def _printed(figure: Figure) -> list[tuple[str, Figure]]:
    """The figure by file name, or one figure for each view."""
    if not figure.views:
        return [(figure.id, figure)]
    made = []
    for number, view in enumerate(figure.views):
        panels = tuple(
            replace(
                panel,
                x=view.axis,
                series=tuple(replace(one, x=one.views[number]) if one.views else one for one in panel.series),
                verticals=panel.verticals if number == 0 else (),
            )
            for panel in figure.panels
        )
        name = figure.id if number == 0 else f"{figure.id}-{view.name.lower()}"
        made.append((name, replace(figure, panels=panels)))
    return made


def sheet_of(figure: Figure) -> Sheet:
    """The figure in matplotlib. Everything is placed in inches, because automatic layout doubles the time."""
    from matplotlib.figure import Figure as Sheet

    rows = max(panel.rows for panel in figure.panels)
    inner = rows * ROW if rows else HEIGHT
    entries = figure.entries
    columns = _columns([len(one.name) for one in entries])
    legend = LINE * math.ceil(len(entries) / columns)
    top = TITLE if any(panel.title for panel in figure.panels) else 0.08
    bottom = 0.38 + LINE * (max(_lines(panel.x) for panel in figure.panels) - 1) + legend
    if not any(panel.x.title for panel in figure.panels):
        bottom -= LINE
    height = top + inner + bottom
    sheet = Sheet(figsize=(WIDTH, height))
    for panel, (left, width) in zip(figure.panels, _across(figure.panels), strict=True):
        at = sheet.add_axes((left / WIDTH, bottom / height, width / WIDTH, inner / height))
        _panel(panel, at, width)
    if entries:
        handles = [_handle(one) for one in entries]
        sheet.legend(handles=handles, loc="lower center", ncols=min(columns, len(entries)), borderaxespad=0.2)
    return sheet


def _columns(letters: list[int]) -> int:
    """The number of legend columns: all entries in one line, or as many of the longest as fit."""
    if sum(KEY + LETTER * one for one in letters) <= WIDTH:
        return max(1, len(letters))
    return max(1, int(WIDTH / (KEY + LETTER * max(letters))))


def _across(panels: tuple[Panel, ...]) -> list[tuple[float, float]]:
    """Left edge and width of each panel in inches: equal widths, after room for tick labels."""
    rooms = [_room(panel.y) for panel in panels]
    width = (WIDTH - sum(rooms) - RIGHT) / len(panels)
    return [(sum(rooms[: n + 1]) + n * width, width) for n in range(len(panels))]


def _room(axis: Axis) -> float:
    if not axis.shown:
        return 0.08
    letters = max((len(label) for label in axis.labels), default=5)
    return 0.06 + TICK * letters + (0.15 if axis.title else 0.0)


def _lines(axis: Axis) -> int:
    return max((label.count("\n") + 1 for label in axis.labels), default=1)


# ---------------------------------------------------------------- panels


def _panel(panel: Panel, at: Axes, width: float) -> None:
    at.set_title(panel.title, loc="left", pad=4)
    _axis(panel.x, at, "x")
    _axis(panel.y, at, "y")
    for one in panel.verticals:
        at.axvline(one.x, color=COLOURS["muted"], linewidth=0.6, linestyle=DASHES["dot"], zorder=1)
        if one.label:
            at.annotate(
                one.label,
                (one.x, 1),
                xycoords=("data", "axes fraction"),
                xytext=(-1.5, -2),
                textcoords="offset points",
                rotation=90,
                ha="right",
                va="top",
                fontsize=5.5,
                color=COLOURS["muted"],
            )
    left: dict[float, float] = {}
    for series in panel.series:
        _series(series, at, left)
    if panel.label_room and panel.x.range:
        low, high = panel.x.range
        share = min(0.6, panel.label_room * LABEL / width)
        at.set_xlim(low, low + (high - low) / (1 - share))


def _axis(axis: Axis, at: Axes, side: str) -> None:
    from matplotlib.ticker import MaxNLocator, NullFormatter, NullLocator, StrMethodFormatter

    which = at.xaxis if side == "x" else at.yaxis
    scale, label, limit = (getattr(at, f"set_{side}{word}") for word in ("scale", "label", "lim"))
    label(axis.title, labelpad=2)
    if axis.scale == "log":
        scale("log")
        which.set_minor_formatter(NullFormatter())
    if axis.ticks:
        labels = axis.labels or tuple(f"{tick:,g}" for tick in axis.ticks)
        which.set_ticks(list(axis.ticks), labels=list(labels))
        which.set_minor_locator(NullLocator())
    elif axis.scale == "linear":
        which.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        which.set_major_formatter(StrMethodFormatter("{x:,g}"))
    if axis.range:
        limit(*axis.range)
    if axis.grid:
        at.grid(visible=True, axis="x" if side == "x" else "y")
    if not axis.shown:
        which.set_visible(False)
        at.spines["left" if side == "y" else "bottom"].set_visible(False)


# ---------------------------------------------------------------- series


def _series(series: Series, at: Axes, left: dict[float, float]) -> None:
    colour = COLOURS[series.look.colour]
    if series.draws == "bars":
        for y, x in zip(series.y, series.x, strict=True):
            at.barh(y, x, left=left.get(y, 0.0), height=0.62, color=colour, linewidth=0)
            left[y] = left.get(y, 0.0) + x
    elif series.draws != "text":
        at.plot(series.x, series.y, **_drawn(series))
    if series.low and series.band:
        at.fill_between(series.x, series.low, series.high, color=colour, alpha=0.16, linewidth=0)
    elif series.low:
        _whiskers(series, at, colour)
    for x, y, text in zip(series.x, series.y, series.labels, strict=False):
        right = series.side == "right"
        at.annotate(
            text,
            (x, y),
            xytext=(3.5, 0) if right else (0, 2),
            textcoords="offset points",
            ha="left" if right else "center",
            va="center" if right else "bottom",
            fontsize=6,
            color=colour,
            annotation_clip=False,
        )


def _whiskers(series: Series, at: Axes, colour: str) -> None:
    known = [
        one
        for one in zip(series.x, series.y, series.low, series.high, strict=True)
        if math.isfinite(one[2]) and math.isfinite(one[3])
    ]
    if known:
        x, y, low, high = zip(*known, strict=True)
        spans = [[b - a for a, b in zip(low, y, strict=True)], [b - a for a, b in zip(y, high, strict=True)]]
        at.errorbar(x, y, spans, fmt="none", ecolor=colour, elinewidth=0.8, capsize=1.6, capthick=0.8)


def _drawn(series: Series) -> dict[str, Any]:
    """Keyword arguments for a line and its markers."""
    look, colour = series.look, COLOURS[series.look.colour]
    marks = series.draws in ("points", "both")
    return {
        "color": colour,
        "linestyle": DASHES[look.dash] if series.draws in ("line", "both") else "",
        "linewidth": 1.1 * look.width,
        "marker": MARKERS[look.marker] if marks else "",
        "markersize": (5 if look.hollow else 4) * look.size,
        "markerfacecolor": "none" if look.hollow else colour,
        "markeredgecolor": colour,
        "markeredgewidth": 0.8 if look.hollow else 0.4,
        "solid_capstyle": "butt",
    }


def _handle(series: Series) -> Any:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if series.draws == "bars":
        return Patch(color=COLOURS[series.look.colour], linewidth=0, label=series.name)
    return Line2D([], [], label=series.name, **_drawn(series))
