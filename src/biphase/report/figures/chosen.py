"""Which models a figure is about: the ends of runs, by size, budget and objective. From recipes alone.

Scores play no part in the choice, so a figure cannot flatter what it shows. Where a study has several settings (other
data, another optimizer …), models are only ever joined within one.
"""

from __future__ import annotations

from collections.abc import Iterable

from biphase.report.figures.palette import NAMES, Meaning, role_of
from biphase.report.recipes import Model, Recipe

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
