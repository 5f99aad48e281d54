"""Starting and stopping work: signals, time limits, and several processes on one machine or several.

    python -m biphase.cluster.launch N ARGUMENTS…      runs `biphase ARGUMENTS` in N processes

`Stop` decides when a worker ends. `in_processes` runs a command in several processes that train together: a child
process (`main`) calls torchrun and prints one error line instead of its traceback. The processes report to that parent
through files, whose path is in the environment: `report_to_parent` leaves one error line, which the parent prints
once; `note` records how far a process is and how it ended, since torchrun reports only that there was a signal. When
one process refuses its input or dies, torchrun ends the others, and the next start resumes from the last checkpoint.
With several machines, each has such a parent, and `cluster/machines.py` connects them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from biphase.cluster.machines import RESUME, SILENT_SECONDS, Machines, Watch, interface_to, meet
from biphase.errors import ClusterError, SpecError, one_line
from biphase.leases import descendants, end_with_parent
from biphase.text import printable
from biphase.training.options import Sharding

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

ERROR_FILE = "BIPHASE_ERROR_FILE"  # environment variable with the path of this launch's error file
WORKER = "BIPHASE_WORKER"  # environment variable shared by the processes of one worker: its name
LOST = 3  # exit code of a process that failed because another one has gone


def report_to_parent(line: str) -> bool:
    """Leave an error line for the parent to print; return False if there is no parent."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return False
    draft = Path(f"{path}.{os.getpid()}")
    with contextlib.suppress(OSError):
        draft.write_text(line, encoding="utf-8")
        try:
            os.link(draft, path)  # fails for all processes but the first
        finally:
            draft.unlink()
    return Path(path).is_file()


def note(event: Literal["joining", "begun", "ended"], text: str = "") -> None:
    """Record how far this process is.

    joining: it connects to the others; begun: from now on a signal stops it cleanly; ended: with which exit code.
    """
    path, rank = os.environ.get(ERROR_FILE), os.environ.get("RANK")
    if path and rank:
        Path(f"{path}.{event}.{rank}").write_text(text, encoding="utf-8")


def states(path: Path, count: int) -> list[str]:
    """Return how far each of `count` local processes is."""
    noted = {event: len(list(path.parent.glob(f"{path.name}.{event}.*"))) for event in ("joining", "begun")}
    begun, joining = noted["begun"], noted["joining"] - noted["begun"]
    return ["begun"] * begun + ["joining"] * joining + ["starting"] * (count - begun - joining)


def endings(path: Path) -> dict[int, int | None]:
    """Return the exit code by rank of the processes that had begun; None for one that did not reach its end."""
    codes: dict[int, int | None] = {}
    for begun in path.parent.glob(f"{path.name}.begun.*"):
        ended = path.with_name(f"{path.name}.ended{begun.suffix}")
        codes[int(begun.suffix[1:])] = int(ended.read_text(encoding="utf-8")) if ended.is_file() else None
    return codes


def has_lost(error: BaseException) -> bool:
    """Whether this process failed because another one has gone; then the parent reports the cause, not this process."""
    path, text = os.environ.get(ERROR_FILE), str(error)
    gone = ("gloo" in text and "peer" in text) or "remote process" in text or "remote server" in text
    return bool(path) and (Path(str(path)).is_file() or gone)


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


def check_sharding(
    sharding: Sharding, processes: int, more: str = "--processes 2", *, machines: int = 1
) -> None:
    """Refuse sharding that `processes` on each of `machines` cannot do.

    `more`: the option that adds processes, for messages.
    """
    if sharding.kind == "none":
        return
    if processes * machines == 1:
        raise SpecError(f"--shard {sharding}: there is one process; type {more}, or leave it out")
    sharding.groups_of(processes * machines, processes)


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
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
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


def in_processes(count: int, arguments: list[str], variables: dict[str, str]) -> tuple[int, bool]:
    """Run `biphase ARGUMENTS` in `count` processes of this machine that train together, by torchrun.

    `variables` are added to their environment. Returns the exit code, and whether a warning (SIGUSR1) came.
    """
    command = [sys.executable, "-m", "biphase.cluster.launch", str(count)]
    threads = max(1, (os.cpu_count() or 1) // count)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        # Seconds between SIGTERM and SIGKILL: a step and a checkpoint of a large model take more than the default 30 s.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
        # Warnings of torch's C++ part, e.g. of each address that has no name, would hide the line that matters.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        **variables,
    }
    # The child has its own session, so only this process receives the terminal's ^C. It passes on the first signal
    # as SIGTERM, once: torchrun forwards it to its processes, which stop after their step with a checkpoint; a
    # second SIGTERM would interrupt that.
    signals: list[int] = []
    child: subprocess.Popen[bytes] | None = None
    at_once = False

    def forward(number: int, frame: object) -> None:
        nonlocal at_once
        signals.append(number)
        if child and len(signals) == 1:
            child.send_signal(signal.SIGTERM)
        elif child and number == signal.SIGINT:
            at_once = True
            for pid in (child.pid, *descendants(child.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, forward)
    child = subprocess.Popen([*command, *arguments], env=environment, start_new_session=True)
    if signals:  # a signal came before the child existed
        child.send_signal(signal.SIGTERM)
    code = child.wait()
    if at_once:
        raise KeyboardInterrupt
    if signals and code in _STOPPED:
        code = 0
    elif code < 0:  # killed from outside: its processes notice it, stop after their step and save
        _print_error(
            f"the launcher of {count} processes was ended by {signal.Signals(-code).name}, so all end; {RESUME}"
        )
        code = 1
    return code, signal.SIGUSR1 in signals


def _print_error(line: str) -> None:
    print(printable(f"error: {line}"), file=sys.stderr, flush=True)


# ---------------------------------------------------------------- the parent of the processes


def main(count: int, arguments: list[str]) -> int:
    """Start the processes by torchrun, wait for them, and return the exit code."""
    end_with_parent()
    logging.disable()  # torchrun's log lines would hide the one line that matters
    # Slurm signals every process of a step; a process that cannot stop cleanly yet must not die of the warning.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    machines = Machines.of_environment()
    with tempfile.TemporaryDirectory(prefix="biphase-") as folder:
        path = Path(folder) / "error"
        os.environ[ERROR_FILE] = str(path)
        if machines.nodes == 1:
            return _torchrun(["--standalone"], count, arguments, path)
        try:
            store, everyone = meet(machines)
        except ClusterError as error:
            _print_error(one_line(error))
            return 2
        os.environ[WORKER] = everyone[0]["worker"]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_to(machines.host, machines.port))
        watch = Watch(machines, store, everyone, lambda: states(path, count), report_to_parent)
        # torchrun would end only this machine's processes; all machines must stop after the same step.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, watch.signal)
        nodes = [f"--nnodes={machines.nodes}", f"--node-rank={machines.node}", "--signals-to-handle=SIGHUP"]
        address = [f"--master-addr={machines.host}", f"--master-port={machines.port}"]
        code = _torchrun([*nodes, *address], count, arguments, path, watch)
        watch.finish()
        return code


def _torchrun(
    options: list[str], count: int, arguments: list[str], path: Path, watch: Watch | None = None
) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun([*options, f"--nproc-per-node={count}", "-m", "--", "biphase", *arguments])
    except (SignalException, ChildFailedError) as ending:
        failures = list(ending.failures.values()) if isinstance(ending, ChildFailedError) else []
        codes = {failure.exitcode for failure in failures}
        if watch and codes == {LOST}:  # the reason is known on another machine
            watch.ended.wait(SILENT_SECONDS + 5)
        if path.is_file():
            line, code = path.read_text(encoding="utf-8"), watch.code if watch else 2
        elif isinstance(ending, SignalException):
            return _stopped(endings(path), ending.sigval)
        else:
            line, code = _died(failures, count), 1
        if line:
            _print_error(line)
        if watch and not watch.ended.is_set():
            watch.announce(line or "a training job failed; see its line there", code)
        return code
    return 0


def _stopped(codes: dict[int, int | None], number: int) -> int:
    """Return the exit code after a signal: 1 if a process died or one of its jobs failed, else 128 + the signal."""
    dead = sum(code is None for code in codes.values())
    if dead:
        _print_error(f"{dead} of {len(codes)} processes died before they had stopped; {RESUME}")
    return 1 if dead or any(codes.values()) else 128 + number


def _died(failures: Iterable[ProcessFailure], count: int) -> str:
    """Name the process that ended the others; "" if it has already reported the error itself (exit code 1)."""

    def order(failure: ProcessFailure) -> tuple[bool, int]:
        # Processes with these codes ended because of another one.
        return failure.exitcode in (LOST, -signal.SIGTERM), failure.timestamp

    first = min(failures, key=order)
    if first.exitcode == 1:
        return ""
    how = f"with exit code {first.exitcode}"
    if first.exitcode < 0:
        how = f"by {signal.Signals(-first.exitcode).name}"
    return f"process {first.local_rank} of {count} was ended {how}, so all were; {RESUME}"


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
