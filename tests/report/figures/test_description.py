"""Colours: seen on white and on dark, and not needed in grey."""

import pytest

from biphase.report.figures.description import PALETTES, SHADES, Meaning, looks

FURNITURE = ("text", "muted", "grid", "background")  # not for series


# Machado, Oliveira and Fernandes (2009), complete loss of one kind of cone; on linear light.
def linear(colour: str) -> list[float]:
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in shares]


def contrast(one: str, other: str) -> float:
    """As WCAG defines it."""
    lights = [
        sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(x), strict=True)) for x in (one, other)
    ]
    return (max(lights) + 0.05) / (min(lights) + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everything_drawn_stands_out_from_its_background(theme):
    palette = PALETTES[theme]
    faint = {
        role: round(contrast(colour, palette["background"]), 2)
        for role, colour in palette.items()
        if role not in FURNITURE and contrast(colour, palette["background"]) < 3
    }
    assert not faint
    assert contrast(palette["text"], palette["background"]) >= 7
    assert contrast(palette["muted"], palette["background"]) >= 4.5
    assert contrast(palette["grid"], palette["background"]) < 2  # a grid stands back


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_series_of_one_objective_differ_in_grey_too(count):
    made = looks([Meaning("mlm", variant) for variant in range(count)])
    assert len({one.marker for one in made}) == count
    assert len({one.shade for one in made}) == min(count, len(SHADES))
    assert {(one.role, one.dash) for one in made} == {("mlm", "solid")}
    assert all(one.colour in palette for one in made for palette in PALETTES.values())
