"""The gradients of a step, over all processes.

Where every process keeps the whole model they are summed once a step, behind the last micro-batch, in a fixed order of
fixed buckets. torch's DDP wrapper regroups its buckets after the first backward, so a resumed run would add in another
order than one that never stopped; with three or more processes that changes bits. The loss is already divided by the
labels of all processes, so a sum is the exact mean over labels whatever each process happened to draw.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from biphase.training.devices import Ranks
from biphase.training.optimizer import gradient_norm

BUCKET = 2**25  # elements a bucket: 128 MB of fp32 gradients, large enough to fill a link


class Gradients(Protocol):
    """From the backward passes of micro-batches to what the optimizer reads."""

    def collect(self, *, last: bool) -> None:
        """Asked before each micro-batch of a step."""
        ...

    def total(self, loss: Tensor) -> Tensor:
        """Sum the gradients over all processes; gives the sum of the losses."""
        ...

    def norm(self) -> Tensor:
        """The norm of all gradients, the same for every process."""
        ...


class Replicated:
    """Every process has the whole model, and all gradients."""

    def __init__(self, parameters: list[nn.Parameter], ranks: Ranks) -> None:
        self.parameters, self.ranks = parameters, ranks
        self.known: tuple[list[bool], Tensor] | None = None  # who had gradients last time, and on the device

    def collect(self, *, last: bool) -> None:
        """They add up in place."""

    def total(self, loss: Tensor) -> Tensor:
        if self.ranks.world == 1:
            return loss
        there = [parameter.grad is not None for parameter in self.parameters]
        for parameter in self.parameters:
            if parameter.grad is None:  # it saw no label here, but perhaps elsewhere
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets(self.parameters):
            gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            torch._foreach_copy_(
                gradients, [p.view_as(g) for p, g in zip(_split(flat, gradients), gradients, strict=True)]
            )
        summed = torch.cat([loss.detach().reshape(1), self._on_device(there, loss)])
        dist.all_reduce(summed)
        if not all(there):
            # What has no gradient anywhere is left alone, as one process leaves it: zeros would let it decay.
            # Only here the host waits for the device: for models some of whose weights are not trained.
            for parameter, count in zip(self.parameters, summed[1:].tolist(), strict=True):
                if not count:
                    parameter.grad = None
        return summed[0]

    def _on_device(self, there: list[bool], like: Tensor) -> Tensor:
        if self.known is None or self.known[0] != there:
            self.known = there, torch.tensor(there, dtype=like.dtype, device=like.device)
        return self.known[1]

    def norm(self) -> Tensor:
        return gradient_norm(self.parameters)


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    held = 0
    for parameter in parameters:
        if bucket and held + parameter.numel() > BUCKET:
            yield bucket
            bucket, held = [], 0
        bucket.append(parameter)
        held += parameter.numel()
    if bucket:
        yield bucket


def _split(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    return list(flat.split([one.numel() for one in like]))
