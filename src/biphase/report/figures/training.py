"""The figure of pretraining: losses.

Held-out losses use the same rows and masks for all runs, so they are comparable; training losses are comparable only
within one objective and ratio. A curve changes its style where the run changes its objective: each part has the style
of the recipe up to its end. Phases that several runs share are drawn once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

from biphase.report.evidence import Evidence
from biphase.report.figures.description import (
    NAMES,
    Axis,
    Figure,
    Meaning,
    Panel,
    Series,
    Style,
    Vertical,
    from_zero,
    grouped,
    looks,
    meaning,
    objective_name,
    percent,
    role_of,
    role_of_path,
)
from biphase.report.pretraining import Curve, Epochs, curve
from biphase.report.recipes import Recipe, named, recipe_at
from biphase.specs import Contrastive
from biphase.study.costs import REPEATED
from biphase.study.plan import Plan, TrainingJob
from biphase.text import listed, short

BY_NAME = 6  # runs named one by one, if their recipes are equal or they are not complete
ENTRIES = 10  # of the legend: with more, only objectives and sizes are distinguished
BEGINNING = 0.02  # share of the steps where losses are too steep to set the scale
VERTICALS = 6  # vertical lines; more would hide the curves
LABELS_APART = 0.05  # share of the steps: nearer labels would overlap
EPOCH = "one epoch"
UNSTYLED = Style("other")
StepPoint = TypeVar("StepPoint", bound=tuple[Any, ...])  # a step first


@dataclass(frozen=True)
class CurvePart:
    """A part of a run's curve that no earlier run has, with one sequence of objectives, and its style."""

    curve: Curve
    begins: int
    ends: int
    recipe: Recipe  # at the end of the run, or at the end of the part if another objective follows
    name: str = ""
    look: Style = UNSTYLED

    def line(self, points: Sequence[StepPoint]) -> list[StepPoint]:
        """The points of this part and the last one before it, to join them; empty if the part has no point."""
        own = [point for point in points if self.begins < point[0] <= self.ends]
        return [*[point for point in points if point[0] <= self.begins][-1:], *own] if own else []


def losses_figure(evidence: Evidence, *, live: bool = False) -> Figure | None:
    """Training and held-out losses over steps, with every change of objective and every decay marked."""
    parts = curve_parts(evidence, live=live)
    if not parts:
        return None
    last = max(part.curve.points[-1].step for part in parts)
    verticals = _verticals(parts, last, _one_epoch(evidence, parts, last))
    measured = _measured(parts)
    training = [series for part in parts for series in _training(part, legend=not measured)]
    panels = [_loss_panel("Training", "loss, nats per token", training, verticals, last)]
    unlabelled = tuple(replace(vertical, label="") for vertical in verticals)  # as in the first panel
    for objective in measured:
        heldout = [_heldout(part, objective) for part in parts]
        known = [series for series in heldout if series.x]
        panels.append(_loss_panel(f"Held out, {named(objective)}", "", known, unlabelled, last))
    return Figure("losses", "How the losses fell", _losses_caption(parts), tuple(panels))


def curve_parts(evidence: Evidence, *, live: bool) -> list[CurvePart]:
    """The parts of all curves, each once."""
    plan = evidence.plan
    parts: list[CurvePart] = []
    drawn: set[str] = set()
    for result in (run.name for run in plan.study.runs if run.stages):
        path = plan.path(plan.results[result])
        own = [job for job in path if job.key not in drawn]
        known = curve(plan, evidence.store, result, live=live) if own else None
        if known and any(point.step > own[0].span[0] for point in known.points):
            drawn |= {job.key for job in path}
            parts += _parted(plan, known, own)
    meanings = _meanings(parts)
    styles = looks([of for _, of in meanings])
    return [
        replace(part, name=name, look=look)
        for part, (name, _), look in zip(parts, meanings, styles, strict=True)
    ]


def _parted(plan: Plan, points: Curve, own: list[TrainingJob]) -> list[CurvePart]:
    """Split a run's own training jobs where the sequence of objectives grows."""
    roles = {
        job.key: role_of_path(
            before.run.phase_at(before.first).objective for before in plan.path(job.key) if not before.merge
        )
        for job in own
    }
    groups = [list(jobs) for _, jobs in groupby(own, key=lambda job: roles[job.key])]
    return [
        CurvePart(
            points, jobs[0].span[0], jobs[-1].span[1], recipe_at(plan, jobs[-1], to_end=jobs is groups[-1])
        )
        for jobs in groups
    ]


def _meanings(parts: list[CurvePart]) -> list[tuple[str, Meaning]]:
    """Name and meaning of each part, as detailed as the legend allows."""
    recipes = [part.recipe for part in parts]
    sizes = len({recipe.size for recipe in recipes}) > 1
    shares = grouped(recipes, objective_name)

    def detailed(recipe: Recipe) -> tuple[str, tuple[float, float]]:
        name, share = objective_name(recipe), round(recipe.causal_share, 2)
        several = len({round(other.causal_share, 2) for other in shares[name]}) > 1
        return f"{name}, {percent(share)} causal" if several else name, (share, recipe.ratio or 0.0)

    def coarse(recipe: Recipe) -> tuple[str, tuple[float, float]]:
        return NAMES[role_of(recipe)] + (", continued" if recipe.base else ""), (0.0, 0.0)

    fits = len({(detailed(recipe)[0], recipe.size) for recipe in recipes}) <= ENTRIES
    meanings = []
    for recipe in recipes:
        name, variant = detailed(recipe) if fits else coarse(recipe)
        meanings.append((f"{name}, {recipe.size}" if sizes else name, meaning(recipe, (*variant, 0))))
    ends = [place for place, recipe in enumerate(recipes) if recipe.final]
    if len(ends) <= BY_NAME and len({meanings[place] for place in ends}) < len(ends):
        for number, place in enumerate(ends, start=1):  # the recipes do not distinguish them, their names do
            of = meanings[place][1]
            numbered = replace(of, variant=(*of.variant, number))
            meanings[place] = parts[place].curve.result, numbered
    return meanings


def _training(part: CurvePart, *, legend: bool) -> list[Series]:
    """One line for each objective in turn, since losses of two objectives are not one curve."""
    look = replace(part.look, width=0.6 * part.look.width, dash="solid")
    lines = []
    for _, span in groupby(part.line(part.curve.points), key=lambda point: point.objective):
        steps, losses, _ = zip(*span, strict=True)
        if steps[-1] > part.begins:
            x = tuple(float(step) for step in steps)
            lines.append(Series(part.name, look, x, losses, draws="line", legend=legend))
    return lines


def _heldout(part: CurvePart, objective: str) -> Series:
    points = part.line(part.curve.heldout.get(objective, []))
    return Series(
        part.name,
        part.look,
        x=tuple(float(step) for step, _ in points),
        y=tuple(loss for _, loss in points),
        draws="line",
        hover=tuple(
            f"{part.curve.result}\nstep {step:,}\n{objective} loss {loss:.4f}" for step, loss in points
        ),
    )


def _measured(parts: list[CurvePart]) -> list[str]:
    """The objectives that every run was measured by, and pairs; if there are none, up to three of any."""
    every = list(dict.fromkeys(objective for part in parts for objective in part.curve.heldout))
    shared = [
        objective
        for objective in every
        if all(objective in part.curve.heldout for part in parts if part.curve.heldout)
    ]
    pairs = [name for name in every if name == Contrastive.column and name not in shared]
    return [*(shared or every)[:3], *pairs] if shared else every[:3]


def _loss_panel(
    title: str, y: str, series: list[Series], verticals: tuple[Vertical, ...], last: int
) -> Panel:
    ticks = from_zero(last)
    return Panel(
        title,
        Axis("step", ticks=ticks, labels=tuple(map(short, ticks)), range=(0, 1.02 * last)),
        Axis(y, range=_settled_range(series, BEGINNING * last)),
        tuple(series),
        verticals,
    )


def _settled_range(series: Iterable[Series], since: float, *values: float) -> tuple[float, float]:
    """The range of y from this x on, and of these values, with room around."""
    settled = [*values, *(y for line in series for x, y in zip(line.x, line.y, strict=True) if x >= since)]
    low, high = min(settled, default=0.0), max(settled, default=1.0)
    room = 0.06 * (high - low) or 0.1
    return low - room, high + room


def _curves(parts: list[CurvePart]) -> list[Curve]:
    return list({part.curve.result: part.curve for part in parts}.values())


def _switches(parts: list[CurvePart]) -> dict[int, list[str]]:
    """Step → the changes of the drawn runs there, one entry for each run."""
    changes: dict[int, list[str]] = {}
    for known in _curves(parts):
        for step, what in known.switches:
            if step <= known.points[-1].step:
                changes.setdefault(step, []).append(what)
    return changes


def _one_epoch(evidence: Evidence, parts: list[CurvePart], last: int) -> int | None:
    """The step at which the runs that repeat their corpus have read it once; None if there is no such step."""
    epochs = Epochs(evidence.plan, evidence.store)
    results = [known.result for known in _curves(parts)]
    repeated = [result for result in results if (epochs.at(result) or 0.0) > REPEATED]
    steps = {
        bisect_left(range(last + 1), 1.0, key=lambda step, result=result: epochs.at(result, step) or 0.0)
        for result in repeated
    }
    return min(steps) if len(steps) == 1 and min(steps) <= last else None


def _verticals(parts: list[CurvePart], last: int, one_epoch: int | None) -> tuple[Vertical, ...]:
    """The steps at which most runs switch or decay, and where the corpus was read once; labelled where there is room."""
    changes = _switches(parts)
    if one_epoch is not None:
        changes.setdefault(one_epoch, []).append(EPOCH)
    commonest = sorted(changes, key=lambda step: (-len(changes[step]), step))[:VERTICALS]
    verticals: list[Vertical] = []
    labelled = -last
    for step in sorted(commonest):
        room = step - labelled >= LABELS_APART * last
        verticals.append(Vertical(float(step), _switch_label(changes[step]) if room else ""))
        labelled = step if room else labelled
    return tuple(verticals)


def _switch_label(changes: list[str]) -> str:
    """A label such as "→ MLM 40%, decay"; without ratios if there are several objectives."""
    objectives = sorted({*changes} - {"decay", EPOCH})
    names = [named(objective) for objective in objectives]
    if len(names) > 1:
        names = sorted({name.split()[0] for name in names})
    others = [change for change in ("decay", EPOCH) if change in changes]
    return ", ".join([*(f"→ {name}" for name in names), *others])


def _style_notes(parts: list[CurvePart]) -> list[str]:
    """What shades and widths mean, if they vary."""
    shades = max(len({part.look.shade for part in parts if part.look.role == role}) for role in NAMES)
    notes = ["Shades of one colour, soft to deep: the share of CLM, the masking ratio."] * (shades > 1)
    return notes + ["Thicker lines: larger models."] * (len({part.look.width for part in parts}) > 1)


def _losses_caption(parts: list[CurvePart]) -> str:
    sentences = [
        "Training losses are means of neighbouring steps; each objective has its own scale of loss.",
        "Held-out losses are of the same text and masks for all runs.",
        "Dotted vertical lines: the objective changes, the decay begins, or the corpus was read once. Shared training is drawn once; colours show the sequence of objectives.",
    ]
    switches = len(_switches(parts))
    if switches > VERTICALS:
        sentences.append(f"The {VERTICALS} most common of {switches} such steps are marked.")
    sentences += _style_notes(parts)
    incomplete = [known.result for known in _curves(parts) if not known.complete]
    if len(incomplete) > BY_NAME:
        sentences.append(f"{len(incomplete)} runs are not complete.")
    elif incomplete:
        sentences.append(f"Not complete: {listed(incomplete)}.")
    return " ".join(sentences)
