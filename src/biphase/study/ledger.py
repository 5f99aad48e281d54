"""The ledger: what the store holds of a plan, read from files alone, without torch.

`survey_jobs` returns the status of every training job: done, running, failed, ready (its parent is done) or
waiting. A job is also done if only the metadata of its checkpoint is here and the weights are on another machine.
`finetunings` lists the fine-tunings of a plan and `survey_trials` their status. `curve` and `measured` read
training metrics, `note_failure` and `failures` write and read why jobs failed:

    store/studies/<name>/failures/<key>.json     one per failed job, until it succeeds
    store/studies/<name>/live/<key>.jsonl        metrics of a training job while it runs
"""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from biphase.errors import StoreError, one_line
from biphase.keys import finetuning_key, trial_key
from biphase.leases import Holder, Leases
from biphase.metadata import read_checkpoint_file, read_lines, read_trial_file
from biphase.specs import Finetune, Task
from biphase.specs.claims import CHOSEN
from biphase.store import Store, read_file, read_json, write_json
from biphase.study.plan import Plan, TrainingJob
from biphase.text import si

TAIL_BYTES = 8192  # read from the end of a live file: some dozens of steps
Standing = Literal["done", "running", "failed", "ready", "waiting"]


@dataclass(frozen=True)
class JobStatus:
    """One training job of a plan and its status."""

    job: TrainingJob
    standing: Standing
    progress: dict[str, Any] | None = None  # of a done job: step, seconds, flops, …
    holder: Holder | None = None
    error: str = ""
    weights: bool = True  # False: done, but only the checkpoint's metadata is here


def done_keys(plan: Plan, store: Store) -> set[str]:
    """Return the keys of checkpoints that were computed, here or on another machine."""
    return {key for key in plan.jobs if store.knows(store.checkpoints / key)}


def keys_with_weights(plan: Plan, store: Store) -> set[str]:
    """Return the keys of checkpoints whose weights are here, and that can be continued, fine-tuned and exported."""
    return {key for key in plan.jobs if store.has(store.checkpoints / key)}


def survey_jobs(plan: Plan, store: Store) -> dict[str, JobStatus]:
    """Return the current status of every training job of the plan."""
    done, whole = done_keys(plan, store), keys_with_weights(plan, store)
    holders = {key: one for key, one in Leases(store.leases).holders().items() if one.alive is not False}
    failed = failures(plan, store)
    entries = {}
    for key, job in plan.jobs.items():
        if key in done:
            entry = _done(job, store)
            entries[key] = entry if key in whole else replace(entry, weights=False, holder=holders.get(key))
        elif key in holders:
            entries[key] = JobStatus(job, "running", holder=holders[key])
        elif error := store.fault(store.checkpoints / key) or failed.get(key, {}).get("error", ""):
            entries[key] = JobStatus(job, "failed", error=error)
        else:
            entries[key] = JobStatus(job, "ready" if job.parent is None or job.parent in done else "waiting")
    return entries


def _done(job: TrainingJob, store: Store) -> JobStatus:
    """Return "done" for a published checkpoint, or "failed" if its metadata cannot be read."""
    try:
        return JobStatus(
            job,
            "done",
            progress=read_checkpoint_file(store.readable(store.checkpoints / job.key))["progress"],
        )
    except StoreError as wrong:
        return JobStatus(job, "failed", error=str(wrong))


# ---------------------------------------------------------------- failures


def _failures_folder(plan: Plan, store: Store) -> Path:
    return store.studies / plan.study.name / "failures"


def note_failure(plan: Plan, store: Store, key: str, error: BaseException) -> None:
    """Record why a job failed; the next `biphase run` tries it again."""
    folder = _failures_folder(plan, store)
    folder.mkdir(parents=True, exist_ok=True)
    lines = traceback.format_exception(error)
    record = {
        "key": key,
        "error": one_line(error),
        "traceback": "".join(lines),
        "at": time.strftime("%FT%TZ", time.gmtime()),
    }
    write_json(folder / f"{key}.json", record)


def forget_failure(plan: Plan, store: Store, key: str) -> None:
    (_failures_folder(plan, store) / f"{key}.json").unlink(missing_ok=True)


def failures(plan: Plan, store: Store) -> dict[str, dict[str, Any]]:
    found = {}
    for path in _failures_folder(plan, store).glob("*.json"):
        with contextlib.suppress(StoreError):
            noted = read_json(path)
            # Otherwise the record is damaged and ignored.
            if isinstance(noted, dict) and isinstance(noted.get("error"), str):
                found[path.stem] = noted
    return found


# ---------------------------------------------------------------- curves and speed


def curve(plan: Plan, store: Store, result: str, holding: bytes = b"") -> list[dict[str, Any]]:
    """Return the metric lines on the path to a result in order of steps, as far as it is computed.

    `holding`: return only lines that contain these bytes. Curves are long, and most commands need few of their lines.
    """
    for job in reversed(plan.path(plan.results[result])):
        place = store.readable(store.checkpoints / job.key)
        if store.has(place):  # a checkpoint holds the lines of its whole path
            return read_lines(place, holding)
    return []


def live_file(plan: Plan, store: Store, key: str) -> Path:
    """Return the file to which a worker appends the metrics of the training job it runs, for `status` and `watch`."""
    return store.studies / plan.study.name / "live" / f"{key}.jsonl"


def latest(plan: Plan, store: Store, job: TrainingJob) -> str:
    """Describe the progress of a running training job (step, loss, tokens per second); empty if unknown."""
    try:
        content = read_file(live_file(plan, store, job.key), tail=TAIL_BYTES)
        texts = content.decode(errors="replace").splitlines()[1:]  # the first line may be cut
        # The last line may be incomplete.
        lines = [json.loads(text) for text in texts if text.endswith("}") and '"loss"' in text]
        first, last = lines[0], lines[-1]
        seconds = last["seconds"] - first["seconds"]
        speed = f", {si((last['tokens'] - first['tokens']) / seconds)}tok/s" if seconds > 0 else ""
        loss = "not finite" if last["loss"] is None else f"{last['loss']:.3f}"
        return f"step {last['step']:,} of {job.span[1]:,}, loss {loss}{speed}"
    except (OSError, ValueError, KeyError, TypeError, IndexError):  # informative only, so errors are ignored
        return ""


def heldout(lines: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Return the held-out losses of a curve by step."""
    return {line["step"]: line["heldout"] for line in lines if "heldout" in line}


def measured(plan: Plan, store: Store, result: str) -> dict[int, dict[str, float]]:
    """Return the held-out losses on the path to a result by step."""
    return heldout(curve(plan, store, result, b'"heldout"'))


def seconds_left(
    entries: dict[str, JobStatus], cost_of: Callable[[TrainingJob], float | None]
) -> float | None:
    """Estimate the time left at the speed measured so far, on as many workers as run now; None before any."""
    spent = work = 0.0
    for entry in entries.values():
        if entry.progress:
            parent = entries.get(entry.job.parent or "")
            before = parent.progress["seconds"] if parent and parent.progress else 0.0
            spent += entry.progress["seconds"] - before
            work += cost_of(entry.job) or 0.0
    left = sum(cost_of(entry.job) or 0.0 for entry in entries.values() if entry.standing != "done")
    workers = max(1, sum(entry.standing == "running" for entry in entries.values()))
    return left * spent / work / workers if work and spent > 0 else None


# ---------------------------------------------------------------- fine-tunings and trials
# grid         a model and a task to train on: all its learning rates and seeds
# fine-tuning  one learning rate and seed of a grid (`FineTuning`)
# trial        the scores of a fine-tuning on one task: the task it was trained on, or one that reuses its model


VALUES = "values.safetensors"
PREDICTIONS = "predictions.safetensors"  # absent from trials of earlier versions


@dataclass(frozen=True)
class Trial:
    key: str
    task: Task
    metric: str  # by which the learning rate is chosen


@dataclass(frozen=True)
class FineTuning:
    """One fine-tuning, and the trials that are scored with it."""

    key: str
    model: str  # key of a checkpoint or a root
    task: Task
    lr: float
    seed: int
    trials: tuple[Trial, ...]

    def title(self, plan: Plan) -> str:
        """Describe it for people: which result, task, learning rate and seed."""
        names = [name for name, key in plan.results.items() if key == self.model]
        how = "zero-shot" if self.task.zero_shot else f"lr {self.lr:g} · seed {self.seed}"
        return f"{', '.join(names)} · {self.task.name} · {how}"


def finetunings(plan: Plan, models: Collection[str] | None = None) -> Iterator[FineTuning]:
    """Yield the fine-tunings of a plan, grid by grid, in the order in which models become ready.

    `models`: keys of the models to include; None: all.
    """
    for model in (*plan.roots, *plan.jobs):
        if model not in plan.tuned or (models is not None and model not in models):
            continue
        for task, scored in lenders(plan.tuned[model]).items():
            yield from _grid(plan, plan.tuned[model], model, task, scored)


def lenders(spec: Finetune) -> dict[Task, tuple[Task, ...]]:
    """Map each task that is trained on to the tasks that are scored with its model."""
    scored = {task: tuple(one for one in spec.tasks if spec.lender(one) is task) for task in spec.tasks}
    return {task: some for task, some in scored.items() if some}


def _grid(
    plan: Plan, spec: Finetune, model: str, task: Task, scored: tuple[Task, ...]
) -> Iterator[FineTuning]:
    for lr in spec.lrs:
        for seed in spec.seeds:
            key = finetuning_key(model, plan.tasks[task.name], spec, lr=lr, seed=seed)
            trials = tuple(
                Trial(
                    trial_key(key, plan.tasks[one.name], spec.documents if one.family == "IR" else ""),
                    one,
                    CHOSEN[one.family][spec.protocol],
                )
                for one in scored
            )
            yield FineTuning(key, model, task, lr, seed, trials)


def finished(training: FineTuning, store: Store) -> bool:
    return all(store.knows(store.trials / trial.key) for trial in training.trials)


def unfinished(store: Store) -> dict[str, int]:
    """Map fine-tunings that have checkpoints to the step of their last one."""
    found: dict[str, int] = {}
    for place in store.unfinished.glob("*-*"):
        training, _, step = place.name.rpartition("-")
        if store.has(place) and step.isdecimal():
            found[training] = max(int(step), found.get(training, 0))
    return found


def kept(plan: Plan, store: Store) -> dict[str, tuple[FineTuning, int]]:
    """Return the unfinished fine-tunings of a plan that will resume from a checkpoint, with its step."""
    saved = unfinished(store)
    some = (one for one in finetunings(plan) if one.key in saved) if saved else ()
    return {one.key: (one, saved[one.key]) for one in some if not finished(one, store)}


def settled(plan: Plan, store: Store, tuned: Count | TrialSurvey) -> set[str]:
    """Return the checkpoints that need not be computed.

    These are all that are done, except those whose weights are on another machine and needed here.
    """
    done, whole = done_keys(plan, store), keys_with_weights(plan, store)
    told = done - whole
    if not told:
        return done
    left = finetunings(plan, told) if tuned.done < tuned.of else ()
    unscored = {one.model for one in left if not finished(one, store)}
    return done - set(plan.left(whole, told=told, unscored=unscored))


@dataclass(frozen=True)
class Count:
    """How many of something are done and planned."""

    done: int
    of: int


def count(plan: Plan, store: Store, models: Collection[str] | None = None) -> Count:
    """Count the fine-tunings done and planned, of all models or of `models`."""
    every = list(finetunings(plan, models))
    there = store.trials.is_dir() or store.metadata.is_dir()
    return Count(sum(there and finished(one, store) for one in every), len(every))


@dataclass(frozen=True)
class TrialSurvey:
    """The fine-tunings of a plan and their status."""

    done: int
    of: int
    running: dict[str, tuple[FineTuning, Holder]]
    failed: dict[str, tuple[FineTuning, str]]
    damaged: dict[str, str]  # failed because published scores cannot be read, and why
    kept: dict[str, tuple[FineTuning, int]]  # stopped at this step with a checkpoint; not running, not failed
    seconds_left: float | None  # at the speed measured so far, on as many workers as run now


def survey_trials(plan: Plan, store: Store) -> TrialSurvey:
    every = list(finetunings(plan))
    holders = {key: one for key, one in Leases(store.leases).holders().items() if one.alive is not False}
    noted = failures(plan, store)
    took: list[float] = []
    left: list[FineTuning] = []
    damaged: dict[str, str] = {}
    for one in every:
        if finished(one, store):
            try:
                took.append(
                    sum(
                        sum(read_trial(store, trial.key, trial.metric)["seconds"].values())
                        for trial in one.trials
                    )
                )
            except StoreError as wrong:
                damaged[one.key] = str(wrong)
            continue
        left.append(one)
        if fault := next(filter(None, (store.fault(store.trials / trial.key) for trial in one.trials)), ""):
            damaged[one.key] = fault
    running = {one.key: (one, holders[one.key]) for one in left if one.key in holders}
    errors = {one.key: noted[one.key]["error"] for one in left if one.key in noted} | damaged
    failed = {
        one.key: (one, errors[one.key]) for one in every if one.key in errors and one.key not in running
    }
    stopped = {key: one for key, one in kept(plan, store).items() if key not in running and key not in failed}
    each = sum(took) / len(took) if took else 0.0
    seconds_left = each * len(left) / max(1, len(running)) if took else None
    return TrialSurvey(len(took), len(every), running, failed, damaged, stopped, seconds_left)


def read_trial(store: Store, key: str, metric: str = "") -> dict[str, Any]:
    """Return the validated metadata of a trial.

    Raises a `StoreError` if it is damaged, or scored by another metric than `metric`.
    """
    place = store.readable(store.trials / key)
    about = read_trial_file(place)
    if metric and about["metric"] != metric:
        raise StoreError(
            f"{place} was scored by {about['metric']}, and {metric} is planned; remove it and run the study again"
        )
    return about


def trial_keys(store: Store, digits: str = "") -> list[str]:
    """Return the sorted keys of all trials of a store that begin with `digits`."""
    metadata = store.metadata / store.trials.name
    return sorted({*store.named(store.trials, digits), *store.named(metadata, digits)})
