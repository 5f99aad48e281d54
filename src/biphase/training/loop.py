"""The one loop. Pretraining and fine-tuning differ only in what they pass in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from biphase.training.devices import Ranks
from biphase.training.gradients import Gradients, Replicated
from biphase.training.step import Micro, PlainStep, Step


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
        done = Done(
            number,
            rate(number),
            taken.loss,
            taken.norm,
            taken.unsound,
            labels,
            stopping > 0,
            losing > 0,
            saving > 0,
        )
        for action in after:  # log, evaluate, save: in the order given, and nowhere else
            action(done)
        if done.stop or done.lost:
            break
