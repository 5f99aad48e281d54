"""What a model needs and takes on many GPUs: memory, bytes, seconds of a step. A model of it, not a measurement.

    memory   weights, gradients and moments, 16 bytes a parameter, cut by those that share them; 16-bit copies of them;
             what layers keep of a micro-batch; the logits of a slice
    bytes    that each GPU sends in a step. Not sharded: a sum of fp32 gradients. Sharded: weights are fetched forward
             and backward for every micro-batch, gradients are summed and cut once a step
    seconds  of computing its share of the rows, and of those bytes. A plain sum waits for the backward pass; what is
             fetched for a block travels while another is computed, so there the longer one counts

Sharded and recomputed layers take torch's compiler instead of our own kernels, which costs `COMPILED`. Not counted:
stragglers, the reading of data, checkpoints, and a network that others use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from biphase.slices import rows_of_a_slice
from biphase.study.costs import Shape
from biphase.study.interconnect import Interconnect

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

    shape: Shape
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
        "moments": 8 * numbers / way.together,
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


def _projected(shape: Shape) -> float:
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
