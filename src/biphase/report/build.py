"""Write the report of a study into a folder. The same store content gives the same bytes.

    report.html                 the page, self-contained
    report.md                   the report as text
    scores.csv families.csv noise.csv crossings.csv claims.csv runs.csv trials.csv
    tables/*.tex                LaTeX tables
    figures/*.svg *.pdf         figures for print

Each file is written under a temporary name and then moved into place, so a reader sees either the old or the new one.

`serve` (`report --watch`) serves the page of a running study on localhost, and rebuilds it when the store changes. The
page reloads itself (page.js).
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from biphase.errors import BiphaseError, SpecError, one_line
from biphase.report.content import Content, collect
from biphase.report.figures.vega import draw
from biphase.report.page.render import latex, markdown, render, verdict_counts
from biphase.store import Store
from biphase.study import ledger
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
        server = ThreadingHTTPServer((HOST, port), partial(_PageAlone, directory=str(folder)))
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


class _PageAlone(SimpleHTTPRequestHandler):
    """Serves the page and no other file. Another Host is refused: a website cannot read it by DNS rebinding."""

    def send_head(self) -> Any:
        if self.path != f"/{PAGE}" or self.headers.get("Host", "").partition(":")[0] not in (
            HOST,
            "localhost",
        ):
            return self.send_error(404)
        return super().send_head()

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
