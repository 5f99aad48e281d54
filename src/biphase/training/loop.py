"""One optimizer step, from micro-batches to new weights. Nothing in it waits for the device, or reads from it.

So it can be captured whole in a CUDA graph: the number of labels and the rate then come as numbers on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from biphase.training.distributed import Gradients, Ranks, Replicated
from biphase.training.optimizer import update


class MicroBatch(Protocol):
    """What a step must know of the data: how many labels it has, and how to bring it to a device."""

    @property
    def count(self) -> int: ...

    def to(self, device: torch.device) -> Self: ...


Micro = TypeVar("Micro", bound=MicroBatch)


@dataclass(frozen=True)
class StepResult:
    """What a step found, on the device: reading it waits."""

    loss: Tensor  # mean over the labels of all processes
    norm: Tensor  # of the gradient, before clipping
    nonfinite: Tensor  # 1 where a number was not finite and nothing was changed


Step = Callable[[list[Micro], int, float], StepResult]  # micro-batches, labels of all processes, rate


@dataclass(frozen=True)
class PlainStep(Generic[Micro]):
    """A step taken kernel by kernel; what all steps of a training have in common."""

    optimizer: torch.optim.AdamW
    loss_sum: Callable[[Micro], Tensor]
    clip: float
    device: torch.device
    gradients: Gradients
    autocast: Callable[[], AbstractContextManager[object]]
    copies: Callable[[], dict[int, Tensor]]  # of weights in 16 bits, by the address of the weight
    refresh: Callable[
        [bool], None
    ]  # makes them anew, unless told that they are, and all that is made of them

    def __call__(
        self, micro: list[Micro], labels: int | Tensor, rate: float | Tensor, *, idle: bool = False
    ) -> StepResult:
        """Gradients, their norm, clipping, AdamW. `idle`: all of it, and nothing is changed."""
        if not isinstance(labels, Tensor):
            labels = max(labels, 1)
        loss = torch.zeros((), device=self.device)
        for number, batch in enumerate(micro, 1):
            self.gradients.collect(last=number == len(micro))
            with self.autocast():
                part = self.loss_sum(batch.to(self.device)) / labels
            part.backward()
            loss += part.detach()
        loss = self.gradients.total(loss)

        norm = self.gradients.norm()
        nonfinite = torch.ones_like(loss) if idle else (~torch.isfinite(norm + loss)).float()
        shrink = (norm / self.clip).clamp(min=1)
        self.refresh(
            update(self.optimizer, rate=rate, nonfinite=nonfinite, shrink=shrink, copies=self.copies())
        )
        return StepResult(loss, norm, nonfinite)


# ---------------------------------------------------------------- loop
# The one loop. Pretraining and fine-tuning differ only in what they pass in.


@dataclass(frozen=True)
class LoopStep:
    """One optimizer step, done. The tensors are on the device: reading them waits for it."""

    step: int
    rate: float
    loss: Tensor  # mean over the labels of all processes
    norm: Tensor  # of the gradient, before clipping
    nonfinite: Tensor  # 1 where a number was not finite and nothing was changed
    labels: int
    stop: bool  # somebody asked to stop: the loop ends after this step
    lost: bool  # the job is another's now: the loop ends, and nothing more is published
    save: bool  # the first process wants a checkpoint


def train(
    parameters: list[nn.Parameter],
    optimizer: torch.optim.AdamW,
    loss_sum: Callable[[Micro], Tensor],
    batches: Iterable[list[Micro]],
    *,
    first: int,
    rate: Callable[[int], float],
    clip: float,
    ranks: Ranks,
    autocast: Callable[[], AbstractContextManager[object]],
    after: Iterable[Callable[[LoopStep], None]],
    stop: Callable[[], bool] = lambda: False,
    lost: Callable[[], bool] = lambda: False,
    save: Callable[[], bool] = lambda: False,
    copies: Callable[[], dict[int, Tensor]] = dict,
    refresh: Callable[[bool], None] = lambda copied: None,
    step: Callable[[PlainStep[Micro]], Step[Micro]] = lambda plain: plain,
    gradients: Gradients | None = None,
) -> None:
    """Take one optimizer step per item of `batches`, numbered from `first`.

    `copies` of weights in 16 bits are kept as fresh as the weights, by the update itself or by `refresh`. `step` may put another way to take a step before the plain one. `gradients`: where the model is not whole in each process.
    """
    summed = gradients or Replicated(parameters, ranks)
    take = step(PlainStep(optimizer, loss_sum, clip, ranks.device, summed, autocast, copies, refresh))
    for number, micro in enumerate(batches, first):
        # Masking draws a different number of labels each time, so divide by the labels of the whole step over
        # all processes: a mean of micro-batch means would weigh sparse ones too heavily.
        own = sum(batch.count for batch in micro)
        # What one process was told, all must know: they leave the loop together or wait for each other forever.
        labels, stopping, losing, saving = ranks.sum(own, stop(), lost(), ranks.first and save())
        taken = take(micro, labels, rate(number))
        done = LoopStep(
            number,
            rate(number),
            taken.loss,
            taken.norm,
            taken.nonfinite,
            labels,
            stopping > 0,
            losing > 0,
            saving > 0,
        )
        for action in after:  # log, evaluate, save: in the order given, and nowhere else
            action(done)
        if done.stop or done.lost:
            break
