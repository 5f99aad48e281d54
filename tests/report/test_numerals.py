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

NAN = math.nan


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (
            (fixed(-0.004), signed(-0.004), signed(0.004), plain(-0.00004, 4)),
            ("0.00", "0.00", "0.00", "0.0000"),
        ),
        ((signed(1.234), signed(-1.236), fixed(-1.5, 1)), ("+1.23", "−1.24", "−1.5")),
        ((plain(-1.5, 2),), ("-1.50",)),  # programs read a hyphen
        ((fixed(NAN), percent(NAN), signed(math.inf), p_value(NAN)), ("—", "—", "—", "—")),
        ((plain(None, 2), plain(NAN, 2), exponent(None), exponent(NAN)), ("", "", "", "")),
        ((interval(NAN, 1.0), interval(1.0, NAN), percent(0.82136)), ("", "", "82.14")),
        ((interval(-0.5, 1.25), interval(-0.5, 1.25, sign=True)), ("[−0.50, 1.25]", "[−0.50, +1.25]")),
        (
            tuple(map(p_value, (9e-5, 4e-4, 0.012, 0.31, 1.0))),
            ("< 0.0001", "0.0004", "0.012", "0.31", "1.00"),
        ),
        ((p_equals(0.011), p_equals(1e-9)), ("p = 0.011", "p < 0.0001")),
        (tuple(map(rate, (5e-5, 1e-4, 2.5e-3, 0.1))), ("5e-5", "1e-4", "2.5e-3", "1e-1")),
        (tuple(map(listed, ([], ["a"], ["a", "b", "c"]))), ("", "a", "a, b and c")),
        (tuple(map(effect, (0.5, 100.0, 563.0, math.inf, NAN))), ("0.50", "100.00", ">100", ">100", "—")),
    ],
)
def test_numerals(shown, expected):
    assert shown == expected
