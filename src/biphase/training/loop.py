"""The training loop, shared by pretraining and fine-tuning, and the optimizer step it takes.

`PlainStep` goes from micro-batches to new weights without reading from the device or waiting for it. A whole step can
therefore be captured in a CUDA graph, with the number of labels and the learning rate as device tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from biphase.training.distributed import Gradients, Ranks
from biphase.training.optimizer import update


class MicroBatch(Protocol):
    """What a step needs of a micro-batch: its number of labels, and a copy on a device."""

    @property
    def count(self) -> int: ...

    def to(self, device: torch.device) -> Self: ...


class WeightCopies(Protocol):
    """A model that reads its weights through 16-bit copies."""

    def copies(self) -> dict[int, Tensor]:
        """Return the copies by the address of the weight."""
        ...

    def refresh(self, copied: bool = False) -> None:
        """Update what depends on the weights; `copied`: the optimizer kernel has already updated the copies."""
        ...


Micro = TypeVar("Micro", bound=MicroBatch)


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step, on the device: reading it waits for the device."""

    loss: Tensor  # mean over the labels of all processes
    norm: Tensor  # gradient norm before clipping
    nonfinite: Tensor  # 1 if loss or norm was nonfinite and the step was skipped


Step = Callable[
    [list[Micro], int, float], StepResult
]  # micro-batches, labels of all processes, learning rate


@dataclass(frozen=True)
class PlainStep(Generic[Micro]):
    """An optimizer step that launches its kernels one by one, with what all steps of a training share."""

    optimizer: torch.optim.AdamW
    loss_sum: Callable[[Micro], Tensor]  # the summed loss of a micro-batch
    clip: float
    gradients: Gradients
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    model: WeightCopies | None = None  # None: its weights have no copies

    def __call__(
        self, micro: list[Micro], labels: int | Tensor, rate: float | Tensor, *, idle: bool = False
    ) -> StepResult:
        """Compute gradients and their norm, clip, and update by AdamW; with `idle`, do all this but change nothing."""
        if not isinstance(labels, Tensor):
            labels = max(labels, 1)
        device = self.gradients.ranks.device
        loss = torch.zeros((), device=device)
        for number, batch in enumerate(micro, 1):
            self.gradients.collect(last=number == len(micro))
            with self.autocast():
                part = self.loss_sum(batch.to(device)) / labels
            part.backward()
            loss += part.detach()
        loss = self.gradients.total(loss)

        norm = self.gradients.norm()
        nonfinite = torch.ones_like(loss) if idle else (~torch.isfinite(norm + loss)).float()
        shrink = (norm / self.clip).clamp(min=1)
        copies = {} if self.model is None else self.model.copies()
        copied = update(self.optimizer, rate=rate, nonfinite=nonfinite, shrink=shrink, copies=copies)
        if self.model is not None:
            self.model.refresh(copied)
        return StepResult(loss, norm, nonfinite)


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
        own = sum(batch.count for batch in micro)
        # Share the flags: all processes must leave the loop at the same step, or the others would wait forever.
        labels, stop, lost, save = ranks.sum(own, hooks.stop(), hooks.lost(), ranks.first and hooks.save())
        result = step(micro, labels, rate(number))
        done = LoopStep(
            result.loss,
            result.norm,
            result.nonfinite,
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
