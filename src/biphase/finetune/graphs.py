"""A few sizes of batches in place of hundreds: what comes in one of them can be computed by a captured CUDA graph.

The sizes are chosen by the lengths of a task's texts, each a tenth above the one before, so that little is padded:
about 7% on average. They do not depend on a seed or a rate: a fine-tuning is computed alike in whatever company.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from biphase.finetune.encoder import TaskBatch, TuningOptions
from biphase.finetune.families import Family
from biphase.objectives import IGNORE
from biphase.training.loop import PlainStep, Step, StepResult

RATIO = 1.1  # of one size to the next smaller
ROUND = 16  # sizes are multiples of it, as the matrix units like them
DRAWN = 4_096  # batches that tell how many tokens a step has
RARE = 0.001, 0.02  # the share of batches that are too large for any size, and of those below all


@dataclass(frozen=True)
class Buckets:
    """The widths that batches of `texts` texts are padded to, none of them longer than `longest`."""

    widths: tuple[int, ...]  # ascending
    texts: int
    longest: int

    def spare(self, width: int) -> int:
        """How many texts the padding of a width is cut into: enough, were it all padding."""
        return -(-width // self.longest)

    def width_for(self, tokens: int) -> int:
        """The smallest width that so many tokens fit into, with a token at least for each text of padding; else 0."""
        return next((width for width in self.widths if tokens + self.spare(width) <= width), 0)

    def pad(self, batch: TaskBatch) -> TaskBatch:
        """The batch padded to one of the widths, or as it is where it has none.

        Padding takes no part: attention and pooling stay inside texts, and its tokens have no labels.
        """
        packed = batch.inputs[0]
        if len(batch.inputs) > 1 or len(packed) != self.texts or packed.longest > self.longest:
            return batch
        tokens = packed.ids.numel()
        width = self.width_for(tokens)
        if not width:
            return batch
        targets = (
            F.pad(batch.targets, (0, width - tokens), value=IGNORE) if batch.of_tokens else batch.targets
        )
        wide = packed.padded(width, spare=self.spare(width), longest=self.longest)
        return replace(batch, inputs=(wide,), targets=targets, width=width)


def buckets_of(family: Family, setting: TuningOptions) -> Buckets:
    """The sizes for the training steps of a task."""
    lengths = np.sum([side.lengths for side in family.inputs], axis=0)
    rows = min(family.task.batch, family.size)
    draw = np.random.default_rng(0).integers(0, family.size, (DRAWN, rows))
    above, below = RARE
    least, most = np.quantile(lengths[draw].sum(1), (below, 1 - above)).tolist()
    longest = max(ROUND, *(int(side.lengths.max()) for side in family.inputs))
    return Buckets(
        _widths(int(least), min(int(most), setting.train_tokens), longest),
        rows * len(family.inputs),
        longest,
    )


def _widths(least: int, most: int, longest: int) -> tuple[int, ...]:
    """Widths such that `most` tokens fit into the largest, `least` into the smallest, and none is without use."""

    def room(width: int) -> int:
        return width - -(-width // longest)

    width = -(-most // ROUND) * ROUND
    while room(width) < most:
        width += ROUND
    widths = [width]
    while (width := int(width / RATIO) // ROUND * ROUND) and room(width) >= least:
        widths.append(width)
    return tuple(reversed(widths))


# ---------------------------------------------------------------- graphs
# Whole optimizer steps as CUDA graphs: captured once for each size of batch, replayed for every rate and seed.
#
# A step on 32 short texts is hundreds of kernels of a few microseconds; starting them one by one takes longer than they
# do. A graph starts them all at once. It reads and writes the same memory each time, so a batch is copied over the first
# of its size, the rate and the number of labels are numbers on the device, and weights, head, moments and counts stay
# where they are from one fine-tuning to the next. Plain steps use the same memory: both kinds may follow each other.
#
# Before a step is captured it is taken `WARM` times idly: kernels are built and chosen, and nothing is changed, since
# AdamW is told that the numbers were not finite.


WARM = 2  # idle steps
AHEAD = (
    16  # steps given to the device before the host waits for the first: enough to stay busy, few to stop soon
)


@dataclass(frozen=True)
class Captured:
    """One size of batches."""

    graph: torch.cuda.CUDAGraph
    buffer: Tensor  # where the graph reads its batch


class Graphs:
    """The captured steps of one model, optimizer and task."""

    def __init__(self, buckets: Buckets, device: torch.device) -> None:
        self.buckets, self.device = buckets, device
        self.captured: dict[int, Captured] = {}  # by width
        self.full = False  # the device has no room for graphs: every step is taken the plain way
        self.pool = torch.cuda.graph_pool_handle()  # one: no two graphs run at a time
        self.stream = torch.cuda.Stream(device)
        # What graphs read and leave behind lies outside their pool, where no other graph writes.
        self.labels, self.rate = torch.ones((), device=device), torch.zeros((), device=device)
        self.outcome = torch.zeros(3, device=device)  # loss, norm, unsound
        self.under_way: deque[torch.cuda.Event] = deque()

    def over(self, plain: PlainStep[TaskBatch]) -> Step[TaskBatch]:
        """A way to take steps: by a graph where a batch has the size for it, else the plain way."""

        def take(micro: list[TaskBatch], labels: int, rate: float) -> StepResult:
            if len(micro) == 1 and micro[0].width and self._ready(plain, micro[0], labels, rate):
                return self._replay(micro[0])
            return plain(micro, labels, rate)

        return take

    def _ready(self, plain: PlainStep[TaskBatch], batch: TaskBatch, labels: int, rate: float) -> bool:
        """Tell the graphs of this step, and capture one of its size if there is none. False: there is no room for it."""
        self.labels.fill_(max(labels, 1))
        self.rate.fill_(rate)
        if self.full or batch.width in self.captured:
            return not self.full
        here = torch.cuda.current_stream(self.device)
        try:
            self.captured[batch.width] = self._capture(plain, batch)
        except torch.OutOfMemoryError:
            # Nothing has been changed yet. Graphs keep the memory of a step; without them there is room for one.
            self.full = True
            self.captured.clear()
            plain.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
        finally:
            torch.cuda.set_stream(here)  # which a capture that failed would leave
        return not self.full

    def _replay(self, batch: TaskBatch) -> StepResult:
        one = self.captured[batch.width]
        assert batch.buffer is not None
        one.buffer.copy_(batch.buffer, non_blocking=True)
        one.graph.replay()
        self._wait_for_an_older_one()
        return StepResult(*self.outcome.clone().unbind())  # a copy: the next step writes over it

    def _capture(self, plain: PlainStep[TaskBatch], batch: TaskBatch) -> Captured:
        there = batch.to(self.device)
        assert there.buffer is not None
        here = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            for _ in range(WARM):
                self._step(plain, there, idle=True)
        here.wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        # Only this thread must not touch the device meanwhile: a loader's thread may go on pinning memory.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            self._step(plain, there, idle=False)
        return Captured(graph, there.buffer)

    def _step(self, plain: PlainStep[TaskBatch], batch: TaskBatch, *, idle: bool) -> None:
        taken = plain([batch], self.labels, self.rate, idle=idle)
        self.outcome.copy_(torch.stack([taken.loss, taken.norm, taken.nonfinite]))

    def _wait_for_an_older_one(self) -> None:
        """Let the host run ahead of the device, but not so far that it could not stop in time."""
        done = torch.cuda.Event(blocking=True)
        done.record(torch.cuda.current_stream(self.device))
        self.under_way.append(done)
        if len(self.under_way) > AHEAD:
            self.under_way.popleft().synchronize()
