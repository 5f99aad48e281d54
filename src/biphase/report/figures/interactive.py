"""A figure for the page: plain dicts for Plotly.newPlot, without a colour in them.

Every trace carries its role in `meta`, every line and note of the layout in its `name`; the page's script fills in the
colours of a theme. `narrow` is the layout of the same traces on a phone; `views` say what x becomes, trace by trace,
when it is measured another way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from biphase.report.figures.description import Figure
from biphase.report.figures.layouts import apart, layout_of, view_axis
from biphase.report.figures.traces import group_of, name_once, traces


def plotly_json(figure: Figure) -> dict[str, Any]:
    """The figure as Plotly takes it: data, layout, the narrow layout, and the views if it has any."""
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
    """The traces of all panels, with x as this view measures it."""
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
