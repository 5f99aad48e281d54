"""What processes that train together leave for their parent, in files.

One line for all: who refuses first writes it, the parent prints it. And how each of them ended: after a signal,
torchrun tells only that there was one.
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

PLACE = "BIPHASE_REFUSAL"  # the file of this launch
LOST = 3  # exit code of a process whose neighbour has gone


def report_to_parent(line: str) -> bool:
    """Leave a line for the parent to print. False: there is none."""
    place = os.environ.get(PLACE)
    if not place:
        return False
    draft = Path(f"{place}.{os.getpid()}")
    with contextlib.suppress(OSError):
        draft.write_text(line, encoding="utf-8")
        try:
            os.link(draft, place)  # fails for all but the first
        finally:
            draft.unlink()
    return Path(place).is_file()


def note_beginning() -> None:
    """From now on a signal stops this process cleanly."""
    _note("begun", "")


def note_ending(code: int) -> None:
    """This process has come to its end, with this exit code."""
    _note("ended", str(code))


def _note(what: str, text: str) -> None:
    place, rank = os.environ.get(PLACE), os.environ.get("RANK")
    if place and rank:
        Path(f"{place}.{what}.{rank}").write_text(text, encoding="utf-8")


def endings(place: Path) -> dict[int, int | None]:
    """By rank of those that had begun: the exit code; None of one that did not come to its end."""
    found: dict[int, int | None] = {}
    for begun in place.parent.glob(f"{place.name}.begun.*"):
        ended = place.with_name(f"{place.name}.ended{begun.suffix}")
        found[int(begun.suffix[1:])] = int(ended.read_text(encoding="utf-8")) if ended.is_file() else None
    return found


def has_lost(error: BaseException) -> bool:
    """Did this process fail because another one has gone? Then it need not say so: the parent says what happened."""
    place, text = os.environ.get(PLACE), str(error)
    return bool(place) and (Path(str(place)).is_file() or ("gloo" in text and "peer" in text))


# ---------------------------------------------------------------- launch
# Ways to start work: here, in several processes, until a time is up, until somebody says stop.


WORK_LEFT = (
    75  # exit code of a worker that was warned (SIGUSR1) and stopped before all was done: start it again
)
# How `biphase.cluster.processes` ends after a signal if none of its processes failed: told so by torchrun, or, before
# that listened, ended by the signal itself.
_STOPPED = {code for number in (signal.SIGTERM, signal.SIGINT) for code in (128 + number, -number)}
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


def check_sharding(sharding: Sharding, processes: int, more: str = "--processes 2") -> None:
    """Refuse what this many processes on one machine cannot do. `more`: what to type to have more of them."""
    if sharding.kind == "none":
        return
    if processes == 1:
        raise SpecError(f"--shard {sharding}: there is one process; type {more}, or leave it out")
    sharding.groups_of(processes, processes)


class Stop:
    """Asks the work to end after the current step: on a signal, on request, or when the time is up.

    Again ^C ends at once. SIGUSR1 is a warning: whoever started the worker will end it soon, and may start it again.
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
        if self.asked:  # said before
            return
        self.asked = True
        self.say(
            "stopping after this step: pieces are saved, and fine-tunings that have run for 10 s or more "
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

    `more` is added to their environment. Gives the exit code, and whether a warning (SIGUSR1) came.
    """
    command = [sys.executable, "-m", "biphase.cluster.processes", str(count)]
    threads = max(1, (os.cpu_count() or 1) // count)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        # The time between a signal and SIGKILL: a step and a checkpoint of a large model take more than the usual 30 s.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
        **more,
    }
    # This process alone hears a terminal's ^C. The first signal is handed on as SIGTERM, once: torchrun tells its
    # processes, which stop after their step with a checkpoint, and a second one would cut that short.
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
    if asked:  # before there was anybody to hand it to
        child.send_signal(signal.SIGTERM)
    code = child.wait()
    if at_once:
        raise KeyboardInterrupt
    if asked and code in _STOPPED:
        code = 0
    elif code < 0:  # killed from outside: its processes hear of it, stop after their step and save
        print(
            f"error: the launcher of {count} processes was ended by {signal.Signals(-code).name}, so all end; "
            "what was published is whole: type the same command to go on",
            file=sys.stderr,
            flush=True,
        )
        code = 1
    return code, signal.SIGUSR1 in asked
