"""The scores of a study as arrays: every trial of a plan, read from the store. No torch.

`gather` reads all trials of a plan into an `Evidence`, which holds one `ScoreGrid` (learning rates × seeds) for each
result and task. `Resamples` computes each model's score on bootstrap resamples of the test examples.

A missing trial is NaN and is never imputed. For each fine-tuning seed the learning rate is chosen by the validation
scores of that seed alone, once all its planned rates are there. The scores of two seeds are therefore two independent
runs of the whole procedure, selection included, and a half-finished study can be reported on its complete seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from biphase.errors import StoreError, one_line
from biphase.metadata import VALUES
from biphase.report.pretraining import JobCost, RunSummary, job_costs, run_summary
from biphase.report.recipes import Model, Published, models
from biphase.report.statistics.intervals import DRAWS, interval, kept, resample
from biphase.specs import Family, Task
from biphase.specs.tasks import ARRAYS, FAMILIES, RANGES
from biphase.store import Store, read_verified
from biphase.study import ledger
from biphase.study.ledger import FineTuning, choose, read_trial, screened_in, tuning_grids
from biphase.study.plan import Plan

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Baseline:
    """A reference score on the test part, such as the majority class, that any model should beat."""

    what: str
    test: float
    validation: float = math.nan


@dataclass(frozen=True)
class ScoreGrid:
    """The scores of one result on one task.

    Arrays have the shape (learning rates, seeds) of the study. NaN: the trial is missing or not planned.
    """

    result: str
    task: Task
    metric: str  # the metric that chooses the learning rate
    lrs: tuple[float, ...]
    seeds: tuple[int, ...]
    keys: tuple[tuple[str, ...], ...]  # trial keys as [rate][seed]; empty: not planned
    validation: dict[str, Floats]
    test: dict[str, Floats]
    seconds: Floats
    examples: int  # number of examples in the test part
    machines: tuple[dict[str, Any], ...]  # the machine record of every finished trial
    # trial key → why it is missing, where that is known
    missing: dict[str, str] = field(default_factory=dict)
    baselines: dict[str, dict[str, Baseline]] = field(default_factory=dict)  # by name, then by metric
    # (rate index, seed index) of trials that predict the same for every test example
    constant: frozenset[tuple[int, int]] = frozenset()
    # Of a study that discards learning rates early (`Finetune.discard`):
    screened: tuple[float, ...] = ()  # the rates that were screened, ascending; empty: none was discarded
    extended: tuple[float, ...] = ()  # those of them beyond the ends of the study's grid
    screening_seconds: float = 0.0
    pending: int = 0  # trials whose learning rates are not known before screening is done

    @property
    def done(self) -> int:
        """The number of finished trials."""
        return int(np.isfinite(self.seconds).sum())

    @property
    def of(self) -> int:
        """The number of planned trials."""
        return sum(bool(key) for row in self.keys for key in row) + self.pending

    @cached_property
    def rates(self) -> frozenset[int]:
        """The indices of the planned learning rates."""
        return frozenset(at for at, row in enumerate(self.keys) if any(row))

    @cached_property
    def chosen(self) -> dict[int, int]:
        """Map each seed to the index of its chosen rate; seeds with an unfinished rate are left out."""
        return self.chosen_among(self.rates)

    def chosen_among(self, rates: frozenset[int]) -> dict[int, int]:
        """As `chosen`, among some of the planned rates."""
        found = {}
        for column, seed in enumerate(self.seeds if self.metric in self.validation else ()):
            planned = [at for at in sorted(rates) if self.keys[at][column]]
            values = {at: float(self.validation[self.metric][at, column]) for at in planned}
            scores = {(self.lrs[at], seed): value for at, value in values.items() if math.isfinite(value)}
            choice = choose(scores) if scores and len(scores) == len(planned) else None
            if choice:
                found[seed] = self.lrs.index(choice.by_seed[seed])
        return found

    @property
    def constant_seeds(self) -> int:
        """The number of seeds whose chosen trial predicts the same for every test example."""
        return sum((self.chosen.get(seed), at) in self.constant for at, seed in enumerate(self.seeds))

    def at_chosen(
        self, part: dict[str, Floats], metric: str = "", rates: frozenset[int] | None = None
    ) -> Floats:
        """The score of each seed at its chosen rate, of all planned ones or of `rates`; NaN where one is unfinished."""
        scores = np.full(len(self.seeds), np.nan)
        values = part.get(metric or self.metric)
        chosen = self.chosen if rates is None or rates == self.rates else self.chosen_among(rates)
        for column, seed in enumerate(self.seeds):
            if values is not None and seed in chosen:
                scores[column] = values[chosen[seed], column]
        return scores


def by_family(tasks: dict[str, Task]) -> dict[Family, tuple[str, ...]]:
    """The names of tasks by family, in the order of `FAMILIES`; families without tasks are left out."""
    names = {f: tuple(name for name, task in tasks.items() if task.family == f) for f in FAMILIES}
    return {family: some for family, some in names.items() if some}


@dataclass(frozen=True)
class Evidence:
    """Everything a report is computed from: the plan, the store, and all scores."""

    plan: Plan
    store: Store
    models: dict[str, Model]
    tasks: dict[str, Task]
    grids: dict[tuple[str, str], ScoreGrid]  # by (result, task)
    unreadable: dict[str, str]  # trial key → why its files cannot be used; grows as values are read
    bare: frozenset[str] = frozenset()  # keys of trials imported as metadata only, without per-example values
    published: Published = field(default_factory=Published)  # numbers of papers for the same recipes

    @cached_property
    def job_costs(self) -> list[JobCost]:
        """The cost of every training job, in the order of computation."""
        return job_costs(self.plan, self.store)

    @cached_property
    def runs(self) -> list[RunSummary]:
        """A summary of every result, in the order of the plan."""
        by_key = {cost.key: cost for cost in self.job_costs}
        models = {result: model.name for model in self.models.values() for result in model.results}
        found = []
        for name in (name for name in self.plan.results if name in models):
            grids = [self.grids[name, task] for task in self.tasks]
            trials = sum(grid.done for grid in grids), sum(grid.of for grid in grids)
            found.append(run_summary(self.plan, self.store, name, models[name], trials, by_key))
        return found

    @property
    def seeds(self) -> tuple[int, ...]:
        """The fine-tuning seeds, in the order of the columns of every array."""
        finetune = self.plan.study.finetune
        return tuple(sorted(finetune.seeds)) if finetune else ()

    def rates(self, task: str) -> frozenset[int]:
        """The indices of the learning rates that any result has on a task."""
        grids = (grid for (_, name), grid in self.grids.items() if name == task)
        return frozenset().union(*(grid.rates for grid in grids))

    @property
    def families(self) -> dict[Family, tuple[str, ...]]:
        return by_family(self.tasks)

    def metric(self, task: str) -> str:
        """The metric that chooses the learning rates of a task."""
        finetune = self.plan.study.finetune
        return finetune.metric(self.tasks[task]) if finetune else ""

    def least_score(self, tasks: Iterable[str]) -> float:
        """The lowest mean score that tasks can have: 0, or below it where some are scored by a correlation."""
        lows = [RANGES.get(self.metric(task), (0.0, 1.0))[0] for task in tasks]
        return sum(lows) / max(1, len(lows))

    @property
    def count(self) -> tuple[int, int]:
        """The number of trials done, and of trials planned."""
        return sum(grid.done for grid in self.grids.values()), sum(grid.of for grid in self.grids.values())

    def scores(self, model: Model, task: str, metric: str = "", *, part: str = "test") -> Floats:
        """Scores at the rates chosen on validation, as (pretraining seeds, fine-tuning seeds). NaN: missing."""
        grids = [self.grids[result, task] for result in model.results]
        parts = [grid.test if part == "test" else grid.validation for grid in grids]
        rows = np.stack([grid.at_chosen(some, metric) for grid, some in zip(grids, parts, strict=True)])
        return rows if part == "test" else self.choosing(model, rows)

    def choosing(self, model: Model, rows: Floats) -> Floats:
        """Validation scores, a row for each pretraining seed; NaN for those that `Study.confirm` keeps from choices."""
        kept = np.isin(model.seeds, self.plan.study.confirm)
        return np.where(kept[:, None], np.nan, rows)

    def on(self, model: Model, tasks: Iterable[str], metric: str = "", *, part: str = "test") -> Floats:
        """The unweighted mean over tasks for each seed; NaN where any task is missing."""
        return np.mean([self.scores(model, task, metric, part=part) for task in tasks], axis=0)

    def by_rate(self, model: Model, task: str, metric: str = "") -> Floats:
        """Scores at every rate, as (pretraining seeds, learning rates, fine-tuning seeds). NaN: missing."""
        grids = [self.grids[result, task] for result in model.results]
        blank = np.full((len(grids[0].lrs), len(grids[0].seeds)), np.nan)
        return np.stack([grid.test.get(metric or grid.metric, blank) for grid in grids])

    def examples(self, model: Model, task: str) -> int:
        """The number of examples in a task's test part; 0 if no trial is finished."""
        return max(self.grids[result, task].examples for result in model.results)

    def values(self, model: Model, task: str, metric: str = "") -> NDArray[np.float32] | None:
        """Per-example values at the chosen rates: (pretraining seeds, fine-tuning seeds, examples[, counts]).

        Rows of incomplete seeds, and of seeds whose values cannot be read, are NaN. A metric of `ARRAYS` has several
        numbers for each example, such as the three counts of entity F1 (correct, predicted, true); every other metric
        has one, whose mean over examples is the score.
        None: no seed has values.
        """
        rows: list[list[NDArray[np.float32] | None]] = []
        for result in model.results:
            grid = self.grids[result, task]
            keys = [
                grid.keys[grid.chosen[seed]][column] if seed in grid.chosen else ""
                for column, seed in enumerate(grid.seeds)
            ]
            name = metric or grid.metric
            rows.append([self._values(key, name, grid.examples) if key else None for key in keys])
        known = next((values for row in rows for values in row if values is not None), None)
        if known is None:
            return None
        blank = np.full_like(known, np.nan)
        return np.stack([np.stack([blank if values is None else values for values in row]) for row in rows])

    def _values(self, key: str, metric: str, examples: int) -> NDArray[np.float32] | None:
        """The per-example values of one trial; None if it has none, or none that can be used (`unreadable`)."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        if key in self.bare:
            return None
        array, numbers = ARRAYS.get(metric, (metric, 0))
        name, folder = f"test/{array}", self.store.trials / key
        try:
            values = load(read_verified(folder, VALUES)).get(name)
        except StoreError as wrong:
            problem = one_line(wrong)
        except (
            SafetensorError,
            KeyError,
            TypeError,
            ValueError,
        ) as wrong:  # a dtype that numpy does not know
            reason = one_line(wrong)
            problem = f"{folder / VALUES} cannot be read ({reason}); remove {folder} and run the study again"
        else:
            if values is None:
                return None
            if values.shape == ((examples, numbers) if numbers else (examples,)):
                return values.astype(np.float32, copy=False)
            problem = f"{key}: values of {name} in the shape {values.shape} for {examples:,} examples"
        self.unreadable[key] = _inside(self.store, problem)
        return None


def gather(plan: Plan, store: Store, published: Published | None = None) -> Evidence:
    """Read all scores of a plan from a store. `published`: numbers to show beside them."""
    finetune = plan.study.finetune
    tasks = {task.name: task for task in finetune.tasks} if finetune else {}
    tunings = list(tuning_grids(plan, screened_in(store)))
    kept_rates = {training.lr for each in tunings for training in each.reported}
    lrs = tuple(sorted({*finetune.lrs, *kept_rates})) if finetune else ()
    seeds = tuple(sorted(finetune.seeds)) if finetune else ()
    known = models(plan)
    names = {plan.results[result]: result for model in known.values() for result in model.results}
    trials: dict[tuple[str, str], list[Trial]] = {
        (result, task): [] for result in names.values() for task in tasks
    }
    unreadable: dict[str, str] = {}
    failed = ledger.failures(plan, store)
    bare: set[str] = set()
    for training in (training for each in tunings for training in each.reported):
        at = lrs.index(training.lr), seeds.index(training.seed)
        note = failed.get(training.key)
        for trial in training.trials:
            content = _read(store, trial.key, trial.metric, unreadable)
            why = unreadable.get(trial.key)
            if content is None and why is None and isinstance(note, dict):
                why = str(note.get("error", ""))
            if content is not None and not store.has(store.trials / trial.key):
                bare.add(trial.key)
            trials[names[training.model], trial.task.name].append((at, trial.key, content, why))
    grids = {
        (result, task): _grid(result, tasks[task], some, lrs, seeds)
        for (result, task), some in trials.items()
    }
    for each in tunings if finetune and finetune.discard else ():
        seconds = _screening_seconds(store, each.screening, unreadable)
        for task in each.scored:
            place = names[each.model], task.name
            grids[place] = replace(
                grids[place],
                screened=each.screened,
                extended=each.extended,
                screening_seconds=seconds if task == each.task else 0.0,
                pending=each.pending,
            )
    # A trial of an earlier version lacks some baselines, which are those of its task.
    for task in tasks:
        of_task = [place for place in grids if place[1] == task]
        every = {name: one for place in of_task for name, one in grids[place].baselines.items()}
        grids |= {place: replace(grids[place], baselines=every) for place in of_task}
    return Evidence(plan, store, known, tasks, grids, unreadable, frozenset(bare), published or Published())


# (rate index, seed index); key; what its file holds, if it is finished; why it is missing, if that is known
Trial = tuple[tuple[int, int], str, dict[str, Any] | None, str | None]
# The fields of a trial that are kept in memory; the loss curves of 18,000 trials would fill it.
KEPT = ("metric", "scores", "examples", "seconds", "machine", "baselines", "constant")


def _inside(store: Store, text: str) -> str:
    """Make the paths in a message relative to the store; a report must not reveal where the store is."""
    return text.replace(f"{store.root}/", "")


def _read(store: Store, key: str, metric: str, unreadable: dict[str, str]) -> dict[str, Any] | None:
    """Read a finished trial; None if it is missing or invalid. Invalid trials are recorded in `unreadable`."""
    fault = None
    if store.knows(store.trials / key):
        try:
            content = read_trial(store, key, metric)
            return {name: content[name] for name in KEPT if name in content}
        except StoreError as wrong:
            fault = str(wrong)
    else:
        fault = store.fault(store.trials / key)
    if fault:
        unreadable[key] = _inside(store, fault)
    return None


def _screening_seconds(store: Store, screening: Iterable[FineTuning], unreadable: dict[str, str]) -> float:
    """The time that screening took. Trials that cannot be read are added to `unreadable`."""
    trials = [trial for training in screening for trial in training.trials]
    contents = [_read(store, trial.key, trial.metric, unreadable) for trial in trials]
    return sum(sum(content["seconds"].values()) for content in contents if content)


def _grid(
    result: str, task: Task, trials: list[Trial], lrs: tuple[float, ...], seeds: tuple[int, ...]
) -> ScoreGrid:
    """Put the trials of one result on one task into arrays."""
    shape = len(lrs), len(seeds)
    validation: dict[str, Floats] = {}
    test: dict[str, Floats] = {}
    seconds = np.full(shape, np.nan)
    keys = [[""] * len(seeds) for _ in lrs]
    for (row, column), key, _, _ in trials:
        keys[row][column] = key
    done = [(at, content) for at, _, content, _ in trials if content is not None]
    for at, content in done:
        seconds[at] = sum(content["seconds"].values())
        for part, scores in (("validation", validation), ("test", test)):
            for name, value in content["scores"][part].items():
                scores.setdefault(name, np.full(shape, np.nan))[at] = value
    first = done[0][1] if done else {"metric": "", "examples": {"test": 0}}
    baselines = next((content["baselines"] for _, content in done if content.get("baselines")), {})
    return ScoreGrid(
        result=result,
        task=task,
        metric=first["metric"],
        lrs=lrs,
        seeds=seeds,
        keys=tuple(map(tuple, keys)),
        validation=validation,
        test=test,
        seconds=seconds,
        examples=first["examples"]["test"],
        machines=tuple(content["machine"] for _, content in done),
        missing={key: why for _, key, _, why in trials if why is not None},
        baselines={
            name: {
                metric: Baseline(one["what"], float(one["test"]), float(one["validation"]))
                for metric, one in by_metric.items()
            }
            for name, by_metric in baselines.items()
        },
        constant=frozenset(at for at, content in done if content.get("constant", {}).get("test")),
    )


# ---------------------------------------------------------------- resampling
# Per-example values are read for one task at a time and dropped; only the resampled scores are kept. All models of a
# task are scored on the same resamples, so the resampled scores of two models may be subtracted.


class Resamples:
    """Bootstrap scores of all models, computed once for each task and metric."""

    def __init__(self, evidence: Evidence, draws: int = DRAWS) -> None:
        self._evidence = evidence
        self._draws = draws
        self._known: dict[tuple[str, str], dict[str, Floats]] = {}

    def of(self, model: Model, tasks: Iterable[str], metric: str = "") -> Floats | None:
        """A model's mean over tasks as (resamples, pretraining seeds, fine-tuning seeds), at the chosen rates.

        NaN: that seed is missing. None: no seed of the model has per-example values on some task.
        """
        tables = [self._of_task(task, metric).get(model.name) for task in tasks]
        known = [table for table in tables if table is not None]
        return np.mean(known, axis=0) if len(known) == len(tables) else None

    def _of_task(self, task: str, metric: str) -> dict[str, Floats]:
        if (task, metric) in self._known:
            return self._known[task, metric]
        values = {
            model.name: found
            for model in self._evidence.models.values()
            if (found := self._evidence.values(model, task, metric)) is not None
        }
        tables = self._known[task, metric] = {}
        # Only rows with equally many examples and counts can share resamples.
        for shape in sorted({one.shape[2:] for one in values.values()}):
            alike = {name: one for name, one in values.items() if one.shape[2:] == shape}
            rows = [one.reshape(-1, *shape) for one in alike.values()]
            name = metric or self._evidence.metric(task)
            drawn = resample(np.concatenate(rows), seed=task, draws=self._draws, metric=name)
            ends = np.cumsum([len(one) for one in rows])
            for (name, one), some in zip(alike.items(), np.split(drawn, ends[:-1], axis=1), strict=True):
                tables[name] = some.reshape(-1, *one.shape[:2])
        return tables


def over_examples(
    resampled: Floats | None, matrix: Floats, examples: Iterable[int]
) -> tuple[float, float] | str:
    """The 95% interval of a mean over test examples; or, as a string, why there is none.

    `resampled`: as `Resamples.of` returns it; `matrix`: the same for the test set itself, whose complete seeds count;
    `examples`: of all test sets, of which the smallest gives the degrees of freedom.
    """
    if resampled is None:
        return "no values by example in this store"
    rows, columns = kept(matrix)
    means = resampled[:, rows][:, :, columns].mean(axis=(1, 2))
    fewest = min(examples)
    if fewest < 2:
        return "fewer than two test examples"
    if not np.isfinite(means).all():
        return "no values by example of some seeds in this store"
    low, high = interval(means, np.asarray(matrix[np.ix_(rows, columns)].mean()), examples=fewest)
    return (float(low), float(high)) if np.isfinite(low) else "the same score on every redrawn test set"
