"""Numbers as people read them: signs, dashes, and no invented precision."""

import math

import pytest

from biphase.text import (
    effect,
    exponent,
    fixed,
    interval,
    listed,
    p_equals,
    p_value,
    percent,
    plain,
    rate,
    signed,
)


def test_what_rounds_to_nought_has_no_sign():
    assert fixed(-0.004) == "0.00"
    assert signed(-0.004) == signed(0.004) == "0.00"
    assert plain(-0.00004, 4) == "0.0000"


def test_signs():
    assert (signed(1.234), signed(-1.236), fixed(-1.5, 1)) == ("+1.23", "−1.24", "−1.5")
    assert plain(-1.5, 2) == "-1.50", "programs read a hyphen"


def test_the_unknown_is_a_dash_for_people_and_empty_for_programs():
    assert (fixed(math.nan), percent(math.nan), signed(math.inf), p_value(math.nan)) == ("—", "—", "—", "—")
    assert (plain(None, 2), plain(math.nan, 2), exponent(None), exponent(math.nan)) == ("", "", "", "")
    assert interval(math.nan, 1.0) == interval(1.0, math.nan) == ""


def test_a_score_is_shown_in_percent():
    assert percent(0.82136) == "82.14"


def test_intervals():
    assert interval(-0.5, 1.25) == "[−0.50, 1.25]"
    assert interval(-0.5, 1.25, sign=True) == "[−0.50, +1.25]"


@pytest.mark.parametrize(
    ("p", "told"),
    [(0.00009, "< 0.0001"), (0.0004, "0.0004"), (0.012, "0.012"), (0.31, "0.31"), (1.0, "1.00")],
)
def test_p_values_have_as_many_digits_as_they_need(p, told):
    assert p_value(p) == told


@pytest.mark.parametrize(("lr", "told"), [(5e-5, "5e-5"), (1e-4, "1e-4"), (2.5e-3, "2.5e-3"), (0.1, "1e-1")])
def test_rates_are_written_as_in_a_study(lr, told):
    assert rate(lr) == told
    assert float(told) == lr


def test_lists():
    assert [listed([]), listed(["a"]), listed(["a", "b", "c"])] == ["", "a", "a, b and c"]


def test_no_detectable_effect_exceeds_the_scale():
    assert [effect(one) for one in (0.5, 100.0, 563.0, math.inf, math.nan)] == [
        "0.50",
        "100.00",
        ">100",
        ">100",
        "—",
    ]


def test_a_p_value_in_a_sentence():
    assert (p_equals(0.011), p_equals(1e-9)) == ("p = 0.011", "p < 0.0001")
