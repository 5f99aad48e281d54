"""Learnt by heart? Training loss minus held-out loss over epochs of the corpus, a panel for each kind of objective.

Both losses are of the objective that a run trains at that step, so the gaps of two objectives compare although their
losses do not. What several runs share is drawn once, with the first of them, as in the figure of losses.
"""

from __future__ import annotations

from dataclasses import replace

from biphase.report.evidence import Evidence
from biphase.report.figures import losses
from biphase.report.figures.description import Axis, Figure, Panel, Series, Vertical
from biphase.report.figures.ticks import from_zero, spaced
from biphase.report.recipes import named
from biphase.report.repetition import LATELY, Epochs, Gap, gaps
from biphase.study.corpora import REPEATED

SETTLED = 0.1  # epochs: before, losses fall too fast to set the scale by
CAPTION = (
    "Training loss minus held-out loss of the objective that a run trains, over how often it has read its corpus. "
    "Below 0, what the run trains on is easier to it than what it has never seen; where a line falls further with every "
    "epoch, the run learns by heart. Where it starts says little: one text is harder than another. Masks are new in each epoch "
    "while causal targets are the same: repetition favours MLM. The training loss is the mean over the last "
    f"{LATELY} steps before a held-out measurement, or over a tenth of the steps since a stage or a decay began if "
    "these are fewer. Dotted upright: one epoch. What runs share is drawn once."
)

Point = tuple[float, Gap]  # epochs, and the gap there


def figure(evidence: Evidence, *, live: bool = False) -> Figure | None:
    """Only where some run read its corpus more than once."""
    plan, epochs = evidence.plan, Epochs(evidence.plan, evidence.store)
    if not any((epochs.at(run.name) or 0.0) > REPEATED for run in plan.study.runs if run.stages):
        return None
    lines: dict[str, list[Series]] = {}
    objectives: dict[str, set[str]] = {}
    drawn = losses.parts(evidence, live=live)
    for part in drawn:
        for line in _lines(evidence, epochs, part, live=live):
            kind = line[0][1].objective.split()[0]
            lines.setdefault(kind, []).append(_series(part, line))
            objectives.setdefault(kind, set()).add(line[0][1].objective)
    every = [one for some in lines.values() for one in some]
    if max((x for one in every for x in one.x), default=0.0) <= REPEATED:
        return None  # planned, and not come so far
    titles = {kind: named(min(some)) if len(some) == 1 else kind.upper() for kind, some in objectives.items()}
    panels = [_panel(titles[kind], lines[kind], every, first=kind == next(iter(lines))) for kind in lines]
    caption = " ".join([CAPTION, *losses.told(drawn)])
    return Figure("repetition", "What is learnt by heart", caption, tuple(panels))


def _lines(evidence: Evidence, epochs: Epochs, part: losses.Part, *, live: bool) -> list[list[Point]]:
    """The gaps of a part of a run, with the last one before; parted where the objective or corpus changes."""
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


def _series(part: losses.Part, line: list[Point]) -> Series:
    name = part.curve.result
    hover = tuple(
        f"{name}\nepoch {at:.2f}, step {gap.step:,}\ntraining {gap.training:.4f} − held out {gap.heldout:.4f} "
        f"= {gap.nats:+.4f}"
        for at, gap in line
    )
    x, y = tuple(at for at, _ in line), tuple(gap.nats for _, gap in line)
    look = replace(part.look, size=0.6)
    return Series(part.name, look, x, y, draws="both" if len(line) == 1 else "line", hover=hover)


def _panel(title: str, series: list[Series], every: list[Series], *, first: bool) -> Panel:
    """All panels have one scale, with 0 on it."""
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
