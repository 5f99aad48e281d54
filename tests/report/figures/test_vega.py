"""The drawing of figures: the numbers that were described, on the page and in print, and no text that is code."""

import itertools
import subprocess
import sys
import time

import pytest
import vl_convert

from biphase.report.figures.description import (
    Axis,
    Figure,
    Panel,
    Series,
    Style,
    Vertical,
)
from biphase.report.figures.vega import SCREEN, draw, specification

NAN = float("nan")


def one_panel(*series, **fields):
    return Figure("f", "F", "", (Panel("P", Axis("x"), Axis("y"), series, **fields),))


def rows(spec, panel=0, series=0):
    return next(one["values"] for one in spec["data"] if one["name"] == f"series-{panel}-{series}")


def signal(spec, name):
    return next(one for one in spec["signals"] if one["name"] == name)


def walk(value, path=()):
    """Every (path, text) of a specification."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from walk(inner, (*path, name))
    elif isinstance(value, list):
        for inner in value:
            yield from walk(inner, path)
    elif isinstance(value, str):
        yield path, value


def expressions(spec):
    return [text for path, text in walk(spec) if path[-1] in ("signal", "expr", "update", "events")]


def panels_of(spec):
    """The (x, y, width, height) at which Vega places the panels, and all drawn texts."""
    root = vl_convert.vega_to_scenegraph(spec)["scenegraph"]["items"][0]
    groups = [group for mark in root["items"] if mark["marktype"] == "group" for group in mark["items"]]
    return [(group["x"], group["y"], group["width"], group["height"]) for group in groups]


# ---------------------------------------------------------------- numbers


def test_points_are_those_of_the_figure_in_every_view(by_id):
    for figure in by_id.values():
        spec = specification(figure)
        for number, panel in enumerate(figure.panels):
            for place, series in enumerate(panel.series):
                drawn = rows(spec, number, place)
                assert [row["y"] for row in drawn if row["y"] is not None] == pytest.approx(
                    [y for y in series.y if y == y], rel=1e-5
                )
                for view, xs in enumerate(series.views or (series.x,)):
                    drawn_x = [row["x"][view] for row in drawn if row["x"][view] is not None]
                    assert drawn_x == pytest.approx([x for x in xs if x == x], rel=1e-5)


def test_an_unknown_interval_is_null_and_others_keep_their_ends():
    for band in (False, True):
        series = Series("s", Style("mlm"), (1.0, 2.0), (5.0, 6.0), low=(4.0, NAN), high=(6.5, NAN), band=band)
        drawn = rows(specification(one_panel(series)))
        assert [(row["low"], row["high"]) for row in drawn] == [(4, 6.5), (None, None)]


# ---------------------------------------------------------------- legend and layout


def test_panels_stand_in_a_row_and_on_a_phone_below_each_other(by_id):
    spec = specification(by_id["objectives"])
    wide = panels_of(spec)
    signal(spec, "width")["value"] = 366
    narrow = panels_of(spec)
    assert len(wide) == len(narrow) == 4
    assert len({y for _, y, _, _ in wide}) == len({x for x, _, _, _ in narrow}) == 1
    for panels, at, along in ((wide, 0, 2), (narrow, 1, 3)):
        for before, after in itertools.pairwise(panels):
            assert before[at] + before[along] < after[at]
    assert wide[-1][0] + wide[-1][2] <= SCREEN.width
    assert narrow[0][0] + narrow[0][2] <= 366


# ---------------------------------------------------------------- colours and texts


EVIL = "'] + alert(1) + ['<a href=x>\"\\"


@pytest.mark.parametrize("text", [EVIL, "__proto__", "constructor", "toString"])
def test_texts_of_users_are_values_and_never_code(text):
    axis = Axis("x", ticks=(1.0,), labels=(text,))
    series = [Series(f"{text}{end}", Style("mlm"), (1.0,), (2.0,), hover=(text,)) for end in ("", "2")]
    figure = Figure("x", text, text, (Panel(text, axis, axis, tuple(series), (Vertical(1.0, text),)),))
    spec = specification(figure)
    assert not [one for one in expressions(spec) if text in one or "alert" in one]
    svg = vl_convert.vega_to_svg(spec)
    assert "<a" not in svg
    assert (
        svg.count(text.replace("<", "&lt;").replace(">", "&gt;")) == 6
    )  # panel, two ticks, vertical, legend entries


# ---------------------------------------------------------------- print


DRAW = """
import sys
from pathlib import Path
from biphase.report.figures.description import Axis, Figure, Panel, Series, Style, Vertical
from biphase.report.figures.vega import draw

nan = float("nan")
series = (
    Series("MLM → 40%", Style("mlm"), (1.0, 2.0), (5.0, 6.0), low=(4.0, nan), high=(6.0, nan)),
    Series("area", Style("clm", dash="dash"), (1.0, 2.0), (3.0, 4.0), low=(2.0, 3.0), high=(4.0, 5.0), band=True),
)
panel = Panel("Retrieval", Axis("learning rate", "log"), Axis("test score, %"), series, (Vertical(1.5, "decay"),))
for name, content in draw(Figure("sample", "", "", (panel, panel))).items():
    Path(sys.argv[1], name).write_bytes(content)
"""


def test_print_has_the_same_bytes_in_two_processes_no_date_and_embedded_fonts(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        command = [sys.executable, "-W", "error", "-c", DRAW, str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        if name == "one":
            time.sleep(1.1)  # so that a date would differ
    for form in ("svg", "pdf"):
        one, two = ((tmp_path / name / f"sample.{form}").read_bytes() for name in ("one", "two"))
        assert one == two
        assert b"Date" not in one
    pdf = (tmp_path / "one/sample.pdf").read_bytes()
    assert pdf.startswith(b"%PDF")
    assert b"/FontFile" in pdf
    assert b"/Type3" not in pdf, "publishers refuse it"


def test_a_figure_with_views_is_printed_once_for_each(by_id):
    drawn = draw(by_id["efficiency"])
    stems = ("efficiency", "efficiency-flops")
    assert [*drawn] == [f"{stem}.{form}" for stem in stems for form in ("svg", "pdf")]
    assert len({*drawn.values()}) == 4
