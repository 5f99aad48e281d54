"""A parcel: results of one study in one file, to be carried to another store.

    ledger.json                     first: the study, and every other file with its size and hash
    study/                          plan.json, fingerprints.json, failures/<key>.json
    pins.json  corpora/link-*.json  what the study's names stand for
    receipts/states/<key>/          state.json, metrics.jsonl: a state without weights and moments
    receipts/shards/<key>/          card.json: a corpus without its tokens
    receipts/leaves/<key>/          leaf.json: scores without their values by example
    leaves/<key>/                   leaf.json, values.safetensors, predictions.safetensors if there are any

It is a tar in zstandard, so any tool lists it; the same results give the same bytes. It may come from anywhere, so it is
read strictly: only plain files, of the names above, in the order, of the sizes and with the hashes that its first file
says. Links, devices, folders and extended headers have no place in it, and what it unpacks to is known, and judged,
before any of it is read. Python's own reader follows extended headers of any size, so the headers are read one by one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from biphase.errors import SpecError, StoreError, one_line
from biphase.records import KEY_LENGTH

LEDGER = "ledger.json"
FORMAT = 1
PLAN, FINGERPRINTS, PINS = "study/plan.json", "study/fingerprints.json", "pins.json"
# What a result's folder in a parcel holds: all of it, and nothing else but what it may hold as well.
FOLDERS = {
    "receipts/states": ("metrics.jsonl", "state.json"),
    "receipts/shards": ("card.json",),
    "receipts/leaves": ("leaf.json",),
    "leaves": ("leaf.json", "values.safetensors"),
}
OPTIONAL = {"leaves": ("predictions.safetensors",)}
_KEY = rf"[0-9a-f]{{{KEY_LENGTH}}}"
_LOOSE = re.compile(
    rf"{re.escape(PLAN)}|{re.escape(FINGERPRINTS)}|pins\.json|study/failures/{_KEY}\.json|corpora/link-{_KEY}\.json"
)
_FOLDER = re.compile(rf"({'|'.join(FOLDERS)})/({_KEY})")

BLOCK = 512  # of a tar
LEVEL, FRAME = 12, 2**25  # how hard to compress, and how much at a time
MAGIC = b"\x28\xb5\x2f\xfd"  # a file in zstandard begins so
LARGEST_LISTING = 2**25
# A parcel may unpack to this, or to so many times its size. Ledgers shrink 4 to 22 times (measured), a bomb thousands of times.
UNPACKED, SHRUNK = 2**26, 100
# And no file of it to more than this, by its name: what is read whole must fit into memory.
LARGEST = {
    "plan.json": 2**24,
    "card.json": 2**22,
    "leaf.json": 2**22,
    "metrics.jsonl": 2**28,
    "values.safetensors": 2**28,
    "predictions.safetensors": 2**28,
}
LARGEST_OTHER = 2**20


@dataclass(frozen=True)
class Item:
    """One file of a parcel."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Source:
    """A file that goes into a parcel, and where its content comes from when its turn is there."""

    item: Item
    read: Callable[[], bytes]

    @classmethod
    def of(cls, name: str, content: bytes, read: Callable[[], bytes] | None = None) -> Source:
        """Without `read` the content itself is kept."""
        item = Item(name, len(content), hashlib.sha256(content).hexdigest())
        return cls(item, read or (lambda: content))


def as_json(value: Any) -> bytes:
    """As the store writes JSON."""
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


# ---------------------------------------------------------------- write


def write_parcel(path: Path, study: str, sources: list[Source]) -> int:
    """Write a parcel whole, or not at all; gives its bytes."""
    _refuse_taken(path)
    listing = {one.item.name: {"bytes": one.item.bytes, "sha256": one.item.sha256} for one in sources}
    first = Source.of(LEDGER, as_json({"ledger": FORMAT, "study": study, "files": listing}))
    if first.item.bytes > LARGEST_LISTING:
        raise SpecError(
            f"{len(sources):,} files are more than one ledger may list; pack some results at a time: --only PATTERN"
        )
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with draft.open("wb") as file:
            frames = _Frames(file)
            for one in (first, *sources):
                content = one.read()
                if Source.of(one.item.name, content).item != one.item:
                    raise StoreError(f"{one.item.name} changed while it was packed; type the command again")
                info = tarfile.TarInfo(one.item.name)
                info.size = len(content)
                frames.add(info.tobuf(tarfile.USTAR_FORMAT, "utf-8") + content + bytes(-len(content) % BLOCK))
            frames.add(bytes(2 * BLOCK))
            frames.end()
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as wrong:
        raise SpecError(f"{path}: {wrong.strerror or wrong}; free room there, or name another file") from None
    finally:
        draft.unlink(missing_ok=True)  # there only if something went wrong
    return path.stat().st_size


def _refuse_taken(path: Path) -> None:
    """An older parcel is replaced; nothing else is."""
    if not path.parent.is_dir():
        raise SpecError(f"{path.parent} is no folder; make it, or name another file")
    if path.exists() and (not path.is_file() or _beginning(path) != MAGIC):
        raise SpecError(f"{path} is there already and is no packed ledger; name another file")


def _beginning(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC))
    except OSError as wrong:
        raise SpecError(f"{path} cannot be read ({wrong.strerror}); name another file") from None


class _Frames:
    """A stream in zstandard, compressed frame by frame."""

    def __init__(self, file: IO[bytes]) -> None:
        from pyarrow import Codec

        self.codec = Codec("zstd", compression_level=LEVEL)
        self.file, self.waiting = file, bytearray()

    def add(self, content: bytes) -> None:
        self.waiting += content
        if len(self.waiting) >= FRAME:
            self.end()

    def end(self) -> None:
        if self.waiting:
            self.file.write(self.codec.compress(bytes(self.waiting), asbytes=True))
            self.waiting.clear()


# ---------------------------------------------------------------- read


@dataclass(frozen=True)
class Parcel:
    """A parcel whose first file was read and makes sense; the others are checked as they are read."""

    path: Path
    study: str
    items: tuple[Item, ...]

    @classmethod
    def open(cls, path: Path) -> Parcel:
        reader = _Reader(path)
        said = reader.parsed(reader.member(LEDGER, None))
        try:
            if said["ledger"] != FORMAT:
                raise reader.refusal(
                    f"its format is {str(said['ledger'])[:20]!r}, and this version reads {FORMAT}"
                )
            items = tuple(Item(name, one["bytes"], str(one["sha256"])) for name, one in said["files"].items())
            if any(type(item.bytes) is not int for item in items):
                raise TypeError
            parcel = cls(path, str(said["study"]), items)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise reader.refusal(f"its {LEDGER} does not say what is in it") from None
        parcel._judge(reader)
        return parcel

    @property
    def unpacked(self) -> int:
        """What it unpacks to."""
        return sum(item.bytes for item in self.items)

    def _judge(self, reader: _Reader) -> None:
        """Refuse names that have no place in a ledger, folders that are not whole, and too much."""
        folders: dict[str, list[str]] = {}
        before = ""
        for item in self.items:
            folder, _, name = item.name.rpartition("/")
            if _FOLDER.fullmatch(folder):
                if folder in folders and folder != before:
                    raise reader.refusal(f"the files of {folder} are not together")
                folders.setdefault(folder, []).append(name)
            elif not _LOOSE.fullmatch(item.name):
                raise reader.refusal(f"{item.name[:200]!r} has no place in a ledger")
            if item.bytes < 0:
                raise reader.refusal(f"{item.name[:200]!r} has less than 0 bytes")
            most = LARGEST.get(name, LARGEST_OTHER)
            if item.bytes > most:
                raise reader.refusal(f"{item.name[:200]!r} would unpack to more than {most:,} bytes")
            before = folder
        for folder, names in folders.items():
            kind = folder.rpartition("/")[0]
            if tuple(sorted(set(names) - set(OPTIONAL.get(kind, ())))) != FOLDERS[kind]:
                raise reader.refusal(f"{folder} holds {str(names)[:200]}")
        if PLAN not in {item.name for item in self.items}:
            raise reader.refusal(f"it has no {PLAN}")
        if self.items[0].name != PLAN:  # what the others may say depends on it
            raise reader.refusal(f"it does not begin with {PLAN}")
        most = max(UNPACKED, SHRUNK * self.path.stat().st_size)
        if self.unpacked > most:
            raise reader.refusal(
                f"it would unpack to more than the {most:,} bytes that a ledger of its size can"
            )

    def contents(self) -> Iterator[tuple[str, dict[str, bytes]]]:
        """Its files, as they were packed: those of a result together under its folder, others one by one under ""."""
        reader = _Reader(self.path)
        reader.member(LEDGER, None)
        at, together = "", dict[str, bytes]()
        for item in self.items:
            content = reader.member(item.name, item.bytes)
            if hashlib.sha256(content).hexdigest() != item.sha256:
                raise reader.refusal(f"{item.name} is not what was packed")
            folder, _, name = item.name.rpartition("/")
            result = folder if _FOLDER.fullmatch(folder) else ""
            if at and result != at:
                yield at, together
                together = {}
            if result:
                together[name] = content
            else:
                yield "", {item.name: content}
            at = result
        if at:
            yield at, together
        reader.end()


class _Reader:
    """The members of a parcel in order, read from the beginning on."""

    def __init__(self, path: Path) -> None:
        import pyarrow

        self.path = path
        if not path.is_file():
            raise SpecError(f"there is no file {path}; type one that biphase ledger pack has written")
        if _beginning(path) != MAGIC:
            raise self.refusal("it does not begin as one")
        self.stream = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")

    def refusal(self, why: str) -> StoreError:
        return StoreError(
            f"{self.path} is no sound ledger: {why}; nothing was taken from it: pack it again, or copy it again"
        )

    def parsed(self, content: bytes) -> Any:
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise self.refusal(f"its {LEDGER} is no JSON") from None

    def member(self, name: str, size: int | None) -> bytes:
        """The next file, which must be a plain one of this name and size."""
        header = self._read(BLOCK)
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
        except (tarfile.HeaderError, ValueError) as wrong:
            raise self.refusal(f"there should be {name}, and there is no file ({one_line(wrong)})") from None
        if info.name != name or info.type != tarfile.REGTYPE:
            what = "" if info.type == tarfile.REGTYPE else "something that is no plain file, "
            raise self.refusal(f"there should be {name}, and there is {what}{info.name[:200]!r}")
        if info.size != size and (size is not None or info.size > LARGEST_LISTING):
            raise self.refusal(f"{name} has {info.size:,} bytes")
        content = self._read(info.size)
        self._read(-info.size % BLOCK)
        return content

    def end(self) -> None:
        rest = self._read(2 * BLOCK) + self._read(tarfile.RECORDSIZE, whole=False)  # some tools fill a record
        if any(rest) or self._read(1, whole=False):
            raise self.refusal("there is more in it than it says")

    def _read(self, size: int, *, whole: bool = True) -> bytes:
        parts, left = [], size
        while left:
            try:
                part = self.stream.read(left)
            except OSError as wrong:
                raise self.refusal(f"it is cut short or damaged ({one_line(wrong)})") from None
            if not part:
                if whole:
                    raise self.refusal("it is cut short")
                break
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
