"""A `Figure` as a Vega specification: Vega draws it on the page, vl-convert draws it for print.

`specification` is the only drawing code, so page and print cannot differ. The width, the colours and the measure of x
are signals of the specification. The page sets `width` (panels stand below each other when it is small), `palette`
(light or dark) and `view` (tokens, FLOPs or seconds), and Vega updates the drawing in place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from biphase.report.figures.description import PALETTES, Axis, Dash, Figure, Marker, Panel, Series

Json = dict[str, Any]


@dataclass(frozen=True)
class Medium:
    """Sizes in pixels, 96 to the inch. A pair is for wide and for narrow drawings."""

    interactive: bool  # has hover and a legend to click
    font: str
    width: float
    narrow: float  # below this width, panels stand below each other
    panel: tuple[float, float]  # height of a panel
    text: float  # font size; tick labels are one pixel smaller
    stroke: float  # width of a line of relative width 1
    marker: float  # diameter of a marker of relative size 1
    bottom: float  # below a panel, for tick labels and the axis title
    legend: float  # height of a legend line

    @property
    def letter(self) -> float:
        """The mean width of a character."""
        return 0.56 * self.text


SYSTEM_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
# The first comes with vl-convert; all three have the same widths.
PRINT_FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
SCREEN = Medium(True, SYSTEM_FONT, 1000, 720, (250, 205), 12, 1.8, 8, 52, 24)
PRINT = Medium(False, PRINT_FONT, 662, 0, (127, 127), 32 / 3, 1.5, 5.5, 36, 15)  # 6.9 inches, 8 point
PHONE = 366  # the width for which a narrow drawing is laid out

SHAPES: dict[Marker, str] = {
    "circle": "circle",
    "square": "square",
    "triangle": "triangle-up",
    "down": "triangle-down",
    "diamond": "diamond",
    "hexagon": "M0.5,0L0.25,0.433L-0.25,0.433L-0.5,0L-0.25,-0.433L0.25,-0.433Z",
    "cross": "M-0.5,-0.3L-0.3,-0.5L0,-0.2L0.3,-0.5L0.5,-0.3L0.2,0L0.5,0.3L0.3,0.5L0,0.2L-0.3,0.5L-0.5,0.3L-0.2,0Z",
}
DASHES: dict[Dash, list[float]] = {"solid": [], "dash": [7, 3], "dot": [2, 3], "dashdot": [7, 3, 2, 3]}


def specification(figure: Figure, medium: Medium = SCREEN, view: int = 0) -> Json:
    """The Vega specification of a figure, showing one of its views."""
    layout = _Layouts(figure, medium)
    entries = {series.name: number for number, series in enumerate(figure.entries)}
    data: list[Json] = [{"name": "hidden", "on": [{"trigger": "clicked", "toggle": "clicked"}]}]
    for number, panel in enumerate(figure.panels):
        names = [f"series-{number}-{place}" for place in range(len(panel.series))]
        for name, series in zip(names, panel.series, strict=True):
            shown = {"type": "filter", "expr": f"!({_hidden(entries.get(series.name, -1))})"}
            data.append({"name": name, "values": _rows(series), "transform": [shown]})
        data.append({"name": f"panel-{number}", "source": names})
        near = {"type": "filter", "expr": "datum.hover && isValid(datum.y)"}
        data.append({"name": f"hover-{number}", "source": f"panel-{number}", "transform": [near]})
    return {
        "$schema": "https://vega.github.io/schema/vega/v6.json",
        "description": figure.title,
        "autosize": "none",
        "background": "transparent" if medium.interactive else PALETTES["light"]["background"],
        "config": {"text": {"font": medium.font}},
        "signals": [{"name": "view", "value": view}, *layout.signals()],
        "data": data,
        "marks": [*(_panel(number, layout) for number in range(len(figure.panels))), *_legend(layout)],
    }


def screen_height(figure: Figure) -> float:
    """The height of a figure on a wide page."""
    return _Layout(figure, SCREEN, narrow=False).height


@cache
def script() -> str:
    """Vega's script for the page. It defines `vegaEmbed`, which has an interpreter and needs no `eval`."""
    from vl_convert import javascript_bundle

    return javascript_bundle("window.vegaEmbed = vegaEmbed;")


def draw(figure: Figure) -> dict[str, bytes]:
    """The figure as <id>.svg and <id>.pdf; one with views as a pair for each. The same figure gives the same bytes."""
    from vl_convert import svg_to_pdf, vega_to_svg

    drawings: dict[str, bytes] = {}
    for view in range(max(1, len(figure.views))):
        name = f"{figure.id}-{figure.views[view].name.lower()}" if view else figure.id
        svg = _numbered(vega_to_svg(specification(figure, PRINT, view)))
        drawings[f"{name}.svg"] = svg.encode()
        drawings[f"{name}.pdf"] = _ordered(svg_to_pdf(_in_points(svg)))
    return drawings


def _numbered(svg: str) -> str:
    """Number the clip paths from 0; Vega counts them on from one drawing of a process to the next."""
    clips = dict.fromkeys(re.findall(r'<clipPath id="(clip\d+)"', svg))
    numbers = {clip: f"clip{number}" for number, clip in enumerate(clips)}
    return re.sub(r'(id="|url\(#)(clip\d+)', lambda found: found[1] + numbers.get(found[2], found[2]), svg)


def _in_points(svg: str) -> str:
    """The drawing at 72 units to the inch, as PDF counts; SVG has 96."""
    size = re.compile(r'(width|height)="([\d.]+)"')
    return size.sub(lambda found: f'{found[1]}="{0.75 * float(found[2]):g}"', svg, count=2)


def _ordered(pdf: bytes) -> bytes:
    """Sort the names in a page's dictionaries of resources, which svg_to_pdf writes in a random order."""
    names = re.compile(rb"(?<= <<\n)(?: +/[a-z]+\d+ \d+ 0 R\n)+")
    return names.sub(lambda found: b"".join(sorted(found[0].splitlines(keepends=True))), pdf)


# ---------------------------------------------------------------- layout


class _Layout:
    """Where panels and legend entries stand: panels side by side, or below each other in a narrow drawing."""

    def __init__(self, figure: Figure, medium: Medium, *, narrow: bool) -> None:
        panels = figure.panels
        lines = max((label.count("\n") for panel in panels for label in panel.x.labels), default=0)
        untitled = not any(panel.x.title for panel in panels)
        top = medium.text * (2.6 if any(panel.title for panel in panels) else 1)
        bottom = medium.bottom + (lines - untitled) * medium.text
        height = medium.panel[narrow]
        self.rooms = [_room(panel.y, medium) for panel in panels]  # left of each panel
        self.left = min(self.rooms[0], 40)  # of the legend
        self.panel = height
        self.tops = [top + narrow * number * (top + height + bottom) for number in range(len(panels))]
        self.legend_top = self.tops[-1] + height + bottom
        self.entries: list[tuple[float, int]] = []  # x and line of each legend entry
        x, line = 0.0, 0
        for series in figure.entries:
            need = _entry_width(series, medium) + 1.5 * medium.text
            if x and self.left + x + need > (PHONE if narrow else medium.width):
                x, line = 0.0, line + 1
            self.entries.append((round(x, 1), line))
            x += need
        self.height = round(self.legend_top + (line + bool(self.entries)) * medium.legend, 1)


def _room(axis: Axis, medium: Medium) -> float:
    """The room left of a panel, for the labels and the title of y."""
    letters = max((len(label) for label in axis.labels), default=4)
    return 12 + medium.letter * letters + (medium.text + 3 if axis.title else 0)


def _entry_width(series: Series, medium: Medium) -> float:
    return 3.5 * medium.text + medium.letter * len(series.name)


class _Layouts:
    """Both layouts of a figure. `either` is a Vega expression that chooses by the width of the drawing."""

    def __init__(self, figure: Figure, medium: Medium) -> None:
        self.figure, self.medium = figure, medium
        self.wide, self.narrow = (_Layout(figure, medium, narrow=narrow) for narrow in (False, True))

    def either(self, of: Callable[[_Layout], object]) -> str:
        return _either(of(self.wide), of(self.narrow))

    def signals(self) -> list[Json]:
        rooms, right = self.wide.rooms, self.medium.text + 2
        wide = f"(width - {sum(rooms) + right}) / {len(rooms)}"
        narrow = f"width - {max(rooms) + right}"
        clicks = [
            {"events": f"@entry-{n}:click", "update": f"{{entry: {n}}}"}
            for n in range(len(self.figure.entries))
        ]
        return [
            {"name": "width", "value": self.medium.width},
            {"name": "narrow", "update": f"width < {self.medium.narrow}"},
            {"name": "height", "update": self.either(lambda layout: layout.height)},
            {"name": "panelWidth", "update": f"max(20, {_either(wide, narrow)})"},
            {"name": "palette", "value": PALETTES["light"]},
            {"name": "clicked", "on": clicks},
            {"name": "names", "value": [series.name for series in self.figure.entries]},
        ]


def _either(wide: object, narrow: object) -> str:
    return f"(narrow ? {narrow} : {wide})"


def _hidden(entry: int) -> str:
    """An expression: whether the reader has hidden this legend entry."""
    return f"indata('hidden', 'entry', {entry})"


# ---------------------------------------------------------------- data


def _rows(series: Series) -> list[Json]:
    """A row for each point: x in every view, y, and what the series has of intervals and hover texts."""
    views = series.views or (series.x,)
    rows: list[Json] = []
    for place, y in enumerate(series.y):
        row: Json = {"x": [_number(view[place]) for view in views], "y": _number(y)}
        if series.low:
            row |= {"low": _number(series.low[place]), "high": _number(series.high[place])}
        if series.hover:
            row["hover"] = series.hover[place]
        else:
            row["hover"] = f"{series.name}\n{series.x[place]:,g} · {y:.4g}"
        rows.append(row)
    return rows


def _number(value: float) -> float | int | None:
    """Six significant digits, enough for a drawing; None for NaN and infinity."""
    if not math.isfinite(value):
        return None
    exact = float(value).is_integer() and abs(value) < 2**53
    return int(value) if exact else float(f"{value:.6g}")


# ---------------------------------------------------------------- panels


def _mark(kind: str, **channels: Any) -> Json:
    """A mark with these channels; what is no expression, scale or field is a constant."""
    update = {name: of if isinstance(of, dict) else {"value": of} for name, of in channels.items()}
    return {
        "type": kind,
        "interactive": False,
        "clip": kind in ("line", "area"),
        "encode": {"update": update},
    }


def _signal(expression: str) -> Json:
    return {"signal": expression}


def _colour(name: str) -> Json:
    return _signal(f"palette['{name}']")


X, Y = {"scale": "x", "signal": "datum.x[view]"}, {"scale": "y", "field": "y"}


def _panel(number: int, layout: _Layouts) -> Json:
    figure, medium = layout.figure, layout.medium
    panel, rooms = figure.panels[number], layout.wide.rooms
    axes = [view.axis for view in figure.views] or [panel.x]
    left = _either(f"{sum(rooms[: number + 1])} + {number} * panelWidth", max(rooms))
    height = layout.either(lambda one: one.panel)
    place = {
        "x": left,
        "y": layout.either(lambda one: one.tops[number]),
        "width": "panelWidth",
        "height": height,
    }
    marks = [_mark("text", y=-8, text=_signal("title"), fontSize=medium.text, fill=_colour("text"))]
    marks += _verticals(panel, medium)
    for index, series in enumerate(panel.series):
        source = {"data": f"series-{number}-{index}"}
        marks += [mark | {"from": source} for mark in _series(series, medium)]
    scales = [("x", panel.x, "width", _x_domain(panel, number))]
    scales += [("y", panel.y, "height", _y_domain(panel, number))]
    return {
        "type": "group",
        "encode": {"update": {name: _signal(expression) for name, expression in place.items()}},
        "signals": [
            {"name": "width", "update": "panelWidth"},  # Vega takes these two for grid lines and ranges
            {"name": "height", "update": height},
            {"name": "title", "value": panel.title},
            {"name": "verticals", "value": [vertical.label for vertical in panel.verticals]},
            {"name": "xTitles", "value": [axis.title for axis in axes]},
            {"name": "xTicks", "value": [_ticks(axis) for axis in axes]},
            {"name": "xLabels", "value": [_tick_labels(axis) for axis in axes]},
            {"name": "yTicks", "value": _ticks(panel.y)},
            {"name": "yLabels", "value": _tick_labels(panel.y)},
            _near(number),
        ],
        "scales": [
            {"name": name, "type": axis.scale, "range": along, "zero": False} | domain
            for name, axis, along, domain in scales
        ],
        "axes": [
            _axis(panel.x, "x", medium, "xTicks[view]", "xLabels[view]")
            | {"title": _signal("xTitles[view]")},
            _axis(panel.y, "y", medium, "yTicks", "yLabels"),
        ],
        "marks": [*marks, *(_hover(number) if medium.interactive else [])],
    }


def _x_domain(panel: Panel, number: int) -> Json:
    if panel.x.range is None:
        return {"domain": {"data": f"panel-{number}", "field": _signal("'x[' + view + ']'")}, "padding": 14}
    return {"domain": list(panel.x.range)}


def _y_domain(panel: Panel, number: int) -> Json:
    if panel.y.range is None:
        return {"domain": {"data": f"panel-{number}", "fields": ["y", "low", "high"]}, "padding": 10}
    return {"domain": list(panel.y.range)}


def _ticks(axis: Axis) -> list[float | int | None]:
    return [_number(tick) for tick in axis.ticks]


def _tick_labels(axis: Axis) -> list[Any]:
    """The labels of the ticks; one of several lines is a list of them."""
    labels = axis.labels or [f"{tick:,g}" for tick in axis.ticks]
    return [label.split("\n") if "\n" in label else label for label in labels]


def _axis(axis: Axis, name: str, medium: Medium, ticks: str, labels: str) -> Json:
    """An axis; `ticks` and `labels` are the expressions of its given ticks."""
    given = {
        "values": _signal(ticks),
        "encode": {"labels": {"update": {"text": _signal(f"{labels}[indexof({ticks}, datum.value)]")}}},
    }
    return {
        "orient": "bottom" if name == "x" else "left",
        "scale": name,
        "title": axis.title,
        "grid": axis.grid,
        "ticks": False,
        "domainColor": _colour("grid"),
        "gridColor": _colour("grid"),
        "labelColor": _colour("muted"),
        "titleColor": _colour("text"),
        "labelFont": medium.font,
        "titleFont": medium.font,
        "labelFontSize": medium.text - 1,
        "titleFontSize": medium.text,
        "titleFontWeight": "normal",
        "labelPadding": 5,
        "labelOverlap": "greedy",
        "labelSeparation": medium.text / 2,
    } | (given if axis.ticks else {"tickCount": 5})


def _verticals(panel: Panel, medium: Medium) -> list[Json]:
    """Vertical lines with their labels, in the first view only."""
    marks = []
    label = {
        "fontSize": medium.text - 2,
        "angle": -90,
        "align": "right",
        "baseline": "bottom",
        "dx": -3,
        "dy": -2,
    }
    for number, vertical in enumerate(panel.verticals):
        colour = _colour("muted")
        at = {"x": {"scale": "x", "value": vertical.x}, "opacity": _signal("view == 0 ? 1 : 0")}
        marks.append(_mark("rule", **at, y=0, y2=_signal("height"), stroke=colour, strokeDash=[2, 3]))
        marks.append(_mark("text", **at, text=_signal(f"verticals[{number}]"), fill=colour, **label))
    return marks


# ---------------------------------------------------------------- series


def _series(series: Series, medium: Medium) -> list[Json]:
    """The marks of a series, the lowest first."""
    colour = _colour(series.look.colour)
    low, high = ({"scale": "y", "field": end} for end in ("low", "high"))
    known = "isValid(datum.low) && isValid(datum.high)"
    marks = []
    if series.low and series.band:
        area = {"defined": _signal(known), "fill": colour, "fillOpacity": 0.16}
        marks.append(_mark("area", x=X, y=low, y2=high, **area))
    elif series.low:
        path = _signal(f"{known} ? {_whisker(medium.marker / 3)} : ''")
        marks.append(_mark("path", x=X, path=path, stroke=colour, strokeWidth=0.7 * medium.stroke))
    if series.draws in ("line", "both"):
        defined = _signal("isValid(datum.y)")
        marks.append(_mark("line", x=X, y=Y, defined=defined, **_line(series, medium)))
    if series.draws in ("points", "both"):
        marks.append(_mark("symbol", x=X, y=Y, **_marker(series, medium)))
    return marks


def _whisker(cap: float) -> str:
    """An expression for the path of an interval with its caps, in the y of the panel."""
    low, high = "scale('y', datum.low)", "scale('y', datum.high)"
    return f"'M0,' + {low} + 'V' + {high} + 'M-{cap},' + {low} + 'h{2 * cap}M-{cap},' + {high} + 'h{2 * cap}'"


def _line(series: Series, medium: Medium) -> Json:
    look = series.look
    width = round(medium.stroke * look.width, 2)
    return {"stroke": _colour(look.colour), "strokeWidth": width, "strokeDash": DASHES[look.dash]}


def _marker(series: Series, medium: Medium) -> Json:
    look = series.look
    diameter = medium.marker * look.size * (1.25 if look.hollow else 1)
    return {
        "shape": SHAPES[look.marker],
        "size": round(diameter**2, 1),
        "fill": "transparent" if look.hollow else _colour(look.colour),
        "stroke": _colour(look.colour),
        "strokeWidth": 1.5 if look.hollow else 0.5,
    }


def _near(number: int) -> Json:
    """The signal of the point nearest to the pointer."""
    events = [("mouseover", "datum"), ("mouseout", "null")]
    return {"name": "near", "on": [{"events": f"@cells-{number}:{on}", "update": to} for on, to in events]}


def _hover(number: int) -> list[Json]:
    """Invisible points, the region nearest to each of them, which has its hover text, and a ring around the near one."""
    x, y = {"expr": "datum.datum.x || 0"}, {"expr": "datum.datum.y || 0"}
    regions = {"type": "voronoi", "x": x, "y": y, "size": [_signal("width"), _signal("height")]}
    points = _mark("symbol", x=X, y=Y, opacity=0)
    points |= {"name": f"points-{number}", "from": {"data": f"hover-{number}"}}
    cells = _mark("path", fill="transparent", tooltip=_signal("datum.datum.hover"))
    cells |= {"name": f"cells-{number}", "from": {"data": points["name"]}, "transform": [regions]}
    at = {
        name: _signal(f"near ? {of} : 0") for name, of in (("x", "near.x"), ("y", "near.y"), ("opacity", "1"))
    }
    ring = _mark("symbol", **at, size=180, fill="transparent", stroke=_colour("text"))
    return [points, cells | {"interactive": True}, ring]


# ---------------------------------------------------------------- legend


def _legend(layout: _Layouts) -> list[Json]:
    """The legend below the panels; a click on an entry hides or shows its series."""
    medium, sample = layout.medium, 3 * layout.medium.text
    top = layout.either(lambda one: one.legend_top)
    marks = []
    for number, series in enumerate(layout.figure.entries):
        x = f"{layout.wide.left} + {layout.either(lambda one, n=number: one.entries[n][0])}"
        line = layout.either(lambda one, n=number: one.entries[n][1])
        y = _signal(f"{top} + {medium.legend} * ({line} + 0.5)")
        faint = _signal(f"{_hidden(number)} ? 0.35 : 1")
        at = {"y": y, "opacity": faint}
        if series.draws in ("line", "both"):
            end = _signal(f"{x} + {sample}")
            marks.append(_mark("rule", x=_signal(x), x2=end, **at, **_line(series, medium)))
        if series.draws in ("points", "both"):
            marks.append(_mark("symbol", x=_signal(f"{x} + {sample / 2}"), **at, **_marker(series, medium)))
        name = {"text": _signal(f"names[{number}]"), "fontSize": medium.text, "fill": _colour("text")}
        marks.append(_mark("text", x=_signal(f"{x} + {sample + 5}"), **at, **name, baseline="middle"))
        if medium.interactive:
            area = {"yc": y, "height": medium.legend, "width": _entry_width(series, medium)}
            button = _mark("rect", x=_signal(x), **area, fill="transparent", cursor="pointer")
            marks.append(button | {"name": f"entry-{number}", "interactive": True})
    return marks
