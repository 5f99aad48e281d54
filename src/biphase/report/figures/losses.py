"""The figures of losses: training and held-out loss over steps, and their difference over epochs.

Held-out losses use the same rows and masks for all runs, so they are comparable; training losses are comparable only
within one objective and ratio. A curve changes its style where the run changes its objective: each part has the style
of the recipe up to its end. Phases that several runs share are drawn once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

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
    looks,
    meaning,
    objective_name,
    percent,
    role_of,
    role_of_way,
    spaced,
)
from biphase.report.pretraining import LATELY, Curve, Epochs, LossGap, curve, gaps
from biphase.report.recipes import Recipe, named, recipe_at
from biphase.study.costs import REPEATED
from biphase.study.plan import Plan, TrainingJob
from biphase.text import listed, short

BY_NAME = 6  # runs named one by one, if their recipes are equal or they are not complete
ENTRIES = 10  # of the legend: with more, only objectives and sizes are distinguished
BEGINNING = 0.02  # share of the steps where losses are too steep to set the scale
UPRIGHTS = 6  # vertical lines; more would hide the curves
LABELS_APART = 0.05  # share of the steps: nearer labels would overlap


@dataclass(frozen=True)
class Part:
    """A part of a run's curve that no earlier run has, with one sequence of objectives, and its style."""

    curve: Curve
    begins: int
    ends: int
    name: str
    look: Style

    def has(self, step: int) -> bool:
        return self.begins < step <= self.ends


@dataclass(frozen=True)
class _Found:
    """A part before styles are assigned."""

    curve: Curve
    begins: int
    ends: int
    recipe: Recipe  # at the end of the run, or at the end of the part if another objective follows


def losses_figure(evidence: Evidence, *, live: bool = False) -> Figure | None:
    """Training and held-out losses over steps, with every change of objective and every decay marked."""
    drawn = parts(evidence, live=live)
    if not drawn:
        return None
    last = max(part.curve.steps[-1] for part in drawn)
    uprights = _verticals(drawn, last)
    measured = _measured(drawn)
    training = [series for part in drawn for series in _training(part, legend=not measured)]
    panels = [_panel("Training", "loss, nats per token", training, uprights, last)]
    for objective in measured:
        held = [one for part in drawn if (one := _heldout(part, objective))]
        unsaid = tuple(replace(one, label="") for one in uprights)  # labels only in the first panel
        panels.append(_panel(f"Held out, {named(objective)}", "", held, unsaid, last))
    return Figure("losses", "How the losses fell", _caption(drawn), tuple(panels))


def parts(evidence: Evidence, *, live: bool) -> list[Part]:
    """The parts of all curves, each drawn once."""
    plan = evidence.plan
    ended = [run.name for run in plan.study.runs if run.stages]
    found: list[_Found] = []
    drawn: set[str] = set()
    for result in ended:
        path = plan.path(plan.results[result])
        own = [job for job in path if job.key not in drawn]
        made = curve(plan, evidence.store, result, live=live) if own else None
        if own and made and any(step > own[0].span[0] for step in made.steps):
            drawn |= {job.key for job in path}
            found += _parted(plan, made, own)
    meanings = _meanings(found)
    return [
        Part(one.curve, one.begins, one.ends, name, look)
        for one, (name, _), look in zip(found, meanings, looks([of for _, of in meanings]), strict=True)
    ]


def _parted(plan: Plan, made: Curve, own: list[TrainingJob]) -> list[_Found]:
    """Split a run's own training jobs where the sequence of objectives grows."""
    roles = {one.key: role_of_way(before.objective for before in plan.path(one.key)) for one in own}
    groups = [list(some) for _, some in groupby(own, key=lambda one: roles[one.key])]
    return [
        _Found(made, some[0].span[0], some[-1].span[1], recipe_at(plan, some[-1], to_end=some is groups[-1]))
        for some in groups
    ]


def _meanings(found: list[_Found]) -> list[tuple[str, Meaning]]:
    """Name and meaning of each part, as detailed as the legend allows."""
    recipes = [one.recipe for one in found]
    sizes = len({one.size for one in recipes}) > 1
    detailed = [(objective_name(one), (round(one.causal_share, 2), one.ratio or 0.0)) for one in recipes]
    shares = {name: len({share for other, (share, _) in detailed if other == name}) for name, _ in detailed}
    told = [
        (f"{name}, {percent(share)} causal" if shares[name] > 1 else name, (share, ratio))
        for name, (share, ratio) in detailed
    ]
    if len({(name, one.size) for (name, _), one in zip(told, recipes, strict=True)}) > ENTRIES:
        told = [(NAMES[role_of(one)] + (", continued" if one.base else ""), (0.0, 0.0)) for one in recipes]
    made = [
        (f"{name}, {one.size}" if sizes else name, meaning(one, (*variant, 0)))
        for (name, variant), one in zip(told, recipes, strict=True)
    ]
    ends = [(one.curve.result, of) for one, of in zip(found, made, strict=True) if one.recipe.final]
    if len(ends) <= BY_NAME and len({of for _, of in ends}) < len(
        ends
    ):  # the recipes do not distinguish them
        number = {result: n for n, (result, _) in enumerate(ends, start=1)}
        made = [
            (one.curve.result, replace(of, variant=(*of.variant, number[one.curve.result])))
            if one.recipe.final
            else (name, of)
            for one, (name, of) in zip(found, made, strict=True)
        ]
    return made


def _training(part: Part, *, legend: bool) -> list[Series]:
    """One line for each objective in turn, since losses of two objectives are not one curve."""
    made: list[Series] = []
    points = list(zip(part.curve.steps, part.curve.losses, part.curve.objectives, strict=True))
    own = [point for point in points if part.has(point[0])]
    spans = [list(some) for _, some in groupby(own, key=lambda point: point[2])]
    for span in spans:
        before = [point for point in points if point[0] <= part.begins and point[2] == span[0][2]][-1:]
        line = [*before, *span] if span is spans[0] else span
        look = replace(part.look, width=0.6 * part.look.width, dash="solid")
        x, y = tuple(float(one[0]) for one in line), tuple(one[1] for one in line)
        made.append(Series(part.name, look, x, y, draws="line", legend=legend))
    return made


def _heldout(part: Part, objective: str) -> Series | None:
    measured = part.curve.heldout.get(objective, [])
    own = [point for point in measured if part.has(point[0])]
    if not own:
        return None
    line = [*[point for point in measured if point[0] <= part.begins][-1:], *own]
    x, y = tuple(float(step) for step, _ in line), tuple(loss for _, loss in line)
    name = part.curve.result
    hover = tuple(f"{name}\nstep {step:,}\n{objective} loss {loss:.4f}" for step, loss in line)
    return Series(part.name, part.look, x, y, draws="line", hover=hover)


def _measured(parts: list[Part]) -> list[str]:
    """The objectives that every run was measured by; if there are none, up to three of any."""
    every = list(dict.fromkeys(one for part in parts for one in part.curve.heldout))
    shared = [one for one in every if all(one in part.curve.heldout for part in parts if part.curve.heldout)]
    return (shared or every)[:3]


def _panel(title: str, y: str, series: list[Series], uprights: tuple[Vertical, ...], last: int) -> Panel:
    settled = [y for one in series for x, y in zip(one.x, one.y, strict=True) if x >= BEGINNING * last]
    low, high = min(settled, default=0.0), max(settled, default=1.0)
    room = 0.06 * (high - low) or 0.1
    ticks = from_zero(last)
    return Panel(
        title,
        Axis("step", ticks=ticks, labels=spaced(ticks, map(short, ticks), 0.15), range=(0, 1.02 * last)),
        Axis(y, range=(low - room, high + room)),
        tuple(series),
        uprights,
    )


def _curves(parts: list[Part]) -> list[Curve]:
    return list({part.curve.result: part.curve for part in parts}.values())


def _switches(parts: list[Part]) -> dict[int, list[str]]:
    """Step → the changes of the drawn runs there, one entry for each run."""
    at: dict[int, list[str]] = {}
    for one in _curves(parts):
        for switch in one.switches:
            if switch.step <= one.steps[-1]:
                at.setdefault(switch.step, []).append(switch.what)
    return at


def _verticals(parts: list[Part], last: int) -> tuple[Vertical, ...]:
    """The steps at which most runs switch or decay; labelled where there is room."""
    at = _switches(parts)
    commonest = sorted(at, key=lambda step: (-len(at[step]), step))[:UPRIGHTS]
    made: list[Vertical] = []
    said = -last
    for step in sorted(commonest):
        room = step - said >= LABELS_APART * last
        made.append(Vertical(float(step), _said(at[step]) if room else ""))
        said = step if room else said
    return tuple(made)


def _said(whats: list[str]) -> str:
    """A label such as "→ MLM 40%, decay"; without ratios if there are several objectives."""
    asked = sorted({what for what in whats if what != "decay"})
    words = [f"→ {named(what)}" for what in asked]
    if len(asked) > 1:
        words = [f"→ {word}" for word in sorted({named(what).split()[0] for what in asked})]
    return ", ".join([*words, *["decay"] * ("decay" in whats)])


def told(parts: list[Part]) -> list[str]:
    """What shades and widths mean, if they vary."""
    shades = max(len({one.look.shade for one in parts if one.look.role == role}) for role in NAMES)
    said = ["Shades of one colour, soft to deep: the share of CLM, the masking ratio."] * (shades > 1)
    return said + ["Thicker lines: larger models."] * (len({one.look.width for one in parts}) > 1)


def _caption(parts: list[Part]) -> str:
    said = ["Training losses are means of neighbouring steps; each objective has its own scale of loss."]
    said.append("Held-out losses are of the same text and masks for all runs.")
    said.append(
        "Dotted uprights: another objective, or the decay begins. What runs share is drawn once; colours are objectives in order."
    )
    switches = len(_switches(parts))
    if switches > UPRIGHTS:
        said.append(f"Of {switches} such steps the {UPRIGHTS} commonest are marked.")
    said += told(parts)
    going = [one.result for one in _curves(parts) if not one.complete]
    if going:
        said.append(
            f"Not complete: {listed(going)}."
            if len(going) <= BY_NAME
            else f"{len(going)} runs are not complete."
        )
    return " ".join(said)


# ---------------------------------------------------------------- repetition
# Training loss minus held-out loss over epochs of the corpus, a panel for each kind of objective. Both losses are of
# the objective in training at that step, so the gaps of two objectives are comparable although their losses are not.


SETTLED = 0.1  # epochs before which losses fall too fast to set the scale
CAPTION = (
    "Training loss minus held-out loss of the objective that a run trains, over how often it has read its corpus. "
    "Below 0, what the run trains on is easier to it than what it has never seen; where a line falls further with every "
    "epoch, the run learns by heart. Where it starts says little: one text is harder than another. Masks are new in each epoch "
    "while causal targets are the same: repetition favours MLM. The training loss is the mean over the last "
    f"{LATELY} steps before a held-out measurement, or over a tenth of the steps since a stage or a decay began if "
    "these are fewer. Dotted upright: one epoch. What runs share is drawn once."
)

Point = tuple[float, LossGap]  # epochs, and the gap there


def repetition_figure(evidence: Evidence, *, live: bool = False) -> Figure | None:
    """The figure of memorization; None unless some run has read its corpus more than once."""
    plan, epochs = evidence.plan, Epochs(evidence.plan, evidence.store)
    if not any((epochs.at(run.name) or 0.0) > REPEATED for run in plan.study.runs if run.stages):
        return None
    lines: dict[str, list[Series]] = {}
    objectives: dict[str, set[str]] = {}
    drawn = parts(evidence, live=live)
    for part in drawn:
        for line in _lines(evidence, epochs, part, live=live):
            kind = line[0][1].objective.split()[0]
            lines.setdefault(kind, []).append(_series(part, line))
            objectives.setdefault(kind, set()).add(line[0][1].objective)
    every = [one for some in lines.values() for one in some]
    if max((x for one in every for x in one.x), default=0.0) <= REPEATED:
        return None  # planned, but not reached yet
    titles = {kind: named(min(some)) if len(some) == 1 else kind.upper() for kind, some in objectives.items()}
    panels = [
        _repetition_panel(titles[kind], lines[kind], every, first=kind == next(iter(lines))) for kind in lines
    ]
    caption = " ".join([CAPTION, *told(drawn)])
    return Figure("repetition", "What is learnt by heart", caption, tuple(panels))


def _lines(evidence: Evidence, epochs: Epochs, part: Part, *, live: bool) -> list[list[Point]]:
    """The gaps of a part, with the last one before it; split where the objective or corpus changes."""
    points: list[Point] = []
    for gap in gaps(evidence.plan, evidence.store, part.curve.result, live=live):
        at = epochs.at(part.curve.result, gap.step)
        if at is not None:
            points.append((at, gap))
    shared = [point for point in points if point[1].step <= part.begins][-1:]
    points = [*shared, *(point for point in points if part.has(point[1].step))]
    lines: list[list[Point]] = []
    for point in points:
        before = lines[-1][-1] if lines else None
        if before and before[1].begins == point[1].begins and before[0] < point[0]:
            lines[-1].append(point)
        else:
            lines.append([point])
    return [line for line in lines if part.has(line[-1][1].step)]


def _series(part: Part, line: list[Point]) -> Series:
    name = part.curve.result
    hover = tuple(
        f"{name}\nepoch {at:.2f}, step {gap.step:,}\ntraining {gap.training:.4f} − held out {gap.heldout:.4f} "
        f"= {gap.nats:+.4f}"
        for at, gap in line
    )
    x, y = tuple(at for at, _ in line), tuple(gap.nats for _, gap in line)
    look = replace(part.look, size=0.6)
    return Series(part.name, look, x, y, draws="both" if len(line) == 1 else "line", hover=hover)


def _repetition_panel(title: str, series: list[Series], every: list[Series], *, first: bool) -> Panel:
    """One panel. All panels have the same scale, which includes 0."""
    last = max(x for one in every for x in one.x)
    settled = [y for one in every for x, y in zip(one.x, one.y, strict=True) if x >= SETTLED]
    low, high = min((0.0, *settled)), max((0.0, *settled))
    room = 0.06 * (high - low) or 0.01
    ticks = from_zero(last)
    return Panel(
        title,
        Axis(
            "epochs",
            ticks=ticks,
            labels=spaced(ticks, (f"{one:g}" for one in ticks), 0.1),
            range=(0, 1.02 * last),
        ),
        Axis("training − held out, nats" if first else "", range=(low - room, high + room)),
        tuple(series),
        (Vertical(1.0),),
    )
