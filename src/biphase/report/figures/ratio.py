"""The masking ratio: what is best for which task, at which size."""

from __future__ import annotations

from biphase.report.estimates import Estimates
from biphase.report.evidence import Evidence
from biphase.report.figures.chosen import by_setting, by_size, ends, meaning, percent, thousands
from biphase.report.figures.description import Axis, Figure
from biphase.report.figures.scored import Line, Point, score_panels
from biphase.report.figures.ticks import spaced
from biphase.report.recipes import Model


def figure(evidence: Evidence, estimates: Estimates) -> Figure | None:
    masked = [one for one in ends(evidence.models.values()) if one.recipe.kind == "mlm"]
    lines = []
    for words, models in by_setting(masked).items():
        for size, some in by_size(models).items():
            budgets = over_ratios(some)
            for steps, row in budgets.items():
                budget = f", {thousands(steps)} steps" if len(budgets) > 1 else ""
                lines.append(
                    Line(f"{size}{budget}{words}", meaning(row[0].model.recipe, (steps, words)), row)
                )
    drawn = score_panels(evidence, estimates, lines, ratio_axis(lines))
    if not drawn.panels:
        return None
    caption = f"MLM alone at several masking ratios. {drawn.notes()}"
    return Figure("ratio", "Which masking ratio?", caption, drawn.panels)


def over_ratios(models: list[Model]) -> dict[int, tuple[Point, ...]]:
    """Budget → models by their ratio, where there are at least two to compare."""
    rows: dict[int, dict[float, Model]] = {}
    for one in models:
        if one.recipe.ratio is not None:
            rows.setdefault(one.recipe.steps, {})[one.recipe.ratio] = one
    return {
        steps: tuple(Point((100 * ratio,), row[ratio]) for ratio in sorted(row))
        for steps, row in sorted(rows.items())
        if len(row) > 1
    }


def ratio_axis(lines: list[Line]) -> Axis:
    ticks = tuple(sorted({point.x[0] for line in lines for point in line.points}))
    return Axis(
        "masking ratio", "linear", ticks, spaced(ticks, [percent(tick / 100) for tick in ticks], 0.15)
    )
