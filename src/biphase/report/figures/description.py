"""A figure as data: panels, axes and series with their meaning, independent of any plotting library.

A series says by its role what it shows (CLM, MLM, a published value …); the palettes map roles to colours, the same in
all figures. The file also has the rules for tick labels, and for choosing the models that a figure shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, TypeVar

from biphase.report.recipes import Model, Recipe
from biphase.specs import Objective

Item = TypeVar("Item")
Key = TypeVar("Key")
Numbers = tuple[float, ...]
Marker = Literal["circle", "square", "triangle", "diamond", "cross", "down", "hexagon"]
Dash = Literal["solid", "dash", "dot", "dashdot"]
Shade = Literal["-soft", "-half-soft", "", "-half-deep", "-deep"]
Draws = Literal["line", "points", "both"]


@dataclass(frozen=True)
class Style:
    """The visual attributes of a series, chosen by `looks` from what it stands for."""

    role: str  # what it means: a name of the palettes
    shade: Shade = ""  # of that colour
    marker: Marker = "circle"
    dash: Dash = "solid"
    hollow: bool = False
    width: float = 1.0  # of the line, relative
    size: float = 1.0  # of the markers, relative

    @property
    def colour(self) -> str:
        """The name of its colour in the palettes."""
        return f"{self.role}{self.shade}"


@dataclass(frozen=True)
class Series:
    """Points with one meaning. An unknown interval is NaN; an unknown point is left out."""

    name: str  # legend entry; series with equal names share one
    look: Style
    x: Numbers
    y: Numbers
    draws: Draws = "both"
    low: Numbers = ()
    high: Numbers = ()
    band: bool = False  # draw the interval as an area instead of error bars
    hover: tuple[str, ...] = ()  # of each point; the first line is its title
    views: tuple[Numbers, ...] = ()  # x in each view of the figure; the first equals `x`
    legend: bool = True


@dataclass(frozen=True)
class Axis:
    """One axis: title, scale, ticks and range."""

    title: str = ""
    scale: Literal["linear", "log"] = "linear"
    ticks: Numbers = ()
    labels: tuple[str, ...] = ()  # of the ticks
    range: tuple[float, float] | None = None
    grid: bool = True


@dataclass(frozen=True)
class Vertical:
    """A vertical line at one x, with a label."""

    x: float  # in the first view only; other views do not draw it
    label: str = ""


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    verticals: tuple[Vertical, ...] = ()


@dataclass(frozen=True)
class View:
    """Another measure of x for the same points: tokens, FLOPs or seconds."""

    name: str
    axis: Axis


@dataclass(frozen=True)
class Figure:
    """One figure of a report."""

    id: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    views: tuple[View, ...] = ()

    @property
    def entries(self) -> tuple[Series, ...]:
        """One series for each legend entry, published values last; empty if there would be a single entry."""
        every = [series for panel in self.panels for series in panel.series if series.legend]
        entries = {series.name: series for series in reversed(every)}  # the first of each name
        names = sorted(dict.fromkeys(series.name for series in every), key=lambda name: name == PAPER)
        return tuple(entries[name] for name in names) if len(names) > 1 or PAPER in names else ()


PAPER = "paper"  # the name of reference marks


# ---------------------------------------------------------------- palette
# What a series stands for decides its look, in every figure:
#
# hue      the objectives of the model's whole path, in order: CLM, MLM, CLM then MLM
# shade    the split, ratio, budget or setting, where a figure shows several of one hue: soft to deep
# width    the size of the model, where a figure shows several: thin to thick, and markers likewise
# dash     repeats the hue, for grey print; dotted for continued training of a decayed model
# marker   repeats the hue; if all series have one hue, it distinguishes them
#
# The hues are those of Okabe and Ito, which are distinguishable with any kind of colour vision. Every shade has a
# contrast of at least 3:1 to its background, light and dark; deep has the highest. A phase that several runs share has
# the hue of the objective trained there, whichever run it is drawn with.


Theme = Literal["light", "dark"]

_ANCHORS: dict[Theme, dict[str, str]] = {
    "light": {
        "clm-soft": "#e87024", "clm": "#c05608", "clm-deep": "#512001",
        "mlm-soft": "#3d99db", "mlm": "#035d92", "mlm-deep": "#003150",
        "clm-mlm-soft": "#19a67a", "clm-mlm": "#048d66", "clm-mlm-deep": "#013625",
        "other-soft": "#868d97", "other": "#3b4048", "other-deep": "#14171c",
        "paper": "#6f6f6f",
        "text": "#1d2229", "muted": "#5c6470", "grid": "#e4e7eb", "background": "#ffffff",
    },
    "dark": {
        "clm-soft": "#b85106", "clm": "#fd8643", "clm-deep": "#ffd7c4",
        "mlm-soft": "#0775b5", "mlm": "#439ee1", "mlm-deep": "#c4e3fe",
        "clm-mlm-soft": "#0c7f5d", "clm-mlm": "#51cc9f", "clm-mlm-deep": "#7df5c6",
        "other-soft": "#78808b", "other": "#cdd2d9", "other-deep": "#ffffff",
        "paper": "#a0a0a0",
        "text": "#e8eaed", "muted": "#a3abb6", "grid": "#2a3038", "background": "#14171c",
    },
}  # fmt: skip

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


def _with_halves(anchors: dict[str, str]) -> dict[str, str]:
    """Add the two shades between soft, plain and deep of each hue."""
    palette = dict(anchors)
    for role in NAMES:
        for end in ("soft", "deep"):
            pair = [bytes.fromhex(anchors[name][1:]) for name in (role, f"{role}-{end}")]
            palette[f"{role}-half-{end}"] = (
                "#" + bytes((a + b) // 2 for a, b in zip(*pair, strict=True)).hex()
            )
    return palette


PALETTES: dict[Theme, dict[str, str]] = {theme: _with_halves(anchors) for theme, anchors in _ANCHORS.items()}


@dataclass(frozen=True)
class Meaning:
    """What a series stands for. In one figure, equal meanings look alike and others differ."""

    role: str
    variant: Any = None  # a split, ratio, budget or setting; sortable within one role
    size: int = 0  # parameters
    continued: bool = False  # trained further after the learning rate had decayed


def role_of(recipe: Recipe) -> str:
    """The role of a model, from the objectives of its whole path; a mean of models has none of theirs."""
    return "other" if recipe.merged else role_of_path(phase.objective for phase in recipe.spans)


def role_of_path(objectives: Iterable[Objective]) -> str:
    """The role of a sequence of objectives: its distinct consecutive kinds, or "other"."""
    kinds = (objective.name if objective.name in ("clm", "mlm") else "other" for objective in objectives)
    role = "-".join(kind for kind, _ in groupby(kinds))
    return role if role in NAMES else "other"


def style_of(role: str) -> Style:
    """The style of a role alone, without variants."""
    return Style(role, marker=_MARKERS[role], dash=_DASHES[role])


def looks(meanings: Sequence[Meaning]) -> list[Style]:
    """The style of each series of one figure, from their meanings."""
    distinct = list(dict.fromkeys(meanings))
    sizes = sorted({meaning.size for meaning in meanings})
    one_role = len({meaning.role for meaning in meanings}) == 1 and len(distinct) > 1
    styles: dict[Meaning, Style] = {}
    for number, meaning in enumerate(distinct):
        group = [
            other for other in distinct if (other.role, other.continued) == (meaning.role, meaning.continued)
        ]
        variants = sorted({other.variant for other in group})
        shades = _SHADES_OF.get(len(variants), SHADES)
        low, high = _WIDTHS
        width = low + (high - low) * sizes.index(meaning.size) / (len(sizes) - 1) if len(sizes) > 1 else 1.0
        styles[meaning] = Style(
            meaning.role,
            shades[variants.index(meaning.variant) % len(shades)],
            _ORDER[number % len(_ORDER)] if one_role else _MARKERS[meaning.role],
            "dot" if meaning.continued else _DASHES[meaning.role],
            width=round(width, 2),
            size=round(0.75 + 0.25 * width, 2),
        )
    return [styles[meaning] for meaning in meanings]


# ---------------------------------------------------------------- ticks
# Ticks stand at round numbers. Vega leaves out labels that would overlap.


MOST = 6  # ticks on an axis, with four panels side by side


def from_zero(last: float) -> Numbers:
    """Round steps from 0 up to `last`."""
    if last <= 0:
        return (0.0,)
    rough = last / (MOST - 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * many for many in (1, 2, 5, 10) if unit * many >= rough)
    return tuple(step * n for n in range(int(last / step + 1e-9) + 1))


def on_log(values: Iterable[float]) -> Numbers:
    """Round numbers within the range of these: 1, 2, 5 or 1, 3 or 1 of each power of ten, at most `MOST`."""
    positive = [value for value in values if math.isfinite(value) and value > 0]
    if not positive:
        return ()
    low, high = min(positive) / 1.0001, max(positive) * 1.0001
    powers = range(math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive))) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        every = (digit * 10.0**power for power in powers for digit in digits)
        ticks = tuple(tick for tick in every if low <= tick <= high)
        if len(ticks) <= MOST:
            return ticks
    return ticks[:: -(-len(ticks) // MOST)]


# ---------------------------------------------------------------- choice of models
# Models are chosen by their recipes, never by their scores, so the choice cannot favour a result. Where a study has
# several settings (other data, another optimizer …), lines join only models of one setting.


USUAL_RATIO = 0.4  # where one masking ratio represents all
USUAL_SHARE = 0.25  # likewise, the share of CLM steps


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items by a key, in the order of their first occurrence."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def ends(models: Iterable[Model]) -> list[Model]:
    """The ends of runs that continue no decayed model."""
    return [model for model in models if model.recipe.final and not model.recipe.base and model.recipe.spans]


def by_size(models: Iterable[Model]) -> dict[str, list[Model]]:
    """Models by the name of their size, smallest first; unknown sizes come last."""
    smallest_first = sorted(models, key=lambda model: model.recipe.parameters or math.inf)
    return grouped(smallest_first, lambda model: model.recipe.size)


def by_setting(models: Iterable[Model]) -> dict[str, list[Model]]:
    """Group models that differ only in size, objectives and steps: suffix for the legend → models.

    The suffix is empty if the study has one setting; otherwise it names the group's first model.
    """
    settings = grouped(models, lambda model: model.recipe.setting)
    return {f" (as {group[0].name})" if len(settings) > 1 else "": group for group in settings.values()}


def standing_for(models: Iterable[Model]) -> list[Model]:
    """One model for each kind of objective, at the budget with the most kinds; the models have one size and setting.

    Of several masking ratios or splits, the one nearest to the usual is taken; of two budgets with equally many kinds,
    the longer.
    """
    budgets = grouped(models, lambda model: model.recipe.steps)
    if not budgets:
        return []
    steps = max(budgets, key=lambda steps: (len({model.recipe.kind for model in budgets[steps]}), steps))
    nearest = [usual(kind, budgets[steps]) for kind in ("clm", "mlm", "clm-mlm")]
    others = [model for model in budgets[steps] if model.recipe.kind in ("mix", "other")]
    return [*(model for model in nearest if model), *others]


def usual(kind: str, models: list[Model]) -> Model | None:
    """The model of this kind that is nearest to the usual ratio and share; None: there is none."""

    def distance(model: Model) -> tuple[float, float, float]:
        ratio = model.recipe.ratio
        off = 0.0 if kind == "clm" else 1.0 if ratio is None else round(abs(ratio - USUAL_RATIO), 9)
        return off, round(abs(model.recipe.causal_share - USUAL_SHARE), 9), model.recipe.causal_share

    return min((model for model in models if model.recipe.kind == kind), key=distance, default=None)


def objective_name(recipe: Recipe) -> str:
    """The name of a recipe's objectives: CLM, MLM 40%, CLM → MLM 40%; anything else in full."""
    role = role_of(recipe)
    if role == "other" or (role != "clm" and recipe.ratio is None):
        return recipe.words().split(" · ", 1)[1]
    name = NAMES[role] if role == "clm" else f"{NAMES[role]} {percent(recipe.ratio)}"
    return f"{name}, continued" if recipe.base else name


def meaning(recipe: Recipe, variant: object = None) -> Meaning:
    """The meaning of a series of models like this one; `variant` distinguishes it within its role."""
    return Meaning(role_of(recipe), variant, recipe.parameters or 0, continued=recipe.base is not None)


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.3g}%"


def thousands(steps: int) -> str:
    """Write steps as 42k if they are a multiple of 1,000."""
    return f"{steps // 1000:,}k" if steps and steps % 1000 == 0 else f"{steps:,}"
