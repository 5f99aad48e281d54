"""Figures for print: the numbers that were described, the same bytes in every process, legible in grey."""

import itertools
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib import rc_context

from biphase.report.figures import draw, figures, scores
from biphase.report.figures.description import PALETTES, Axis, Figure, Panel, Series, Style, Vertical
from biphase.report.figures.static import STYLE, WIDTH, _printed, sheet_of

LIGHT = PALETTES["light"]
DRAW = """
import sys
from pathlib import Path
from biphase.report.figures import draw
from biphase.report.figures.description import Axis; from biphase.report.figures.description import Figure; from biphase.report.figures.description import Style; from biphase.report.figures.description import Panel; from biphase.report.figures.description import Series; from biphase.report.figures.description import Vertical

nan = float("nan")
series = (
    Series("MLM → 40%", Style("mlm"), (1.0, 2.0), (5.0, 6.0), low=(4.0, nan), high=(6.0, nan)),
    Series("area", Style("clm", dash="dash"), (1.0, 2.0), (3.0, 4.0), low=(2.0, 3.0), high=(4.0, 5.0), band=True),
    Series("words", Style("text"), (1.0,), (5.5,), draws="text", labels=("a name",)),
)
panel = Panel("Retrieval", Axis("learning rate", "log"), Axis("test score, %"), series, (Vertical(1.5, "decay"),))
draw(Figure("sample", "", "", (panel, panel)), Path(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def every(paper):
    return {figure.id: figure for figure in figures(*paper)}


@pytest.fixture(scope="module")
def printed(every, tmp_path_factory):
    """One figure drawn into a folder that was not there, and what matplotlib was set to before and after."""
    import matplotlib

    before = dict(matplotlib.rcParams)
    paths = draw(every["ratio"], tmp_path_factory.mktemp("print") / "new")
    return paths, before, dict(matplotlib.rcParams)


def test_each_figure_is_an_svg_and_a_pdf_by_its_id(printed):
    svg, pdf = printed[0]
    assert [path.name for path in (svg, pdf)] == ["ratio.svg", "ratio.pdf"]
    assert svg.read_text().startswith("<?xml")
    assert pdf.read_bytes().startswith(b"%PDF")


def test_drawing_leaves_matplotlib_as_it_was(printed):
    _, before, after = printed
    assert after == before


def test_fonts_are_embedded_as_publishers_ask(printed):
    assert b"/Type3" not in printed[0][1].read_bytes()


def _timed(figure):
    """Nothing was computed, so the figure has no seconds: they are put in, 3e15 FLOPs each."""
    panels = tuple(
        replace(panel, series=tuple(_with_seconds(one) if one.views else one for one in panel.series))
        for panel in figure.panels
    )
    every = [x for panel in panels for one in panel.series if one.views for x in one.views[2]]
    return replace(figure, panels=panels, views=(*figure.views, scores._view("seconds", every)))


def _with_seconds(series):
    return replace(series, views=(*series.views, tuple(flops / 3e15 for flops in series.views[1])))


def test_efficiency_is_printed_over_tokens_flops_and_seconds(every, tmp_path):
    names = [path.name for path in draw(_timed(every["efficiency"]), tmp_path)]
    stems = ("efficiency", "efficiency-flops", "efficiency-seconds")
    assert names == [f"{stem}.{form}" for stem in stems for form in ("svg", "pdf")]
    assert len({(tmp_path / name).read_bytes() for name in names[::2]}) == 3


@pytest.mark.parametrize("view", [0, 1, 2])
def test_labels_of_a_logarithmic_axis_do_not_touch(every, view):
    _, one = _printed(_timed(every["efficiency"]))[view]
    with rc_context(STYLE):
        sheet = sheet_of(one)
        sheet.draw_without_rendering()
        for axes in sheet.axes:
            told = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
            assert all(left.x1 < right.x0 for left, right in itertools.pairwise(told))


def test_a_name_the_font_cannot_write_is_drawn_without_a_warning(every, tmp_path):
    first = every["objectives"].panels[0]
    foreign = replace(every["objectives"], panels=(replace(first, title="日本語"),))
    assert len(draw(foreign, tmp_path)) == 2


def test_the_same_bytes_in_two_processes_and_no_date(tmp_path):
    for name in ("one", "two"):
        command = [sys.executable, "-W", "error", "-c", DRAW, str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        if name == "one":
            time.sleep(1.1)  # so that a date would differ
    for form in ("svg", "pdf"):
        one, two = ((tmp_path / name / f"sample.{form}").read_bytes() for name in ("one", "two"))
        assert one == two
    assert b"CreationDate" not in (tmp_path / "one/sample.pdf").read_bytes()
    assert b"<dc:date>" not in (tmp_path / "one/sample.svg").read_bytes()


def test_the_numbers_are_those_of_the_figure(every):
    figure = every["objectives"]
    sheet = sheet_of(figure)
    assert len(sheet.axes) == len(figure.panels)
    for at, panel in zip(sheet.axes, figure.panels, strict=True):
        drawn = [
            (tuple(line.get_xdata()), tuple(line.get_ydata()))
            for line in at.get_lines()
            if line.get_marker() not in ("_", "|")
        ]
        for series in panel.series:
            assert (series.x, series.y) in drawn
        assert at.get_title(loc="left") == panel.title


def test_a_bar_stands_upon_the_one_before():
    first, second = (
        Series(name, Style("clm", shade), (x,), (0.0,), draws="bars") for name, shade, x in (("a", "", 3.0), ("b", "-soft", 1.0))
    )  # fmt: skip
    sheet = sheet_of(Figure("f", "", "", (Panel("", Axis(), Axis(), (first, second), rows=4),)))
    assert [(bar.get_x(), bar.get_width()) for bar in sheet.axes[0].patches] == [(0, 3), (3, 1)]


def test_it_is_as_wide_as_a_page_and_in_eight_points(every):
    for figure in every.values():
        assert sheet_of(figure).get_figwidth() == WIDTH
    from matplotlib import rc_context

    from biphase.report.figures.static import STYLE

    with rc_context(STYLE):
        sheet = sheet_of(every["objectives"])
    assert sheet.axes[0].title.get_fontsize() == 8
    assert {text.get_fontsize() for text in sheet.legends[0].get_texts()} == {8}
    assert sheet_of(every["tree"]).get_figheight() < 9.5  # a page holds it


def test_nothing_is_cut_off_and_no_legend_covers_a_panel(every):
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from biphase.report.figures.static import STYLE

    for figure in every.values():
        with rc_context(STYLE):
            sheet = sheet_of(figure)
            renderer = FigureCanvasAgg(sheet).get_renderer()
            page = sheet.bbox
            boxes = [at.get_tightbbox(renderer) for at in sheet.axes]
            for box in boxes:
                assert box.x0 >= page.x0 - 1, figure.id
                assert box.y0 >= page.y0 - 1, figure.id
                assert box.x1 <= page.x1 + 1, figure.id
                assert box.y1 <= page.y1 + 1, figure.id
            for one, other in itertools.pairwise(boxes):
                assert one.x1 < other.x0 + 4, figure.id
            for legend in sheet.legends:
                lowest = min(box.y0 for box in boxes)
                assert legend.get_window_extent(renderer).y1 <= lowest + 4, figure.id


def test_colours_are_those_of_the_light_theme_and_hollow_marks_are_empty():
    full = Series("a", Style("mlm"), (1.0,), (2.0,))
    empty = Series("paper", Style("paper", marker="diamond", hollow=True), (1.0,), (2.0,), draws="points")
    panel = Panel("", Axis(), Axis(), (full, empty), (Vertical(1.0, "x"),))
    lines = {line.get_marker(): line for line in sheet_of(Figure("f", "", "", (panel,))).axes[0].get_lines()}
    assert lines["o"].get_markerfacecolor() == LIGHT["mlm"]
    assert lines["D"].get_markerfacecolor() == "none"
    assert lines["D"].get_markeredgecolor() == LIGHT["paper"]


def test_describing_figures_needs_neither_torch_nor_a_drawing_library():
    code = "import sys, biphase.report.figures\nprint(*sorted({'torch', 'matplotlib', 'plotly', 'scipy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


@pytest.mark.alone
@pytest.mark.campaign
def test_the_paper_is_drawn_in_eight_seconds(every, tmp_path):
    draw(every["ratio"], tmp_path)  # the library is imported
    began = time.process_time()
    made: list[Path] = [path for figure in every.values() for path in draw(figure, tmp_path)]
    assert time.process_time() - began < 8
    assert len(made) == 2 * (len(every) + 1)
