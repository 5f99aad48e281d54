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
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from biphase.errors import StoreError

MANIFEST = "manifest.json"
SEAL = "sha256"


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

    def has(self, folder: Path) -> bool:
        """Is there a published result?"""
        return (folder / MANIFEST).is_file()

    def refuse_debris(self, folder: Path) -> None:
        """Before the work: refuse a place where its result could not be published."""
        if folder.exists() and not self.has(folder) and (not folder.is_dir() or any(folder.iterdir())):
            raise StoreError(debris(folder))

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
    write_json(built / MANIFEST, {"files": entries})
    sync(built)
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        built.rename(place)  # a folder never replaces one that holds files
    except OSError:
        if (place / MANIFEST).is_file():
            return False
        if place.exists():
            raise StoreError(debris(place)) from None
        raise
    sync(place.parent)
    return True


def debris(place: Path) -> str:
    """What is said of a place with files and without a manifest."""
    return (
        f"{place} holds files but no {MANIFEST}, so it is no result; remove it (rm -r {place}) and run again"
    )


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
        content = path.read_bytes()
    except OSError:
        content = b""
    if entry is None or len(content) != entry["bytes"]:
        raise StoreError(f"{path} is missing or cut short; remove {place} and run the study again")
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise StoreError(f"{path} has changed since it was written; remove {place} and run the study again")
    return content


def told_json(place: Path, name: str) -> Any:
    """What a JSON file of a published folder says, as it was written."""
    return json.loads(read_verified(place, name))


def _entries(place: Path) -> dict[str, Any]:
    """The files of a manifest, each with its size and its hash. All of them are inside its folder."""
    manifest = read_json(place / MANIFEST)
    try:
        entries = manifest["files"]
        if all({"bytes", "sha256"} <= entry.keys() and _inside(name) for name, entry in entries.items()):
            return entries
    except (TypeError, KeyError, AttributeError):
        pass
    raise StoreError(f"{place / MANIFEST} is no manifest; remove {place} and run the study again")


def _inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def sealed(value: dict[str, Any]) -> dict[str, Any]:
    """A JSON object with the hash of all it says: for a file that stands alone, without a manifest."""
    return value | {SEAL: _seal(value)}


def read_sealed(path: Path) -> dict[str, Any]:
    """What `sealed` made, unchanged. One without a seal, as earlier versions wrote them, is taken as it is."""
    value = read_json(path)
    if not isinstance(value, dict) or value.get(SEAL, _seal(value)) != _seal(value):
        raise StoreError(f"{path} has changed since it was written; remove it and make it again")
    return {name: one for name, one in value.items() if name != SEAL}


def _seal(value: dict[str, Any]) -> str:
    said = {name: one for name, one in value.items() if name != SEAL}
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


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
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
