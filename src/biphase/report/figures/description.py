"""A figure as data: panels, axes and series, and what each series means. No colour and no library.

Two renderers read this, one for the page and one for print, so a number cannot differ between them. A series says by
its role what it shows (causal, masked, the paper …); the palette says how that looks, once for all figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from biphase.report.recipes import Model, Recipe
from biphase.specs import CLM, MLM, Objective

Numbers = tuple[float, ...]
Marker = Literal["circle", "square", "triangle", "diamond", "cross", "down", "hexagon", "none"]
Dash = Literal["solid", "dash", "dot", "dashdot"]
Shade = Literal["-soft", "-half-soft", "", "-half-deep", "-deep"]
Side = Literal["right", "above"]
Draws = Literal["line", "points", "both", "bars", "text"]


@dataclass(frozen=True)
class Style:
    """How a series is told from the others. The palette decides it by what the series stands for."""

    role: str  # what it means: a name of the palettes
    shade: Shade = ""  # of that colour
    marker: Marker = "circle"
    dash: Dash = "solid"
    hollow: bool = False
    width: float = 1.0  # of the line, 1 being usual
    size: float = 1.0  # of the markers

    @property
    def colour(self) -> str:
        """The name of its colour in the palettes."""
        return f"{self.role}{self.shade}"


@dataclass(frozen=True)
class Series:
    """Points that mean one thing. An interval that is not known is NaN; a point that is not known is not here."""

    name: str  # in the legend; series of one name are one entry
    look: Style
    x: Numbers
    y: Numbers
    draws: Draws = "both"
    low: Numbers = ()
    high: Numbers = ()
    band: bool = False  # the interval as an area, not as bars
    hover: tuple[str, ...] = ()  # of each point; its first line is what it is
    labels: tuple[str, ...] = ()  # beside each point
    side: Side = "right"  # of its point that a label stands on
    views: tuple[Numbers, ...] = ()  # x in each view of the figure, the first being `x`
    legend: bool = True


@dataclass(frozen=True)
class Axis:
    """What is measured along one side, in what steps."""

    title: str = ""
    scale: Literal["linear", "log"] = "linear"
    ticks: Numbers = ()
    labels: tuple[str, ...] = ()  # of the ticks
    range: tuple[float, float] | None = None
    grid: bool = True
    shown: bool = True


@dataclass(frozen=True)
class Vertical:
    """A line at one x, and what happens there."""

    x: float  # in the first view of a figure: in the others it is not drawn
    label: str = ""


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    verticals: tuple[Vertical, ...] = ()
    rows: int = 0  # of a list with labels, which needs room for each; 0: as high as panels are
    label_room: int = 0  # letters of the longest label beyond the last point


@dataclass(frozen=True)
class View:
    """Another way to measure x: the same points over tokens, FLOPs or seconds."""

    name: str
    axis: Axis


@dataclass(frozen=True)
class Figure:
    """What a report shows under one id."""

    id: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    views: tuple[View, ...] = ()

    @property
    def entries(self) -> tuple[Series, ...]:
        """One series for each name of the legend; none where a single name would say nothing."""
        found: dict[str, Series] = {}
        for panel in self.panels:
            for series in panel.series:
                if series.legend:
                    found.setdefault(series.name, series)
        paper = found.pop(PAPER, None)
        last = (paper,) if paper else ()
        return (*found.values(), *last) if len(found) > 1 or paper else ()


PAPER = "paper"  # the name of reference marks


# ---------------------------------------------------------------- palette
# One meaning, one look, in every figure: what a series stands for decides its colour, dash, width and marker.
#
# hue      the objectives of a model's whole way, in order: causal, masked, causal then masked
# shade    which split, ratio, budget or setting, where a figure shows several of one hue: soft to deep
# width    the size of the model, where a figure shows several: thin to thick, markers alike
# dash     the hue once more, for grey print; dotted where a decayed model was trained on
# marker   the hue once more; where all series have one hue, which of them
#
# The hues are those of Okabe and Ito, which people with any kind of colour vision tell apart. Every shade has a contrast
# of at least 3:1 to its background, on white as on dark; deep is what stands out most. A shared beginning of several
# runs has the hue of what was trained there, whichever run it is drawn with.


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
PAPER_LOOK = Style("paper", marker="diamond", hollow=True)


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


def style_of(role: str) -> Style:
    """The look of an objective alone."""
    return Style(role, marker=_MARKERS[role], dash=_DASHES[role])


def looks(meanings: Sequence[Meaning]) -> list[Style]:
    """How each of the series of one figure looks, by what it stands for."""
    distinct = list(dict.fromkeys(meanings))
    sizes = sorted({one.size for one in meanings})
    alone = len({one.role for one in meanings}) == 1 and len(distinct) > 1
    made: dict[Meaning, Style] = {}
    for number, one in enumerate(distinct):
        alike = (other for other in distinct if (other.role, other.continued) == (one.role, one.continued))
        variants = sorted({other.variant for other in alike})
        shades = _SHADES_OF.get(len(variants), SHADES)
        low, high = _WIDTHS
        width = low + (high - low) * sizes.index(one.size) / (len(sizes) - 1) if len(sizes) > 1 else 1.0
        made[one] = Style(
            one.role,
            shades[variants.index(one.variant) % len(shades)],
            _ORDER[number % len(_ORDER)] if alone else _MARKERS[one.role],
            "dot" if one.continued else _DASHES[one.role],
            width=round(width, 2),
            size=round(0.75 + 0.25 * width, 2),
        )
    return [made[one] for one in meanings]


# ---------------------------------------------------------------- ticks
# Where ticks stand: at round numbers, with labels no nearer to each other than a narrow panel allows.


MOST = 6  # ticks on an axis of one panel among four


def from_zero(last: float) -> Numbers:
    """Round steps from 0 up to `last`."""
    if last <= 0:
        return (0.0,)
    rough = last / (MOST - 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * many for many in (1, 2, 5, 10) if unit * many >= rough)
    return tuple(step * n for n in range(int(last / step + 1e-9) + 1))


def on_log(values: Iterable[float]) -> Numbers:
    """Round numbers between the least and the greatest of these: 1, 2, 5 or 1, 3 of each power of ten, or less."""
    known = [value for value in values if math.isfinite(value) and value > 0]
    if not known:
        return ()
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    for digits in ((1, 2, 5), (1, 3), (1,)):
        every = [digit * 10.0**power for power in range(low, high + 1) for digit in digits]
        ticks = tuple(one for one in every if min(known) <= one * 1.0001 and one <= max(known) * 1.0001)
        if len(ticks) <= MOST:
            return ticks
    return ticks[:: -(-len(ticks) // MOST)]


def spaced(ticks: Numbers, labels: Iterable[str], apart: float, *, log: bool = False) -> tuple[str, ...]:
    """The labels, but for those too near to the one before: `apart` is a share of the axis."""
    places = [math.log10(tick) for tick in ticks] if log else list(ticks)
    whole = (max(places) - min(places)) if places else 0.0
    made: list[str] = []
    last = -math.inf
    for place, label in zip(places, labels, strict=True):
        near = place - last < apart * whole
        made.append("" if near else label)
        last = last if near else place
    return tuple(made)


# ---------------------------------------------------------------- chosen
# Which models a figure is about: the ends of runs, by size, budget and objective. From recipes alone.
#
# Scores play no part in the choice, so a figure cannot flatter what it shows. Where a study has several settings (other
# data, another optimizer …), models are only ever joined within one.


USUAL_RATIO = 0.4  # the paper's, wherever one masking ratio stands for all
USUAL_SHARE = 0.25  # its recommended share of causal steps


def ends(models: Iterable[Model]) -> list[Model]:
    """The ends of runs that were made in one go."""
    return [one for one in models if one.recipe.final and not one.recipe.base and one.recipe.spans]


def by_size(models: Iterable[Model]) -> dict[str, list[Model]]:
    """Models by the name of their size, small ones first; sizes that are not known come last."""
    found: dict[str, list[Model]] = {}
    for one in sorted(models, key=lambda one: (one.recipe.parameters is None, one.recipe.parameters or 0)):
        found.setdefault(one.recipe.size, []).append(one)
    return found


def by_setting(models: Iterable[Model]) -> dict[str, list[Model]]:
    """Models that differ only in size, objectives and steps stand together: words for the setting → models.

    The words are empty where a study has one setting; else they name its first model.
    """
    found: dict[str, list[Model]] = {}
    for one in models:
        found.setdefault(one.recipe.setting, []).append(one)
    return {f" (as {some[0].name})" if len(found) > 1 else "": some for some in found.values()}


def standing_for(models: Iterable[Model]) -> list[Model]:
    """One model for each objective, of models of one size and setting, at the budget that has most objectives.

    Of several masking ratios the one nearest to the usual is taken, of several splits likewise; of two budgets with as
    many objectives the longer.
    """
    budgets: dict[int, list[Model]] = {}
    for one in models:
        budgets.setdefault(one.recipe.steps, []).append(one)
    if not budgets:
        return []
    steps = max(budgets, key=lambda steps: (len({one.recipe.kind for one in budgets[steps]}), steps))
    found = [_nearest(kind, budgets[steps]) for kind in ("clm", "mlm", "clm-mlm")]
    others = [one for one in budgets[steps] if one.recipe.kind == "other"]
    return [*(one for one in found if one), *others]


def _nearest(kind: str, models: list[Model]) -> Model | None:
    def distance(model: Model) -> tuple[float, float, float]:
        ratio = model.recipe.ratio
        off = 0.0 if kind == "clm" else 1.0 if ratio is None else round(abs(ratio - USUAL_RATIO), 9)
        return off, round(abs(model.recipe.causal_share - USUAL_SHARE), 9), model.recipe.causal_share

    return min((one for one in models if one.recipe.kind == kind), key=distance, default=None)


def objective_name(recipe: Recipe) -> str:
    """CLM, MLM 40%, CLM → MLM 40%; anything else in its own words."""
    role = role_of(recipe)
    if role == "other" or (role != "clm" and recipe.ratio is None):
        return recipe.words().split(" · ", 1)[1]
    name = NAMES[role] if role == "clm" else f"{NAMES[role]} {percent(recipe.ratio)}"
    return f"{name}, continued" if recipe.base else name


def meaning(recipe: Recipe, variant: object = None) -> Meaning:
    """What a series of models like this one stands for; `variant`: what sets it apart from others of its objectives."""
    return Meaning(role_of(recipe), variant, recipe.parameters or 0, continued=recipe.base is not None)


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.3g}%"


def thousands(steps: int) -> str:
    """42,000 as 42k, where nothing is lost by it."""
    return f"{steps // 1000:,}k" if steps and steps % 1000 == 0 else f"{steps:,}"
