"""Numbers are said in three digits and a unit, also right below the next unit."""

import pytest

from biphase.text import counted, printable, short, si


def test_a_word_may_have_a_plural_of_its_own():
    assert [counted(one, "query", "queries") for one in (1, 2)] == ["1 query", "2 queries"]
    assert counted(2, "training job") == "2 training jobs"


@pytest.mark.parametrize(
    ("value", "unit", "count"),
    [
        (0, "0 ", "0"),
        (128, "128 ", "128"),
        (999.7, "1 k", "1k"),
        (12_345, "12.3 k", "12.3k"),
        (999_960, "1 M", "1M"),
        (99_090_432_000, "99.1 G", "99.1B"),
        (1.15e12, "1.15 T", "1.15T"),
        (float("nan"), "? ", "?"),
    ],
)
def test_a_number_has_three_digits_and_a_unit(value, unit, count):
    assert (si(value), short(value)) == (unit, count)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\nlines\tand ünïcode 漢字 →", "two\nlines\tand ünïcode 漢字 →"),
        ("\x1b]0;owned\x07\x1b[2J", r"\x1b]0;owned\x07\x1b[2J"),
        ("over\rwritten \x7f \x9b31m", r"over\rwritten \x7f \x9b31m"),
        ("\u202egpj.exe \u2066", r"\u202egpj.exe \u2066"),
        ("half \ud800", r"half \ud800"),
    ],
)
def test_a_terminal_is_given_nothing_to_act_upon(text, shown):
    assert printable(text) == shown
    printable(text).encode()
