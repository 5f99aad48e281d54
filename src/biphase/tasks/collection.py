"""Arrays of different lengths, and large collections of documents: written once as a stream, read as memory maps.

A list of Python strings takes about 1.5 KB for each document of MS MARCO, in every worker. Memory maps take none of a
process's own memory: the workers of a machine share the pages of one file, which the system drops when it needs them.

A `Ragged` on disk is two files: NAME.bin, its arrays one after the other, and NAME.npy, where each begins. `Keep` says
where such files are: it returns the folder of what it was asked for, after `build` has written it there if need be.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

LARGE_BYTES = 2**26  # of a collection's files; smaller ones are held in memory
BLOCK = 2**16  # texts read at a time

Keep = Callable[[str, Callable[[Path], None]], Path]


def temporary(what: str, build: Callable[[Path], None]) -> Path:
    """Keep files until this process ends: the default where there is no store."""
    folder = Path(tempfile.mkdtemp(dir=_scratch().name))
    build(folder)
    return folder


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="biphase-documents-")


@dataclass(frozen=True, eq=False)
class Ragged:
    """Arrays of different lengths, concatenated: array i is `flat[starts[i] : starts[i + 1]]`."""

    flat: np.ndarray
    starts: np.ndarray  # one more than there are arrays

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> np.ndarray:
        at = range(len(self))[number]  # allows negative indices, and raises IndexError beyond the end
        return self.flat[self.starts[at] : self.starts[at + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self.flat[start:end] for start, end in zip(self.starts[:-1], self.starts[1:], strict=True))

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    @classmethod
    def from_lists(cls, lists: Sequence[Any], dtype: Any = None, *, item: tuple[int, ...] = ()) -> Ragged:
        """Concatenate lists or arrays, converted to `dtype` if given; `item` is the shape of one entry."""
        rows = [np.asarray(row, dtype).reshape(-1, *item) for row in lists]
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=starts[1:])
        return cls(np.concatenate(rows) if rows else np.empty((0, *item), dtype or np.int64), starts)


class RaggedWriter:
    """Writes a `Ragged` to a folder, array by array."""

    def __init__(self, folder: Path, name: str) -> None:
        self.file, self.path = (folder / f"{name}.bin").open("wb"), folder / f"{name}.npy"
        self.starts = array("q", [0])

    def add(self, row: bytes | memoryview) -> None:
        self.file.write(row)
        self.starts.append(self.starts[-1] + len(row))

    def __enter__(self) -> RaggedWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        np.save(self.path, np.frombuffer(self.starts, np.int64))


def read_ragged(folder: Path, name: str, dtype: Any) -> Ragged:
    """Return a `Ragged` as memory maps."""
    path = folder / f"{name}.bin"
    # Copy-on-write, since torch warns of arrays that cannot be written; an empty file cannot be mapped.
    flat = np.memmap(path, dtype, "c") if path.stat().st_size else np.empty(0, dtype)
    return Ragged(np.asarray(flat), np.asarray(np.load(folder / f"{name}.npy", mmap_mode="c")))


class Texts(Sequence[str]):
    """Texts in a file, written as `RaggedWriter.add(as_bytes(text))`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.rows = read_ragged(folder, name, np.uint8)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[number] for number in range(len(self))[place]]
        return _as_text(self.rows[place].tobytes())

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), BLOCK):  # one by one takes ten times as long
            starts = (self.rows.starts[first : first + BLOCK + 1]).tolist()
            data = self.rows.flat[starts[0] : starts[-1]].tobytes()
            for start, end in pairwise(starts):
                yield _as_text(data[start - starts[0] : end - starts[0]])


def as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _as_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
