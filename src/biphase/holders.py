"""Who holds a lease: a process, told from every other one that ever bore its number.

Host, boot and process-id namespace say where the number means something; the start time says which process.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path


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


def parse(raw: bytes | None) -> Holder | None:
    """The holder a lease file names; None if the file is absent or not a lease."""
    try:
        fields = json.loads(raw or b"")
        return Holder(beats=int(fields.pop("beat")), **fields)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def owner_of(raw: bytes | None) -> str:
    holder = parse(raw)
    return holder.owner if holder else ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
