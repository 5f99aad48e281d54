"""Ticks: round, few, and legible."""

import pytest

from biphase.report.figures.description import from_zero, on_log, spaced, thousands
from biphase.report.recipes import named


@pytest.mark.parametrize(
    ("last", "ticks"),
    [
        (42_000, (0, 10_000, 20_000, 30_000, 40_000)),
        (64_000, (0, 20_000, 40_000, 60_000)),
        (240, (0, 50, 100, 150, 200)),
        (1, (0, 0.2, 0.4, 0.6, 0.8, 1)),
        (0, (0,)),
    ],
)
def test_from_zero(last, ticks):
    assert from_zero(last) == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ((2.4e9, 9.9e10), (5e9, 1e10, 2e10, 5e10)),
        ((1, 100), (1, 3, 10, 30, 100)),
        ((1, 1e5), (1, 10, 100, 1e3, 1e4, 1e5)),
        ((1, 1e9), (1, 100, 1e4, 1e6, 1e8)),
        ((float("nan"),), ()),
    ],
)
def test_on_log(values, ticks):
    assert on_log(values) == pytest.approx(ticks)


def test_labels_that_would_touch_are_left_out():
    assert spaced((0, 2, 12, 22), "abcd", 0.2) == ("a", "", "c", "d")
    assert spaced((1, 2, 10, 100), "abcd", 0.2, log=True) == ("a", "", "c", "d")
    assert spaced((), "", 0.2) == ()


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("clm", "CLM"),
        ("mlm 40%", "MLM 40%"),
        ("mlm40", "MLM 40%"),
        ("mlm37.5", "MLM 37.5%"),
        ("mntp 40→20%", "MNTP 40→20%"),
        ("mlm 15% 80/10/10", "MLM 15% 80/10/10"),
    ],
)
def test_objectives_as_figures_write_them(label, words):
    assert named(label) == words


@pytest.mark.parametrize(("steps", "words"), [(42_000, "42k"), (240, "240"), (1_500, "1,500"), (0, "0")])
def test_steps_in_thousands_where_nothing_is_lost(steps, words):
    assert thousands(steps) == words
