"""One optimizer step, from micro-batches to new weights. Nothing in it waits for the device, or reads from it.

So it can be captured whole in a CUDA graph: the number of labels and the rate then come as numbers on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from biphase.training.gradients import Gradients
from biphase.training.optimizer import update


class MicroBatch(Protocol):
    """What a step must know of the data: how many labels it has, and how to bring it to a device."""

    @property
    def count(self) -> int: ...

    def to(self, device: torch.device) -> Self: ...


Micro = TypeVar("Micro", bound=MicroBatch)


@dataclass(frozen=True)
class Taken:
    """What a step found, on the device: reading it waits."""

    loss: Tensor  # mean over the labels of all processes
    norm: Tensor  # of the gradient, before clipping
    unsound: Tensor  # 1 where a number was not finite and nothing was changed


Step = Callable[[list[Micro], int, float], Taken]  # micro-batches, labels of all processes, rate


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
    ) -> Taken:
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
        unsound = torch.ones_like(loss) if idle else (~torch.isfinite(norm + loss)).float()
        shrink = (norm / self.clip).clamp(min=1)
        self.refresh(update(self.optimizer, rate=rate, unsound=unsound, shrink=shrink, copies=self.copies()))
        return Taken(loss, norm, unsound)
