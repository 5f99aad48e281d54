"""Predicted seconds of a plan: on one device, on several workers, and with each model sharded over many GPUs.

`price` predicts every training job and fine-tuning of a plan from a device's measured speeds (`study.devices`);
`elapsed` simulates the plan on several workers; `ManyGpus` predicts the steps of `biphase plan --gpus`. Plain
arithmetic throughout.

    training job   steps × seconds per step, and the held-out evaluations
    fine-tuning    steps × seconds per step, scoring, and a fixed cost to start one and publish its scores

Not counted: tokenizing, downloads, loading and compiling a model, checkpoints, and waiting for other processes. What
has no price is left out and named in `notes`: a precision that was not measured, a model of unknown shape, a dataset of
unknown text lengths.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from biphase.errors import BiphaseError, SpecError, nearest
from biphase.protocol import (
    FINETUNE_TOKENS,
    GIB,
    heldout_objectives,
    input_length,
    micro_rows,
    supported_head_width,
    token_share,
)
from biphase.specs import Finetune, Hub, Pretrain, Size, Task
from biphase.specs.tasks import FAMILIES
from biphase.store import Store
from biphase.study.costs import (
    Load,
    ModelShape,
    ShardingOption,
    Sizes,
    TextLengths,
    collectives,
    compiled,
    flops_per_token,
    memory,
    peak_of,
    ring_bytes,
    shape_of,
    sizes_of,
)
from biphase.study.devices import (
    MEASURE,
    PLANNED_DEVICE,
    PricedDevice,
    Speeds,
    at_hand,
    device_named,
    speeds_of,
)
from biphase.study.ledger import finetunings, finished, lenders
from biphase.study.plan import Plan, TrainingJob
from biphase.text import counted, short, si

EFFICIENCY = 0.4  # share of a device's peak assumed where nothing was measured
DOUBTFUL = 0.15  # if a fit is off by more than this, other work probably ran during the measurement
TRIAL_SECONDS = 0.3  # to restore weights, initialize a head, and publish scores
UNKNOWN_VOCAB = 2**17  # assumed where a vocabulary is unknown; its exact size hardly matters if it is large

Grid = tuple[str, str]  # (key of a model, name of a task)


@dataclass(frozen=True)
class Prices:
    """Predicted seconds on one device; what is unknown is missing here and named in `notes`."""

    machine: PricedDevice
    jobs: dict[str, float]  # by the key of the job's checkpoint
    tunings: dict[Grid, float]  # seconds of one fine-tuning
    grids: dict[Grid, int]  # number of fine-tunings, including those without a price
    notes: tuple[str, ...]
    unmeasured: tuple[str, ...]  # the notes about precisions that were not measured
    precisions: tuple[str, ...]  # the precisions whose speeds were used
    priced: bool  # whether every training job has a price

    def pretraining(self, keys: Collection[str] | None = None) -> float:
        """Return the seconds of the training jobs `keys`, or of all."""
        return sum(seconds for key, seconds in self.jobs.items() if keys is None or key in keys)

    def finetuning(self, counts: Mapping[Grid, int] | None = None) -> float:
        """Return the seconds of `counts` fine-tunings of each grid, or of all."""
        counts = self.grids if counts is None else counts
        return sum(seconds * counts.get(grid, 0) for grid, seconds in self.tunings.items())


def price(plan: Plan, machine: PricedDevice, *, measure: str = MEASURE) -> Prices:
    """Predict the seconds of every training job and fine-tuning of a plan.

    `measure`: the command that measures a device, for messages.
    """
    pricing = _Pricing(machine, measure)
    jobs = {key: seconds for key, job in plan.jobs.items() if (seconds := pricing.job(job)) is not None}
    tunings, grids = {}, {}
    runs = {key: node.run for key, node in (*plan.roots.items(), *plan.jobs.items())}
    for model, spec in plan.tuned.items():
        for task, scored in lenders(spec).items():
            grids[model, task.name] = len(spec.lrs) * len(spec.seeds)
            seconds = pricing.tuning(runs[model], spec, task, scored)
            if seconds is not None:
                tunings[model, task.name] = seconds
    unmeasured = pricing.unmeasured_notes()
    return Prices(
        machine,
        jobs,
        tunings,
        grids,
        notes=(*pricing.notes, *pricing.shape_notes(), *unmeasured),
        unmeasured=unmeasured,
        precisions=tuple(pricing.used),
        priced=len(jobs) == plan.job_count,
    )


def left_of(plan: Plan, store: Store) -> dict[Grid, int]:
    """Return how many fine-tunings of each grid are left to run."""
    counts: dict[Grid, int] = {}
    for tuning in finetunings(plan):
        if not finished(tuning, store):
            grid = tuning.model, tuning.task.name
            counts[grid] = counts.get(grid, 0) + 1
    return counts


def prices_json(prices: Prices, left: Collection[str], counts: Mapping[Grid, int]) -> dict[str, Any]:
    """Return prices for programs; `left` and `counts`: the training jobs and fine-tunings that are not done."""
    machine = prices.machine
    return {
        "measured": {
            "device": machine.title,
            "precisions": {name: asdict(machine.origins[name]) for name in prices.precisions},
        },
        "pretraining_hours": prices.pretraining() / 3600,
        "finetuning_hours": prices.finetuning() / 3600,
        "pretraining_hours_left": prices.pretraining(left) / 3600,
        "finetuning_hours_left": prices.finetuning(counts) / 3600,
        "jobs": [{"key": key, "seconds": seconds} for key, seconds in prices.jobs.items()],
        "grids": [
            {
                "model": model,
                "task": task,
                "finetunings": count,
                "left": counts.get((model, task), 0),
                "seconds_each": prices.tunings.get((model, task)),
            }
            for (model, task), count in prices.grids.items()
        ],
    }


@dataclass
class _Pricing:
    """Prices jobs and fine-tunings; caches shapes, sizes and tunings, and collects notes."""

    machine: PricedDevice
    measure: str  # the command that measures a device
    used: dict[str, None] = field(default_factory=dict)  # precisions by which something was priced
    notes: dict[str, None] = field(default_factory=dict)
    shapeless: dict[str, None] = field(default_factory=dict)  # names of models with unknown shape
    unmeasured: dict[str, dict[str, None]] = field(default_factory=dict)  # precision → kinds of work
    shapes: dict[Any, ModelShape | None] = field(default_factory=dict)
    sizes: dict[str, Sizes | None] = field(default_factory=dict)
    tunings: dict[tuple[ModelShape, int, str, tuple[str, ...]], float] = field(default_factory=dict)

    def job(self, job: TrainingJob) -> float | None:
        run = job.run
        shape, speeds = self._shape(run), self._speeds(run.precision, "pretraining")
        if shape is None or speeds is None:
            return None
        self.used[run.precision] = None
        if not isinstance(run.root.start, Size):
            self.notes["models from elsewhere are priced as if they were of the shape that was measured"] = (
                None
            )
        if run.adapter or run.freeze != "nothing":
            self.notes[
                "LoRA and frozen weights are priced as if all weights were trained: an upper bound"
            ] = None
        share, causal = run.labelled_share(job.first, job.step), job.objective.causal
        step = speeds.step(shape, run.packing, run.batch_tokens, causal=causal, labelled=share)
        return job.steps * step + self._heldout(job, shape, speeds)

    def _heldout(self, job: TrainingJob, shape: ModelShape, speeds: Speeds) -> float:
        """Return the seconds of held-out evaluation."""
        run, every = job.run, job.run.heldout_every
        often = job.step // every - job.first // every + (job.step % every != 0)
        began = run.phase_at(job.first).first
        tokens = run.heldout_tokens // run.packing.length * run.packing.length
        return often * sum(
            speeds.forward(
                shape,
                run.packing,
                tokens,
                causal=objective.causal,
                labelled=objective.labelled_share(run.packing, job.first - began, job.step - began),
            )
            for objective in heldout_objectives(job.objective)
        )

    def tuning(self, run: Pretrain, spec: Finetune, task: Task, scored: Collection[Task]) -> float | None:
        """Return the seconds of one fine-tuning on `task` and of scoring its model on the tasks `scored`."""
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
        cached = shape, limit, task.name, tuple(each.name for each in scored)
        if cached not in self.tunings:
            costs = _TuningCosts(speeds, shape, limit, spec)
            scoring = [costs.score(each, size) for each, size in zip(scored, sizes[1:], strict=True)]
            self.tunings[cached] = costs.train(task, sizes[0]) + sum(scoring) + TRIAL_SECONDS * len(scoring)
        return self.tunings[cached]

    def _shape(self, run: Pretrain) -> ModelShape | None:
        start = run.root.start
        cached = start, run.corpus if isinstance(start, Size) else ""
        if cached not in self.shapes:
            try:
                self.shapes[cached] = shape_of(run)
            except BiphaseError:  # a size that no run trains has no corpus to give its vocabulary
                self.shapes[cached] = None
        if self.shapes[cached] is None:
            self.shapeless[getattr(start, "source", "") or getattr(start, "name", "")] = None
        return self.shapes[cached]

    def _speeds(self, precision: str, work: str) -> Speeds | None:
        speeds = speeds_of(self.machine.model, precision)
        kinds = {"pretraining": ["pretrain"], "fine-tuning": ["finetune", "score"]}[work]
        if speeds and all(getattr(speeds, kind) for kind in kinds):
            if speeds.worst > DOUBTFUL:
                self.notes[
                    f"the measured steps of {self.machine.name} contradict each other by up to {speeds.worst:.0%}, so these "
                    f"hours are rough. With nothing else running, type: {self.measure}"
                ] = None
            return speeds
        self.unmeasured.setdefault(precision, {})[work] = None
        return None

    def _sizes(self, task: Task, spec: Finetune) -> Sizes | None:
        if task.name not in self.sizes:
            self.sizes[task.name] = sizes_of(task, spec.documents)
        sizes = self.sizes[task.name]
        if sizes is None or (task.epochs and sizes.train and not sizes.train[0].rows):
            self.notes[f"lengths of {task.name} are not known: its fine-tunings are left out"] = None
            return None
        return sizes

    def shape_notes(self) -> tuple[str, ...]:
        if not self.shapeless:
            return ()
        name, *others = self.shapeless
        models = f"{name} and {counted(len(others), 'other')}" if others else name
        return (f"the shape of {models} is not known here: what is made of it is left out",)

    def unmeasured_notes(self) -> tuple[str, ...]:
        """Return a note for each precision that was not measured."""
        return tuple(
            f"{' and '.join(work)} in {precision} {'were' if len(work) > 1 else 'was'} not measured on "
            f"{self.machine.name} and left out. There, type: {self.measure} --precision {precision}"
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
) -> Elapsed:
    """Simulate how long a plan takes on several workers, each with one device and one job at a time.

    A training job waits for its parent, a fine-tuning for its model. Jobs are chosen as `worker.Worker` does:
    fine-tunings whose model exists first, then training jobs in the order of the plan. With any number of workers,
    a plan takes at least as long as its longest chain of dependent jobs.

    `jobs`: seconds of each training job to run; `tunings`: seconds of one fine-tuning of each grid; `counts`: how
    many fine-tunings of each grid to run.
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
    return Elapsed(workers, _simulated(plan, jobs, grids, workers), ends.get(last, 0.0), names)


def _simulated(
    plan: Plan, jobs: Mapping[str, float], grids: Mapping[str, list[tuple[float, int]]], workers: int
) -> float:
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
                heapq.heappush(running, (now + seconds, ""))
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


# ---------------------------------------------------------------- many GPUs
# Nothing here is measured except the speed of one GPU. A GPU computes its share of a step's rows. The all-reduce of
# gradients starts after the backward pass, so the two times are added; gathering of shards overlaps with computing
# other blocks, so the longer one counts. Sharding and recomputation use torch's compiler instead of biphase's own
# kernels, which costs a factor `COMPILED`. Not counted: stragglers, data loading, checkpoints, and other traffic.


REACHED = 0.75  # share of a link's nominal bandwidth that collectives reach: commonly seen, not measured here
LATENCY = {"inside": 20e-6, "between": 60e-6}  # fixed seconds per collective; assumed
# Time of a compiled step ÷ one with own kernels: 210M, MLM on chunks, 24 rows, one H200.
COMPILED = 441.9 / 367
RECOMPUTED = 4 / 3  # recomputation adds a forward pass
ROOM = 0.92  # usable share of GPU memory; the rest is for driver, libraries and fragmentation


@dataclass(frozen=True)
class Interconnect:
    """The memory and links of one kind of GPU, in machines with several; the manufacturers' figures, one way."""

    gpus: int  # per machine
    memory: float  # bytes per GPU
    inside: float  # bytes per second that a GPU sends to others in its machine
    between: float  # bytes per second of network per GPU
    source: str
    own_kernels: bool = True  # biphase's own kernels need an NVIDIA GPU, Ampere or later

    def seconds(self, sent: float, members: int, stride: int, often: int = 0) -> float:
        """Return the time in which each GPU sends `sent` bytes in a ring of `members` GPUs, `stride` apart."""
        inside = (members - 1) * stride < self.gpus
        # A ring visits all members in a machine before it leaves it, so they share the machine's network links.
        leaving = min(members, max(1, self.gpus // stride)) * self.between
        rate = self.inside if inside else min(self.inside, leaving)
        return sent / (rate * REACHED) + often * LATENCY["inside" if inside else "between"]


INTERCONNECTS = {
    "h200": Interconnect(8, 141e9, 450e9, 50e9, "DGX H200: NVLink 4, 900 GB/s both ways; 400 Gb/s a GPU"),
    "h100": Interconnect(8, 80e9, 450e9, 50e9, "DGX H100: NVLink 4, 900 GB/s both ways; 400 Gb/s a GPU"),
    "a100": Interconnect(
        8, 80e9, 300e9, 25e9, "DGX A100 80 GB: NVLink 3, 600 GB/s both ways; 200 Gb/s a GPU"
    ),
    "mi250x-gcd": Interconnect(
        8,
        64e9,
        50e9,
        12.5e9,
        "HPE Cray EX235a: one Infinity Fabric link between modules; 200 Gb/s a module",
        own_kernels=False,
    ),
    "l40s": Interconnect(8, 48e9, 32e9, 12.5e9, "PCIe 4.0 ×16; 100 Gb/s a GPU assumed"),
}


@dataclass(frozen=True)
class Outlook:
    """Predicted memory and time of one way to share a model."""

    way: str
    memory: dict[str, float]  # bytes per GPU by content
    fits: bool
    sent: float  # bytes that a GPU sends per step
    seconds: float  # per step
    computing: float  # seconds of computing, included in `seconds`
    efficiency: float  # relative to one GPU that computes all rows, divided by the number of GPUs

    @property
    def bytes(self) -> float:
        return sum(self.memory.values())


def outlook(
    load: Load, sharding: ShardingOption, gpus: int, joined: Interconnect, computing: float, alone: float
) -> Outlook:
    """Predict one way to share a model.

    `computing`: seconds of this GPU's rows with own kernels; `alone`: seconds of all rows on one GPU.
    """
    computing *= (COMPILED if compiled(load, sharding) else 1) * (RECOMPUTED if sharding.recompute else 1)
    alone *= 1 if load.own else COMPILED
    traffic = list(collectives(load, sharding, gpus))
    sending = sum(joined.seconds(each.sent, each.members, each.stride, each.often) for each in traffic)
    if sharding.together == 1:
        seconds = computing + sending
    else:  # the first gather and the last reduction overlap with nothing
        head = ring_bytes((load.width + 4) * load.shape.embedding, sharding.together)
        seconds = max(computing, sending) + joined.seconds(head, sharding.together, 1)
    parts = memory(load, sharding)
    return Outlook(
        sharding.name,
        parts,
        sum(parts.values()) <= joined.memory * ROOM,
        sum(each.sent for each in traffic),
        seconds,
        computing,
        alone / gpus / seconds,
    )


def shardings(gpus: int, machine: int) -> list[ShardingOption]:
    """Return the ways to compare: not sharded, over all GPUs, within machines; the one with least memory last."""
    ways = [ShardingOption("none", 1)]
    if gpus > 1:
        ways.append(ShardingOption("full", gpus))
    if gpus > machine and gpus % machine == 0:
        ways.append(ShardingOption("hybrid", machine))
    return [*ways, ShardingOption(ways[-1].shard, ways[-1].together, recompute=True)]


@dataclass(frozen=True)
class Scaled:
    """The predictions for one model of a plan."""

    title: str
    rows: int  # per step
    load: Load
    outlooks: list[Outlook]
    hours: list[float]  # of its pretraining on all GPUs together, one per outlook
    measured: bool


class ManyGpus:
    """Predictions for every model that a plan trains, on `gpus` GPUs of one kind."""

    def __init__(self, plan: Plan, store: Store, gpus: int, device: str) -> None:
        if device not in INTERCONNECTS:
            raise SpecError(
                f"--gpus: how GPUs of the kind {device!r} are joined is not known; {nearest(device, INTERCONNECTS)}"
            )
        self.gpus, self.device, self.joined = gpus, device, INTERCONNECTS[device]
        machine = device_named(device, store)
        groups: dict[Any, list[TrainingJob]] = {}
        for job in plan.jobs.values():
            run = job.run
            groups.setdefault((job.root, run.precision, run.batch_tokens, run.packing), []).append(job)
        self.models: list[Scaled] = []
        for jobs in groups.values():
            run, shape = jobs[0].run, shape_of(jobs[0].run)
            if shape is None or shape.vocab is None:
                continue
            if run.rows_per_step < gpus:
                raise SpecError(
                    f"--gpus {gpus}: run {run.name!r} has {run.rows_per_step} rows a step, one for each at most; "
                    f"type --gpus {run.rows_per_step}"
                )
            speeds = speeds_of(machine.model, run.precision) if machine else None
            self.models.append(self._scaled(jobs, shape, speeds if speeds and speeds.pretrain else None))

    def _scaled(self, jobs: list[TrainingJob], shape: ModelShape, speeds: Speeds | None) -> Scaled:
        run, start = jobs[0].run, jobs[0].run.root.start
        longest = max(jobs, key=lambda job: job.steps)  # the step and the memory shown are of this job
        rows, length = math.ceil(run.rows_per_step / self.gpus), run.packing.length
        micro = micro_rows(self.joined.memory, rows, length)
        own = self.joined.own_kernels and run.precision != "fp32" and has_own_kernels(start)

        def load(job: TrainingJob) -> Load:
            return Load(
                shape, run.precision, rows, micro, length, run.labelled_share(job.first, job.step), own
            )

        def predicted(job: TrainingJob, sharding: ShardingOption) -> Outlook:
            here, alone = (
                _computing(job, shape, count, speeds, self.device) for count in (rows, run.rows_per_step)
            )
            return outlook(load(job), sharding, self.gpus, self.joined, here, alone)

        ways = shardings(self.gpus, self.joined.gpus)
        return Scaled(
            f"{getattr(start, 'name', '') or run.name}, {longest.objective.label}",
            run.rows_per_step,
            load(longest),
            [predicted(longest, sharding) for sharding in ways],
            [sum(job.steps * predicted(job, sharding).seconds for job in jobs) / 3600 for sharding in ways],
            measured=speeds is not None,
        )

    def render(self) -> list[str]:
        """Return the lines to print below a plan."""
        if not self.models:
            return ["", "--gpus: no model whose shape is known here is pretrained"]
        lines: list[str] = []
        for model in self.models:
            load = model.load
            lines += [
                "",
                f"{model.title} ({short(load.shape.parameters)} parameters) on {self.gpus} {self.device}: "
                f"{model.rows:,} rows of {load.length:,} a step, {load.rows} a GPU, micro-batch {load.micro_rows}",
                f"  {'--shard':<18}{'GiB a GPU':>10}{'sent a step':>13}{'a step':>10}{'efficiency':>12}{'hours':>9}",
                *(f"  {_line(way, hours)}" for way, hours in zip(model.outlooks, model.hours, strict=True)),
            ]
        return [*lines, self.basis()]

    def basis(self) -> str:
        """Say where the numbers come from."""
        by_flops = f"FLOPs at {EFFICIENCY:.0%} of its peak"
        kinds = {"as measured on one" if model.measured else by_flops for model in self.models}
        return (
            f"planned, not measured: computing {' or '.join(sorted(kinds))}; {REACHED:.0%} of what links are said to "
            f"carry ({self.joined.source})"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the predictions for programs."""
        return {
            "gpus": self.gpus,
            "interconnect": asdict(self.joined),
            "models": [asdict(model) for model in self.models],
            "notes": [self.basis()],
        }


def gpus_at_hand() -> str:
    """Return the GPU that --gpus means without --device: this machine's if known, else `PLANNED_DEVICE`."""
    here = at_hand()
    return here if here in INTERCONNECTS else PLANNED_DEVICE


def _computing(job: TrainingJob, shape: ModelShape, rows: int, speeds: Speeds | None, device: str) -> float:
    """Return the seconds that one GPU computes for `rows` rows of a step, with own kernels."""
    packing = job.run.packing
    share, causal = job.run.labelled_share(job.first, job.step), job.objective.causal
    tokens = rows * packing.length
    if speeds is not None:
        return speeds.step(shape, packing, tokens, causal=causal, labelled=share)
    flops = flops_per_token(shape, packing, causal=causal, labelled=share) * tokens
    return flops / (peak_of(device) * EFFICIENCY)


def has_own_kernels(start: Size | Hub | Pretrain) -> bool:
    """Whether own kernels support a model; as `fast.trunk.refusal`, as far as known without the model."""
    if not isinstance(start, Size):
        return False
    return supported_head_width(start.hidden // start.heads)


def _line(way: Outlook, hours: float) -> str:
    step = f"{way.seconds:.2f} s" if way.seconds >= 1 else f"{way.seconds * 1000:.1f} ms"
    sent = si(way.sent) + "B"
    text = f"{way.way:<18}{way.bytes / GIB:>10.1f}{sent:>13}{step:>10}{way.efficiency:>12.0%}{hours:>9,.1f}"
    return text if way.fits else f"{text}   does not fit"
