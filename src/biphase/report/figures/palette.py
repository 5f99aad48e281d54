"""One meaning, one colour: causal, masked, both in sequence, continued, and the paper's own values.

The hues are those of Okabe and Ito, which people with any kind of colour vision tell apart. Each comes in three
shades for sizes and budgets: soft, plain and deep, deep being what stands out most from the background. Every shade
has a contrast of at least 3:1 to its background, on white as on dark; markers and dashes say the same in grey.
"""

from __future__ import annotations

from typing import Literal

from biphase.report.figures.description import Dash, Look, Marker, Shade
from biphase.report.recipes import Recipe

Theme = Literal["light", "dark"]

PALETTES: dict[Theme, dict[str, str]] = {
    "light": {
        "clm-soft": "#e87024", "clm": "#c05608", "clm-deep": "#512001",
        "mlm-soft": "#3d99db", "mlm": "#035d92", "mlm-deep": "#003150",
        "clm-mlm-soft": "#19a67a", "clm-mlm": "#048d66", "clm-mlm-deep": "#013625",
        "continued-soft": "#cb78a6", "continued": "#863966", "continued-deep": "#590e3e",
        "other-soft": "#868d97", "other": "#3b4048", "other-deep": "#14171c",
        "paper": "#6f6f6f", "finetune": "#6b7480",
        "text": "#1d2229", "muted": "#5c6470", "grid": "#e4e7eb", "background": "#ffffff",
    },
    "dark": {
        "clm-soft": "#b85106", "clm": "#fd8643", "clm-deep": "#ffd7c4",
        "mlm-soft": "#0775b5", "mlm": "#439ee1", "mlm-deep": "#c4e3fe",
        "clm-mlm-soft": "#0c7f5d", "clm-mlm": "#51cc9f", "clm-mlm-deep": "#7df5c6",
        "continued-soft": "#a45582", "continued": "#be6d9a", "continued-deep": "#ffd3e9",
        "other-soft": "#78808b", "other": "#cdd2d9", "other-deep": "#ffffff",
        "paper": "#a0a0a0", "finetune": "#8a93a0",
        "text": "#e8eaed", "muted": "#a3abb6", "grid": "#2a3038", "background": "#14171c",
    },
}  # fmt: skip
FURNITURE = ("text", "muted", "grid", "background")  # what no series is drawn in, but for its words and rules

NAMES = {"clm": "CLM", "mlm": "MLM", "clm-mlm": "CLM → MLM", "continued": "continued", "other": "other"}
_MARKERS: dict[str, Marker] = {
    "clm": "square",
    "mlm": "circle",
    "clm-mlm": "triangle",
    "continued": "hexagon",
    "other": "cross",
}
_DASHES: dict[str, Dash] = {
    "clm": "dash",
    "mlm": "solid",
    "clm-mlm": "dashdot",
    "continued": "dot",
    "other": "dot",
}
_SHADES: dict[int, tuple[Shade, ...]] = {1: ("",), 2: ("", "-deep")}
_THREE: tuple[Shade, ...] = ("-soft", "", "-deep")
_ORDER: tuple[Marker, ...] = ("circle", "square", "triangle", "down", "hexagon", "cross")
_STROKES: tuple[Dash, ...] = ("dash", "solid", "dashdot", "dot")
PAPER_LOOK = Look("paper", marker="diamond", hollow=True)


def role_of(recipe: Recipe) -> str:
    """What a model counts as, wherever its objective is shown."""
    if recipe.base:
        return "continued"
    return recipe.kind if recipe.kind in NAMES else "other"


def look(role: str) -> Look:
    """The look of an objective."""
    return Look(role, marker=_MARKERS[role], dash=_DASHES[role])


def looks(role: str, count: int) -> list[Look]:
    """Several series of one objective, from small to large: by shade, marker and dash."""
    if count == 0:
        return []
    if count == 1:
        return [look(role)]
    shades = _SHADES.get(count, _THREE)
    return [
        Look(role, shades[n % len(shades)], _ORDER[n % len(_ORDER)], _STROKES[n % len(_STROKES)])
        for n in range(count)
    ]


def in_turn(roles: list[str]) -> list[Look]:
    """A look for each of these; those of one role are told apart as `looks` does it."""
    made = {role: iter(looks(role, roles.count(role))) for role in roles}
    return [next(made[role]) for role in roles]
