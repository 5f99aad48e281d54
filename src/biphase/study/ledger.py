"""The ledger: what the store holds of a plan, read from files alone, without torch.

`survey_jobs` returns the status of every training job: done, running, failed, ready (its parent is done) or
waiting. A job is also done if only the metadata of its checkpoint is here and the weights are on another machine.
`tuning_grids` and `finetunings` list the fine-tunings of a plan and `survey_trials` their status. `choose` and `best_rates`
select learning rates from validation scores alone, and `score_rows` collects the test scores at these rates. `curve` and `measured` read training
metrics, `note_failure` and `failures` write and read why jobs failed:

    store/studies/<name>/failures/<key>.json     one per failed job, until it succeeds
    store/studies/<name>/live/<key>.jsonl        metrics of a training job while it runs
"""

from __future__ import annotations

import contextlib
import json
import math
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from biphase.errors import StoreError, one_line
from biphase.keys import finetuning_key, trial_key
from biphase.leases import Holder, Leases
from biphase.metadata import read_checkpoint_file, read_lines, read_trial_file
from biphase.specs import Finetune, Task
from biphase.specs.tasks import RANGES
from biphase.store import Store, read_file, read_json, write_json
from biphase.study.plan import Plan, TrainingJob
from biphase.text import beside, no_interval, si, sparkline

TAIL_BYTES = 2**16  # read from the end of a live file: some hundreds of steps
RECENT = 30  # steps over which speed is shown
CURVE = 12  # width of their loss curve in characters
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
    holders, failed = living_holders(store), failures(plan, store)
    entries = {}
    for key, job in plan.jobs.items():
        if key in done:
            holder = None if key in whole else holders.get(key)
            try:
                about = read_checkpoint_file(store.readable(store.checkpoints / key))
                entries[key] = JobStatus(job, "done", about["progress"], holder, weights=key in whole)
            except StoreError as wrong:
                entries[key] = JobStatus(job, "failed", None, holder, str(wrong), weights=key in whole)
        elif key in holders:
            entries[key] = JobStatus(job, "running", holder=holders[key])
        elif error := store.fault(store.checkpoints / key) or failed.get(key, {}).get("error", ""):
            entries[key] = JobStatus(job, "failed", error=error)
        else:
            entries[key] = JobStatus(job, "ready" if done.issuperset(job.needs) else "waiting")
    return entries


def living_holders(store: Store) -> dict[str, Holder]:
    """Return the workers that hold jobs, without those known to be dead."""
    holders = Leases(store.leases).holders()
    return {key: holder for key, holder in holders.items() if holder.alive is not False}


# ---------------------------------------------------------------- failures


def _failures_folder(plan: Plan, store: Store) -> Path:
    return store.studies / plan.study.name / "failures"


def note_failure(plan: Plan, store: Store, key: str, error: BaseException) -> None:
    """Record why a job failed; the next `biphase run` tries it again."""
    folder = _failures_folder(plan, store)
    folder.mkdir(parents=True, exist_ok=True)
    lines, now = "".join(traceback.format_exception(error)), time.strftime("%FT%TZ", time.gmtime())
    write_json(folder / f"{key}.json", {"key": key, "error": one_line(error), "traceback": lines, "at": now})


def forget_failure(plan: Plan, store: Store, key: str) -> None:
    (_failures_folder(plan, store) / f"{key}.json").unlink(missing_ok=True)


def failures(plan: Plan, store: Store) -> dict[str, dict[str, Any]]:
    """Return the records of failed jobs by key; a damaged record is ignored."""
    records = {}
    for path in _failures_folder(plan, store).glob("*.json"):
        with contextlib.suppress(StoreError):
            record = read_json(path)
            if isinstance(record, dict) and isinstance(record.get("error"), str):
                records[path.stem] = record
    return records


# ---------------------------------------------------------------- curves and speed


def curve(plan: Plan, store: Store, result: str, holding: bytes = b"") -> list[dict[str, Any]]:
    """Return the metric lines on the path to a result in order of steps, as far as it is computed.

    `holding`: return only lines that contain these bytes. Curves are long, and most commands need few of their lines.
    """
    for job in reversed(plan.path(plan.results[result])):
        folder = store.readable(store.checkpoints / job.key)
        if store.has(folder):  # a checkpoint holds the lines of its whole path
            return read_lines(folder, holding)
    return []


def live_file(plan: Plan, store: Store, key: str) -> Path:
    """Return the file to which a worker appends the metrics of the training job it runs, for `status` and `watch`."""
    return store.studies / plan.study.name / "live" / f"{key}.jsonl"


def latest(plan: Plan, store: Store, job: TrainingJob) -> str:
    """Describe the progress of a running training job: step, loss with its curve, and speed; "" if unknown."""
    lines = _live_lines(plan, store, job)
    if not lines:
        return ""
    first, last = lines[max(0, len(lines) - RECENT)], lines[-1]
    seconds = last["seconds"] - first["seconds"]
    speed = f", {si((last['tokens'] - first['tokens']) / seconds)}tok/s" if seconds > 0 else ""
    loss = "not finite" if last["loss"] is None else f"{last['loss']:.3f}"
    curve = sparkline([line["loss"] for line in lines if line["loss"] is not None], CURVE)
    return f"step {last['step']:,} of {job.span[1]:,}, loss {loss} {curve}{speed}"


def live_line(plan: Plan, store: Store, job: TrainingJob) -> dict[str, Any]:
    """Return the last metrics of a running training job; empty if unknown."""
    lines = _live_lines(plan, store, job)
    return lines[-1] if lines else {}


def _live_lines(plan: Plan, store: Store, job: TrainingJob) -> list[dict[str, Any]]:
    """Return the metrics of the last steps of a running training job, from the end of its live file."""
    try:
        content = read_file(live_file(plan, store, job.key), tail=TAIL_BYTES)
        texts = content.decode(errors="replace").splitlines()
        # The first line may be cut, and the last one incomplete.
        texts = [text for text in texts if text[:1] == "{" and text.endswith("}") and '"loss"' in text]
        lines = [json.loads(text) for text in texts]
        return [line for line in lines if {"step", "seconds", "tokens", "loss"} <= line.keys()]
    except (OSError, ValueError):  # informative only, so errors are ignored
        return []


def heldout(lines: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Return the held-out losses of a curve by step."""
    return {line["step"]: line["heldout"] for line in lines if "heldout" in line}


def measured(plan: Plan, store: Store, result: str) -> dict[int, dict[str, float]]:
    """Return the held-out losses on the path to a result by step."""
    return heldout(curve(plan, store, result, b'"heldout"'))


# ---------------------------------------------------------------- fine-tunings and trials
# grid         a model and a task to train on: all its learning rates and seeds
# fine-tuning  one learning rate and seed of a grid (`FineTuning`)
# trial        the scores of a fine-tuning on one task: the task it was trained on, or one that reuses its model
#
# With `Finetune.discard` a grid has two stages. Which learning rates its second stage has follows from the published
# validation scores of the first and from nothing else. So every worker finds the same rates, at any time, and no file
# records them. Trials of the second stage have the keys that they would have without discarding.


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
    share: float = 1.0  # of the task's steps; below 1: it screens a learning rate and is not reported

    def title(self, plan: Plan) -> str:
        """Describe it for people: which result, task, learning rate and seed."""
        names = [name for name, key in plan.results.items() if key == self.model]
        how = "zero-shot" if self.task.zero_shot else f"lr {self.lr:g} · seed {self.seed}"
        screens = f" · screening, {self.share:.0%} of the steps" if self.share < 1 else ""
        return f"{', '.join(names)} · {self.task.name} · {how}{screens}"


@dataclass(frozen=True)
class TuningGrid:
    """A model and a task that it is trained on: its fine-tunings, as far as their learning rates are known."""

    model: str
    task: Task
    scored: tuple[Task, ...]  # with its models: the task itself, and those that borrow them
    reported: tuple[FineTuning, ...]
    # Of `Finetune.discard`:
    screening: tuple[FineTuning, ...] = ()
    extended: tuple[float, ...] = ()  # screened rates beyond the ends of the study's
    pending: int = 0  # reported fine-tunings whose rates are not known before screening is done

    @property
    def tunings(self) -> tuple[FineTuning, ...]:
        return self.screening + self.reported

    @property
    def screened(self) -> tuple[float, ...]:
        return tuple(sorted({tuning.lr for tuning in self.screening}))


Screened = Callable[[Trial], float | None]  # the validation score of a trial; None: it is not done


def screened_in(store: Store | None) -> Screened:
    """Return a function that reads validation scores from a store; without a store, nothing is done."""

    def score(trial: Trial) -> float | None:
        if store is None or not store.knows(store.trials / trial.key):
            return None
        try:
            return read_trial(store, trial.key, trial.metric)["scores"]["validation"][trial.metric]
        except StoreError:  # `survey_trials` reports it
            return None

    return score


def tuning_grids(
    plan: Plan, screened: Screened, models: Collection[str] | None = None
) -> Iterator[TuningGrid]:
    """Yield the grids of a plan in the order in which models become ready.

    `screened`: validation scores of screening trials; `models`: keys of the models to include; None: all.
    """
    for model in (*plan.roots, *plan.jobs):
        if model in plan.tuned and (models is None or model in models):
            for task, scored in lenders(plan.tuned[model]).items():
                yield tuning_grid(plan, model, task, scored, screened)


def tuning_grid(plan: Plan, model: str, task: Task, scored: Sequence[Task], screened: Screened) -> TuningGrid:
    """Return the grid of a model and a task; `scored`: the tasks that are scored with its models."""
    spec, discard = plan.tuned[model], plan.tuned[model].discard

    def full(rates: Iterable[float]) -> tuple[FineTuning, ...]:
        return tuple(
            _finetuning(plan, model, task, scored, lr, seed) for lr, seed in product(rates, spec.seeds)
        )

    if discard is None:
        return TuningGrid(model, task, tuple(scored), full(spec.lrs))
    if task.zero_shot:  # scores do not depend on the rate
        return TuningGrid(model, task, tuple(scored), full(sorted(spec.lrs)[: discard.keep]))
    seeds, share = discard.seeds, discard.share
    scores: dict[Cell, float | None] = {}

    def short(rates: Iterable[float]) -> tuple[FineTuning, ...]:
        cells = product(rates, seeds)
        tunings = [_finetuning(plan, model, task, (task,), *cell, share) for cell in cells]
        scores.update(((tuning.lr, tuning.seed), screened(tuning.trials[0])) for tuning in tunings)
        return tuple(tunings)

    screening = short(sorted(spec.lrs))
    kept = best_rates(scores, discard.keep)
    extended = extension(sorted(spec.lrs), kept)
    if extended:
        screening += short(extended)
        kept = best_rates(scores, discard.keep)
    pending = 0 if kept else discard.keep * len(spec.seeds)
    return TuningGrid(model, task, tuple(scored), full(kept), screening, extended, pending)


def _finetuning(
    plan: Plan, model: str, task: Task, scored: Iterable[Task], lr: float, seed: int, share: float = 1.0
) -> FineTuning:
    known = model, task.name, lr, seed, share
    if known not in plan.finetunings:  # a verb asks several times, and a key takes 100 µs
        spec = plan.tuned[model]
        key = finetuning_key(model, plan.tasks[task.name], spec, lr=lr, seed=seed, share=share)
        trials = tuple(
            Trial(trial_key(key, plan.tasks[each.name], spec.pool(each, share)), each, spec.metric(each))
            for each in scored
        )
        plan.finetunings[known] = FineTuning(key, model, task, lr, seed, trials, share)
    return plan.finetunings[known]


def finetunings(
    plan: Plan, store: Store | None = None, models: Collection[str] | None = None
) -> Iterator[FineTuning]:
    """Yield the fine-tunings of a plan, grid by grid, in the order in which models become ready.

    With `Finetune.discard`, those that follow from what the `store` holds; without a store, those known beforehand.
    """
    for grid in tuning_grids(plan, screened_in(store), models):
        yield from grid.tunings


def lenders(spec: Finetune) -> dict[Task, list[Task]]:
    """Map each task that is trained on to the tasks that are scored with its model."""
    scored: dict[Task, list[Task]] = {}
    for task in spec.tasks:
        scored.setdefault(spec.lender(task), []).append(task)
    return {task: scored[task] for task in spec.tasks if task in scored}


def finished(tuning: FineTuning, store: Store) -> bool:
    return all(store.knows(store.trials / trial.key) for trial in tuning.trials)


def unfinished(store: Store) -> dict[str, int]:
    """Map fine-tunings that have checkpoints to the step of their last one."""
    steps: dict[str, int] = {}
    for folder in store.unfinished.glob("*-*"):
        key, _, step = folder.name.rpartition("-")
        if store.has(folder) and step.isdecimal():
            steps[key] = max(int(step), steps.get(key, 0))
    return steps


def kept(plan: Plan, store: Store) -> dict[str, tuple[FineTuning, int]]:
    """Return the unfinished fine-tunings of a plan that will resume from a checkpoint, with its step."""
    saved = unfinished(store)
    tunings = (tuning for tuning in finetunings(plan, store) if tuning.key in saved) if saved else ()
    return {tuning.key: (tuning, saved[tuning.key]) for tuning in tunings if not finished(tuning, store)}


def settled(plan: Plan, store: Store, tuned: Count) -> set[str]:
    """Return the checkpoints that need not be computed.

    These are all that are done, except those whose weights are on another machine and needed here.
    """
    done, whole = done_keys(plan, store), keys_with_weights(plan, store)
    metadata_only = done - whole
    if not metadata_only:
        return done
    left = finetunings(plan, store, metadata_only) if tuned.done < tuned.of else ()
    unscored = {tuning.model for tuning in left if not finished(tuning, store)}
    return done - set(plan.left(whole, metadata_only=metadata_only, unscored=unscored))


@dataclass(frozen=True)
class Count:
    """How many of something are done and planned."""

    done: int
    of: int


def count(plan: Plan, store: Store, models: Collection[str] | None = None) -> Count:
    """Count the fine-tunings done and planned, of all models or of `models`."""
    grids = list(tuning_grids(plan, screened_in(store), models))
    every = [tuning for grid in grids for tuning in grid.tunings]
    exists = store.trials.is_dir() or store.metadata.is_dir()
    done = sum(exists and finished(tuning, store) for tuning in every)
    return Count(done, len(every) + sum(grid.pending for grid in grids))


@dataclass(frozen=True)
class TrialSurvey(Count):
    """The fine-tunings of a plan and their status."""

    running: dict[str, tuple[FineTuning, Holder]]
    failed: dict[str, tuple[FineTuning, str]]
    damaged: dict[str, str]  # failed because published scores cannot be read, and why
    kept: dict[str, tuple[FineTuning, int]]  # stopped at this step with a checkpoint; not running, not failed
    trials: dict[str, dict[str, Any]]  # what `score_rows` needs of each trial, by key
    unreadable: dict[str, str]  # trials that exist and cannot be read, and why
    grids: list[TuningGrid]


def survey_trials(plan: Plan, store: Store) -> TrialSurvey:
    grids = list(tuning_grids(plan, screened_in(store)))
    every = {tuning.key: tuning for grid in grids for tuning in grid.tunings}
    holders, noted = living_holders(store), failures(plan, store)
    trials: dict[str, dict[str, Any]] = {}
    unreadable: dict[str, str] = {}
    damaged: dict[str, str] = {}
    done = 0
    left: list[str] = []
    for key, tuning in every.items():
        faults = []
        for trial in tuning.trials:
            if fault := store.fault(store.trials / trial.key):
                faults.append(fault)
            elif store.knows(store.trials / trial.key):
                try:
                    about = read_trial(store, trial.key, trial.metric)
                    trials[trial.key] = {name: about[name] for name in KEPT if name in about}
                except StoreError as wrong:
                    unreadable[trial.key] = str(wrong)
                    faults.append(str(wrong))
        if faults:
            damaged[key] = faults[0]
        if not finished(tuning, store):
            left.append(key)
        elif not faults:
            done += 1
    errors = {key: noted[key]["error"] for key in left if key in noted} | damaged
    running = {key: (every[key], holders[key]) for key in left if key in holders}
    failed = {key: (every[key], errors[key]) for key in every if key in errors and key not in running}
    resumable = kept(plan, store)
    stopped = {key: resumable[key] for key in resumable if key not in running and key not in failed}
    pending = sum(grid.pending for grid in grids)
    return TrialSurvey(
        done,
        len(every) + pending,
        running,
        failed,
        damaged,
        stopped,
        trials,
        unreadable,
        grids,
    )


def read_trial(store: Store, key: str, metric: str = "") -> dict[str, Any]:
    """Return the validated metadata of a trial.

    Raises a `StoreError` if it is damaged, or scored by another metric than `metric`.
    """
    folder = store.readable(store.trials / key)
    about = read_trial_file(folder)
    if metric and about["metric"] != metric:
        raise StoreError(
            f"{folder} was scored by {about['metric']}, and {metric} is planned; remove it and run the study again"
        )
    return about


def trial_keys(store: Store, digits: str = "") -> list[str]:
    """Return the sorted keys of all trials of a store that begin with `digits`."""
    metadata = store.metadata / store.trials.name
    return sorted({*store.named(store.trials, digits), *store.named(metadata, digits)})


# ---------------------------------------------------------------- selection by validation
# Two rules, both reported: per seed, the rate that was best for it (protocol of arXiv:2507.00994), and one rate for all seeds, with
# the best mean. Ties go to the lowest rate. No choice is made from an incomplete grid, since the missing fine-tuning
# might have been the best. Test scores are not among the inputs.


Cell = tuple[float, int]  # (learning rate, seed)


@dataclass(frozen=True)
class Choice:
    by_mean: float
    by_seed: dict[int, float]


def choose(validation: Mapping[Cell, float]) -> Choice | None:
    """Choose learning rates from a full grid of validation scores; None if some are missing."""
    rates = sorted({lr for lr, _ in validation})
    seeds = sorted({seed for _, seed in validation})
    if not rates or len(validation) != len(rates) * len(seeds):
        return None

    def mean(lr: float) -> float:
        # `fsum` is exact, so that the order of seeds does not break ties.
        return math.fsum(validation[lr, seed] for seed in seeds) / len(seeds)

    return Choice(
        by_mean=max(rates, key=mean),
        by_seed={seed: max(rates, key=lambda lr, seed=seed: validation[lr, seed]) for seed in seeds},
    )


# Early discarding (`Finetune.discard`) ranks the rates of a grid by their mean over screening seeds, which are not
# reported. A rate at the end of the grid that is kept may have a better one beyond it, so one more is screened there.
# Each end is extended once: a model that has learnt nothing ranks rates by noise, and would go on for ever.


RATE_DIGITS = 3  # significant digits of a rate that extends a grid


def best_rates(validation: Mapping[Cell, float | None], keep: int) -> tuple[float, ...]:
    """Return the `keep` rates with the best mean validation scores, ascending; none while a score is missing.

    Of equal rates the first is kept: the lowest of the study's grid, and that grid before its extension.
    """
    scores: dict[float, list[float]] = defaultdict(list)
    for (lr, _), score in validation.items():
        if score is None:
            return ()
        scores[lr].append(score)
    ranked = sorted(scores, key=lambda lr: -math.fsum(scores[lr]) / len(scores[lr]))
    return tuple(sorted(ranked[:keep]))


def extension(rates: Sequence[float], kept: Collection[float]) -> tuple[float, ...]:
    """Return a rate beyond each end of an ascending grid that was kept, as far from it as its neighbour is."""
    ends = ((rates[0], rates[1]), (rates[-1], rates[-2])) if len(rates) > 1 else ()
    beyond = (float(f"{end**2 / neighbour:.{RATE_DIGITS}g}") for end, neighbour in ends if end in kept)
    return tuple(lr for lr in beyond if lr < 1)


# ---------------------------------------------------------------- scores


CONFIDENCE = 0.95
ROUNDING = 1e-12  # values that differ by less count as equal
KEPT = ("metric", "scores", "seconds", "baselines", "constant")  # fields of a trial that a row needs


@dataclass(frozen=True)
class Selected:
    """Test scores of every seed at the learning rates that one rule has selected."""

    lr: float | dict[int, float]  # one rate for all seeds, or one for each
    test: list[float]
    constant: list[str]  # by seed: the prediction, if all test examples got the same, else ""


@dataclass(frozen=True)
class Row:
    """One model on one task; scores are None until every learning rate and seed is done.

    Trials of earlier versions have no baselines and do not record whether their predictions are constant.
    """

    result: str
    task: str
    metric: str
    done: int
    of: int
    seconds: float  # of training and scoring, over all trials
    by_mean: Selected | None = None
    by_seed: Selected | None = None
    metrics: dict[str, list[float]] | None = None  # all test metrics at the rate chosen by the mean
    baselines: dict[str, dict[str, Any]] | None = None  # by name and metric: a description, and scores

    @property
    def known_baselines(self) -> list[tuple[str, float]]:
        """Descriptions and test scores of the baselines that have the selection metric."""
        known = [baseline.get(self.metric) for baseline in (self.baselines or {}).values()]
        return [(score["what"], score["test"]) for score in known if score]


def score_rows(plan: Plan, trials: Mapping[str, dict[str, Any]]) -> list[Row]:
    """Return a row for every result × task of a plan; `trials`: those that are done, of a `TrialSurvey`."""
    cells: dict[tuple[str, str], dict[Cell, dict[str, Any] | None]] = defaultdict(dict)
    pending: dict[tuple[str, str], int] = {}

    def screened(trial: Trial) -> float | None:
        return trials[trial.key]["scores"]["validation"][trial.metric] if trial.key in trials else None

    for grid in tuning_grids(plan, screened):
        for tuning in grid.reported:
            for trial in tuning.trials:
                cells[tuning.model, trial.task.name][tuning.lr, tuning.seed] = trials.get(trial.key)
        pending |= {(grid.model, task.name): grid.pending for task in grid.scored}
    return [
        _row(name, task.name, cells[model, task.name], pending[model, task.name])
        for name, model in plan.results.items()
        if model in plan.tuned
        for task in plan.tuned[model].tasks
    ]


def _row(result: str, task: str, cells: dict[Cell, dict[str, Any] | None], pending: int) -> Row:
    done = {cell: trial for cell, trial in cells.items() if trial is not None}
    seconds = sum(sum(trial["seconds"].values()) for trial in done.values())
    metric = next((trial["metric"] for trial in done.values()), "")
    baselines = next((trial["baselines"] for trial in done.values() if "baselines" in trial), None)
    row = Row(result, task, metric, len(done), len(cells) + pending, seconds, baselines=baselines)
    choice = choose({cell: trial["scores"]["validation"][metric] for cell, trial in done.items()})
    if len(done) < len(cells) or choice is None:
        return row
    seeds = sorted(choice.by_seed)

    def selected(lr: float | dict[int, float]) -> Selected:
        trials = [done[lr[seed] if isinstance(lr, dict) else lr, seed] for seed in seeds]
        return Selected(
            lr,
            [trial["scores"]["test"][metric] for trial in trials],
            [trial.get("constant", {}).get("test", "") for trial in trials],
        )

    tests = {cell: trial["scores"]["test"] for cell, trial in done.items()}
    shared = [name for name in next(iter(tests.values())) if all(name in test for test in tests.values())]
    metrics = {name: [tests[choice.by_mean, seed][name] for seed in seeds] for name in shared}
    return replace(row, by_mean=selected(choice.by_mean), by_seed=selected(choice.by_seed), metrics=metrics)


def half_width(values: list[float]) -> float | None:
    """Return half of the 95% t-interval of a mean over seeds; None for one seed, or if all values are equal."""
    if len(values) < 2 or max(values) - min(values) <= ROUNDING:
        return None
    from scipy.special import stdtrit  # scipy.stats takes a second to import

    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * math.sqrt(variance / len(values))


def with_interval(values: list[float], metric: str = "") -> str:
    """Format a mean in percent with its interval, such as 84.89 ± 0.18, clipped to the metric's range, or why it has none."""
    mean, half = 100 * sum(values) / len(values), half_width(values)
    if half is None:
        return f"{mean:.2f} ({no_interval(len(values))})"
    least, _ = RANGES.get(metric, (0.0, 1.0))
    return f"{mean:.2f} {beside(mean, mean - 100 * half, mean + 100 * half, 100 * least)}"


def scores_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the rows for programs."""
    return [
        {
            "result": row.result,
            "task": row.task,
            "metric": row.metric,
            "done": row.done,
            "of": row.of,
            "seconds": round(row.seconds, 3),
            "baselines": row.baselines,
            "metrics": row.metrics,
            **_selected_json(row.by_mean, ""),
            **_selected_json(row.by_seed, "_by_seed"),
        }
        for row in rows
    ]


def _selected_json(selected: Selected | None, suffix: str) -> dict[str, Any]:
    if selected is None:
        values = dict.fromkeys(("lr", "test", "half_width", "constant"))
        values["no_interval"] = "some learning rates or seeds are not done"
    else:
        lr, half = selected.lr, half_width(selected.test)
        values = {
            "lr": {str(seed): rate for seed, rate in lr.items()} if isinstance(lr, dict) else lr,
            "test": selected.test,
            "half_width": half,
            "no_interval": no_interval(len(selected.test)) if half is None else None,
            "constant": selected.constant,
        }
    return {f"{name}{suffix}": value for name, value in values.items()}
