"""The page: the report's content as one HTML text. Text of users is always escaped.

`render` fills the templates of this folder with the style, the scripts and the data. The second half of the file
computes what the templates show: answer, claims with forest plots, boards, noise, runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import median
from typing import Any

from markupsafe import Markup

from biphase.report.content import Content, reading
from biphase.report.figures import PALETTES, Figure, screen_height, script, specification
from biphase.report.figures.description import PAPER
from biphase.report.headline import Lead
from biphase.report.pretraining import JobCost
from biphase.report.provenance import RunSummary
from biphase.report.statistics.components import SOURCES_OF_NOISE
from biphase.report.statistics.intervals import Estimate
from biphase.report.tables import Board, BoardRow, Cell, Table, widest_interval
from biphase.report.verdicts import ClaimPart, Finding
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

LISTED = 200  # failed or unreadable entries listed one by one
DISTINCT = 4096  # a column with at most this many distinct values is stored as indices into a list of them


@dataclass(frozen=True)
class Page:
    """The page, and the two parts that a watched page fetches again when they change."""

    html: str
    main: str  # between the bar and the footer
    figures: str  # JSON: figure id → its Vega specification


def render(content: Content, *, live: bool = False) -> Page:
    """The page of a report; `live`: it shows the progress of the study and polls for changes."""
    common = {
        "name": content.name,
        "question": content.question,
        "about": content.provenance,
        "live": live,
    }
    main = _template("main.html.j2").render(common | _sections(content, live=live))
    figures = _json({figure.id: specification(figure) for figure in content.figures})
    scripts = [f"const PALETTES = {_json(PALETTES)};", _asset("page.js"), _asset("figures.js")]
    scripts += [_asset("live.js")] * live
    html = _template("template.html.j2").render(
        common,
        main=Markup(main),
        figures=Markup(figures),
        style=Markup(_asset("style.css")),
        theme_script=Markup(_asset("theme.js")),
        vega=Markup(inside_script(script())),
        scripts=[Markup(inside_script(code)) for code in scripts],
    )
    return Page(html, main, figures)


def _sections(content: Content, *, live: bool) -> dict[str, Any]:
    """The values of the main template."""
    training = live and any(cost.standing != "done" for cost in content.evidence.job_costs)
    figures = [_figure(figure) for figure in content.figures]
    first = [figure for figure in figures if training and figure["id"] == "losses"]
    verdicts = content.headline.verdicts
    return {
        "losses": first,
        "top": content.headline,
        "answer": _answer(content),
        "missing": content.missing,
        "most": LISTED,
        "tally": [
            {"verdict": verdict, "css": CSS[verdict], "count": count} for verdict, count in verdicts.items()
        ],
        "tally_text": ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items() if count),
        "findings": content.findings,
        "papers": content.papers,
        "claims": _claims(content),
        "figures": [figure for figure in figures if figure not in first],
        "marked": any(entry.name == PAPER for figure in content.figures for entry in figure.entries),
        "boards": [_board(board) for board in content.boards if board.columns],
        "edges": content.edges,
        "noise": _noise(content),
        "sources_of_noise": SOURCES_OF_NOISE,
        "runs": [_run(run, tuned=bool(content.evidence.tasks)) for run in content.runs],
        "trial_count": len(next(table for table in content.tables if table.name == "trials").rows),
        "reading": reading(claims=bool(content.findings)),
        "tables_json": Markup(_json({table.name: packed(table) for table in content.tables})),
    }


def _figure(figure: Figure) -> dict[str, Any]:
    return {
        "id": figure.id,
        "title": figure.title,
        "caption": figure.caption,
        "views": [view.name for view in figure.views],
        "height": screen_height(figure),
    }


def packed(table: Table) -> dict[str, Any]:
    """A table for the page, by columns; repeated texts are stored once to keep the file small."""
    columns = []
    for number in range(len(table.columns)):
        cells = [row[number] for row in table.rows]
        distinct = list(dict.fromkeys(cells))
        if len(distinct) <= min(DISTINCT, len(cells) // 2):
            index = {text: place for place, text in enumerate(distinct)}
            columns.append({"of": distinct, "at": [index[text] for text in cells]})
        else:
            columns.append({"all": cells})
    return {"columns": list(table.columns), "cells": columns, "rows": len(table.rows)}


@cache
def _template(name: str) -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("biphase.report.page", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(name)


@cache
def _asset(name: str) -> str:
    return files("biphase.report.page").joinpath(name).read_text(encoding="utf-8")


def inside_script(code: str) -> str:
    """Escape code so that it cannot end its script element or open an HTML comment."""
    return code.replace("</script", r"<\/script").replace("<!--", r"<\!--")


def _json(value: Any) -> str:
    """JSON for a script element; no character in it can end the element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace("\u2028", r"\u2028").replace("\u2029", r"\u2029")


# ---------------------------------------------------------------- forest plots
# Each part of a claim is one small drawing, and all parts share one scale. A dot is the estimate with its interval over
# seeds, a pale bar the interval over test examples, a hollow diamond the published number, a dashed line the margin that
# must be exceeded. Intervals so long that they would compress everything else (two seeds give very long ones) are cut,
# with an arrow at the cut end.


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


class AxisScale:
    """Maps percentage points to pixels, the same for all rows of a table."""

    def __init__(self, marks: Iterable[Mark], width: int = WIDTH) -> None:
        self.width = width
        marks = list(marks)
        points = [0.0, *(value for mark in marks for value in _finite(mark.mean, mark.paper, mark.margin))]
        low, high = min(points), max(points)
        reach = LONGEST * ((high - low) or 1.0)
        ends = [end for mark in marks for end in _finite(mark.low, mark.high)]
        self.low = min([low, *(max(end, low - reach) for end in ends)])
        self.high = max([high, *(min(end, high + reach) for end in ends)])
        if self.low == self.high:
            self.low, self.high = self.low - 1, self.high + 1

    def at(self, value: float) -> float:
        """The pixel of a value; of one beyond the scale, the end of the scale."""
        inside = min(max(value, self.low), self.high)
        share = (inside - self.low) / (self.high - self.low)
        return round(EDGE + share * (self.width - 2 * EDGE), 1)

    def inside(self, value: float) -> bool:
        return self.low <= value <= self.high

    def ticks(self) -> list[float]:
        """Round tick values, 0 among them."""
        rough = (self.high - self.low) / 4
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
        return [step * n for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def _finite(*values: float | None) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def drawing(mark: Mark, scale: AxisScale) -> Markup:
    """The drawing of one row, as SVG."""
    middle = HEIGHT / 2
    zero = scale.at(0)
    shapes = [f'<line class="zero" x1="{zero}" x2="{zero}" y1="0" y2="{HEIGHT}"/>']
    if mark.margin and math.isfinite(mark.margin):
        x = scale.at(mark.margin)
        shapes.append(f'<line class="margin" x1="{x}" x2="{x}" y1="0" y2="{HEIGHT}"/>')
    if mark.examples and all(math.isfinite(end) for end in mark.examples):
        low, high = (scale.at(end) for end in mark.examples)
        shapes.append(f'<line class="examples" x1="{low}" x2="{high}" y1="{middle}" y2="{middle}"/>')
    if mark.paper is not None:
        shapes.append(f'<path class="paper" d="M{scale.at(mark.paper)} {middle - 7}l7 7-7 7-7-7z"/>')
    if math.isfinite(mark.low) and math.isfinite(mark.high):
        shapes.append(_whisker(mark.low, mark.high, scale, middle))
    if math.isfinite(mark.mean):
        shapes.append(f'<circle class="mean" cx="{scale.at(mark.mean)}" cy="{middle}" r="3.5"/>')
    label = f"{signed(mark.mean)} {interval(mark.low, mark.high, sign=True)}"
    label += "" if mark.paper is None else f", paper {signed(mark.paper)}"
    return Markup(
        '<svg class="forest" viewBox="0 0 {w} {h}" role="img" aria-label="{label}">{body}</svg>'
    ).format(w=scale.width, h=HEIGHT, label=label, body=Markup("".join(shapes)))


def _whisker(low: float, high: float, scale: AxisScale, middle: float) -> str:
    """The interval as an SVG path; an end that is cut has an arrow, another end a cap."""
    left, right = scale.at(low), scale.at(high)
    path = f"M{left} {middle}H{right}"
    path += f"M{left} {middle - 4}v8" if scale.inside(low) else f"M{left + 4} {middle - 4}l-4 4 4 4"
    path += f"M{right} {middle - 4}v8" if scale.inside(high) else f"M{right - 4} {middle - 4}l4 4-4 4"
    return f'<path class="seeds" d="{path}"/>'


def axis(scale: AxisScale) -> Markup:
    """The axis labels below the rows, as SVG."""
    ticks = scale.ticks()
    smallest = min((abs(tick) for tick in ticks if tick), default=1.0)
    digits = max(0, -math.floor(math.log10(smallest) + 1e-9))
    body = "".join(f'<text x="{scale.at(tick)}" y="12">{signed(tick, digits)}</text>' for tick in ticks)
    return Markup('<svg class="forest axis" viewBox="0 0 {w} 20" aria-hidden="true">{body}</svg>').format(
        w=scale.width, body=Markup(body)
    )


# ---------------------------------------------------------------- runs
# Each run is a row of numbers, with facts and training jobs that open below it.


def _run(run: RunSummary, *, tuned: bool) -> dict[str, Any]:
    cells = [
        _count(run.recipe.tokens),
        _flops(run.flops),
        _time(run.seconds, run.devices),
        *(_fixed(run.heldout.get(name), 3) for name in ("clm", "mlm40")),
        _fixed(run.epochs, 2),
    ]
    done, of = run.trials
    return {
        "name": run.name,
        "recipe": run.recipe.words(),
        "cells": cells + ([(str(done), f"{done:,}/{of:,}")] if tuned else []),
        "standing": run.standing,
        "facts": _facts(run),
        "way": [_cost(cost) for cost in run.way],
    }


def _facts(run: RunSummary) -> list[tuple[str, str]]:
    recipe = run.recipe
    facts = [("Recipe", recipe.words()), ("Key", run.key), ("Pretraining seed", str(run.seed))]
    if recipe.parameters:
        facts.append(("Parameters", f"{recipe.parameters:,}"))
    if recipe.steps:
        facts.append(("Steps", f"{recipe.steps:,} of {recipe.tokens // recipe.steps:,} tokens each"))
    if run.device:
        facts.append(("Device", f"{run.devices} × {run.device}" if run.devices > 1 else run.device))
    if run.heldout:
        losses = [f"{name} {loss:.3f}" for name, loss in run.heldout.items()]
        facts.append(("Held-out loss, nats", ", ".join(losses)))
    if run.wrong:
        facts.append(("Cannot be read", run.wrong))
    if run.joules:
        facts.append(("Energy", f"{run.joules / 3.6e6:,.3f} kWh"))
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
    "holds in part": "partly",
    "not reproduced": "against",
    "no effect found": "unclear",
    "underpowered": "underpowered",
    "not applicable": "inapplicable",
    "not tested": "untested",
}
SUPPORTS = {
    "yes": ("yes", "reproduced"),
    "unclear": ("no effect found", "unclear"),
    "against": ("against it", "against"),
    "underpowered": ("underpowered", "underpowered"),
    "missing": ("missing", "untested"),
}
SOURCES = {"paper": "Claims of the paper", "beyond": "Beyond the paper", "study": "Claims of this study"}
LEAD_WIDTH = 330  # pixels of the drawing beside a lead
MANY = 6  # columns of scores, beyond which intervals stand below their means
FEW = 3  # parts whose numbers stand side by side in the row of a claim


def _answer(content: Content) -> dict[str, Any]:
    """The answer split around the name of the best recipe, and the leads."""
    top = content.headline
    before, subject, after = top.answer.partition(top.subject) if top.subject else (top.answer, "", "")
    leads = [_lead(lead) for lead in top.against]
    return {"before": before, "subject": subject, "after": after, "leads": leads}


def _lead(lead: Lead) -> dict[str, Any]:
    marks = {family: Mark(points.mean, points.low, points.high) for family, points in lead.families}
    scale = AxisScale(marks.values(), width=LEAD_WIDTH)
    average = lead.average
    return {
        "kind": lead.kind or lead.name,
        "name": lead.name if lead.kind else "",
        "note": lead.note,
        "certain": lead.clear,  # not "clear": templates would find the method of dict
        "points": signed(average.mean),
        "interval": interval(average.low, average.high, sign=True) or no_interval(average.n),
        "rows": [(family, drawing(mark, scale), signed(mark.mean)) for family, mark in marks.items()],
        "axis": axis(scale),
    }


# ---------------------------------------------------------------- claims


def _claims(content: Content) -> list[dict[str, Any]]:
    """Claims by source, in order, with the untested ones separate."""
    drawn = {figure.id for figure in content.figures}
    groups = []
    for source, title in SOURCES.items():
        claims = [_claim(finding, drawn) for finding in content.findings if finding.source == source]
        tested = [claim for claim in claims if claim["css"] != "untested"]
        untested = [claim for claim in claims if claim["css"] == "untested"]
        if claims:
            groups.append({"source": source, "title": title, "tested": tested, "untested": untested})
    return groups


def _claim(finding: Finding, drawn: set[str]) -> dict[str, Any]:
    parts = finding.parts
    marks = [
        Mark(
            part.estimate.mean, part.estimate.low, part.estimate.high, part.examples, part.paper, part.margin
        )
        for part in parts
    ]
    scale = AxisScale(marks)
    covers = dict.fromkeys(part.estimate.covers for part in parts if math.isfinite(part.estimate.low))
    return {
        "id": finding.id,
        "says": finding.says,
        "verdict": finding.verdict,
        "css": CSS[finding.verdict],
        "condition": finding.condition,
        "why": finding.why,
        "ours": _with_intervals([part.estimate for part in parts]),
        "paper": _summed([math.nan if part.paper is None else part.paper for part in parts]),
        "parts": [_part(part, drawing(mark, scale)) for part, mark in zip(parts, marks, strict=True)],
        "axis": axis(scale),
        "by_examples": any(part.examples for part in parts),
        "contrast": finding.contrast,
        "paper_words": finding.paper,
        "paper_elsewhere": _elsewhere(finding),
        "p": p_equals(finding.p) if math.isfinite(finding.p) else "",
        "p_holm": p_equals(finding.p_holm),
        "scale": finding.scale,
        "covers": "; ".join(covers),
        "caveats": finding.caveats,
        "figure": finding.figure if finding.figure in drawn else "",
    }


def _elsewhere(finding: Finding) -> str:
    """The published numbers as text, if a tested claim has none for the same recipes."""
    tested = any(math.isfinite(part.estimate.mean) for part in finding.parts)
    beside = any(part.paper is not None for part in finding.parts)
    none = finding.paper.startswith(("none", "no numbers"))
    return finding.paper if tested and not beside and not none else ""


def _summed(values: list[float]) -> str:
    """The numbers of a few parts, or their range; empty if none is known."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ""
    if len(known) <= FEW:
        digits = 2 if len(known) < FEW else 1
        return " · ".join(signed(value, digits) for value in known)
    return f"{signed(min(known), 1)} to {signed(max(known), 1)}"


def _with_intervals(estimates: list[Estimate]) -> list[str]:
    """One line for each of a few parts; for many, the range of the means and of the intervals."""
    known = [estimate for estimate in estimates if math.isfinite(estimate.mean)]
    digits = 2 if len(known) < FEW else 1
    if len(known) <= FEW:
        return [
            f"{signed(estimate.mean, digits)} {interval(estimate.low, estimate.high, digits, sign=True)}".rstrip()
            for estimate in known
        ]
    ends = [end for estimate in known for end in _finite(estimate.low, estimate.high)]
    spans = [interval(min(ends), max(ends), digits, sign=True)] if ends else []
    return [_summed([estimate.mean for estimate in known]), *spans]


def _part(part: ClaimPart, forest: Markup) -> dict[str, Any]:
    seeds = part.estimate
    supports, css = SUPPORTS[part.supports]
    examples = part.examples or (math.nan, math.nan)
    return {
        "title": part.title,
        "models": " vs ".join(part.models) if len(part.models) <= 2 else "",
        "estimate": signed(seeds.mean),
        "interval": interval(seeds.low, seeds.high, sign=True),
        "forest": forest,
        "examples": interval(*examples, sign=True) or MISSING,
        "n": seeds.n or MISSING,
        "p": p_value(part.above),
        "detectable": effect(part.detectable),
        "paper": MISSING if part.paper is None else signed(part.paper),
        "supports": supports,
        "css": css,
        "note": part.note,
    }


# ---------------------------------------------------------------- boards


BOARDS = {
    "families": ("Families", "families"),
    "tasks": ("Tasks", "scores"),
}  # title, and name of the CSV file


def _board(board: Board) -> dict[str, Any]:
    title, file = BOARDS[board.name]
    families = board.name == "families"
    columns = list(zip(*(line.cells for line in board.lines), strict=True))
    ranks = [sorted({cell.score.seeds.mean for cell in cells if cell.score.known}) for cells in columns]
    return {
        "name": board.name,
        "title": title,
        "csv": file,
        "columns": [
            (name, FAMILIES[name].name if families and name in FAMILIES else "") for name in board.columns
        ],
        "many": len(board.columns) > MANY,
        "folded": sum(not line.model.recipe.final for line in board.lines),
        "lines": [_board_line(line, ranks, with_recipe=families) for line in board.lines],
        "baselines": [
            (name, [(percent(one.test), one.what) if one else (MISSING, "") for one in cells])
            for name, cells in board.baselines
        ],
    }


def _board_line(line: BoardRow, ranks: list[list[float]], *, with_recipe: bool) -> dict[str, Any]:
    seeds = len(line.model.results)
    recipe = line.model.recipe.words() + (f" · {seeds} pretraining seeds" if seeds > 1 else "")
    return {
        "name": line.model.name,
        "recipe": recipe if with_recipe else "",
        "way": not line.model.recipe.final,
        "cells": [_board_cell(cell, means) for cell, means in zip(line.cells, ranks, strict=True)],
    }


def _board_cell(cell: Cell, means: list[float]) -> dict[str, Any]:
    """A cell, shaded by its rank in the column: a few poorly trained models would compress a scale of scores."""
    score = cell.score
    if not score.known:
        left = f"{score.done} of {score.of} fine-tunings are done; no seed has all its rates"
        why = left if score.of else "not asked for"
        return {"known": False, "done": score.done, "of": score.of, "title": why}
    seeds = score.seeds
    notes = [f"{score.metric}, n = {seeds.n}"]
    if math.isfinite(seeds.low):
        notes.append(f"95% over {seeds.covers}: {interval(100 * seeds.low, 100 * seeds.high)}")
    else:
        notes.append(score.no_interval)
    notes += [f"{name} {percent(mean)}" for name, mean in score.others.items()]
    notes += [f"{name} baseline: {percent(one.test)} ({one.what})" for name, one in score.baselines.items()]
    if score.examples:
        low, high = score.examples
        notes.append(f"over test examples: {interval(100 * low, 100 * high)}")
    else:
        notes.append(f"no interval over test examples: {score.no_examples}")
    covers, widest = widest_interval(score.noise) if score.noise else ("", None)
    if widest:
        notes.append(f"over {covers}: {interval(100 * widest.low, 100 * widest.high)}")
    if score.done < score.of:
        notes.append(f"{score.done} of {score.of} fine-tunings done")
    return {
        "known": True,
        "best": cell.best,
        "value": plain(100 * seeds.mean, 6),
        "mean": percent(seeds.mean),
        "around": cell.around.replace("± ", "±"),
        "note": ", ".join(filter(None, ("no interval" if score.no_interval else "", score.collapse))),
        "shade": plain((means.index(seeds.mean) / max(1, len(means) - 1)) ** 2, 2),
        "title": "; ".join(notes),
    }


def _noise(content: Content) -> list[tuple[str, list[str]]]:
    """Family → the sd from each source of noise in one score, in points: the median over models."""
    rows = []
    for family in content.evidence.families:
        scores = [content.estimates.families[model, family] for model in content.evidence.models]
        components = [part for score in scores if score.noise for part in score.noise.components]
        cells = []
        for source in SOURCES_OF_NOISE:
            variances = [part.single for part in components if part.source == source]
            deviations = [math.sqrt(variance) for variance in _finite(*variances)]
            cells.append(percent(median(deviations)) if deviations else MISSING)
        if components:
            rows.append((family, cells))
    return rows
