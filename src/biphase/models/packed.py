"""Texts of different lengths as one input: end to end for the varlen kernel, else side by side in full rows.

A batch of 32 short sentences padded to the longest is more than half padding. Here there is none on a GPU, and on
a CPU only what is left at the ends of rows when texts have been fitted into them, longest first: 1 to 2% of a batch
of 32 sentences of 13 tokens on average, where padding to the longest would be 68%.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from biphase.models.attention import Sight, segment_mask

ROW = (
    96  # a row is at most as long as the longest text, or this: short texts share rows, attention stays cheap
)


@dataclass(frozen=True)
class Packed:
    """n texts with N tokens together, in B rows of T places."""

    ids: Tensor  # (B, T)
    positions: Tensor  # (B, T) counted from the start of each text
    segments: Tensor  # (B, T) number of the text in its row; places left over have one of their own
    boundaries: (
        Tensor | None
    )  # (n+1,) int32: cumulative lengths, where there is one row for the varlen kernel
    longest: int
    at: Tensor  # (N,) where each token stands in the B·T places, text after text
    owner: Tensor  # (N,) which text it belongs to
    lengths: Tensor  # (n,)
    causal: bool = False

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def sight(self) -> Sight:
        """Every text sees all of itself, or what came before, and nothing else."""
        if self.boundaries is not None:
            return Sight(self.causal, self.boundaries, self.longest)
        return Sight(self.causal, mask=segment_mask(self.segments, causal=self.causal))

    def to(self, device: torch.device) -> Packed:
        """The same on `device`, without waiting for the copy."""
        if device.type == "cpu":
            return self
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {
            name: value.pin_memory().to(device, non_blocking=True)
            for name, value in values.items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved)


def pack(texts: Sequence[np.ndarray], *, varlen: bool, pad: int = 0, causal: bool = False) -> Packed:
    """Put texts (their ids) into one input. `varlen`: one row, without padding."""
    lengths = np.fromiter((len(text) for text in texts), np.int64, len(texts))
    longest = int(lengths.max())
    if varlen:
        rows, starts, width = 1, np.cumsum(lengths) - lengths, int(lengths.sum())
        row_of, number = np.zeros(len(texts), np.int64), np.arange(len(texts))
    else:
        row_of, starts, number = _fit(lengths, max(longest, ROW))
        rows, width = int(row_of.max()) + 1, int((starts + lengths).max())
    owner = np.repeat(np.arange(len(texts)), lengths)
    position = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    at = (row_of * width + starts)[owner] + position
    ids = np.full(rows * width, pad, np.int64)
    positions, segments = np.zeros(rows * width, np.int64), np.full(rows * width, -1, np.int64)
    ids[at], positions[at], segments[at] = np.concatenate(texts), position, number[owner]
    boundaries = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32) if varlen else None
    return Packed(
        ids=torch.from_numpy(ids).view(rows, width),
        positions=torch.from_numpy(positions).view(rows, width),
        segments=torch.from_numpy(segments).view(rows, width),
        boundaries=None if boundaries is None else torch.from_numpy(boundaries),
        longest=longest,
        at=torch.from_numpy(at),
        owner=torch.from_numpy(owner),
        lengths=torch.from_numpy(lengths),
        causal=causal,
    )


# Of each text: its row, its place there, its number in the row.
Fitted = tuple[np.ndarray, np.ndarray, np.ndarray]


def _fit(lengths: np.ndarray, width: int) -> Fitted:
    """Texts in rows of at most `width`: spread evenly, or row after row filled up, whichever leaves less empty.

    Of a mixture of lengths the last row filled up would often stay half empty; but where few texts make a row, filling
    needs fewer rows.
    """
    counts = range(-(-int(lengths.sum()) // width), len(lengths))
    enough = bisect_left(counts, True, key=lambda rows: _width(_spread(lengths, rows), lengths) <= width)
    fitted = _spread(lengths, counts.start + enough), _fill(lengths, width)
    return min(fitted, key=lambda one: (int(one[0].max()) + 1) * _width(one, lengths))


def _width(fitted: Fitted, lengths: np.ndarray) -> int:
    return int((fitted[1] + lengths).max())


def _spread(lengths: np.ndarray, rows: int) -> Fitted:
    """Longest first, each into the row with the most room."""
    row_of, starts, number = (np.zeros(len(lengths), np.int64) for _ in range(3))
    used = [(0, row) for row in range(rows)]
    count = [0] * rows
    for text in np.argsort(-lengths, kind="stable"):
        start, row = used[0]
        heapq.heapreplace(used, (start + int(lengths[text]), row))
        row_of[text], starts[text], number[text] = row, start, count[row]
        count[row] += 1
    return row_of, starts, number


def _fill(lengths: np.ndarray, width: int) -> Fitted:
    """Longest first, each into the first row with room."""
    row_of, starts, number = (np.zeros(len(lengths), np.int64) for _ in range(3))
    used: list[int] = []
    count: list[int] = []
    for text in np.argsort(-lengths, kind="stable"):
        length = int(lengths[text])
        row = next((row for row, full in enumerate(used) if full + length <= width), len(used))
        if row == len(used):
            used.append(0)
            count.append(0)
        row_of[text], starts[text], number[text] = row, used[row], count[row]
        used[row] += length
        count[row] += 1
    return row_of, starts, number
