"""Write the report of a study into a folder. The same store content gives the same bytes.

    report.html                 the page, self-contained
    report.md                   the report as text
    scores.csv families.csv noise.csv claims.csv runs.csv trials.csv
    tables/*.tex                LaTeX tables
    figures/*.svg *.pdf         figures for print

Each file is written under a temporary name and then moved into place, so a reader sees either the old or the new one.
"""

from __future__ import annotations

import math
import re
import shutil
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from biphase.errors import SpecError
from biphase.report.content import Content, collect, reading
from biphase.report.figures import draw
from biphase.report.page.render import render
from biphase.report.provenance import Missing
from biphase.report.tables import Board, Cell
from biphase.report.verdicts import Finding
from biphase.specs.tasks import family_name
from biphase.store import Store
from biphase.study.plan import Plan
from biphase.text import MISSING, counted, duration, effect, interval, p_value, percent, signed

PAGE = "report.html"
FIGURES, TABLES = "figures", "tables"
# Ids of all figures. Files with these names in the figures folder belong to the report and may be removed.
KNOWN = (
    "objectives", "ratio", "efficiency", "rates", "splits", "robustness", "continued", "losses", "repetition",
    "tree", "costs",
)  # fmt: skip


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
        counts = ", ".join(f"{number} {verdict}" for verdict, number in top.verdicts.items() if number)
        lines = [f"{self.content.name}: {self.content.question}", "", top.answer]
        lines += [f"  against {one.rival}: {one.told}" for one in top.against]
        lines += [f"claims: {counts}"] if counts else []
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
    html = render(content).html
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = [_write(folder / PAGE, html), *_beside(content, folder, static=static)]
    except OSError as wrong:
        raise SpecError(
            f"{wrong.filename or folder}: {wrong.strerror or wrong}; free room there, or choose another --out"
        ) from None
    return Built(folder, tuple(made), time.monotonic() - began, content)


def _beside(content: Content, folder: Path, *, static: bool) -> Iterable[Path]:
    """Write everything but the page."""
    yield _write(folder / "report.md", markdown(content, drawn=static))
    for table in content.tables:
        yield _write(folder / f"{table.name}.csv", table.csv())
    for name, text in latex(content).items():
        yield _write(folder / TABLES / name, text)
    if static:
        yield from _drawn(content, folder / FIGURES)


def _drawn(content: Content, place: Path) -> list[Path]:
    """Write the figures for print, and remove those of an earlier report that no longer exist."""
    draft = place.with_name(f"{place.name}.{uuid.uuid4().hex[:8]}.part")
    draft.mkdir(parents=True)
    place.mkdir(exist_ok=True)
    try:
        names = [path.name for figure in content.figures for path in draw(figure, draft)]
        for name in names:
            (draft / name).replace(place / name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    for old in sorted(place.iterdir()):
        if old.name not in names and old.suffix in (".svg", ".pdf") and old.stem.split("-")[0] in KNOWN:
            old.unlink()
    return [place / name for name in names]


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        draft.write_text(text, encoding="utf-8", newline="\n")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)  # exists only if writing failed
    return path


# ---------------------------------------------------------------- LaTeX and Markdown
# LaTeX tables use booktabs, with the best of each column in bold and intervals beside the means. The Markdown file
# holds the whole report: question, answer, claims, scores, figures, provenance, commands.


NEEDS = "% needs \\usepackage{booktabs}"
SIGNS = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "[": "{[}", "]": "{]}", "<": r"\textless{}", ">": r"\textgreater{}",
    "→": r"$\rightarrow$", "−": "$-$", "±": r"$\pm$", "×": r"$\times$", "·": r"$\cdot$", "≥": r"$\geq$", "≤": r"$\leq$",
    "≈": r"$\approx$", "—": "---", "–": "--", "’": "'", "“": "``", "”": "''", "…": r"\dots{}",
}  # fmt: skip


def latex(content: Content) -> dict[str, str]:
    """The LaTeX files as name → text."""
    boards = [board for board in content.boards if board.lines and board.columns]
    files = {f"{board.name}.tex": _latex_board(board) for board in boards}
    return files | ({"claims.tex": _latex_claims(content.findings)} if content.findings else {})


def escape(text: str) -> str:
    """Escape text for LaTeX, so that no character in it acts as a command."""
    return "".join(SIGNS.get(sign, sign) for sign in " ".join(text.split()))


def _tabular(columns: str, head: list[str], rows: list[list[str]]) -> str:
    body = [f"{' & '.join(row)} \\\\" for row in rows]
    lines = [f"\\begin{{tabular}}{{{columns}}}", "\\toprule", f"{' & '.join(head)} \\\\", "\\midrule", *body]
    return "\n".join([NEEDS, *lines, "\\bottomrule", "\\end{tabular}", ""])


def _latex_board(board: Board) -> str:
    """A board as a table, with a rule where the size of the models changes."""
    rows, before = [], None
    for line in board.lines:
        size = line.model.recipe.size
        part = "\\midrule\n" if before not in (None, size) else ""
        rows.append([part + escape(line.model.name), *(_latex_cell(cell) for cell in line.cells)])
        before = size
    for index, (name, cells) in enumerate(board.baselines):
        shown = (f"{100 * baseline.test:.2f}" if baseline else "---" for baseline in cells)
        part = "" if index else "\\midrule\n"
        rows.append([f"{part}{escape(name)} baseline", *shown])
    head = ["Model", *map(escape, board.columns)]
    return _tabular("l" + "r" * len(board.columns), head, rows)


def _latex_cell(cell: Cell) -> str:
    if not cell.score.known:
        return "---"
    mean = f"{100 * cell.score.seeds.mean:.2f}"
    shown = f"\\textbf{{{mean}}}" if cell.best else mean
    beside = ", ".join(filter(None, (cell.around or cell.score.no_interval, cell.score.collapse)))
    return f"{shown} {{\\scriptsize {escape(beside)}}}" if beside else shown


def _latex_claims(findings: tuple[Finding, ...]) -> str:
    rows = []
    for finding in findings:
        verdict = ", ".join(filter(None, (finding.verdict, finding.condition)))
        first = [escape(finding.id), escape(verdict)]
        for part in finding.parts:
            paper = "---" if part.paper is None else _points(part.paper)
            seeds = part.estimate
            around = f"[{_points(seeds.low)}, {_points(seeds.high)}]" if math.isfinite(seeds.low) else "---"
            numbers = [_points(seeds.mean), around, paper, escape(effect(part.detectable))]
            rows.append([*first, escape(part.title), *numbers])
            first = ["", ""]
        if not finding.parts:
            rows.append([escape(finding.id), escape(finding.verdict), *["---"] * 5])
    head = ["Claim", "Verdict", "Test", "Ours", "95\\%", "Paper", "Detectable"]
    return _tabular("lllrrrr", head, rows)


def _points(value: float) -> str:
    if not math.isfinite(value):
        return "---"
    text = f"{value:+.2f}"
    return f"${text}$" if float(text) else "$0.00$"


# ---------------------------------------------------------------- Markdown


LOSSES = 50  # listed one by one; the rest is counted and can be found in trials.csv
SYMBOLS = {
    "reproduced": "✓",
    "holds in part": "◐",
    "not reproduced": "✗",
    "no effect found": "=",
    "underpowered": "~",
    "not applicable": "–",
    "not tested": "·",
}


def markdown(content: Content, *, drawn: bool = True) -> str:
    """The whole report. `drawn`: link the figure files, which were written beside it."""
    parts = [
        _opening(content),
        _missing(content.missing),
        _markdown_claims(content),
        *(_markdown_board(board) for board in content.boards if board.lines and board.columns),
        _text(content.edges),
        _figures(content, drawn=drawn),
        _provenance(content),
        "## How to read this\n\n"
        + "\n\n".join(f"**{word}** {_text(text)}" for word, text in reading(claims=bool(content.findings))),
        _commands(drawn=drawn),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _text(text: str) -> str:
    """Escape text of users, so that no character in it acts as markup or ends a table cell."""
    flat = " ".join(text.split())
    return re.sub(r"([\\`*_<>|\[\]#])", r"\\\1", flat).replace("&", "&amp;")


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _table(head: list[str], rows: list[list[str]], right: int = 1) -> str:
    """A Markdown table; columns from index `right` on are right-aligned."""
    rule = ["---" if column < right else "--:" for column in range(len(head))]
    return "\n".join([_row(head), f"|{'|'.join(rule)}|", *map(_row, rows)])


# ---------------------------------------------------------------- parts


def _opening(content: Content) -> str:
    top = content.headline
    against = "\n".join(f"- against {_text(lead.rival)}: {_text(lead.told)}" for lead in top.against)
    counts = ", ".join(f"{number} {verdict}" for verdict, number in top.verdicts.items() if number)
    lines = [f"# {_text(content.question)}", f"*{_text(content.name)}*: {_text(top.answer)}", against]
    lines += [f"Claims: {counts}." if counts else "", _text(top.scale), _text(top.noise)]
    return "\n\n".join(line for line in lines if line)


def _missing(missing: Missing) -> str:
    if not missing.any:
        return ""
    lines = ["## What is missing", _text(missing.words())]
    if missing.gaps:
        rows = [
            [_text(gap.result), _text(gap.task), f"{gap.missing:,}", f"{gap.of:,}"] for gap in missing.gaps
        ]
        lines.append(_table(["result", "task", "missing", "of"], rows, right=2))
    if missing.untrained:
        lines.append(f"Not pretrained yet: {_text(', '.join(missing.untrained))}.")
    for title, losses in (("Failed", missing.failed), ("Cannot be read", missing.unreadable)):
        if losses:
            listed = [
                f"- {_text(loss.title)} (`{loss.key[:8]}`): {_text(loss.why)}" for loss in losses[:LOSSES]
            ]
            more = len(losses) - LOSSES
            listed += [f"- and {more:,} more: see trials.csv"] if more > 0 else []
            lines.append("\n".join([f"{title}:", "", *listed]))
    return "\n\n".join(lines)


def _markdown_claims(content: Content) -> str:
    if not content.findings:
        return ""
    rows = [
        [
            _text(one.id),
            _text(one.says),
            ", ".join(filter(None, (f"{SYMBOLS[one.verdict]} {one.verdict}", one.condition))),
            _text(one.why),
            _text(one.paper),
            p_value(one.p_holm),
        ]
        for one in content.findings
    ]
    table = _table(["", "claim", "verdict", "why", "in the paper", "p (Holm)"], rows, right=5)
    cited = [
        f"{one.claims} are claims of {one.authors}: [{one.title}]({one.address}) {one.venue}.\n\n"
        for one in content.papers
        if any(finding.source == "paper" for finding in content.findings)
    ]
    return f"## Claims\n\n{''.join(cited)}{table}\n\n{_parts(content.findings)}"


def _parts(findings: tuple[Finding, ...]) -> str:
    """The tests behind the verdicts, in points."""
    rows = [
        [
            _text(one.id),
            _text(part.title),
            signed(part.estimate.mean),
            interval(part.estimate.low, part.estimate.high, sign=True) or MISSING,
            p_value(part.above),
            MISSING if part.paper is None else signed(part.paper),
            effect(part.detectable),
            part.supports,
        ]
        for one in findings
        for part in one.parts
    ]
    if not rows:
        return ""
    head = ["", "test", "points", "95%", "p", "paper", "detectable", "supports"]
    table = _table(head, rows, right=2)
    return f"<details><summary>The tests behind the verdicts</summary>\n\n{table}\n\n</details>"


def _markdown_board(board: Board) -> str:
    rows = [[_text(line.model.name), *(_markdown_cell(cell) for cell in line.cells)] for line in board.lines]
    for name, cells in board.baselines:
        shown = (f"{percent(one.test)} ({_text(one.what)})" if one else MISSING for one in cells)
        rows.append([f"*{_text(name)} baseline*", *shown])
    title = {"families": "Families", "tasks": "Tasks"}[board.name]
    head = ["model", *(_text(family_name(one) if board.name == "families" else one) for one in board.columns)]
    lead = "Test scores in percent, ± 95%; the best mean of each column in bold."
    others = _other_metrics(board) if board.name == "tasks" else ""
    return f"## {title}\n\n{lead}\n\n{_table(head, rows)}{others}"


def _other_metrics(board: Board) -> str:
    """The metrics that did not choose the learning rate, for tasks that have them."""
    rows = [
        [
            _text(line.model.name),
            _text(cell.score.on),
            ", ".join(f"{_text(name)} {percent(mean)}" for name, mean in cell.score.others.items()),
        ]
        for line in board.lines
        for cell in line.cells
        if cell.score.known and cell.score.others
    ]
    if not rows:
        return ""
    table = _table(["model", "task", "other metrics"], rows, right=3)
    return f"\n\n<details><summary>Other metrics</summary>\n\n{table}\n\n</details>"


def _markdown_cell(cell: Cell) -> str:
    score = cell.score
    if not score.known:
        return f"{MISSING} ({score.done}/{score.of})" if score.of else MISSING
    value = f"**{percent(score.seeds.mean)}**" if cell.best else percent(score.seeds.mean)
    around = cell.around or (f"({score.no_interval})" if score.no_interval else "")
    return ", ".join(filter(None, (f"{value} {around}".rstrip(), score.collapse)))


def _figures(content: Content, *, drawn: bool) -> str:
    if not content.figures:
        return ""
    sections = ["## Figures"]
    for figure in content.figures:
        picture = f"![{_text(figure.title)}](figures/{figure.id}.svg)\n\n" if drawn else ""
        sections.append(f"### {_text(figure.title)}\n\n{picture}{_text(figure.caption)}")
    return "\n\n".join(sections)


def _provenance(content: Content) -> str:
    about = content.provenance
    lines = [f"- biphase {_text(about.version)}, study `{about.study}`"]
    lines += [f"- {_text(word)}: {_text(text)}" for word, text in (*about.protocol, *about.spent)]
    if about.energy:
        lines.append(f"- Energy: {about.energy}")
    for machine in about.machines:
        work = ((machine.jobs, "training job"), (machine.trials, "score"))
        did = ", ".join(counted(number, what) for number, what in work if number)
        lines.append(f"- {_text(machine.device)} ({_text(machine.software)}): {did}")
    data = [
        [_text(one.name), one.what, _text(one.source), f"`{one.key or '?'}`", _text(one.note)]
        for one in about.data
    ]
    table = [_table(["data", "", "source", "key", ""], data, right=5)] if data else []
    read = []
    for one in (one for one in about.data if one.about):
        facts = [f"- {word}: {_text(fact)}" for word, fact in one.about]
        read.append("\n".join([f"{_text(one.name)}, as it was read:", "", *facts]))
    return "\n\n".join(["## Provenance", "\n".join(lines), *table, *read])


def _commands(*, drawn: bool) -> str:
    figures = "; `figures/*.svg` and `*.pdf`" if drawn else ""
    return (
        "## Make it again\n\n"
        "```sh\n"
        "biphase run STUDY      # compute what is missing; STUDY is the study file, or its plan.json in the store\n"
        "biphase report STUDY   # write this again\n"
        "```\n\n"
        "The same ledger gives the same bytes. Beside this file: `report.html`, the page; `scores.csv`, `families.csv`, "
        f"`noise.csv`, `claims.csv`, `runs.csv`, `trials.csv`; `tables/*.tex`{figures}."
    )
