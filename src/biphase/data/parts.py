"""The two parts of a tokenized corpus, what goes to which, and how much of each.

A document is held out if its text hash is 0 modulo 1,000, or if it comes from the files the corpus names for it.
Held-out text ends at a million tokens, cutting its last document; what lies beyond is in neither part, and
counted. Training text ends, where the corpus sets a limit, with the document that reaches it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from biphase.data.parallel import Encoded
from biphase.data.shards import Writer
from biphase.specs import Corpus

HELDOUT_TOKENS = 1_000_000


@dataclass
class Counts:
    """What became of the documents."""

    train_documents: int = 0
    heldout_documents: int = 0
    left_out_documents: int = 0  # held out, but wholly beyond the cap
    left_out_tokens: int = 0
    text_bytes: int = 0


class Parts:
    """Training and held-out text being written. `begin` it, or `restore` the `state` it had before a kill."""

    def __init__(self, corpus: Corpus, folder: Path, dtype: np.dtype, shard_tokens: int) -> None:
        self.corpus, self.shard_tokens = corpus, shard_tokens
        self.counts = Counts()
        self.train = Writer(folder, "train", dtype, shard_tokens)
        self.heldout = Writer(folder, "heldout", dtype, shard_tokens)

    def begin(self) -> None:
        self.train.begin()
        self.heldout.begin()

    def state(self) -> dict[str, Any]:
        """What is safely on disk."""
        return {
            "shard_tokens": self.shard_tokens,
            "counts": asdict(self.counts),
            "train": self.train.state(),
            "heldout": self.heldout.state(),
        }

    def restore(self, state: dict[str, Any]) -> bool:
        """Go on from `state`; False if the files are not as it says."""
        if state["shard_tokens"] != self.shard_tokens:
            return False
        self.counts = Counts(**state["counts"])
        return self.train.restore(state["train"]) and self.heldout.restore(state["heldout"])

    def abandon(self) -> None:
        """Let go of the open files, as a kill would."""
        self.train.abandon()
        self.heldout.abandon()

    def close(self) -> None:
        self.train.close()
        self.heldout.close()

    @property
    def enough(self) -> bool:
        """Has training text reached the corpus' limit?"""
        return bool(self.corpus.tokens) and self.train.tokens >= self.corpus.tokens

    def take(self, made: Encoded, *, named_heldout: bool) -> bool:
        """Write the documents of a block to where they belong; True if a file was filled."""
        if named_heldout:
            held = np.ones(len(made.lengths), bool)
        elif self.corpus.heldout:
            held = np.zeros(len(made.lengths), bool)
        else:
            held = made.held
        taken = len(held) if named_heldout else self._until_limit(held, made.lengths)
        held, lengths = held[:taken], made.lengths[:taken]
        ids = made.ids[: int(lengths.sum())]
        self.counts.text_bytes += int(made.sizes[:taken].sum())
        self.counts.train_documents += int((~held).sum())
        if not held.any():
            return self.train.append(ids)
        apart = np.repeat(held, lengths)
        filled = self.train.append(ids[~apart])
        return self._hold_out(ids[apart], lengths[held]) or filled

    def _until_limit(self, held: np.ndarray, lengths: np.ndarray) -> int:
        """How many of a block's documents are read until training text reaches its limit."""
        if not self.corpus.tokens:
            return len(held)
        reached = self.train.tokens + np.cumsum(np.where(held, 0, lengths)) >= self.corpus.tokens
        return int(np.argmax(reached)) + 1 if reached.any() else len(held)

    def _hold_out(self, ids: np.ndarray, lengths: np.ndarray) -> bool:
        room = HELDOUT_TOKENS - self.heldout.tokens
        begun = int((np.cumsum(lengths) - lengths < room).sum())
        self.counts.heldout_documents += begun
        self.counts.left_out_documents += len(lengths) - begun
        self.counts.left_out_tokens += max(len(ids) - room, 0)
        return self.heldout.append(ids[:room])
