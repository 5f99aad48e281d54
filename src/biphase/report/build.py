"""Write the report of a study into a folder. The same store content gives the same bytes.

    report.html                 the page, self-contained
    report.md                   the report as text
    scores.csv families.csv noise.csv crossings.csv claims.csv runs.csv trials.csv
    tables/*.tex                LaTeX tables
    figures/*.svg *.pdf         figures for print

Each file is written under a temporary name and then moved into place, so a reader sees either the old or the new one.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from biphase.errors import SpecError
from biphase.report.content import Content, collect
from biphase.report.figures.vega import draw
from biphase.report.page.render import latex, markdown, render, verdict_counts
from biphase.store import Store
from biphase.study.plan import Plan
from biphase.text import counted, duration

PAGE = "report.html"
# Ids of all figures. Files with these names in the figures folder belong to the report and may be removed.
KNOWN = (
    "objectives", "ratio", "efficiency", "rates", "splits", "robustness", "continued", "crossings", "losses",
    "repetition",
    "tree", "costs",  # of earlier versions
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
    html = render(content)
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
