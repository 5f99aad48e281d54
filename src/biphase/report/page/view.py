"""The values that the page's templates show: answer, claims with forest plots, runs, boards, noise.

In a forest plot each part of a claim is one small drawing, and all parts share one scale. A dot is the estimate with
its interval over seeds, a pale bar the interval over test examples, a hollow diamond the paper's number, a dashed line
the margin that must be exceeded. Intervals so long that they would compress everything else (two seeds give very long
ones) are cut, with an arrow at the cut end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from markupsafe import Markup

from biphase.report.content import Content
from biphase.report.headline import Lead
from biphase.report.pretraining import JobCost
from biphase.report.provenance import RunSummary
from biphase.report.statistics.components import SOURCES_OF_NOISE
from biphase.report.statistics.intervals import Estimate
from biphase.report.tables import Board, BoardRow, Cell, widest_interval
from biphase.report.verdicts import CONTRARY, ClaimPart, Finding
from biphase.specs.tasks import FAMILIES
from biphase.text import (
    MISSING,
    duration,
    effect,
    fixed,
    interval,
    no_interval,
    p_equals,
    p_value,
    percent,
    plain,
    short,
    signed,
)

WIDTH, HEIGHT = 210, 24
EDGE = 10  # room for half a diamond and the arrows
LONGEST = 2.5  # intervals extend the scale by at most this many times the range of the points


@dataclass(frozen=True)
class Mark:
    """The numbers of one row of a forest plot, in points."""

    mean: float
    low: float = math.nan
    high: float = math.nan
    examples: tuple[float, float] | None = None
    paper: float | None = None
    margin: float = 0.0


def mark(part: ClaimPart) -> Mark:
    seeds = part.estimate
    return Mark(seeds.mean, seeds.low, seeds.high, part.examples, part.paper, part.margin)


class AxisScale:
    """Maps percentage points to pixels, the same for all rows of a table."""

    def __init__(self, marks: Iterable[Mark], width: int = WIDTH) -> None:
        self.width = width
        every = list(marks)
        points = [0.0, *(value for one in every for value in _known(one.mean, one.paper, one.margin))]
        low, high = min(points), max(points)
        reach = LONGEST * ((high - low) or 1.0)
        ends = [end for one in every for end in _known(one.low, one.high)]
        self.low = min([low, *(max(end, low - reach) for end in ends)])
        self.high = max([high, *(min(end, high + reach) for end in ends)])
        if self.low == self.high:
            self.low, self.high = self.low - 1, self.high + 1

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(EDGE + share * (self.width - 2 * EDGE), 1)

    def inside(self, value: float) -> bool:
        return self.low <= value <= self.high

    def clipped(self, value: float) -> float:
        return self.at(min(max(value, self.low), self.high))

    def ticks(self) -> list[float]:
        """Round tick values, 0 among them."""
        step = _round_step((self.high - self.low) / 4)
        first = math.ceil(self.low / step)
        return [step * n for n in range(first, math.floor(self.high / step) + 1)]


def _known(*values: float | None) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _round_step(about: float) -> float:
    power = 10.0 ** math.floor(math.log10(about))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= about * 0.999)


def drawing(one: Mark, scale: AxisScale) -> Markup:
    """The drawing of one row, as SVG."""
    middle = HEIGHT / 2
    marks = [f'<line class="zero" x1="{scale.at(0)}" x2="{scale.at(0)}" y1="0" y2="{HEIGHT}"/>']
    if one.margin and math.isfinite(one.margin):
        at = scale.at(one.margin)
        marks.append(f'<line class="margin" x1="{at}" x2="{at}" y1="0" y2="{HEIGHT}"/>')
    if one.examples and all(math.isfinite(end) for end in one.examples):
        low, high = (scale.clipped(end) for end in one.examples)
        marks.append(f'<line class="examples" x1="{low}" x2="{high}" y1="{middle}" y2="{middle}"/>')
    if one.paper is not None:
        marks.append(f'<path class="paper" d="M{scale.at(one.paper)} {middle - 7}l7 7-7 7-7-7z"/>')
    if math.isfinite(one.low) and math.isfinite(one.high):
        marks.append(_whisker(one.low, one.high, scale, middle))
    if math.isfinite(one.mean):
        marks.append(f'<circle class="mean" cx="{scale.at(one.mean)}" cy="{middle}" r="3.5"/>')
    label = f"{signed(one.mean)} {interval(one.low, one.high, sign=True)}"
    label += "" if one.paper is None else f", paper {signed(one.paper)}"
    body = Markup("").join(Markup(drawn) for drawn in marks)
    return Markup(
        '<svg class="forest" viewBox="0 0 {w} {h}" role="img" aria-label="{label}">{body}</svg>'
    ).format(w=scale.width, h=HEIGHT, label=label, body=body)


def _whisker(low: float, high: float, scale: AxisScale, middle: float) -> str:
    """The interval as an SVG path; an end that is cut has an arrow, another end a cap."""
    left, right = scale.clipped(low), scale.clipped(high)
    path = f"M{left} {middle}H{right}"
    path += f"M{left} {middle - 4}v8" if scale.inside(low) else f"M{left + 4} {middle - 4}l-4 4 4 4"
    path += f"M{right} {middle - 4}v8" if scale.inside(high) else f"M{right - 4} {middle - 4}l4 4-4 4"
    return f'<path class="seeds" d="{path}"/>'


def axis(scale: AxisScale) -> Markup:
    """The axis labels below the rows, as SVG."""
    ticks = scale.ticks()
    smallest = min((abs(tick) for tick in ticks if tick), default=1.0)
    digits = max(0, -math.floor(math.log10(smallest) + 1e-9))
    marks = [
        Markup('<text x="{x}" y="12">{text}</text>').format(x=scale.at(tick), text=signed(tick, digits))
        for tick in ticks
    ]
    body = Markup("").join(marks)
    return Markup('<svg class="forest axis" viewBox="0 0 {w} 20" aria-hidden="true">{body}</svg>').format(
        w=scale.width, body=body
    )


# ---------------------------------------------------------------- runs
# Each run is a row of numbers, with facts and training jobs that open below it.


def runs(content: Content) -> list[dict[str, Any]]:
    tuned = bool(content.evidence.tasks)
    return [_run(one, tuned=tuned) for one in content.runs]


def _run(one: RunSummary, *, tuned: bool) -> dict[str, Any]:
    cells = [
        _count(one.recipe.tokens),
        _flops(one.flops),
        _time(one.seconds, one.devices),
        *(_fixed(one.heldout.get(name), 3) for name in ("clm", "mlm40")),
        _fixed(one.epochs, 2),
    ]
    done, of = one.trials
    return {
        "name": one.name,
        "recipe": one.recipe.words(),
        "cells": cells + ([(str(done), f"{done:,}/{of:,}")] if tuned else []),
        "standing": one.standing,
        "facts": _facts(one),
        "way": [_cost(cost) for cost in one.way],
    }


def _facts(one: RunSummary) -> list[tuple[str, str]]:
    recipe = one.recipe
    facts = [("Recipe", recipe.words()), ("Key", one.key), ("Pretraining seed", str(one.seed))]
    if recipe.parameters:
        facts.append(("Parameters", f"{recipe.parameters:,}"))
    if recipe.steps:
        facts.append(("Steps", f"{recipe.steps:,} of {recipe.tokens // recipe.steps:,} tokens each"))
    if one.device:
        facts.append(("Device", f"{one.devices} × {one.device}" if one.devices > 1 else one.device))
    if one.heldout:
        losses = [f"{name} {loss:.3f}" for name, loss in one.heldout.items()]
        facts.append(("Held-out loss, nats", ", ".join(losses)))
    if one.wrong:
        facts.append(("Cannot be read", one.wrong))
    if one.joules:
        facts.append(("Energy", f"{one.joules / 3.6e6:,.3f} kWh"))
    return facts


def _cost(cost: JobCost) -> tuple[str, ...]:
    return (
        cost.title + (" ↘" if cost.decaying else ""),
        cost.key[:12],
        _count(cost.tokens)[1],
        _flops(cost.flops)[1],
        _time(cost.seconds, cost.devices)[1],
        cost.device,
        cost.standing,
    )


def _count(number: int) -> tuple[str, str]:
    return str(number), short(number) if number else MISSING


def _flops(number: float | None) -> tuple[str, str]:
    return ("", MISSING) if not number else (f"{number:.6g}", f"{number:.2e}".replace("e+", "e"))


def _time(seconds: float | None, devices: int) -> tuple[str, str]:
    return ("", MISSING) if seconds is None else (plain(seconds * devices, 1), duration(seconds * devices))


def _fixed(value: float | None, digits: int) -> tuple[str, str]:
    return ("", MISSING) if value is None else (plain(value, 6), fixed(value, digits))


# ---------------------------------------------------------------- answer


CSS = {
    "reproduced": "reproduced",
    "direction only": "direction",
    "not reproduced": "against",
    CONTRARY: "contrary",
    "underpowered": "underpowered",
    "not tested": "untested",
}
SUPPORTS = {
    "yes": ("yes", "reproduced"),
    "direction": ("direction only", "direction"),
    "against": ("against it", "against"),
    "underpowered": ("underpowered", "underpowered"),
    "missing": ("missing", "untested"),
}
NOT_CLEAR = "not clear after correction"
SOURCES = {"paper": "Claims of the paper", "beyond": "Beyond the paper", "study": "Claims of this study"}
LEAD_WIDTH = 330  # pixels of the drawing beside a lead
MANY = 6  # columns of scores, beyond which intervals stand below their means
FEW = 3  # parts whose numbers stand side by side in the row of a claim


def tally(content: Content) -> list[dict[str, Any]]:
    counts = content.headline.verdicts
    return [{"verdict": verdict, "css": CSS[verdict], "count": counts[verdict]} for verdict in counts]


def answer(content: Content) -> dict[str, Any]:
    """The answer split around the name of the best recipe, and the leads."""
    top = content.headline
    before, subject, after = top.answer.partition(top.subject) if top.subject else (top.answer, "", "")
    return {
        "before": before,
        "subject": subject,
        "after": after,
        "leads": [_lead(one) for one in top.against],
    }


def _lead(one: Lead) -> dict[str, Any]:
    marks = {family: Mark(lead.mean, lead.low, lead.high) for family, lead in one.families}
    scale = AxisScale(marks.values(), width=LEAD_WIDTH)
    average = one.average
    return {
        "kind": one.kind or one.name,
        "name": one.name if one.kind else "",
        "note": one.note,
        "certain": one.clear,  # not "clear": templates would find the method of dict
        "points": signed(average.mean),
        "interval": interval(average.low, average.high, sign=True) or no_interval(average.n),
        "rows": [(family, drawing(each, scale), signed(each.mean)) for family, each in marks.items()],
        "axis": axis(scale),
    }


# ---------------------------------------------------------------- claims


def claims(content: Content) -> list[dict[str, Any]]:
    """Claims by source, in order, with the untested ones separate."""
    drawn = {figure.id for figure in content.figures}
    found = []
    for source, title in SOURCES.items():
        some = [_claim(one, drawn) for one in content.findings if one.source == source]
        untested = [one for one in some if one["css"] == "untested"]
        group = {"source": source, "title": title, "untested": untested}
        if some:
            found.append(group | {"tested": [one for one in some if one not in untested]})
    return found


def _claim(one: Finding, drawn: set[str]) -> dict[str, Any]:
    scale = AxisScale(mark(part) for part in one.parts)
    covers = dict.fromkeys(part.estimate.covers for part in one.parts if math.isfinite(part.estimate.low))
    return {
        "id": one.id,
        "says": one.says,
        "verdict": one.reads,
        "css": CSS[one.reads],
        "condition": ", ".join(filter(None, (NOT_CLEAR if one.reads == CONTRARY else "", one.condition))),
        "why": one.why,
        "ours": _with_intervals([part.estimate for part in one.parts]),
        "paper": _summed([math.nan if part.paper is None else part.paper for part in one.parts]),
        "parts": [_part(part, scale) for part in one.parts],
        "axis": axis(scale),
        "by_examples": any(part.examples for part in one.parts),
        "contrast": one.contrast,
        "paper_words": one.paper,
        "paper_elsewhere": _elsewhere(one),
        "p": p_equals(one.p) if math.isfinite(one.p) else "",
        "p_holm": p_equals(one.p_holm),
        "scale": one.scale,
        "covers": "; ".join(covers),
        "caveats": one.caveats,
        "figure": one.figure if one.figure in drawn else "",
    }


def _elsewhere(one: Finding) -> str:
    """The paper's numbers as text, if a tested claim has none for the same recipes."""
    tested = any(math.isfinite(part.estimate.mean) for part in one.parts)
    known = (
        tested
        and all(part.paper is None for part in one.parts)
        and not one.paper.startswith(("none", "no numbers"))
    )
    return one.paper if known else ""


def _summed(values: list[float]) -> str:
    """The numbers of a few parts, or their range; empty if none is known."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ""
    if len(known) <= FEW:
        digits = 2 if len(known) < FEW else 1
        return " · ".join(signed(value, digits) for value in known)
    return f"{signed(min(known), 1)} to {signed(max(known), 1)}"


def _with_intervals(parts: list[Estimate]) -> list[str]:
    """One line for each of a few parts; for many, the range of the means and of the intervals."""
    known = [one for one in parts if math.isfinite(one.mean)]
    digits = 2 if len(known) < FEW else 1
    if len(known) <= FEW:
        each = [(signed(one.mean, digits), interval(one.low, one.high, digits, sign=True)) for one in known]
        return [" ".join(filter(None, one)) for one in each]
    ends = [end for one in known for end in (one.low, one.high) if math.isfinite(end)]
    spans = [interval(min(ends), max(ends), digits, sign=True)] if ends else []
    return [_summed([one.mean for one in known]), *spans]


def _part(part: ClaimPart, scale: AxisScale) -> dict[str, Any]:
    seeds = part.estimate
    word, css = (CONTRARY, "contrary") if part.contrary else SUPPORTS[part.supports]
    examples = part.examples or (math.nan, math.nan)
    return {
        "title": part.title,
        "models": " vs ".join(part.models) if len(part.models) <= 2 else "",
        "estimate": signed(seeds.mean),
        "interval": interval(seeds.low, seeds.high, sign=True),
        "forest": drawing(mark(part), scale),
        "examples": interval(*examples, sign=True) or MISSING,
        "n": seeds.n or MISSING,
        "p": p_value(seeds.p),
        "detectable": effect(part.detectable),
        "paper": MISSING if part.paper is None else signed(part.paper),
        "supports": word,
        "css": css,
        "note": part.note,
    }


# ---------------------------------------------------------------- boards


TITLES = {"families": "Families", "tasks": "Tasks"}
FILES = {"families": "families", "tasks": "scores"}


def boards(content: Content) -> list[dict[str, Any]]:
    return [_board(one) for one in content.boards if one.columns]


def _board(board: Board) -> dict[str, Any]:
    ranks = []
    for place in range(len(board.columns)):
        scores = (line.cells[place].score for line in board.lines)
        ranks.append(sorted({score.seeds.mean for score in scores if score.known}))
    return {
        "name": board.name,
        "title": TITLES[board.name],
        "csv": FILES[board.name],
        "columns": [
            (one, FAMILIES[one].name if board.name == "families" and one in FAMILIES else "")
            for one in board.columns
        ],
        "many": len(board.columns) > MANY,
        "folded": sum(not line.model.recipe.final for line in board.lines),
        "lines": [_line(line, ranks, with_recipe=board.name == "families") for line in board.lines],
        "baselines": [
            (name, [(percent(one.test), one.what) if one else (MISSING, "") for one in cells])
            for name, cells in board.baselines
        ],
    }


def _line(line: BoardRow, ranks: list[list[float]], *, with_recipe: bool) -> dict[str, Any]:
    seeds = len(line.model.results)
    recipe = line.model.recipe.words() + (f" · {seeds} pretraining seeds" if seeds > 1 else "")
    return {
        "name": line.model.name,
        "recipe": recipe if with_recipe else "",
        "way": not line.model.recipe.final,
        "cells": [_cell(cell, means) for cell, means in zip(line.cells, ranks, strict=True)],
    }


def _cell(cell: Cell, means: list[float]) -> dict[str, Any]:
    """A cell, shaded by its rank in the column: a few poorly trained models would compress a scale of scores."""
    score = cell.score
    if not score.known:
        left = f"{score.done} of {score.of} fine-tunings are done; no seed has all its rates"
        why = left if score.of else "not asked for"
        return {"known": False, "done": score.done, "of": score.of, "title": why}
    seeds = score.seeds
    words = [f"{score.metric}, n = {seeds.n}"]
    if math.isfinite(seeds.low):
        words.append(f"95% over {seeds.covers}: {interval(100 * seeds.low, 100 * seeds.high)}")
    else:
        words.append(score.no_interval)
    words += [f"{name} {percent(mean)}" for name, mean in score.others.items()]
    words += [f"{name} baseline: {percent(one.test)} ({one.what})" for name, one in score.baselines.items()]
    if score.examples:
        low, high = score.examples
        words.append(f"over test examples: {interval(100 * low, 100 * high)}")
    else:
        words.append(f"no interval over test examples: {score.no_examples}")
    covers, widest = widest_interval(score.noise) if score.noise else ("", None)
    if widest:
        words.append(f"over {covers}: {interval(100 * widest.low, 100 * widest.high)}")
    if score.done < score.of:
        words.append(f"{score.done} of {score.of} fine-tunings done")
    return {
        "known": True,
        "best": cell.best,
        "value": plain(100 * seeds.mean, 6),
        "mean": percent(seeds.mean),
        "around": cell.around.replace("± ", "±"),
        "note": ", ".join(filter(None, ("no interval" if score.no_interval else "", score.collapse))),
        "shade": plain((means.index(seeds.mean) / max(1, len(means) - 1)) ** 2, 2),
        "title": "; ".join(words),
    }


def noise(content: Content) -> list[tuple[str, list[str]]]:
    """Family → the sd from each source of noise in one score, in points: the median over models."""
    rows = []
    for family in content.evidence.families:
        found = [content.estimates.families[model, family].noise for model in content.evidence.models]
        known = [one for one in found if one is not None]
        cells = []
        for source in SOURCES_OF_NOISE:
            singles = [part.single for one in known for part in one.components if part.source == source]
            told = [math.sqrt(single) for single in singles if math.isfinite(single)]
            cells.append(percent(median(told)) if told else MISSING)
        if known:
            rows.append((family, cells))
    return rows
