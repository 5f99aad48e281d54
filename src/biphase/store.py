"""The store: results on disk, each a folder named by its key and validated by a manifest.

    store/checkpoints/<key>/   a checkpoint: weights, optimizer state, position in the data
    store/trials/<key>/        the scores of one fine-tuning
    store/shards/<key>/        a tokenized corpus
    store/unfinished/          checkpoints of fine-tunings that were interrupted
    store/documents/<key>/     the texts and ids of a large collection; can be made again
    store/studies/<name>/      plan.json, failures
    store/baselines/           what word counts alone achieve on a dataset; can be computed again
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
import time
import uuid
from collections.abc import Callable, Generator
from pathlib import Path, PurePosixPath
from typing import Any

from biphase.errors import StoreError
from biphase.records import is_key

VERSION = 1  # of the format; docs/exactness.md says when it is raised
ABOUT = "store.json"  # says the version; a store without it has version 1
MANIFEST = "manifest.json"
CHECKSUM = "sha256"
VISIBLE_SECONDS = 90.0  # NFS remembers for up to 60 s that a file was absent, unless it is mounted otherwise


class Store:
    """A folder of results that all studies share. Two stores can be merged by copying their folders."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.checkpoints = self.root / "checkpoints"
        self.trials = self.root / "trials"
        self.shards = self.root / "shards"
        self.unfinished = self.root / "unfinished"
        self.studies = self.root / "studies"
        self.documents = self.root / "documents"
        self.metadata = self.root / "metadata"
        self.leases = self.root / "leases"
        self.attempts = self.root / "attempts"
        self.verify = False  # hash inputs again even if their hashes are cached
        self.hashed: dict[str, list[int]] = {}  # path → stamp, of the inputs that this process has hashed

    @classmethod
    def open(cls, root: Path | str) -> Store:
        """Open the store in a folder; raise StoreError if its format has another version than `VERSION`."""
        store = cls(root)
        older = [name for name in ("states", "leaves", "receipts") if (store.root / name).is_dir()]
        if older:  # would pass for an empty store
            raise StoreError(
                f"{store.root} was written by an earlier version of biphase ({older[0]}/); type --store with another folder, "
                "or go on with the version that wrote it"
            )
        try:
            about = read_json(store.root / ABOUT) if (store.root / ABOUT).exists() else {"version": 1}
        except StoreError:  # which would say to remove the folder
            about = None
        version = about.get("version") if isinstance(about, dict) else None
        if version != VERSION:
            raise StoreError(
                f"{store.root} is a store of version {str(version)[:20]}, and this biphase reads version {VERSION}; type --store "
                "with another folder, or install the biphase that wrote it"
            )
        return store

    def has(self, folder: Path) -> bool:
        """Return whether the folder is a published result whose manifest names the folder's own key."""
        return key_in(folder) == folder.name

    def has_now(self, folder: Path) -> bool:
        """`has`, but a network file system may not answer from memory that the result is absent."""
        if not self.has(folder):
            look_again(folder.parent)
        return self.has(folder)

    def fault(self, folder: Path) -> str:
        """Return why the files at a result's path, or at its metadata-only path, are not that result.

        Empty if the result is known or if nothing is there.
        """
        if self.knows(folder):
            return ""
        return next((debris(path) for path in (folder, self.metadata_of(folder)) if _occupied(path)), "")

    def refuse_debris(self, folder: Path) -> None:
        """Raise StoreError if other files occupy the path: call this before computing a result to publish there."""
        if not self.has(folder) and _occupied(folder):
            raise StoreError(debris(folder))

    def named(self, folder: Path, digits: str) -> list[str]:
        """Return the keys that start with `digits` in one folder of this store, e.g. `checkpoints` or `trials`."""
        folders = sorted(path for path in folder.glob(f"{digits}*") if is_key(path.name))
        for path in folders if digits else ():
            self.refuse_debris(path)
        return [path.name for path in folders if self.has(path)]

    def metadata_of(self, folder: Path) -> Path:
        """Return the path of a result's metadata-only copy: its small files under a manifest of their own.

        It is separate from the result's path, so that a checkpoint without weights cannot pass for a checkpoint.
        """
        return self.metadata / folder.parent.name / folder.name

    def readable(self, folder: Path) -> Path:
        """Return the folder to read a result's metadata from: the result itself, else its metadata-only copy."""
        copy = self.metadata_of(folder)
        return copy if not self.has(folder) and self.has(copy) else folder

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

    def sweep_discarded(self) -> None:
        """Delete what is left of results whose removal was interrupted."""
        for grave in self.attempts.glob("discarded-*"):
            shutil.rmtree(grave, ignore_errors=True)


def publish(built: Path, folder: Path, hashed: dict[str, Any] | None = None) -> bool:
    """Hash the files of a finished folder `built`, write its manifest and rename it to `folder`.

    Returns False and changes nothing if the result is already there. `hashed` holds the manifest entries of files that
    were hashed and synced to disk while they were written.
    """
    entries = dict(hashed or {})
    for path in sorted(path for path in built.rglob("*") if path != built / MANIFEST):
        name = path.relative_to(built).as_posix()
        if name in entries:
            continue
        if path.is_file():
            entries[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        sync(path)
    missing = [name for name in entries if not (built / name).is_file()]
    if missing:
        raise StoreError(f"{built / missing[0]} was written and is gone; run again")
    # `key_in` reads the key at the start.
    write_json(built / MANIFEST, {"key": folder.name, "files": dict(sorted(entries.items()))})
    sync(built)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        built.rename(folder)  # fails if `folder` exists and contains files
    except OSError:
        look_again(folder.parent)
        if key_in(folder) == folder.name:
            return False
        if folder.exists():
            raise StoreError(debris(folder)) from None
        raise
    sync(folder.parent)
    return True


_KEY_FIRST = re.compile(rb'\{\s*"key": "([^"\\]+)"')
_keys_in: dict[str, tuple[list[int], str]] = {}  # path of a manifest → its stamp and the key it contains


def key_in(folder: Path) -> str:
    """Return the key in a folder's manifest, or "" if there is no manifest or it does not begin with a key.

    Reads the first 200 bytes only and caches the key until the file changes, since `status` calls this for thousands
    of folders.
    """
    path = f"{folder}/{MANIFEST}"
    try:
        now = stamp(path)
        cached = _keys_in.get(path)
        if cached is None or cached[0] != now:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                key = _KEY_FIRST.match(os.read(handle, 200))
            finally:
                os.close(handle)
            cached = _keys_in[path] = now, key[1].decode() if key else ""
    except (OSError, UnicodeDecodeError):
        return ""
    return cached[1]


def stamp(path: Path | str) -> list[int]:
    """Return values of which at least one changes when a file is rewritten or replaced.

    The change time and inode are included because a copy can restore the size and the modification time.
    """
    facts = os.stat(path)  # noqa: PTH116 (a string path is faster, and there are thousands of calls)
    return [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]


def _occupied(path: Path) -> bool:
    """Return whether a path is anything but free or an empty folder, so that publishing there would fail."""
    return os.path.lexists(path) and (not path.is_dir() or any(path.iterdir()))


def debris(folder: Path) -> str:
    """Return the error message for files at a result's path that are not that result."""
    other, remove = key_in(folder), f"remove it ({shlex.join(['rm', '-r', str(folder)])}) and run again"
    if other and other != folder.name:
        return f"{folder} holds the result of another key, {other}; put it back there ({folder.with_name(other)}), or {remove}"
    return f"{folder} holds files but no {MANIFEST} that says whose they are, so it is no result; {remove}"


def _damaged(path: Path, folder: Path, problem: str) -> StoreError:
    return StoreError(f"{path} {problem}; remove {folder} and run the study again")


def verify(
    folder: Path,
    *,
    contents: bool = True,
    only: str = "",
    hashed: Callable[[Path], str] = lambda path: sha256(path),
) -> dict[str, Any]:
    """Check that every file of a published folder is unchanged, and return the file entries of its manifest.

    `contents=False` compares sizes only; `only` hashes the files whose names begin with it, for callers that read no
    others. `hashed` replaces `sha256`, for callers that cache hashes.
    """
    entries = _entries(folder)
    for name, entry in entries.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            raise _damaged(path, folder, "is missing or cut short")
    for name in (name for name in entries if contents and name.startswith(only)):
        if hashed(folder / name) != entries[name]["sha256"]:
            raise _damaged(folder / name, folder, "has changed since it was written")
    return entries


def read_verified(folder: Path, name: str) -> bytes:
    """Return the verified content of one file of a published folder.

    The file is read once, so the bytes that were hashed are the bytes that are returned.
    """
    path, entry = folder / name, _entries(folder).get(name)
    try:
        content = read_file(path)
    except OSError:
        content = b""
    if entry is None or len(content) != entry["bytes"]:
        raise _damaged(path, folder, "is missing or cut short")
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise _damaged(path, folder, "has changed since it was written")
    return content


def _entries(folder: Path) -> dict[str, Any]:
    """Return a manifest's files with their sizes and hashes, after checking that all paths lie inside the folder."""
    manifest = read_json(folder / MANIFEST)
    try:
        key, entries = manifest["key"], manifest["files"]
        if all({"bytes", "sha256"} <= entry.keys() and _inside(name) for name, entry in entries.items()):
            if key != folder.name:
                raise StoreError(debris(folder))
            return entries
    except (TypeError, KeyError, AttributeError):
        pass
    raise _damaged(folder / MANIFEST, folder, "is no manifest")


def _inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def with_checksum(value: dict[str, Any]) -> dict[str, Any]:
    """Add a checksum of its own content to a JSON object, for a file that no manifest covers."""
    return value | {CHECKSUM: _checksum(value)}


def read_checked(path: Path) -> dict[str, Any]:
    """Read a JSON object written by `with_checksum`; raise StoreError if its checksum is missing or wrong."""
    value = read_json(path)
    checksum = value.pop(CHECKSUM, None) if isinstance(value, dict) else None
    if checksum is None or checksum != _checksum(value):
        raise StoreError(f"{path} has changed since it was written; remove it and make it again")
    return value


def _checksum(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


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
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if tail:
            file.seek(max(0, file.seek(0, os.SEEK_END) - tail))
        return file.read()


def read_json(path: Path) -> Any:
    try:
        return json.loads(read_file(path))
    except FileNotFoundError:
        raise StoreError(f"{path} does not exist") from None
    except (ValueError, OSError, RecursionError) as error:
        raise StoreError(f"{path} cannot be read ({error}); remove its folder and run again") from None


def look_again(folder: Path) -> None:
    """Make NFS forget which names were absent from a folder, as it does when this machine changes the folder's times."""
    for place in (folder.parent, folder):  # the folder itself may be one of those names
        with contextlib.suppress(OSError):
            os.utime(place)


def wait_for(appears: Callable[[], object], seconds: float = VISIBLE_SECONDS) -> bool:
    """Wait until `appears()`, for what another machine has written and this one may not see yet; False: it did not."""
    until, pause = time.monotonic() + seconds, 0.01
    while not appears():
        if time.monotonic() > until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
    return True


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
