"""Figures for the page: plain JSON without a colour, the same numbers, one entry a name, two layouts."""

import itertools
import json
import re
import time

import pytest

from biphase.report.estimates import estimate
from biphase.report.figures import figures, plotly_json
from biphase.report.figures.description import (
    PALETTES,
    PAPER,
    Axis,
    Figure,
    Panel,
    Series,
    Style,
    Vertical,
    View,
)
from biphase.report.figures.interactive import NARROW, SCRIPT


@pytest.fixture(scope="module")
def every(paper):
    return {figure.id: (figure, plotly_json(figure)) for figure in figures(*paper)}


def one_panel(*series, **fields):
    return Figure("f", "F", "", (Panel("P", Axis("x"), Axis("y"), series, **fields),))


def test_it_is_json_that_any_browser_reads(every):
    for figure, made in every.values():
        json.dumps(made, allow_nan=False)
        assert {"data", "layout", "narrow"} <= made.keys(), figure.id


def test_there_is_no_colour_in_it(every):
    text = json.dumps([made for _, made in every.values()])
    assert not re.search(r'"#[0-9a-fA-F]{3,8}"', text)
    assert set(re.findall(r"rgba?\([^)]*\)", text)) == {"rgba(0,0,0,0)"}  # backgrounds are the page's


def test_every_trace_note_and_line_has_a_role_that_both_palettes_know(every):
    for _, made in every.values():
        roles = [trace["meta"]["role"] for trace in made["data"]]
        for layout in (made["layout"], made["narrow"]):
            roles += [one["name"] for one in (*layout["annotations"], *layout["shapes"])]
        assert roles
        for palette in PALETTES.values():
            assert set(roles) <= palette.keys()


def test_the_points_are_those_of_the_figure(every):
    for figure, made in every.values():
        lines = [trace for trace in made["data"] if "fill" not in trace]
        series = [one for panel in figure.panels for one in panel.series]
        assert len(lines) == len(series)
        for trace, one in zip(lines, series, strict=True):
            assert trace["name"] == one.name
            for axis in "xy":
                numbers = [value for value in trace[axis] if value is not None]
                known = [value for value in getattr(one, axis) if value == value]  # NaN is no number
                assert numbers == pytest.approx(known, rel=1e-5)


def test_intervals_are_bars_around_their_point():
    series = Series(
        "s", Style("mlm"), (1.0, 2.0), (5.0, 6.0), low=(4.0, float("nan")), high=(6.5, float("nan"))
    )
    (trace,) = plotly_json(one_panel(series))["data"]
    assert trace["error_y"]["array"] == [1.5, None]
    assert trace["error_y"]["arrayminus"] == [1, None]


def test_a_band_runs_along_its_upper_edge_and_back_along_its_lower():
    nan = float("nan")
    series = Series("s", Style("mlm"), (1.0, 2.0, 3.0), (5.0, 6.0, 7.0), low=(4.0, nan, 6.0), high=(6.0, nan, 8.0), band=True)  # fmt: skip
    band, line = plotly_json(one_panel(series))["data"]
    assert (band["x"], band["y"]) == ([1, 3, 3, 1], [6, 8, 6, 4])
    assert band["fill"] == "toself"
    assert not band["showlegend"]
    assert "error_y" not in line


def test_each_name_is_in_the_legend_once_and_the_paper_last(every):
    for figure, made in every.values():
        shown = [trace["name"] for trace in made["data"] if trace["showlegend"]]
        assert sorted(shown) == sorted(one.name for one in figure.entries)
        assert made["layout"]["showlegend"] == bool(shown)
        for trace in made["data"]:
            assert trace["legendgroup"] == f"series {trace['name']}"  # a click hides it in every panel
            assert ("legendrank" in trace) == (trace["name"] == PAPER)


def test_a_name_alone_needs_no_legend_but_the_paper_does():
    ours, paper = Series("1m", Style("mlm"), (1.0,), (2.0,)), Series(PAPER, Style("paper"), (1.0,), (2.0,))
    assert one_panel(ours).entries == ()
    assert [one.name for one in one_panel(paper, ours).entries] == ["1m", PAPER]


def test_panels_stand_in_a_row_and_on_a_phone_below_each_other(every):
    _, made = every["objectives"]
    wide, narrow = made["layout"], made["narrow"]
    axes = ["", "2", "3", "4"]
    for before, after in itertools.pairwise(axes):
        assert wide[f"xaxis{before}"]["domain"][1] < wide[f"xaxis{after}"]["domain"][0]
        assert narrow[f"yaxis{before}"]["domain"][0] > narrow[f"yaxis{after}"]["domain"][1]
    assert {tuple(narrow[f"xaxis{one}"]["domain"]) for one in axes} == {(0, 1)}
    assert narrow["height"] > 2 * wide["height"]
    ends = [
        share for one in axes for share in (*narrow[f"yaxis{one}"]["domain"], *wide[f"xaxis{one}"]["domain"])
    ]
    assert min(ends) == 0
    assert max(ends) == 1


def test_views_give_each_trace_its_other_x(every):
    figure, made = every["efficiency"]
    assert [view["name"] for view in made["views"]] == ["tokens", "FLOPs"]
    for number, view in enumerate(made["views"]):
        assert len(view["x"]) == len(made["data"])
        first = next(place for place, trace in enumerate(made["data"]) if trace["name"] == "CLM")
        series = [one for panel in figure.panels for one in panel.series][first]
        assert view["x"][first] == pytest.approx(list(series.views[number]), rel=1e-5)
        assert view["axis"]["title"]["text"] == f"training {view['name']}"
        assert len(view["axis"]["ticktext"]) == len(view["axis"]["tickvals"]) > 2
    assert made["views"][0]["x"] == [trace["x"] for trace in made["data"]]
    assert "views" not in every["ratio"][1]


def test_a_view_reaches_the_area_of_an_interval_too():
    series = Series("s", Style("mlm"), (1.0, 2.0), (5.0, 6.0), low=(4.0, 5.0), high=(6.0, 7.0), band=True, views=((1.0, 2.0), (10.0, 20.0)))  # fmt: skip
    figure = Figure(
        "f", "", "", (Panel("", Axis(), Axis(), (series,)),), (View("a", Axis()), View("b", Axis()))
    )
    assert plotly_json(figure)["views"][1]["x"] == [[10, 20, 20, 10], [10, 20]]


def test_words_of_users_are_text_and_not_html():
    series = Series("<b>x</b>", Style("mlm"), (1.0,), (2.0,), hover=("<script>\n1 & 2",))
    (trace,) = plotly_json(one_panel(series))["data"]
    assert trace["hovertext"] == ["<b>&lt;script&gt;</b><br>1 &amp; 2"]
    (plain,) = plotly_json(one_panel(Series("<i>", Style("mlm"), (1.0,), (2.0,))))["data"]
    assert plain["hovertemplate"].startswith("<b>&lt;i&gt;</b>")


def test_every_text_that_plotly_reads_as_html_is_escaped():
    evil, safe = "<a href='https://x'>%{x}</a>", "&lt;a href='https://x'&gt;"
    series = Series(evil, Style("mlm"), (1.0, 2.0), (2.0, 3.0), labels=(evil, evil))
    axis = Axis(evil, ticks=(1.0,), labels=(evil,))
    figure = Figure("x", evil, evil, (Panel(evil, axis, axis, (series,), (Vertical(1.0, evil),)),))
    made = plotly_json(figure)
    (trace,) = made["data"]
    texts = [trace["name"], trace["hovertemplate"], *trace["text"]]
    for layout in (made["layout"], made["narrow"]):
        texts += [note["text"] for note in layout["annotations"]]
        for name in ("xaxis", "yaxis"):
            texts += [layout[name]["title"]["text"], *layout[name]["ticktext"]]
    assert len(texts) == 4 + 2 * 6
    assert all(safe in text and "<a" not in text for text in texts)
    assert "%{x}" not in trace["hovertemplate"].replace("%{x:,}", ""), "a name is no template"


def test_no_name_is_a_key_that_objects_have_already():
    (trace,) = plotly_json(one_panel(Series("__proto__", Style("mlm"), (1.0,), (2.0,))))["data"]
    assert trace["name"] == "__proto__"
    assert trace["legendgroup"] not in ("__proto__", "constructor", "toString")


def test_an_upright_stands_in_its_panel():
    figure = one_panel(
        Series("s", Style("mlm"), (1.0,), (2.0,)), verticals=(Vertical(7.0, "decay"), Vertical(9.0))
    )
    layout = plotly_json(figure)["layout"]
    assert [(one["x0"], one["x1"], one["yref"]) for one in layout["shapes"]] == [(7, 7, "y domain"), (9, 9, "y domain")]  # fmt: skip
    assert [one["text"] for one in layout["annotations"]] == ["P", "decay"]


def test_logarithmic_ranges_are_given_as_plotly_counts_them():
    panel = Panel("", Axis("x", "log", (1.0, 100.0), range=(0.1, 1000.0)), Axis(), ())
    axis = plotly_json(Figure("f", "", "", (panel,)))["layout"]["xaxis"]
    assert axis["range"] == [-1, 3]
    assert axis["ticktext"] == ["1", "100"]


def test_labels_have_room_on_both_layouts(every):
    figure, made = every["tree"]
    (panel,) = figure.panels
    for layout in (made["layout"], made["narrow"]):
        _low, high = layout["xaxis"]["range"]
        assert high > panel.x.range[1]
    assert made["narrow"]["xaxis"]["range"][1] > made["layout"]["xaxis"]["range"][1]


def test_the_script_knows_the_layouts_and_the_parts_of_a_figure():
    assert f"narrow: {NARROW}," in SCRIPT
    for word in ("figure.data", "figure.layout", "figure.narrow", "figure.views", "meta.role", "meta.hollow"):
        assert word in SCRIPT


def test_the_same_evidence_gives_the_same_json(paper, every):
    again = {figure.id: plotly_json(figure) for figure in figures(paper[0], estimate(paper[0]))}
    assert json.dumps(again) == json.dumps({name: made for name, (_, made) in every.items()})


@pytest.mark.alone
def test_the_paper_is_described_in_a_second_and_small(paper):
    began = time.process_time()
    text = json.dumps([plotly_json(figure) for figure in figures(*paper)], allow_nan=False)
    assert time.process_time() - began < 1
    assert len(text) < 1_500_000
