"""The series of an interactive figure as traces of Plotly, their roles in `meta` and no colour in them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from biphase.report.figures.description import PAPER, Dash, Marker, Series

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
LAST = 2000  # in the legend, where others have 1000
GAP = "\N{NO-BREAK SPACE}" * 2  # between a mark and the words right of it


def traces(series: Series, panel: int, narrow: list[str] | None = None) -> Iterable[dict[str, Any]]:
    """`narrow`: the labels on a phone, where they are others."""
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
    """The first line in bold: it says what a point is."""
    first, *rest = as_html(text).split("<br>")
    return "<br>".join([f"<b>{first}</b>", *rest])


def as_html(text: str) -> str:
    """Text for Plotly, which reads every name, label, tick, title and note as HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\n", "<br>")


def _in_template(text: str) -> str:
    """Text inside a template, where Plotly fills in whatever stands in braces."""
    return as_html(text).replace("{", "&#123;")


def group_of(series: Series) -> str:
    """Series of one name are one group. Plotly makes it a key of an object, which `__proto__` must not be."""
    return f"series {series.name}"


def name_once(data: list[dict[str, Any]], groups: set[str]) -> None:
    """Each name once: the first of its traces stands for all."""
    for trace in data:
        first = trace["showlegend"] and trace["legendgroup"] in groups
        trace["showlegend"] = first
        if first:
            groups = groups - {trace["legendgroup"]}


def plain(values: Iterable[float]) -> list[float | int | None]:
    """Numbers with as many digits as a screen can show; null where there is none."""
    return [_short(value) for value in values]


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    if float(value).is_integer():
        return int(value)
    return float(f"{value:.6g}")
