"""Is the masking ratio less delicate after causal pretraining? The same ratios from scratch and after CLM."""

from __future__ import annotations

from biphase.report.estimates import Estimates
from biphase.report.evidence import Evidence
from biphase.report.figures.chosen import by_setting, by_size, ends, meaning, thousands
from biphase.report.figures.description import Figure
from biphase.report.figures.ratio import over_ratios, ratio_axis
from biphase.report.figures.scored import Line, Point, score_panels
from biphase.report.recipes import Model


def figure(evidence: Evidence, estimates: Estimates) -> Figure | None:
    scratch, after = [], []
    for words, models in by_setting(ends(evidence.models.values())).items():
        sizes = by_size(models)
        for size, some in sizes.items():
            which = f"{size}, " if len(sizes) > 1 and _several(sizes) else ""
            alone = over_ratios([one for one in some if one.recipe.kind == "mlm"])
            for (causal, steps), row in _after_clm(some).items():
                if steps in alone:
                    row_alone = alone[steps]
                    variant = meaning(row_alone[0].model.recipe, (0, words))
                    scratch.append(Line(f"{which}MLM from scratch{words}", variant, row_alone))
                first = f"{which}CLM for {thousands(causal)} of {thousands(steps)} steps, then MLM{words}"
                after.append(Line(first, meaning(row[0].model.recipe, (causal, steps, words)), row))
    scratch = list({line.name: line for line in scratch}.values())
    lines = [*scratch, *after]
    drawn = score_panels(evidence, estimates, lines, ratio_axis(lines))
    if not after or not drawn.panels:
        return None
    caption = f"How much the masking ratio matters with and without CLM first. {drawn.notes()}"
    return Figure("robustness", "Is the ratio less delicate after CLM?", caption, drawn.panels)


def _after_clm(models: list[Model]) -> dict[tuple[int, int], tuple[Point, ...]]:
    """(causal steps, all steps) → two-stage models by their ratio."""
    groups: dict[int, list[Model]] = {}
    for one in models:
        if one.recipe.kind == "clm-mlm":
            groups.setdefault(round(one.recipe.causal_share * one.recipe.steps), []).append(one)
    return {
        (causal, steps): row
        for causal, some in sorted(groups.items())
        for steps, row in over_ratios(some).items()
    }


def _several(sizes: dict[str, list[Model]]) -> bool:
    return sum(bool(_after_clm(some)) for some in sizes.values()) > 1
