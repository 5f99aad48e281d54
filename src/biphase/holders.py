"""Processes: who holds a lease, told from every other one that ever bore its number; and who started whom.

Host, boot and process-id namespace say where the number means something; the start time says which process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

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
