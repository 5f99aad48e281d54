"""The cost of pretraining and its loss curves, from the files of the store. No torch.

`job_costs` gives tokens, FLOPs, seconds and joules of every training job, `RunSummary` those of the path to a result;
`curve` the losses on that path; `Epochs` how often a result has read its corpus.

FLOPs are the model's own, as `study.costs` counts them: the head counts only where it runs. Seconds were measured on
the machine that computed the job, so curves over seconds compare objectives only where the machines were alike.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from biphase.errors import StoreError, one_line
from biphase.metadata import LINES, WRONG, check_line, read_checkpoint_file
from biphase.presets import shares_of, sources_of
from biphase.report.recipes import Recipe, recipe_of
from biphase.specs import Corpus, Hub
from biphase.store import Store, read_file, read_verified
from biphase.study import ledger
from biphase.study.costs import flops_of
from biphase.study.plan import Plan, TrainingJob, card_of

POINTS = 400  # of a plotted loss curve
ROUNDED = 0.001  # seconds in metrics.jsonl are rounded to this
SAMPLE = 8  # a point that stands for more lines is the mean of this many: runs log every step


@dataclass(frozen=True)
class JobCost:
    """The cost of one training job: the work between two checkpoints of the plan."""

    key: str
    title: str  # "clm 0 → 10,000"
    steps: tuple[int, int]
    decaying: bool
    tokens: int
    flops: float | None
    standing: str
    seconds: float | None  # of this job alone; None: not computed, or its start is not known
    joules: float | None  # likewise
    devices: int
    device: str


@dataclass(frozen=True)
class RunSummary:
    """One result with its recipe, and the cost and progress of its whole path. Unknown fields are None or empty."""

    name: str
    model: str  # the name of the model it belongs to
    recipe: Recipe
    key: str
    way: tuple[JobCost, ...]  # training jobs from the root
    flops: float | None
    seconds: float | None
    joules: float | None
    devices: int
    device: str
    epochs: float | None
    heldout: dict[str, float]  # objective → the last measured loss
    standing: str  # done, running, failed, ready, waiting
    trials: tuple[int, int]  # done, planned
    wrong: str = ""  # why its checkpoint's metadata is invalid

    @property
    def tokens(self) -> int:
        return sum(job.tokens for job in self.way)


class CurvePoint(NamedTuple):
    """A loss at a step. In long curves it is the mean of (a sample of) the lines since the previous point."""

    step: int
    loss: float
    objective: str  # losses of two objectives are not one curve


# A step at which the objective changes or the decay begins, and what begins there.
Switch = tuple[int, str]


@dataclass(frozen=True)
class Curve:
    """The losses on the path to a result."""

    result: str
    points: list[CurvePoint]
    heldout: dict[str, list[tuple[int, float]]]  # objective → (step, loss)
    switches: list[Switch]
    complete: bool


def job_costs(plan: Plan, store: Store) -> list[JobCost]:
    """The cost of every training job of a plan, in the order of computation."""
    entries = ledger.survey_jobs(plan, store)
    return [_job_cost(entry, entries, store) for entry in entries.values()]


def _job_cost(entry: ledger.JobStatus, entries: dict[str, ledger.JobStatus], store: Store) -> JobCost:
    job, progress = entry.job, entry.progress or {}
    parent = (entries[job.parent].progress if job.parent else {"seconds": 0.0, "joules": 0.0}) or {}
    first, until = job.span
    before = parent.get("seconds")
    began = _began(entry, store) if progress and job.parent else before
    # If the clocks differ, the parent was retrained since.
    same = began is None or before is None or abs(before - began) < ROUNDED
    return JobCost(
        key=job.key,
        title=f"{job.objective.label} {first:,} → {until:,}",
        steps=job.span,
        decaying=job.decaying,
        tokens=job.tokens,
        flops=flops_of(job),
        standing=entry.standing,
        seconds=_difference(progress.get("seconds"), began if before is None or not same else before),
        joules=_difference(progress.get("joules"), parent.get("joules")) if same else None,
        devices=int(progress.get("world", 1)),
        device=progress.get("machine", {}).get("device", ""),
    )


def _began(entry: ledger.JobStatus, store: Store) -> float | None:
    """The seconds on the clock when a job began: those in the metrics line of the last step before it."""
    with contextlib.suppress(StoreError):
        lines = read_verified(store.readable(store.checkpoints / entry.job.key), LINES)
        at = lines.find(b'{"step": %d, "loss"' % entry.job.span[0])
        if at >= 0:
            return parse_line(lines[at:].split(b"\n", 1)[0].decode(errors="replace")).get("seconds")
    return None


def _difference(end: float | None, begin: float | None) -> float | None:
    return None if end is None or begin is None or end < begin else end - begin


def run_summary(
    plan: Plan, store: Store, name: str, model: str, trials: tuple[int, int], by_key: dict[str, JobCost]
) -> RunSummary:
    """The summary of a result. `by_key`: the costs of the plan's training jobs."""
    key = plan.results[name]
    way = tuple(by_key[job.key] for job in plan.path(key))
    flops = [job.flops for job in way]
    try:
        about, measured, wrong = checkpoint_of(store, key), ledger.measured(plan, store, name), ""
    except StoreError as damage:  # a report must not reveal where the store is
        about, measured, wrong = {}, {}, str(damage).replace(f"{store.root}/", "")
    progress = about.get("progress", {})
    return RunSummary(
        name=name,
        model=model,
        recipe=recipe_of(plan, name),
        key=key,
        way=way,
        flops=None if None in flops else sum(count for count in flops if count is not None),
        seconds=progress.get("seconds"),
        joules=progress.get("joules"),
        devices=int(progress.get("world", 1)),
        device=progress.get("machine", {}).get("device", ""),
        epochs=about.get("epochs"),
        heldout=list(measured.values())[-1] if measured else {},
        standing=by_key[key].standing if key in by_key else "done",
        trials=trials,
        wrong=wrong,
    )


def checkpoint_of(store: Store, key: str) -> dict[str, Any]:
    """The checkpoint.json of a finished result; empty for an untrained start, and before it is computed."""
    folder = store.readable(store.checkpoints / key)
    return read_checkpoint_file(folder) if store.has(folder) else {}


def curve(plan: Plan, store: Store, result: str, *, live: bool = False) -> Curve:
    """The losses on the path to a result, as far as known; `live` includes what a worker is writing now."""
    lines = texts(plan, store, result, live=live)
    try:
        return _curve(plan, result, lines)
    except StoreError:  # one invalid line makes the whole file untrustworthy
        return _curve(plan, result, [])


def _curve(plan: Plan, result: str, lines: list[str]) -> Curve:
    heldout: dict[str, list[tuple[int, float]]] = {}
    for step, measured in ledger.heldout([parse_line(text) for text in lines if '"heldout"' in text]).items():
        for objective, loss in measured.items():
            heldout.setdefault(objective, []).append((step, loss))
    path = plan.path(plan.results[result])
    return Curve(
        result,
        _thinned([text for text in lines if '"heldout"' not in text]),
        heldout,
        switches(plan, result),
        complete=bool(path) and _last_step(lines) >= path[-1].span[1],
    )


def switches(plan: Plan, result: str) -> list[Switch]:
    """The steps at which the objective changes or a decay begins, on the path to a result."""
    changes: list[Switch] = []
    path = plan.path(plan.results[result])
    for before, job in zip((None, *path), path, strict=False):
        if before and before.objective.label != job.objective.label:
            changes.append((job.span[0], job.objective.label))
        if job.decaying and job.first == job.run.decay_start:  # later jobs only continue it
            changes.append((job.span[0], "decay"))
    return changes


# ---------------------------------------------------------------- lines of metrics


def texts(plan: Plan, store: Store, result: str, *, live: bool) -> list[str]:
    """The unparsed metrics lines on the path to a result. A file that fails verification is skipped."""
    path = plan.path(plan.results[result])
    lines: list[str] = []
    for job in reversed(path):  # a checkpoint holds the lines of its whole path
        folder = store.readable(store.checkpoints / job.key)
        if not lines and store.has(folder):
            with contextlib.suppress(StoreError):
                lines = read_verified(folder, LINES).decode(errors="replace").splitlines()
    for job in path if live else ():
        # The live file may be absent, just finished, or damaged; it is for display only, so errors are ignored.
        with contextlib.suppress(OSError, UnicodeDecodeError, StoreError):
            latest = read_file(ledger.live_file(plan, store, job.key)).decode().splitlines()
            for text in latest[:-1]:  # the last line may be incomplete
                parse_line(text)
            lines = max(lines, latest, key=_last_step)  # the live file also begins at the root
    return [text for text in lines if text.endswith("}")]  # the last line may be incomplete


def _last_step(texts: list[str]) -> int:
    return next((parse_line(text)["step"] for text in reversed(texts) if text.endswith("}")), 0)


def parse_line(text: str) -> dict[str, Any]:
    """Parse and validate one line. Done on demand, because long curves use only a few of their lines."""
    try:
        return check_line(json.loads(text))
    except WRONG as wrong:
        raise StoreError(f"a line of metrics is not as biphase writes it ({one_line(wrong)[:200]})") from None


def _thinned(texts: list[str]) -> list[CurvePoint]:
    """Reduce lines to about `POINTS` means of adjacent lines with one objective."""
    width = max(1, -(-len(texts) // POINTS))
    points = []
    for first in range(0, len(texts), width):
        group = texts[first : first + width]
        objective = json.dumps(parse_line(group[0]).get("objective", ""))
        if len(group) > SAMPLE and all(objective in text for text in group):  # a sample, evenly spaced
            group = [group[round(n * (len(group) - 1) / (SAMPLE - 1))] for n in range(SAMPLE)]
        lines = [parse_line(text) for text in group]
        finite = [line for line in lines if line.get("loss") is not None]
        for objective, some in itertools.groupby(finite, key=lambda line: line.get("objective", "")):
            same = list(some)
            loss = sum(line["loss"] for line in same) / len(same)
            points.append(CurvePoint(same[-1]["step"], loss, objective))
    return points


# ---------------------------------------------------------------- repetition
# A checkpoint records how many rows it has read and how many epochs that was. This gives the number of rows of its
# corpus, and so the epochs at every step of every run that reads the same corpus. Epochs count from the root through
# all runs on the path, also through one that restarted its data order: what matters is how often the model saw a text.
# Where the path reads several corpora, those of its last job count, and of a blend the one that was read most often.
#
# Masks are new in each epoch and causal targets are not, so a repeated corpus gives MLM more to learn than CLM.


# The key of a row count: corpus, published model whose tokenizer is used (or None), tokens in a row.
Read = tuple[Corpus, Hub | None, int]


class Epochs:
    """The epochs of a plan's results, known where some checkpoint of the store records the size of its corpus."""

    def __init__(self, plan: Plan, store: Store) -> None:
        self._plan, self._store = plan, store
        self._jobs: dict[Read, list[TrainingJob]] = {}
        for job in plan.jobs.values():
            for read in _reads(job):
                self._jobs.setdefault(read, []).append(job)
        self._rows: dict[Read, int | None] = {}

    def at(self, result: str, step: int | None = None) -> float | None:
        """How often a result has read its corpus, in total or up to a step counted from the root; None: not known."""
        path, epochs = self._path(result, step), self.by_corpus(result, step)
        times = [epochs[read[0]] for read in _reads(path[-1])] if path else []
        return max(times) if times and not any(map(math.isnan, times)) else None

    def by_corpus(self, result: str, step: int | None = None) -> dict[Corpus, float]:
        """The same of every corpus that it has read; NaN: not known."""
        epochs: dict[Corpus, float] = {}
        for job in self._path(result, step):
            first, until = job.span
            steps = (until if step is None else min(until, step)) - first
            rows_read = job.run.rows_until(job.first + steps) - job.run.rows_until(job.first)
            for read, share in _reads(job).items():
                rows = self._corpus_rows(read) or math.nan
                epochs[read[0]] = epochs.get(read[0], 0.0) + rows_read * share / rows
        return epochs

    def _path(self, result: str, step: int | None) -> list[TrainingJob]:
        path = self._plan.path(self._plan.results[result])
        return [job for job in path if step is None or job.span[0] < step]

    def tokens(self, result: str) -> int | None:
        """The tokens in one epoch of the one corpus that a result reads last, counted in whole rows."""
        path = self._plan.path(self._plan.results[result])
        reads = [*_reads(path[-1])] if path else []
        rows = self._corpus_rows(reads[0]) if len(reads) == 1 else None
        return None if rows is None else rows * path[-1].run.packing.length

    def _corpus_rows(self, read: Read) -> int | None:
        if read not in self._rows:
            recorded = (_rows(self._store, job, read) for job in self._jobs[read])
            self._rows[read] = next((rows for rows in recorded if rows), None)
        return self._rows[read]


def _reads(job: TrainingJob) -> dict[Read, float]:
    """The corpora that a job reads, each with its share of the rows."""
    start, length = job.run.root.start, job.run.packing.length
    hub = start if isinstance(start, Hub) else None
    return {(corpus, hub, length): share for corpus, share in shares_of(job.corpus, job.run).items()}


def _rows(store: Store, job: TrainingJob, read: Read) -> int:
    """The rows in a corpus of a job, from its checkpoint's metadata or the corpus's card; 0: not recorded or invalid."""
    if len(sources_of(job.run)) > 1:
        return card_of(read[0], store)[1].get("train_tokens", 0) // read[2]
    checkpoint: dict[str, Any] = {}
    with contextlib.suppress(StoreError):
        checkpoint = checkpoint_of(store, job.key)
    epochs, rows_read = checkpoint.get("epochs"), checkpoint.get("progress", {}).get("next_sample")
    return round(rows_read / epochs) if epochs and rows_read else 0
