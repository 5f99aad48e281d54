"""How GPUs of one kind are usually joined: what a machine holds, and how fast bytes leave a GPU.

Figures are the makers' own for the machines named, in one direction. Of these collectives reach a share (`REACHED`),
which is taken from what is commonly seen, and was not measured here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from biphase.errors import SpecError, nearest
from biphase.keys import label, phase_at
from biphase.protocol import rows_of_a_slice
from biphase.specs import CLM, Hub, Pretrain, Size
from biphase.store import Store
from biphase.study.costs import ModelShape, flops_per_token, labelled_share, peak_of, shape_of
from biphase.study.describe import EFFICIENCY
from biphase.study.plan import Plan, TrainingJob
from biphase.study.prices import PLANNED_DEVICE, Speeds, at_hand, device_named, speeds_of
from biphase.text import short, si

REACHED = 0.75  # of what a link is said to carry
LATENCY = {"inside": 20e-6, "between": 60e-6}  # seconds a collective takes however little it carries; assumed


@dataclass(frozen=True)
class Interconnect:
    """GPUs of one kind, in machines of several."""

    gpus: int  # a machine
    memory: float  # bytes of a GPU
    inside: float  # bytes a second that a GPU sends to those of its machine
    between: float  # bytes a second of network for each GPU
    source: str
    own_kernels: bool = True  # ours are for NVIDIA's, from Ampere on

    def rate(self, members: int, stride: int) -> float:
        """Bytes a second that each GPU sends in a ring of `members`, `stride` apart."""
        if (members - 1) * stride < self.gpus:
            return self.inside * REACHED
        # A ring visits every member in a machine before it leaves it, so they share the way out.
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


# ---------------------------------------------------------------- scaling
# What a model needs and takes on many GPUs: memory, bytes, seconds of a step. A model of it, not a measurement.
#
#     memory   weights, gradients and moments, 16 bytes a parameter, cut by those that share them; 16-bit copies of them;
#              what layers keep of a micro-batch; the logits of a slice
#     bytes    that each GPU sends in a step. Not sharded: a sum of fp32 gradients. Sharded: weights are fetched forward
#              and backward for every micro-batch, gradients are summed and cut once a step
#     seconds  of computing its share of the rows, and of those bytes. A plain sum waits for the backward pass; what is
#              fetched for a block travels while another is computed, so there the longer one counts
#
# Sharded and recomputed layers take torch's compiler instead of our own kernels, which costs `COMPILED`. Not counted:
# stragglers, the reading of data, checkpoints, and a network that others use.


COMPILED = (
    441.9 / 367
)  # seconds of a compiled step over those of ours: 210M, MLM on chunks of 24 rows, one H200
AGAIN = 4 / 3  # a forward pass more
LEAN = 2**15  # tokens of a micro-batch below which our kernels make norms and gates again
ROOM = 0.92  # of a GPU's memory can be used: the rest is the driver's, the libraries', and gaps
GIB = 2**30


@dataclass(frozen=True)
class Way:
    """One way to share a model among GPUs."""

    shard: str  # as it is typed
    together: int  # GPUs that keep one copy
    recompute: bool = False

    @property
    def name(self) -> str:
        return self.shard + (" --recompute" if self.recompute else "")


@dataclass(frozen=True)
class Load:
    """What one GPU has to do in a step."""

    shape: ModelShape
    precision: str
    rows: int  # of the fullest GPU
    micro_rows: int
    length: int
    labelled: float  # share of positions
    own: bool = True  # our kernels know this model; else torch's compiler is taken in any case

    @property
    def passes(self) -> int:
        return math.ceil(self.rows / self.micro_rows)

    @property
    def micro_tokens(self) -> int:
        return min(self.rows, self.micro_rows) * self.length

    @property
    def width(self) -> int:
        """Bytes of a number that layers compute with."""
        return 4 if self.precision == "fp32" else 2


def compiled(load: Load, way: Way) -> bool:
    """Is torch's compiler taken, not our own kernels?"""
    return not load.own or way.together > 1 or way.recompute


@dataclass(frozen=True)
class Outlook:
    """What a way would need and take."""

    way: str
    memory: dict[str, float]  # bytes of a GPU, by what they hold
    fits: bool
    sent: float  # bytes that a GPU sends in a step
    seconds: float  # of a step
    computing: float  # of these
    efficiency: float  # against one GPU that took all rows as fast as it can

    @property
    def bytes(self) -> float:
        return sum(self.memory.values())


# ---------------------------------------------------------------- memory


def memory(load: Load, way: Way) -> dict[str, float]:
    """Bytes of one GPU at the peak of a step, by what they hold."""
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
        # Two blocks, and the head with its gradients as they are made, cast and summed.
        kept["fetched"] = load.width * 2 * block + (load.width + 8) * shape.embedding
        kept["fetched"] += 8 * block
        if load.passes > 1:  # gradients stay whole until the last micro-batch
            kept["gradients"] += 4 * numbers
    elif load.width == 2 and not compiled(load, way):
        kept["copies"] = 2 * (shape.matrices + shape.embedding)
    return kept


def _logits(load: Load) -> float:
    rows, vocab = math.ceil(load.micro_tokens * load.labelled), load.shape.vocab or 0
    return min(rows, rows_of_a_slice(rows, vocab, "cuda")) * vocab if vocab else 0


def activations(load: Load, way: Way) -> float:
    """What layers keep for the backward pass of a micro-batch."""
    shape, size = load.shape, load.width
    tokens = load.micro_tokens
    own = not compiled(load, way)
    again = own and tokens < LEAN
    first = size * (
        shape.hidden + _projected(shape) + shape.width
    )  # its input, q k v, and what attention gives
    second = size * (shape.hidden + 2 * shape.ffn)  # the sum before its second half, gate and up
    if not again:
        first += size * shape.hidden
        second += size * (shape.hidden + shape.ffn)
    if not own:  # turned queries and keys, beside those that were not
        first += size * _projected(shape)
    if way.recompute:
        return tokens * (shape.layers * size * shape.hidden + first + second)
    # Our kernels go on in the last block with the tokens that have a label.
    spared = second * (1 - min(1.0, load.labelled)) if own else 0
    return tokens * (shape.layers * (first + second) - spared)


def _projected(shape: ModelShape) -> float:
    """Width of queries, keys and values, from what attention's matrices hold beside those of the feed-forward."""
    attention = shape.matrices / shape.layers - 3 * shape.hidden * shape.ffn
    return max(shape.width, attention / shape.hidden - shape.width)


# ---------------------------------------------------------------- bytes


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind in a step."""

    what: str
    sent: float  # bytes of a GPU
    members: int
    stride: int
    often: int


def collectives(load: Load, way: Way, gpus: int) -> Iterator[Collective]:
    """What is sent in a step."""
    shape, numbers, whole = load.shape, load.shape.parameters, way.together
    if gpus == 1:
        return
    if whole == 1:
        yield Collective("gradients", _ring(4 * numbers, gpus, 2), gpus, 1, math.ceil(numbers / 2**25))
        return
    head = shape.embedding + shape.hidden  # with the last norm: fetched once a micro-batch
    blocks = numbers - head
    fetched = load.width * (2 * blocks + head) * load.passes
    units = shape.layers + 2
    yield Collective("weights", _ring(fetched, whole, 1), whole, 1, 2 * units * load.passes)
    yield Collective("gradients", _ring(4 * numbers, whole, 1), whole, 1, units)
    copies = gpus // whole
    if copies > 1:
        yield Collective("copies", _ring(4 * numbers / whole, copies, 2), copies, whole, units)


def _ring(size: float, members: int, rounds: int) -> float:
    """Bytes that each member of a ring sends so that all have, or have summed, `size` bytes."""
    return rounds * (members - 1) / members * size


# ---------------------------------------------------------------- seconds


def outlook(load: Load, way: Way, gpus: int, joined: Interconnect, computing: float, alone: float) -> Outlook:
    """What a way takes, where our kernels would compute so long; `alone`: all rows on one GPU."""
    computing *= (COMPILED if compiled(load, way) else 1) * (AGAIN if way.recompute else 1)
    alone *= 1 if load.own else COMPILED
    sent, travelling = 0.0, 0.0
    for one in collectives(load, way, gpus):
        sent += one.sent
        travelling += one.sent / joined.rate(one.members, one.stride)
        travelling += one.often * joined.latency(one.members, one.stride)
    seconds = computing + travelling if way.together == 1 else max(computing, travelling)
    if way.together > 1:  # the first fetch and the last sum have nothing to hide behind
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
    """What is worth a look: not sharded, over all, in machines; the least memory last."""
    found = [Way("none", 1), Way("full", gpus)]
    if gpus > machine and gpus % machine == 0:
        found.append(Way("hybrid", machine))
    if gpus == 1:
        found.pop()
    return [*found, Way(found[-1].shard, found[-1].together, recompute=True)]


def micro_rows(memory: float, rows: int, length: int) -> int:
    """As `devices.micro_rows`, which asks a GPU that is there; a test holds the two together."""
    most = max(1, min(rows, (49_152 if memory > 100 * GIB else 24_576) // length))
    return next((count for count in range(most, most // 2, -1) if rows % count == 0), most)


# ---------------------------------------------------------------- gpus
# The pretraining of a plan on many GPUs, for `biphase plan --gpus`.


@dataclass(frozen=True)
class Scaled:
    """One model of a plan."""

    title: str
    rows: int  # of a step
    load: Load
    outlooks: list[Outlook]
    hours: list[float]  # of its pretraining, on all GPUs at once, for each of these
    measured: bool


class ManyGpus:
    """Every model that a plan trains, on `gpus` GPUs of one kind."""

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
        longest = max(states, key=lambda job: job.steps)  # the step and the memory shown are its
        rows, length = math.ceil(run.rows_per_step / self.gpus), run.packing.length
        micro = micro_rows(self.joined.memory, rows, length)
        own = self.joined.own_kernels and run.precision != "fp32" and _known(root_start(run))
        outlooks, hours = [], []
        for way in ways(self.gpus, self.joined.gpus):
            total = 0.0
            for job in states:
                load = Load(shape, run.precision, rows, micro, length, _labelled(job), own)
                here, alone = (
                    computing(job, shape, some, speeds, self.device) for some in (rows, run.rows_per_step)
                )
                one = outlook(load, way, self.gpus, self.joined, here, alone)
                total += job.steps * one.seconds / 3600
                if job is longest:
                    outlooks.append(one)
            hours.append(total)
        title = f"{getattr(root_start(run), 'name', '') or run.name}, {label(longest.objective)}"
        load = Load(shape, run.precision, rows, micro, length, _labelled(longest), own)
        return Scaled(title, run.rows_per_step, load, outlooks, hours, speeds is not None)

    def render(self) -> list[str]:
        """The lines that stand below a plan."""
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
        """Where these numbers come from."""
        by_flops = f"FLOPs at {EFFICIENCY:.0%} of its peak"
        kinds = {"as measured on one" if one.measured else by_flops for one in self.models}
        return [
            f"planned, not measured: computing {' or '.join(sorted(kinds))}; {REACHED:.0%} of what links are said to "
            f"carry ({self.joined.source})"
        ]

    def as_json(self) -> dict[str, Any]:
        """The same for a program."""
        models = [asdict(one) for one in self.models]
        return {
            "gpus": self.gpus,
            "interconnect": asdict(self.joined),
            "models": models,
            "notes": self.basis(),
        }


def gpus_at_hand() -> str:
    """The kind of GPU that --gpus means without --device: the one here, or else the usual one."""
    here = at_hand()
    return here if here in INTERCONNECTS else PLANNED_DEVICE


def computing(job: TrainingJob, shape: ModelShape, rows: int, speeds: Speeds | None, device: str) -> float:
    """Seconds that one GPU computes for so many rows of a step, with our own kernels."""
    packing, share, causal = job.run.packing, _labelled(job), isinstance(job.objective, CLM)
    tokens = rows * packing.length
    if speeds is not None:
        return speeds.step(shape, packing, tokens, causal=causal, labelled=share)
    flops = flops_per_token(shape, packing, causal=causal, labelled=share) * tokens
    return flops / (peak_of(device) * EFFICIENCY)


def root_start(run: Pretrain) -> Size | Hub:
    return root_start(run.start) if isinstance(run.start, Pretrain) else run.start


def _known(start: Size | Hub) -> bool:
    """Do our kernels know such a model? As `models.fused.refusal` says, as far as it can be known without one."""
    if isinstance(start, Hub):
        return False
    width = start.hidden // start.heads
    return width % 16 == 0 and 16 <= width <= 128


def _labelled(job: TrainingJob) -> float:
    phase = phase_at(job.run, job.first)
    return labelled_share(phase.objective, job.run.packing, job.first - phase.first, job.step - phase.first)


def _line(one: Outlook, hours: float) -> str:
    step = f"{one.seconds:.2f} s" if one.seconds >= 1 else f"{one.seconds * 1000:.1f} ms"
    text = f"{one.way:<18}{one.bytes / GIB:>10.1f}{si(one.sent) + 'B':>13}{step:>10}{one.efficiency:>12.0%}{hours:>9,.1f}"
    return text if one.fits else f"{text}   does not fit"
