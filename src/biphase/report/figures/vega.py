"""A `Figure` as a Vega specification: Vega draws it on the page, vl-convert draws it for print.

`specification` is the only drawing code, so page and print cannot differ. The width, the colours and the measure of x
are signals of the specification. The page sets `width` (panels stand below each other when it is small), `palette`
(light or dark) and `view` (tokens, FLOPs or seconds), and Vega updates the drawing in place.
"""

from __future__ import annotations

import math
import re
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
    row: float  # height of a list row
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
PRINT_FONT = (
    "Liberation Sans, Arial, Helvetica, sans-serif"  # comes with vl-convert; all three have the same widths
)
SCREEN = Medium(True, SYSTEM_FONT, 1000, 720, (250, 205), 19, 12, 1.8, 8, 52, 24)
PRINT = Medium(False, PRINT_FONT, 662, 0, (127, 127), 12.5, 32 / 3, 1.5, 5.5, 36, 15)  # 6.9 inches, 8 point
PHONE = 366  # the width for which a narrow drawing is laid out

SHAPES: dict[Marker, str] = {
    "circle": "circle",
    "square": "square",
    "triangle": "triangle-up",
    "down": "triangle-down",
    "diamond": "diamond",
    "hexagon": "M0.5,0L0.25,0.433L-0.25,0.433L-0.5,0L-0.25,-0.433L0.25,-0.433Z",
    "cross": "M-0.5,-0.3L-0.3,-0.5L0,-0.2L0.3,-0.5L0.5,-0.3L0.2,0L0.5,0.3L0.3,0.5L0,0.2L-0.3,0.5L-0.5,0.3L-0.2,0Z",
    "none": "circle",
}
DASHES: dict[Dash, list[float]] = {"solid": [], "dash": [7, 3], "dot": [2, 3], "dashdot": [7, 3, 2, 3]}


def specification(figure: Figure, medium: Medium = SCREEN, view: int = 0) -> Json:
    """The Vega specification of a figure, showing one of its views."""
    layout = _Layout(figure, medium)
    entries = {series.name: number for number, series in enumerate(figure.entries)}
    data: list[Json] = [{"name": "hidden", "on": [{"trigger": "clicked", "toggle": "clicked"}]}]
    for number, panel in enumerate(figure.panels):
        starts: dict[float, float] = {}  # of the next bar of a row
        names = [f"series-{number}-{place}" for place in range(len(panel.series))]
        for name, series in zip(names, panel.series, strict=True):
            shown = {"type": "filter", "expr": f"!({_hidden(entries.get(series.name, -1))})"}
            data.append({"name": name, "values": _rows(panel, series, starts), "transform": [shown]})
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
    return _Layout(figure, SCREEN).height(narrow=False)


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
    """The positions of panels and legend entries. Where wide and narrow drawings differ, a Vega expression."""

    def __init__(self, figure: Figure, medium: Medium) -> None:
        self.figure, self.medium = figure, medium
        axes = [panel.x for panel in figure.panels]
        lines = max((label.count("\n") for axis in axes for label in axis.labels), default=0)
        untitled = not any(axis.title for axis in axes)
        self.top = medium.text * (2.6 if any(panel.title for panel in figure.panels) else 1)
        self.bottom = medium.bottom + (lines - untitled) * medium.text
        self.right = medium.text + 2
        self.rooms = [self._room(panel.y) for panel in figure.panels]
        self.left = min(self.rooms[0], 40)  # of the legend
        self.entries = list(zip(self._wrapped(medium.width), self._wrapped(PHONE), strict=True))

    def _room(self, axis: Axis) -> float:
        """The room left of a panel, for the labels and the title of y."""
        if not axis.shown:
            return self.medium.text
        letters = max((len(label) for label in axis.labels), default=4)
        return 12 + self.medium.letter * letters + (self.medium.text + 3 if axis.title else 0)

    def _wrapped(self, width: float) -> list[tuple[float, int]]:
        """The x and the line of each legend entry, for a drawing of this width."""
        places: list[tuple[float, int]] = []
        x, line = 0.0, 0
        for series in self.figure.entries:
            need = self.entry_width(series) + 1.5 * self.medium.text
            if x and self.left + x + need > width:
                x, line = 0.0, line + 1
            places.append((round(x, 1), line))
            x += need
        return places

    def entry_width(self, series: Series) -> float:
        return 3.5 * self.medium.text + self.medium.letter * len(series.name)

    def heights(self, *, narrow: bool) -> list[float]:
        """The heights of the panels; side by side, all have the largest."""
        each = [panel.rows * self.medium.row or self.medium.panel[narrow] for panel in self.figure.panels]
        return each if narrow else [max(each)] * len(each)

    def above(self, number: int, *, narrow: bool) -> float:
        """The y of a panel; the number after the last is the y of a further one."""
        before = self.heights(narrow=narrow)[:number]
        return self.top + (sum(before) + number * (self.top + self.bottom) if narrow else 0)

    def legend_top(self, *, narrow: bool) -> float:
        last = len(self.figure.panels) - 1
        return self.above(last, narrow=narrow) + self.heights(narrow=narrow)[last] + self.bottom

    def height(self, *, narrow: bool) -> float:
        """The height of the whole drawing."""
        lines = max((places[narrow][1] + 1 for places in self.entries), default=0)
        return round(self.legend_top(narrow=narrow) + lines * self.medium.legend, 1)

    def signals(self) -> list[Json]:
        rooms, count, heights = (
            sum(self.rooms),
            len(self.figure.panels),
            [self.height(narrow=n) for n in (False, True)],
        )
        wide, narrow = f"(width - {rooms + self.right}) / {count}", f"width - {max(self.rooms) + self.right}"
        clicks = [
            {"events": f"@entry-{n}:click", "update": f"{{entry: {n}}}"} for n in range(len(self.entries))
        ]
        return [
            {"name": "width", "value": self.medium.width},
            {"name": "narrow", "update": f"width < {self.medium.narrow}"},
            {"name": "height", "update": _either(*heights)},
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


def _rows(panel: Panel, series: Series, starts: dict[float, float]) -> list[Json]:
    """A row for each point: x in every view, y, and what the series has of intervals, hover texts and labels."""
    views = series.views or (series.x,)
    crowded = _crowded(panel, series) if series.side == "above" else set()
    rows: list[Json] = []
    for place, y in enumerate(series.y):
        row: Json = {"x": [_number(view[place]) for view in views], "y": _number(y)}
        if series.draws == "bars":  # it begins where the previous one of its row ends
            row["start"] = _number(starts.get(y, 0.0))
            starts[y] = starts.get(y, 0.0) + series.x[place]
            row["x"] = [_number(starts[y])]
        if series.low:
            row |= {"low": _number(series.low[place]), "high": _number(series.high[place])}
        if series.hover:
            row["hover"] = series.hover[place]
        elif series.draws != "text":
            row["hover"] = f"{series.name}\n{series.x[place]:,g} · {y:.4g}"
        if series.labels:
            row["label"] = series.labels[place]
        if place in crowded:
            row["crowded"] = True
        rows.append(row)
    return rows


def _number(value: float) -> float | int | None:
    """Six significant digits, enough for a drawing; None for NaN and infinity."""
    if not math.isfinite(value):
        return None
    exact = float(value).is_integer() and abs(value) < 2**53
    return int(value) if exact else float(f"{value:.6g}")


def _crowded(panel: Panel, series: Series) -> set[int]:
    """The labels above points that a phone leaves out, because they would touch the previous one of their row."""
    letter = SCREEN.letter
    low, high = panel.x.range or (0.0, 1.0)
    unit = (PHONE - panel.label_room * letter) / (high - low)
    ends: dict[float, float] = {}  # row → where its last label ends
    crowded = set()
    for place, (x, y, text) in enumerate(zip(series.x, series.y, series.labels, strict=True)):
        half = len(text) * letter / 2
        if x * unit - half < ends.get(y, -math.inf) + letter:
            crowded.add(place)
        else:
            ends[y] = x * unit + half
    return crowded


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


def _panel(number: int, layout: _Layout) -> Json:
    figure, medium = layout.figure, layout.medium
    panel = figure.panels[number]
    axes = [view.axis for view in figure.views] or [panel.x]
    left = f"{sum(layout.rooms[: number + 1])} + {number} * panelWidth"
    above = [layout.above(number, narrow=narrow) for narrow in (False, True)]
    marks = [_mark("text", y=-8, text=_signal("title"), fontSize=medium.text, fill=_colour("text"))]
    marks += _verticals(panel, medium)
    for place, series in enumerate(panel.series):
        source = {"data": f"series-{number}-{place}"}
        marks += [mark | {"from": source} for mark in _series(series, medium)]
    height = _either(*(layout.heights(narrow=narrow)[number] for narrow in (False, True)))
    place = {"x": _signal(_either(left, max(layout.rooms))), "y": _signal(_either(*above))}
    return {
        "type": "group",
        "encode": {"update": place | {"width": _signal("panelWidth"), "height": _signal(height)}},
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
            {"name": "x", "type": panel.x.scale, "range": "width", "zero": False}
            | _x_domain(panel, number, medium),
            {"name": "y", "type": panel.y.scale, "range": "height", "zero": False} | _y_domain(panel, number),
        ],
        "axes": [
            _axis(panel.x, "x", medium, "xTicks[view]", "xLabels[view]")
            | {"title": _signal("xTitles[view]")},
            _axis(panel.y, "y", medium, "yTicks", "yLabels"),
        ],
        "marks": [*marks, *(_hover(number) if medium.interactive else [])],
    }


def _x_domain(panel: Panel, number: int, medium: Medium) -> Json:
    if panel.x.range is None:
        return {"domain": {"data": f"panel-{number}", "field": _signal("'x[' + view + ']'")}, "padding": 14}
    low, high = panel.x.range
    share = f"min(0.7, {panel.label_room * medium.letter} / width)"  # of the width, for labels beyond the last point
    return {"domain": [low, _signal(f"{low} + {high - low} / (1 - {share})")]}


def _y_domain(panel: Panel, number: int) -> Json:
    if panel.y.range is None:
        return {"domain": {"data": f"panel-{number}", "fields": ["y", "low", "high"]}, "padding": 10}
    low, high = panel.y.range
    return {"domain": [min(low, high), max(low, high)], "reverse": low > high}


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
        "grid": axis.grid and axis.shown,
        "domain": axis.shown,
        "labels": axis.shown,
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
    } | (given if axis.ticks else {"tickCount": 5})


def _verticals(panel: Panel, medium: Medium) -> list[Json]:
    """Vertical lines with their labels, in the first view only."""
    marks = []
    for number, vertical in enumerate(panel.verticals):
        x, shown, colour = {"scale": "x", "value": vertical.x}, _signal("view == 0 ? 1 : 0"), _colour("muted")
        marks.append(
            _mark("rule", x=x, y=0, y2=_signal("height"), stroke=colour, strokeDash=[2, 3], opacity=shown)
        )
        beside = {"angle": -90, "align": "right", "baseline": "bottom", "dx": -3, "dy": -2}
        size = medium.text - 2
        marks.append(
            _mark(
                "text",
                x=x,
                text=_signal(f"verticals[{number}]"),
                fontSize=size,
                fill=colour,
                opacity=shown,
                **beside,
            )
        )
    return marks


# ---------------------------------------------------------------- series


def _series(series: Series, medium: Medium) -> list[Json]:
    """The marks of a series, the lowest first."""
    colour = _colour(series.look.colour)
    low, high = ({"scale": "y", "field": end} for end in ("low", "high"))
    known = "isValid(datum.low) && isValid(datum.high)"
    marks = []
    if series.draws == "bars":
        start = {"scale": "x", "field": "start"}
        top, bottom = ({"scale": "y", "signal": f"datum.y {end}"} for end in ("- 0.31", "+ 0.31"))
        marks.append(_mark("rect", x=start, x2=X, y=top, y2=bottom, fill=colour))
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
    if series.labels:
        beside = {"align": "left", "baseline": "middle", "dx": medium.text / 2}
        if series.side == "above":
            beside = {"align": "center", "baseline": "bottom", "dy": -4}
        shown, size = _signal("narrow && datum.crowded ? 0 : 1"), medium.text - 1
        text = {"text": {"field": "label"}, "fontSize": size, "fill": _colour("text"), "opacity": shown}
        marks.append(_mark("text", x=X, y=Y, **text, **beside))
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


def _legend(layout: _Layout) -> list[Json]:
    """The legend below the panels; a click on an entry hides or shows its series."""
    medium, sample = layout.medium, 3 * layout.medium.text
    top = _either(*(layout.legend_top(narrow=narrow) for narrow in (False, True)))
    marks = []
    for number, (series, (wide, narrow)) in enumerate(
        zip(layout.figure.entries, layout.entries, strict=True)
    ):
        x = f"{layout.left} + {_either(wide[0], narrow[0])}"
        y = f"{top} + {medium.legend} * ({_either(wide[1], narrow[1])} + 0.5)"
        at = {"y": _signal(y), "opacity": _signal(f"{_hidden(number)} ? 0.35 : 1")}
        if series.draws == "bars":
            bar = {"yc": at["y"], "height": 0.7 * medium.text, "width": sample, "opacity": at["opacity"]}
            marks.append(_mark("rect", x=_signal(x), fill=_colour(series.look.colour), **bar))
        if series.draws in ("line", "both"):
            marks.append(
                _mark("rule", x=_signal(x), x2=_signal(f"{x} + {sample}"), **at, **_line(series, medium))
            )
        if series.draws in ("points", "both"):
            marks.append(_mark("symbol", x=_signal(f"{x} + {sample / 2}"), **at, **_marker(series, medium)))
        name = {
            "text": _signal(f"names[{number}]"),
            "fontSize": medium.text,
            "fill": _colour("text"),
            "baseline": "middle",
        }
        marks.append(_mark("text", x=_signal(f"{x} + {sample + 5}"), **at, **name))
        if medium.interactive:
            area = {
                "x": _signal(x),
                "width": layout.entry_width(series),
                "yc": at["y"],
                "height": medium.legend,
            }
            button = _mark("rect", **area, fill="transparent", cursor="pointer")
            marks.append(button | {"name": f"entry-{number}", "interactive": True})
    return marks
