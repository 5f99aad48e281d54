"""Write the report of a study into a folder. The same store content gives the same bytes.

    report.html                 the page, self-contained
    report.md                   the report as text
    scores.csv families.csv noise.csv claims.csv runs.csv trials.csv
    tables/*.tex                LaTeX tables
    figures/*.svg *.pdf         figures for print

Each file is written under a temporary name and then moved into place, so a reader sees either the old or the new one.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from biphase.errors import SpecError
from biphase.report.content import Content, collect
from biphase.report.figures import draw
from biphase.report.page.render import render
from biphase.report.text import latex, markdown
from biphase.store import Store
from biphase.study.plan import Plan
from biphase.text import counted, duration

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
            "claims": {one.id: one.reads for one in self.content.findings},
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
