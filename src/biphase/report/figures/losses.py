"""How losses fell: while training, and on held-out text, with every switch of objective and every decay marked.

Held-out losses are of the same rows and masks for all runs, so these compare; training losses compare only within one
objective and ratio. A beginning that several runs share is drawn once, with the first of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from biphase.report.evidence import Evidence
from biphase.report.figures.chosen import by_size
from biphase.report.figures.description import Axis, Figure, Look, Panel, Series, Vertical
from biphase.report.figures.palette import NAMES, in_turn, look, looks, role_of
from biphase.report.figures.ticks import from_zero, spaced
from biphase.report.numerals import listed
from biphase.report.pretraining import Curve, curve
from biphase.report.recipes import Model, named
from biphase.wording import short

BY_NAME = 6  # up to so many runs, each has its own name in the legend
BEGINNING = 0.02  # of the steps: too steep to set the scale by
UPRIGHTS = 6  # more of them hide the curves
LABELS_APART = 0.05  # of the steps: nearer ones would lie upon each other


@dataclass(frozen=True)
class Run:
    """A curve, where its own part begins, and how it is drawn."""

    curve: Curve
    begins: int
    name: str
    look: Look
    size: str


def figure(evidence: Evidence, *, live: bool = False) -> Figure | None:
    drawn = runs(evidence, live=live)
    if not drawn:
        return None
    last = max(run.curve.steps[-1] for run in drawn)
    uprights = _verticals(drawn, last)
    measured = _measured(drawn)
    training = [series for run in drawn for series in _training(run, legend=not measured)]
    panels = [_panel("Training", "loss, nats per token", training, uprights, last)]
    for objective in measured:
        held = [one for run in drawn if (one := _heldout(run, objective))]
        unsaid = tuple(replace(one, label="") for one in uprights)  # said once, in the first panel
        panels.append(_panel(f"Held out, {named(objective)}", "", held, unsaid, last))
    return Figure("losses", "How the losses fell", _caption(drawn), tuple(panels))


def runs(evidence: Evidence, *, live: bool) -> list[Run]:
    """Those that have losses of their own, which none before them has."""
    plan = evidence.plan
    ended = [run.name for run in plan.study.runs if run.stages]
    models = {result: one for one in evidence.models.values() for result in one.results}
    found: list[tuple[Curve, int, Model]] = []
    drawn: set[str] = set()
    for result in ended:
        path = plan.path(plan.results[result])
        own = [state for state in path if state.key not in drawn]
        made = curve(plan, evidence.store, result, live=live) if own else None
        if own and made and any(step > own[0].span[0] for step in made.steps):
            drawn |= {state.key for state in path}
            found.append((made, own[0].span[0], models[result]))
    return [
        Run(made, begins, made.result if len(found) <= BY_NAME else NAMES[look.role], look, model.recipe.size)
        for (made, begins, model), look in zip(found, _looks([model for _, _, model in found]), strict=True)
    ]


def _looks(models: list[Model]) -> list[Look]:
    """Few runs are told apart one by one; of many only the objective, by colour, and the size, by shade."""
    roles = [role_of(one.recipe) for one in models]
    if len(models) <= BY_NAME:
        return in_turn(roles)
    sizes = list(by_size(models))
    return [
        replace(look(role), shade=looks(role, len(sizes))[sizes.index(one.recipe.size)].shade)
        for one, role in zip(models, roles, strict=True)
    ]


def _training(run: Run, *, legend: bool) -> list[Series]:
    """A line for each objective in turn: losses of two are not one curve."""
    made: list[Series] = []
    points = list(zip(run.curve.steps, run.curve.losses, run.curve.objectives, strict=True))
    own = [point for point in points if point[0] > run.begins]
    spans: list[list[tuple[int, float, str]]] = []
    for point in own:
        if spans and spans[-1][-1][2] == point[2]:
            spans[-1].append(point)
        else:
            spans.append([point])
    for span in spans:
        before = [point for point in points if point[0] <= run.begins and point[2] == span[0][2]][-1:]
        line = [*before, *span] if span is spans[0] else span
        look = replace(run.look, width=0.6, dash="solid")
        x, y = tuple(float(one[0]) for one in line), tuple(one[1] for one in line)
        made.append(Series(run.name, look, x, y, draws="line", legend=legend))
    return made


def _heldout(run: Run, objective: str) -> Series | None:
    measured = run.curve.heldout.get(objective, [])
    own = [point for point in measured if point[0] > run.begins]
    if not own:
        return None
    line = [*[point for point in measured if point[0] <= run.begins][-1:], *own]
    x, y = tuple(float(step) for step, _ in line), tuple(loss for _, loss in line)
    name = run.curve.result
    hover = tuple(f"{name}\nstep {step:,}\n{objective} loss {loss:.4f}" for step, loss in line)
    return Series(run.name, run.look, x, y, draws="line", hover=hover)


def _measured(runs: list[Run]) -> list[str]:
    """The objectives that every run was measured by; up to three of any, if there is none."""
    every = list(dict.fromkeys(one for run in runs for one in run.curve.heldout))
    shared = [one for one in every if all(one in run.curve.heldout for run in runs if run.curve.heldout)]
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


def _switches(runs: list[Run]) -> dict[int, list[str]]:
    """Step → what the drawn runs do there, each run for itself."""
    at: dict[int, list[str]] = {}
    for run in runs:
        for switch in run.curve.switches:
            if switch.step <= run.curve.steps[-1]:
                at.setdefault(switch.step, []).append(switch.what)
    return at


def _verticals(runs: list[Run], last: int) -> tuple[Vertical, ...]:
    """The steps at which most runs switch or decay; words where there is room for them."""
    at = _switches(runs)
    commonest = sorted(at, key=lambda step: (-len(at[step]), step))[:UPRIGHTS]
    made: list[Vertical] = []
    said = -last
    for step in sorted(commonest):
        room = step - said >= LABELS_APART * last
        made.append(Vertical(float(step), _said(at[step]) if room else ""))
        said = step if room else said
    return tuple(made)


def _said(whats: list[str]) -> str:
    """→ MLM 40%, decay: a ratio where there is but one."""
    asked = sorted({what for what in whats if what != "decay"})
    words = [f"→ {named(what)}" for what in asked]
    if len(asked) > 1:
        words = [f"→ {word}" for word in sorted({named(what).split()[0] for what in asked})]
    return ", ".join([*words, *["decay"] * ("decay" in whats)])


def shades(runs: list[Run]) -> list[str]:
    """What they mean, where they mean anything."""
    sizes = len({run.size for run in runs})
    return ["Shades are sizes, soft to deep."] if len(runs) > BY_NAME and sizes > 1 else []


def _caption(runs: list[Run]) -> str:
    said = ["Training losses are means of neighbouring steps; each objective has its own scale of loss."]
    said.append("Held-out losses are of the same text and masks for all runs.")
    said.append("Dotted uprights: another objective, or the decay begins. What runs share is drawn once.")
    switches = len(_switches(runs))
    if switches > UPRIGHTS:
        said.append(f"Of {switches} such steps the {UPRIGHTS} commonest are marked.")
    said += shades(runs)
    going = [run.curve.result for run in runs if not run.curve.complete]
    if going:
        said.append(
            f"Not complete: {listed(going)}."
            if len(going) <= BY_NAME
            else f"{len(going)} runs are not complete."
        )
    return " ".join(said)
