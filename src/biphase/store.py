"""The store: results on disk, each a folder named by its key and validated by a manifest.

    store/checkpoints/<key>/   a checkpoint: weights, optimizer state, position in the data
    store/trials/<key>/        the scores of one fine-tuning
    store/shards/<key>/        a tokenized corpus
    store/unfinished/          checkpoints of fine-tunings that were interrupted
    store/studies/<name>/      plan.json, failures
    store/metadata/            metadata-only copies of results whose weights are on another machine

`Store` holds the paths and answers which results exist. `publish`, `verify`, `read_verified` and `write_json` write and
check files.

Each attempt writes into its own folder. `publish` hashes the files, writes the manifest last and renames the folder
to its final path; the rename fails if another worker has published there first. A result therefore appears
completely or not at all, and a crash leaves no folder that passes for a result.

The manifest contains the key of its result. Every reader compares it with the folder's name, so a folder that was
moved or copied to another key is not accepted as a result.
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
    """A folder of results that all studies share. Two stores can be merged by copying their folders."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.checkpoints = self.root / "checkpoints"
        self.trials = self.root / "trials"
        self.shards = self.root / "shards"
        self.unfinished = self.root / "unfinished"
        self.studies = self.root / "studies"
        self.metadata = self.root / "metadata"
        self.leases = self.root / "leases"
        self.attempts = self.root / "attempts"
        self.verify = False  # hash inputs again even if their hashes are cached
        self.hashed: dict[
            str, list[int]
        ] = {}  # path → stamp of the inputs that this process has hashed itself

    @classmethod
    def open(cls, root: Path | str) -> Store:
        """Open the store in a folder; raise StoreError if an earlier, incompatible version wrote it."""
        store = cls(root)
        older = [name for name in ("states", "leaves", "receipts") if (store.root / name).is_dir()]
        if older:
            raise StoreError(
                f"{store.root} was written by an earlier version of biphase ({older[0]}/); type --store with another folder, "
                "or go on with the version that wrote it"
            )
        return store

    def has(self, folder: Path) -> bool:
        """Return whether the folder is a published result whose manifest names the folder's own key."""
        return key_in(folder) == folder.name

    def fault(self, folder: Path) -> str:
        """Return why the files at a result's path, or at its metadata-only path, are not that result.

        Empty if the result is known or if nothing is there.
        """
        if self.knows(folder):
            return ""
        return next((debris(one) for one in (folder, self.metadata_of(folder)) if _occupied(one)), "")

    def refuse_debris(self, folder: Path) -> None:
        """Raise StoreError if other files occupy the path: call this before computing a result to publish there."""
        if not self.has(folder) and _occupied(folder):
            raise StoreError(debris(folder))

    def named(self, folder: Path, digits: str) -> list[str]:
        """Return the keys that start with `digits` in one folder of this store, e.g. `checkpoints` or `trials`."""
        found = sorted(place for place in folder.glob(f"{digits}*") if is_key(place.name))
        for place in found if digits else ():
            self.refuse_debris(place)
        return [place.name for place in found if self.has(place)]

    def metadata_of(self, folder: Path) -> Path:
        """Return the path of a result's metadata-only copy: its small files under a manifest of their own.

        It is separate from the result's path, so that a checkpoint without weights cannot pass for a checkpoint.
        """
        return self.metadata / folder.parent.name / folder.name

    def told(self, folder: Path) -> Path:
        """Return the folder to read a result's metadata from: the result itself, else its metadata-only copy."""
        return (
            folder if self.has(folder) or not self.has(self.metadata_of(folder)) else self.metadata_of(folder)
        )

    def knows(self, folder: Path) -> bool:
        """Return whether the store holds the result or a metadata-only copy of it."""
        return self.has(folder) or self.has(self.metadata_of(folder))

    @contextlib.contextmanager
    def attempt(self, name: str) -> Generator[Path]:
        """Yield a new folder to build a result in, and remove what is left of it at the end."""
        folder = self.new_attempt(name)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def new_attempt(self, name: str) -> Path:
        """Create an empty folder to build a result in. The caller removes what is left of it."""
        folder = self.attempts / f"{name}-{uuid.uuid4().hex[:8]}"
        folder.mkdir(parents=True)
        return folder

    def discard(self, folder: Path) -> None:
        """Remove a result atomically: rename its folder away, then delete the files."""
        grave = self.attempts / f"discarded-{uuid.uuid4().hex[:8]}"
        grave.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            folder.rename(grave)
            shutil.rmtree(grave, ignore_errors=True)


def publish(built: Path, place: Path, known: dict[str, Any] | None = None) -> bool:
    """Hash a finished folder's files, write its manifest and rename it to `place`.

    Returns False and changes nothing at `place` if the result is already there. `known` holds the manifest entries of
    files that were hashed and synced to disk while they were written.
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
    write_json(built / MANIFEST, {"key": place.name, "files": entries})  # `key_in` reads the key at the start
    sync(built)
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        built.rename(place)  # fails if `place` is a folder that contains files
    except OSError:
        if key_in(place) == place.name:
            return False
        if place.exists():
            raise StoreError(debris(place)) from None
        raise
    sync(place.parent)
    return True


_KEY_FIRST = re.compile(rb'\{\s*"key": "([^"\\]+)"')
_keys_in: dict[str, tuple[list[int], str]] = {}  # path of a manifest → its stamp and the key it contains


def key_in(place: Path) -> str:
    """Return the key in a folder's manifest, or "" if there is no manifest or it does not begin with a key.

    Reads the first 200 bytes only and caches the key until the file changes, since `status` calls this for thousands
    of folders.
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
    """Return values of which at least one changes when a file is rewritten or replaced.

    The change time and inode are included because a copy can restore the size and the modification time.
    """
    found = os.stat(path)  # noqa: PTH116 (a string path is faster, and there are thousands of calls)
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _occupied(place: Path) -> bool:
    """Return whether a path is anything but free or an empty folder, so that publishing there would fail."""
    return os.path.lexists(place) and (not place.is_dir() or any(place.iterdir()))


def debris(place: Path) -> str:
    """Return the error message for files at a result's path that are not that result."""
    other, remove = key_in(place), f"remove it ({shlex.join(['rm', '-r', str(place)])}) and run again"
    if other and other != place.name:
        return f"{place} holds the result of another key, {other}; put it back there ({place.with_name(other)}), or {remove}"
    return f"{place} holds files but no {MANIFEST} that says whose they are, so it is no result; {remove}"


def verify(
    place: Path, *, contents: bool = True, at_once: int = 1, hashed: Callable[[Path], str] | None = None
) -> dict[str, Any]:
    """Check that every file of a published folder is unchanged, and return the file entries of its manifest.

    `contents=False` compares sizes only. `at_once` is the number of hashing threads. `hashed` replaces `sha256`, for
    callers that cache hashes.
    """
    entries = _entries(place)
    for name, entry in entries.items():
        path = place / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            raise StoreError(f"{path} is missing or cut short; remove {place} and run the study again")
    with ThreadPoolExecutor(at_once) as pool:  # hashlib releases the GIL
        hashes = pool.map(hashed or sha256, [place / name for name in entries] if contents else [])
        for (name, entry), found in zip(entries.items(), hashes, strict=False):
            if found != entry["sha256"]:
                raise StoreError(
                    f"{place / name} has changed since it was written; remove {place} and run the study again"
                )
    return entries


def read_verified(place: Path, name: str) -> bytes:
    """Return the verified content of one file of a published folder.

    The file is read once, so the bytes that were hashed are the bytes that are returned.
    """
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
    """Return a manifest's files with their sizes and hashes, after checking that all paths lie inside the folder."""
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
    """Add a checksum of its own content to a JSON object, for a file that no manifest covers."""
    return value | {CHECKSUM: _checksum(value)}


def read_checked(path: Path) -> dict[str, Any]:
    """Read a JSON object written by `with_checksum` and verify its checksum.

    An object without a checksum, as earlier versions wrote it, is accepted.
    """
    value = read_json(path)
    if not isinstance(value, dict) or value.get(CHECKSUM, _checksum(value)) != _checksum(value):
        raise StoreError(f"{path} has changed since it was written; remove it and make it again")
    return {name: one for name, one in value.items() if name != CHECKSUM}


def _checksum(value: dict[str, Any]) -> str:
    said = {name: one for name, one in value.items() if name != CHECKSUM}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically: a reader sees the old content or the new, never a part."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with draft.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, ensure_ascii=False, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)  # still there only after an error


def read_file(path: Path, *, tail: int = 0) -> bytes:
    """Return the content of a regular file, or its last `tail` bytes.

    Raises OSError for anything else, since reading a named pipe would block forever.
    """

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
    """Remove the files of a folder that match `pattern` and are older than `seconds`.

    Age is measured against a probe file created in the folder, since the file server's clock may differ from this
    machine's by hours.
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
