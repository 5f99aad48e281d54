"""A tokenized corpus on disk: memory-mapped arrays of token ids and a card that describes them.

    shards/<key>/train-00000.bin …   ids of all documents in order, an end token after each document
                 heldout-00000.bin   text that is never trained on
                 card.json           corpus, tokenizer, counts, what was skipped and why
                 tokenizer/          the tokenizer, as transformers loads it
                 manifest.json       sizes and hashes, written last

All files but the last have the same number of tokens (2²⁶ by default). Ids are uint16 if the vocabulary allows, else
uint32, always little-endian. `Shards` is a published corpus, `Tokens` reads rows from its files, `Writer` writes them.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
from pathlib import Path
from typing import IO, Any

import numpy as np

from biphase import store
from biphase.data.corpus import READERS, HashMemory
from biphase.errors import DataError, StoreError
from biphase.metadata import read_card

SHARD_TOKENS = 2**26


def dtype_for(vocab: int) -> np.dtype:
    return np.dtype("<u2" if vocab <= 2**16 else "<u4")


class Tokens:
    """Several token files as one array of ids. Reading is thread-safe."""

    def __init__(self, paths: list[Path], dtype: np.dtype) -> None:
        self.dtype = dtype
        self._files = [np.asarray(np.memmap(path, dtype, mode="r")) for path in paths if path.stat().st_size]
        self._ends = np.cumsum([len(file) for file in self._files], dtype=np.int64)
        self._starts = self._ends - [len(file) for file in self._files]

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def rows(self, indices: np.ndarray, length: int) -> np.ndarray:
        """Return the rows `indices` as an array (rows, length); row i is tokens[i·length : (i+1)·length]."""
        indices = np.asarray(indices, np.int64)
        rows = np.empty((len(indices), length), self.dtype)
        if not len(indices):
            return rows
        if indices.min() < 0 or (int(indices.max()) + 1) * length > len(self):
            raise IndexError(f"rows of {length} go from 0 to {len(self) // length - 1}")
        files = np.searchsorted(self._ends, indices * length, side="right")
        for file in np.unique(files):
            into = np.flatnonzero(files == file)
            self._copy(int(file), indices[into], rows, into)
        return rows

    def _copy(self, file: int, indices: np.ndarray, rows: np.ndarray, into: np.ndarray) -> None:
        """Copy the rows `indices`, which begin in one file, to `rows[into]`; one that spans files by `span`."""
        length = rows.shape[1]
        start, end = int(self._starts[file]), int(self._ends[file])
        first, until = -(-start // length), end // length  # rows that lie entirely in this file
        inside = indices < until
        if inside.any():
            offset = first * length - start
            view = self._files[file][offset : offset + (until - first) * length].reshape(-1, length)
            if inside.all() and len(into) == len(rows):
                # take() releases the GIL; plain indexing does not
                np.take(view, indices - first, axis=0, out=rows, mode="clip")
            else:
                rows[into[inside]] = np.take(view, indices[inside] - first, axis=0, mode="clip")
        for index, row in zip(indices[~inside], into[~inside], strict=True):
            rows[row] = self.span(int(index) * length, length)

    def span(self, start: int, count: int) -> np.ndarray:
        """Return tokens[start : start + count], also across files."""
        tokens, done = np.empty(count, self.dtype), 0
        file = int(np.searchsorted(self._ends, start, side="right"))
        while done < count:
            inside = start + done - int(self._starts[file])
            part = self._files[file][inside : inside + count - done]
            tokens[done : done + len(part)] = part
            done, file = done + len(part), file + 1
        return tokens

    def counts(self, vocab: int) -> np.ndarray:
        """Return the number of occurrences of each id."""
        counts = np.zeros(vocab, np.int64)
        for file in self._files:
            for start in range(0, len(file), 2**24):
                counts += np.bincount(file[start : start + 2**24], minlength=vocab)
        return counts


class Shards:
    """A published tokenized corpus."""

    def __init__(self, folder: Path, card: dict[str, Any]) -> None:
        self.folder = folder
        self.card = card
        self.vocab: int = card["vocab"]
        self.eos_id: int = card["eos_id"]
        self.mask_id: int = card["mask_id"]
        self.special_ids: tuple[int, ...] = tuple(card["special_ids"])
        dtype = dtype_for(self.vocab)
        self.train = Tokens(sorted(folder.glob("train-*.bin")), dtype)
        self.heldout = Tokens(sorted(folder.glob("heldout-*.bin")), dtype)

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer, as transformers loads it."""
        return self.folder / "tokenizer"

    def check_tokens(self, memory: HashMemory) -> None:
        """Raise StoreError if a file has changed; hashes cached in `memory` are not computed again."""
        memory.hashes(sorted(self.folder.glob("*.bin")), at_once=READERS)
        store.verify(self.folder, hashed=memory.sha256)

    @classmethod
    def open(cls, folder: Path, *, verify: bool = False) -> Shards:
        """Open a published corpus after checking its manifest, sizes and small files; `verify` hashes all files."""
        if not (folder / store.MANIFEST).is_file():
            raise DataError(f"{folder} holds no finished shards; type: biphase tokenize CORPUS")
        for name in store.verify(folder, contents=verify):
            if not name.endswith(".bin"):  # ids are meaningless without the card and the tokenizer
                store.read_verified(folder, name)
        card = read_card(folder)
        shards = cls(folder, card)
        if (len(shards.train), len(shards.heldout)) != (card["train_tokens"], card["heldout_tokens"]):
            raise StoreError(f"{folder} has other tokens than its card says; remove it and tokenize again")
        return shards


def entropy(counts: np.ndarray) -> float:
    """Return the unigram entropy in nats: the loss of a model that knows only token frequencies."""
    share = counts[counts > 0] / counts.sum()
    return float(math.fsum(-share * np.log(share)))


class Writer:
    """Appends ids to files of a fixed number of tokens.

    Call `begin`, or `restore` with an earlier `state` to resume after a kill.
    """

    def __init__(self, folder: Path, name: str, dtype: np.dtype, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder, self.name, self.dtype, self.shard_tokens = folder, name, dtype, shard_tokens
        self.finished: list[dict[str, Any]] = []  # name, bytes and hash of each full file
        self.tokens = 0
        self._file: IO[bytes] = io.BytesIO()  # placeholder until `begin` or `restore`

    def _path(self, number: int) -> Path:
        return self.folder / f"{self.name}-{number:05d}.bin"

    def begin(self) -> None:
        """Open the next file."""
        self.filled = 0
        self._hash = hashlib.sha256()
        # Create a new file instead of truncating: a suspended worker may still have the old one open.
        self._path(len(self.finished)).unlink(missing_ok=True)
        self._file = self._path(len(self.finished)).open("xb")

    def append(self, ids: np.ndarray) -> bool:
        """Write ids and return whether a file was filled."""
        before = len(self.finished)
        ids = np.ascontiguousarray(ids, self.dtype)
        self.tokens += len(ids)
        while len(ids):
            part, ids = np.split(ids, [self.shard_tokens - self.filled])
            self._file.write(part.data)
            self._hash.update(part.data)
            self.filled += len(part)
            if self.filled == self.shard_tokens:
                self._sync()
                self._file.close()
                self.finished.append(self._entry(len(self.finished)))
                self.begin()
        return len(self.finished) > before

    def _entry(self, number: int) -> dict[str, Any]:
        size = self.filled * self.dtype.itemsize
        return {"name": self._path(number).name, "bytes": size, "sha256": self._hash.hexdigest()}

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def state(self) -> dict[str, Any]:
        """Sync to disk and return what is there: the full files, and the part of the last one written so far."""
        self._sync()
        return {"finished": list(self.finished), "tail": self._entry(len(self.finished))}

    def restore(self, state: dict[str, Any]) -> bool:
        """Resume from `state`; return False if the files differ from it, so that the caller must start over."""
        names = [entry["name"] for entry in (*state["finished"], state["tail"])]
        if names != [self._path(number).name for number in range(len(names))]:
            return False  # names may only be this writer's own files, in order
        for entry in state["finished"]:  # equal hashes imply equal sizes
            path = self.folder / entry["name"]
            if not path.is_file() or store.sha256(path) != entry["sha256"]:
                return False
        tail, size = self.folder / state["tail"]["name"], state["tail"]["bytes"]
        kept = tail.read_bytes()[:size] if tail.is_file() else b""
        digest = hashlib.sha256(kept)
        if digest.hexdigest() != state["tail"]["sha256"]:
            return False
        draft = tail.with_suffix(".part")  # a new file for the same reason as in `begin`
        self._file = draft.open("wb")
        self._file.write(kept)
        self._sync()
        draft.replace(tail)
        self.finished, self._hash = list(state["finished"]), digest
        self.filled = size // self.dtype.itemsize
        self.tokens = len(self.finished) * self.shard_tokens + self.filled
        return True

    def abandon(self) -> None:
        """Close the open file without finishing, as a kill would; `restore` can resume from the last state."""
        self._file.close()

    def close(self) -> None:
        """Finish writing; an empty last file is removed unless it is the only one."""
        self._sync()
        self._file.close()
        if not self.filled and self.finished:
            self._path(len(self.finished)).unlink()
        else:
            self.finished.append(self._entry(len(self.finished)))

    @property
    def entries(self) -> dict[str, dict[str, Any]]:
        """The manifest entries of the finished files, which were hashed and synced as they were written."""
        return {
            entry["name"]: {"bytes": entry["bytes"], "sha256": entry["sha256"]} for entry in self.finished
        }
