"""The parent of several processes that train together: torchrun, with one error line instead of its traceback.

    python -m biphase.cluster.processes N ARGUMENTS…      runs `biphase ARGUMENTS` in N processes

A process that refuses its input leaves a line in a file (`cluster.launch.report_to_parent`), which is printed once.
A process that died is named. In both cases torchrun has ended the others by then, and the next start resumes from
the last checkpoint.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main as torchrun

from biphase.cluster.launch import LOST, PLACE, endings
from biphase.leases import end_with_parent
from biphase.text import printable


def run(count: int, arguments: list[str]) -> int:
    """Start the processes, wait for them, and return the exit code."""
    end_with_parent()
    logging.disable()  # torchrun's log lines would hide the one line that matters
    with tempfile.TemporaryDirectory(prefix="biphase-") as folder:
        place = Path(folder) / "refusal"
        os.environ[PLACE] = str(place)
        try:
            torchrun(["--standalone", f"--nproc-per-node={count}", "-m", "biphase", *arguments])
        except SignalException as told:
            if place.is_file():
                return _refused(place)
            return _stopped(endings(place), told.sigval)
        except ChildFailedError as error:
            if place.is_file():
                return _refused(place)
            return _died(error, count)
    return 0


def _refused(place: Path) -> int:
    print(printable(f"error: {place.read_text(encoding='utf-8')}"), file=sys.stderr, flush=True)
    return 2


def _stopped(codes: dict[int, int | None], number: int) -> int:
    """Return the exit code after a signal: 1 if a process died or one of its jobs failed, else 128 + the signal."""
    dead = sum(code is None for code in codes.values())
    if dead:
        print(
            f"error: {dead} of {len(codes)} processes died before they had stopped; "
            "what was published is whole: type the same command to go on",
            file=sys.stderr,
            flush=True,
        )
    return 1 if dead or any(codes.values()) else 128 + number


def _died(error: ChildFailedError, count: int) -> int:
    """Name the process that ended the others. With exit code 1 the worker has already reported the error itself."""
    # Processes with these codes ended because of another one.
    causes = [one for one in error.failures.values() if one.exitcode not in (LOST, -signal.SIGTERM)]
    first: ProcessFailure = min(causes, key=lambda one: one.timestamp, default=error.get_first_failure()[1])
    if first.exitcode == 1:
        return 1
    how = f"with exit code {first.exitcode}"
    if first.exitcode < 0:
        how = f"by {signal.Signals(-first.exitcode).name}"
    print(
        f"error: process {first.local_rank} of {count} was ended {how}, so all were; "
        "what was published is whole: type the same command to go on",
        file=sys.stderr,
        flush=True,
    )
    return 1


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
