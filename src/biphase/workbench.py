"""biphase from Python and in notebooks: `Workbench(store)` has the verbs of the command line, and tables of results.

A verb runs the command in a process of its own, so that a notebook gets the same checks and the same output, can be
interrupted like a terminal, and holds no GPU memory afterwards. A refusal becomes a `BiphaseError` with the same line.
Tables are read from the store in this process, as `pyarrow.Table`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from biphase.errors import BiphaseError, SpecError
from biphase.records import content_key, encode
from biphase.specs import Study
from biphase.store import Store, with_checksum, write_json

if TYPE_CHECKING:
    import pyarrow as pa

    from biphase.report.tables import Table
    from biphase.study.plan import Plan

# A command ends, with a checkpoint, if the notebook's kernel dies.
START = "from biphase.leases import end_with_parent; end_with_parent(); from biphase.cli import main; main()"
WRITTEN = "written"  # folder of a study in the store: studies that were made in Python, as files


class Text(str):
    """What a command printed; a notebook shows it as it is."""

    __slots__ = ()
    __repr__ = str.__str__


class Workbench:
    """The verbs of `biphase` on one store. `study`: a `Study`, or the path of a study file or of a plan.json.

    Options are those of the command line with underscores: `run(study, only="clm-*", micro_batch=8)`; `--for` is
    `for_time`, and `json=True` gives the facts of `--json` instead of the text.
    """

    def __init__(self, store: str | Path | None = None) -> None:
        self.store = Path(store or os.environ.get("BIPHASE_STORE") or "store")

    def plan(self, study: Study | str | Path, **options: Any) -> Any:
        """What a study computes and costs, and which effects its claims can detect."""
        return self.command("plan", self._path(study), **options)

    def run(self, study: Study | str | Path, **options: Any) -> Any:
        """Compute what is missing. Interrupt it at any time; the same call resumes."""
        return self.command("run", self._path(study), **options)

    def status(self, study: Study | str | Path, **options: Any) -> Any:
        """What is done, running, failed and left, with losses and scores so far."""
        return self.command("status", self._path(study), **options)

    def report(self, study: Study | str | Path, **options: Any) -> Any:
        """Write the report; the text ends with the path of the page."""
        return self.command("report", self._path(study), **options)

    def adapt(self, model: str | Path, **options: Any) -> Any:
        """Turn a decoder into an encoder."""
        return self.command("adapt", model, **options)

    def evaluate(self, model: str | Path, tasks: Iterable[str] | str, **options: Any) -> Any:
        """Fine-tune a model on tasks over learning rates and seeds, and score it."""
        return self.command("evaluate", model, tasks=tasks, **options)

    def compare(self, *models: str | Path, tasks: Iterable[str] | str, **options: Any) -> Any:
        """Fine-tune models on the same tasks, and say where the others differ from the first."""
        return self.command("compare", *models, tasks=tasks, **options)

    def export(self, key: str, folder: str | Path, **options: Any) -> Any:
        """Write a trained model as a folder for transformers and sentence-transformers."""
        return self.command("export", key, folder, **options)

    # ------------------------------------------------------------ tables

    def results(self, study: Study | str | Path) -> pa.Table:
        """One row for each model and task: the score in percent, with intervals."""
        from biphase.report import tables
        from biphase.report.estimates import estimate
        from biphase.report.evidence import Resamples, gather

        evidence = gather(*self._plan(study))
        return _arrow(tables.scores(evidence, estimate(evidence, Resamples(evidence))))

    def trials(self, study: Study | str | Path) -> pa.Table:
        """One row for each fine-tuning: rate, seed, validation and test score, key."""
        from biphase.report import tables
        from biphase.report.evidence import gather

        return _arrow(tables.trial_table(gather(*self._plan(study))))

    def losses(self, study: Study | str | Path) -> pa.Table:
        """Training and held-out losses over steps, of finished and of running jobs; long curves are thinned."""
        import pyarrow as pa

        from biphase.report.pretraining import curve

        plan, store = self._plan(study)
        rows = []
        for result in plan.results:
            found = curve(plan, store, result, live=True)
            rows += [(result, step, objective, "training", loss) for step, loss, objective in found.points]
            for objective, points in found.heldout.items():
                rows += [(result, step, objective, "held out", loss) for step, loss in points]
        names = ("result", "step", "objective", "text", "loss")
        return pa.table(dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else {})

    def _plan(self, study: Study | str | Path) -> tuple[Plan, Store]:
        from biphase.cli.app import planned

        plan, store, _ = planned(Path(self._path(study)), self.store, reads=True)
        return plan, store

    # ------------------------------------------------------------ commands

    def command(self, verb: str, *words: object, **options: Any) -> Any:
        """Run a command of `biphase` with its progress shown as it comes, and return what it printed."""
        typed = [verb, *map(str, words), *_typed(options), "--store", str(self.store)]
        with tempfile.TemporaryFile("w+", encoding="utf-8") as printed:
            # A session of its own, since notebooks send an interrupt to all processes of the kernel, and a second one
            # would end the command before it has saved.
            process = subprocess.Popen(
                [sys.executable, "-c", START, *typed], stdout=printed, stderr=subprocess.PIPE, text=True,
                encoding="utf-8", errors="replace", start_new_session=True,
            )  # fmt: skip
            last = _wait(process)
            printed.seek(0)
            text = printed.read().rstrip()
        if process.returncode == 2:
            raise SpecError(last.removeprefix("error: "))
        if process.returncode:
            raise BiphaseError(text or last or f"biphase {verb} ended with exit code {process.returncode}")
        return json.loads(text) if options.get("json") else Text(text)

    def _path(self, study: Study | str | Path) -> str:
        """Return the path of a study file; a `Study` is written into the store."""
        if not isinstance(study, Study):
            return str(study)
        content = {"study": encode(study)}
        written = self.store / "studies" / study.name / WRITTEN / f"{content_key(content)[:8]}.json"
        written.parent.mkdir(parents=True, exist_ok=True)
        write_json(written, with_checksum(content))
        return str(written)


def _wait(process: subprocess.Popen[str]) -> str:
    """Show the progress of a command until it ends, and return the last line. An interrupt is passed on."""
    last = ""
    assert process.stderr is not None
    try:
        while True:
            try:
                for line in process.stderr:
                    last = line.strip() or last
                    if not line.startswith("error: "):  # it is raised
                        print(line, end="", file=sys.stderr, flush=True)
                process.wait()
                return last
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)
    finally:
        if process.poll() is None:
            process.terminate()
        process.stderr.close()


def _typed(options: dict[str, Any]) -> list[str]:
    """Return options as they are typed: True is a flag, lists are joined by commas, False and None are left out."""
    typed: list[str] = []
    for name, value in options.items():
        option = "--for" if name == "for_time" else f"--{name.replace('_', '-')}"
        if value is None or value is False:
            continue
        joined = (
            value if isinstance(value, str) or not isinstance(value, Iterable) else ",".join(map(str, value))
        )
        typed += [option] if value is True else [option, str(joined)]
    return typed


def _arrow(table: Table) -> pa.Table:
    """Return a table with numbers as numbers, and empty cells as missing values."""
    import pyarrow as pa

    columns = zip(*table.rows, strict=True) if table.rows else ([] for _ in table.columns)
    return pa.table({name: _column(list(cells)) for name, cells in zip(table.columns, columns, strict=True)})


def _column(cells: list[str]) -> list[Any]:
    present = [cell or None for cell in cells]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return [None if cell is None else kind(cell) for cell in present]
    return present
