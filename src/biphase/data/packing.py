"""Where a row may not be looked across: chunks, documents, or nowhere.

    Chunks    ■■■■■■■■|■■■■■■■■■■■■■■■   one cut a row, at r = f(seed, draw), uniform in [shortest, T − shortest]
    Rows      ■■■■■■■■■■■■■■■■■■■■■■■■   no cut; with document_mask, a cut after every end token

Rows are cut from the concatenated documents at multiples of T. Nothing is padded and nothing dropped but the
last T − 1 tokens of an epoch at most; the price is that some documents are cut in two. Best-fit packing cuts
fewer, but needs a buffer, and then the position of a stopped run is no longer one integer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from biphase.randomness import below, hash_draws
from biphase.specs import Chunks, Rows


def segments_of(
    packing: Chunks | Rows, ids: Tensor, draws: Tensor, *, seed: int, eos_id: int
) -> Tensor | None:
    """The number of each token's segment inside its row, (B, T); None where rows are whole."""
    length = ids.shape[1]
    match packing:
        case Chunks():
            choices = length - 2 * packing.shortest + 1
            cut = packing.shortest + below(hash_draws(seed, "cut", draws), choices)
            return (torch.arange(length)[None, :] >= cut[:, None]).long()
        case Rows(document_mask=True):
            ends = (ids == eos_id).long()
            return ends.cumsum(1) - ends  # the end token still belongs to its document
        case Rows():
            return None


def positions_of(segments: Tensor | None, rows: int, length: int) -> Tensor:
    """Each token's position counted from the start of its segment, (B, T)."""
    count = torch.arange(length).repeat(rows, 1)
    if segments is None:
        return count
    return count - _starts(segments).mul(count).cummax(1).values


def boundaries_of(segments: Tensor | None, *, fixed: bool, documents: bool = False) -> Tensor | None:
    """Cumulative segment lengths over the whole batch, as varlen kernels want them.

    With `fixed`, empty segments at the end bring the list to a length that hardly ever changes, so that a
    compiled graph is not built again for a batch with one document more. Chunks are two a row; the number of
    `documents` varies, so room is left in powers of two.
    """
    if segments is None:
        return None
    total = segments.numel()
    starts = _starts(segments).flatten().nonzero().flatten()
    length = len(starts) + 1
    if fixed:
        length = max(length, segments.shape[0] * 2 + 1)
        if documents:
            length = (1 << (max(length, total // 64) - 1).bit_length()) + 1
    padded = torch.full((length,), total, dtype=torch.int32)
    padded[: len(starts)] = starts.int()
    return padded


def _starts(segments: Tensor) -> Tensor:
    """1 where a segment begins, (B, T)."""
    starts = torch.ones_like(segments)
    starts[:, 1:] = (segments[:, 1:] != segments[:, :-1]).long()
    return starts
