"""Write the report of a study into a folder. The same store content gives the same bytes.

    report.html                 the page, self-contained
    report.md                   the report as text
    scores.csv families.csv noise.csv crossings.csv claims.csv runs.csv trials.csv
    tables/*.tex                LaTeX tables
    figures/*.svg *.pdf         figures for print

Each file is written under a temporary name and then moved into place, so a reader sees either the old or the new one.

`collect` computes the content once; `render`, `markdown` and `latex` fill the templates in page/ with it.

`serve` (`report --watch`) serves the page of a running study on localhost, and rebuilds it when the store changes. The
page reloads itself (page.js).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from markupsafe import Markup

from biphase.errors import BiphaseError, SpecError, one_line
from biphase.papers import papers_of
from biphase.report import tables
from biphase.report.contrasts import Paper
from biphase.report.estimates import Estimates, edges, estimate
from biphase.report.evidence import Evidence, Resamples, gather
from biphase.report.figures.crossings import Gap, crossings_figure, gaps
from biphase.report.figures.description import PALETTES, PAPER, Figure
from biphase.report.figures.scores import FIGURES
from biphase.report.figures.training import losses_figure
from biphase.report.figures.vega import draw, screen_height, script, specification
from biphase.report.headline import Headline, headline
from biphase.report.pretraining import JobCost, RunSummary
from biphase.report.provenance import Missing, Provenance, missing, provenance
from biphase.report.statistics.components import SOURCES_OF_NOISE
from biphase.report.statistics.intervals import Estimate
from biphase.report.tables import Board, Cell
from biphase.report.verdicts import ClaimPart, Finding, judge
from biphase.specs.tasks import FAMILIES, family_name
from biphase.store import Store
from biphase.study import ledger
from biphase.study.plan import Plan
from biphase.text import (
    MISSING,
    counted,
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

PAGE = "report.html"
# Ids of all figures. Files with these names in the figures folder belong to the report and may be removed.
KNOWN = (
    "objectives", "ratio", "efficiency", "rates", "splits", "robustness", "continued", "crossings", "losses",
    "repetition",
    "tree", "costs",  # of earlier versions
)  # fmt: skip


# ---------------------------------------------------------------- the content


@dataclass(frozen=True)
class Content:
    """Everything that a report shows."""

    evidence: Evidence
    papers: tuple[Paper, ...]
    estimates: Estimates
    findings: tuple[Finding, ...]
    figures: tuple[Figure, ...]
    runs: tuple[RunSummary, ...]
    headline: Headline
    missing: Missing
    provenance: Provenance
    boards: tuple[tables.Board, ...]
    edges: str  # a warning where the ends of the learning-rate grid won
    tables: tuple[tables.Table, ...]

    @property
    def name(self) -> str:
        return self.evidence.plan.study.name

    @property
    def question(self) -> str:
        return self.evidence.plan.question or f"What does the study {self.name} show?"


def collect(plan: Plan, store: Store, *, live: bool = False) -> Content:
    """Read the scores of a plan from a store and compute the report's content."""
    papers = papers_of(plan.study)
    evidence = gather(plan, store, papers[0].published if papers else None)
    draws = Resamples(evidence)
    estimates = estimate(evidence, draws)
    findings = tuple(judge(evidence, papers, draws))
    overtaking = gaps(evidence, estimates)
    return Content(
        evidence=evidence,
        papers=papers,
        estimates=estimates,
        findings=findings,
        figures=figures(evidence, estimates, overtaking, live=live),
        runs=tuple(evidence.runs),
        headline=headline(evidence, findings),
        missing=missing(evidence),
        provenance=provenance(evidence),
        boards=tables.boards(evidence, estimates),
        edges=edges(evidence),
        tables=(
            tables.scores(evidence, estimates),
            tables.families(evidence, estimates),
            tables.noise(evidence, estimates),
            tables.crossings(overtaking),
            tables.claims(findings),
            tables.runs(evidence.runs),
            tables.trial_table(evidence),
        ),
    )


def figures(
    evidence: Evidence, estimates: Estimates, overtaking: list[Gap], *, live: bool = False
) -> tuple[Figure, ...]:
    """Every figure that the study has data for, in the order of the page; `live` includes losses being written now."""
    described = [figure(evidence, estimates) for figure in FIGURES] if evidence.count[0] else []
    described += [crossings_figure(evidence, overtaking), losses_figure(evidence, live=live)]
    return tuple(figure for figure in described if figure is not None)


# ---------------------------------------------------------------- the files


@dataclass(frozen=True)
class Built:
    """The files that were written, and their content."""

    folder: Path
    files: tuple[Path, ...]
    seconds: float
    content: Content = field(repr=False)

    @property
    def page(self) -> Path:
        return self.folder / PAGE

    def words(self) -> str:
        """The text that `biphase report` prints: the answer, the verdicts, what is missing, where the page is."""
        top = self.content.headline
        counts = verdict_counts(top)
        lines = [f"{self.content.name}: {self.content.question}", "", top.answer]
        lines += [f"  against {one.rival}: {one.told}" for one in top.against]
        lines += [f"claims: {counts}"] if counts else []
        own = [one for one in self.content.findings if one.source == "study"]
        lines += [f"  {one.id} {one.verdict}: {one.says}. {one.why}" for one in own]
        lines += [self.content.missing.words()] if self.content.missing.any else []
        number = counted(len(self.files), "file")
        return "\n".join([*lines, "", f"{number} in {duration(self.seconds)}; the page: {self.page}"])

    def to_json(self) -> dict[str, Any]:
        """The summary for JSON."""
        done, of = self.content.evidence.count
        return {
            "study": self.content.name,
            "question": self.content.question,
            "answer": self.content.headline.answer,
            "against": {one.rival: one.told for one in self.content.headline.against},
            "verdicts": self.content.headline.verdicts,
            "claims": {one.id: one.verdict for one in self.content.findings},
            "scores": {"done": done, "of": of},
            "seconds": round(self.seconds, 2),
            "files": [str(path) for path in self.files],
        }


def build(plan: Plan, store: Store, folder: Path, *, live: bool = False, static: bool = True) -> Built:
    """Write the report of a plan into a folder.

    `live` includes the losses that workers are writing now; `static` also writes the figures for print.
    """
    began = time.monotonic()
    content = collect(plan, store, live=live)
    html = render(content, live=live)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = [_write(folder / PAGE, html.encode()), *_beside(content, folder, static=static)]
    except OSError as wrong:
        raise SpecError(
            f"{wrong.filename or folder}: {wrong.strerror or wrong}; free room there, or choose another --out"
        ) from None
    return Built(folder, tuple(made), time.monotonic() - began, content)


def _beside(content: Content, folder: Path, *, static: bool) -> Iterable[Path]:
    """Write everything but the page. Figures of an earlier report that no longer exist are removed."""
    yield _write(folder / "report.md", markdown(content, drawn=static).encode())
    for table in content.tables:
        yield _write(folder / f"{table.name}.csv", table.csv().encode())
    for name, text in latex(content).items():
        yield _write(folder / "tables" / name, text.encode())
    if static:
        place = folder / "figures"
        drawings = {name: drawn for figure in content.figures for name, drawn in draw(figure).items()}
        for name, drawn in drawings.items():
            yield _write(place / name, drawn)
        for old in place.glob("*"):
            if (
                old.name not in drawings
                and old.suffix in (".svg", ".pdf")
                and old.stem.split("-")[0] in KNOWN
            ):
                old.unlink()


def _write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)  # exists only if writing failed
    return path


# ---------------------------------------------------------------- the texts
# The templates in page/ read the records of the content and format them with the functions that `_environment` gives
# them. The rest computes what a template cannot say in a line: forest plots, cells of runs and boards, noise.


# The verdict that a report shows → its class in the style sheet, its symbol in Markdown.
VERDICTS = {
    "reproduced": ("reproduced", "✓"),
    "holds in part": ("partly", "◐"),
    "not reproduced": ("against", "✗"),
    "no effect found": ("unclear", "="),
    "underpowered": ("underpowered", "~"),
    "not applicable": ("inapplicable", "–"),
    "not tested": ("untested", "·"),
}
# What a part of a claim supports → its name on the page, its class in the style sheet.
SUPPORTS = {
    "yes": ("yes", "reproduced"),
    "unclear": ("no effect found", "unclear"),
    "against": ("against it", "against"),
    "underpowered": ("underpowered", "underpowered"),
    "missing": ("missing", "untested"),
}


def render(content: Content, *, live: bool = False) -> str:
    """The page of a report; one that is `live` may ask its own server whether it was written again, and nothing else."""
    environment = _environment()
    figures = _json({figure.id: specification(figure) for figure in content.figures})
    scripts = [f"const PALETTES = {_json(PALETTES)};", _asset("page.js"), _asset("figures.js")]
    return environment.get_template("template.html.j2").render(
        content=content,
        live=live,
        top=content.headline,
        about=content.provenance,
        missing=content.missing,
        marked=any(entry.name == PAPER for figure in content.figures for entry in figure.entries),
        noise=_noise(content),
        figures=Markup(figures),
        style=Markup(_asset("style.css")),
        theme_script=Markup(_asset("theme.js")),
        vega=Markup(inside_script(script())),
        scripts=[Markup(inside_script(code)) for code in scripts],
    )


def markdown(content: Content, *, drawn: bool = True) -> str:
    """The whole report as Markdown. `drawn`: link the figure files, which were written beside it."""
    template = _environment().overlay(autoescape=False).get_template("report.md.j2")
    return template.render(
        content=content,
        drawn=drawn,
        top=content.headline,
        about=content.provenance,
        missing=content.missing,
    )


def latex(content: Content) -> dict[str, str]:
    """The LaTeX tables, by the names of their files."""
    environment = _environment().overlay(autoescape=False)
    board, claims = (environment.get_template(f"{name}.tex.j2") for name in ("board", "claims"))
    boards = [one for one in content.boards if one.lines and one.columns]
    files = {f"{one.name}.tex": board.render(board=one) for one in boards}
    return files | ({"claims.tex": claims.render(findings=content.findings)} if content.findings else {})


def verdict_counts(top: Headline) -> str:
    """How many claims have each verdict; empty if there are none."""
    return ", ".join(f"{count} {verdict}" for verdict, count in top.verdicts.items() if count)


def _markdown_text(text: str) -> str:
    """Escape text of users for Markdown, so that no character in it acts as markup or ends a table cell."""
    flat = " ".join(text.split())
    return re.sub(r"([\\`*_<>|\[\]#])", r"\\\1", flat).replace("&", "&amp;")


SIGNS = {  # as LaTeX, so that no character of a text acts as a command
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "[": "{[}", "]": "{]}", "<": r"\textless{}", ">": r"\textgreater{}",
    "→": r"$\rightarrow$", "−": "$-$", "±": r"$\pm$", "×": r"$\times$", "·": r"$\cdot$", "≥": r"$\geq$", "≤": r"$\leq$",
    "≈": r"$\approx$", "—": "---", "–": "--", "’": "'", "“": "``", "”": "''", "…": r"\dots{}",
}  # fmt: skip


def escape(text: str) -> str:
    """Escape text for LaTeX."""
    return "".join(SIGNS.get(sign, sign) for sign in " ".join(text.split()))


def _latex_points(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "---"
    text = f"{value:+.2f}"
    return f"${text}$" if float(text) else "$0.00$"


@cache
def _environment() -> Any:
    """The templates, and what they call."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment: Any = Environment(
        loader=PackageLoader("biphase.report.page", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.tests["finite"] = math.isfinite
    environment.filters |= {"md": _markdown_text, "tex": escape, "points": _latex_points}
    called = (
        board_ranks, cell_shade, cell_title, claim_numbers, counted, effect, family_name, forest, interval, job_cells,
        no_interval, p_equals, p_value, percent, plain, published, run_cells, run_facts, screen_height, signed,
        verdict_counts,
    )  # fmt: skip
    environment.globals |= {function.__name__: function for function in called}
    environment.globals |= {
        "FAMILIES": FAMILIES,
        "MISSING": MISSING,
        "SOURCES_OF_NOISE": SOURCES_OF_NOISE,
        "SUPPORTS": SUPPORTS,
        "VERDICTS": VERDICTS,
    }
    return environment


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


HEIGHT = 24
EDGE = 10  # room for half a diamond and the arrows
LONGEST = 2.5  # intervals extend the scale by at most this many times the range of the points


@dataclass(frozen=True)
class Mark:
    """What one row of a forest plot shows, in points. A part of a claim has these fields too."""

    estimate: Estimate
    examples: tuple[float, float] | None = None
    paper: float | None = None
    margin: float = 0.0


def forest(rows: Iterable[Estimate | ClaimPart], width: int = 210) -> tuple[list[Markup], Markup]:
    """The drawings of some rows on one scale, and the axis below them."""
    marks = [Mark(row) if isinstance(row, Estimate) else row for row in rows]
    scale = AxisScale(marks, width)
    return [drawing(mark, scale) for mark in marks], _axis(scale)


class AxisScale:
    """Maps percentage points to pixels, the same for all rows of a table."""

    def __init__(self, marks: Iterable[Mark | ClaimPart], width: int) -> None:
        self.width = width
        marks = list(marks)
        points = [
            0.0,
            *_finite(*(x for mark in marks for x in (mark.estimate.mean, mark.paper, mark.margin))),
        ]
        low, high = min(points), max(points)
        reach = LONGEST * ((high - low) or 1.0)
        ends = _finite(*(end for mark in marks for end in (mark.estimate.low, mark.estimate.high)))
        self.low = min([low, *(max(end, low - reach) for end in ends)])
        self.high = max([high, *(min(end, high + reach) for end in ends)])
        if self.low == self.high:
            self.low, self.high = self.low - 1, self.high + 1

    def at(self, value: float) -> float:
        """The pixel of a value; of one beyond the scale, the end of the scale."""
        inside = min(max(value, self.low), self.high)
        share = (inside - self.low) / (self.high - self.low)
        return round(EDGE + share * (self.width - 2 * EDGE), 1)

    def ticks(self) -> list[float]:
        """Round tick values, 0 among them."""
        rough = (self.high - self.low) / 4
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
        return [step * n for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def _finite(*values: float | None) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def drawing(mark: Mark | ClaimPart, scale: AxisScale) -> Markup:
    """The drawing of one row, as SVG."""
    seeds, middle = mark.estimate, HEIGHT / 2
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
    if math.isfinite(seeds.low) and math.isfinite(
        seeds.high
    ):  # an end that is cut has an arrow, another a cap
        left, right = scale.at(seeds.low), scale.at(seeds.high)
        path = f"M{left} {middle}H{right}"
        path += f"M{left + 4} {middle - 4}l-4 4 4 4" if seeds.low < scale.low else f"M{left} {middle - 4}v8"
        path += (
            f"M{right - 4} {middle - 4}l4 4-4 4" if seeds.high > scale.high else f"M{right} {middle - 4}v8"
        )
        shapes.append(f'<path class="seeds" d="{path}"/>')
    if math.isfinite(seeds.mean):
        shapes.append(f'<circle class="mean" cx="{scale.at(seeds.mean)}" cy="{middle}" r="3.5"/>')
    label = f"{signed(seeds.mean)} {interval(seeds.low, seeds.high, sign=True)}"
    label += "" if mark.paper is None else f", paper {signed(mark.paper)}"
    return Markup(
        '<svg class="forest" viewBox="0 0 {w} {h}" role="img" aria-label="{label}">{body}</svg>'
    ).format(w=scale.width, h=HEIGHT, label=label, body=Markup("".join(shapes)))


def _axis(scale: AxisScale) -> Markup:
    """The axis labels below the rows, as SVG."""
    ticks = scale.ticks()
    smallest = min((abs(tick) for tick in ticks if tick), default=1.0)
    digits = max(0, -math.floor(math.log10(smallest) + 1e-9))
    body = "".join(f'<text x="{scale.at(tick)}" y="12">{signed(tick, digits)}</text>' for tick in ticks)
    return Markup('<svg class="forest axis" viewBox="0 0 {w} 20" aria-hidden="true">{body}</svg>').format(
        w=scale.width, body=Markup(body)
    )


# ---------------------------------------------------------------- claims


FEW = 3  # parts whose numbers stand side by side in the row of a claim


def claim_numbers(parts: tuple[ClaimPart, ...]) -> list[str]:
    """One line for each of a few parts; for many, the range of the means and of the intervals."""
    known = [part.estimate for part in parts if math.isfinite(part.estimate.mean)]
    digits = 2 if len(known) < FEW else 1
    if len(known) <= FEW:
        ends = [interval(seeds.low, seeds.high, digits, sign=True) for seeds in known]
        return [f"{signed(s.mean, digits)} {end}".rstrip() for s, end in zip(known, ends, strict=True)]
    ends = _finite(*(end for seeds in known for end in (seeds.low, seeds.high)))
    spans = [interval(min(ends), max(ends), digits, sign=True)] if ends else []
    return [_range([seeds.mean for seeds in known]), *spans]


def published(finding: Finding) -> tuple[str, str]:
    """The published numbers of a claim's parts, and as text those of a tested claim whose recipes have none."""
    known = _finite(*(part.paper for part in finding.parts))
    digits = 2 if len(known) < FEW else 1
    beside = _range(known) if len(known) > FEW else " · ".join(signed(value, digits) for value in known)
    tested = any(math.isfinite(part.estimate.mean) for part in finding.parts)
    none = finding.paper.startswith(("none", "no numbers"))
    compared = any(part.paper is not None for part in finding.parts)
    return beside, finding.paper if tested and not compared and not none else ""


def _range(values: list[float]) -> str:
    return f"{signed(min(values), 1)} to {signed(max(values), 1)}"


# ---------------------------------------------------------------- runs
# A cell has the number that sorts it, and its text.


def run_cells(run: RunSummary) -> list[tuple[str, str]]:
    """The numbers of a run."""
    return [
        _count(run.recipe.tokens),
        _flops(run.flops),
        _time(run.seconds, run.devices),
        *(_fixed(run.heldout.get(name), 3) for name in ("clm", "mlm40")),
        _fixed(run.epochs, 2),
    ]


def run_facts(run: RunSummary) -> list[tuple[str, str]]:
    """What is known of a run beside its numbers."""
    recipe = run.recipe
    device = f"{run.devices} × {run.device}" if run.device and run.devices > 1 else run.device
    steps = f"{recipe.steps:,} of {recipe.tokens // recipe.steps:,} tokens each" if recipe.steps else ""
    facts = [
        ("Recipe", recipe.words()),
        ("Key", run.key),
        ("Pretraining seed", str(recipe.seed)),
        ("Parameters", f"{recipe.parameters:,}" if recipe.parameters else ""),
        ("Steps", steps),
        ("Device", device),
        ("Held-out loss, nats", ", ".join(f"{name} {loss:.3f}" for name, loss in run.heldout.items())),
        ("Cannot be read", run.wrong),
        ("Energy", f"{run.joules / 3.6e6:,.3f} kWh" if run.joules else ""),
    ]
    return [(name, fact) for name, fact in facts if fact]


def job_cells(cost: JobCost) -> tuple[str, ...]:
    """The cells of a training job."""
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


# ---------------------------------------------------------------- boards


def board_ranks(board: Board) -> list[list[float]]:
    """The distinct means of each column, lowest first."""
    columns = zip(*(line.cells for line in board.lines), strict=True)
    return [sorted({cell.score.seeds.mean for cell in cells if cell.score.known}) for cells in columns]


def cell_shade(cell: Cell, means: list[float]) -> str:
    """A shade by rank in the column: a few poorly trained models would compress a scale of scores."""
    return plain((means.index(cell.score.seeds.mean) / max(1, len(means) - 1)) ** 2, 2)


def cell_title(cell: Cell) -> str:
    """All that is known of a score, or why there is none."""
    score, seeds = cell.score, cell.score.seeds
    if not score.known:
        left = f"{score.done} of {score.of} fine-tunings are done; no seed has all its rates"
        return left if score.of else "not asked for"
    over = interval(100 * seeds.low, 100 * seeds.high)
    notes = [f"{score.metric}, n = {seeds.n}", score.no_interval or f"95% over {seeds.covers}: {over}"]
    notes += [f"{name} {percent(mean)}" for name, mean in score.others.items()]
    notes += [f"{name} baseline: {percent(one.test)} ({one.what})" for name, one in score.baselines.items()]
    if score.examples:
        low, high = score.examples
        notes.append(f"over test examples: {interval(100 * low, 100 * high)}")
    else:
        notes.append(f"no interval over test examples: {score.no_examples}")
    if score.done < score.of:
        notes.append(f"{score.done} of {score.of} fine-tunings done")
    return "; ".join(notes)


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


# ---------------------------------------------------------------- the page of a running study


HOST = "127.0.0.1"
LOOK_SECONDS = 2.0  # between polls of the store
REST = 3.0  # after a rebuild, wait this many times its duration before the next


def serve(
    make_plan: Callable[[], Plan], store: Store, folder: Path, *, port: int, say: Callable[[str], None]
) -> None:
    """Serve the page of a study until ^C. The plan is reloaded for each report.

    An error of a later report is printed once, and the page stays as it was.
    """
    plan = make_plan()
    try:
        server = ThreadingHTTPServer((HOST, port), partial(PageHandler, directory=str(folder)))
    except OSError as wrong:
        raise SpecError(f"port {port}: {one_line(wrong)}; type --port 0 to take any that is free") from None
    with server:
        seen, error, began = fingerprint(plan, store), "", time.monotonic()
        build(plan, store, folder, live=True, static=False)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
        say(f"watching {plan.study.name}: http://{HOST}:{server.server_port}/{PAGE}   (^C to stop)")
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(max(LOOK_SECONDS, REST * (time.monotonic() - began)))
                began = time.monotonic()
                try:
                    if (now := fingerprint(plan, store)) != seen:
                        plan = make_plan()
                        build(plan, store, folder, live=True, static=False)
                        seen, error = now, ""
                except (BiphaseError, OSError) as wrong:
                    if (line := one_line(wrong)) != error:
                        say(f"the page could not be made anew: {line}")
                    error = line
        server.shutdown()
    say(f"stopped watching; the page as it was last is in {folder}")


class PageHandler(SimpleHTTPRequestHandler):
    """Serves the page and no other file, in no frame.

    Another Host is refused, so that no website reads the page by DNS rebinding, and so is the script of another origin.
    """

    def do_GET(self) -> None:
        with contextlib.suppress(ConnectionError):  # the reader closed the page while it was sent
            super().do_GET()

    def send_head(self) -> Any:
        host = self.headers.get("Host", "").partition(":")[0]
        if self.path != f"/{PAGE}" or host not in (HOST, "localhost") or "Origin" in self.headers:
            return self.send_error(404)
        del self.headers["If-Modified-Since"]  # times in HTTP are whole seconds; the page may be newer
        return super().send_head()

    def end_headers(self) -> None:
        self.send_header("X-Frame-Options", "DENY")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


def fingerprint(plan: Plan, store: Store) -> str:
    """A text that changes when the report would: names of results and failures, sizes of live files."""
    study = store.studies / plan.study.name
    folders = [store.checkpoints, store.trials, study / "failures"]
    folders += [store.metadata / "checkpoints", store.metadata / "trials"]
    parts = [_names(folder) for folder in folders]
    for key in plan.jobs:
        with contextlib.suppress(OSError):
            parts.append(f"{key} {ledger.live_file(plan, store, key).stat().st_size}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _names(folder: Path) -> str:
    try:
        return " ".join(sorted(path.name for path in folder.iterdir()))
    except OSError:
        return ""
