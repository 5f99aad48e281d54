"""Ways to start work: here, in several processes, until a time is up, until somebody says stop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from biphase.errors import SpecError

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def seconds(text: str) -> float:
    """9m as 540; also s, h, d."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if not match:
        raise SpecError(f"{text!r} is not a length of time; type for example 90s, 9m or 2h")
    return float(match[1]) * _UNITS[match[2]]


def checkpoint_rule(text: str) -> tuple[int, float]:
    """`200` as every 200 steps, `10m` as every ten minutes: (steps, seconds)."""
    return (int(text), 0.0) if text.strip().isdigit() and int(text) > 0 else (0, seconds(text))


class Stop:
    """Asks the work to end after the current step: on ^C, SIGTERM, or when the time is up. Again ^C ends at once."""

    def __init__(self, limit: float | None, say: Callable[[str], None]) -> None:
        self.until = time.monotonic() + limit if limit else None
        self.asked = False
        self.say = say
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: object) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
        self.say("stopping after this step; a checkpoint is being written (again ^C to stop at once)")

    def __call__(self) -> bool:
        return self.asked or (self.until is not None and time.monotonic() >= self.until)


def in_processes(count: int, arguments: list[str]) -> int:
    """Run `biphase ARGUMENTS` in `count` processes that train together, by torchrun on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    threads = max(1, (os.cpu_count() or 1) // count)
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    child = subprocess.Popen([*command, "-m", "biphase", *arguments], env=environment)
    # ^C at a terminal reaches the children by itself; a SIGTERM to this process must be handed on.
    signal.signal(signal.SIGTERM, lambda number, frame: child.send_signal(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return child.wait()
