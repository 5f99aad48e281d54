"""Processes: who holds a lease, told from every other one that ever bore its number; and who started whom.

Host, boot and process-id namespace say where the number means something; the start time says which process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
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
from biphase.store import read_file, sweep

PR_SET_PDEATHSIG = 1  # of Linux's prctl


@dataclass(frozen=True)
class Holder:
    """Who holds a lease, as its file says."""

    owner: str  # unique for every lease ever taken
    host: str
    boot: str
    namespace: str  # process ids mean something only inside their namespace
    pid: int
    started: str
    since: str  # wall clock, for people only
    beats: int

    @property
    def alive(self) -> bool | None:
        """True or False for a process of this machine, None where only its beats can tell."""
        here = machine()
        if not all(here) or here != (self.host, self.boot, self.namespace):
            return None
        return process_lives(self.pid, self.started)


def machine() -> tuple[str, str, str]:
    """Host, boot and process-id namespace: where all three agree, process ids can be compared."""
    boot = _text("/proc/sys/kernel/random/boot_id")
    try:
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 (not a path, a name)
    except OSError:
        namespace = ""
    return socket.gethostname(), boot, namespace


def process_start(pid: int) -> str | None:
    """When a process of this machine began, in ticks since boot; None if it is gone, dead or hidden."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
    except OSError:
        return None
    after_name = text.rpartition(")")[2].split()  # the name may hold spaces and brackets
    # The first thread of a killed process may show as a zombie while the others still run.
    return None if after_name[0] in "ZX" and threads <= 1 else after_name[19]


def process_lives(pid: int, started: str) -> bool:
    """Is the process that began at `started` still there, and not another one under its number?"""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's, perhaps hidden from us: then it counts as alive
        return process_start(pid) in (None, started)
    return process_start(pid) == started


def has_open(pid: int, path: Path) -> bool | None:
    """Does a process of this machine have this very file open? None where we may not look.

    A lease is open in the process that holds it. A file that somebody else wrote may name any process.
    """
    try:
        wanted, handles = path.stat(), list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return None
    for handle in handles:
        with contextlib.suppress(OSError):  # it was closed meanwhile
            if os.path.samestat(wanted, handle.stat()):
                return True
    return False


def parse(raw: bytes | None) -> Holder | None:
    """The holder a lease file names; None if the file is absent or not a lease."""
    try:
        fields = json.loads(raw or b"")
        holder = Holder(beats=int(fields.pop("beat")), **fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    texts = (holder.owner, holder.host, holder.boot, holder.namespace, holder.started, holder.since)
    # A process id of 0 or below would name a whole group, or every process.
    sound = type(holder.pid) is int and 0 < holder.pid < 2**31 and all(isinstance(one, str) for one in texts)
    return holder if sound else None


def owner_of(raw: bytes | None) -> str:
    holder = parse(raw)
    return holder.owner if holder else ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    """The processes that a process of this machine started, and those that they did."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            after_name = path.read_text(errors="replace").rpartition(")")[2].split()
            children.setdefault(int(after_name[1]), []).append(int(path.parent.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        young = children.get(waiting.pop(), [])
        found += young
        waiting += young
    return found


def end_with_parent() -> None:
    """Be told to stop (SIGTERM) when the process that started this one dies, however it does: nobody else would know of us."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


# ---------------------------------------------------------------- leases
# A lease says "I am computing this job": one small file per key, made by exclusive creation.
#
#     take    write a draft, link it to <key>.lease        the link fails if somebody holds it
#     beat    overwrite the counter inside one's own file  through the open handle, never by name
#     steal   rename a stale lease away, then take anew    who succeeds with the rename, may try
#
# A lease is stale when its bytes have not changed for `stale_seconds` of the observer's own monotonic clock
# (file times and other machines' clocks are never asked), or at once when its holder ran on this machine and
# is gone. A holder that was stopped for long finds `lost` true when it comes back.
#
# Beating through the open handle is what makes a stalled holder harmless: once its lease was stolen it writes
# to a file that no longer has a name, so it can neither bring its lease back nor overwrite the thief's. The
# counter has a fixed width inside a JSON string, so a reader gets whole JSON even in the middle of a beat.
#
# Where the file system has locks, stealing and releasing are serialised by one and a lease never has two
# holders. Without them (some network file systems) a thief may disturb a third party's fresh lease for the
# instant it needs to see its mistake and put it back. That, and a holder that is stalled but alive, can make
# two workers compute one job. It costs time and is counted (`takeovers`), but never makes two results:
# publishing is exclusive anyway (`files.publish`), each attempt has a folder of its own, and whoever computes asks
# `lost` on the way and before it publishes, so a rare double run is harmless.


SUFFIX = ".lease"
TAKEOVERS = "takeovers.jsonl"
DEBRIS_SECONDS = 3600.0  # drafts and withdrawn leases live for milliseconds; older ones belong to the dead
LOCK_SECONDS = 1.0
FOREIGN = b"\0"  # in place of the bytes of what is no lease file: a link, a pipe, a socket, a folder

_BEAT_AT = len('{"beat": "')  # where the counter stands in the file
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
        self._guard = threading.Lock()  # the handle must not be closed under a beat

    @property
    def lost(self) -> bool:
        """Has somebody else taken the job over? Asks the disk only if the last beat is overdue."""
        if time.monotonic() - self._confirmed > 2 * self._leases.beat_seconds:
            self.beat()
        return self._lost

    def beat(self) -> None:
        """Show that the holder lives, and see whether the lease is still its own."""
        if os.getpid() != self._pid:  # a forked child holds nothing, and must not wait for a copied lock
            return
        with self._guard:
            if self._lost or self._released:
                return
            with contextlib.suppress(OSError):  # a file system that hiccups: the next beat tries again
                self._lost = not self._still_ours()
                self._confirmed = time.monotonic()
                if not self._lost:
                    self._beats += 1
                    os.pwrite(self._handle, f"{self._beats:0{_BEAT_DIGITS}d}".encode(), _BEAT_AT)
                    _flush(self._handle)

    def _still_ours(self) -> bool:
        raw = _read(self._path)
        if raw is None:  # a mistaken thief may be about to put it back
            time.sleep(0.05)
            raw = _read(self._path)
        return owner_of(raw) == self.owner

    def release(self) -> None:
        """Free the job for others. Does nothing twice, nor in a forked child, nor to another's lease."""
        if os.getpid() != self._pid:
            return
        with self._guard:
            if self._released:
                return
            self._released = True
            os.close(self._handle)
        self._leases._forget(self)
        with (
            contextlib.suppress(FileNotFoundError),
            self._leases._serialised(),
        ):  # the store itself may be gone
            if owner_of(_read(self._path)) == self.owner:
                self._leases._withdraw(self._path, lambda raw: owner_of(raw) == self.owner)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Leases:
    """The leases of one folder, as one process takes and observes them."""

    def __init__(self, folder: Path, *, beat_seconds: float = 5.0, stale_seconds: float = 60.0) -> None:
        if not 0 < 2 * beat_seconds <= stale_seconds:
            raise StoreError(
                f"leases: stale_seconds ({stale_seconds}) must be at least twice beat_seconds ({beat_seconds})"
            )
        self.folder = Path(folder)
        self.beat_seconds = beat_seconds
        self.stale_seconds = stale_seconds
        self._swept = False
        self._start_afresh()

    def _start_afresh(self) -> None:
        """Also called in a forked child, where locks and threads are not to be trusted and nothing is held."""
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._held: list[Lease] = []
        self._seen: dict[str, tuple[bytes, float, float]] = {}  # bytes, seconds unchanged, last look
        self._heart: threading.Thread | None = None

    def take(self, key: str) -> Lease | None:
        """The lease of `key`, or None if somebody has it who is not known to be dead or stale."""
        if not re.fullmatch(r"[\w-][\w.-]*", key, re.ASCII):
            raise StoreError(f"{key!r} cannot name a lease; use letters, digits, '.', '_' and '-'")
        if os.getpid() != self._pid:
            self._start_afresh()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        path = self.folder / f"{key}{SUFFIX}"
        raw = _read(path)
        if raw is not None:
            reason = self._why_stale(key, raw)
            if not reason or not self._steal(path, key, raw, reason):
                return None
        lease = self._create(path, key)
        if lease:
            self._keep(lease)
        return lease

    def holders(self) -> dict[str, Holder]:
        """Who holds what now, by key. A lease that cannot be read has no entry."""
        found = {
            path.name.removesuffix(SUFFIX): parse(_read(path)) for path in self.folder.glob(f"*{SUFFIX}")
        }
        return {key: holder for key, holder in sorted(found.items()) if holder}

    def takeovers(self) -> list[dict[str, Any]]:
        """Every steal so far, oldest first: how often work may have been done twice."""
        lines = (_read(self.folder / TAKEOVERS) or b"").decode(errors="replace").splitlines()
        events = []
        for line in lines:
            with contextlib.suppress(ValueError):  # two machines appending at once may spoil a line
                events.append(json.loads(line))
        return events

    def _why_stale(self, key: str, raw: bytes) -> str:
        """The word "dead" or "silent", or none while there is hope."""
        holder = parse(raw)
        if raw == FOREIGN or (holder and holder.alive is False):
            return "dead"
        now = time.monotonic()
        with self._guard:
            seen, still, looked = self._seen.get(key, (b"", 0.0, now))
            # One long gap between two looks proves little: observer and holder may have been stopped together
            # (^Z), so a gap counts for half at most and a third look decides.
            still = still + min(now - looked, self.stale_seconds / 2) if seen == raw else 0.0
            self._seen[key] = (raw, still, now)
        return "silent" if still >= self.stale_seconds else ""

    def _steal(self, path: Path, key: str, raw: bytes, reason: str) -> bool:
        with self._serialised():
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
            with contextlib.suppress(OSError):  # what is no plain file there: takeovers are only counted
                log = os.open(self.folder / TAKEOVERS, flags, 0o644)
                try:
                    os.write(log, (json.dumps(event) + "\n").encode())  # one write: lines do not mix
                finally:
                    os.close(log)
        return True

    def _withdraw(self, path: Path, expected: Callable[[bytes], bool]) -> bool:
        """Take a lease file out of its place by one rename; put it back if it was not the expected one."""
        grave = path.with_name(f"{path.name}.{uuid.uuid4().hex}.withdrawn")
        try:
            path.rename(grave)
        except FileNotFoundError:
            return False
        raw = _read(grave)
        right = raw is not None and expected(raw)
        if not right:
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                _link(grave, path)
        if grave.is_dir() and not grave.is_symlink():
            shutil.rmtree(grave, ignore_errors=True)
        else:
            grave.unlink(missing_ok=True)
        return right

    def _create(self, path: Path, key: str) -> Lease | None:
        owner = uuid.uuid4().hex
        host, boot, namespace = machine()
        content = {
            "beat": "0" * _BEAT_DIGITS,  # first, so that it stands at _BEAT_AT
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
            with contextlib.suppress(FileExistsError, FileNotFoundError):  # taken, or swept by somebody
                _link(draft, path)
            # Ask whose lease it is: a network file system may lose the answer of a link that worked.
            ours = owner_of(_read(path)) == owner
        finally:
            draft.unlink(missing_ok=True)
            if not ours:
                os.close(handle)
        return Lease(key, owner, path, handle, self) if ours else None

    def _keep(self, lease: Lease) -> None:
        with self._guard:
            self._seen.pop(lease.key, None)
            self._held.append(lease)
            if self._heart is None:
                self._heart = threading.Thread(target=self._beat_while_held, name="lease-beats", daemon=True)
                self._heart.start()

    def _forget(self, lease: Lease) -> None:
        with self._guard:
            self._held = [one for one in self._held if one is not lease]

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
    def _serialised(self) -> Generator[None]:
        """One thief or releaser at a time, where the file system has locks; a stuck one is not waited for."""
        try:
            handle = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as wrong:
            if wrong.errno not in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
                raise
            yield  # a link, a socket or a folder cannot be locked
            return
        try:
            give_up = time.monotonic() + LOCK_SECONDS
            while time.monotonic() < give_up:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.002)
                except OSError:  # no locks here
                    break
            yield
        finally:
            os.close(handle)  # and with it the lock goes

    def _sweep(self) -> None:
        """Remove what killed takers and thieves left, once per process."""
        if not self._swept:
            self._swept = True
            sweep(self.folder, f"*{SUFFIX}.*", DEBRIS_SECONDS)  # *.draft and *.withdrawn


def _read(path: Path) -> bytes | None:
    """The bytes of a lease; None: there is none. What is no plain file is read as FOREIGN: it must hold up nobody."""
    try:
        return read_file(path)
    except FileNotFoundError:
        return FOREIGN if path.is_symlink() else None
    except OSError as wrong:
        if wrong.errno in (errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENXIO):
            return FOREIGN
        raise


def _link(source: Path, target: Path) -> None:
    """Give `source` a second name; FileExistsError if it is taken."""
    try:
        os.link(source, target)
    except (FileExistsError, FileNotFoundError):
        raise
    except OSError:
        # No hard links here (FAT, some shares): an empty file, read as a nameless holder, reserves the name.
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        source.replace(target)


def _flush(handle: int) -> None:
    """To the server of a network file system, where other machines look."""
    getattr(os, "fdatasync", os.fsync)(handle)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
