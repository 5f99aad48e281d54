"""Pretraining on many GPUs, for `biphase plan --gpus`: memory, communication and seconds of a step, by a model.

`ManyGpus` predicts every model of a plan; `outlook` predicts one step for one way of sharding (`Way`). Nothing here
is measured except the speed of one GPU (`study.prices`). The model of a step:

    memory   weights, gradients and optimizer state, 16 bytes per parameter, divided by the GPUs that share them; 16-bit
             copies of the weights; the activations of a micro-batch; the logits of a slice
    bytes    sent by each GPU. Not sharded: an all-reduce of fp32 gradients. Sharded: weights are gathered forward and
             backward for every micro-batch, gradients are reduced and scattered once a step
    seconds  of computing a GPU's share of the rows, and of communication. The all-reduce starts after the backward
             pass, so the two times are added; gathering overlaps with computing other blocks, so the longer one
             counts

Sharding and recomputation use torch's compiler instead of biphase's own kernels, which costs a factor `COMPILED`.
Not counted: stragglers, data loading, checkpoints, and other traffic on the network.

`INTERCONNECTS` holds the manufacturers' figures in one direction; collectives are assumed to reach the share
`REACHED` of them, a commonly seen value that was not measured here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from biphase.errors import SpecError, nearest
from biphase.protocol import GIB, RECOMPUTE_TOKENS, micro_rows, rows_per_slice, supported_head_width
from biphase.specs import Hub, Pretrain, Size
from biphase.store import Store
from biphase.study.costs import ModelShape, flops_per_token, peak_of, shape_of
from biphase.study.describe import EFFICIENCY
from biphase.study.plan import Plan, TrainingJob
from biphase.study.prices import PLANNED_DEVICE, Speeds, at_hand, device_named, speeds_of
from biphase.text import short, si

REACHED = 0.75  # share of a link's nominal bandwidth
LATENCY = {"inside": 20e-6, "between": 60e-6}  # fixed seconds per collective; assumed


@dataclass(frozen=True)
class Interconnect:
    """The memory and links of one kind of GPU, in machines with several."""

    gpus: int  # per machine
    memory: float  # bytes per GPU
    inside: float  # bytes per second that a GPU sends to others in its machine
    between: float  # bytes per second of network per GPU
    source: str
    own_kernels: bool = True  # biphase's own kernels need an NVIDIA GPU, Ampere or later

    def rate(self, members: int, stride: int) -> float:
        """Return the bytes per second that each GPU sends in a ring of `members` GPUs, `stride` apart."""
        if (members - 1) * stride < self.gpus:
            return self.inside * REACHED
        # A ring visits all members in a machine before it leaves it, so they share the machine's network links.
        here = min(members, max(1, self.gpus // stride))
        return min(self.inside, here * self.between) * REACHED

    def latency(self, members: int, stride: int) -> float:
        return LATENCY["inside" if (members - 1) * stride < self.gpus else "between"]


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
        False,
    ),
    "l40s": Interconnect(8, 48e9, 32e9, 12.5e9, "PCIe 4.0 ×16; 100 Gb/s a GPU assumed"),
}


def interconnect_of(device: str) -> Interconnect:
    if device not in INTERCONNECTS:
        raise SpecError(
            f"--gpus: how GPUs of the kind {device!r} are joined is not known; {nearest(device, INTERCONNECTS)}"
        )
    return INTERCONNECTS[device]


# ---------------------------------------------------------------- one step


# Time of a compiled step ÷ one with own kernels: 210M, MLM on chunks, 24 rows, one H200.
COMPILED = 441.9 / 367
AGAIN = 4 / 3  # recomputation adds a forward pass
ROOM = 0.92  # usable share of GPU memory; the rest is for driver, libraries and fragmentation


@dataclass(frozen=True)
class Way:
    """One way to share a model among GPUs."""

    shard: str  # the value of --shard
    together: int  # GPUs that hold one copy
    recompute: bool = False

    @property
    def name(self) -> str:
        return self.shard + (" --recompute" if self.recompute else "")


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


def compiled(load: Load, way: Way) -> bool:
    """Whether torch's compiler is used instead of biphase's own kernels."""
    return not load.own or way.together > 1 or way.recompute


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


# ---------------------------------------------------------------- memory


def memory(load: Load, way: Way) -> dict[str, float]:
    """Return the bytes of one GPU at the peak of a step, by content."""
    shape, numbers = load.shape, load.shape.parameters
    cut = way.together > 1
    kept = {
        "weights": 4 * numbers / way.together,
        "gradients": 4 * numbers / way.together,
        "optimizer state": 8 * numbers / way.together,
        "activations": activations(load, way),
        "logits": _logits(load) * load.width,
    }
    if cut:
        block = shape.blocks / shape.layers
        # Two blocks, and the head with its gradients while they are computed, cast and reduced.
        kept["fetched"] = load.width * 2 * block + (load.width + 8) * shape.embedding
        kept["fetched"] += 8 * block
        if load.passes > 1:  # gradients are not scattered before the last micro-batch
            kept["gradients"] += 4 * numbers
    elif load.width == 2 and not compiled(load, way):
        kept["copies"] = 2 * (shape.matrices + shape.embedding)
    return kept


def _logits(load: Load) -> float:
    rows, vocab = math.ceil(load.micro_tokens * load.labelled), load.shape.vocab or 0
    return min(rows, rows_per_slice(rows, vocab, "cuda")) * vocab if vocab else 0


def activations(load: Load, way: Way) -> float:
    """Return the bytes that layers keep for the backward pass of a micro-batch."""
    shape, size = load.shape, load.width
    tokens = load.micro_tokens
    own = not compiled(load, way)
    again = own and tokens < RECOMPUTE_TOKENS
    first = size * (shape.hidden + _projected(shape) + shape.width)  # input, q k v, and attention output
    second = size * (shape.hidden + 2 * shape.ffn)  # residual sum before the feed-forward, gate and up
    if not again:
        first += size * shape.hidden
        second += size * (shape.hidden + shape.ffn)
    if not own:  # rotated queries and keys, beside the unrotated ones
        first += size * _projected(shape)
    if way.recompute:
        return tokens * (shape.layers * size * shape.hidden + first + second)
    # Own kernels compute the last block's feed-forward only for labelled tokens.
    spared = second * (1 - min(1.0, load.labelled)) if own else 0
    return tokens * (shape.layers * (first + second) - spared)


def _projected(shape: ModelShape) -> float:
    """Return the width of queries, keys and values together, from the size of the attention matrices."""
    attention = shape.matrices / shape.layers - 3 * shape.hidden * shape.ffn
    return max(shape.width, attention / shape.hidden - shape.width)


# ---------------------------------------------------------------- communication


@dataclass(frozen=True)
class Collective:
    """The collectives of one kind in a step."""

    what: str
    sent: float  # bytes per GPU
    members: int
    stride: int
    often: int


def collectives(load: Load, way: Way, gpus: int) -> Iterator[Collective]:
    """Yield the collectives of one step."""
    shape, numbers, whole = load.shape, load.shape.parameters, way.together
    if gpus == 1:
        return
    if whole == 1:
        yield Collective("gradients", _ring(4 * numbers, gpus, 2), gpus, 1, math.ceil(numbers / 2**25))
        return
    head = shape.embedding + shape.hidden  # with the last norm: gathered once per micro-batch
    blocks = numbers - head
    fetched = load.width * (2 * blocks + head) * load.passes
    units = shape.layers + 2
    yield Collective("weights", _ring(fetched, whole, 1), whole, 1, 2 * units * load.passes)
    yield Collective("gradients", _ring(4 * numbers, whole, 1), whole, 1, units)
    copies = gpus // whole
    if copies > 1:
        yield Collective("copies", _ring(4 * numbers / whole, copies, 2), copies, whole, units)


def _ring(size: float, members: int, rounds: int) -> float:
    """Return the bytes that each member of a ring sends to gather or reduce `size` bytes."""
    return rounds * (members - 1) / members * size


# ---------------------------------------------------------------- time


def outlook(load: Load, way: Way, gpus: int, joined: Interconnect, computing: float, alone: float) -> Outlook:
    """Predict one way to share a model.

    `computing`: seconds of this GPU's rows with own kernels; `alone`: seconds of all rows on one GPU.
    """
    computing *= (COMPILED if compiled(load, way) else 1) * (AGAIN if way.recompute else 1)
    alone *= 1 if load.own else COMPILED
    sent, travelling = 0.0, 0.0
    for one in collectives(load, way, gpus):
        sent += one.sent
        travelling += one.sent / joined.rate(one.members, one.stride)
        travelling += one.often * joined.latency(one.members, one.stride)
    seconds = computing + travelling if way.together == 1 else max(computing, travelling)
    if way.together > 1:  # the first gather and the last reduction overlap with nothing
        head = load.width * load.shape.embedding + 4 * load.shape.embedding
        seconds += _ring(head, way.together, 1) / joined.rate(way.together, 1)
    held = memory(load, way)
    return Outlook(
        way.name,
        held,
        sum(held.values()) <= joined.memory * ROOM,
        sent,
        seconds,
        computing,
        alone / gpus / seconds,
    )


def ways(gpus: int, machine: int) -> list[Way]:
    """Return the ways to compare: not sharded, over all GPUs, within machines; the one with least memory last."""
    found = [Way("none", 1), Way("full", gpus)]
    if gpus > machine and gpus % machine == 0:
        found.append(Way("hybrid", machine))
    if gpus == 1:
        found.pop()
    return [*found, Way(found[-1].shard, found[-1].together, recompute=True)]


# ---------------------------------------------------------------- a plan on many GPUs


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
        self.gpus, self.device, self.joined = gpus, device, interconnect_of(device)
        machine = device_named(device, store)
        groups: dict[Any, list[TrainingJob]] = {}
        for job in plan.jobs.values():
            run = job.run
            groups.setdefault((job.root, run.precision, run.batch_tokens, run.packing), []).append(job)
        self.models: list[Scaled] = []
        for states in groups.values():
            run, shape = states[0].run, shape_of(states[0].run)
            if shape is None or shape.vocab is None:
                continue
            if run.rows_per_step < gpus:
                raise SpecError(
                    f"--gpus {gpus}: run {run.name!r} has {run.rows_per_step} rows a step, one for each at most; "
                    f"type --gpus {run.rows_per_step}"
                )
            speeds = speeds_of(machine.model, run.precision) if machine else None
            self.models.append(self._scaled(states, shape, speeds if speeds and speeds.pretrain else None))

    def _scaled(self, states: list[TrainingJob], shape: ModelShape, speeds: Speeds | None) -> Scaled:
        run = states[0].run
        longest = max(states, key=lambda job: job.steps)  # the step and the memory shown are of this job
        rows, length = math.ceil(run.rows_per_step / self.gpus), run.packing.length
        micro = micro_rows(self.joined.memory, rows, length)
        own = self.joined.own_kernels and run.precision != "fp32" and _known(run.root.start)
        outlooks, hours = [], []
        for way in ways(self.gpus, self.joined.gpus):
            total = 0.0
            for job in states:
                load = Load(
                    shape,
                    run.precision,
                    rows,
                    micro,
                    length,
                    job.run.labelled_share(job.first, job.step),
                    own,
                )
                here, alone = (
                    computing(job, shape, some, speeds, self.device) for some in (rows, run.rows_per_step)
                )
                one = outlook(load, way, self.gpus, self.joined, here, alone)
                total += job.steps * one.seconds / 3600
                if job is longest:
                    outlooks.append(one)
            hours.append(total)
        title = f"{getattr(run.root.start, 'name', '') or run.name}, {longest.objective.label}"
        load = Load(
            shape, run.precision, rows, micro, length, run.labelled_share(longest.first, longest.step), own
        )
        return Scaled(title, run.rows_per_step, load, outlooks, hours, speeds is not None)

    def render(self) -> list[str]:
        """Return the lines to print below a plan."""
        if not self.models:
            return ["", "--gpus: no model whose shape is known here is pretrained"]
        lines: list[str] = []
        for one in self.models:
            lines += [
                "",
                f"{one.title} ({short(one.load.shape.parameters)} parameters) on {self.gpus} {self.device}: "
                f"{one.rows:,} rows of {one.load.length:,} a step, {one.load.rows} a GPU, "
                f"micro-batch {one.load.micro_rows}",
                f"  {'--shard':<18}{'GiB a GPU':>10}{'sent a step':>13}{'a step':>10}{'efficiency':>12}{'hours':>9}",
                *(f"  {_line(way, hours)}" for way, hours in zip(one.outlooks, one.hours, strict=True)),
            ]
        return [*lines, *self.basis()]

    def basis(self) -> list[str]:
        """Say where the numbers come from."""
        by_flops = f"FLOPs at {EFFICIENCY:.0%} of its peak"
        kinds = {"as measured on one" if one.measured else by_flops for one in self.models}
        return [
            f"planned, not measured: computing {' or '.join(sorted(kinds))}; {REACHED:.0%} of what links are said to "
            f"carry ({self.joined.source})"
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the predictions for programs."""
        models = [asdict(one) for one in self.models]
        return {
            "gpus": self.gpus,
            "interconnect": asdict(self.joined),
            "models": models,
            "notes": self.basis(),
        }


def gpus_at_hand() -> str:
    """Return the GPU that --gpus means without --device: this machine's if known, else `PLANNED_DEVICE`."""
    here = at_hand()
    return here if here in INTERCONNECTS else PLANNED_DEVICE


def computing(job: TrainingJob, shape: ModelShape, rows: int, speeds: Speeds | None, device: str) -> float:
    """Return the seconds that one GPU computes for `rows` rows of a step, with own kernels."""
    packing, share, causal = (
        job.run.packing,
        job.run.labelled_share(job.first, job.step),
        job.objective.causal,
    )
    tokens = rows * packing.length
    if speeds is not None:
        return speeds.step(shape, packing, tokens, causal=causal, labelled=share)
    flops = flops_per_token(shape, packing, causal=causal, labelled=share) * tokens
    return flops / (peak_of(device) * EFFICIENCY)


def _known(start: Size | Hub | Pretrain) -> bool:
    """Whether own kernels support a model; as `fast.trunk.refusal`, as far as known without the model."""
    if not isinstance(start, Size):
        return False
    return supported_head_width(start.hidden // start.heads)


def _line(one: Outlook, hours: float) -> str:
    step = f"{one.seconds:.2f} s" if one.seconds >= 1 else f"{one.seconds * 1000:.1f} ms"
    text = f"{one.way:<18}{one.bytes / GIB:>10.1f}{si(one.sent) + 'B':>13}{step:>10}{one.efficiency:>12.0%}{hours:>9,.1f}"
    return text if one.fits else f"{text}   does not fit"
