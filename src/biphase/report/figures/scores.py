"""The figures of scores: objectives, ratios, learning rates, splits, robustness, continued training, efficiency.

`score_panels` draws one panel for each family of tasks, with intervals over seeds and the paper's values. A point is a
model. A model without a seed that is complete on every task of a family has no point there; the caption gives the
number of missing points. Scores are in percent in all figures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from biphase.presets import corpus_of
from biphase.report.estimates import Estimates, Score
from biphase.report.evidence import Evidence
from biphase.report.figures.description import (
    NAMES,
    PAPER,
    PAPER_LOOK,
    USUAL_RATIO,
    Axis,
    Draws,
    Figure,
    Meaning,
    Numbers,
    Panel,
    Series,
    Style,
    Vertical,
    View,
    by_setting,
    by_size,
    ends,
    looks,
    meaning,
    objective_name,
    on_log,
    percent,
    role_of,
    spaced,
    standing_for,
    style_of,
    thousands,
)
from biphase.report.pretraining import Epochs, cost
from biphase.report.recipes import Model, Published, Recipe, alike, named
from biphase.report.statistics.intervals import Estimate, across, of_scores
from biphase.specs.tasks import FAMILIES
from biphase.study.costs import REPEATED
from biphase.text import beside, counted, fixed, listed, rate, short

SCORE = "test score, %"
SEEDS_BESIDE = 0.16  # x offset of the markers for single seeds


@dataclass(frozen=True)
class Point:
    """A model and its x position, one number for each view of the figure."""

    x: Numbers
    model: Model


@dataclass(frozen=True)
class ScoreLine:
    """The models that one series joins, in order of x."""

    name: str
    meaning: Meaning
    points: tuple[Point, ...]
    draws: Draws = "both"
    legend: bool = True
    seeds: bool = False  # draw each seed as a small circle beside its mean
    hollow: bool = False
    tail: bool = False  # thin and dotted: it only leads to a point


@dataclass(frozen=True)
class Drawn:
    """Panels of scores, and the number of their missing points."""

    panels: tuple[Panel, ...]
    points: int
    missing: int
    covers: tuple[str, ...]  # what the intervals cover; empty: there are none
    paper: bool
    lonely: tuple[str, ...]  # families without a panel, because no line has two points there

    def notes(self) -> str:
        """Caption text about intervals, scales, marks and missing points."""
        covers = f"Bars are 95% intervals over {listed(list(self.covers))}."
        sentences = [covers if self.covers else "One seed: no intervals."]
        if len(self.panels) > 1:
            sentences.append("Each panel has its own scale.")
        if self.paper:
            sentences.append("Hollow diamonds are the paper's values.")
        if self.lonely:
            sentences.append(f"Not drawn, with fewer than two points: {listed(list(self.lonely))}.")
        if self.missing:
            are = "is" if self.missing == 1 else "are"
            sentences.append(
                f"{self.missing} of {counted(self.points, 'point')} {are} missing: "
                "not computed, or not for every learning rate of a seed."
            )
        return " ".join(sentences)

    def figure(self, id: str, title: str, caption: str, views: tuple[View, ...] = ()) -> Figure | None:
        """The figure of these panels, its caption followed by the notes; None if there is no panel."""
        return Figure(id, title, f"{caption} {self.notes()}", self.panels, views) if self.panels else None


def score_panels(
    evidence: Evidence, estimates: Estimates, lines: Iterable[ScoreLine], x: Axis, *, views: int = 1
) -> Drawn:
    """A panel for each family with known scores."""
    lines = tuple(lines)
    styles = [
        _style(line, look) for line, look in zip(lines, looks([one.meaning for one in lines]), strict=True)
    ]
    panels: list[Panel] = []
    covers: dict[str, None] = {}
    every: dict[tuple[str, str], bool] = {}  # (family, model) → whether its score is known
    paper = False
    joining = any(line.draws != "points" for line in lines)
    lonely: list[str] = []
    for family, tasks in evidence.families.items():
        made: list[Series] = []
        others: list[Series] = []
        joined = not joining
        for line, style in zip(lines, styles, strict=True):
            scores = [estimates.families[point.model.name, family] for point in line.points]
            known = [(p, s) for p, s in zip(line.points, scores, strict=True) if s.known]
            every |= {(family, score.model): score.known for score in scores if score.planned}
            joined = joined or len(known) > 1
            if known:
                made += [*_seeds(line, style, known), _series(evidence, line, style, known, tasks, views)]
                others += _of_other_roles(evidence, line, known, tasks, views)
                covers |= {s.seeds.covers: None for _, s in known if math.isfinite(s.seeds.low)}
        if made and not joined:
            lonely.append(FAMILIES[family].name)
        elif made:
            made += others
            marks = _paper_marks(evidence.published, lines, family, views)
            paper = paper or bool(marks)
            y = Axis("" if panels else SCORE)
            panels.append(Panel(FAMILIES[family].name.capitalize(), x, y, (*marks, *made)))
    return Drawn(
        tuple(panels),
        len(every),
        sum(not known for known in every.values()),
        tuple(covers),
        paper,
        tuple(lonely),
    )


def _style(line: ScoreLine, look: Style) -> Style:
    return replace(look, hollow=line.hollow, **({"dash": "dot", "width": 0.6} if line.tail else {}))


def _of_other_roles(
    evidence: Evidence, line: ScoreLine, known: list[tuple[Point, Score]], tasks: tuple[str, ...], views: int
) -> list[Series]:
    """Redraw points whose role differs from their line's, such as a base or a single objective, in their own style."""
    found: dict[str, list[tuple[Point, Score]]] = {}
    for point, score in known if line.draws == "both" else ():
        role = role_of(point.model.recipe)
        if role != line.meaning.role:
            found.setdefault(role, []).append((point, score))
    return [
        _series(evidence, replace(line, name=NAMES[role], draws="points"), style_of(role), some, tasks, views)
        for role, some in found.items()
    ]


def _series(
    evidence: Evidence,
    line: ScoreLine,
    look: Style,
    known: list[tuple[Point, Score]],
    tasks: tuple[str, ...],
    views: int,
) -> Series:
    across = tuple(tuple(point.x[view] for point, _ in known) for view in range(views))
    bars = (
        known if line.draws != "line" else []
    )  # a line that only joins points of other series has no intervals
    return Series(
        name=line.name,
        look=look,
        x=across[0],
        y=tuple(100 * score.seeds.mean for _, score in known),
        draws=line.draws,
        low=tuple(100 * score.seeds.low for _, score in bars),
        high=tuple(100 * score.seeds.high for _, score in bars),
        hover=tuple(hover(evidence, point.model, score, tasks) for point, score in known),
        views=across if views > 1 else (),
        legend=line.legend,
    )


def _seeds(line: ScoreLine, look: Style, known: list[tuple[Point, Score]]) -> list[Series]:
    """A marker for every single seed, a little beside its mean."""
    every = [
        (point, 100 * float(value))
        for point, score in known
        for value in score.by_seed.reshape(-1)
        if math.isfinite(value) and score.seeds.n > 1
    ]
    if not line.seeds or not every:
        return []
    return [
        Series(
            line.name,
            replace(look, marker="circle", hollow=True, size=0.55),
            x=tuple(point.x[0] + SEEDS_BESIDE for point, _ in every),
            y=tuple(value for _, value in every),
            draws="points",
            hover=tuple(f"{point.model.name}, one seed\n{fixed(value)}%" for point, value in every),
            legend=False,
        )
    ]


def _paper_marks(published: Published, lines: Iterable[ScoreLine], family: str, views: int) -> list[Series]:
    """The paper's values of the drawn recipes."""
    found: dict[Numbers, tuple[float, str]] = {}
    for line in lines:
        for point in line.points:
            value = published.family_mean(point.model.recipe, family)
            if value is not None:
                found[(*point.x, value)] = value, point.model.recipe.words()
    if not found:
        return []
    across = tuple(tuple(place[view] for place in found) for view in range(views))
    return [
        Series(
            PAPER,
            PAPER_LOOK,
            x=across[0],
            y=tuple(value for value, _ in found.values()),
            draws="points",
            hover=tuple(f"the paper: {fixed(value)}%\n{words}" for value, words in found.values()),
            views=across if views > 1 else (),
        )
    ]


def hover(evidence: Evidence, model: Model, score: Score, tasks: tuple[str, ...]) -> str:
    """The hover text of a point."""
    lines = [model.name, model.recipe.words(), with_half(score.seeds.mean, score.seeds.low, score.seeds.high)]
    seeds = counted(score.seeds.n, "seed")
    lines.append(f"{seeds}, interval over {score.seeds.covers}" if math.isfinite(score.seeds.low) else seeds)
    chosen = rates(evidence, model, tasks)
    if chosen:
        lines.append(f"learning rates {chosen}")
    if score.done < score.of:
        lines.append(f"{score.of - score.done:,} of {counted(score.of, 'fine-tuning')} missing")
    return "\n".join(lines)


def with_half(mean: float, low: float, high: float) -> str:
    """A mean and its interval, given as shares of one: "84.89 ± 0.18%"."""
    return f"{fixed(100 * mean)} {beside(100 * mean, 100 * low, 100 * high)}".rstrip() + "%"


def rates(evidence: Evidence, model: Model, tasks: tuple[str, ...]) -> str:
    """How often validation chose each learning rate: "5e-5 ×9, 1e-4 ×6"."""
    grids = [evidence.grids[result, task] for result in model.results for task in tasks]
    chosen = Counter(grid.lrs[row] for grid in grids for row in grid.chosen.values())
    return ", ".join(f"{rate(lr)} ×{chosen[lr]}" for lr in sorted(chosen))


# ---------------------------------------------------------------- objectives
# CLM, MLM and both in sequence: over sizes if there are several, else side by side.


def objectives_figure(evidence: Evidence, estimates: Estimates) -> Figure | None:
    """One model of each objective: over sizes, or side by side."""
    models = [
        (suffix, model)
        for suffix, group in by_setting(ends(evidence.models.values())).items()
        for of_size in by_size(group).values()
        for model in standing_for(of_size)
    ]
    sizes = by_size(model for _, model in models if model.recipe.parameters)
    if len(sizes) > 1:
        return _over_sizes(evidence, estimates, models, [of_size[0].recipe for of_size in sizes.values()])
    starts = [("", model) for model in evidence.models.values() if not model.recipe.spans]
    return _side_by_side(evidence, estimates, [*models, *starts])


def _over_sizes(
    evidence: Evidence, estimates: Estimates, models: list[tuple[str, Model]], sizes: list[Recipe]
) -> Figure | None:
    lines: dict[str, ScoreLine] = {}
    for suffix, model in models:
        if model.recipe.parameters:
            name = f"{objective_name(model.recipe)}{suffix}"
            line = lines.get(name) or ScoreLine(name, Meaning(role_of(model.recipe), (suffix, name)), ())
            point = Point((float(model.recipe.parameters),), model)
            lines[name] = replace(line, points=(*line.points, point))
    ticks = tuple(float(recipe.parameters or 0) for recipe in sizes)
    labels = spaced(ticks, [recipe.size for recipe in sizes], 0.16, log=True)
    x = Axis("model size", "log", ticks, labels, _around(ticks))
    drawn = score_panels(evidence, estimates, lines.values(), x)
    steps = {model.recipe.steps for _, model in models}
    budget = f"after {steps.pop():,} steps" if len(steps) == 1 else "each size at its longest common budget"
    caption = f"Mean over the tasks of each family, by model size, {budget}."
    return drawn.figure("objectives", "Masked or causal, by model size", caption)


def _around(values: Numbers) -> tuple[float, float]:
    """A range slightly wider than these values, on a logarithmic scale."""
    room = (max(values) / min(values)) ** 0.12
    return min(values) / room, max(values) * room


def _side_by_side(evidence: Evidence, estimates: Estimates, models: list[tuple[str, Model]]) -> Figure | None:
    if len(models) < 2:
        return None
    lines = []
    for place, (suffix, model) in enumerate(models):
        name = f"{objective_name(model.recipe)}{suffix}" if model.recipe.spans else model.name
        points = (Point((float(place),), model),)
        lines.append(
            ScoreLine(name, Meaning(role_of(model.recipe)), points, "points", legend=False, seeds=True)
        )
    labels = tuple(_broken(line.name) for line in lines)
    x = Axis("", "linear", tuple(range(len(models))), labels, (-0.6, len(models) - 0.4), grid=False)
    drawn = score_panels(evidence, estimates, lines, x)
    steps = {model.recipe.steps for _, model in models if model.recipe.spans}
    title = "Causal, masked, or both in sequence" if steps else "Models side by side"
    after = f", after {steps.pop():,} steps" if len(steps) == 1 else ""
    caption = f"Mean over the tasks of each family{after}; small circles are seeds."
    return drawn.figure("objectives", title, caption)


def _broken(name: str) -> str:
    """A name in short lines, for a tick label."""
    for before, after in ((" → ", " →\n"), (" (as ", "\n(as ")):
        name = name.replace(before, after)
    return name if "\n" in name else name.replace(" ", "\n", 1)


# ---------------------------------------------------------------- masking ratio


def ratio_figure(evidence: Evidence, estimates: Estimates) -> Figure | None:
    """MLM from scratch over masking ratios, a line for each size and budget."""
    masked = [model for model in ends(evidence.models.values()) if model.recipe.kind == "mlm"]
    lines = []
    for suffix, size, models in _alike_groups(masked):
        budgets = over_ratios(models)
        for steps, row in budgets.items():
            budget = f", {thousands(steps)} steps" if len(budgets) > 1 else ""
            of = meaning(row[0].model.recipe, (steps, suffix))
            lines.append(ScoreLine(f"{size}{budget}{suffix}", of, row))
    drawn = score_panels(evidence, estimates, lines, ratio_axis(lines))
    return drawn.figure("ratio", "Which masking ratio?", "MLM alone at several masking ratios.")


def _alike_groups(models: Iterable[Model]) -> list[tuple[str, str, list[Model]]]:
    """The models by setting and size: suffix for the legend, size, models."""
    return [
        (suffix, size, of_size)
        for suffix, of_setting in by_setting(models).items()
        for size, of_size in by_size(of_setting).items()
    ]


def over_ratios(models: list[Model]) -> dict[int, tuple[Point, ...]]:
    """Budget → models by ratio, for budgets with at least two ratios."""
    rows: dict[int, dict[float, Model]] = {}
    for model in models:
        if model.recipe.ratio is not None:
            rows.setdefault(model.recipe.steps, {})[model.recipe.ratio] = model
    return {
        steps: tuple(Point((100 * ratio,), row[ratio]) for ratio in sorted(row))
        for steps, row in sorted(rows.items())
        if len(row) > 1
    }


def ratio_axis(lines: list[ScoreLine]) -> Axis:
    ticks = tuple(sorted({point.x[0] for line in lines for point in line.points}))
    return Axis(
        "masking ratio", "linear", ticks, spaced(ticks, [percent(tick / 100) for tick in ticks], 0.15)
    )


# ---------------------------------------------------------------- learning rates of fine-tuning
# The mean over seeds at each rate, without selection.


def rates_figure(evidence: Evidence, estimates: Estimates) -> Figure | None:
    """One model of each objective over the learning rates of fine-tuning."""
    finetune = evidence.plan.study.finetune
    if finetune is None or len(finetune.lrs) < 2:
        return None
    models, size = _models(evidence)
    panels: list[Panel] = []
    missing = points = 0
    covers: dict[str, None] = {}
    for family, tasks in evidence.families.items():
        made: list[Series] = []
        for one, (name, look) in models.items():
            at = _by_rate(evidence, evidence.models[one], tasks)
            points, missing = points + len(at), missing + sum(not math.isfinite(e.mean) for e in at.values())
            covers |= {e.covers: None for e in at.values() if math.isfinite(e.low)}
            made += _rate_series(name, look, evidence.models[one], at)
        if made:
            marks = _paper_rate_marks(evidence.published, [evidence.models[one] for one in models], tasks)
            y = Axis("" if panels else SCORE)
            panels.append(Panel(FAMILIES[family].name.capitalize(), _axis(finetune.lrs), y, (*marks, *made)))
    if not panels:
        return None
    said = [f"Fine-tuning at each learning rate, {size}; no rate is chosen here."]
    said.append(
        f"Areas are 95% intervals over {listed(list(covers))}." if covers else "One seed: no intervals."
    )
    said += ["Each panel has its own scale."] * (len(panels) > 1)
    paper = any(one.name == PAPER for panel in panels for one in panel.series)
    said += ["Hollow diamonds are single runs of the paper."] * paper
    said += [f"{missing} of {counted(points, 'point')} missing."] * bool(missing)
    return Figure("rates", "How delicate is the learning rate?", " ".join(said), tuple(panels))


def _models(evidence: Evidence) -> tuple[dict[str, tuple[str, Style]], str]:
    """Model name → (legend name, style) for one model of each objective at the middle size, and that size.

    If nothing was pretrained, all scored models.
    """
    scored = [one for one in evidence.models.values() if _any(evidence, one)]
    sizes = by_size(ends(scored))
    if not sizes:
        starts = [one for one in scored if not one.recipe.spans]
        some = looks([Meaning("other", one.name) for one in starts])
        return {
            one.name: (one.name, look) for one, look in zip(starts, some, strict=True)
        }, "models as they are"
    size = list(sizes)[len(sizes) // 2]
    found: dict[str, tuple[str, Meaning]] = {}
    for words, some in by_setting(sizes[size]).items():
        for one in standing_for(some):
            name = f"{objective_name(one.recipe)}{words}"
            found[one.name] = name, Meaning(role_of(one.recipe), (words, name))
    styles = looks([one for _, one in found.values()])
    return {one: (name, look) for (one, (name, _)), look in zip(found.items(), styles, strict=True)}, size


def _any(evidence: Evidence, model: Model) -> bool:
    return any(evidence.grids[result, task].done for result in model.results for task in evidence.tasks)


def _by_rate(evidence: Evidence, model: Model, tasks: tuple[str, ...]) -> dict[float, Estimate]:
    """Rate → the mean over tasks for each seed, with its interval."""
    scores = np.mean([evidence.by_rate(model, task) for task in tasks], axis=0)  # (P, rates, F)
    lrs = evidence.grids[model.results[0], tasks[0]].lrs
    return {lr: of_scores(across(scores[:, place])) for place, lr in enumerate(lrs)}


def _rate_series(name: str, look: Style, model: Model, at: dict[float, Estimate]) -> list[Series]:
    known = {lr: one for lr, one in at.items() if math.isfinite(one.mean)}
    if not known:
        return []
    hover = tuple(
        f"{model.name}\nlearning rate {rate(lr)}\n{with_half(e.mean, e.low, e.high)}\n{counted(e.n, 'seed')}"
        for lr, e in known.items()
    )
    low, high = (tuple(100 * getattr(e, end) for e in known.values()) for end in ("low", "high"))
    mean = tuple(100 * e.mean for e in known.values())
    return [Series(name, look, tuple(known), mean, low=low, high=high, band=True, hover=hover)]


def _paper_rate_marks(published: Published, models: list[Model], tasks: tuple[str, ...]) -> list[Series]:
    """The paper's single runs, if the family has one task here and it is their dataset."""
    if len(tasks) > 1:
        return []
    known = [(lr, y, one) for one in models for lr, y in published.at_rates(one.recipe, tasks[0]).items()]
    if not known:
        return []
    hover = tuple(
        f"the paper: {fixed(y)}%, one run\n{one.recipe.words()}\nlearning rate {rate(lr)}"
        for lr, y, one in known
    )
    x, y = tuple(one[0] for one in known), tuple(one[1] for one in known)
    return [Series(PAPER, PAPER_LOOK, x, y, draws="points", hover=hover)]


def _axis(lrs: tuple[float, ...]) -> Axis:
    ticks = tuple(sorted(lrs))
    return Axis("learning rate", "log", ticks, spaced(ticks, [rate(one) for one in ticks], 0.22, log=True))


# ---------------------------------------------------------------- splits
# The share of CLM steps, from MLM alone to CLM alone, for each budget.


QUARTERS = (0.0, 25.0, 50.0, 75.0, 100.0)


def splits_figure(evidence: Evidence, estimates: Estimates) -> Figure | None:
    """Scores over the share of CLM steps, a line for each budget."""
    rows = [
        (suffix, size, ratio, steps, points)
        for suffix, size, models in _alike_groups(ends(evidence.models.values()))
        for (ratio, steps), points in _split_rows(models).items()
    ]
    sizes, ratios = {size for _, size, *_ in rows}, {ratio for _, _, ratio, *_ in rows}
    lines = []
    for suffix, size, ratio, steps, points in rows:
        parts = [size] * (len(sizes) > 1) + [f"MLM {percent(ratio)}"] * (len(ratios) > 1)
        split = next(point.model.recipe for point in points if point.model.recipe.kind == "clm-mlm")
        name = ", ".join([*parts, f"{thousands(steps)} steps{suffix}"])
        lines.append(ScoreLine(name, meaning(split, (steps, ratio, suffix)), points))
    labels = tuple(f"{share:g}%" for share in QUARTERS)
    x = Axis("share of causal steps", "linear", QUARTERS, labels, (-5, 105))
    drawn = score_panels(evidence, estimates, lines, x)
    masked = f"MLM at {percent(ratios.pop())}" if len(ratios) == 1 else "MLM"
    caption = f"From {masked} alone (0%) to CLM alone (100%), CLM always first."
    return drawn.figure("splits", "How much should be causal?", caption)


def _split_rows(models: list[Model]) -> dict[tuple[float, int], tuple[Point, ...]]:
    """(masking ratio, budget) → models by their share of CLM steps, where some model has both objectives.

    A budget is drawn at the ratio with the most splits; of equals, at the one nearest to the usual.
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


# ---------------------------------------------------------------- robustness
# The same masking ratios from scratch and after CLM.


def robustness_figure(evidence: Evidence, estimates: Estimates) -> Figure | None:
    """Scores over masking ratios, from scratch and after CLM."""
    groups = _alike_groups(ends(evidence.models.values()))
    sizes_of: Counter[str] = Counter(suffix for suffix, _, models in groups if _after_clm(models))
    scratch: dict[str, ScoreLine] = {}
    after = []
    for suffix, size, models in groups:
        which = f"{size}, " if sizes_of[suffix] > 1 else ""
        alone = over_ratios([model for model in models if model.recipe.kind == "mlm"])
        for (causal, steps), row in _after_clm(models).items():
            if steps in alone:
                name = f"{which}MLM from scratch{suffix}"
                of = meaning(alone[steps][0].model.recipe, (0, suffix))
                scratch[name] = ScoreLine(name, of, alone[steps])
            name = f"{which}CLM for {thousands(causal)} of {thousands(steps)} steps, then MLM{suffix}"
            after.append(ScoreLine(name, meaning(row[0].model.recipe, (causal, steps, suffix)), row))
    if not after:
        return None
    lines = [*scratch.values(), *after]
    drawn = score_panels(evidence, estimates, lines, ratio_axis(lines))
    caption = "How much the masking ratio matters with and without CLM first."
    return drawn.figure("robustness", "Is the ratio less delicate after CLM?", caption)


def _after_clm(models: list[Model]) -> dict[tuple[int, int], tuple[Point, ...]]:
    """(CLM steps, all steps) → two-stage models by ratio."""
    groups: dict[int, list[Model]] = {}
    for model in models:
        if model.recipe.kind == "clm-mlm":
            groups.setdefault(round(model.recipe.causal_share * model.recipe.steps), []).append(model)
    return {
        (causal, steps): row
        for causal, group in sorted(groups.items())
        for steps, row in over_ratios(group).items()
    }


# ---------------------------------------------------------------- continued training


def continued_figure(evidence: Evidence, estimates: Estimates) -> Figure | None:
    """Decayed bases and their continuations, over the steps since the base."""
    models = list(evidence.models.values())
    rows = _continued_rows(models)
    names = _continued_names(rows)
    lines = []
    for name, (base, some) in zip(names, rows, strict=True):
        starts = [Point((0.0,), one) for one in models if alike(one.recipe) == alike(base)]
        points = (*starts, *(Point((float(one.recipe.continued),), one) for one in some))
        lines.append(ScoreLine(name, meaning(some[0].recipe, (base.steps, name)), points))
    ticks = tuple(sorted({0.0} | {point.x[0] for line in lines for point in line.points}))
    labels = spaced(ticks, ("base", *(thousands(int(one)) for one in ticks[1:])), 0.2)
    x = Axis("continued steps", "linear", ticks, labels)
    drawn = score_panels(evidence, estimates, lines, x)
    what = {_went_on_with(one) for _, some in rows for one in some}
    masked = f"with {what.pop()}" if len(what) == 1 else "further"
    caption = f"Decayed models trained {masked}; the first point is the base."
    return drawn.figure("continued", "Continued pretraining", caption)


def _continued_rows(models: list[Model]) -> list[tuple[Recipe, list[Model]]]:
    """The models that continue one base with one objective, in order of steps."""
    rows: list[tuple[Recipe, list[Model]]] = []
    gone_on = [one for one in models if one.recipe.base and one.recipe.final]
    for one in sorted(gone_on, key=lambda one: one.recipe.continued):
        base = one.recipe.base
        assert base is not None
        for other, some in rows:
            same = some[0].recipe.setting == one.recipe.setting and _went_on_with(some[0]) == _went_on_with(
                one
            )
            if same and alike(other) == alike(base):
                some.append(one)
                break
        else:
            rows.append((base, [one]))
    return sorted(rows, key=lambda row: models.index(row[1][0]))


def _continued_names(rows: list[tuple[Recipe, list[Model]]]) -> list[str]:
    """Legend names with only the parts that distinguish the rows."""
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


# ---------------------------------------------------------------- efficiency
# Scores of kept checkpoints over tokens, FLOPs and seconds. Intermediate checkpoints are not decayed and the end is, so
# the end has a marker of its own, joined by a dotted line.


VIEWS = ("tokens", "FLOPs", "seconds")
ROOM = {"tokens": 0.14, "FLOPs": 0.3, "seconds": 0.25}  # between labels, as a share of the axis


def efficiency_figure(evidence: Evidence, estimates: Estimates) -> Figure | None:
    """Scores of kept checkpoints over tokens, FLOPs and seconds, a line for each run."""
    runs = _runs(evidence)
    xs = {model.name: _x(evidence, model) for run in runs for model in run}
    views = [n for n in range(len(VIEWS)) if any(math.isfinite(x[n]) for x in xs.values())]
    lines: list[ScoreLine] = []
    for run, name in zip(runs, _efficiency_names(runs), strict=True):
        points = [Point(tuple(xs[model.name][n] for n in views), model) for model in run]
        kept = tuple(point for point in points if not point.model.recipe.final)
        end = tuple(point for point in points if point.model.recipe.final)
        of = meaning(run[-1].recipe, name)
        lines.append(ScoreLine(name, of, kept))
        if end:
            lines.append(ScoreLine(name, of, (*kept[-1:], *end), "line", legend=False, tail=True))
            lines.append(ScoreLine(name, of, end, "points", legend=False, hollow=True))
    shown = tuple(_view(VIEWS[n], [x[n] for x in xs.values()]) for n in views)
    drawn = score_panels(evidence, estimates, lines, shown[0].axis if shown else Axis(), views=len(views))
    verticals = _one_epoch(evidence, runs) if views and VIEWS[views[0]] == "tokens" else ()
    drawn = replace(drawn, panels=tuple(replace(panel, verticals=verticals) for panel in drawn.panels))
    caption = (
        "Intermediate checkpoints before the learning-rate decay; hollow marks are the decayed ends of runs. "
        "FLOPs are model FLOPs. Seconds are comparable only between equal machines that ran nothing else."
    )
    if verticals:
        caption += " Dotted vertical line: one epoch of the corpus."
    return drawn.figure("efficiency", "What is learnt by when", caption, shown if len(shown) > 1 else ())


def _runs(evidence: Evidence) -> list[list[Model]]:
    """The kept checkpoints of each run in order of steps, its end last. Each run's end occurs once."""
    plan = evidence.plan
    of = {plan.results[result]: model for model in evidence.models.values() for result in model.results}
    runs: dict[str, list[Model]] = {}
    for run in plan.study.runs:
        names = [*(f"{run.name}-{step}" for step in sorted(run.keep)), run.name]
        models = list({of[plan.results[name]].name: of[plan.results[name]] for name in names}.values())
        if run.keep:
            runs.setdefault(models[-1].name, models)
    return list(runs.values())


def _one_epoch(evidence: Evidence, runs: list[list[Model]]) -> tuple[Vertical, ...]:
    """The tokens of one epoch of each corpus, where some run from scratch reads further."""
    plan, epochs = evidence.plan, Epochs(evidence.plan, evidence.store)
    corpora: dict[int, str] = {}
    for end in (run[-1].results[0] for run in runs if not run[-1].recipe.base):
        tokens = epochs.tokens(end)
        if tokens is not None and (epochs.at(end) or 0.0) > REPEATED:
            corpora.setdefault(tokens, corpus_of(plan.path(plan.results[end])[-1].run).name)
    return tuple(
        Vertical(float(tokens), f"one epoch of {corpora[tokens]}" if len(corpora) > 1 else "one epoch")
        for tokens in sorted(corpora)
    )


def _x(evidence: Evidence, model: Model) -> Numbers:
    """Tokens, FLOPs and seconds up to a model; seconds are the mean over its pretraining seeds. NaN: unknown."""
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
    labels = [f"{tick:.0e}".replace("e+", "e") if name == "FLOPs" else short(tick) for tick in ticks]
    return View(name, Axis(f"training {name}", "log", ticks, spaced(ticks, labels, ROOM[name], log=True)))


def _efficiency_names(runs: list[list[Model]]) -> list[str]:
    """The objectives of each run; the name of its end where that is ambiguous."""
    ends = [run[-1] for run in runs]
    sizes = len({model.recipe.size for model in ends})
    names = [
        f"{f'{model.recipe.size} ' if sizes > 1 else ''}{objective_name(model.recipe)}" for model in ends
    ]
    return [model.name if names.count(name) > 1 else name for model, name in zip(ends, names, strict=True)]


FIGURES = (
    objectives_figure,
    ratio_figure,
    efficiency_figure,
    rates_figure,
    splits_figure,
    robustness_figure,
    continued_figure,
)
