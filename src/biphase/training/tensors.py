"""Tensors in safetensors files: whole, or split by rows into parts written by several processes.

    model.safetensors                       every tensor whole
    model-0-of-4.safetensors, …             the rows of each process
    model-0-of-4.json, …                    for each tensor of that part: its whole shape, and the first row's index

`Tensors` reads whole tensors, or some rows of one, from either layout. `write` and `write_part` write tensor by tensor
and hash while writing, so that nothing is copied or read twice. The GIL is released while bytes are written, so that
training can continue meanwhile. `join_parts` makes one whole file of the parts, with one tensor in memory at a time.
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
SLICE = 2**26  # bytes per write


@dataclass(frozen=True)
class RowRange:
    """Consecutive rows of a tensor of shape `whole`, from row `first` on; possibly all of them."""

    tensor: Tensor
    whole: tuple[int, ...]
    first: int = 0

    @classmethod
    def all_of(cls, tensor: Tensor) -> RowRange:
        return cls(tensor, tuple(tensor.shape))


def part_name(kind: str, number: int, of: int) -> str:
    return f"{kind}-{number}-of-{of}"


def write_part(folder: Path, kind: str, number: int, of: int, rows: Mapping[str, RowRange]) -> dict[str, Any]:
    """Write one process's rows and their index; return the manifest entries of both files."""
    name = part_name(kind, number, of)
    own = {key: part.tensor for key, part in rows.items()}
    entries = {f"{name}.safetensors": write(folder / f"{name}.safetensors", own)}
    index = {key: {"shape": list(part.whole), "first": part.first} for key, part in rows.items()}
    write_json(folder / f"{name}.json", {"tensors": index})
    content = (folder / f"{name}.json").read_bytes()
    entries[f"{name}.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return entries


def write(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write tensors to a safetensors file; return its size and hash as a manifest entry."""
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return _write(path, kinds, lambda name: tensors[name].detach().cpu())


def _write(
    path: Path, kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], read: Callable[[str], Tensor]
) -> dict[str, Any]:
    """Write tensors of known types and shapes, each of which is read when its turn comes."""
    ordered = sorted(kinds, key=lambda name: (-kinds[name][0].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in ordered:
        dtype, shape = kinds[name]
        begin, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": KINDS[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for chunk in _bytes_of(struct.pack("<Q", len(text)) + text, map(read, ordered)):
            digest.update(chunk)
            size += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _bytes_of(header: bytes, tensors: Iterable[Tensor]) -> Iterable[bytes | memoryview]:
    yield header
    for tensor in tensors:
        if not tensor.numel():
            continue
        data = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        for begin in range(0, len(data), SLICE):
            yield data[begin : begin + SLICE]


@dataclass(frozen=True)
class _TensorEntry:
    file: Path
    first: int
    rows: int  # −1 for a scalar


class Tensors:
    """Reads the tensors of one kind in a folder: `with Tensors(folder, "model", files) as saved`.

    `files`: the names in the folder, since a listing may be older than what other machines have written; None: list it.
    """

    def __init__(self, folder: Path, kind: str, files: Iterable[str] | None = None) -> None:
        self.folder, self.kind, self.files = folder, kind, files
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._entries: dict[str, list[_TensorEntry]] = {}
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

    def whole(self, name: str) -> Tensor:
        if not self.shapes[name]:
            return self._file(self._entries[name][0].file).get_tensor(name)
        return self.rows(name, 0, self.shapes[name][0])

    def rows(self, name: str, first: int, until: int) -> Tensor:
        """Return rows `first` up to `until` of a tensor, reading nothing else."""
        taken = []
        for entry in self._entries[name]:
            begin, end = max(first, entry.first), min(until, entry.first + entry.rows)
            if begin < end:
                rows = slice(begin - entry.first, end - entry.first)
                taken.append(self._file(entry.file).get_slice(name)[rows])
        if not taken:
            return torch.empty((0, *self.shapes[name][1:]), dtype=self.dtypes[name])
        if len(taken) > 1:
            return torch.cat(taken)
        # Clone, since a slice would keep the memory of the whole tensor.
        return taken[0] if until - first == self.shapes[name][0] else taken[0].clone()

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = self._files.enter_context(safe_open(path, framework="pt", device="cpu"))
        return self._open[path]

    def _read_whole(self, path: Path) -> None:
        for name in self._file(path).keys():  # noqa: SIM118 (not a mapping)
            shape = self._file(path).get_slice(name).get_shape()
            self._note(name, tuple(shape), path, 0)

    def _note(self, name: str, whole: tuple[int, ...], path: Path, first: int) -> None:
        """Record that a file contains rows of this tensor from row `first` on."""
        tensor = self._file(path).get_slice(name)
        shape, dtype = tensor.get_shape(), NAMES[tensor.get_dtype()]
        same = self.shapes.setdefault(name, whole) == whole and self.dtypes.setdefault(name, dtype) == dtype
        if not same or shape[1:] != list(whole[1:]):
            raise StoreError(f"{path} disagrees with its neighbours; remove {self.folder} and run again")
        self._entries.setdefault(name, []).append(_TensorEntry(path, first, shape[0] if shape else -1))

    def _read_parts(self) -> None:
        named = re.compile(rf"{self.kind}-(\d+)-of-(\d+)\.json")
        files = [path.name for path in self.folder.glob("*.json")] if self.files is None else self.files
        matches = [match for name in files if (match := named.fullmatch(name))]
        indexes = {int(match[1]): self.folder / match[0] for match in matches}
        counts = {int(match[2]) for match in matches}
        if len(counts) != 1 or sorted(indexes) != list(range(counts.pop())):
            raise StoreError(f"{self.folder} has not all parts of its {self.kind}; remove it and run again")
        for path in indexes.values():
            self._read_index(path)
        for name, entries in self._entries.items():
            entries.sort(key=lambda entry: entry.first)
            end = 0
            for entry in entries:
                end = entry.first + entry.rows if entry.first == end else -1
            if self.shapes[name] and end != self.shapes[name][0]:
                raise StoreError(f"{self.folder} has not all rows of {name}; remove it and run again")

    def _read_index(self, path: Path) -> None:
        try:
            index = {
                name: (tuple(entry["shape"]), int(entry["first"]))
                for name, entry in read_json(path)["tensors"].items()
            }
        except (KeyError, TypeError, AttributeError, ValueError):
            raise StoreError(f"{path} is no index; remove {self.folder} and run again") from None
        for name, (whole, first) in index.items():
            self._note(name, whole, path.with_suffix(".safetensors"), first)


def join_parts(folder: Path, kind: str, files: Iterable[str] | None = None) -> dict[str, Any]:
    """Join parts into one file, a tensor at a time; return its manifest entry."""
    with Tensors(folder, kind, files) as parts:
        kinds = {name: (parts.dtypes[name], shape) for name, shape in parts.shapes.items()}
        return _write(folder / f"{kind}.safetensors", kinds, parts.whole)
