"""Experiment trackers: TensorBoard, Weights & Biases, Trackio and MLflow show what a worker measures.

The store has everything, so a tracker is only a display: it never stops or slows the work. `Tracking` has one `Sender` for
each tracker, a daemon thread with a bounded queue. A training job or fine-tuning is one run of the tracker, found again by
its key. A resumed job asks the tracker for the last step that it has and sends what is missing, so no step is there twice;
for that a row is sent once it is complete, when a row of a later step follows it.

An adapter opens or continues a run, logs rows, and finishes it. Project, server and folder are the tool's own settings;
without them a project is named after the study. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import re
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from biphase.errors import SpecError, nearest, one_line
from biphase.text import printable

QUEUED = 10_000  # lines that wait for a tracker at most
BATCH_SECONDS = 1.0  # between two times that rows are sent
FINISH_SECONDS = 30.0  # that the end of the work waits for all trackers

Row = tuple[int, dict[str, float]]  # a step and its metrics


@dataclass(eq=False)
class TrackedRun:
    """A training job or fine-tuning, as one run of every tracker."""

    key: str
    name: str
    kind: str
    study: str
    config: dict[str, Any]
    folder: Path  # for TensorBoard
    senders: list[Sender]
    first: int = 0  # step before its first one
    lines: list[dict[str, Any]] = field(default_factory=list)  # before a resume, those of earlier jobs too

    def log(self, line: Mapping[str, Any]) -> None:
        """Send the metrics of a step; lines of the same step become one row."""
        for sender in self.senders:
            sender.put((self, line))

    def finish(self, *, complete: bool = True) -> None:
        for sender in self.senders:
            sender.put((self, complete))

    def before(self) -> list[dict[str, Any]]:
        """Return the run's own lines from before a resume."""
        return [line for line in self.lines if line["step"] > self.first]


class Tracker(Protocol):
    """An open run of a tracker."""

    last: int  # last step that it has; -1: none

    def __init__(self, run: TrackedRun) -> None: ...

    def log(self, rows: list[Row]) -> None: ...

    def finish(self, *, complete: bool) -> None: ...


# ---------------------------------------------------------------- adapters


class TensorBoard:
    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        before = run.before() if run.folder.exists() else []
        self.last = before[-1]["step"] if before else -1
        # Readers drop what an earlier attempt wrote from this step on.
        begin = self.last + 1 if before else run.first
        self.writer = SummaryWriter(str(run.folder), purge_step=begin)
        self.writer.add_text("config", f"```json\n{json.dumps(run.config, indent=1)}\n```", begin)

    def log(self, rows: list[Row]) -> None:
        for step, values in rows:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def finish(self, *, complete: bool) -> None:
        self.writer.close()


class WandB:
    def __init__(self, run: TrackedRun) -> None:
        wandb = import_module("wandb")
        settings = wandb.Settings(silent=True, console="off", reinit="create_new")
        online = wandb.setup(settings).settings.mode in ("online", "run", "shared")
        if online and not wandb.login(prompt=False):
            raise SpecError("it has no API key; type wandb login, or export WANDB_MODE=offline")
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or run.study, group=run.study, job_type=run.kind, id=run.key, name=run.name,
            config=run.config, resume="allow", settings=settings,
        )  # fmt: skip
        self.last = self.run.starting_step - 1
        if self.run.offline:  # every attempt has a file of its own
            earlier = Path(self.run.settings.sync_dir).parent.glob(f"*-{run.key}/run-{run.key}.wandb")
            steps = [
                each.history.step.num
                for path in earlier
                for each in wandb_records(path)
                if each.HasField("history")
            ]
            self.last = max(steps, default=-1)

    def log(self, rows: list[Row]) -> None:
        for step, values in rows:
            self.run.log(values, step=step)

    def finish(self, *, complete: bool) -> None:
        self.run.finish(exit_code=0 if complete else 1)


def wandb_records(path: Path) -> Iterator[Any]:
    """Yield the protobuf records in a file of W&B's offline mode, whose format is LevelDB's log."""
    record_of = import_module("wandb.proto.wandb_internal_pb2").Record.FromString
    content, at, record = path.read_bytes(), 7, b""
    while at + 7 < len(content):
        if (left := 32_768 - at % 32_768) < 7:  # of this block: padding
            at += left
            continue
        length, part = struct.unpack_from("<HB", content, at + 4)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if at > len(content):  # cut off by a kill
            return
        if part in (1, 4):  # whole, or its last part
            yield record_of(record)
            record = b""


class Trackio:
    def __init__(self, run: TrackedRun) -> None:
        trackio = import_module("trackio")
        for module in ("trackio", "trackio.run", "trackio.utils"):
            vars(sys.modules[module])["print"] = lambda *args, **options: None  # stdout is for our results
        self.module = trackio
        self.run = trackio.init(
            run.study, run.name, group=run.kind, config=run.config, resume="allow", embed=False, auto_log_gpu=False,
            auto_log_cpu=False,
        )  # fmt: skip
        self.last = self.run._next_step - 1

    def log(self, rows: list[Row]) -> None:
        for step, values in rows:
            self.run.log(values, step=step)

    def finish(self, *, complete: bool) -> None:
        self.module.finish()


class MLflow:
    ROWS = 50  # of one request, whose limit is 1,000 metrics
    KEY, STEP = "biphase.key", "biphase.step"

    def __init__(self, run: TrackedRun) -> None:
        mlflow = import_module("mlflow")
        self.entities = mlflow.entities
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self.client = mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.study
        experiment = self.client.get_experiment_by_name(name)
        place = experiment.experiment_id if experiment else self.client.create_experiment(name)
        found = self.client.search_runs([place], f"tags.`{self.KEY}` = '{run.key}'", max_results=1)
        if found:
            self.id, self.last = found[0].info.run_id, int(found[0].data.tags.get(self.STEP, -1))
            self.client.update_run(self.id, status="RUNNING")
            return
        tags = {self.KEY: run.key, "biphase.kind": run.kind}
        self.id, self.last = self.client.create_run(place, tags=tags, run_name=run.name).info.run_id, -1
        params = [self.entities.Param(name, str(value)[:6000]) for name, value in run.config.items()]
        self.client.log_batch(self.id, params=params)

    def log(self, rows: list[Row]) -> None:
        now = int(time.time() * 1000)
        for first in range(0, len(rows), self.ROWS):
            part = rows[first : first + self.ROWS]
            metrics = [
                self.entities.Metric(re.sub(r"[^\w\-. :/]", "_", name), value, now, step)
                for step, values in part
                for name, value in values.items()
            ]
            self.client.log_batch(self.id, metrics, tags=[self.entities.RunTag(self.STEP, str(part[-1][0]))])

    def finish(self, *, complete: bool) -> None:
        self.client.set_terminated(self.id, "FINISHED" if complete else "KILLED")


# Adapter, package and extra of each name.
TRACKERS: dict[str, tuple[type[Tracker], str, str]] = {
    "tensorboard": (TensorBoard, "tensorboard", "track"),
    "wandb": (WandB, "wandb", "wandb"),
    "trackio": (Trackio, "trackio", "trackio"),
    "mlflow": (MLflow, "mlflow", "mlflow"),
}


def trackers_named(typed: Iterable[str]) -> list[str]:
    """Return the trackers of `--track` or BIPHASE_TRACK, separated by commas; refuse unknown and missing ones."""
    names = [name.strip() for text in typed for name in text.split(",") if name.strip()]
    for name in names:
        if name not in TRACKERS:
            raise SpecError(f"--track {name}: there is no such tracker; {nearest(name, TRACKERS)}")
        _, package, extra = TRACKERS[name]
        if not _installed(package):
            raise SpecError(
                f"--track {name}: {package} is not installed; type pip install 'biphase[{extra}]'"
            )
    return list(dict.fromkeys(names))


def _installed(package: str) -> bool:
    spec = find_spec(package)
    return spec is not None and spec.origin is not None  # a folder of results, like ./wandb, has no origin


# ---------------------------------------------------------------- from the work to the trackers


class Sender:
    """Sends the lines of runs to one tracker from a thread, which begins with the first line."""

    def __init__(self, name: str) -> None:
        self.name, self.adapter = name, TRACKERS[name][0]
        self.queue: queue.Queue[tuple[TrackedRun, Mapping[str, Any] | bool]] = queue.Queue(QUEUED)
        self.closing = threading.Event()
        self.thread: threading.Thread | None = None
        self.warned = False
        self.run: TrackedRun | None = None  # the last one that was opened, or could not be
        self.tracker: Tracker | None = None  # None: closed, or it failed
        self.rows: dict[int, dict[str, float]] = {}  # not sent yet

    def put(self, event: tuple[TrackedRun, Mapping[str, Any] | bool]) -> None:
        """Queue a line, or with a flag the end of a run; never wait."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._work, name=f"tracker-{self.name}", daemon=True)
            self.thread.start()
        try:
            self.queue.put_nowait(event)
        except queue.Full:
            self.warn(f"is too slow; it has not got all metrics of {event[0].name}")

    def warn(self, what: str) -> None:
        """Print a warning, the first time."""
        if not self.warned:
            self.warned = True
            erase = "\r\x1b[K" if sys.stderr.isatty() else ""  # a progress line may stand there
            line = printable(
                f"  note: tracker {self.name} {what}; the work goes on, the store has everything"
            )
            print(f"{erase}{line}", file=sys.stderr, flush=True)

    def close(self, seconds: float) -> bool:
        """Send what is left, for so long at most; return whether the thread has ended."""
        self.closing.set()
        if self.thread:
            self.thread.join(seconds)
        if self.thread and self.thread.is_alive():
            self.warn("has not taken all metrics in time")
            return False
        return True

    def _work(self) -> None:
        while True:
            closing = self.closing.wait(BATCH_SECONDS)
            self._attempt(self._send, closing)
            if closing:
                return

    def _attempt(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call something that a tracker may fail at."""
        try:
            call(*arguments)
        except BaseException as error:  # a tool may raise anything, and this is the thread's end
            self.tracker, self.rows = None, {}
            self.warn(f"failed: {one_line(error)}")

    def _send(self, closing: bool) -> None:
        """Take the queued events, in order; send complete rows."""
        with contextlib.suppress(queue.Empty):
            while True:
                run, event = self.queue.get_nowait()
                self._attempt(self._take, run, event)
        self._flush(but=0 if closing else 1)
        if closing:
            self._finish()

    def _take(self, run: TrackedRun, event: Mapping[str, Any] | bool) -> None:
        if run is not self.run:
            self._attempt(self._finish)
            self.run = run
            self.tracker = self.adapter(run)
            for line in run.before():
                self._add(line)
        if isinstance(event, bool):
            self._finish(complete=event)
        else:
            self._add(event)

    def _add(self, line: Mapping[str, Any]) -> None:
        if self.tracker and line["step"] > self.tracker.last:
            self.rows.setdefault(line["step"], {}).update(_scalars(line))

    def _flush(self, *, but: int) -> None:
        """Send rows, except the last `but`, which may not be complete."""
        ready = sorted(self.rows)[: len(self.rows) - but]
        if self.tracker and ready:
            self.tracker.log([(step, self.rows.pop(step)) for step in ready])

    def _finish(self, *, complete: bool = False) -> None:
        self._flush(but=0)
        tracker, self.tracker = self.tracker, None
        if tracker:
            tracker.finish(complete=complete)


class Tracking:
    """The trackers of one worker. Without names it is TensorBoard, if installed, for training jobs alone."""

    def __init__(self, names: tuple[str, ...], study: str, folder: Path) -> None:
        default = ("tensorboard",) if _installed("tensorboard") else ()
        self.finetunings = bool(names)
        self.study, self.folder = study, folder
        self.senders = [Sender(name) for name in names or default]

    def run(self, key: str, name: str, kind: str, config: dict[str, Any], first: int = 0) -> TrackedRun:
        folder = self.folder / name.replace("/", "-")
        config = {"study": self.study, "key": key, **config}
        return TrackedRun(key, name, kind, self.study, config, folder, self.senders, first)

    def close(self, seconds: float = FINISH_SECONDS) -> bool:
        """Wait until everything is sent, for so long at most; return whether it is."""
        until = time.monotonic() + seconds
        ended = [sender.close(max(0.0, until - time.monotonic())) for sender in self.senders]
        return all(ended)


def _scalars(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    scalars: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, dict):
            scalars |= _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and name != "step":
            scalars[f"{prefix}{name}"] = float(value)
    return scalars
