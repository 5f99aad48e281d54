"""Colours: seen on white and on dark, told apart by everybody, and not needed in grey."""

import itertools
import math

import pytest

from biphase.report.figures.description import (
    PALETTES,
    SHADES,
    Meaning,
    looks,
)

FURNITURE = ("text", "muted", "grid", "background")  # not for series
LIGHT, DARK = PALETTES["light"], PALETTES["dark"]
# Machado, Oliveira and Fernandes (2009), complete loss of one kind of cone; on linear light.
LOSSES = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}  # fmt: skip


def linear(colour: str) -> list[float]:
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in shares]


def contrast(one: str, other: str) -> float:
    """As WCAG defines it."""
    lights = [
        sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(x), strict=True)) for x in (one, other)
    ]
    return (max(lights) + 0.05) / (min(lights) + 0.05)


def seen(colour: str, loss: str) -> tuple[float, float, float]:
    """A colour in Oklab, where distance is difference, for an eye with this loss."""
    light = linear(colour)
    r, g, b = (
        min(1.0, max(0.0, sum(w * c for w, c in zip(row, light, strict=True)))) for row in LOSSES[loss]
    )
    long, middle, short = (
        math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b),
        math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b),
        math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b),
    )
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    )


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


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_objectives_are_told_apart_by_every_eye(theme, loss):
    palette = PALETTES[theme]
    for one, other in itertools.combinations(("clm", "mlm", "clm-mlm"), 2):
        assert math.dist(seen(palette[one], loss), seen(palette[other], loss)) > 0.08, (one, other)


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_series_of_one_objective_differ_in_grey_too(count):
    made = looks([Meaning("mlm", variant) for variant in range(count)])
    assert len({one.marker for one in made}) == count
    assert len({one.shade for one in made}) == min(count, len(SHADES))
    assert {(one.role, one.dash) for one in made} == {("mlm", "solid")}
    assert all(one.colour in LIGHT for one in made)
