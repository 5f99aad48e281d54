"""Masked against causal, and both in sequence: by size where there are several, else side by side."""

from __future__ import annotations

from dataclasses import replace

from biphase.report.estimates import Estimates
from biphase.report.evidence import Evidence
from biphase.report.figures.chosen import by_setting, by_size, ends, objective_name, standing_for
from biphase.report.figures.description import Axis, Figure, Numbers
from biphase.report.figures.palette import Meaning, role_of
from biphase.report.figures.scored import Line, Point, score_panels
from biphase.report.figures.ticks import spaced
from biphase.report.recipes import Model


def figure(evidence: Evidence, estimates: Estimates) -> Figure | None:
    chosen = {
        words: {size: standing_for(some) for size, some in by_size(models).items()}
        for words, models in by_setting(ends(evidence.models.values())).items()
    }
    sizes = {
        size: some[0]
        for sizes in chosen.values()
        for size, some in sizes.items()
        if some[0].recipe.parameters
    }
    if len(sizes) > 1:
        return _over_sizes(evidence, estimates, chosen, sizes)
    models = [(words, one) for words, sizes in chosen.items() for some in sizes.values() for one in some]
    starts = [("", one) for one in evidence.models.values() if not one.recipe.spans]
    return _side_by_side(evidence, estimates, [*models, *starts])


def _over_sizes(
    evidence: Evidence,
    estimates: Estimates,
    chosen: dict[str, dict[str, list[Model]]],
    sizes: dict[str, Model],
) -> Figure | None:
    lines: dict[str, Line] = {}
    for words, models in chosen.items():
        for size in sizes:
            for one in models.get(size, []):
                name = f"{objective_name(one.recipe)}{words}"
                line = lines.get(name) or Line(name, Meaning(role_of(one.recipe), (words, name)), ())
                point = Point((float(one.recipe.parameters or 0),), one)
                lines[name] = replace(line, points=(*line.points, point))
    ticks = {size: float(one.recipe.parameters or 0) for size, one in sizes.items()}
    places = tuple(ticks.values())
    x = Axis("model size", "log", places, spaced(places, ticks, 0.16, log=True), _around(places))
    drawn = score_panels(evidence, estimates, lines.values(), x)
    if not drawn.panels:
        return None
    caption = f"Mean over the tasks of each family, by model size, {_budgets(chosen)}. {drawn.notes()}"
    return Figure("objectives", "Masked or causal, by model size", caption, drawn.panels)


def _around(values: Numbers) -> tuple[float, float]:
    """A little more than these, on a logarithmic scale."""
    room = (max(values) / min(values)) ** 0.12
    return min(values) / room, max(values) * room


def _budgets(chosen: dict[str, dict[str, list[Model]]]) -> str:
    steps = {one.recipe.steps for sizes in chosen.values() for some in sizes.values() for one in some}
    return f"after {steps.pop():,} steps" if len(steps) == 1 else "each size at its longest common budget"


def _side_by_side(evidence: Evidence, estimates: Estimates, models: list[tuple[str, Model]]) -> Figure | None:
    if len(models) < 2:
        return None
    names = [
        one.name if not one.recipe.spans else f"{objective_name(one.recipe)}{words}" for words, one in models
    ]
    lines = [
        Line(
            name,
            Meaning(role_of(one.recipe)),
            (Point((float(place),), one),),
            "points",
            legend=False,
            seeds=True,
        )
        for place, (name, (_, one)) in enumerate(zip(names, models, strict=True))
    ]
    labels = tuple(_broken(name) for name in names)
    x = Axis("", "linear", tuple(range(len(models))), labels, (-0.6, len(models) - 0.4), grid=False)
    drawn = score_panels(evidence, estimates, lines, x)
    if not drawn.panels:
        return None
    steps = {one.recipe.steps for _, one in models if one.recipe.spans}
    after = f", after {steps.pop():,} steps" if len(steps) == 1 else ""
    caption = f"Mean over the tasks of each family{after}; small circles are seeds. {drawn.notes()}"
    title = (
        "Causal, masked, or both in sequence"
        if any(one.recipe.spans for _, one in models)
        else "Models side by side"
    )
    return Figure("objectives", title, caption, drawn.panels)


def _broken(name: str) -> str:
    """A name in short lines, to stand below its place."""
    for before, after in ((" → ", " →\n"), (" (as ", "\n(as ")):
        name = name.replace(before, after)
    return name if "\n" in name else name.replace(" ", "\n", 1)
