"""One meaning, one look, in every figure: what a series stands for decides its colour, dash, width and marker.

hue      the objectives of a model's whole way, in order: causal, masked, causal then masked
shade    which split, ratio, budget or setting, where a figure shows several of one hue: soft to deep
width    the size of the model, where a figure shows several: thin to thick, markers alike
dash     the hue once more, for grey print; dotted where a decayed model was trained on
marker   the hue once more; where all series have one hue, which of them

The hues are those of Okabe and Ito, which people with any kind of colour vision tell apart. Every shade has a contrast
of at least 3:1 to its background, on white as on dark; deep is what stands out most. A shared beginning of several
runs has the hue of what was trained there, whichever run it is drawn with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from biphase.report.figures.description import Dash, Look, Marker, Shade
from biphase.report.recipes import Recipe
from biphase.specs import CLM, MLM, Objective

Theme = Literal["light", "dark"]

_ANCHORS: dict[Theme, dict[str, str]] = {
    "light": {
        "clm-soft": "#e87024", "clm": "#c05608", "clm-deep": "#512001",
        "mlm-soft": "#3d99db", "mlm": "#035d92", "mlm-deep": "#003150",
        "clm-mlm-soft": "#19a67a", "clm-mlm": "#048d66", "clm-mlm-deep": "#013625",
        "other-soft": "#868d97", "other": "#3b4048", "other-deep": "#14171c",
        "paper": "#6f6f6f", "finetune": "#6b7480",
        "text": "#1d2229", "muted": "#5c6470", "grid": "#e4e7eb", "background": "#ffffff",
    },
    "dark": {
        "clm-soft": "#b85106", "clm": "#fd8643", "clm-deep": "#ffd7c4",
        "mlm-soft": "#0775b5", "mlm": "#439ee1", "mlm-deep": "#c4e3fe",
        "clm-mlm-soft": "#0c7f5d", "clm-mlm": "#51cc9f", "clm-mlm-deep": "#7df5c6",
        "other-soft": "#78808b", "other": "#cdd2d9", "other-deep": "#ffffff",
        "paper": "#a0a0a0", "finetune": "#8a93a0",
        "text": "#e8eaed", "muted": "#a3abb6", "grid": "#2a3038", "background": "#14171c",
    },
}  # fmt: skip
FURNITURE = ("text", "muted", "grid", "background")  # what no series is drawn in, but for its words and rules

NAMES = {"clm": "CLM", "mlm": "MLM", "clm-mlm": "CLM → MLM", "other": "other"}
_MARKERS: dict[str, Marker] = {"clm": "square", "mlm": "circle", "clm-mlm": "triangle", "other": "cross"}
_DASHES: dict[str, Dash] = {"clm": "dash", "mlm": "solid", "clm-mlm": "dashdot", "other": "dot"}
_ORDER: tuple[Marker, ...] = ("circle", "square", "triangle", "down", "hexagon", "cross")
SHADES: tuple[Shade, ...] = ("-soft", "-half-soft", "", "-half-deep", "-deep")
_SHADES_OF: dict[int, tuple[Shade, ...]] = {
    1: ("",), 2: ("", "-deep"), 3: ("-soft", "", "-deep"), 4: ("-soft", "-half-soft", "-half-deep", "-deep"),
}  # fmt: skip
_WIDTHS = (0.6, 1.7)  # of the smallest and the largest size
PAPER_LOOK = Look("paper", marker="diamond", hollow=True)


def _mixed(one: str, other: str) -> str:
    """The colour halfway between two."""
    pairs = ((int(one[at : at + 2], 16), int(other[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{(a + b) // 2:02x}" for a, b in pairs)


def _with_halves(anchors: dict[str, str]) -> dict[str, str]:
    """The palette with the two shades between soft, plain and deep of each hue."""
    halves = {
        f"{role}-half-{end}": _mixed(anchors[role], anchors[f"{role}-{end}"])
        for role in NAMES
        for end in ("soft", "deep")
    }
    return anchors | halves


PALETTES: dict[Theme, dict[str, str]] = {theme: _with_halves(some) for theme, some in _ANCHORS.items()}


@dataclass(frozen=True)
class Meaning:
    """What a series stands for. Series of one figure with equal meanings look alike; others do not."""

    role: str
    variant: Any = None  # a split, a ratio, a budget, a setting; those of one role can be sorted
    size: int = 0  # parameters
    continued: bool = False  # trained on after the learning rate had come down


def role_of(recipe: Recipe) -> str:
    """The hue of a model: the objectives of its whole way."""
    return role_of_way(one.objective for one in recipe.spans)


def role_of_way(objectives: Iterable[Objective]) -> str:
    """The hue of what was trained with these, in order."""
    kinds = ("clm" if isinstance(one, CLM) else "mlm" if type(one) is MLM else "other" for one in objectives)
    way = "-".join(kind for kind, _ in groupby(kinds))
    return way if way in NAMES else "other"


def look(role: str) -> Look:
    """The look of an objective alone."""
    return Look(role, marker=_MARKERS[role], dash=_DASHES[role])


def looks(meanings: Sequence[Meaning]) -> list[Look]:
    """How each of the series of one figure looks, by what it stands for."""
    distinct = list(dict.fromkeys(meanings))
    sizes = sorted({one.size for one in meanings})
    alone = len({one.role for one in meanings}) == 1 and len(distinct) > 1
    made: dict[Meaning, Look] = {}
    for number, one in enumerate(distinct):
        alike = (other for other in distinct if (other.role, other.continued) == (one.role, one.continued))
        variants = sorted({other.variant for other in alike})
        shades = _SHADES_OF.get(len(variants), SHADES)
        low, high = _WIDTHS
        width = low + (high - low) * sizes.index(one.size) / (len(sizes) - 1) if len(sizes) > 1 else 1.0
        made[one] = Look(
            one.role,
            shades[variants.index(one.variant) % len(shades)],
            _ORDER[number % len(_ORDER)] if alone else _MARKERS[one.role],
            "dot" if one.continued else _DASHES[one.role],
            width=round(width, 2),
            size=round(0.75 + 0.25 * width, 2),
        )
    return [made[one] for one in meanings]
