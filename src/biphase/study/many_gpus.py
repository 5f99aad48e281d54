"""Whether jobs fit a GPU, and memory, traffic and time of one training job on many: `biphase plan --device --gpus`.

    memory   weights, gradients and optimizer state, 16 bytes per parameter, divided by the GPUs that share them;
             16-bit copies of the weights; the activations of a micro-batch; the logits of a slice
    traffic  bytes sent by each GPU. Not sharded: an all-reduce of fp32 gradients. Sharded: weights are gathered
             forward and backward for every micro-batch, gradients are reduced and scattered once a step

`needs` compares every kind of job of a plan with the memory of one GPU. Nothing here is measured except the speed of
one GPU. A GPU computes its share of a step's rows. Unsharded gradients are summed during the backward pass of the last
micro-batch, except the embedding's, which is complete only at its end: a step is longer by the embedding's sum, and by
what the other sums exceed the blocks' backward pass. Gathering of shards overlaps with computing other blocks, so the
longer one counts. Sharding and recomputation use torch's compiler instead of biphase's own kernels, which costs a
factor `COMPILED`. Not counted: latencies, stragglers, data loading and checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from biphase.errors import SpecError, nearest
from biphase.protocol import (
    FINETUNE_TOKENS,
    GIB,
    RECOMPUTE_TOKENS,
    input_length,
    micro_rows,
    rows_per_slice,
    supported_head_width,
    token_share,
)
from biphase.specs import Contrastive, Finetune, Pretrain, Size
from biphase.store import Store
from biphase.study.costs import ModelShape, flops_per_token, peak_of, shape_of, start_of
from biphase.study.devices import PLANNED_DEVICE, Speeds, at_hand, device_named
from biphase.study.plan import Plan, TrainingJob
from biphase.study.prices import EFFICIENCY
from biphase.text import short, si

REACHED = 0.75  # share of a link's nominal bandwidth that collectives reach: commonly seen, not measured here
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

    def seconds(self, sent: float, members: int, stride: int) -> float:
        """Return the time in which each GPU sends `sent` bytes in a ring of `members` GPUs, `stride` apart."""
        inside = (members - 1) * stride < self.gpus
        # A ring visits all members in a machine before it leaves it, so they share the machine's network links.
        leaving = min(members, max(1, self.gpus // stride)) * self.between
        return sent / ((self.inside if inside else min(self.inside, leaving)) * REACHED)


_CRAY = "HPE Cray EX235a: one Infinity Fabric link between modules; 200 Gb/s a module"
INTERCONNECTS = {
    "h200": Interconnect(8, 141e9, 450e9, 50e9, "DGX H200: NVLink 4, 900 GB/s both ways; 400 Gb/s a GPU"),
    "h100": Interconnect(8, 80e9, 450e9, 50e9, "DGX H100: NVLink 4, 900 GB/s both ways; 400 Gb/s a GPU"),
    "a100": Interconnect(
        8, 80e9, 300e9, 25e9, "DGX A100 80 GB: NVLink 3, 600 GB/s both ways; 200 Gb/s a GPU"
    ),
    "mi250x-gcd": Interconnect(8, 64e9, 50e9, 12.5e9, _CRAY, own_kernels=False),
    "l40s": Interconnect(8, 48e9, 32e9, 12.5e9, "PCIe 4.0 ×16; 100 Gb/s a GPU assumed"),
}
MEMORY = {name: joined.memory for name, joined in INTERCONNECTS.items()} | {"rtx4090": 24e9}  # bytes per GPU


@dataclass(frozen=True)
class ShardingOption:
    """One way to share a model among GPUs."""

    shard: str  # the value of --shard
    together: int  # GPUs that hold one copy together
    recompute: bool = False

    @property
    def name(self) -> str:
        return self.shard + (" --recompute" if self.recompute else "")


def shardings(gpus: int, machine: int) -> list[ShardingOption]:
    """Return the ways to compare: not sharded, over all GPUs, within machines; the one with least memory last."""
    ways = [ShardingOption("none", 1)]
    if gpus > 1:
        ways.append(ShardingOption("full", gpus))
    if gpus > machine and gpus % machine == 0:
        ways.append(ShardingOption("hybrid", machine))
    return [*ways, ShardingOption(ways[-1].shard, ways[-1].together, recompute=True)]


@dataclass(frozen=True)
class Load:
    """The work of one GPU in a step."""

    shape: ModelShape
    precision: str
    rows: int  # of the GPU with the most rows
    micro_rows: int
    length: int
    labelled: float  # share of positions
    own: bool = True  # whether biphase's own kernels support the model; otherwise torch's compiler is used

    @property
    def passes(self) -> int:
        return math.ceil(self.rows / self.micro_rows)

    @property
    def micro_tokens(self) -> int:
        return min(self.rows, self.micro_rows) * self.length

    @property
    def width(self) -> int:
        """Bytes per number in the layers' computation."""
        return 4 if self.precision == "fp32" else 2

    def compiled(self, sharding: ShardingOption) -> bool:
        """Whether torch's compiler is used instead of biphase's own kernels."""
        return not self.own or sharding.together > 1 or sharding.recompute


# ---------------------------------------------------------------- memory and traffic


def memory(load: Load, sharding: ShardingOption) -> dict[str, float]:
    """Return the bytes of one GPU at the peak of a step, by content."""
    shape, parameters = load.shape, load.shape.parameters
    labelled, vocab = math.ceil(load.micro_tokens * load.labelled), shape.vocab or 0
    slice_rows = min(labelled, rows_per_slice(labelled, vocab, "cuda")) if vocab else 0
    parts = {
        "weights": 4 * parameters / sharding.together,
        "gradients": 4 * parameters / sharding.together,
        "optimizer state": 8 * parameters / sharding.together,
        "activations": _activations(load, sharding),
        "logits": slice_rows * vocab * load.width,
    }
    if sharding.together > 1:
        # Two blocks, and the head with its gradients while they are computed, cast and reduced.
        block = shape.blocks / shape.layers
        parts["fetched"] = (2 * load.width + 8) * block + (load.width + 8) * shape.embedding
        if load.passes > 1:  # gradients are not scattered before the last micro-batch
            parts["gradients"] += 4 * parameters
    elif load.width == 2 and not load.compiled(sharding):
        parts["copies"] = 2 * (shape.matrices + shape.embedding)
    return parts


def _activations(load: Load, sharding: ShardingOption) -> float:
    """Return the bytes that layers keep for the backward pass of a micro-batch."""
    shape, size, tokens = load.shape, load.width, load.micro_tokens
    own = not load.compiled(sharding)
    # The width of queries, keys and values together, from the size of the attention matrices.
    attention = shape.matrices / shape.layers - 3 * shape.hidden * shape.ffn
    projected = max(shape.width, attention / shape.hidden - shape.width)
    first = size * (shape.hidden + projected + shape.width)  # input, q k v, and attention output
    second = size * (shape.hidden + 2 * shape.ffn)  # residual sum before the feed-forward, gate and up
    if not (own and tokens < RECOMPUTE_TOKENS):
        first += size * shape.hidden
        second += size * (shape.hidden + shape.ffn)
    if not own:  # rotated queries and keys, beside the unrotated ones
        first += size * projected
    if sharding.recompute:
        return tokens * (shape.layers * size * shape.hidden + first + second)
    # Own kernels compute the last block's feed-forward only for labelled tokens.
    spared = second * (1 - min(1.0, load.labelled)) if own else 0
    return tokens * (shape.layers * (first + second) - spared)


class Collective(NamedTuple):
    """The collectives of one kind in a step: in rings of `members` GPUs, `stride` apart."""

    sent: float  # bytes per GPU
    members: int
    stride: int


def collectives(load: Load, sharding: ShardingOption, gpus: int) -> Iterator[Collective]:
    """Yield the collectives of one step: of weights if they are sharded, of gradients, and between copies."""
    shape, parameters, whole = load.shape, load.shape.parameters, sharding.together
    if gpus == 1:
        return
    if whole == 1:  # those begun during the backward pass, and at its end
        yield Collective(_ring_bytes(4 * (parameters - shape.embedding), gpus, 2), gpus, 1)
        yield Collective(_ring_bytes(4 * shape.embedding, gpus, 2), gpus, 1)
        return
    head = shape.embedding + shape.hidden  # with the last norm: gathered once per micro-batch
    fetched = load.width * (2 * (parameters - head) + head) * load.passes
    yield Collective(_ring_bytes(fetched, whole), whole, 1)
    yield Collective(_ring_bytes(4 * parameters, whole), whole, 1)
    if gpus > whole:
        yield Collective(_ring_bytes(4 * parameters / whole, gpus // whole, 2), gpus // whole, whole)


def _blocks_backward(load: Load) -> float:
    """Return the share of a step's computing that is the blocks' backward pass of the last micro-batch.

    Two thirds of the blocks' work, by their matrices alone. The loss computes the head's gradients in its forward pass.
    """
    shape = load.shape
    blocks = shape.matrices / (shape.matrices + load.labelled * shape.embedding)
    return 2 / 3 * blocks / load.passes


def _ring_bytes(size: float, members: int, rounds: int = 1) -> float:
    """Return the bytes that each member of a ring sends to gather or reduce `size` bytes."""
    return rounds * (members - 1) / members * size


# ---------------------------------------------------------------- one GPU


ALONE = ShardingOption("none", 1)


@dataclass(frozen=True)
class Need:
    """The memory that one kind of job of a plan needs on one GPU."""

    model: str
    work: str  # an objective, or "fine-tuning"
    bytes: float
    fits: bool
    advice: str = ""  # options with which it fits, if it does not


def needs(plan: Plan, device: str) -> list[Need]:
    """Return what each kind of job needs on one GPU, the most first; kinds of unknown shape are left out."""
    room, own = MEMORY[device] * ROOM, device not in INTERCONNECTS or INTERCONNECTS[device].own_kernels
    found: dict[tuple[str, str], Need] = {}

    def add(run: Pretrain, work: str, size: float, advice: str) -> None:
        kind = start_of(run), work
        if kind not in found or found[kind].bytes < size:
            found[kind] = Need(*kind, size, size <= room, "" if size <= room else advice)

    for job in plan.jobs.values():
        shape = None if job.merge or isinstance(job.objective, Contrastive) else shape_of(job.run)
        if shape is not None and shape.vocab is not None:
            load = load_of(job, shape, MEMORY[device], own=own)
            size = sum(memory(load, ALONE).values())
            add(job.run, job.objective.label, size, _advice(load, room))
    for model, spec in plan.tuned.items():
        run = (plan.jobs.get(model) or plan.roots[model]).run
        if (shape := shape_of(run)) is not None:
            add(run, "fine-tuning", _tuning_memory(run, shape, spec, own=own), "needs a larger GPU")
    return sorted(found.values(), key=lambda need: -need.bytes)


def fit_lines(plan: Plan, device: str) -> list[str]:
    """Say in a line whether every job of a plan fits one `device`, and in further lines which do not."""
    every = needs(plan, device)
    if not every:
        return []
    where = f"memory of one {device}, {MEMORY[device] / GIB:.0f} GiB (planned)"
    if every[0].fits:
        return [
            f"{where}: every job fits; {every[0].model}, {every[0].work} needs the most, {every[0].bytes / GIB:.1f} GiB"
        ]
    lacking: dict[tuple[str, str], list[Need]] = {}
    for need in every:
        if not need.fits:
            lacking.setdefault((need.model, need.advice), []).append(need)
    lines = [f"{where}: {sum(map(len, lacking.values()))} of {len(every)} kinds of jobs do not fit"]
    for (model, advice), of_model in lacking.items():
        works = ", ".join(need.work for need in of_model)
        lines.append(f"  {model}, {works}: up to {of_model[0].bytes / GIB:.1f} GiB; {advice}")
    return lines


def _advice(load: Load, room: float) -> str:
    """Return the options of `biphase run` with which a load fits into `room` bytes of a GPU."""
    for micro in (2**power for power in range(10, -1, -1) if 2**power < load.micro_rows):
        if sum(memory(replace(load, micro_rows=micro), ALONE).values()) <= room:
            return f"type --micro-batch {micro}"
    one = replace(load, micro_rows=1)
    if sum(memory(one, ShardingOption("none", 1, recompute=True)).values()) <= room:
        return "type --recompute --micro-batch 1"
    for count in (2, 4, 8):
        if sum(memory(one, ShardingOption("full", count, recompute=True)).values()) <= room:
            return f"type --processes {count} --shard full --recompute --micro-batch 1"
    return "needs larger GPUs"


def _tuning_memory(run: Pretrain, shape: ModelShape, spec: Finetune, *, own: bool) -> float:
    """Return the bytes at the peak of a fine-tuning: an upper bound, as if every row of the embedding were trained."""
    limit = spec.length or input_length(
        run.packing.length if run.stages or not shape.context else shape.context
    )
    tokens = min(
        FINETUNE_TOKENS * token_share(shape.layers, shape.width),
        max(task.batch for task in spec.tasks) * limit,
    )
    precision = "fp32" if spec.precision == "fp32" else "bf16"
    rows = math.ceil(tokens / limit)
    load = Load(shape, precision, rows, rows, limit, 1.0, own and has_own_kernels(run.root.start))
    # Bytes of a weight, of its gradient, and of each of Adam's two numbers.
    each = 2 if spec.precision == "pure-bf16" else 4
    copies = 2 if spec.precision == "bf16" else 0
    # Beside the weights in training, those to which the next fine-tuning returns.
    return (5 * each + copies) * shape.parameters + _activations(load, ALONE)


def load_of(job: TrainingJob, shape: ModelShape, memory: float, *, own: bool, gpus: int = 1) -> Load:
    """Return the work of one of `gpus` GPUs with `memory` bytes each; `own`: whether our kernels run there."""
    run = job.run
    rows, length = math.ceil(run.rows_per_step / gpus), run.packing.length
    own = own and run.precision != "fp32" and has_own_kernels(run.root.start)
    labelled = run.labelled_share(job.first, job.step)
    return Load(shape, run.precision, rows, micro_rows(memory, rows, length), length, labelled, own)


# ---------------------------------------------------------------- predictions


@dataclass(frozen=True)
class Outlook:
    """Predicted memory and time of one way to share a model."""

    way: str
    memory: dict[str, float]  # bytes per GPU by content
    fits: bool
    sent: float  # bytes that a GPU sends per step
    seconds: float  # per step
    efficiency: float  # relative to one GPU that computes all rows, divided by the number of GPUs
    hours: float  # of the model's pretraining on all GPUs together


@dataclass(frozen=True)
class Scaled:
    """The predictions for one model of a plan."""

    title: str
    load: Load
    outlooks: list[Outlook]


class ManyGpus:
    """Predictions for every model that a plan trains, on `gpus` GPUs of one kind."""

    def __init__(self, plan: Plan, store: Store, gpus: int, device: str) -> None:
        if device not in INTERCONNECTS:
            raise SpecError(
                f"--gpus: how GPUs of the kind {device!r} are joined is not known; {nearest(device, INTERCONNECTS)}"
            )
        self.gpus, self.device, self.joined = gpus, device, INTERCONNECTS[device]
        self.machine = device_named(device, store)
        groups: dict[Any, list[TrainingJob]] = {}
        for job in plan.jobs.values():
            run = job.run
            if job.merge or isinstance(job.objective, Contrastive):
                continue
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
            # The step and the memory shown are of the longest job.
            job = max(jobs, key=lambda job: job.steps)
            title = f"{start_of(run)}, {job.objective.label}"
            ways = [self._outlook(job, shape, way, jobs) for way in shardings(gpus, self.joined.gpus)]
            self.models.append(Scaled(title, self._load(job, shape), ways))

    def _load(self, job: TrainingJob, shape: ModelShape) -> Load:
        return load_of(job, shape, self.joined.memory, own=self.joined.own_kernels, gpus=self.gpus)

    def _speeds(self, precision: str) -> Speeds | None:
        speeds = self.machine.speeds(precision) if self.machine else None
        return speeds if speeds and "pretrain" in speeds.measured else None

    def _computing(self, job: TrainingJob, load: Load, rows: int) -> float:
        """Return the seconds that one GPU computes for `rows` rows of a step, with own kernels."""
        tokens, packing = rows * load.length, job.run.packing
        causal = job.run.causal_share(job.first, job.step)
        speeds = self._speeds(load.precision)
        if speeds is not None:
            return speeds.step(load.shape, packing, tokens, causal=causal, labelled=load.labelled)
        flops = flops_per_token(load.shape, packing, causal=causal, labelled=load.labelled) * tokens
        return flops / (peak_of(self.device) * EFFICIENCY)

    def _seconds(self, job: TrainingJob, load: Load, sharding: ShardingOption) -> float:
        """Return the seconds of one step on all GPUs."""
        slower = (COMPILED if load.compiled(sharding) else 1) * (RECOMPUTED if sharding.recompute else 1)
        computing = self._computing(job, load, load.rows) * slower
        sending = [self.joined.seconds(*each) for each in collectives(load, sharding, self.gpus)]
        if self.gpus == 1:
            return computing
        if sharding.together == 1:
            during, after = sending
            return computing + max(0, during - _blocks_backward(load) * computing) + after
        # The first gather and the last reduction overlap with nothing.
        head = _ring_bytes((load.width + 4) * load.shape.embedding, sharding.together)
        return max(computing, sum(sending)) + self.joined.seconds(head, sharding.together, 1)

    def _outlook(
        self, job: TrainingJob, shape: ModelShape, sharding: ShardingOption, jobs: list[TrainingJob]
    ) -> Outlook:
        """Predict one way to share a model; `jobs`: all training jobs that train it."""
        load = self._load(job, shape)
        parts, seconds = memory(load, sharding), self._seconds(job, load, sharding)
        alone = self._computing(job, load, job.run.rows_per_step) * (1 if load.own else COMPILED)
        return Outlook(
            sharding.name,
            parts,
            fits=sum(parts.values()) <= self.joined.memory * ROOM,
            sent=sum(each.sent for each in collectives(load, sharding, self.gpus)),
            seconds=seconds,
            efficiency=alone / self.gpus / seconds,
            hours=sum(one.steps * self._seconds(one, self._load(one, shape), sharding) for one in jobs)
            / 3600,
        )

    def render(self) -> list[str]:
        if not self.models:
            return ["", "--gpus: no model whose shape is known here is pretrained"]
        lines: list[str] = []
        for model in self.models:
            load = model.load
            lines += [
                "",
                f"{model.title} ({short(load.shape.parameters)} parameters) on {self.gpus} {self.device}: "
                f"{load.rows} rows of {load.length:,} a GPU and step, micro-batch {load.micro_rows}",
                f"  {'--shard':<18}{'GiB a GPU':>10}{'sent a step':>13}{'a step':>10}{'efficiency':>12}{'hours':>9}",
                *(f"  {_line(way)}" for way in model.outlooks),
            ]
        return [*lines, self.basis()]

    def basis(self) -> str:
        measured = all(self._speeds(model.load.precision) for model in self.models)
        computing = "as measured on one" if measured else f"FLOPs at {EFFICIENCY:.0%} of its peak"
        return (
            f"planned, not measured: computing {computing}; {REACHED:.0%} of what links are said to "
            f"carry ({self.joined.source})"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "gpus": self.gpus,
            "models": [asdict(model) for model in self.models],
            "notes": [self.basis()],
        }


def gpus_at_hand() -> str:
    """Return the GPU that --gpus means without --device: this machine's if known, else `PLANNED_DEVICE`."""
    here = at_hand()
    return here if here in INTERCONNECTS else PLANNED_DEVICE


def has_own_kernels(start: object) -> bool:
    """Whether own kernels support a model; as `fast.trunk.refusal`, as far as known without the model."""
    return isinstance(start, Size) and supported_head_width(start.hidden // start.heads)


def _line(way: Outlook) -> str:
    step = f"{way.seconds:.2f} s" if way.seconds >= 1 else f"{way.seconds * 1000:.1f} ms"
    memory, sent = sum(way.memory.values()) / GIB, si(way.sent) + "B"
    text = f"{way.way:<18}{memory:>10.1f}{sent:>13}{step:>10}{way.efficiency:>12.0%}{way.hours:>9,.1f}"
    return text if way.fits else f"{text}   does not fit"
