"""The one loop. Pretraining and fine-tuning differ only in what they pass in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from biphase.training.devices import Ranks
from biphase.training.optimizer import clip_gradients, update


class MicroBatch(Protocol):
    """What the loop must know of the data: how many labels it has, and how to bring it to a device."""

    @property
    def count(self) -> int: ...

    def to(self, device: torch.device) -> Self: ...


Micro = TypeVar("Micro", bound=MicroBatch)


@dataclass(frozen=True)
class Done:
    """One optimizer step, done. The tensors are on the device: reading them waits for it."""

    step: int
    rate: float
    loss: Tensor  # mean over the labels of all processes
    norm: Tensor  # of the gradient, before clipping
    unsound: Tensor  # 1 where a number was not finite and nothing was changed
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
    after: Iterable[Callable[[Done], None]],
    stop: Callable[[], bool] = lambda: False,
    lost: Callable[[], bool] = lambda: False,
    save: Callable[[], bool] = lambda: False,
) -> None:
    """Take one optimizer step per item of `batches`, numbered from `first`."""
    for step, micro in enumerate(batches, first):
        # Masking draws a different number of labels each time, so divide by the labels of the whole step over
        # all processes: a mean of micro-batch means would weigh sparse ones too heavily.
        own = sum(batch.count for batch in micro)
        # What one process was told, all must know: they leave the loop together or wait for each other forever.
        labels, stopping, losing, saving = ranks.sum(own, stop(), lost(), ranks.first and save())

        loss = torch.zeros((), device=ranks.device)
        for batch in micro:
            with autocast():
                part = loss_sum(batch.to(ranks.device)) / max(labels, 1)
            part.backward()
            loss += part.detach()
        loss = ranks.reduce_gradients(parameters, loss)

        norm = clip_gradients(parameters, clip)
        unsound = (~torch.isfinite(norm + loss)).float()
        update(optimizer, rate=rate(step), unsound=unsound)

        done = Done(step, rate(step), loss, norm, unsound, labels, stopping > 0, losing > 0, saving > 0)
        for action in after:  # log, evaluate, save: in the order given, and nowhere else
            action(done)
        if done.stop or done.lost:
            break
