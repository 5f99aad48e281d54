"""What the templates are told: the content of a report in the words and numbers that a page shows."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from biphase.report.claims import CONTRARY, Finding, Part
from biphase.report.content import Content
from biphase.report.headline import Lead, no_interval
from biphase.report.numerals import MISSING, effect, interval, p_equals, p_value, percent, plain, signed
from biphase.report.page.forest import Mark, Scale, axis, drawing, mark
from biphase.report.statistics.intervals import Estimate
from biphase.report.tables import Board, Cell, Line, widest_interval
from biphase.specs.tasks import FAMILIES

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
    """The sentence around its subject, and the leads."""
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
    scale = Scale(marks.values(), width=LEAD_WIDTH)
    average = one.average
    return {
        "kind": one.kind or one.name,
        "name": one.name if one.kind else "",
        "note": one.note,
        "certain": one.clear,  # not "clear": templates would find the method of dict
        "points": signed(average.mean),
        "interval": interval(average.low, average.high, sign=True) or no_interval(average),
        "rows": [(family, drawing(each, scale), signed(each.mean)) for family, each in marks.items()],
        "axis": axis(scale),
    }


# ---------------------------------------------------------------- claims


def claims(content: Content) -> list[dict[str, Any]]:
    """By where they come from, those that were not tested apart; the order inside is kept."""
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
    scale = Scale(mark(part) for part in one.parts)
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
    """The paper's numbers in words, where a tested claim has none for the same recipes."""
    tested = any(math.isfinite(part.estimate.mean) for part in one.parts)
    known = (
        tested
        and all(part.paper is None for part in one.parts)
        and not one.paper.startswith(("none", "no numbers"))
    )
    return one.paper if known else ""


def _summed(values: list[float]) -> str:
    """The numbers of a few parts, or from the least to the most; empty where none is known."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ""
    if len(known) <= FEW:
        digits = 2 if len(known) < FEW else 1
        return " · ".join(signed(value, digits) for value in known)
    return f"{signed(min(known), 1)} to {signed(max(known), 1)}"


def _with_intervals(parts: list[Estimate]) -> list[str]:
    """A line for each of a few parts; of many, from the least to the most, and what their intervals span."""
    known = [one for one in parts if math.isfinite(one.mean)]
    digits = 2 if len(known) < FEW else 1
    if len(known) <= FEW:
        each = [(signed(one.mean, digits), interval(one.low, one.high, digits, sign=True)) for one in known]
        return [" ".join(filter(None, one)) for one in each]
    ends = [end for one in known for end in (one.low, one.high) if math.isfinite(end)]
    spans = [interval(min(ends), max(ends), digits, sign=True)] if ends else []
    return [_summed([one.mean for one in known]), *spans]


def _part(part: Part, scale: Scale) -> dict[str, Any]:
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
            (one, FAMILIES.get(one, "") if board.name == "families" else "") for one in board.columns
        ],
        "many": len(board.columns) > MANY,
        "folded": sum(not line.model.recipe.final for line in board.lines),
        "lines": [_line(line, ranks, with_recipe=board.name == "families") for line in board.lines],
        "baselines": [
            (name, [(percent(one.test), one.what) if one else (MISSING, "") for one in cells])
            for name, cells in board.baselines
        ],
    }


def _line(line: Line, ranks: list[list[float]], *, with_recipe: bool) -> dict[str, Any]:
    seeds = len(line.model.results)
    recipe = line.model.recipe.words() + (f" · {seeds} pretraining seeds" if seeds > 1 else "")
    return {
        "name": line.model.name,
        "recipe": recipe if with_recipe else "",
        "way": not line.model.recipe.final,
        "cells": [_cell(cell, means) for cell, means in zip(line.cells, ranks, strict=True)],
    }


def _cell(cell: Cell, means: list[float]) -> dict[str, Any]:
    """Shaded by its rank in the column: a few models that were hardly trained would wash out a scale of scores."""
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


SOURCES_OF_NOISE = (
    "pretraining seed",
    "fine-tuning seed",
    "pretraining × fine-tuning seed",
    "test example",
    "seeds × test example",
)


def noise(content: Content) -> list[tuple[str, list[str]]]:
    """Family → the standard deviation that each source brings to one score, in points: the median over models."""
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
