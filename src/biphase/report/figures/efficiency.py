"""What a model has learnt on its way: scores of kept checkpoints over tokens, FLOPs and seconds.

Checkpoints on the way have not been decayed, the end has; so the end is a mark of its own, and the way to it dotted.
"""

from __future__ import annotations

import math
from dataclasses import replace

from biphase.presets import corpus_of
from biphase.report.estimates import Estimates
from biphase.report.evidence import Evidence
from biphase.report.figures.chosen import meaning, objective_name
from biphase.report.figures.description import Axis, Figure, Numbers, Vertical, View
from biphase.report.figures.scored import Line, Point, score_panels
from biphase.report.figures.ticks import on_log, spaced
from biphase.report.pretraining import cost
from biphase.report.recipes import Model
from biphase.report.repetition import Epochs
from biphase.study.corpora import REPEATED
from biphase.wording import short

VIEWS = ("tokens", "FLOPs", "seconds")
ROOM = {"tokens": 0.14, "FLOPs": 0.3, "seconds": 0.25}  # between labels, as a share of the axis


def figure(evidence: Evidence, estimates: Estimates) -> Figure | None:
    ways = _ways(evidence)
    xs = {one.name: _x(evidence, one) for way in ways for one in way}
    views = [n for n in range(len(VIEWS)) if any(math.isfinite(x[n]) for x in xs.values())]
    names = _names(ways)
    lines: list[Line] = []
    for way, name in zip(ways, names, strict=True):
        points = [Point(tuple(xs[one.name][n] for n in views), one) for one in way]
        on_the_way = [point for point in points if not point.model.recipe.final]
        end = [point for point in points if point.model.recipe.final]
        means = meaning(way[-1].recipe, name)
        lines.append(Line(name, means, tuple(on_the_way)))
        if end:
            lines.append(Line(name, means, (*on_the_way[-1:], *end), "line", legend=False, tail=True))
            lines.append(Line(name, means, tuple(end), "points", legend=False, hollow=True))
    shown = tuple(_view(VIEWS[n], [x[n] for x in xs.values()]) for n in views)
    drawn = score_panels(evidence, estimates, lines, shown[0].axis if shown else Axis(), views=len(views))
    if not drawn.panels:
        return None
    uprights = _one_epoch(evidence, ways) if views and VIEWS[views[0]] == "tokens" else ()
    panels = tuple(replace(one, verticals=uprights) for one in drawn.panels)
    once = "Dotted upright, over tokens: the corpus has been read once. " if uprights else ""
    caption = (
        "Checkpoints on the way, whose learning rate has not come down; hollow marks are the decayed ends. "
        f"FLOPs are the model's own; seconds compare only where machines were alike and not shared. {once}{drawn.notes()}"
    )
    return Figure("efficiency", "What is learnt by when", caption, panels, shown if len(shown) > 1 else ())


def _ways(evidence: Evidence) -> list[list[Model]]:
    """The checkpoints of each run that keeps some, in order of steps, its end last. Each model stands once."""
    plan = evidence.plan
    of = {plan.results[result]: one for one in evidence.models.values() for result in one.results}
    ways, seen = [], set()
    for run in plan.study.runs:
        names = [*(f"{run.name}-{step}" for step in sorted(run.keep)), run.name]
        way = list({of[plan.results[name]].name: of[plan.results[name]] for name in names}.values())
        if run.keep and way[-1].name not in seen:
            seen.add(way[-1].name)
            ways.append(way)
    return ways


def _one_epoch(evidence: Evidence, ways: list[list[Model]]) -> tuple[Vertical, ...]:
    """The tokens at which each corpus had been read once, where some way from the root went on from there."""
    epochs = Epochs(evidence.plan, evidence.store)
    found: dict[int, str] = {}
    for way in (way for way in ways if not way[-1].recipe.base):
        end = way[-1].results[0]
        tokens = epochs.tokens(end)
        if tokens is not None and (epochs.at(end) or 0.0) > REPEATED:
            found.setdefault(tokens, corpus_of(evidence.plan.path(evidence.plan.results[end])[-1].run).name)
    said = {
        tokens: f"one epoch of {name}" if len(found) > 1 else "one epoch" for tokens, name in found.items()
    }
    return tuple(Vertical(float(tokens), said[tokens]) for tokens in sorted(said))


def _x(evidence: Evidence, model: Model) -> Numbers:
    """Tokens, FLOPs and seconds up to a model; seconds are means over its pretraining seeds, NaN where unknown."""
    costs = [cost(evidence.plan, evidence.store, result) for result in model.results]
    took = [one.seconds for one in costs if one.seconds is not None]
    flops = costs[0].flops
    return (
        float(costs[0].tokens),
        math.nan if flops is None else flops,
        math.nan if len(took) < len(costs) else sum(took) / len(took),
    )


def _view(name: str, values: list[float]) -> View:
    ticks = on_log(values)
    say = (lambda one: f"{one:.0e}".replace("e+", "e")) if name == "FLOPs" else short
    axis = Axis(
        f"training {name}",
        "log",
        ticks,
        spaced(ticks, map(say, ticks), ROOM[name], log=True),
    )
    return View(name, axis)


def _names(ways: list[list[Model]]) -> list[str]:
    """The objective of each way; the name of its end where that is not enough."""
    sizes = len({way[-1].recipe.size for way in ways})
    names = [
        f"{f'{way[-1].recipe.size} ' if sizes > 1 else ''}{objective_name(way[-1].recipe)}" for way in ways
    ]
    return [way[-1].name if names.count(name) > 1 else name for way, name in zip(ways, names, strict=True)]
