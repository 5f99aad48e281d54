"""Forest plots: one scale for all rows, nought always on it, long intervals cut and marked as cut."""

import math
import re

import pytest

from biphase.report.page.render import EDGE, WIDTH, AxisScale, Mark, axis, drawing


def numbers(drawn, what, field):
    return [float(value) for value in re.findall(rf'class="{what}"[^>]* {field}="([-\d.]+)"', drawn)]


def test_rows_share_a_scale_with_nought_on_it():
    marks = [Mark(2.0, 1.5, 2.5), Mark(4.0, 3.0, 5.0)]
    scale = AxisScale(marks)
    assert scale.at(0) == EDGE
    assert scale.at(5.0) == WIDTH - EDGE
    first, second = (drawing(mark, scale) for mark in marks)
    assert numbers(first, "zero", "x1") == numbers(second, "zero", "x1") == [EDGE]
    assert numbers(first, "mean", "cx")[0] < numbers(second, "mean", "cx")[0]


def test_a_negative_estimate_lies_left_of_nought():
    scale = AxisScale([Mark(-1.0, -2.0, 0.5)])
    assert scale.at(-1.0) < scale.at(0)


def test_an_interval_that_would_squeeze_all_else_is_cut_and_points_on():
    marks = [Mark(1.0, -100.0, 102.0), Mark(2.0, 1.5, 2.5)]
    scale = AxisScale(marks)
    assert scale.high - scale.low < 15
    cut, whole = (drawing(mark, scale) for mark in marks)
    assert cut.count("l-4 4 4 4") == cut.count("l4 4-4 4") == 1
    assert "l4 4" not in whole
    assert whole.count("v8") == 2


def test_what_is_not_known_is_not_drawn():
    drawn = drawing(Mark(math.nan), AxisScale([Mark(math.nan), Mark(1.0)]))
    assert 'class="mean"' not in drawn
    assert 'class="seeds"' not in drawn
    assert 'class="paper"' not in drawn
    assert 'class="zero"' in drawn


def test_the_paper_the_margin_and_the_examples_are_drawn_where_they_are():
    mark = Mark(1.0, 0.5, 1.5, examples=(0.2, 1.8), paper=1.2, margin=-0.5)
    scale = AxisScale([mark])
    drawn = drawing(mark, scale)
    assert numbers(drawn, "margin", "x1") == [scale.at(-0.5)]
    assert f'd="M{scale.at(1.2)} ' in drawn
    assert numbers(drawn, "examples", "x1") == [scale.at(0.2)]
    assert 'aria-label="+1.00 [+0.50, +1.50], paper +1.20"' in drawn


def test_nothing_known_still_has_a_scale():
    scale = AxisScale([])
    assert (scale.low, scale.high) == (-1.0, 1.0)


@pytest.mark.parametrize("reach", [0.003, 0.4, 3.0, 26.0, 150.0])
def test_ticks_are_few_round_and_hold_nought(reach):
    scale = AxisScale([Mark(reach / 2, -reach / 3, reach)])
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 6
    assert 0 in ticks
    step = ticks[1] - ticks[0]
    assert re.fullmatch(r"[125]0*e-?\d+", f"{step:.0e}".replace("+", ""))
    labels = re.findall(r">([^<]+)</text>", axis(scale))
    assert len(set(labels)) == len(labels) == len(ticks)
