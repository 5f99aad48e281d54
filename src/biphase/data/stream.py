"""The stream of training batches: packing into rows and segments, and the order of the data.

Packing. Rows of T tokens are cut from the concatenated documents at multiples of T. Attention stays inside segments:

    Chunks    ■■■■■■■■|■■■■■■■■■■■■■■■   one cut per row at f(seed, sample index), uniform in [shortest, T − shortest]
    Rows      ■■■■■■■■■■■■■■■■■■■■■■■■   no cut; with document_mask, a cut after every end token

There is no padding, and at most the last T − 1 tokens of an epoch are dropped; in return some documents are split.
Best-fit packing splits fewer, but needs a buffer, so the data position of an interrupted run would not be one integer.

Order. `Stream` is a pure function from a step to its batch. With N rows in the corpus, the sample index
epoch·N + index counts every row ever read; its row is f(seed, epoch, index), and its cut and masks are
f(seed, sample index). Step s of a run with R rows per step takes the sample indices [first + s·R, first + (s+1)·R), and
each process takes its share by rank. The data position of a run is therefore one integer, any number of loader threads
or processes gives the same batches, and repetitions of a small corpus are counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from biphase.data.shards import Shards, Tokens
from biphase.data.tokenizer import continues_word, load_saved
from biphase.errors import DataError
from biphase.objectives import IGNORE, WHOLE, Assigned, Batch, LossTerm, Vocabulary, apply, label_bound
from biphase.randomness import below, hash_samples, permute, salt
from biphase.specs import Chunks, RowObjective, Rows

Packing = Chunks | Rows


def segments_of(packing: Packing, ids: Tensor, samples: Tensor, *, seed: int, eos_id: int) -> Tensor | None:
    """Return the index of each token's segment inside its row, (B, T); None if each row is one segment."""
    length = ids.shape[1]
    match packing:
        case Chunks():
            choices = length - 2 * packing.shortest + 1
            cut = packing.shortest + below(hash_samples(seed, "cut", samples), choices)
            return (torch.arange(length)[None, :] >= cut[:, None]).long()
        case Rows(document_mask=True):
            ends = (ids == eos_id).long()
            return ends.cumsum(1) - ends  # the end token belongs to the document it ends
        case Rows():
            return None


def positions_of(segments: Tensor | None, rows: int, length: int) -> Tensor:
    """Return each token's position counted from the start of its segment, (B, T)."""
    count = torch.arange(length).repeat(rows, 1)
    if segments is None:
        return count
    return count - _starts(segments).mul(count).cummax(1).values


def boundaries_of(segments: Tensor | None, *, fixed: bool, documents: bool = False) -> Tensor | None:
    """Return the cumulative segment lengths over the whole batch, as varlen kernels expect them.

    With `fixed`, empty segments at the end pad the list to a length that rarely changes, so that a compiled graph is
    not rebuilt for every number of segments. Chunks are two per row; the number of `documents` varies, so it is
    rounded up to a power of two.
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
    """Return 1 where a segment begins, else 0, (B, T)."""
    starts = torch.ones_like(segments)
    starts[:, 1:] = (segments[:, 1:] != segments[:, :-1]).long()
    return starts


# ---------------------------------------------------------------- stream


@dataclass(frozen=True)
class Stream:
    """The rows of a tokenized corpus in an order determined by the seed."""

    tokens: Tokens
    packing: Packing
    seed: int
    eos_id: int
    vocabulary: Vocabulary
    shuffled: bool = True

    @classmethod
    def of(cls, shards: Shards, packing: Packing, seed: int, *, words: bool = False) -> Stream:
        """Return the stream of the training rows of `shards`; `words`: whole words are masked."""
        vocabulary = _vocabulary(shards, words=words)
        stream = cls(shards.train, packing, seed, shards.eos_id, vocabulary)
        if stream.rows == 0:
            raise DataError(
                f"the corpus has {len(shards.train):,} tokens, fewer than one row of {packing.length:,}; "
                "use a larger corpus or a shorter packing length"
            )
        return stream

    @property
    def rows(self) -> int:
        """N, the number of whole rows in the corpus. The tokens left over are fewer than one row."""
        return len(self.tokens) // self.packing.length

    def epochs(self, samples: int) -> float:
        """Return the number of epochs after `samples` rows."""
        return samples / self.rows

    def ids(self, samples: Tensor) -> Tensor:
        """Return the true tokens of the sample indices `samples`. (B,) → (B, T)"""
        index = samples % self.rows
        if self.shuffled:
            epochs = samples // self.rows
            for epoch in epochs.unique().tolist():
                here = epochs == epoch
                index[here] = permute(index[here], self.rows, salt(self.seed, "order", epoch))
        return torch.from_numpy(self.tokens.rows(index.numpy(), self.packing.length).astype(np.int64))

    def batch(
        self,
        objective: RowObjective,
        samples: Tensor,
        *,
        step: int,
        fixed: bool = False,
        term: LossTerm = WHOLE,
    ) -> Batch:
        """Return the batch of the sample indices `samples` under `objective`, `step` steps into its phase.

        `fixed` pads the lists of labels and boundaries to lengths that stay the same from step to step. `term`: how its
        loss enters that of the step, before its mass.
        """
        ids = self.ids(samples)
        segments = segments_of(self.packing, ids, samples, seed=self.seed, eos_id=self.eos_id)
        inputs = apply(
            objective, ids, segments, samples, seed=self.seed, step=step, vocabulary=self.vocabulary
        )
        flat = inputs.labels.flatten()
        label_at = (flat != IGNORE).nonzero().flatten()
        labels, count, rare = flat[label_at], len(label_at), False
        if fixed:
            bound = label_bound(objective, *ids.shape)
            rare = bound < count
            while bound < count:  # checked on the host before the step, so that no label is dropped
                bound *= 2
            if bound >= flat.numel():
                label_at, labels = torch.arange(flat.numel()), flat
            else:
                # Distinct positions: the fused path copies gradients back to their tokens instead of adding them.
                filling = (flat == IGNORE).nonzero().flatten()[: bound - count]
                label_at = torch.cat([label_at, filling])
                labels = flat[label_at]
        weights = inputs.weights
        return Batch(
            ids=inputs.ids,
            positions=positions_of(segments, *ids.shape),
            segments=segments,
            boundaries=boundaries_of(segments, fixed=fixed, documents=isinstance(self.packing, Rows)),
            label_at=label_at,
            labels=labels,
            count=count,
            causal=inputs.causal,
            samples=samples,
            weights=None if weights is None else weights[label_at // ids.shape[1]],
            loss_term=replace(term, mass=count if inputs.mass is None else inputs.mass),
            steady=isinstance(self.packing, Chunks),
            fixed=fixed and not rare,  # a shape of its own, which is not worth a captured step
        )


def _vocabulary(shards: Shards, *, words: bool) -> Vocabulary:
    table = continues_word(load_saved(shards.tokenizer)) if words else None
    return Vocabulary.of(shards.vocab, shards.mask_id, shards.special_ids, table)


def heldout_stream(shards: Shards, packing: Packing, *, words: bool = False) -> Stream:
    """Return the stream of held-out rows, whose order, cuts and masks do not depend on the run's seed."""
    vocabulary = _vocabulary(shards, words=words)
    return Stream(shards.heldout, packing, 0, shards.eos_id, vocabulary, shuffled=False)


def share(
    step: list[Assigned], rank: int, world: int, micro_rows: int, *, few_shapes: bool = False
) -> list[Assigned]:
    """Return the micro-batches that process `rank` of `world` computes of one step.

    The rows of a step, objective after objective, are divided among the processes, and those of one objective into
    micro-batches of at most `micro_rows` rows; with `few_shapes`, smaller ones have powers of two, since compiled code
    is compiled for each shape and the numbers of rows of a mixture change.
    """
    rows = sum(len(each.samples) for each in step)
    first, until = rows * rank // world, rows * (rank + 1) // world
    own = []
    for each in step:
        count = len(each.samples)
        mine = each.samples[max(first, 0) : max(until, 0)]
        parts = mine.split(micro_rows)
        if few_shapes:
            parts = [part for whole in parts for part in whole.split(_powers(len(whole), micro_rows))]
        own += [replace(each, samples=part) for part in parts if len(part)]
        first, until = first - count, until - count
    return own


def _powers(count: int, micro_rows: int) -> list[int]:
    """Return `count` as a sum of falling powers of two; a whole micro-batch stays whole."""
    if count == micro_rows:
        return [count]
    return [1 << bit for bit in reversed(range(count.bit_length())) if count >> bit & 1] or [0]


def passes_of(step: list[Assigned], world: int, micro_rows: int, *, few_shapes: bool = False) -> int:
    """Return the number of micro-batches that the process with the most of them takes of one step."""
    return max(len(share(step, rank, world, micro_rows, few_shapes=few_shapes)) for rank in range(world))


Item = TypeVar("Item")


def load_ahead(
    make: Callable[[int], Item], first: int, until: int, *, loaders: int, ahead: int = 4
) -> Iterator[Item]:
    """Yield the batches of steps `first`…`until`−1 in order, prepared by `loaders` threads (0: on demand).

    Threads suffice because memory-mapped reads and integer tensor operations release the GIL, and they avoid copies
    between processes.
    """
    if loaders == 0:
        yield from map(make, range(first, until))
        return
    with ThreadPoolExecutor(loaders, thread_name_prefix="loader") as pool:
        waiting: deque[Future[Item]] = deque()
        step = first
        try:
            while step < until or waiting:
                while step < until and len(waiting) < max(ahead, loaders):
                    waiting.append(pool.submit(make, step))
                    step += 1
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
