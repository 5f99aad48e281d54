"""The figures of scores: objectives, ratios, learning rates, splits, robustness, continued training, efficiency.

`score_figure` draws one panel for each family of tasks, with intervals over seeds and the paper's values. A point is a
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
    grouped,
    looks,
    meaning,
    objective_name,
    on_log,
    percent,
    role_of,
    standing_for,
    style_of,
    thousands,
)
from biphase.report.pretraining import Epochs
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
    lr: float | None = None  # None: each seed at the rate that its validation scores chose


@dataclass(frozen=True)
class ScoreLine:
    """The models that one series joins, in order of x."""

    name: str
    meaning: Meaning
    points: tuple[Point, ...]
    draws: Draws = "both"
    legend: bool = True
    seeds: bool = False  # draw each seed as a small circle beside its mean
    band: bool = False  # draw intervals as an area
    hollow: bool = False
    tail: bool = False  # thin and dotted: it only leads to a point


Known = list[tuple[Point, Score]]  # the points of a line that have a score


def score_figure(
    evidence: Evidence,
    estimates: Estimates,
    lines: Iterable[ScoreLine],
    x: Axis,
    id: str,
    title: str,
    caption: str,
    *,
    views: tuple[View, ...] = (),
    verticals: tuple[Vertical, ...] = (),
) -> Figure | None:
    """A figure with a panel for each family where some line has two points (or draws points only); None: no panel."""
    lines = tuple(lines)
    styles = looks([line.meaning for line in lines])
    panels: list[Panel] = []
    covers: dict[str, None] = {}
    every: dict[
        tuple[str, str, float | None], bool
    ] = {}  # (family, model, rate) → whether its score is known
    lonely: list[str] = []  # families without a panel
    for family, tasks in evidence.families.items():
        series: list[Series] = []
        redrawn: list[Series] = []
        joined = all(line.draws == "points" for line in lines)
        for line, look in zip(lines, styles, strict=True):
            scores = [(point, _score(evidence, estimates, point, family)) for point in line.points]
            every |= {
                (family, score.model, point.lr): score.known for point, score in scores if score.planned
            }
            known = [(point, score) for point, score in scores if score.known]
            joined = joined or len(known) > 1
            if known:
                series += [*_seeds(line, look, known), _series(evidence, line, look, known, tasks)]
                redrawn += _of_other_roles(evidence, line, known, tasks)
                covers |= {score.seeds.covers: None for _, score in known if math.isfinite(score.seeds.low)}
        name = FAMILIES[family].name
        if series and not joined:
            lonely.append(name)
        elif series:
            marks = _paper_marks(evidence.published, lines, family, tasks)
            y = Axis("" if panels else SCORE)
            panels.append(Panel(name.capitalize(), x, y, (*marks, *series, *redrawn), verticals))
    over = listed(list(covers))
    intervals = "Areas" if any(line.band for line in lines) else "Bars"
    notes = [f"{intervals} are 95% intervals over {over}." if over else "One seed: no intervals."]
    notes += ["Each panel has its own scale."] * (len(panels) > 1)
    at_rates = any(point.lr is not None for line in lines for point in line.points)
    if any(series.name == PAPER for panel in panels for series in panel.series):
        marks_are = "single runs of the paper" if at_rates else "the paper's values"
        notes.append(f"Hollow diamonds are {marks_are}.")
    if lonely:
        notes.append(f"Not drawn, with fewer than two points: {listed(lonely)}.")
    missing = sum(not known for known in every.values())
    if missing:
        why = "not computed" if at_rates else "not computed, or not for every learning rate of a seed"
        are = "is" if missing == 1 else "are"
        notes.append(f"{missing} of {counted(len(every), 'point')} {are} missing: {why}.")
    return Figure(id, title, " ".join([caption, *notes]), tuple(panels), views) if panels else None


def _score(evidence: Evidence, estimates: Estimates, point: Point, family: str) -> Score:
    """The score of a point's model on a family, at the point's learning rate if it has one."""
    score, tasks = estimates.families[point.model.name, family], evidence.families[family]
    if point.lr is None:
        return score
    lrs = evidence.grids[point.model.results[0], tasks[0]].lrs
    every = np.mean([evidence.by_rate(point.model, task) for task in tasks], axis=0)  # (P, rates, F)
    by_seed = every[:, [lr == point.lr for lr in lrs]].reshape(len(every), -1)
    return replace(score, seeds=of_scores(across(by_seed), evidence.least_score(tasks)), by_seed=by_seed)


def _of_other_roles(
    evidence: Evidence, line: ScoreLine, known: Known, tasks: tuple[str, ...]
) -> list[Series]:
    """Redraw points whose role differs from their line's, such as a base or a single objective, in their own style."""
    roles = grouped(known if line.draws == "both" else [], lambda point: role_of(point[0].model.recipe))
    return [
        _series(evidence, replace(line, name=NAMES[role], draws="points"), style_of(role), some, tasks)
        for role, some in roles.items()
        if role != line.meaning.role
    ]


def _series(evidence: Evidence, line: ScoreLine, look: Style, known: Known, tasks: tuple[str, ...]) -> Series:
    views = tuple(zip(*(point.x for point, _ in known), strict=True))
    low, mean, high = _percents(score.seeds for _, score in known)
    joins = line.draws == "line"  # it only joins points of other series, which have the intervals
    tail = {"dash": "dot", "width": 0.6} if line.tail else {}
    return Series(
        line.name,
        replace(look, hollow=line.hollow, **tail),
        x=views[0],
        y=mean,
        draws=line.draws,
        low=() if joins else low,
        high=() if joins else high,
        band=line.band,
        hover=tuple(_hover(evidence, point, score, tasks) for point, score in known),
        views=views,
        legend=line.legend,
    )


def _percents(estimates: Iterable[Estimate]) -> tuple[Numbers, Numbers, Numbers]:
    """The lower ends, the means and the upper ends of estimates, in percent."""
    ends = [(100 * seeds.low, 100 * seeds.mean, 100 * seeds.high) for seeds in estimates]
    low, mean, high = zip(*ends, strict=True)
    return low, mean, high


def _seeds(line: ScoreLine, look: Style, known: Known) -> list[Series]:
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


def _paper_marks(
    published: Published, lines: Iterable[ScoreLine], family: str, tasks: tuple[str, ...]
) -> list[Series]:
    """The paper's values of the drawn recipes; at learning rates its single runs, if the family has one task here."""
    found: dict[tuple[Numbers, float], str] = {}
    for point in (point for line in lines for point in line.points):
        recipe = point.model.recipe
        if point.lr is None:
            value = published.family_mean(recipe, family)
            if value is not None:
                found[point.x, value] = f"{fixed(value)}%\n{recipe.words()}"
        elif len(tasks) == 1:
            for lr, value in published.at_rates(recipe, tasks[0]).items():
                found[(lr,), value] = f"{fixed(value)}%, one run\n{recipe.words()}\nlearning rate {rate(lr)}"
    return paper_series((x, y, text) for (x, y), text in found.items())


def paper_series(values: Iterable[tuple[Numbers, float, str]], draws: Draws = "points") -> list[Series]:
    """A series of published values, given as x in each view, y and hover text; empty if there are none."""
    known = list(values)
    if not known:
        return []
    places, y, texts = zip(*known, strict=True)
    views = tuple(zip(*places, strict=True))
    hover = tuple(f"the paper: {text}" for text in texts)
    return [Series(PAPER, PAPER_LOOK, views[0], y, draws=draws, hover=hover, views=views)]


def _hover(evidence: Evidence, point: Point, score: Score, tasks: tuple[str, ...]) -> str:
    """The hover text of a point; of the learning rates, how often validation chose each: "5e-5 ×9, 1e-4 ×6"."""
    model = point.model
    seeds = counted(score.seeds.n, "seed")
    covers = f", interval over {score.seeds.covers}" if math.isfinite(score.seeds.low) else ""
    lines = [model.name, model.recipe.words(), with_half(score.seeds), f"{seeds}{covers}"]
    if point.lr is not None:
        return "\n".join([*lines, f"learning rate {rate(point.lr)}"])
    grids = [evidence.grids[result, task] for result in model.results for task in tasks]
    chosen = Counter(grid.lrs[row] for grid in grids for row in grid.chosen.values())
    if chosen:
        lines.append(f"learning rates {', '.join(f'{rate(lr)} ×{chosen[lr]}' for lr in sorted(chosen))}")
    if score.done < score.of:
        lines.append(f"{score.of - score.done:,} of {counted(score.of, 'fine-tuning')} missing")
    return "\n".join(lines)


def with_half(seeds: Estimate) -> str:
    """A mean and its interval, given as shares of one: "84.89 ± 0.18%"."""
    mean, low, high = 100 * seeds.mean, 100 * seeds.low, 100 * seeds.high
    return f"{fixed(mean)} {beside(mean, low, high, -100.0)}".rstrip() + "%"


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
    sized = [(suffix, model) for suffix, model in models if model.recipe.parameters]
    lines = []
    for name, some in grouped(sized, lambda one: f"{objective_name(one[1].recipe)}{one[0]}").items():
        suffix, first = some[0]
        points = tuple(Point((float(model.recipe.parameters or 0),), model) for _, model in some)
        lines.append(ScoreLine(name, Meaning(role_of(first.recipe), (suffix, name)), points))
    ticks = tuple(float(recipe.parameters or 0) for recipe in sizes)
    labels = tuple(recipe.size for recipe in sizes)
    room = (max(ticks) / min(ticks)) ** 0.12
    x = Axis("model size", "log", ticks, labels, (min(ticks) / room, max(ticks) * room))
    steps = {model.recipe.steps for _, model in models}
    budget = f"after {steps.pop():,} steps" if len(steps) == 1 else "each size at its longest common budget"
    caption = f"Mean over the tasks of each family, by model size, {budget}."
    title = "Masked or causal, by model size"
    return score_figure(evidence, estimates, lines, x, "objectives", title, caption)


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
    steps = {model.recipe.steps for _, model in models if model.recipe.spans}
    title = "Causal, masked, or both in sequence" if steps else "Models side by side"
    after = f", after {steps.pop():,} steps" if len(steps) == 1 else ""
    caption = f"Mean over the tasks of each family{after}; small circles are seeds."
    return score_figure(evidence, estimates, lines, x, "objectives", title, caption)


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
    caption = "MLM alone at several masking ratios."
    return score_figure(
        evidence, estimates, lines, ratio_axis(lines), "ratio", "Which masking ratio?", caption
    )


def _alike_groups(models: Iterable[Model]) -> list[tuple[str, str, list[Model]]]:
    """The models by setting and size: suffix for the legend, size, models."""
    return [
        (suffix, size, of_size)
        for suffix, of_setting in by_setting(models).items()
        for size, of_size in by_size(of_setting).items()
    ]


def over_ratios(models: list[Model]) -> dict[int, tuple[Point, ...]]:
    """Budget → models by ratio, for budgets with at least two ratios."""
    rows: dict[int, tuple[Point, ...]] = {}
    for steps, some in sorted(grouped(models, lambda model: model.recipe.steps).items()):
        at = {model.recipe.ratio: model for model in some if model.recipe.ratio is not None}
        if len(at) > 1:
            rows[steps] = tuple(Point((100 * ratio,), at[ratio]) for ratio in sorted(at))
    return rows


def ratio_axis(lines: list[ScoreLine]) -> Axis:
    ticks = tuple(sorted({point.x[0] for line in lines for point in line.points}))
    return Axis("masking ratio", "linear", ticks, tuple(percent(tick / 100) for tick in ticks))


# ---------------------------------------------------------------- learning rates of fine-tuning
# The mean over seeds at each rate, without selection.


def rates_figure(evidence: Evidence, estimates: Estimates) -> Figure | None:
    """One model of each objective over the learning rates of fine-tuning."""
    finetune = evidence.plan.study.finetune
    if finetune is None or len(finetune.lrs) < 2 or finetune.discard:  # the rates that remain were selected
        return None
    models, size = _rate_models(evidence)
    ticks = tuple(sorted(finetune.lrs))
    lines = [
        ScoreLine(
            name,
            Meaning(role_of(model.recipe), (suffix, name)),
            tuple(Point((lr,), model, lr) for lr in ticks),
            band=True,
        )
        for name, suffix, model in models
    ]
    x = Axis("learning rate", "log", ticks, tuple(map(rate, ticks)))
    caption = f"Fine-tuning at each learning rate, {size}; no rate is chosen here."
    title = "How delicate is the learning rate?"
    return score_figure(evidence, estimates, lines, x, "rates", title, caption)


def _rate_models(evidence: Evidence) -> tuple[list[tuple[str, str, Model]], str]:
    """Legend name, setting and model of one model of each objective at the middle size, and that size.

    If nothing was pretrained, all scored models.
    """
    done = {result for (result, _), grid in evidence.grids.items() if grid.done}
    scored = [model for model in evidence.models.values() if done & {*model.results}]
    sizes = by_size(ends(scored))
    if not sizes:
        return [(model.name, "", model) for model in scored if not model.recipe.spans], "models as they are"
    size = list(sizes)[len(sizes) // 2]
    chosen = [
        (f"{objective_name(model.recipe)}{suffix}", suffix, model)
        for suffix, group in by_setting(sizes[size]).items()
        for model in standing_for(group)
    ]
    return chosen, size


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
    masked = f"MLM at {percent(ratios.pop())}" if len(ratios) == 1 else "MLM"
    caption = f"From {masked} alone (0%) to CLM alone (100%), CLM always first."
    return score_figure(evidence, estimates, lines, x, "splits", "How much should be causal?", caption)


def _split_rows(models: list[Model]) -> dict[tuple[float, int], tuple[Point, ...]]:
    """(masking ratio, budget) → models by their share of CLM steps, where some model has both objectives.

    A budget is drawn at the ratio with the most splits; of equals, at the one nearest to the usual.
    """
    rows: dict[tuple[float, int], tuple[Point, ...]] = {}
    for steps, some in grouped(models, lambda model: model.recipe.steps).items():
        both = [model for model in some if model.recipe.kind == "clm-mlm" and model.recipe.ratio is not None]
        splits = grouped(both, lambda model: model.recipe.ratio or 0.0)
        if not splits:
            continue
        shares = {ratio: {model.recipe.causal_share for model in splits[ratio]} for ratio in splits}
        ratio = min(splits, key=lambda one: (-len(shares[one]), round(abs(one - USUAL_RATIO), 9), one))
        alone = [
            model
            for model in some
            if model.recipe.kind == "clm" or (model.recipe.kind == "mlm" and model.recipe.ratio == ratio)
        ]
        row = {model.recipe.causal_share: model for model in (*splits[ratio], *alone)}
        if len(row) > 1:
            rows[ratio, steps] = tuple(Point((100 * share,), row[share]) for share in sorted(row))
    return dict(sorted(rows.items()))


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
    caption = "How much the masking ratio matters with and without CLM first."
    title = "Is the ratio less delicate after CLM?"
    return score_figure(evidence, estimates, lines, ratio_axis(lines), "robustness", title, caption)


def _after_clm(models: list[Model]) -> dict[tuple[int, int], tuple[Point, ...]]:
    """(CLM steps, all steps) → two-stage models by ratio."""
    both = [model for model in models if model.recipe.kind == "clm-mlm"]
    groups = grouped(both, lambda model: round(model.recipe.causal_share * model.recipe.steps))
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
    lines = []
    for name, (base, some) in zip(_continued_names(rows), rows, strict=True):
        starts = [Point((0.0,), model) for model in models if alike(model.recipe) == alike(base)]
        points = (*starts, *(Point((float(model.recipe.continued),), model) for model in some))
        lines.append(ScoreLine(name, meaning(some[0].recipe, (base.steps, name)), points))
    ticks = tuple(sorted({0.0} | {point.x[0] for line in lines for point in line.points}))
    labels = ("base", *(thousands(int(tick)) for tick in ticks[1:]))
    x = Axis("continued steps", "linear", ticks, labels)
    what = {_went_on_with(model) for _, some in rows for model in some}
    masked = f"with {what.pop()}" if len(what) == 1 else "further"
    caption = f"Decayed models trained {masked}; the first point is the base."
    return score_figure(evidence, estimates, lines, x, "continued", "Continued pretraining", caption)


def _continued_rows(models: list[Model]) -> list[tuple[Recipe, list[Model]]]:
    """The models that continue one base with one objective, in order of steps."""
    rows: dict[tuple[object, ...], tuple[Recipe, list[Model]]] = {}
    for model in sorted(models, key=lambda model: model.recipe.continued):
        recipe = model.recipe
        if recipe.base and recipe.final:
            same = recipe.setting, _went_on_with(model), alike(recipe.base)
            rows.setdefault(same, (recipe.base, []))[1].append(model)
    return sorted(rows.values(), key=lambda row: models.index(row[1][0]))


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
    verticals = _one_epoch(evidence, runs) if views and VIEWS[views[0]] == "tokens" else ()
    caption = (
        "Intermediate checkpoints before the learning-rate decay; hollow marks are the decayed ends of runs. "
        "FLOPs are model FLOPs. Seconds are comparable only between equal machines that ran nothing else."
    )
    if verticals:
        caption += " Dotted vertical line: one epoch of the corpus."
    return score_figure(
        evidence,
        estimates,
        lines,
        shown[0].axis if shown else Axis(),
        "efficiency",
        "What is learnt by when",
        caption,
        views=shown if len(shown) > 1 else (),
        verticals=verticals,
    )


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
    costs = [run for run in evidence.runs if run.name in model.results]
    took = [one.seconds for one in costs if one.seconds is not None]
    flops = costs[0].flops
    return (
        float(costs[0].tokens),
        math.nan if flops is None else flops,
        math.nan if len(took) < len(costs) else sum(took) / len(took),
    )


def _view(name: str, values: list[float]) -> View:
    ticks = on_log(values)
    labels = (f"{tick:.0e}".replace("e+", "e") if name == "FLOPs" else short(tick) for tick in ticks)
    return View(name, Axis(f"training {name}", "log", ticks, tuple(labels)))


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
