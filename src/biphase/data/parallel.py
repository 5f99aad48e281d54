"""Blocks of raw records → ids, by several processes, in the order of the blocks.

Processes are started fresh (spawn), because a process that holds threads or a GPU must not be forked. Each loads
the tokenizer once. Only raw bytes go in and one array of ids per block comes out. At most a few blocks per
process are under way, so memory stays small whatever the size of the corpus. A helper whose parent dies, even by
SIGKILL, ends itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from biphase.data.documents import Block, Tally, parse, text_hash
from biphase.data.encoder import Encoder, Inconvertible
from biphase.errors import DataError, one_line

BLOCKS_AHEAD = 3  # per process


@dataclass(frozen=True)
class Encoded:
    """The documents of a block: their ids one after the other, end tokens included."""

    ids: np.ndarray
    lengths: np.ndarray  # tokens of each document
    sizes: np.ndarray  # bytes of UTF-8 of each document
    held: np.ndarray  # is its text hash 0 modulo 1,000?
    tally: Tally


@dataclass(frozen=True)
class BlockEncoder:
    """How to encode a block: plain values, so that it travels to other processes."""

    tokenizer: Path
    text: str
    begin: tuple[int, ...]  # ids before and after each document
    end: int
    dtype: str


class Loaded:
    """A block encoder with its tokenizer in memory."""

    def __init__(self, how: BlockEncoder) -> None:
        self.how = how
        try:  # whether it may be used is the caller's to prove; here it is only made ready
            self.encoder = Encoder(how.tokenizer, tiktoken=True, proven=True)
        except Inconvertible:
            self.encoder = Encoder(how.tokenizer, tiktoken=False)

    def encode(self, block: Block, tiktoken: bool) -> Encoded:
        """The documents of a block."""
        how, begin, tally = self.how, self.how.begin, Tally()
        parsed = list(parse(block, how.text, tally))
        texts = [text for text, _ in parsed]
        ids = self.encoder.encode(texts) if tiktoken else self.encoder.plain(texts)
        lengths = np.array([len(one) + 1 + len(begin) for one in ids], np.int64)
        made, at = np.empty(int(lengths.sum()), how.dtype), 0
        for one, length in zip(ids, lengths.tolist(), strict=True):
            made[at : at + len(begin)] = begin
            made[at + len(begin) : at + length - 1] = one
            made[at + length - 1] = how.end
            at += length
        sizes = np.array([len(as_bytes) for _, as_bytes in parsed], np.int64)
        held = np.array([text_hash(as_bytes) % 1000 == 0 for _, as_bytes in parsed], bool)
        return Encoded(made, lengths, sizes, held, tally)


class Helpers:
    """Processes that encode blocks, started at once so that they load while the caller still checks.

    0 processes means as many as there are cores; 1 encodes in the caller's own.
    """

    def __init__(self, how: BlockEncoder, processes: int) -> None:
        self.how, self.processes = how, processes or _cores()
        self.pool: ProcessPoolExecutor | None = None
        if self.processes > 1:
            spawn = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(self.processes, spawn, initializer=_begin, initargs=(how,))
            for _ in range(self.processes):  # each is started by something to do while none is idle
                self.pool.submit(_ready)

    def __enter__(self) -> Helpers:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool:
            self.pool.shutdown(wait=True, cancel_futures=True)

    def encode(self, blocks: Iterator[Block], *, tiktoken: bool) -> Iterator[tuple[Block, Encoded]]:
        """Each block with its documents, in order."""
        if self.pool is None:
            loaded = Loaded(self.how)
            yield from ((block, loaded.encode(block, tiktoken)) for block in blocks)
            return
        waiting: deque[tuple[Block, Future[Encoded]]] = deque()
        try:
            for block in blocks:
                waiting.append((_light(block), self.pool.submit(_encode, block, tiktoken)))
                if len(waiting) >= self.processes * BLOCKS_AHEAD:
                    yield _next(waiting)
            while waiting:
                yield _next(waiting)
        except BrokenProcessPool:
            raise DataError(
                "a process that encodes text was killed, perhaps for want of memory; "
                "type the command again with fewer --processes: it goes on where it was"
            ) from None


def _next(waiting: deque[tuple[Block, Future[Encoded]]]) -> tuple[Block, Encoded]:
    block, future = waiting.popleft()
    return block, future.result()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _light(block: Block) -> Block:
    """The block without its text, which has travelled."""
    return replace(block, payload=b"")


_here: Loaded | str = "it was never made ready"  # in a helper process: what it encodes with, or why it cannot


def _begin(how: BlockEncoder) -> None:
    """Make a helper ready: one thread each, deaf to ^C (the parent decides), gone when the parent is."""
    global _here
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _here = Loaded(how)
    except Exception as wrong:  # raised here, it would end the pool without a word of what it was
        _here = one_line(wrong)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _ready() -> None:
    """Nothing to do: being asked is what starts the helpers."""


def _encode(block: Block, tiktoken: bool) -> Encoded:
    if isinstance(_here, str):
        raise DataError(
            f"a process that encodes text could not begin ({_here}); type the command again with --processes 1"
        )
    return _here.encode(block, tiktoken)
