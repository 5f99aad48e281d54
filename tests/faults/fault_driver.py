"""Runs a study while the machine refuses something, then again without; each fault in a store of its own.

    python fault_driver.py STUDY FOLDER FAULTS

FAULTS is a JSON list of [what, number]:
    ["full", n]        from the n-th contact with the disk on there is no room: opening, making, renaming, linking, syncing
    ["file", n]        no file may grow beyond n bytes: the write itself fails, also where no Python is
    ["memory", n]      the n-th step finds no memory; ["gpu memory", n] says so as torch does for a device
    ["handles", n]     only n more files may be open at once than are already
    ["read-only", 0]   the store may be read and not written, by a user who is not root; ["locked", 0]: not even read
    ["none", 0]        nothing: how many contacts there are
Prints as JSON the output of each attempt, and how both ended.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from faults.attempts import attempt, code_of, import_the_rest

from biphase.training.loop import PlainStep

NOBODY = 65534
WRITES = ("os.rename", "os.link", "os.mkdir", "os.truncate")


class Full:
    """A disk that has no room from a certain contact on. Only what lies below `root` counts."""

    def __init__(self, root: Path, first: int, counted: Path) -> None:
        self.root, self.first, self.counted, self.contacts = str(root), first, counted, 0

    def __call__(self, event: str, args: tuple) -> None:
        if event == "open" and isinstance(args[0], str | Path):
            path, flags = str(args[0]), args[2] or 0
            if path.startswith(self.root) and flags & (os.O_WRONLY | os.O_RDWR):
                self.touch(path)
        elif event in WRITES and str(args[0]).startswith(self.root):
            self.touch(str(args[0]))

    def touch(self, path: str) -> None:
        self.contacts += 1
        if self.first and self.contacts >= self.first:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def sync(self, handle: int, real: Callable[[int], None]) -> None:
        place = os.readlink(f"/proc/self/fd/{handle}")  # noqa: PTH115 (may be no path)
        if place.startswith(self.root):
            self.touch(place)
        real(handle)

    def start(self) -> None:
        real, end = os.fsync, os._exit

        def leave(code: int) -> None:
            self.root = "\0"  # nothing counts from here on
            self.counted.write_text(str(self.contacts))
            end(code)

        os.fsync = lambda handle: self.sync(handle, real)
        os._exit = leave
        sys.addaudithook(self)


def out_of_memory(nth: int, error: BaseException) -> None:
    real, taken = PlainStep.__call__, [0]

    def step(self, *args, **named):
        taken[0] += 1
        if taken[0] == nth:
            raise error
        return real(self, *args, **named)

    PlainStep.__call__ = step


def somebody(store: Path, mode: int) -> None:
    """A user who owns nothing, and a store that lets him do little."""
    store.chmod(mode)
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def limit(what: int, number: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(what, (number, number))


def highest_handle() -> int:
    return max(int(path.name) for path in Path("/proc/self/fd").iterdir())


def disturbance(what: str, number: int, store: Path, counted: Path) -> Callable[[], None]:
    return {
        "none": lambda: Full(store, 0, counted).start(),
        "full": lambda: Full(store, number, counted).start(),
        "file": lambda: limit(resource.RLIMIT_FSIZE, number),
        "memory": lambda: out_of_memory(number, MemoryError()),
        "gpu memory": lambda: out_of_memory(
            number, torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        ),
        "handles": lambda: limit(resource.RLIMIT_NOFILE, highest_handle() + number),
        "read-only": lambda: somebody(store, 0o555),
        "locked": lambda: somebody(store, 0o700),
    }[what]


def main() -> None:
    study, folder, faults = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    import_the_rest(study, str(folder / "none"))
    found = []
    for place, (what, number) in enumerate(faults):
        store, log, counted = (
            folder / f"store-{place}",
            folder / f"log-{place}",
            folder / f"counted-{place}",
        )
        store.mkdir()
        words = ["run", study, "--store", str(store), "--checkpoint", "2", "--quiet"]
        broken = code_of(attempt(words, log, disturbance(what, number, store, counted)))
        output = log.read_text(errors="replace")
        if store.exists():
            store.chmod(0o755)
        after = code_of(attempt(words, log))
        contacts = int(counted.read_text()) if counted.exists() else 0
        found.append(
            {"code": broken, "output": output, "after": after, "log": log.read_text(), "contacts": contacts}
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
