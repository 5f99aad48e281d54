"""Storage is files: a result is a folder named by its key, with a manifest written last.

    store/states/<key>/     a checkpoint: weights, moments, position
    store/leaves/<key>/     the scores of one fine-tuning
    store/shards/<key>/     a tokenized corpus
    store/unfinished/       checkpoints of fine-tunings that were stopped on their way
    store/studies/<name>/   plan.json, failures
    store/receipts/         of results whose heavy files stayed on another machine, what they say of themselves

Each attempt writes its own folder; `publish` hashes its files, writes the manifest and renames the folder
to its place, which fails if somebody was there first. So a result appears whole or not at all, and a crash
leaves nothing that looks finished: no manifest, no result.

The manifest carries the key of its result. A folder that stands under another key, since somebody moved or copied it
there, is no result: every reader compares the two.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shlex
import shutil
import stat
import uuid
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from biphase.errors import StoreError
from biphase.records import is_key

MANIFEST = "manifest.json"
CHECKSUM = "sha256"


class Store:
    """One folder of results that all studies share. Stores merge by copying folders."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.states = self.root / "states"
        self.leaves = self.root / "leaves"
        self.shards = self.root / "shards"
        self.unfinished = self.root / "unfinished"
        self.studies = self.root / "studies"
        self.receipts = self.root / "receipts"
        self.leases = self.root / "leases"
        self.attempts = self.root / "attempts"
        self.verify = False  # hash inputs again, whatever is remembered of them
        self.hashed: dict[str, list[int]] = {}  # the stamps of inputs that this process hashed itself

    def has(self, folder: Path) -> bool:
        """Is there a published result, and is it the one of this key?"""
        return key_in(folder) == folder.name

    def fault(self, folder: Path) -> str:
        """Why files that stand in the place of a result, or of its receipt, are not that result; empty: none do."""
        if self.knows(folder):
            return ""
        return next((debris(one) for one in (folder, self.receipt(folder)) if _occupied(one)), "")

    def refuse_debris(self, folder: Path) -> None:
        """Before the work: refuse a place where its result could not be published."""
        if not self.has(folder) and _occupied(folder):
            raise StoreError(debris(folder))

    def named(self, folder: Path, digits: str) -> list[str]:
        """The keys of the results in a folder of this store (`states`, `leaves`) that begin with these digits."""
        found = sorted(place for place in folder.glob(f"{digits}*") if is_key(place.name))
        for place in found if digits else ():
            self.refuse_debris(place)
        return [place.name for place in found if self.has(place)]

    def receipt(self, folder: Path) -> Path:
        """Where the receipt of a result is, if it has one: its light files, under a manifest of their own.

        It stands apart from the result's place, so that no state without weights is ever taken for a state.
        """
        return self.receipts / folder.parent.name / folder.name

    def told(self, folder: Path) -> Path:
        """Where to read what a result says of itself: at its place, or else in its receipt."""
        return folder if self.has(folder) or not self.has(self.receipt(folder)) else self.receipt(folder)

    def knows(self, folder: Path) -> bool:
        """Is there a published result, or the receipt of one?"""
        return self.has(folder) or self.has(self.receipt(folder))

    @contextlib.contextmanager
    def attempt(self, name: str) -> Generator[Path]:
        """A folder to build a result in; what is left of it at the end is removed."""
        folder = self.new_attempt(name)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def new_attempt(self, name: str) -> Path:
        """An empty folder to build a result in. Whoever asks for it removes what is left of it."""
        folder = self.attempts / f"{name}-{uuid.uuid4().hex[:8]}"
        folder.mkdir(parents=True)
        return folder

    def discard(self, folder: Path) -> None:
        """Remove a result at once: it leaves its place by one rename, then its files go."""
        grave = self.attempts / f"discarded-{uuid.uuid4().hex[:8]}"
        grave.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            folder.rename(grave)
            shutil.rmtree(grave, ignore_errors=True)


def publish(built: Path, place: Path, known: dict[str, Any] | None = None) -> bool:
    """Move a finished folder to its place. False, and nothing changed, if a result is there already.

    `known`: entries of files that were hashed and brought to the disk while they were written.
    """
    entries = {}
    for path in sorted(path for path in built.rglob("*") if path != built / MANIFEST):
        name = path.relative_to(built).as_posix()
        if known and name in known:
            entries[name] = known[name]
            continue
        if path.is_file():
            entries[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        sync(path)
    lacking = sorted(set(known or ()) - set(entries))
    if lacking:
        raise StoreError(f"{built / lacking[0]} was written and is gone; run again")
    write_json(built / MANIFEST, {"key": place.name, "files": entries})  # the key first: see `key_in`
    sync(built)
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        built.rename(place)  # a folder never replaces one that holds files
    except OSError:
        if key_in(place) == place.name:
            return False
        if place.exists():
            raise StoreError(debris(place)) from None
        raise
    sync(place.parent)
    return True


_KEY_FIRST = re.compile(rb'\{\s*"key": "([^"\\]+)"')
_keys_in: dict[str, tuple[list[int], str]] = {}  # by path of a manifest: its stamp, and the key it says


def key_in(place: Path) -> str:
    """The key that the manifest of a folder says, as the first thing in it; empty: there is none, or it says none.

    Only that is read, once per process, and again when the file has changed: `status` asks for thousands.
    """
    path = f"{place}/{MANIFEST}"
    try:
        now = stamp(path)
        known = _keys_in.get(path)
        if known is None or known[0] != now:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                said = _KEY_FIRST.match(os.read(handle, 200))
            finally:
                os.close(handle)
            known = _keys_in[path] = now, said[1].decode() if said else ""
    except (OSError, UnicodeDecodeError):
        return ""
    return known[1]


def stamp(path: Path | str) -> list[int]:
    """What changes when a file is written or replaced, also where its size and its time of change are set back."""
    found = os.stat(path)  # noqa: PTH116 (a path as text: thousands are asked)
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _occupied(place: Path) -> bool:
    """Is there something where a folder is to be published?"""
    return os.path.lexists(place) and (not place.is_dir() or any(place.iterdir()))


def debris(place: Path) -> str:
    """What is said of files that stand in the place of a result and are not that result."""
    other, remove = key_in(place), f"remove it ({shlex.join(['rm', '-r', str(place)])}) and run again"
    if other and other != place.name:
        return f"{place} holds the result of another key, {other}; put it back there ({place.with_name(other)}), or {remove}"
    return f"{place} holds files but no {MANIFEST} that says whose they are, so it is no result; {remove}"


def verify(
    place: Path, *, contents: bool = True, at_once: int = 1, hashed: Callable[[Path], str] | None = None
) -> dict[str, Any]:
    """The manifest of a published folder, after checking that every file is as it was written.

    `hashed` gives the hash of a file, where somebody remembers those that were read before.
    """
    entries = _entries(place)
    for name, entry in entries.items():
        path = place / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            raise StoreError(f"{path} is missing or cut short; remove {place} and run the study again")
    with ThreadPoolExecutor(at_once) as pool:  # hashing lets other threads run meanwhile
        hashes = pool.map(hashed or sha256, [place / name for name in entries] if contents else [])
        for (name, entry), found in zip(entries.items(), hashes, strict=False):
            if found != entry["sha256"]:
                raise StoreError(
                    f"{place / name} has changed since it was written; remove {place} and run the study again"
                )
    return entries


def read_verified(place: Path, name: str) -> bytes:
    """One file of a published folder, as it was written. Read once: what was checked is what is used."""
    path, entry = place / name, _entries(place).get(name)
    try:
        content = read_file(path)
    except OSError:
        content = b""
    if entry is None or len(content) != entry["bytes"]:
        raise StoreError(f"{path} is missing or cut short; remove {place} and run the study again")
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise StoreError(f"{path} has changed since it was written; remove {place} and run the study again")
    return content


def _entries(place: Path) -> dict[str, Any]:
    """The files of a manifest, each with its size and its hash. All of them are inside its folder."""
    manifest = read_json(place / MANIFEST)
    try:
        key, entries = manifest["key"], manifest["files"]
        if all({"bytes", "sha256"} <= entry.keys() and _inside(name) for name, entry in entries.items()):
            if key != place.name:
                raise StoreError(debris(place))
            return entries
    except (TypeError, KeyError, AttributeError):
        pass
    raise StoreError(f"{place / MANIFEST} is no manifest; remove {place} and run the study again")


def _inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def with_checksum(value: dict[str, Any]) -> dict[str, Any]:
    """A JSON object with the hash of all it says: for a file that stands alone, without a manifest."""
    return value | {CHECKSUM: _checksum(value)}


def read_checked(path: Path) -> dict[str, Any]:
    """What `sealed` made, unchanged. One without a seal, as earlier versions wrote them, is taken as it is."""
    value = read_json(path)
    if not isinstance(value, dict) or value.get(CHECKSUM, _checksum(value)) != _checksum(value):
        raise StoreError(f"{path} has changed since it was written; remove it and make it again")
    return {name: one for name, one in value.items() if name != CHECKSUM}


def _checksum(value: dict[str, Any]) -> str:
    said = {name: one for name, one in value.items() if name != CHECKSUM}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that a reader sees the old one or the new one, never a part."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with draft.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, ensure_ascii=False, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)  # there only if something went wrong


def read_file(path: Path, *, tail: int = 0) -> bytes:
    """The content of a plain file, or its last `tail` bytes. Anything else is refused: reading a named pipe would never end."""

    def opened(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    with open(path, "rb", opener=opened) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no plain file", str(path))
        if tail:
            file.seek(max(0, file.seek(0, os.SEEK_END) - tail))
        return file.read()


def read_json(path: Path) -> Any:
    try:
        return json.loads(read_file(path))
    except FileNotFoundError:
        raise StoreError(f"{path} is not there") from None
    except (ValueError, OSError, RecursionError) as wrong:
        raise StoreError(f"{path} cannot be read ({wrong}); remove its folder and run again") from None


def sweep(folder: Path, pattern: str, seconds: float) -> None:
    """Remove the files of a folder that match and are older than that.

    Their age is taken by the clock that sets file times there, which may be hours from this machine's.
    """
    found = list(folder.glob(pattern))
    if not found:
        return
    probe = folder / f".{uuid.uuid4().hex}.clock"
    with contextlib.suppress(OSError):
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        for path in found:
            with contextlib.suppress(OSError):
                if now - path.stat().st_mtime > seconds:
                    path.unlink()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
