"""End the workers of a study: cleanly, after their step and with a checkpoint, or at once.

Everybody who is there is named in a request that workers read once a second. Those of this machine and Slurm's jobs
are also told by a signal; jobs that wait leave the queue. Then it is waited for until all are gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from biphase.errors import ClusterError
from biphase.files import Store
from biphase.holders import Holder, descendants, has_open
from biphase.study.attendance import HERE, Attendance, Request, control
from biphase.study.slurm import queue as slurm
from biphase.wording import counted, duration

POLL_SECONDS = 0.5
TOLD_EVERY = 5.0  # seconds between two lines of progress
SLURM_EVERY = 2.0  # seconds between two questions to Slurm


@dataclass(frozen=True)
class Ended:
    """How a stop went."""

    asked: int  # workers and jobs that were there
    left: tuple[str, ...]  # who is still there
    silent: int = 0  # workers elsewhere that gave no sign of life and count as gone
    problem: str = ""  # what Slurm could not do


class Stopping:
    def __init__(self, store: Store, study: str, *, now: bool, say: Callable[[str], None]) -> None:
        self.store, self.study, self.now, self.say = store, study, now, say
        self.attendance = Attendance(store, study)
        self.named = Request()
        self.signalled: set[str] = set()
        self.told: dict[str, str] = {}  # by job: the state in which it was asked to end
        self.refused = ""  # what Slurm said when it was asked to end a job
        self.silent: set[str] = set()
        self.beats: dict[str, tuple[int, float]] = {}  # by worker: its last beat, and when it was new to us
        self.queue, self.queue_at, self.queue_told = slurm.Queue(), -SLURM_EVERY, False

    def stop(self, wait: float) -> Ended:
        """Ask all, and wait for `wait` seconds at most."""
        if not self.attendance.folder.is_dir():
            return Ended(0, ())
        with control(self.store, self.study):
            workers = self.attendance.workers()
            made = frozenset(slurm.submissions(self.store, self.study))
            self.named = Request(frozenset(workers), made)
            self._look_at_queue()
            outside = sum(worker.startswith(HERE) for worker in workers)  # of Slurm
            # All jobs of the queue: one that is completing may be on its way back into it.
            asked = outside + max(len(self.queue.jobs), len(workers) - outside)
            if not asked and not self.queue.problem:
                return Ended(0, ())
            self.attendance.ask(self.named | self.attendance.request())
        if asked:
            self.say(
                f"asked {counted(asked, 'worker')} to stop{'' if self.now else ' after the current step'}"
            )
        left = self._wait(wait)
        if not left and not self.silent and not self.queue.problem:
            with control(self.store, self.study):
                self._withdraw()
        problem = self.queue.problem or (self.refused if left else "")
        return Ended(asked, tuple(left), len(self.silent), problem)

    def _withdraw(self) -> None:
        """Take the request back, unless somebody it names is there: an earlier stop may have named more than this one."""
        request = self.attendance.request()
        queue = slurm.queue_of(self.store, self.study, request.submissions)
        there = any(request.names(worker, worker.split(".")[0]) for worker in self.attendance.workers())
        if not there and not queue.jobs and not queue.problem:
            self.attendance.withdraw()

    def _wait(self, wait: float) -> list[str]:
        began = said = time.monotonic()
        while True:
            left = self._press()
            at = time.monotonic()
            if not left or at - began >= wait:
                return left
            if at - said >= TOLD_EVERY:
                said = at
                self.say(
                    f"  {duration(at - began)}: waiting for {'; '.join(left[:4])}{' …' if left[4:] else ''}"
                )
            time.sleep(POLL_SECONDS)

    def _press(self) -> list[str]:
        """Tell everybody who has not been told; gives who is still there."""
        # A job that had begun but not signed in is found by its submission.
        workers = {
            worker: holder
            for worker, holder in self.attendance.workers().items()
            if self.named.names(worker, worker.split(".")[0])
        }
        for worker, holder in workers.items():
            self._signal(worker, holder)
        self._look_at_queue()
        self._tell_jobs()
        gone = {worker for worker, holder in workers.items() if self._is_silent(worker, holder)}
        for worker in gone - self.silent:
            self.attendance.strike(worker)
        self.silent |= gone
        left = [f"{one.host}, process {one.pid}" for worker, one in workers.items() if worker not in gone]
        return left + [f"Slurm job {job.id} ({job.state})" for job in self.queue.jobs]

    def _signal(self, worker: str, holder: Holder) -> None:
        """Directly, where it is a process of this machine that has its file open. One that we may not look at gets none."""
        if worker in self.signalled or not holder.alive or holder.pid == os.getpid():
            return
        if not has_open(holder.pid, self.attendance.file(worker)):
            return
        self.signalled.add(worker)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it ended, or is another user's
            if self.now:
                for pid in (holder.pid, *descendants(holder.pid)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            else:
                os.kill(holder.pid, signal.SIGTERM)

    def _look_at_queue(self) -> None:
        at = time.monotonic()
        if at - self.queue_at >= SLURM_EVERY:
            # Of those that are named: what is submitted while we wait is not for us.
            self.queue = slurm.queue_of(self.store, self.study, self.named.submissions)
            self.queue_at, self.queue_told = at, False

    def _tell_jobs(self) -> None:
        """Ask jobs to end whose state is new; once for each look at the queue."""
        if self.queue_told:
            return
        self.queue_told = True
        jobs = tuple(job for job in self.queue.active if self.told.get(job.id) != job.state)
        try:
            if self.now:
                slurm.cancel(jobs)
            else:
                slurm.ask_to_end(jobs)
            self.told |= {job.id: job.state for job in jobs}
        except ClusterError as wrong:  # a job that ended in this moment, or one that is another user's
            self.refused = str(wrong)

    def _is_silent(self, worker: str, holder: Holder) -> bool:
        """Has a worker of another machine shown no sign of life for as long as its leases would live?"""
        at = time.monotonic()
        beats, since = self.beats.get(worker, (-1, at))
        if holder.beats != beats:
            self.beats[worker] = holder.beats, at
            return False
        return holder.alive is None and at - since >= self.attendance.leases.stale_seconds
