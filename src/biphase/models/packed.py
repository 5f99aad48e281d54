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
import torch.nn.functional as F
from torch import Tensor

from biphase.models.attention import Sight, segment_mask

ROW = (
    96  # a row is at most as long as the longest text, or this: short texts share rows, attention stays cheap
)
ALIGNED = 16  # bytes: where a tensor may begin inside a buffer


@dataclass(frozen=True)
class Packed:
    """n texts with N tokens together, in B rows of T places.

    Where it was `padded`, N counts the padding too, whose owner is n: no text.
    """

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

    def tokens(self, hidden: Tensor) -> Tensor:
        """Of (B, T, …) places those with a token, text after text. → (N, …)"""
        every = hidden.flatten(0, 1)
        return every if self.boundaries is not None else every[self.at]  # end to end they stand so already

    def padded(self, width: int, *, spare: int, longest: int) -> Packed:
        """The same texts end to end, then `spare` texts of nothing that fill the row up to `width` places.

        Each of those has a token at least, so that their number, like every shape, is the same for any n texts that
        fit; `longest` says how long texts of that kind may be at most. They are no texts for pooling: `lengths` has
        only the real ones.
        """
        more = width - self.ids.numel()
        assert self.boundaries is not None, "only texts that stand end to end can be padded behind the last"
        assert 0 < spare <= more <= spare * longest
        assert self.longest <= longest
        lengths = np.full(spare, more // spare)
        lengths[: more % spare] += 1
        number = np.repeat(np.arange(spare), lengths)
        position = np.arange(more) - (np.cumsum(lengths) - lengths)[number]
        ends = torch.from_numpy(np.cumsum(lengths).astype(np.int32)) + self.boundaries[-1]
        return replace(
            self,
            ids=F.pad(self.ids, (0, more)),
            positions=torch.cat([self.positions, torch.from_numpy(position)[None]], 1),
            segments=torch.cat([self.segments, torch.from_numpy(number)[None] + len(self)], 1),
            boundaries=torch.cat([self.boundaries, ends]),
            longest=longest,
            at=torch.arange(width),
            owner=F.pad(self.owner, (0, more), value=len(self)),
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if isinstance(value, Tensor)}

    def to(self, device: torch.device) -> Packed:
        """The same on `device`, without waiting for the copy."""
        if device.type == "cpu":
            return self
        own = self.tensors
        buffer = in_one_piece(list(own.values()), pinned=True).to(device, non_blocking=True)
        return replace(self, **dict(zip(own, pieces(buffer, list(own.values())), strict=True)))


def in_one_piece(tensors: Sequence[Tensor], *, pinned: bool) -> Tensor:
    """Tensors of the host copied into one buffer of bytes: one transfer instead of many."""
    places, size = _places(tensors)
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    for one, piece in zip(tensors, _cut(buffer, tensors, places), strict=True):
        piece.copy_(one)
    return buffer


def pieces(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """What `in_one_piece` put into a buffer: views of it, each of the shape and type of its tensor in `like`."""
    return _cut(buffer, like, _places(like)[0])


def _places(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each tensor begins, in bytes, and where the last ends."""
    places, end = [], 0
    for one in tensors:
        places.append(end)
        end += -(-one.nbytes // ALIGNED) * ALIGNED
    return places, end


def _cut(buffer: Tensor, like: Sequence[Tensor], places: list[int]) -> list[Tensor]:
    return [
        buffer[place : place + one.nbytes].view(one.dtype).view(one.shape)
        for one, place in zip(like, places, strict=True)
    ]


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
