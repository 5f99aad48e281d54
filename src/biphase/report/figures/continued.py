"""More masked pretraining on finished models: does a causal base catch up with a masked one, and when?"""

from __future__ import annotations

from biphase.report.estimates import Estimates
from biphase.report.evidence import Evidence
from biphase.report.figures.chosen import meaning, objective_name, thousands
from biphase.report.figures.description import Axis, Figure
from biphase.report.figures.scored import Line, Point, score_panels
from biphase.report.figures.ticks import spaced
from biphase.report.recipes import Model, Recipe, named


def figure(evidence: Evidence, estimates: Estimates) -> Figure | None:
    models = list(evidence.models.values())
    rows = _rows(models)
    names = _names(rows)
    lines = []
    for name, (base, some) in zip(names, rows, strict=True):
        starts = [Point((0.0,), one) for one in models if _alike(one.recipe, base)]
        points = (*starts, *(Point((float(one.recipe.continued),), one) for one in some))
        lines.append(Line(name, meaning(some[0].recipe, (base.steps, name)), points))
    ticks = tuple(sorted({0.0} | {point.x[0] for line in lines for point in line.points}))
    labels = spaced(ticks, ("base", *(thousands(int(one)) for one in ticks[1:])), 0.2)
    x = Axis("continued steps", "linear", ticks, labels)
    drawn = score_panels(evidence, estimates, lines, x)
    if not drawn.panels:
        return None
    what = {_went_on_with(one) for _, some in rows for one in some}
    masked = f"with {what.pop()}" if len(what) == 1 else "further"
    caption = f"Decayed models trained {masked}; the first point is the base. {drawn.notes()}"
    return Figure("continued", "Continued pretraining", caption, drawn.panels)


def _rows(models: list[Model]) -> list[tuple[Recipe, list[Model]]]:
    """The models that go on from one base with one objective, in order of steps."""
    rows: list[tuple[Recipe, list[Model]]] = []
    gone_on = [one for one in models if one.recipe.base and one.recipe.final]
    for one in sorted(gone_on, key=lambda one: one.recipe.continued):
        base = one.recipe.base
        assert base is not None
        for other, some in rows:
            same = some[0].recipe.setting == one.recipe.setting and _went_on_with(some[0]) == _went_on_with(
                one
            )
            if same and _alike(other, base):
                some.append(one)
                break
        else:
            rows.append((base, [one]))
    return sorted(rows, key=lambda row: models.index(row[1][0]))


def _names(rows: list[tuple[Recipe, list[Model]]]) -> list[str]:
    """What sets each row apart from the others, and no more."""
    parts = [
        (
            base.size,
            f"{objective_name(base)} base",
            f"after {thousands(base.steps)} steps",
            _went_on_with(some[0]),
        )
        for base, some in rows
    ]
    telling = [number for number in range(4) if number == 1 or len({part[number] for part in parts}) > 1]
    names = [", ".join(part[number] for number in telling) for part in parts]
    return [
        f"{name} ({some[0].name})" if names.count(name) > 1 else name
        for name, (_, some) in zip(names, rows, strict=True)
    ]


def _went_on_with(model: Model) -> str:
    return " → ".join(named(one.label) for one in model.recipe.own)


def _alike(one: Recipe, other: Recipe) -> bool:
    """The same model but for its seed."""
    facts = ("size", "parameters", "spans", "decayed", "of", "setting")
    if any(getattr(one, fact) != getattr(other, fact) for fact in facts):
        return False
    if one.base is None or other.base is None:
        return one.base is other.base
    return _alike(one.base, other.base)
