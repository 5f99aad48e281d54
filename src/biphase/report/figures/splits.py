"""How much of a budget should be causal? From masked alone to causal alone, for each budget."""

from __future__ import annotations

from biphase.report.estimates import Estimates
from biphase.report.evidence import Evidence
from biphase.report.figures.chosen import USUAL_RATIO, by_setting, by_size, ends, meaning, percent, thousands
from biphase.report.figures.description import Axis, Figure
from biphase.report.figures.scored import Line, Point, score_panels
from biphase.report.recipes import Model

QUARTERS = (0.0, 25.0, 50.0, 75.0, 100.0)


def figure(evidence: Evidence, estimates: Estimates) -> Figure | None:
    found: list[tuple[str, float, int, str, tuple[Point, ...]]] = []
    for words, models in by_setting(ends(evidence.models.values())).items():
        for size, some in by_size(models).items():
            found += [(size, *row, words, points) for row, points in _rows(some).items()]
    sizes, ratios = {one[0] for one in found}, {one[1] for one in found}
    lines = []
    for size, ratio, steps, words, points in found:
        which = [size] * (len(sizes) > 1) + [f"MLM {percent(ratio)}"] * (len(ratios) > 1)
        split = next(one.model.recipe for one in points if one.model.recipe.kind == "clm-mlm")
        name = ", ".join([*which, f"{thousands(steps)} steps{words}"])
        lines.append(Line(name, meaning(split, (steps, ratio, words)), points))
    x = Axis("share of causal steps", "linear", QUARTERS, tuple(f"{one:g}%" for one in QUARTERS), (-5, 105))
    drawn = score_panels(evidence, estimates, lines, x)
    if not drawn.panels:
        return None
    masked = f"MLM at {percent(ratios.pop())}" if len(ratios) == 1 else "MLM"
    caption = f"From {masked} alone (0%) to CLM alone (100%), CLM always first. {drawn.notes()}"
    return Figure("splits", "How much should be causal?", caption, drawn.panels)


def _rows(models: list[Model]) -> dict[tuple[float, int], tuple[Point, ...]]:
    """(masking ratio, budget) → models by their share of causal steps, where any has both.

    A budget is drawn at the ratio with most splits, and of equals at the one nearest to the usual.
    """
    every: dict[int, dict[float, dict[float, Model]]] = {}
    for one in models:
        if one.recipe.kind == "clm-mlm" and one.recipe.ratio is not None:
            ratios = every.setdefault(one.recipe.steps, {})
            ratios.setdefault(one.recipe.ratio, {})[one.recipe.causal_share] = one
    rows: dict[tuple[float, int], dict[float, Model]] = {}
    for steps, ratios in every.items():
        ratio = min(
            ratios, key=lambda ratio: (-len(ratios[ratio]), round(abs(ratio - USUAL_RATIO), 9), ratio)
        )
        rows[ratio, steps] = row = ratios[ratio]
        for one in models:
            alone = one.recipe.kind == "clm" or (one.recipe.kind == "mlm" and one.recipe.ratio == ratio)
            if alone and one.recipe.steps == steps:
                row[one.recipe.causal_share] = one
    return {
        at: tuple(Point((100 * share,), row[share]) for share in sorted(row))
        for at, row in sorted(rows.items())
        if len(row) > 1
    }
