"""Leases: files by which the workers that share a store agree on which of them computes a job.

A lease means "this process is computing this job". It is one small JSON file per key, `<key>.lease`, created
exclusively. `Leases` takes, lists and steals the leases of a folder; `Lease` is a held one; `Holder` is what a lease
file says about its process.

    take    write a draft, hard-link it to <key>.lease   the link fails if the lease is held
    beat    overwrite the counter in one's own file      through the open handle, never by name
    steal   rename a stale lease away, then take it      the process whose rename succeeds may try

A lease is stale when its bytes have not changed for `stale_seconds` of the observer's own monotonic clock (file times
and other machines' clocks are not used), or at once when its holder ran on this machine and is dead. A holder that
was suspended for long finds `lost` true when it resumes.

Beating through the open handle makes a suspended holder harmless: after its lease is stolen, it writes to a file that
no longer has a name, so it can neither restore its lease nor overwrite the new one. The counter has a fixed width
inside a JSON string, so a reader gets valid JSON even during a beat.

Where the file system has locks, stealing and releasing are serialized by one and a lease never has two holders.
Without locks (some network file systems) a process that steals may briefly remove a third process's fresh lease before
it notices and puts it back. This, or a holder that is alive but suspended, can make two workers compute the same job.
That costs time and is counted (`takeovers`), but cannot produce two results: publishing is exclusive
(`store.publish`), each attempt has its own folder, and a worker checks `lost` while computing and before publishing.

A process is identified by host, boot id and process-id namespace (which say where a pid is meaningful) plus pid and
start time (since pids are reused).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from biphase.errors import StoreError
from biphase.store import read_file


@dataclass(frozen=True)
class Holder:
    """The process that holds a lease, as recorded in the lease file."""

    owner: str  # random id, unique for every lease ever taken
    host: str
    boot: str
    namespace: str  # process ids are meaningful only inside their namespace
    pid: int
    started: str
    since: str  # wall clock, for display only
    beats: int

    @property
    def alive(self) -> bool | None:
        """Whether the process is alive, or None if it runs on another machine and only its beats can tell."""
        here = machine()
        if not all(here) or here != (self.host, self.boot, self.namespace):
            return None
        return process_lives(self.pid, self.started)


def machine() -> tuple[str, str, str]:
    """Return host, boot id and process-id namespace: if all three are equal, process ids can be compared."""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 (a name, not a path)
    return socket.gethostname(), boot, namespace


def process_start(pid: int) -> str | None:
    """Return when a process of this machine started, in ticks since boot; None if it is gone, dead or hidden."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
    except OSError:
        return None
    after_name = text.rpartition(")")[2].split()  # the name may contain spaces and brackets
    # The main thread of a killed process may show as a zombie while other threads still run.
    return None if after_name[0] in "ZX" and threads <= 1 else after_name[19]


def process_lives(pid: int, started: str) -> bool:
    """Return whether the process `pid` that started at `started` still runs, and not a later one with the same pid."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process; if its start time is hidden, count it as alive
        return process_start(pid) in (None, started)
    return process_start(pid) == started


def parse(raw: bytes | None) -> Holder | None:
    """Parse a lease file's bytes; None if the file is absent or not a valid lease."""
    try:
        fields = json.loads(raw or b"")
        holder = Holder(beats=int(fields.pop("beat")), **fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    texts = (holder.owner, holder.host, holder.boot, holder.namespace, holder.started, holder.since)
    # A pid of 0 or below addresses a process group, or every process.
    valid = (
        type(holder.pid) is int and 0 < holder.pid < 2**31 and all(isinstance(text, str) for text in texts)
    )
    return holder if valid else None


def owner_of(raw: bytes | None) -> str:
    holder = parse(raw)
    return holder.owner if holder else ""


def descendants(pid: int) -> list[int]:
    """Return the pids of a process's children, their children and so on."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            after_name = path.read_text(errors="replace").rpartition(")")[2].split()
            children.setdefault(int(after_name[1]), []).append(int(path.parent.name))
    pids = [pid]
    for parent in pids:  # grows while it is read
        pids += children.get(parent, [])
    return pids[1:]


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent dies (Linux only), so that it is not orphaned."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


# ---------------------------------------------------------------- leases


SUFFIX = ".lease"
TAKEOVERS = "takeovers.jsonl"
LOCK_SECONDS = 1.0

_BEAT_AT = len('{"beat": "')  # byte offset of the counter in the file
_BEAT_DIGITS = 12


class Lease:
    """The right to compute one job, until it is released or `lost`."""

    def __init__(self, key: str, owner: str, path: Path, handle: int, leases: Leases) -> None:
        self.key = key
        self.owner = owner
        self._path = path
        self._handle = handle
        self._leases = leases
        self._pid = os.getpid()
        self._beats = 0
        self._lost = False
        self._released = False
        self._confirmed = time.monotonic()
        self._guard = threading.Lock()  # the handle must not be closed during a beat

    @property
    def lost(self) -> bool:
        """Whether another process has taken the job over. Reads the disk only if the last beat is overdue."""
        if time.monotonic() - self._confirmed > 2 * self._leases.beat_seconds:
            self.beat()
        return self._lost

    def beat(self) -> None:
        """Increment the counter in the lease file and check that the lease still belongs to this process."""
        if os.getpid() != self._pid:  # a forked child holds no lease, and must not wait for a copied lock
            return
        with self._guard:
            if self._lost or self._released:
                return
            with contextlib.suppress(OSError):  # a transient file system error: the next beat tries again
                self._lost = not self._still_ours()
                self._confirmed = time.monotonic()
                if not self._lost:
                    self._beats += 1
                    os.pwrite(self._handle, f"{self._beats:0{_BEAT_DIGITS}d}".encode(), _BEAT_AT)
                    _flush(self._handle)

    def _still_ours(self) -> bool:
        raw = _read(self._path)
        if raw is None:  # another process may have stolen it by mistake and be about to put it back
            time.sleep(0.05)
            raw = _read(self._path)
        return owner_of(raw) == self.owner

    def release(self) -> None:
        """Free the job for other workers.

        A second call, or a call in a forked child, does nothing; a lease file of another owner is left alone.
        """
        if os.getpid() != self._pid:
            return
        with self._guard:
            if self._released:
                return
            self._released = True
            os.close(self._handle)
        self._leases._released(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Leases:
    """Takes, lists and steals the leases of one folder, on behalf of one process."""

    def __init__(self, folder: Path, *, beat_seconds: float = 5.0, stale_seconds: float = 60.0) -> None:
        self.folder = folder
        self.beat_seconds = beat_seconds
        self.stale_seconds = stale_seconds
        self._start_afresh()

    def _start_afresh(self) -> None:
        """Reset to holding nothing; also called in a forked child, where copied locks and threads are unusable."""
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._held: list[Lease] = []
        self._seen: dict[str, tuple[bytes, float, float]] = {}  # bytes, seconds unchanged, time of last check
        self._heart: threading.Thread | None = None

    def take(self, key: str) -> Lease | None:
        """Take the lease of `key`; None if another process holds it and is neither dead nor stale."""
        if not re.fullmatch(r"[\w-][\w.-]*", key, re.ASCII):
            raise StoreError(f"{key!r} cannot name a lease; use letters, digits, '.', '_' and '-'")
        if os.getpid() != self._pid:
            self._start_afresh()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{key}{SUFFIX}"
        raw = _read(path)
        if raw is not None:
            reason = self._why_stale(key, raw)
            if not reason or not self._steal(path, key, raw, reason):
                return None
        lease = self._create(path, key)
        if lease:
            with self._guard:
                self._seen.pop(key, None)
                self._held.append(lease)
                if self._heart is None:
                    self._heart = threading.Thread(
                        target=self._beat_while_held, name="lease-beats", daemon=True
                    )
                    self._heart.start()
        return lease

    def holders(self) -> dict[str, Holder]:
        """Return the current holder of each key. A lease that cannot be parsed has no entry."""
        paths = sorted(self.folder.glob(f"*{SUFFIX}"))
        holders = {path.name.removesuffix(SUFFIX): parse(_read(path)) for path in paths}
        return {key: holder for key, holder in holders.items() if holder}

    def takeovers(self) -> list[dict[str, Any]]:
        """Return every steal so far, oldest first: each is a job that may have been computed twice."""
        lines = (_read(self.folder / TAKEOVERS) or b"").decode(errors="replace").splitlines()
        events = []
        for line in lines:
            with contextlib.suppress(ValueError):  # two machines appending at once may corrupt a line
                events.append(json.loads(line))
        return events

    def _why_stale(self, key: str, raw: bytes) -> str:
        """Return "dead" or "silent", or "" if the lease does not count as stale (yet)."""
        holder = parse(raw)
        if holder and holder.alive is False:
            return "dead"
        now = time.monotonic()
        with self._guard:
            seen, still, looked = self._seen.get(key, (b"", 0.0, now))
            # One long gap between two checks proves little: observer and holder may have been suspended together
            # (^Z). A gap therefore counts for at most half of `stale_seconds`, so that it takes a third check.
            still = still + min(now - looked, self.stale_seconds / 2) if seen == raw else 0.0
            self._seen[key] = (raw, still, now)
        return "silent" if still >= self.stale_seconds else ""

    def _steal(self, path: Path, key: str, raw: bytes, reason: str) -> bool:
        with self._locked():
            if _read(path) != raw or not self._withdraw(path, lambda stolen: stolen == raw):
                return False
            holder = parse(raw)
            event = {
                "key": key,
                "reason": reason,
                "at": _now(),
                "from": f"{holder.host}:{holder.pid}" if holder else "unreadable",
                "by": f"{socket.gethostname()}:{os.getpid()}",
                "beats": holder.beats if holder else 0,
            }
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            with contextlib.suppress(OSError):  # an unusable log must not stop the steal
                log = os.open(self.folder / TAKEOVERS, flags, 0o644)
                try:  # one write, so that lines do not interleave
                    os.write(log, (json.dumps(event) + "\n").encode())
                finally:
                    os.close(log)
        return True

    def _released(self, lease: Lease) -> None:
        """Stop beating a lease that was released, and remove its file if it is still its own."""
        with self._guard:
            self._held = [held for held in self._held if held is not lease]
        with contextlib.suppress(FileNotFoundError), self._locked():  # the store may have been deleted
            if owner_of(_read(lease._path)) == lease.owner:
                self._withdraw(lease._path, lambda raw: owner_of(raw) == lease.owner)

    def _withdraw(self, path: Path, expected: Callable[[bytes], bool]) -> bool:
        """Rename a lease file away and delete it; put it back if its content was not the expected one."""
        grave = path.with_name(f"{path.name}.{uuid.uuid4().hex}.withdrawn")
        try:
            path.rename(grave)
        except FileNotFoundError:
            return False
        raw = _read(grave)
        ours = raw is not None and expected(raw)
        if not ours:
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                _link(grave, path)
        with contextlib.suppress(OSError):  # a folder in the place of a lease stays, under this other name
            grave.unlink()
        return ours

    def _create(self, path: Path, key: str) -> Lease | None:
        owner = uuid.uuid4().hex
        host, boot, namespace = machine()
        content = {
            "beat": "0" * _BEAT_DIGITS,  # first, so that its offset is _BEAT_AT
            "owner": owner,
            "host": host,
            "boot": boot,
            "namespace": namespace,
            "pid": os.getpid(),
            "started": process_start(os.getpid()) or "",
            "since": _now(),
        }
        draft = path.with_name(f"{path.name}.{owner}.draft")
        handle = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        ours = False
        try:
            os.write(handle, (json.dumps(content) + "\n").encode())
            _flush(handle)
            with contextlib.suppress(FileExistsError):  # the lease is taken
                _link(draft, path)
            # Read the owner back: a network file system may report failure for a link that was created.
            ours = owner_of(_read(path)) == owner
        finally:
            draft.unlink(missing_ok=True)
            if not ours:
                os.close(handle)
        return Lease(key, owner, path, handle, self) if ours else None

    def _beat_while_held(self) -> None:
        while True:
            time.sleep(self.beat_seconds)
            with self._guard:
                held = list(self._held)
                if not held:
                    self._heart = None
                    return
            for lease in held:
                lease.beat()

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
        """Let one process at a time steal or release, where the file system has locks.

        Waits at most LOCK_SECONDS, so that a process stuck with the lock cannot block the others.
        """
        try:
            handle = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError:  # the folder was deleted, or something else is there
            yield
            return
        try:
            give_up = time.monotonic() + LOCK_SECONDS
            while time.monotonic() < give_up:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.002)
                except OSError:  # this file system has no locks
                    break
            yield
        finally:
            os.close(handle)  # also releases the lock


def _read(path: Path) -> bytes | None:
    """Return a lease file's bytes, or None if there is none.

    Anything but a regular file reads as empty: like a torn lease, it is respected until it is stale.
    """
    try:
        return read_file(path)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not path.is_symlink():
            return None
        if error.errno in (errno.ENOENT, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENXIO):
            return b""
        raise


def _link(source: Path, target: Path) -> None:
    """Hard-link `source` to `target`; raise FileExistsError if `target` exists."""
    try:
        os.link(source, target)
    except (FileExistsError, FileNotFoundError):
        raise
    except OSError:
        # No hard links (FAT, some network shares): reserve the name with an empty file, which reads as a lease
        # whose holder is unknown, then replace it.
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        source.replace(target)


def _flush(handle: int) -> None:
    """Flush to disk, or to the server of a network file system, where other machines read."""
    getattr(os, "fdatasync", os.fsync)(handle)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
