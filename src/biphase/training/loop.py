"""The training loop, shared by pretraining and fine-tuning, and the optimizer step it takes.

`PlainStep` goes from micro-batches to new weights without reading from the device or waiting for it (but for Muon). A
whole step can therefore be captured in a CUDA graph, with the divisors of the losses and the learning rate as device
tensors. `Graphs` does that: a step of a small model is hundreds of kernels of a few microseconds each, and launching
them one by one takes longer than running them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from biphase.models.backbone import LanguageModel
from biphase.models.encoder import Encoder
from biphase.objectives import LossTerm
from biphase.training.distributed import Gradients, Ranks
from biphase.training.optimizer import AnyOptimizer, make_capturable, update


class MicroBatch(Protocol):
    """What a step needs of a micro-batch: its number of labels, and how its loss enters the loss of the step.

    If all its tensors are views of one `buffer`, a captured step can read it; it depends on `graph_key` besides the
    contents of the buffer, and is not captured if that is None. `to` gives a copy in one buffer if `device` is a GPU.
    """

    @property
    def count(self) -> int: ...
    @property
    def term(self) -> LossTerm: ...
    @property
    def buffer(self) -> Tensor | None: ...
    @property
    def graph_key(self) -> Hashable | None: ...
    def to(self, device: torch.device) -> Self: ...


Micro = TypeVar("Micro", bound=MicroBatch)


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step, on the device: reading it waits for the device."""

    outcome: Tensor  # (3,) loss, norm, nonfinite

    @property
    def loss(self) -> Tensor:
        """The mean over the labels of all processes; of a mixture, the sum of its terms."""
        return self.outcome[0]

    @property
    def norm(self) -> Tensor:
        """The gradient norm before clipping."""
        return self.outcome[1]

    @property
    def nonfinite(self) -> Tensor:
        """1 if loss or norm was nonfinite and the step was skipped."""
        return self.outcome[2]


class StepReading:
    """Loss, gradient norm and nonfinite flag of a step, on their way to the host.

    The copy is queued behind the step, into pinned memory. Reading waits for this step alone; a copy that is queued
    when it is read would wait for all steps queued before it, and the device would then wait for the host.
    """

    def __init__(self, outcome: Tensor) -> None:
        self.event: torch.cuda.Event | None = None
        self.values = outcome
        if outcome.is_cuda:
            self.values = torch.empty(outcome.shape, dtype=outcome.dtype, pin_memory=True)
            self.values.copy_(outcome, non_blocking=True)
            self.event = torch.cuda.Event(blocking=True)
            self.event.record(torch.cuda.current_stream(outcome.device))

    def read(self) -> list[float]:
        if self.event is not None:
            self.event.synchronize()
        return self.values.tolist()


# Micro-batches, what the summed loss of each is divided by, learning rate.
Step = Callable[[list[Micro], Sequence[float], float], StepResult]


@dataclass(frozen=True)
class PlainStep(Generic[Micro]):
    """An optimizer step that launches its kernels one by one, with what all steps of a training share."""

    optimizer: AnyOptimizer
    loss_sum: Callable[[Micro], Tensor]  # the summed loss of a micro-batch, in the precision of the run
    clip: float
    gradients: Gradients
    encoder: Encoder | None = None  # which reads its weights through 16-bit copies; None: there are none

    def __call__(
        self,
        micro: list[Micro],
        divisors: Sequence[float] | Tensor,
        rate: float | Tensor,
        *,
        idle: bool = False,
    ) -> StepResult:
        """Compute gradients and their norm, clip, and update; with `idle`, do all this but change nothing."""
        device = self.gradients.ranks.device
        loss = torch.zeros((), device=device)
        for number, batch in enumerate(micro):
            self.gradients.collect(last=number == len(micro) - 1)
            part = self.loss_sum(batch.to(device)) / divisors[number]
            part.backward()
            loss += part.detach()
        loss = self.gradients.total(loss)

        norm = self.gradients.norm()
        nonfinite = torch.ones_like(loss) if idle else (~torch.isfinite(norm + loss)).float()
        shrink = (norm / self.clip).clamp(min=1)
        copies = {} if self.encoder is None else self.encoder.copies()
        copied = update(self.optimizer, rate=rate, nonfinite=nonfinite, shrink=shrink, copies=copies)
        if self.encoder is not None:
            self.encoder.refresh(copied)
        return StepResult(torch.stack([loss, norm, nonfinite]))


# ---------------------------------------------------------------- graphs
# A graph reads and writes the same memory each time. So a batch is copied into the buffer that was captured, learning
# rate and divisors are device tensors, and weights and optimizer state stay in place. Plain steps use the same
# memory, so both kinds can alternate.
#
# Before capture, a step is run `WARM` times so that kernels are compiled and selected. These steps change nothing,
# because AdamW is told that the gradients are not finite and skips the update.


WARM = 2  # steps before a capture, without effect
MOST_CAPTURED = 4  # micro-batches; a step of more keeps the device busy without a graph
CAPTURED_WORK = 4e12  # parameters × tokens of a micro-batch: a 210M model exceeds it with 12 rows of 2,048
# Steps queued on the device before the host waits: enough to keep it busy, few enough to stop soon.
AHEAD = 16


@dataclass(frozen=True)
class CapturedStep:
    """The graph of one shape of step."""

    graph: torch.cuda.CUDAGraph
    buffers: tuple[Tensor, ...]  # where the graph reads its micro-batches


class Graphs(Generic[Micro]):
    """The captured steps of one model and optimizer, by the keys of their micro-batches."""

    def __init__(self, optimizer: AnyOptimizer, device: torch.device) -> None:
        assert isinstance(optimizer, torch.optim.AdamW), "a step of Muon waits for the host"
        make_capturable(optimizer, device)
        self.device = device
        self.captured: dict[Hashable, CapturedStep] = {}
        self.full = False  # out of memory for graphs: every step is a plain one
        self.pool = torch.cuda.graph_pool_handle()  # shared, since no two graphs run at a time
        self.stream = _capturing_stream(device)
        # Inputs and outputs of graphs are allocated outside the pool, where no other graph writes.
        self.divisors = torch.ones(MOST_CAPTURED, device=device)
        self.rate = torch.zeros((), device=device)
        self.outcome = torch.zeros(3, device=device)
        self.under_way: deque[torch.cuda.Event] = deque()

    def over(self, plain: PlainStep[Micro]) -> Step[Micro]:
        """Return a step function that replays a graph if the micro-batches have keys, else takes a plain step."""

        def take(micro: list[Micro], divisors: Sequence[float], rate: float) -> StepResult:
            key = tuple(batch.graph_key for batch in micro)
            capturable = len(key) <= MOST_CAPTURED and None not in key
            if capturable and self._ready(plain, key, micro, divisors, rate):
                return self._replay(key, micro)
            return plain(micro, divisors, rate)

        return take

    def _ready(
        self,
        plain: PlainStep[Micro],
        key: Hashable,
        micro: list[Micro],
        divisors: Sequence[float],
        rate: float,
    ) -> bool:
        """Set the graphs' inputs, and capture a graph for the key if needed; False: no memory for graphs."""
        for there, divisor in zip(self.divisors, divisors, strict=False):
            there.fill_(divisor)
        self.rate.fill_(rate)
        if self.full or key in self.captured:
            return not self.full
        here = torch.cuda.current_stream(self.device)
        try:
            self.captured[key] = self._capture(plain, micro)
        except torch.OutOfMemoryError:
            # Nothing has changed yet. Graphs keep the memory of a step; without them there is room for a plain one.
            self.full = True
            self.captured.clear()
            plain.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
        finally:
            torch.cuda.set_stream(here)  # a failed capture would leave its own stream set
        return not self.full

    def _replay(self, key: Hashable, micro: list[Micro]) -> StepResult:
        captured = self.captured[key]
        for buffer, batch in zip(captured.buffers, micro, strict=True):
            buffer.copy_(_buffer_of(batch), non_blocking=True)
        captured.graph.replay()
        self._wait_for_an_older_one()
        return StepResult(self.outcome.clone())  # a copy, since the next step overwrites it

    def _capture(self, plain: PlainStep[Micro], micro: list[Micro]) -> CapturedStep:
        there = [batch.to(self.device) for batch in micro]
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
        return CapturedStep(graph, tuple(map(_buffer_of, there)))

    def _step(self, plain: PlainStep[Micro], micro: list[Micro], *, idle: bool) -> None:
        self.outcome.copy_(plain(micro, self.divisors, self.rate, idle=idle).outcome)

    def _wait_for_an_older_one(self) -> None:
        """Wait if the host is more than `AHEAD` steps ahead of the device, so that it can stop in time."""
        done = torch.cuda.Event(blocking=True)
        done.record(torch.cuda.current_stream(self.device))
        self.under_way.append(done)
        if len(self.under_way) > AHEAD:
            self.under_way.popleft().synchronize()


def worth_capturing(model: LanguageModel, device: torch.device, tokens: int) -> bool:
    """Return whether pretraining steps on micro-batches of `tokens` tokens can be captured, and gain by it.

    Kernels of a large model take longer than their launches: a graph brings nothing, and the head computes the
    positions that fill up the labels.
    """
    work = sum(parameter.numel() for parameter in model.parameters()) * tokens
    return device.type == "cuda" and model.encoder.graphable and work < CAPTURED_WORK


@cache
def _capturing_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which steps are captured; one for all, since cuBLAS keeps 64 MB for each stream."""
    return torch.cuda.Stream(device)


def _buffer_of(batch: MicroBatch) -> Tensor:
    assert batch.buffer is not None, "a batch with a key is in one buffer"
    return batch.buffer


# ---------------------------------------------------------------- loop


@dataclass(frozen=True)
class LoopStep(StepResult):
    """A finished optimizer step, as passed to the hooks."""

    step: int
    rate: float
    labels: int
    stop: bool  # a stop was requested: the loop ends after this step
    lost: bool  # another worker has taken the job over: the loop ends, and nothing more is published
    save: bool  # the first process requests a checkpoint


def _no() -> bool:
    return False


@dataclass(frozen=True)
class Hooks:
    """What the loop calls: `after` after each step, in order; the others before each step, as questions."""

    after: tuple[Callable[[LoopStep], None], ...] = ()
    stop: Callable[[], bool] = _no
    lost: Callable[[], bool] = _no
    save: Callable[[], bool] = _no  # asked on the first process only


@dataclass(frozen=True)
class _Divisors(Sequence[float]):
    """The divisors of a step's losses. They are first read after a forward pass, during which they are exchanged."""

    terms: list[LossTerm]  # of the micro-batches
    sums: Callable[[], list[int]]  # waits for the sums over all processes: first the mass of each term

    def __len__(self) -> int:
        return len(self.terms)

    def __getitem__(self, number: Any) -> Any:
        term = self.terms[number]
        return max(self.sums()[term.number], 1) / term.weight


def train(
    step: Step[Micro],
    batches: Iterable[list[Micro]],
    *,
    first: int,
    rate: Callable[[int], float],
    ranks: Ranks,
    hooks: Hooks,
) -> None:
    """Take one optimizer step per item of `batches`, numbered from `first`, at the learning rate `rate(number)`."""
    for number, micro in enumerate(batches, first):
        # The number of labels varies with masking, so divide by the labels of the whole step over all processes: a
        # mean of micro-batch means would weight sparse ones too much.
        terms = [batch.term for batch in micro]
        masses = [sum(term.mass for term in terms if term.number == part) for part in range(terms[0].terms)]
        own = sum(batch.count for batch in micro)
        # Share the flags: all processes must leave the loop at the same step, or the others would wait forever.
        shared = cache(
            ranks.start_sum(*masses, own, hooks.stop(), hooks.lost(), ranks.first and hooks.save())
        )
        result = step(micro, _Divisors(terms, shared), rate(number))
        *_, labels, stop, lost, save = shared()
        done = LoopStep(
            result.outcome,
            step=number,
            rate=rate(number),
            labels=labels,
            stop=stop > 0,
            lost=lost > 0,
            save=save > 0,
        )
        for action in hooks.after:  # log, evaluate, save
            action(done)
        if done.stop or done.lost:
            break
