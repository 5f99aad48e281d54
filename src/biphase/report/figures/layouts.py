"""Where the panels of an interactive figure lie: in a row on a desk, below each other on a phone.

Heights are in pixels and do not depend on the width, so nothing on the page moves while figures are drawn. Notes and
lines are tied to the axes of their panel, not to the paper; so both layouts hold the same ones.
"""

from __future__ import annotations

import math
from typing import Any

from biphase.report.figures.description import Axis, Figure, Panel, Series
from biphase.report.figures.traces import as_html, plain

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

PANEL = {False: 250, True: 205}  # pixels: the height of a panel, by narrow
ROW = 19  # of a row of a list
TOP, BOTTOM, LEFT, RIGHT = 34, 52, 52, 14
LEGEND = 34
LETTER = 6.4  # the width of one in a label
WIDTHS = {False: 1000, True: 366}  # of the page's column, by narrow: decides how much of x the labels need


def layout_of(figure: Figure, *, narrow: bool) -> dict[str, Any]:
    count = len(figure.panels)
    columns = 1 if narrow else count
    heights = [panel.rows * ROW if panel.rows else PANEL[narrow] for panel in figure.panels]
    inner = sum(heights) + (count - 1) * (TOP + BOTTOM) if narrow else max(heights)
    left = LEFT if any(panel.y.shown for panel in figure.panels) else RIGHT
    letters = max((len(label) for panel in figure.panels[1:] for label in panel.y.labels), default=4)
    gap = (letters * LETTER + 30) / WIDTHS[narrow]
    top = TOP if any(panel.title for panel in figure.panels) else 12
    legend = LEGEND * _legend_lines(figure, narrow) if figure.entries else 0
    layout: dict[str, Any] = {
        "autosize": True,
        "uirevision": figure.id,  # what a reader hid or zoomed stays so when the theme changes
        "height": inner + top + BOTTOM + legend,
        "margin": {"l": left, "r": RIGHT, "t": top, "b": BOTTOM + legend, "pad": 0},
        "font": {"family": FONT, "size": 12},
        "hovermode": "closest",
        "hoverlabel": {"align": "left", "font": {"size": 12}},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "barmode": "stack",
        "dragmode": False,
        "annotations": [],
        "shapes": [],
        "showlegend": bool(figure.entries),
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": -(BOTTOM - 4) / inner,
            "yanchor": "top",
            "itemwidth": 36,
        },
    }
    for number, panel in enumerate(figure.panels):
        suffix = str(number + 1) if number else ""
        x_domain, y_domain = _domains(number, columns, heights, inner, gap)
        layout[f"xaxis{suffix}"] = _x_axis(panel, suffix, x_domain, narrow)
        layout[f"yaxis{suffix}"] = _axis(panel.y) | {"domain": y_domain, "anchor": f"x{suffix}"}
        layout["annotations"] += _notes(panel, suffix)
        layout["shapes"] += [_upright(one.x, suffix) for one in panel.verticals]
    return layout


def _legend_lines(figure: Figure, narrow: bool) -> int:
    letters = sum(len(series.name) + 9 for series in figure.entries)
    return math.ceil(letters * LETTER / WIDTHS[narrow])


def _domains(
    number: int, columns: int, heights: list[int], inner: int, gap: float
) -> tuple[list[float], list[float]]:
    """Where a panel lies, as shares of the width and of the height: in one row, or in one column."""
    if columns == 1 and len(heights) > 1:
        above = sum(heights[:number]) + number * (TOP + BOTTOM)
        bottom = 1 - (above + heights[number]) / inner
        return [0, 1], [round(max(0.0, bottom), 5), round(1 - above / inner, 5)]
    width = (1 - gap * (columns - 1)) / columns
    left = number * (width + gap)
    return [round(left, 5), round(min(1.0, left + width), 5)], [0, 1]


def _axis(axis: Axis) -> dict[str, Any]:
    made: dict[str, Any] = {
        "title": {"text": as_html(axis.title), "standoff": 8, "font": {"size": 12}},
        "showgrid": axis.grid,
        "zeroline": False,
        "ticks": "",
        "tickfont": {"size": 11},
        "automargin": True,
        "fixedrange": False,
        "visible": axis.shown,
    }
    if axis.scale == "log":
        made |= {"type": "log", "dtick": 1, "exponentformat": "power"}
    if axis.ticks:
        made |= {"tickmode": "array", "tickvals": plain(axis.ticks), "ticktext": _ticks(axis)}
        made.pop("dtick", None)
    else:
        made["nticks"] = 6
    if axis.range:
        log = axis.scale == "log"
        made["range"] = plain(math.log10(end) if log else end for end in axis.range)
    return made


def view_axis(axis: Axis) -> dict[str, Any]:
    """What of an x axis another view changes."""
    made = _axis(axis)
    return {
        name: made[name] for name in ("title", "type", "tickmode", "tickvals", "ticktext") if name in made
    }


def _ticks(axis: Axis) -> list[str]:
    return [as_html(label) for label in axis.labels or [f"{tick:,g}" for tick in axis.ticks]]


def _x_axis(panel: Panel, suffix: str, domain: list[float], narrow: bool) -> dict[str, Any]:
    made = _axis(panel.x) | {"domain": domain, "anchor": f"y{suffix}"}
    if panel.label_room and panel.x.range:
        made["range"] = plain(_with_room(panel, _inner_width(narrow) * (domain[1] - domain[0])))
    return made


def _inner_width(narrow: bool) -> float:
    return WIDTHS[narrow] - LEFT - RIGHT


def _with_room(panel: Panel, pixels: float) -> tuple[float, float]:
    """The range of x with room for the labels beyond the last point."""
    low, high = panel.x.range or (0.0, 1.0)
    share = min(0.7, panel.label_room * LETTER / pixels)
    return low, low + (high - low) / (1 - share)


def apart(panel: Panel, series: Series) -> list[str]:
    """Labels above their points as a phone has room for them: one that would touch the one before it is empty."""
    low, high = _with_room(panel, _inner_width(True))
    unit = _inner_width(True) / (high - low)
    ends: dict[float, float] = {}  # row → where its last label ends
    made = []
    for x, y, text in zip(series.x, series.y, series.labels, strict=True):
        half = len(text) * LETTER / 2
        fits = x * unit - half >= ends.get(y, -math.inf) + LETTER
        made.append(text if fits else "")
        ends[y] = x * unit + half if fits else ends[y]
    return made


def _notes(panel: Panel, suffix: str) -> list[dict[str, Any]]:
    """The panel's title and the words of its verticals."""
    title = {
        "text": as_html(panel.title),
        "xref": f"x{suffix} domain",
        "yref": f"y{suffix} domain",
        "x": 0,
        "y": 1,
        "xanchor": "left",
        "yanchor": "bottom",
        "yshift": 8,
        "showarrow": False,
        "font": {"size": 13},
        "name": "text",
    }
    return [title] * bool(panel.title) + [
        {
            "text": as_html(one.label),
            "xref": f"x{suffix}",
            "yref": f"y{suffix} domain",
            # On such an axis Plotly places words by the logarithm, and lines by the value.
            "x": round(math.log10(one.x), 6) if panel.x.scale == "log" else one.x,
            "y": 0.99,
            "xanchor": "right",
            "yanchor": "top",
            "textangle": -90,
            "showarrow": False,
            "font": {"size": 10},
            "name": "muted",
        }
        for one in panel.verticals
        if one.label
    ]


def _upright(x: float, suffix: str) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": f"x{suffix}",
        "yref": f"y{suffix} domain",
        "x0": x,
        "x1": x,
        "y0": 0,
        "y1": 1,
        "line": {"width": 1, "dash": "2px,3px"},
        "layer": "above",
        "name": "muted",
    }
