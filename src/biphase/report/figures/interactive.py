"""Figures for the page: `plotly_json` turns a `Figure` into plain dicts for Plotly, without colours.

Every trace carries its role in `meta`, every line and note of the layout in its `name`; the page's script (`SCRIPT`)
fills in the colours of a theme. `narrow` is the layout of the same traces on a phone; `views` have the x values of
each trace for other measures of x.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from biphase.report.figures.description import PAPER, Axis, Dash, Figure, Marker, Panel, Series

SYMBOLS: dict[Marker, str] = {
    "circle": "circle",
    "square": "square",
    "triangle": "triangle-up",
    "down": "triangle-down",
    "diamond": "diamond",
    "hexagon": "hexagon",
    "cross": "x",
    "none": "circle",
}
DASHES: dict[Dash, str] = {
    "solid": "solid",
    "dash": "7px,3px",
    "dot": "2px,3px",
    "dashdot": "7px,3px,2px,3px",
}
LAST = 2000  # legend rank; the default is 1000
GAP = "\N{NO-BREAK SPACE}" * 2  # between a marker and the text right of it


def traces(series: Series, panel: int, narrow: list[str] | None = None) -> Iterable[dict[str, Any]]:
    """The Plotly traces of a series. `narrow`: its labels on a phone, where they differ."""
    axes = {"xaxis": f"x{panel + 1 if panel else ''}", "yaxis": f"y{panel + 1 if panel else ''}"}
    about = {
        "name": as_html(series.name),
        "legendgroup": group_of(series),
        "showlegend": series.legend,
        **axes,
    }
    if series.draws == "bars":
        yield about | _bars(series)
        return
    if series.band and series.low:
        yield about | _band(series)
    line: dict[str, Any] = about | _line(series) | ({"legendrank": LAST} if series.name == PAPER else {})
    if narrow is not None:
        line["meta"]["narrow"] = [as_html(text) for text in narrow]
    yield line


def _line(series: Series) -> dict[str, Any]:
    look = series.look
    modes = {"line": "lines", "points": "markers", "both": "lines+markers", "text": "text"}
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": modes[series.draws],
        "x": plain(series.x),
        "y": plain(series.y),
        "meta": {"role": look.colour} | ({"hollow": True} if look.hollow else {}),
    }
    if series.draws in ("line", "both"):
        trace["line"] = {"width": round(1.8 * look.width, 2), "dash": DASHES[look.dash]}
    if series.draws in ("points", "both"):
        size = round((10 if look.hollow else 8) * look.size, 1)
        trace["marker"] = {"symbol": SYMBOLS[look.marker], "size": size, "line": {"width": 1.5}}
    if series.low and not series.band:
        above = [high - y for high, y in zip(series.high, series.y, strict=True)]
        below = [y - low for low, y in zip(series.low, series.y, strict=True)]
        bars = {"type": "data", "symmetric": False, "thickness": 1.3, "width": 4}
        trace["error_y"] = bars | {"array": plain(above), "arrayminus": plain(below)}
    if series.labels:
        right = series.side == "right"
        trace["text"] = [f"{GAP}{as_html(text)}" if right else as_html(text) for text in series.labels]
        trace["textposition"] = "middle right" if right else "top center"
        trace["textfont"] = {"size": 11}
        trace["mode"] = trace["mode"] if series.draws == "text" else f"{trace['mode']}+text"
        trace["cliponaxis"] = False
    return trace | _hover(series)


def _band(series: Series) -> dict[str, Any]:
    """The interval as an area: along its upper edge and back along its lower."""
    known = [
        (x, low, high)
        for x, low, high in zip(series.x, series.low, series.high, strict=True)
        if math.isfinite(low) and math.isfinite(high)
    ]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": plain([one[0] for one in known] + [one[0] for one in reversed(known)]),
        "y": plain([one[2] for one in known] + [one[1] for one in reversed(known)]),
        "fill": "toself",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
        "meta": {"role": series.look.colour},
    }


def _bars(series: Series) -> dict[str, Any]:
    trace: dict[str, Any] = {
        "type": "bar",
        "orientation": "h",
        "x": plain(series.x),
        "y": plain(series.y),
        "width": 0.62,
        "meta": {"role": series.look.colour},
    }
    if series.labels:
        trace |= {
            "text": [as_html(text) for text in series.labels],
            "textposition": "outside",
            "textfont": {"size": 11},
        }
        trace |= {"cliponaxis": False, "textangle": 0}
    return trace | _hover(series)


def _hover(series: Series) -> dict[str, Any]:
    if series.hover:
        return {"hovertext": [_hover_text(text) for text in series.hover], "hoverinfo": "text"}
    if series.draws == "text":
        return {"hoverinfo": "skip"}
    return {"hovertemplate": f"<b>{_in_template(series.name)}</b><br>%{{x:,}} · %{{y:.4g}}<extra></extra>"}


def _hover_text(text: str) -> str:
    """Hover text with its first line, the title of the point, in bold."""
    first, *rest = as_html(text).split("<br>")
    return "<br>".join([f"<b>{first}</b>", *rest])


def as_html(text: str) -> str:
    """Escape text for Plotly, which parses every name, label, tick, title and note as HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\n", "<br>")


def _in_template(text: str) -> str:
    """Escape text for a hover template, where Plotly also substitutes braces."""
    return as_html(text).replace("{", "&#123;")


def group_of(series: Series) -> str:
    """The legend group of a series. Plotly uses it as an object key, so a prefix keeps out `__proto__`."""
    return f"series {series.name}"


def name_once(data: list[dict[str, Any]], groups: set[str]) -> None:
    """Show each legend group once: the first of its traces represents all."""
    for trace in data:
        first = trace["showlegend"] and trace["legendgroup"] in groups
        trace["showlegend"] = first
        if first:
            groups = groups - {trace["legendgroup"]}


def plain(values: Iterable[float]) -> list[float | int | None]:
    """Numbers with six significant digits, enough for a screen; null for NaN and infinity."""
    return [_short(value) for value in values]


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    if float(value).is_integer():
        return int(value)
    return float(f"{value:.6g}")


# ---------------------------------------------------------------- layouts
# Panels stand side by side on a desktop and below each other on a phone. Heights are in pixels and do not depend on
# the width, so the page does not shift while figures are drawn. Notes and lines refer to the axes of their panel, not
# to the whole drawing, so both layouts have the same ones.


FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

PANEL = {False: 250, True: 205}  # pixels: the height of a panel, by narrow
ROW = 19  # pixels: the height of a list row
TOP, BOTTOM, LEFT, RIGHT = 34, 52, 52, 14
LEGEND = 34
LETTER = 6.4  # pixels: the width of a character in a label
WIDTHS = {
    False: 1000,
    True: 366,
}  # pixels: the page's column, by narrow; sets the share of x that labels need


def layout_of(figure: Figure, *, narrow: bool) -> dict[str, Any]:
    """The Plotly layout of a figure, for a desktop or a phone."""
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
        "uirevision": figure.id,  # keeps what a reader hid or zoomed when the theme changes
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
    """The position of a panel as shares of width and height: in one row, or in one column."""
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
    """The properties of an x axis that another view changes."""
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
    """The labels above points that fit on a phone; one that would touch the previous one is empty."""
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
    """The panel's title and the labels of its vertical lines."""
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
            # On a log axis Plotly positions annotations by the logarithm, but shapes by the value.
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


# ---------------------------------------------------------------- script
# `biphaseFigures.show(box, figure, palette)` draws a figure, and redraws it after the theme, the width or the view has
# changed; it keeps what a reader has hidden or zoomed. It needs the Plotly script on the page and nothing else.


NARROW = 720  # pixels of the box: below it, panels stand below each other

SCRIPT = """
const biphaseFigures = {
  narrow: NARROW,

  paint(figure, palette, narrow, view) {
    const tint = (hex, alpha) => `rgba(${[1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16))},${alpha})`;
    const shown = (figure.views || [])[view];
    const data = figure.data.map((trace, number) => {
      const colour = palette[trace.meta.role], made = {...trace};
      if (shown) made.x = shown.x[number];
      if (narrow && trace.meta.narrow) made.text = trace.meta.narrow;
      if (trace.fill) {
        made.fillcolor = tint(colour, 0.16);
        made.line = {...trace.line, color: "rgba(0,0,0,0)"};
        return made;
      }
      if (trace.line) made.line = {...trace.line, color: colour};
      if (trace.marker || trace.type === "bar") {
        const edge = (trace.marker || {}).line || {width: 0};
        const inside = trace.meta.hollow ? "rgba(0,0,0,0)" : colour;
        made.marker = {...trace.marker, color: inside, line: {...edge, color: colour}};
      }
      if (trace.error_y) made.error_y = {...trace.error_y, color: colour};
      if (trace.textfont) made.textfont = {...trace.textfont, color: palette.text};
      return made;
    });
    const layout = structuredClone(narrow ? figure.narrow : figure.layout);
    if (view) { // uprights are of the first one
      layout.shapes = [];
      layout.annotations = layout.annotations.filter(note => note.name !== "muted");
    }
    layout.font.color = palette.text;
    layout.hoverlabel = {
      ...layout.hoverlabel, bgcolor: palette.background, bordercolor: palette.muted,
      font: {...layout.hoverlabel.font, color: palette.text},
    };
    for (const [name, axis] of Object.entries(layout)) {
      if (!/^[xy]axis/.test(name)) continue;
      axis.gridcolor = axis.linecolor = palette.grid;
      axis.tickfont = {...axis.tickfont, color: palette.muted};
      if (shown && name[0] === "x") {
        Object.assign(axis, structuredClone(shown.axis), {uirevision: shown.name});
      }
    }
    for (const note of layout.annotations) note.font.color = palette[note.name];
    for (const line of layout.shapes) line.line.color = palette[line.name];
    return {data, layout};
  },

  show(box, figure, palette, view = 0) {
    const narrow = box.clientWidth < this.narrow;
    const {data, layout} = this.paint(figure, palette, narrow, view);
    box.style.height = `${layout.height}px`; // else Plotly gives every figure the height of its usual one
    return Plotly.react(box, data, layout, {responsive: true, displayModeBar: false});
  },
};
""".replace("NARROW", str(NARROW))


# ---------------------------------------------------------------- figure


def plotly_json(figure: Figure) -> dict[str, Any]:
    """The figure for Plotly: data, layout, the narrow layout, and the views if it has any."""
    data = _data(figure)
    name_once(data, {group_of(series) for series in figure.entries})
    made: dict[str, Any] = {
        "data": data,
        "layout": layout_of(figure, narrow=False),
        "narrow": layout_of(figure, narrow=True),
    }
    if figure.views:
        made["views"] = [_view(figure, number) for number in range(len(figure.views))]
    return made


def _data(figure: Figure, view: int = 0) -> list[dict[str, Any]]:
    """The traces of all panels, with x in the measure of this view."""
    return [
        trace
        for number, panel in enumerate(figure.panels)
        for series in panel.series
        for trace in traces(
            replace(series, x=series.views[view]) if series.views else series,
            number,
            apart(panel, series) if series.side == "above" else None,
        )
    ]


def _view(figure: Figure, number: int) -> dict[str, Any]:
    view = figure.views[number]
    return {
        "name": view.name,
        "axis": view_axis(view.axis),
        "x": [trace["x"] for trace in _data(figure, number)],
    }
