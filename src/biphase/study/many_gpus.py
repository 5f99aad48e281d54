"""Memory, traffic and time of one training job on many GPUs: what `biphase plan --gpus` prints below a plan.

    memory   weights, gradients and optimizer state, 16 bytes per parameter, divided by the GPUs that share them;
             16-bit copies of the weights; the activations of a micro-batch; the logits of a slice
    traffic  bytes sent by each GPU. Not sharded: an all-reduce of fp32 gradients. Sharded: weights are gathered
             forward and backward for every micro-batch, gradients are reduced and scattered once a step

Nothing here is measured except the speed of one GPU. A GPU computes its share of a step's rows. The all-reduce of
gradients starts after the backward pass, so the two times are added; gathering of shards overlaps with computing
other blocks, so the longer one counts. Sharding and recomputation use torch's compiler instead of biphase's own
kernels, which costs a factor `COMPILED`. Not counted: stragglers, data loading, checkpoints, and other traffic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from biphase.errors import SpecError, nearest
from biphase.protocol import GIB, RECOMPUTE_TOKENS, micro_rows, rows_per_slice, supported_head_width
from biphase.specs import Hub, Pretrain, Size
from biphase.store import Store
from biphase.study.costs import ModelShape, flops_per_token, peak_of, shape_of
from biphase.study.devices import PLANNED_DEVICE, Speeds, at_hand, device_named
from biphase.study.plan import Plan, TrainingJob
from biphase.study.prices import EFFICIENCY
from biphase.text import short, si

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
    often: int


def collectives(load: Load, sharding: ShardingOption, gpus: int) -> Iterator[Collective]:
    """Yield the collectives of one step: of weights if they are sharded, of gradients, and between copies."""
    shape, parameters, whole = load.shape, load.shape.parameters, sharding.together
    if gpus == 1:
        return
    if whole == 1:
        yield Collective(_ring_bytes(4 * parameters, gpus, 2), gpus, 1, math.ceil(parameters / 2**25))
        return
    head = shape.embedding + shape.hidden  # with the last norm: gathered once per micro-batch
    blocks = parameters - head
    fetched = load.width * (2 * blocks + head) * load.passes
    units = shape.layers + 2
    yield Collective(_ring_bytes(fetched, whole), whole, 1, 2 * units * load.passes)
    yield Collective(_ring_bytes(4 * parameters, whole), whole, 1, units)
    copies = gpus // whole
    if copies > 1:
        yield Collective(_ring_bytes(4 * parameters / whole, copies, 2), copies, whole, units)


def _ring_bytes(size: float, members: int, rounds: int = 1) -> float:
    """Return the bytes that each member of a ring sends to gather or reduce `size` bytes."""
    return rounds * (members - 1) / members * size


# ---------------------------------------------------------------- predictions


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
    computing *= (COMPILED if load.compiled(sharding) else 1) * (RECOMPUTED if sharding.recompute else 1)
    alone *= 1 if load.own else COMPILED
    traffic = list(collectives(load, sharding, gpus))
    sending = sum(joined.seconds(*each) for each in traffic)
    if sharding.together == 1:
        seconds = computing + sending
    else:  # the first gather and the last reduction overlap with nothing
        head = _ring_bytes((load.width + 4) * load.shape.embedding, sharding.together)
        seconds = max(computing, sending) + joined.seconds(head, sharding.together, 1)
    parts = memory(load, sharding)
    fits = sum(parts.values()) <= joined.memory * ROOM
    sent = sum(each.sent for each in traffic)
    return Outlook(sharding.name, parts, fits, sent, seconds, computing, alone / gpus / seconds)


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
            speeds = machine.speeds(run.precision) if machine else None
            self.models.append(
                self._scaled(jobs, shape, speeds if speeds and "pretrain" in speeds.measured else None)
            )

    def _scaled(self, jobs: list[TrainingJob], shape: ModelShape, speeds: Speeds | None) -> Scaled:
        run, start = jobs[0].run, jobs[0].run.root.start
        longest = max(jobs, key=lambda job: job.steps)  # the step and the memory shown are of this job
        rows, length = math.ceil(run.rows_per_step / self.gpus), run.packing.length
        micro = micro_rows(self.joined.memory, rows, length)
        own = self.joined.own_kernels and run.precision != "fp32" and has_own_kernels(start)

        def load(job: TrainingJob) -> Load:
            labelled = job.run.labelled_share(job.first, job.step)
            return Load(shape, run.precision, rows, micro, length, labelled, own)

        def computing(job: TrainingJob, rows: int) -> float:
            """Return the seconds that one GPU computes for `rows` rows of a step, with own kernels."""
            tokens, labelled = rows * length, load(job).labelled
            causal = job.run.causal_share(job.first, job.step)
            if speeds is not None:
                return speeds.step(shape, run.packing, tokens, causal=causal, labelled=labelled)
            flops = flops_per_token(shape, run.packing, causal=causal, labelled=labelled) * tokens
            return flops / (peak_of(self.device) * EFFICIENCY)

        def predicted(job: TrainingJob, sharding: ShardingOption) -> Outlook:
            here, alone = computing(job, rows), computing(job, run.rows_per_step)
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
        by_flops = f"FLOPs at {EFFICIENCY:.0%} of its peak"
        kinds = {"as measured on one" if model.measured else by_flops for model in self.models}
        return (
            f"planned, not measured: computing {' or '.join(sorted(kinds))}; {REACHED:.0%} of what links are said to "
            f"carry ({self.joined.source})"
        )

    def as_json(self) -> dict[str, Any]:
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


def has_own_kernels(start: Size | Hub | Pretrain) -> bool:
    """Whether own kernels support a model; as `fast.trunk.refusal`, as far as known without the model."""
    return isinstance(start, Size) and supported_head_width(start.hidden // start.heads)


def _line(way: Outlook, hours: float) -> str:
    step = f"{way.seconds:.2f} s" if way.seconds >= 1 else f"{way.seconds * 1000:.1f} ms"
    sent = si(way.sent) + "B"
    text = f"{way.way:<18}{way.bytes / GIB:>10.1f}{sent:>13}{step:>10}{way.efficiency:>12.0%}{hours:>9,.1f}"
    return text if way.fits else f"{text}   does not fit"
