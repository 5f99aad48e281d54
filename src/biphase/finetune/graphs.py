"""CUDA graphs of fine-tuning steps, and the few batch sizes they are captured for.

`Buckets` pads batches to a few widths; `Graphs` captures a whole optimizer step once per width and replays it for
every learning rate and seed. The widths depend on the lengths of a task's texts, each about 10% above the one
before, so that padding adds about 7% on average. They do not depend on seed or learning rate, so a fine-tuning's
result does not depend on what else ran in the process.

A step on 32 short texts is hundreds of kernels of a few microseconds each; launching them one by one takes longer
than running them, and a graph launches them all at once. It reads and writes the same memory each time. So a batch
is copied into the buffer of its width, learning rate and label count are device tensors, and weights, head and
optimizer state stay in place from one fine-tuning to the next. Plain steps use the same memory, so both kinds can
alternate.

Before capture, a step is run `WARM` times so that kernels are compiled and selected. These steps change nothing,
because AdamW is told that the gradients are not finite and skips the update.
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

RATIO = 1.1  # of one width to the next smaller
ROUND = 16  # widths are multiples of it, for the tensor cores
DRAWN = 4_096  # random batches by which the token counts of a step are estimated
RARE = 0.001, 0.02  # shares of batches above the largest width, and below what the smallest is made for


@dataclass(frozen=True)
class Buckets:
    """The widths in tokens to which batches of `texts` texts, none longer than `longest`, are padded."""

    widths: tuple[int, ...]  # ascending
    texts: int
    longest: int

    def spare(self, width: int) -> int:
        """Return how many dummy texts the padding of a width is divided into: enough if all of it were padding."""
        return -(-width // self.longest)

    def width_for(self, tokens: int) -> int:
        """Return the smallest width for so many tokens plus one for each dummy text, or 0 if none is large enough."""
        return next((width for width in self.widths if tokens + self.spare(width) <= width), 0)

    def pad(self, batch: TaskBatch) -> TaskBatch:
        """Pad a batch to one of the widths, or return it unchanged if none applies.

        Padding does not affect the result: attention and pooling stay within texts, and padding tokens have no labels.
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
    """Choose the widths for the training steps of a task."""
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
    """Return widths from the first that fits `most` tokens down to the last that fits `least`, ascending."""

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


WARM = 2  # steps before a capture, without effect
# Steps queued on the device before the host waits: enough to keep it busy, few enough to stop soon.
AHEAD = 16


@dataclass(frozen=True)
class Captured:
    """The graph of one batch width."""

    graph: torch.cuda.CUDAGraph
    buffer: Tensor  # where the graph reads its batch


class Graphs:
    """The captured steps of one model, optimizer and task."""

    def __init__(self, buckets: Buckets, device: torch.device) -> None:
        self.buckets, self.device = buckets, device
        self.captured: dict[int, Captured] = {}  # by width
        self.full = False  # out of memory for graphs: every step is a plain one
        self.pool = torch.cuda.graph_pool_handle()  # shared, since no two graphs run at a time
        self.stream = torch.cuda.Stream(device)
        # Inputs and outputs of graphs are allocated outside the pool, where no other graph writes.
        self.labels, self.rate = torch.ones((), device=device), torch.zeros((), device=device)
        self.outcome = torch.zeros(3, device=device)  # loss, norm, nonfinite
        self.under_way: deque[torch.cuda.Event] = deque()

    def over(self, plain: PlainStep[TaskBatch]) -> Step[TaskBatch]:
        """Return a step function that replays a graph if the batch has a width for it, else takes a plain step."""

        def take(micro: list[TaskBatch], labels: int, rate: float) -> StepResult:
            if len(micro) == 1 and micro[0].width and self._ready(plain, micro[0], labels, rate):
                return self._replay(micro[0])
            return plain(micro, labels, rate)

        return take

    def _ready(self, plain: PlainStep[TaskBatch], batch: TaskBatch, labels: int, rate: float) -> bool:
        """Set the graphs' inputs, and capture a graph of the batch's width if needed; False: no memory for graphs."""
        self.labels.fill_(max(labels, 1))
        self.rate.fill_(rate)
        if self.full or batch.width in self.captured:
            return not self.full
        here = torch.cuda.current_stream(self.device)
        try:
            self.captured[batch.width] = self._capture(plain, batch)
        except torch.OutOfMemoryError:
            # Nothing has changed yet. Graphs keep the memory of a step; without them there is room for a plain one.
            self.full = True
            self.captured.clear()
            plain.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
        finally:
            torch.cuda.set_stream(here)  # a failed capture would leave its own stream set
        return not self.full

    def _replay(self, batch: TaskBatch) -> StepResult:
        one = self.captured[batch.width]
        assert batch.buffer is not None
        one.buffer.copy_(batch.buffer, non_blocking=True)
        one.graph.replay()
        self._wait_for_an_older_one()
        return StepResult(*self.outcome.clone().unbind())  # a copy, since the next step overwrites it

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
        # Only this thread must not use the device during capture: a loader's thread may continue pinning memory.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            self._step(plain, there, idle=False)
        return Captured(graph, there.buffer)

    def _step(self, plain: PlainStep[TaskBatch], batch: TaskBatch, *, idle: bool) -> None:
        taken = plain([batch], self.labels, self.rate, idle=idle)
        self.outcome.copy_(torch.stack([taken.loss, taken.norm, taken.nonfinite]))

    def _wait_for_an_older_one(self) -> None:
        """Wait if the host is more than `AHEAD` steps ahead of the device, so that it can stop in time."""
        done = torch.cuda.Event(blocking=True)
        done.record(torch.cuda.current_stream(self.device))
        self.under_way.append(done)
        if len(self.under_way) > AHEAD:
            self.under_way.popleft().synchronize()
