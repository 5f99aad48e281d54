"""Predicted seconds of a plan: on one device, and on several workers.

`bill` prices every training job and fine-tuning of a plan on a device: from its measured speeds (`study.devices`), or,
if it was not measured, training jobs by their FLOPs at a share of its peak. `elapsed` simulates the plan on several
workers. Plain arithmetic throughout.

    training job   steps × seconds per step, the held-out evaluations, and a fixed cost to save and to begin the next
    fine-tuning    steps × seconds per step, scoring, and a fixed cost to start one and publish its scores
    worker         its start, and what its first fine-tuning prepares; part of the elapsed time only

Not counted: tokenizing a corpus, downloads, compiling a model, and waiting for other processes. What has no price is left out and named in `notes`: a precision that was not measured, a model of unknown shape, a dataset of
unknown text lengths.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from biphase.errors import BiphaseError
from biphase.presets import DEVICES
from biphase.protocol import FINETUNE_TOKENS, heldout_objectives, input_length, token_share
from biphase.specs import Config, Finetune, Pretrain, Size, Task
from biphase.specs.tasks import FAMILIES
from biphase.store import Store
from biphase.study.costs import (
    CorpusTokens,
    ModelShape,
    Sizes,
    TextLengths,
    flops_of,
    peak_of,
    shape_of,
    sizes_of,
    texts_of,
)
from biphase.study.devices import (
    PLANNED_DEVICE,
    PricedDevice,
    Speeds,
    at_hand,
    device_named,
    known_devices,
    measure_into,
)
from biphase.study.ledger import finished, lenders, screened_in, tuning_grids
from biphase.study.plan import Plan, TrainingJob
from biphase.text import counted

EFFICIENCY = 0.4  # share of a device's peak assumed where nothing was measured
LONG = 24.0  # hours on a CPU above which a GPU is suggested
DOUBTFUL = 0.15  # if a fit is off by more than this, other work probably ran during the measurement
# Fixed costs, measured on an H200 and its host: docs/performance.md.
# From the last step of a training job to the first of the next, besides forward passes over held-out text and saving.
JOB_SECONDS = 0.3
# Bytes per parameter, of weights and optimizer state in fp32; and how many are written and hashed a second.
SAVED_BYTES = (12, 5e8)
START_SECONDS = 12.0  # of a worker: imports, and kernels for its first step
# Of a worker's first fine-tuning: imports, reading and tokenizing tasks, kernels, and lexical baselines, which only the
# first worker of a store computes: an upper bound for the others.
FIRST_TUNING_SECONDS = 40.0
TRIAL_SECONDS = 0.3  # to restore weights, initialize a head, and publish scores
UNKNOWN_VOCAB = 2**17  # assumed where a vocabulary is unknown; its exact size hardly matters if it is large

Grid = tuple[str, str, float]  # (key of a model, name of a task, share of the task's steps)


@dataclass(frozen=True)
class Bill:
    """What a plan takes on one device; what is unknown is missing here and named in `notes`."""

    device: str
    efficiency: float | None = None  # if training jobs are priced by FLOPs: their share of the device's peak
    machine: PricedDevice | None = None  # if all is priced by measured speeds
    jobs: dict[str, float] = field(default_factory=dict)  # seconds of each training job
    tunings: dict[Grid, float] = field(default_factory=dict)  # seconds of one fine-tuning
    grids: dict[Grid, int] = field(
        default_factory=dict
    )  # number of fine-tunings, also of those without a price
    left: dict[Grid, int] = field(default_factory=dict)  # number of fine-tunings that are not done
    precisions: tuple[str, ...] = ()  # the precisions whose measured speeds were used
    notes: tuple[str, ...] = ()
    unmeasured: tuple[str, ...] = ()  # notes about precisions that were not measured
    texts: tuple[CorpusTokens, ...] = ()  # the corpora that the plan reads
    workers: int = 1  # each with its own device
    dated: bool = False  # the number of workers was asked for: say when the study would be done

    def pretraining(self, keys: Collection[str] | None = None) -> float:
        """Return the hours of the training jobs `keys`, or of all, as far as they have a price."""
        return sum(seconds for key, seconds in self.jobs.items() if keys is None or key in keys) / 3600

    def hours(self, keys: Collection[str]) -> float | None:
        """Return the hours of the training jobs `keys`; None if some have no price."""
        return self.pretraining(keys) if set(keys) <= self.jobs.keys() else None

    def finetuning(self, counts: Mapping[Grid, int]) -> float:
        """Return the hours of `counts` fine-tunings of each grid."""
        return sum(seconds * counts.get(grid, 0) for grid, seconds in self.tunings.items()) / 3600

    def elapsed(self, plan: Plan, left: Collection[str]) -> Elapsed | None:
        """Simulate the training jobs `left` and the fine-tunings that are not done; None if a job has no price."""
        jobs = {key: self.jobs[key] for key in left if key in self.jobs}
        if len(jobs) < len(left) or not (jobs or self.left):
            return None
        fixed = (START_SECONDS, FIRST_TUNING_SECONDS) if self.machine else (0.0, 0.0)
        return elapsed(plan, jobs, self.tunings, self.left, self.workers, *fixed)

    def cost(self, plan: Plan, price: float) -> dict[str, Any] | None:
        """Return what the plan costs at `price` per hour of one device, and each run; None without any price.

        What runs share counts for the first.
        """
        hours: defaultdict[str, float] = defaultdict(float)
        for key, seconds in self.jobs.items():
            hours[plan.jobs[key].run.name] += seconds / 3600
        for grid, seconds in self.tunings.items():
            run = (plan.jobs.get(grid[0]) or plan.roots[grid[0]]).run
            hours[run.name] += seconds * self.grids[grid] / 3600
        if not price or not hours:
            return None
        return {
            "an_hour": price,
            "pretraining": self.pretraining() * price,
            "finetuning": self.finetuning(self.grids) * price,
            "runs": {name: count * price for name, count in hours.items()},
        }

    def prices_json(self, left: Collection[str]) -> dict[str, Any] | None:
        """Return the prices by measured speeds for programs; `left`: the training jobs that are not done."""
        if self.machine is None:
            return None
        origins = {
            name: {"date": each.date, "torch": each.torch, "shipped": each.shipped}
            for name, each in self.machine.measurements.items()
            if name in self.precisions
        }
        return {
            "measured": {"device": self.machine.title, "precisions": origins},
            "pretraining_hours": self.pretraining(),
            "finetuning_hours": self.finetuning(self.grids),
            "pretraining_hours_left": self.pretraining(left),
            "finetuning_hours_left": self.finetuning(self.left),
        }


def bill(
    plan: Plan,
    store: Store,
    device: str,
    efficiency: float | None,
    *,
    tuned: int,
    workers: int = 0,
) -> Bill:
    """Price a plan on `device`, by default the one of this machine.

    If `efficiency` is given, hours are FLOPs at that share of the peak, even where speeds were measured. `tuned`: how
    many fine-tunings are done. `workers`: how many devices were asked for; 0: one.
    """
    here = "" if device else at_hand()
    if here and here not in known_devices(store):
        why = f"{here}, the GPU here, was not measured, so there are no hours. Type: {measure_into(store)}. Or: --device {PLANNED_DEVICE}"
        made = Bill(here, notes=(why,))
    else:
        made = _bill(plan, store, device or here, efficiency)
    if tuned and made.machine:
        made = replace(made, left=left_of(plan, store))
    notes = (*made.notes, *made.unmeasured)
    if here == "cpu" and (made.hours(plan.jobs) or 0.0) > LONG:
        notes = (*notes, f"these are hours of the processor here; of a GPU: --device {PLANNED_DEVICE}")
    texts = tuple(texts_of(plan, store))
    return replace(made, notes=notes, texts=texts, workers=max(1, workers), dated=workers > 0)


def _bill(plan: Plan, store: Store, device: str, efficiency: float | None) -> Bill:
    machine = device_named(device, store)
    if efficiency is not None:
        return price_by_flops(plan, device, efficiency)
    if machine is None:
        without = ", without fine-tunings" if plan.study.finetune else ""
        why = f"{device} was not measured: hours are FLOPs at a share of its peak{without}. There, type: {measure_into(store)}"
        return price_by_flops(plan, device, EFFICIENCY, why)
    made = price(plan, machine)
    if plan.jobs and not made.precisions and made.unmeasured and device in DEVICES:
        why = f"hours are FLOPs at a share of the peak: steps like these were not measured on {device}"
        by_flops = price_by_flops(plan, device, EFFICIENCY, why, *made.notes)
        return made if by_flops.hours(plan.jobs) is None else by_flops
    return made


def price_by_flops(plan: Plan, device: str, efficiency: float, *notes: str) -> Bill:
    """Price training jobs by their FLOPs at a share of a device's peak; fine-tunings have no price."""
    rate = peak_of(device) * efficiency
    jobs = {key: count / rate for key, job in plan.jobs.items() if (count := flops_of(job)) is not None}
    return Bill(device, efficiency, jobs=jobs, notes=notes)


def price(plan: Plan, machine: PricedDevice) -> Bill:
    """Predict the seconds of every training job and fine-tuning of a plan from a device's measured speeds."""
    pricing = _Pricing(machine)
    jobs = {key: seconds for key, job in plan.jobs.items() if (seconds := pricing.job(job)) is not None}
    tunings, grids = {}, {}
    runs = {key: node.run for key, node in (*plan.roots.items(), *plan.jobs.items())}
    for model, spec in plan.tuned.items():
        for task, scored in lenders(spec).items():
            counts = {}  # by share of the task's steps
            if spec.discard and task.is_trained:
                counts[spec.discard.share] = len(spec.lrs) * len(spec.discard.seeds)
            counts[1.0] = spec.rates * len(spec.seeds)
            for share, count in counts.items():
                grids[model, task.name, share] = count
                on = scored if share == 1 else [task]
                seconds = pricing.tuning(runs[model], spec, task, on, share)
                if seconds is not None:
                    tunings[model, task.name, share] = seconds
    return Bill(
        machine.name,
        machine=machine,
        jobs=jobs,
        tunings=tunings,
        grids=grids,
        left=grids,
        precisions=tuple(pricing.used),
        notes=pricing.all_notes(),
        unmeasured=pricing.unmeasured_notes(),
    )


def left_of(plan: Plan, store: Store) -> dict[Grid, int]:
    """Return how many fine-tunings of each grid are left to run."""
    left: Counter[Grid] = Counter()
    for grid in tuning_grids(plan, screened_in(store)):
        left[grid.model, grid.task.name, 1.0] += grid.pending
        for tuning in grid.tunings:
            left[tuning.model, tuning.task.name, tuning.share] += not finished(tuning, store)
    return {grid: count for grid, count in left.items() if count}


@dataclass
class _Pricing:
    """Prices jobs and fine-tunings; caches shapes, sizes and tunings, and collects notes."""

    machine: PricedDevice
    used: dict[str, None] = field(default_factory=dict)  # precisions by which something was priced
    notes: dict[str, None] = field(default_factory=dict)
    shapeless: dict[str, None] = field(default_factory=dict)  # names of models with unknown shape
    unmeasured: dict[str, dict[str, None]] = field(default_factory=dict)  # precision → kinds of work
    shapes: dict[Any, ModelShape | None] = field(default_factory=dict)
    sizes: dict[str, Sizes | None] = field(default_factory=dict)
    tunings: dict[tuple[ModelShape, int, str, tuple[str, ...], float], float] = field(default_factory=dict)

    def job(self, job: TrainingJob) -> float | None:
        run = job.run
        if job.merge:
            return 0.0
        shape, speeds = self._shape(run), self._speeds(run.precision, "pretraining")
        if shape is None or speeds is None:
            return None
        self.used[run.precision] = None
        if not isinstance(run.root.start, Size):
            self._note("models of other shapes are priced as if they were of the one that was measured")
        if run.adapter or run.freeze != "nothing" or run.phase_at(job.first).freeze:
            self._note("LoRA and frozen weights are priced as if all weights were trained: an upper bound")
        share, causal = run.labelled_share(job.first, job.step), run.causal_share(job.first, job.step)
        step = speeds.step(shape, *run.reads_at(job.first), causal=causal, labelled=share)
        each, a_second = SAVED_BYTES
        saving = JOB_SECONDS + each * shape.parameters / a_second
        return job.steps * step + self._heldout(job, shape, speeds) + saving

    def _heldout(self, job: TrainingJob, shape: ModelShape, speeds: Speeds) -> float:
        run, every = job.run, job.run.heldout_every
        often = job.step // every - job.first // every + (job.step % every != 0)
        began, parts = run.phase_at(job.first).first, run.phase_at(job.first).objective.parts_at(0)
        tokens = run.heldout_tokens // run.packing.length * run.packing.length
        return often * sum(
            speeds.forward(
                shape,
                run.packing,
                tokens,
                causal=objective.causal,
                labelled=objective.labelled_share(run.packing, job.first - began, job.step - began),
            )
            for objective in heldout_objectives(*(part.objective.at(0) for part in parts))
        )

    def tuning(
        self, run: Pretrain, spec: Finetune, task: Task, scored: Collection[Task], share: float = 1.0
    ) -> float | None:
        """Return the seconds of one fine-tuning on `task` and of scoring its model on the tasks `scored`.

        `share`: of the task's steps. Scoring validation alone, as screening does, is priced as scoring both splits:
        the lengths of the two are not known separately.
        """
        shape = self._shape(run)
        precision = "fp32" if spec.precision == "fp32" else "bf16"
        speeds = self._speeds(precision, "fine-tuning")
        every = [self._sizes(each, spec) for each in (task, *scored)]
        sizes = [size for size in every if size is not None]
        if shape is None or speeds is None or len(sizes) < len(every):
            return None
        self.used[precision] = None
        context = shape.context if not run.stages and shape.context else run.packing.length
        limit = spec.length or input_length(context)
        cached = shape, limit, task.name, tuple(each.name for each in scored), share
        if cached not in self.tunings:
            costs = _TuningCosts(speeds, shape, limit, spec)
            scoring = [costs.score(each, size) for each, size in zip(scored, sizes[1:], strict=True)]
            training = share * costs.train(task, sizes[0])
            self.tunings[cached] = training + sum(scoring) + TRIAL_SECONDS * len(scoring)
        return self.tunings[cached]

    def _shape(self, run: Pretrain) -> ModelShape | None:
        start = run.root.start
        cached = start, run.corpus if isinstance(start, Size | Config) else ""
        if cached not in self.shapes:
            try:
                self.shapes[cached] = shape_of(run)
            except BiphaseError:  # a size that no run trains has no corpus to give its vocabulary
                self.shapes[cached] = None
        if self.shapes[cached] is None:
            self.shapeless[getattr(start, "source", "") or getattr(start, "name", "")] = None
        return self.shapes[cached]

    def _speeds(self, precision: str, work: str) -> Speeds | None:
        speeds = self.machine.speeds(precision)
        kinds = {"pretraining": ["pretrain"], "fine-tuning": ["finetune", "score"]}[work]
        if speeds and all(kind in speeds.measured for kind in kinds):
            worst = max(speeds.worst.values())
            if worst > DOUBTFUL:
                self._note(
                    f"the measured steps of {self.machine.name} contradict each other by up to {worst:.0%}, so these "
                    f"hours are rough. With nothing else running, type: {self.machine.measure}"
                )
            return speeds
        self.unmeasured.setdefault(precision, {})[work] = None
        return None

    def _sizes(self, task: Task, spec: Finetune) -> Sizes | None:
        if task.name not in self.sizes:
            self.sizes[task.name] = sizes_of(task, spec.documents)
        sizes = self.sizes[task.name]
        if sizes is None or (task.epochs and sizes.train and not sizes.train[0].rows):
            self._note(f"lengths of {task.name} are not known: its fine-tunings are left out")
            return None
        return sizes

    def _note(self, text: str) -> None:
        self.notes[text] = None  # each once, in order

    def all_notes(self) -> tuple[str, ...]:
        """Return all notes but those on precisions that were not measured."""
        if not self.shapeless:
            return tuple(self.notes)
        name, *others = self.shapeless
        models = f"{name} and {counted(len(others), 'other')}" if others else name
        return (*self.notes, f"the shape of {models} is not known here: what is made of it is left out")

    def unmeasured_notes(self) -> tuple[str, ...]:
        """Return a note for each precision that was not measured."""
        return tuple(
            f"{' and '.join(work)} in {precision} {'were' if len(work) > 1 else 'was'} not measured on "
            f"{self.machine.name} and left out. There, type: {self.machine.measure} --precision {precision}"
            for precision, work in self.unmeasured.items()
        )


@dataclass(frozen=True)
class _TuningCosts:
    """Predicts training and scoring seconds of one model on the tasks of a study."""

    speeds: Speeds
    shape: ModelShape
    limit: int  # tokens per input
    spec: Finetune

    def train(self, task: Task, sizes: Sizes) -> float:
        if not task.is_trained:
            return 0.0
        inputs = [self._inputs(task, texts) for texts in sizes.train]
        examples = sizes.train[0].rows * inputs[0][0]
        tokens = sum(length for _, length in inputs)
        steps = math.ceil(examples / task.batch) * task.epochs if task.epochs else task.steps
        batch = min(task.batch, examples) if examples else task.batch
        share = token_share(self.shape.layers, self.shape.width)
        micros = math.ceil(batch * tokens / (FINETUNE_TOKENS * share))
        return steps * self.speeds.tuning_step(
            self.shape, batch * tokens, batch * len(inputs), precision=self.spec.precision, micros=micros
        )

    def score(self, task: Task, sizes: Sizes) -> float:
        seconds = 0.0
        for texts in sizes.scored:
            count, tokens = self._inputs(task, texts)
            seconds += self.speeds.scoring(self.shape, texts.rows * count * tokens, tokens)
        return seconds

    def _inputs(self, task: Task, texts: TextLengths) -> tuple[float, float]:
        """Return how many inputs a text becomes, and the mean tokens of an input."""
        vocab = self.shape.vocab or UNKNOWN_VOCAB
        if self.spec.protocol in FAMILIES[task.family].windows:
            return texts.windows(vocab, self.limit)
        return 1.0, texts.tokens(vocab, self.limit)


# ---------------------------------------------------------------- elapsed time


@dataclass(frozen=True)
class Elapsed:
    workers: int
    seconds: float
    chain: float  # seconds of the longest chain of dependent jobs
    ends: str  # names of the results at its end


def elapsed(
    plan: Plan,
    jobs: Mapping[str, float],
    tunings: Mapping[Grid, float],
    counts: Mapping[Grid, int],
    workers: int,
    start: float = 0.0,
    first_tuning: float = 0.0,
) -> Elapsed:
    """Simulate how long a plan takes on several workers, each with one device and one job at a time.

    A training job waits for its parent, a fine-tuning for its model. Jobs are chosen as `worker.Worker` does:
    fine-tunings whose model exists first, then training jobs in the order of the plan. With any number of workers,
    a plan takes at least as long as its longest chain of dependent jobs.

    `jobs`: seconds of each training job to run; `tunings`: seconds of one fine-tuning of each grid; `counts`: how
    many fine-tunings of each grid to run; `start` and `first_tuning`: seconds that each worker takes besides, once.
    """
    grids: dict[str, list[tuple[float, int]]] = {}  # by model: seconds of one fine-tuning, and how many
    for grid, seconds in tunings.items():
        if counts.get(grid):
            grids.setdefault(grid[0], []).append((seconds, counts[grid]))
    ends: dict[str, float] = {}  # when each model's longest chain ends
    trained: dict[str, float] = {}
    for key in jobs:  # parents come before children
        trained[key] = trained.get(plan.jobs[key].parent or "", 0.0) + jobs[key]
    for model in (*trained, *grids):
        longest = max((seconds for seconds, _ in grids.get(model, ())), default=0.0)
        ends[model] = trained.get(model, 0.0) + longest
    last = max(ends, key=lambda model: ends[model], default="")
    names = ", ".join(name for name, key in plan.results.items() if key == last)
    seconds = _simulated(plan, jobs, grids, workers, first_tuning)
    return Elapsed(workers, seconds + (start if ends else 0.0), ends.get(last, 0.0), names)


def _simulated(
    plan: Plan,
    jobs: Mapping[str, float],
    grids: Mapping[str, list[tuple[float, int]]],
    workers: int,
    first_tuning: float,
) -> float:
    prepared = 0  # workers that have fine-tuned
    order = {key: number for number, key in enumerate(plan.jobs)}
    below: dict[str | None, list[str]] = {}
    for key in jobs:
        below.setdefault(plan.jobs[key].parent, []).append(key)
    trainable = [(order[key], key) for key in jobs if plan.jobs[key].parent not in jobs]
    heapq.heapify(trainable)
    tunable = deque(grid for model, some in grids.items() if model not in jobs for grid in some)
    running: list[tuple[float, str]] = []  # when the job ends, and the key it trains ("" for a fine-tuning)
    now = 0.0
    while trainable or tunable or running:
        while len(running) < workers and (tunable or trainable):
            if tunable:
                seconds, left = tunable.popleft()
                prepares = sum(not key for _, key in running) == prepared  # all who have are at work
                prepared += prepares
                heapq.heappush(running, (now + seconds + first_tuning * prepares, ""))
                if left > 1:
                    tunable.appendleft((seconds, left - 1))
            else:
                _, key = heapq.heappop(trainable)
                heapq.heappush(running, (now + jobs[key], key))
        now, done = heapq.heappop(running)
        if done:
            tunable.extend(grids.get(done, ()))
            for child in below.get(done, ()):
                heapq.heappush(trainable, (order[child], child))
    return now
