"""Panels of scores: one for each family of tasks, with intervals over seeds and the paper's values beside them.

A point is a model. A model without a complete seed on every task of a family has no point there: it is counted, and
the caption says how many there are. Scores are in percent here and in every figure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from biphase.report.estimates import Estimates, Score
from biphase.report.evidence import Evidence
from biphase.report.figures.description import PAPER, Axis, Draws, Look, Numbers, Panel, Series
from biphase.report.figures.palette import NAMES, PAPER_LOOK, Meaning, look, looks, role_of
from biphase.report.numerals import fixed, listed, rate
from biphase.report.paper import family_mean
from biphase.report.recipes import Model
from biphase.specs.tasks import FAMILIES
from biphase.wording import beside, counted

SCORE = "test score, %"
SEEDS_BESIDE = 0.16  # along an axis of places


@dataclass(frozen=True)
class Point:
    """A model, and where it stands along x: a number for each view of the figure."""

    x: Numbers
    model: Model


@dataclass(frozen=True)
class Line:
    """Models that one series joins, in order of x."""

    name: str
    meaning: Meaning
    points: tuple[Point, ...]
    draws: Draws = "both"
    legend: bool = True
    seeds: bool = False  # each seed as a small circle beside its mean
    hollow: bool = False
    tail: bool = False  # thin and dotted: it only leads to a point


@dataclass(frozen=True)
class Drawn:
    """Panels of scores, and how many of their points are not there."""

    panels: tuple[Panel, ...]
    points: int
    missing: int
    covers: tuple[str, ...]  # what the intervals cover; empty: there is none
    paper: bool
    lonely: tuple[str, ...]  # families without a panel: no line joins two points there

    def notes(self) -> str:
        """What a reader must know of intervals, scales, marks and gaps."""
        said = [
            f"Bars are 95% intervals over {listed(list(self.covers))}."
            if self.covers
            else "One seed: no intervals."
        ]
        if len(self.panels) > 1:
            said.append("Each panel has its own scale.")
        if self.paper:
            said.append("Hollow diamonds are the paper's values.")
        if self.lonely:
            said.append(f"Left out, with no two points to join: {listed(list(self.lonely))}.")
        if self.missing:
            said.append(
                f"{self.missing} of {counted(self.points, 'point')} {'is' if self.missing == 1 else 'are'} missing: "
                "not computed, or not for every learning rate of a seed."
            )
        return " ".join(said)


def score_panels(
    evidence: Evidence, estimates: Estimates, lines: Iterable[Line], x: Axis, *, views: int = 1
) -> Drawn:
    """A panel for each family in which anything is known."""
    lines = tuple(lines)
    styles = [
        _style(line, look) for line, look in zip(lines, looks([one.meaning for one in lines]), strict=True)
    ]
    panels: list[Panel] = []
    covers: dict[str, None] = {}
    every: dict[tuple[str, str], bool] = {}  # family and model → is it known?
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
            lonely.append(FAMILIES[family])
        elif made:
            made += others
            marks = _paper_marks(lines, family, views)
            paper = paper or bool(marks)
            y = Axis("" if panels else SCORE)
            panels.append(Panel(FAMILIES[family].capitalize(), x, y, (*marks, *made)))
    return Drawn(
        tuple(panels),
        len(every),
        sum(not known for known in every.values()),
        tuple(covers),
        paper,
        tuple(lonely),
    )


def _style(line: Line, look: Look) -> Look:
    return replace(look, hollow=line.hollow, **({"dash": "dot", "width": 0.6} if line.tail else {}))


def _of_other_roles(
    evidence: Evidence, line: Line, known: list[tuple[Point, Score]], tasks: tuple[str, ...], views: int
) -> list[Series]:
    """Points on a line whose models have another hue than it, in their own: where a base or a pure objective stands."""
    found: dict[str, list[tuple[Point, Score]]] = {}
    for point, score in known if line.draws == "both" else ():
        role = role_of(point.model.recipe)
        if role != line.meaning.role:
            found.setdefault(role, []).append((point, score))
    return [
        _series(evidence, replace(line, name=NAMES[role], draws="points"), look(role), some, tasks, views)
        for role, some in found.items()
    ]


def _series(
    evidence: Evidence,
    line: Line,
    look: Look,
    known: list[tuple[Point, Score]],
    tasks: tuple[str, ...],
    views: int,
) -> Series:
    across = tuple(tuple(point.x[view] for point, _ in known) for view in range(views))
    bars = known if line.draws != "line" else []  # a line that only joins points others draw has none
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


def _seeds(line: Line, look: Look, known: list[tuple[Point, Score]]) -> list[Series]:
    """What the means are of: every seed, a little beside them."""
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


def _paper_marks(lines: Iterable[Line], family: str, views: int) -> list[Series]:
    """The paper's values of the very models that are drawn."""
    found: dict[Numbers, tuple[float, str]] = {}
    for line in lines:
        for point in line.points:
            value = family_mean(point.model.recipe, family)
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
    """What a point tells when it is asked."""
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
    """84.89 ± 0.18%, from shares of one."""
    return f"{fixed(100 * mean)} {beside(100 * mean, 100 * low, 100 * high)}".rstrip() + "%"


def rates(evidence: Evidence, model: Model, tasks: tuple[str, ...]) -> str:
    """Which learning rates validation chose, and how often: 5e-5 ×9, 1e-4 ×6."""
    chosen: Counter[float] = Counter()
    for result in model.results:
        for task in tasks:
            grid = evidence.grids[result, task]
            chosen.update(grid.lrs[place] for place in grid.chosen.values())
    return ", ".join(f"{rate(lr)} ×{chosen[lr]}" for lr in sorted(chosen))
