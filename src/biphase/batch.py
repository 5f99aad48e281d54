"""What travels from the data to the model: one micro-batch, complete.

B rows, T tokens a row, P labelled positions. `label_at` and `labels` list the labelled positions only
(the head never sees the others); both may be padded, with `IGNORE`, to a fixed length so that a compiled
graph keeps its shapes. `count` is the number of real labels and is known on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

IGNORE = -100


@dataclass(frozen=True)
class Batch:
    ids: Tensor  # (B, T) what the model reads
    positions: Tensor  # (B, T) counted from the start of the chunk
    segments: Tensor | None  # (B, T) number of the chunk or document inside its row; None: whole rows
    boundaries: Tensor | None  # cumulative lengths of all segments of the batch, int32; None: whole rows
    label_at: Tensor  # (P,) index into the B·T positions
    labels: Tensor  # (P,) the token asked for there
    count: int  # labels that are not IGNORE
    causal: bool
    draws: Tensor  # (B,) which samples these are, for messages
    steady: bool = False  # every batch of its shape has as many segments

    def ready_for(self, device: torch.device) -> Batch:
        """The same where `device` can fetch it without waiting: work for a loader's thread."""
        return self if device.type == "cpu" else self._each(lambda one: one.pin_memory())

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`, without waiting for the copy."""
        if self.ids.device.type == device.type:
            return self
        return self._each(
            lambda one: (one if one.is_pinned() else one.pin_memory()).to(device, non_blocking=True)
        )

    def silent(self) -> Batch:
        """The same text with nothing asked: its loss and its gradients are zero."""
        return replace(self, labels=torch.full_like(self.labels, IGNORE), count=0)

    def _each(self, moved: Callable[[Tensor], Tensor]) -> Batch:
        """All that the model reads, `moved`."""
        values = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: moved(value) for name, value in values.items() if name != "draws"})
