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
    return (int(text.strip()), 0.0) if re.fullmatch(r"[1-9][0-9]*", text.strip()) else (0, seconds(text))


class Stop:
    """Asks the work to end after the current step: on ^C, SIGTERM, or when the time is up. Again ^C ends at once."""

    def __init__(self, limit: float | None, say: Callable[[str], None]) -> None:
        self.until = None if limit is None else time.monotonic() + limit
        self.asked = False
        self.say = say
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: object) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
        self.say(
            "stopping after this step: a piece keeps what it has, a fine-tuning will start again "
            "(again ^C to stop at once)"
        )

    def __call__(self) -> bool:
        return self.asked or (self.until is not None and time.monotonic() >= self.until)


def in_processes(count: int, arguments: list[str]) -> int:
    """Run `biphase ARGUMENTS` in `count` processes that train together, by torchrun on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    threads = max(1, (os.cpu_count() or 1) // count)
    environment = os.environ | {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        # The time between a signal and SIGKILL: a step and a checkpoint of a large model take more than the usual 30 s.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
    }
    child = subprocess.Popen([*command, "-m", "biphase", *arguments], env=environment)
    # torchrun hands a signal on to its processes, which stop after their step with a checkpoint. From a terminal
    # it hears ^C itself; a SIGTERM sent to this process is handed on to it. After a signal its status says only
    # that there was one, so a stop that was asked for counts as clean.
    asked: list[int] = []

    def hand_on(number: int, frame: object) -> None:
        asked.append(number)
        if number == signal.SIGTERM:
            child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, hand_on)
    code = child.wait()
    return 0 if asked and code != 2 else code
