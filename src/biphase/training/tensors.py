"""Tensors in safetensors files: whole, or cut by rows into parts that several processes wrote.

    model.safetensors                       every tensor whole
    model-0-of-4.safetensors, …             the rows that each process had, as whole numbers of rows
    model-0-of-4.json, …                    for each tensor in it: the shape of the whole, and where its rows begin

A reader gives whole tensors one at a time, or some rows of one, and does not say which of the two it found. Files are
written tensor by tensor and hashed on the way: nothing is held twice, nothing is read again, and Python's lock is free
while bytes are on their way, so that a step can go on beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from biphase.errors import StoreError
from biphase.store import read_json, write_json

KINDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
NAMES = {name: dtype for dtype, name in KINDS.items()}
SLICE = 2**26  # bytes written at a time


@dataclass(frozen=True)
class RowRange:
    """Some rows of a tensor, or all of one."""

    tensor: Tensor
    whole: tuple[int, ...]
    first: int = 0

    @classmethod
    def all_of(cls, tensor: Tensor) -> RowRange:
        return cls(tensor, tuple(tensor.shape))


@dataclass(frozen=True)
class PendingTensor:
    """A tensor that is written when its turn has come."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def part_name(kind: str, number: int, of: int) -> str:
    return f"{kind}-{number}-of-{of}"


def write_part(folder: Path, kind: str, number: int, of: int, rows: Mapping[str, RowRange]) -> dict[str, Any]:
    """Write one process's rows and their index; gives what a manifest says of both."""
    name = part_name(kind, number, of)
    entries = {f"{name}.safetensors": write_whole(folder / f"{name}.safetensors", rows)}
    index = {key: {"shape": list(one.whole), "first": one.first} for key, one in rows.items()}
    write_json(folder / f"{name}.json", {"tensors": index})
    content = (folder / f"{name}.json").read_bytes()
    entries[f"{name}.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return entries


def write_whole(path: Path, rows: Mapping[str, RowRange]) -> dict[str, Any]:
    """Write tensors as they are; gives what a manifest says of the file."""
    coming = {
        name: PendingTensor(tuple(one.tensor.shape), one.tensor.dtype, lambda one=one: one.tensor)
        for name, one in rows.items()
    }
    return write(path, coming)


def write(path: Path, tensors: Mapping[str, PendingTensor]) -> dict[str, Any]:
    """Write a safetensors file, one tensor after another; gives its size and its hash."""
    ordered = sorted(tensors.items(), key=lambda one: (-one[1].dtype.itemsize, one[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, one in ordered:
        begin, end = end, end + one.size
        header[name] = {
            "dtype": KINDS[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for job in _bytes_of(struct.pack("<Q", len(text)) + text, ordered):
            digest.update(job)
            size += file.write(job)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _bytes_of(header: bytes, tensors: list[tuple[str, PendingTensor]]) -> Iterable[bytes | memoryview]:
    yield header
    for name, one in tensors:
        made = one.make().contiguous()
        assert (tuple(made.shape), made.dtype) == (one.shape, one.dtype), name
        if not made.numel():
            continue
        data = memoryview(made.reshape(-1).view(torch.uint8).numpy())
        for begin in range(0, len(data), SLICE):
            yield data[begin : begin + SLICE]


@dataclass(frozen=True)
class _TensorEntry:
    file: Path
    first: int
    rows: int  # −1: of a number that has none


class Tensors:
    """The tensors of one kind in a folder. Open while it is used: `with Tensors(folder, "model") as saved`."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._found: dict[str, list[_TensorEntry]] = {}
        self._open: dict[Path, Any] = {}
        self._files = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as undone:
            undone.callback(self._files.close)
            whole = self.folder / f"{self.kind}.safetensors"
            if whole.is_file():
                self._read_whole(whole)
            else:
                self._read_parts()
            undone.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    @property
    def parts(self) -> list[Path]:
        """The files it lies in, with the indexes of what is cut."""
        files = {one.file for found in self._found.values() for one in found}
        return sorted(
            files | {one.with_suffix(".json") for one in files if one.with_suffix(".json").exists()}
        )

    def whole(self, name: str) -> Tensor:
        if not self.shapes[name]:
            return self._file(self._found[name][0].file).get_tensor(name)
        return self.rows(name, 0, self.shapes[name][0])

    def rows(self, name: str, first: int, until: int) -> Tensor:
        """Rows `first` to `until` of a tensor: nothing else of it is read."""
        taken = []
        for one in self._found[name]:
            begin, end = max(first, one.first), min(until, one.first + one.rows)
            if begin < end:
                taken.append(self._file(one.file).get_slice(name)[begin - one.first : end - one.first])
        if not taken:
            return torch.empty((0, *self.shapes[name][1:]), dtype=self.dtypes[name])
        if len(taken) > 1:
            return torch.cat(taken)
        # A slice would keep the whole of what lies in its file.
        return taken[0] if until - first == self.shapes[name][0] else taken[0].clone()

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = self._files.enter_context(safe_open(path, framework="pt", device="cpu"))
        return self._open[path]

    def _read_whole(self, path: Path) -> None:
        for name in self._file(path).keys():  # noqa: SIM118 (it is no mapping)
            shape = self._file(path).get_slice(name).get_shape()
            self._note(name, tuple(shape), path, 0)

    def _note(self, name: str, whole: tuple[int, ...], path: Path, first: int) -> None:
        """A file has rows of this tensor, from `first` on."""
        here = self._file(path).get_slice(name)
        shape, dtype = here.get_shape(), NAMES[here.get_dtype()]
        same = self.shapes.setdefault(name, whole) == whole and self.dtypes.setdefault(name, dtype) == dtype
        if not same or shape[1:] != list(whole[1:]):
            raise StoreError(f"{path} disagrees with its neighbours; remove {self.folder} and run again")
        self._found.setdefault(name, []).append(_TensorEntry(path, first, shape[0] if shape else -1))

    def _read_parts(self) -> None:
        named = re.compile(rf"{self.kind}-(\d+)-of-(\d+)\.json")
        matched = [one for path in self.folder.glob("*.json") if (one := named.fullmatch(path.name))]
        indexes = {int(one[1]): self.folder / one[0] for one in matched}
        counts = {int(one[2]) for one in matched}
        if len(counts) != 1 or sorted(indexes) != list(range(counts.pop())):
            raise StoreError(f"{self.folder} has not all parts of its {self.kind}; remove it and run again")
        for path in indexes.values():
            self._read_index(path)
        for name, found in self._found.items():
            found.sort(key=lambda one: one.first)
            end = 0
            for one in found:
                end = one.first + one.rows if one.first == end else -1
            if self.shapes[name] and end != self.shapes[name][0]:
                raise StoreError(f"{self.folder} has not all rows of {name}; remove it and run again")

    def _read_index(self, path: Path) -> None:
        try:
            said = {
                name: (tuple(one["shape"]), int(one["first"]))
                for name, one in read_json(path)["tensors"].items()
            }
        except (KeyError, TypeError, AttributeError, ValueError):
            raise StoreError(f"{path} is no index; remove {self.folder} and run again") from None
        for name, (whole, first) in said.items():
            self._note(name, whole, path.with_suffix(".safetensors"), first)


def join_parts(folder: Path, kind: str) -> tuple[list[Path], dict[str, Any]]:
    """Make one file of whole tensors of the parts, a tensor at a time; gives the parts, and the entry of the file."""
    with Tensors(folder, kind) as cut:
        coming = {
            name: PendingTensor(shape, cut.dtypes[name], _whole(cut, name))
            for name, shape in cut.shapes.items()
        }
        entry = write(folder / f"{kind}.safetensors", coming)
        return cut.parts, entry


def _whole(cut: Tensors, name: str) -> Callable[[], Tensor]:
    return lambda: cut.whole(name)
