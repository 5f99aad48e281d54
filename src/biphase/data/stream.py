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

Blends. Each corpus of a blend is a stream of its own, with its own rows, order and epochs, so no row has text of two.
`SourceSampler` says which corpus a sample index reads, and how many samples of that corpus came before it, which is the
sample index within that corpus. Both are functions of the sample index, so all of the above holds for blends too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from biphase.data.shards import Shards, Tokens
from biphase.data.tokenizer import continues_word, load_saved
from biphase.errors import DataError
from biphase.objectives import IGNORE, WHOLE, Assigned, Batch, LossTerm, Vocabulary, apply, label_bound
from biphase.presets import shares_of
from biphase.randomness import LOW32, below, hash_samples, permute, salt
from biphase.specs import Chunks, Corpus, Pretrain, RowObjective, Rows

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
                f"the corpus {shards.card['corpus']['name']!r} has {len(shards.train):,} tokens, fewer than one row of {packing.length:,}; "
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

    def reading(self, samples: int) -> dict[str, Any]:
        """Return what a checkpoint records of the text that `samples` rows have read."""
        left_out = len(self.tokens) % self.packing.length
        return {"epochs": self.epochs(samples), "tokens_left_out": left_out}

    def index(self, samples: Tensor) -> Tensor:
        """Return the rows of the corpus that the sample indices `samples` read. (B,) → (B,)"""
        index = samples % self.rows
        if self.shuffled:
            epochs = samples // self.rows
            for epoch in epochs.unique().tolist():
                here = epochs == epoch
                index[here] = permute(index[here], self.rows, salt(self.seed, "order", epoch))
        return index

    def ids(self, samples: Tensor) -> Tensor:
        """Return the true tokens of the sample indices `samples`. (B,) → (B, T)"""
        rows = self.tokens.rows(self.index(samples).numpy(), self.packing.length)
        return torch.from_numpy(rows.astype(np.int64))

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
        masked_by = self.index(samples) if objective.static else samples
        inputs = apply(
            objective, ids, segments, masked_by, seed=self.seed, step=step, vocabulary=self.vocabulary
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


# ---------------------------------------------------------------- blends


STRIDE = 0x9E3779B9  # 2³² times the golden ratio's fraction: its multiples modulo 2³² are spread evenly


@dataclass(frozen=True)
class SourceSampler:
    """Which source each sample index reads, and how many samples of that source came before it.

    Sample d is the point (offset + d · STRIDE) mod 2³², and the points of a source are an interval as long as its share.
    So any run of samples, such as a batch, has each share up to a few rows. The number of points below a bound has a
    closed form, so the position in every source is known at any sample without counting.
    """

    offset: int
    spans: tuple[tuple[int, tuple[int, ...]], ...]  # first sample, and where the sources' intervals end

    @classmethod
    def of(cls, seed: int, shares: Sequence[tuple[int, Sequence[float]]]) -> SourceSampler:
        """Return the sampler of sources that have these shares from these samples on."""
        spans = []
        for first, each in shares:
            sizes = [round(share * 2**32) for share in each]
            sizes[sizes.index(max(sizes))] += 2**32 - sum(sizes)  # what rounding leaves
            spans.append((first, tuple(accumulate(sizes))))
        return cls(salt(seed, "blend"), tuple(spans))

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples are of each source."""
        firsts = [*(min(first, samples) for first, _ in self.spans), samples]
        counts = [0] * len(self.spans[0][1])
        for (first, until), (_, ends) in zip(pairwise(firsts), self.spans, strict=True):
            below = [self._below(until, end) - self._below(first, end) for end in (0, *ends)]
            counts = [count + high - low for count, (low, high) in zip(counts, pairwise(below), strict=True)]
        return counts

    def _below(self, samples: int, end: int) -> int:
        """Return how many of the first `samples` points are below `end`."""
        above = floor_sum(samples, STRIDE, self.offset + 2**32 - end, 2**32)
        return samples + floor_sum(samples, STRIDE, self.offset, 2**32) - above

    def locate(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Return the source of each sample, and its index within that source, for samples of one step. (B,) → (B,), (B,)"""
        low, high = int(samples.min()), int(samples.max())
        ends = next(ends for first, ends in reversed(self.spans) if first <= low)
        points = (torch.arange(low, high + 1) * STRIDE + self.offset) & LOW32
        sources = torch.searchsorted(torch.tensor(ends), points, right=True)
        inside = torch.empty_like(sources)
        for number, before in enumerate(self.counts(low)):
            own = sources == number
            inside[own] = before + torch.arange(int(own.sum()))
        return sources[samples - low], inside[samples - low]


def floor_sum(count: int, step: int, offset: int, modulus: int) -> int:
    """Return Σ ⌊(step · i + offset) / modulus⌋ for i in range(count), by Euclid's algorithm on step and modulus."""
    total = 0
    while count > 0 and modulus > 0:
        total += count * (count - 1) // 2 * (step // modulus) + count * (offset // modulus)
        step, offset = step % modulus, offset % modulus
        count, offset = divmod(step * count + offset, modulus)
        step, modulus = modulus, step
    return total


@dataclass(frozen=True)
class BlendedStream(Stream):
    """The rows of several corpora: those of each in the order of its own stream."""

    streams: Mapping[str, Stream] = field(default_factory=dict)  # by the names of the corpora
    sampler: SourceSampler = SourceSampler(0, ())

    @classmethod
    def over(cls, streams: Mapping[str, Stream], sampler: SourceSampler) -> BlendedStream:
        first = next(iter(streams.values()))
        own = (getattr(first, each.name) for each in fields(Stream))
        return cls(*own, streams=streams, sampler=sampler)

    @property
    def rows(self) -> int:
        return sum(stream.rows for stream in self.streams.values())

    def reading(self, samples: int) -> dict[str, Any]:
        """Return the same of each corpus, and the epochs of the one that is read most often."""
        counts = self.sampler.counts(samples)
        each = {
            name: one.reading(count) for (name, one), count in zip(self.streams.items(), counts, strict=True)
        }
        return {"epochs": max(one["epochs"] for one in each.values()), "sources": each}

    def index(self, samples: Tensor) -> Tensor:
        """Return the rows within the corpus of each: what else a run reads must not change its static masks."""
        index = torch.empty_like(samples)
        for own, stream, inside in self._read(samples):
            index[own] = stream.index(inside)
        return index

    def ids(self, samples: Tensor) -> Tensor:
        ids = torch.empty((len(samples), self.packing.length), dtype=torch.int64)
        for own, stream, inside in self._read(samples):
            ids[own] = stream.ids(inside)
        return ids

    def _read(self, samples: Tensor) -> Iterator[tuple[Tensor, Stream, Tensor]]:
        """Yield which of the samples each corpus has, its stream, and their sample indices within it."""
        sources, inside = self.sampler.locate(samples)
        for number, stream in enumerate(self.streams.values()):
            own = sources == number
            yield own, stream, inside[own]


def training_stream(run: Pretrain, sources: Mapping[Corpus, Shards], *, words: bool = False) -> Stream:
    """Return the stream of a run's training rows from the shards of every corpus that it reads."""
    if len({(shards.tokenizer / "tokenizer.json").read_bytes() for shards in sources.values()}) > 1:
        names = ", ".join(corpus.name for corpus in sources)
        raise DataError(f"{run.name} reads corpora with different tokenizers: {names}; give all the same one")
    # In the order of their keys, since the names of corpora mean nothing.
    order = sorted(sources, key=lambda corpus: sources[corpus].folder.name)
    streams = {one.name: Stream.of(sources[one], run.packing, run.seed, words=words) for one in order}
    if len(streams) == 1:
        return streams[order[0].name]
    reads = run.reads or ((0, run.corpus),)  # the start of a run has read nothing
    shares = [(first, [shares_of(read, run).get(one, 0.0) for one in order]) for first, read in reads]
    return BlendedStream.over(streams, SourceSampler.of(run.seed, shares))


def _vocabulary(shards: Shards, *, words: bool) -> Vocabulary:
    table = continues_word(load_saved(shards.tokenizer)) if words else None
    return Vocabulary.of(shards.vocab, shards.mask_id, shards.special_ids, table)


def streams_of(
    run: Pretrain, sources: Mapping[Corpus, Shards], *, words: bool = False
) -> tuple[Stream, Stream]:
    """Return the streams of a run's training rows, and of the held-out rows of its `corpus`."""
    heldout = [sources[corpus] for corpus in shares_of(run.corpus, run)]
    return training_stream(run, sources, words=words), heldout_stream(heldout, run.packing, words=words)


def heldout_stream(shards: Shards | Sequence[Shards], packing: Packing, *, words: bool = False) -> Stream:
    """Return the stream of held-out rows, whose order, cuts and masks do not depend on the run's seed.

    Those of several corpora are mixed by their numbers of rows.
    """
    several = [shards] if isinstance(shards, Shards) else sorted(shards, key=lambda one: one.folder.name)
    streams = {
        one.folder.name: Stream(
            one.heldout, packing, 0, one.eos_id, _vocabulary(one, words=words), shuffled=False
        )
        for one in several
    }
    total = sum(stream.rows for stream in streams.values())
    if len(streams) == 1 or not total:
        return next(iter(streams.values()))
    shares = [stream.rows / total for stream in streams.values()]
    return BlendedStream.over(streams, SourceSampler.of(0, [(0, shares)]))


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
