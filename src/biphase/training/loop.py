"""The training loop, shared by pretraining and fine-tuning, and the optimizer step it takes.

`PlainStep` goes from micro-batches to new weights without reading from the device or waiting for it. A whole step can
therefore be captured in a CUDA graph, with the number of labels and the learning rate as device tensors.
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
    """What a step needs of a micro-batch: its number of labels, and a copy on a device."""

    @property
    def count(self) -> int: ...

    def to(self, device: torch.device) -> Self: ...


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
    loss_sum: Callable[[Micro], Tensor]
    clip: float
    device: torch.device
    gradients: Gradients
    autocast: Callable[[], AbstractContextManager[object]]
    copies: Callable[[], dict[int, Tensor]]  # 16-bit copies of weights, by the address of the weight
    # Refreshes what depends on the weights; the argument says whether the update has already refreshed `copies`.
    refresh: Callable[[bool], None]

    def __call__(
        self, micro: list[Micro], labels: int | Tensor, rate: float | Tensor, *, idle: bool = False
    ) -> StepResult:
        """Compute gradients and their norm, clip, and update by AdamW; with `idle`, do all this but change nothing."""
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


@dataclass(frozen=True)
class LoopStep:
    """A finished optimizer step, as passed to the `after` callbacks. Reading its tensors waits for the device."""

    step: int
    rate: float
    loss: Tensor  # mean over the labels of all processes
    norm: Tensor  # gradient norm before clipping
    nonfinite: Tensor  # 1 if loss or norm was nonfinite and the step was skipped
    labels: int
    stop: bool  # a stop was requested: the loop ends after this step
    lost: bool  # another worker has taken the job over: the loop ends, and nothing more is published
    save: bool  # the first process requests a checkpoint


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

    `loss_sum` returns the summed loss of a micro-batch. `rate` gives the learning rate of a step, `after` are callbacks
    after each step, in order. `stop`, `lost` and `save` are polled before each step; `save` on the first process only.
    `copies`: 16-bit copies of the weights, refreshed by the optimizer kernel or by `refresh`. `step` may wrap or
    replace the plain step, e.g. by a CUDA graph. `gradients` is given if the model is sharded over processes.
    """
    summed = gradients or Replicated(parameters, ranks)
    take = step(PlainStep(optimizer, loss_sum, clip, ranks.device, summed, autocast, copies, refresh))
    for number, micro in enumerate(batches, first):
        # The number of labels varies with masking, so divide by the labels of the whole step over all processes: a
        # mean of micro-batch means would weight sparse ones too much.
        own = sum(batch.count for batch in micro)
        # Share the flags: all processes must leave the loop at the same step, or the others would wait forever.
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
        for action in after:  # log, evaluate, save
            action(done)
        if done.stop or done.lost:
            break
