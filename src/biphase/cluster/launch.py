"""Starting and stopping work: signals, time limits, and several processes on one machine.

`Stop` decides when a worker ends. `in_processes` runs a command in several processes that train together, by
torchrun in a child process (`cluster.processes`). These processes report to that parent through files, whose path
is in the environment: `report_to_parent` leaves one error line, which the parent prints once; `note_beginning` and
`note_ending` record how each process ended, since torchrun reports only that there was a signal.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from biphase.errors import SpecError
from biphase.leases import descendants
from biphase.training.options import Sharding

PLACE = "BIPHASE_REFUSAL"  # environment variable with the path of this launch's error file
LOST = 3  # exit code of a process that failed because another one has gone


def report_to_parent(line: str) -> bool:
    """Leave an error line for the parent to print; return False if there is no parent."""
    place = os.environ.get(PLACE)
    if not place:
        return False
    draft = Path(f"{place}.{os.getpid()}")
    with contextlib.suppress(OSError):
        draft.write_text(line, encoding="utf-8")
        try:
            os.link(draft, place)  # fails for all processes but the first
        finally:
            draft.unlink()
    return Path(place).is_file()


def note_beginning() -> None:
    """Record that from now on a signal stops this process cleanly."""
    _note("begun", "")


def note_ending(code: int) -> None:
    """Record that this process reached its end with this exit code."""
    _note("ended", str(code))


def _note(what: str, text: str) -> None:
    place, rank = os.environ.get(PLACE), os.environ.get("RANK")
    if place and rank:
        Path(f"{place}.{what}.{rank}").write_text(text, encoding="utf-8")


def endings(place: Path) -> dict[int, int | None]:
    """Return the exit code by rank of the processes that had begun; None for one that did not reach its end."""
    found: dict[int, int | None] = {}
    for begun in place.parent.glob(f"{place.name}.begun.*"):
        ended = place.with_name(f"{place.name}.ended{begun.suffix}")
        found[int(begun.suffix[1:])] = int(ended.read_text(encoding="utf-8")) if ended.is_file() else None
    return found


def has_lost(error: BaseException) -> bool:
    """Whether this process failed because another one has gone; then the parent reports the cause, not this process."""
    place, text = os.environ.get(PLACE), str(error)
    return bool(place) and (Path(str(place)).is_file() or ("gloo" in text and "peer" in text))


# ---------------------------------------------------------------- stop and launch


WORK_LEFT = 75  # exit code of a worker that was warned (SIGUSR1) and stopped with work left: start it again
# Exit codes of the launcher after a signal if none of its processes failed: reported by torchrun, or from the signal
# itself before torchrun had installed its handler.
_STOPPED = {code for number in (signal.SIGTERM, signal.SIGINT) for code in (128 + number, -number)}
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def seconds(text: str) -> float:
    """Parse a length of time: "9m" is 540; units are s, m, h, d."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if not match:
        raise SpecError(f"{text!r} is not a length of time; type for example 90s, 9m or 2h")
    return float(match[1]) * _UNITS[match[2]]


def checkpoint_rule(text: str) -> tuple[int, float]:
    """Parse a checkpoint interval to (steps, seconds): "200" is every 200 steps, "10m" every ten minutes."""
    return (int(text.strip()), 0.0) if re.fullmatch(r"[1-9][0-9]*", text.strip()) else (0, seconds(text))


def check_sharding(sharding: Sharding, processes: int, more: str = "--processes 2") -> None:
    """Refuse sharding that this many processes on one machine cannot do.

    `more`: the option that adds processes, for messages.
    """
    if sharding.kind == "none":
        return
    if processes == 1:
        raise SpecError(f"--shard {sharding}: there is one process; type {more}, or leave it out")
    sharding.groups_of(processes, processes)


class Stop:
    """Tells the work to end after the current step: on a signal, on request, or when the time is up.

    A second ^C ends the process at once. SIGUSR1 is a warning that the worker will be ended soon, and may be
    started again.
    """

    def __init__(
        self, limit: float | None, say: Callable[[str], None], requested: Callable[[], bool] = lambda: False
    ) -> None:
        self.until = None if limit is None else time.monotonic() + limit
        self.asked = self.warned = False
        self.say = say
        self.requested = requested
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: object) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.warned |= number == signal.SIGUSR1
        if self.asked:  # already announced
            return
        self.asked = True
        self.say(
            "stopping after this step: training jobs are saved, and fine-tunings that have run for 10 s or more "
            "(again ^C to stop at once)"
        )

    def __call__(self) -> bool:
        if self.asked or (self.until is not None and time.monotonic() >= self.until):
            return True
        if self.requested():
            self.asked = True
            self.say("stopping after this step, as `biphase stop` asked")
        return self.asked


def in_processes(count: int, arguments: list[str], more: dict[str, str]) -> tuple[int, bool]:
    """Run `biphase ARGUMENTS` in `count` processes that train together, by torchrun on this machine.

    `more` is added to their environment. Returns the exit code, and whether a warning (SIGUSR1) came.
    """
    command = [sys.executable, "-m", "biphase.cluster.processes", str(count)]
    threads = max(1, (os.cpu_count() or 1) // count)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        # Seconds between SIGTERM and SIGKILL: a step and a checkpoint of a large model take more than the default 30 s.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
        **more,
    }
    # The child has its own session, so only this process receives the terminal's ^C. It passes on the first signal
    # as SIGTERM, once: torchrun forwards it to its processes, which stop after their step with a checkpoint; a
    # second SIGTERM would interrupt that.
    asked: list[int] = []
    child: subprocess.Popen[bytes] | None = None
    at_once = False

    def hand_on(number: int, frame: object) -> None:
        nonlocal at_once
        asked.append(number)
        if child and len(asked) == 1:
            child.send_signal(signal.SIGTERM)
        elif child and number == signal.SIGINT:
            at_once = True
            for pid in (child.pid, *descendants(child.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, hand_on)
    child = subprocess.Popen([*command, *arguments], env=environment, start_new_session=True)
    if asked:  # a signal came before the child existed
        child.send_signal(signal.SIGTERM)
    code = child.wait()
    if at_once:
        raise KeyboardInterrupt
    if asked and code in _STOPPED:
        code = 0
    elif code < 0:  # killed from outside: its processes notice it, stop after their step and save
        print(
            f"error: the launcher of {count} processes was ended by {signal.Signals(-code).name}, so all end; "
            "what was published is whole: type the same command to go on",
            file=sys.stderr,
            flush=True,
        )
        code = 1
    return code, signal.SIGUSR1 in asked
