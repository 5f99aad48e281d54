"""Runs a study while the machine refuses something, then again without; each fault in a store of its own.

    python fault_driver.py STUDY FOLDER FAULTS

FAULTS is a JSON list of [what, number]:
    ["full", n]        from the n-th contact with the disk on there is no room: opening, making, renaming, linking, syncing
    ["memory", n]      the n-th step finds no memory
    ["read-only", 0]   the store may be read and not written, by a user who is not root
Prints as JSON the output of each attempt, and how both ended.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.attempts import attempt, code_of, import_the_rest

from biphase.training.loop import PlainStep

NOBODY = 65534
WRITES = ("os.rename", "os.link", "os.mkdir", "os.truncate")


class Full:
    """A disk that has no room from a certain contact on. Only what lies below `root` counts."""

    def __init__(self, root: Path, first: int) -> None:
        self.root, self.first, self.contacts = str(root), first, 0

    def __call__(self, event: str, args: tuple) -> None:
        if event == "open" and isinstance(args[0], str | Path):
            if (args[2] or 0) & (os.O_WRONLY | os.O_RDWR):
                self.touch(str(args[0]))
        elif event in WRITES:
            self.touch(str(args[0]))

    def touch(self, path: str) -> None:
        if not path.startswith(self.root):
            return
        self.contacts += 1
        if self.contacts >= self.first:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def start(self) -> None:
        real = os.fsync

        def sync(handle: int) -> None:
            self.touch(os.readlink(f"/proc/self/fd/{handle}"))  # noqa: PTH115 (may be no path)
            real(handle)

        os.fsync = sync
        sys.addaudithook(self)


def out_of_memory(nth: int) -> None:
    real, taken = PlainStep.__call__, [0]

    def step(self, *args, **named):
        taken[0] += 1
        if taken[0] == nth:
            raise MemoryError
        return real(self, *args, **named)

    PlainStep.__call__ = step


def read_only(store: Path) -> None:
    """A user who owns nothing, and a store that lets him only read."""
    store.chmod(0o555)
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def disturbance(what: str, number: int, store: Path) -> Callable[[], None]:
    return {
        "full": lambda: Full(store, number).start(),
        "memory": lambda: out_of_memory(number),
        "read-only": lambda: read_only(store),
    }[what]


def main() -> None:
    study, folder, faults = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    import_the_rest(study, str(folder / "none"))
    found = []
    for place, (what, number) in enumerate(faults):
        store, log = folder / f"store-{place}", folder / f"log-{place}"
        store.mkdir()
        words = ["run", study, "--store", str(store), "--checkpoint", "2", "--quiet"]
        broken = code_of(attempt(words, log, disturbance(what, number, store)))
        output = log.read_text(errors="replace")
        store.chmod(0o755)
        after = code_of(attempt(words, log))
        found.append({"code": broken, "output": output, "after": after, "log": log.read_text()})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
