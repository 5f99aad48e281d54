"""Tables for a paper: LaTeX with booktabs, the best of each column in bold, intervals beside the means."""

from __future__ import annotations

import math

from biphase.report.claims import Finding
from biphase.report.content import Content
from biphase.report.numerals import effect
from biphase.report.tables import Board, Cell

NEEDS = "% needs \\usepackage{booktabs}"
SIGNS = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "[": "{[}", "]": "{]}", "<": r"\textless{}", ">": r"\textgreater{}",
    "→": r"$\rightarrow$", "−": "$-$", "±": r"$\pm$", "×": r"$\times$", "·": r"$\cdot$", "≥": r"$\geq$", "≤": r"$\leq$",
    "≈": r"$\approx$", "—": "---", "–": "--", "’": "'", "“": "``", "”": "''", "…": r"\dots{}",
}  # fmt: skip


def latex(content: Content) -> dict[str, str]:
    """File name → its text."""
    made = {f"{board.name}.tex": _board(board) for board in content.boards if board.lines and board.columns}
    if content.findings:
        made["claims.tex"] = _claims(content.findings)
    return made


def escape(words: str) -> str:
    """Words as LaTeX prints them; every sign that it would act upon is made plain."""
    return "".join(SIGNS.get(sign, sign) for sign in " ".join(words.split()))


def _tabular(columns: str, head: list[str], rows: list[list[str]]) -> str:
    body = [f"{' & '.join(row)} \\\\" for row in rows]
    lines = [f"\\begin{{tabular}}{{{columns}}}", "\\toprule", f"{' & '.join(head)} \\\\", "\\midrule", *body]
    return "\n".join([NEEDS, *lines, "\\bottomrule", "\\end{tabular}", ""])


def _board(board: Board) -> str:
    """Long boards are parted where the size of the models changes."""
    rows, before = [], None
    for line in board.lines:
        size = line.model.recipe.size
        part = "\\midrule\n" if before not in (None, size) else ""
        rows.append([part + escape(line.model.name), *(_cell(cell) for cell in line.cells)])
        before = size
    for place, (name, cells) in enumerate(board.baselines):
        shown = (f"{100 * one.test:.2f}" if one else "---" for one in cells)
        part = "" if place else "\\midrule\n"
        rows.append([f"{part}{escape(name)} baseline", *shown])
    head = ["Model", *(escape(one) for one in board.columns)]
    return _tabular("l" + "r" * len(board.columns), head, rows)


def _cell(cell: Cell) -> str:
    if not cell.score.known:
        return "---"
    mean = f"{100 * cell.score.seeds.mean:.2f}"
    shown = f"\\textbf{{{mean}}}" if cell.best else mean
    beside = ", ".join(filter(None, (cell.around or cell.score.no_interval, cell.score.collapse)))
    return f"{shown} {{\\scriptsize {escape(beside)}}}" if beside else shown


def _claims(findings: tuple[Finding, ...]) -> str:
    rows = []
    for one in findings:
        for place, part in enumerate(one.parts):
            verdict = ", ".join(filter(None, (one.reads, one.condition)))
            opens = [escape(one.id), escape(verdict)] if place == 0 else ["", ""]
            paper = "---" if part.paper is None else _points(part.paper)
            seeds = part.estimate
            around = f"[{_points(seeds.low)}, {_points(seeds.high)}]" if math.isfinite(seeds.low) else "---"
            rows.append(
                [
                    *opens,
                    escape(part.title),
                    _points(seeds.mean),
                    around,
                    paper,
                    escape(effect(part.detectable)),
                ]
            )
        if not one.parts:
            rows.append([escape(one.id), escape(one.verdict), *["---"] * 5])
    head = ["Claim", "Verdict", "Test", "Ours", "95\\%", "Paper", "Detectable"]
    return _tabular("lllrrrr", head, rows)


def _points(value: float) -> str:
    if not math.isfinite(value):
        return "---"
    text = f"{value:+.2f}"
    return f"${text}$" if float(text) else "$0.00$"
