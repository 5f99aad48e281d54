"""Who works on a study, and how they are asked to stop. A shared folder is all they share.

    studies/<name>/workers/<worker>.lease   one for each worker, with its heartbeat
    studies/<name>/stop.json                which workers and which Slurm submissions shall stop

A request names those it is for. Names are never used twice, so a worker that starts later obeys no old request, and
none has to be cleared in time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from biphase.cluster import slurm
from biphase.cluster.slurm import SUBMISSION
from biphase.errors import ClusterError, StoreError
from biphase.leases import SUFFIX, Holder, Lease, Leases, descendants, has_open
from biphase.store import Store, read_json, write_json
from biphase.text import counted, duration

LOOK_SECONDS = 1.0
HERE = "here"  # begins the names of workers that Slurm did not start
WORKER = "BIPHASE_WORKER"  # in the environment of processes that are one worker together


@dataclass(frozen=True)
class StopRequest:
    """Who was asked to stop."""

    workers: frozenset[str] = frozenset()
    submissions: frozenset[str] = frozenset()

    def names(self, worker: str, submission: str) -> bool:
        return worker in self.workers or (submission != "" and submission in self.submissions)

    def __or__(self, other: StopRequest) -> StopRequest:
        return StopRequest(self.workers | other.workers, self.submissions | other.submissions)


class WorkerRegistry:
    """The workers of one study, seen from outside."""

    def __init__(self, store: Store, study: str) -> None:
        self.folder = store.studies / study
        self._request = self.folder / "stop.json"
        self.leases = Leases(self.folder / "workers")

    def workers(self) -> dict[str, Holder]:
        """Everybody who signed in and not out; those known to be dead, or to be no workers, are struck off."""
        found = self.leases.holders()
        gone = {worker for worker, holder in found.items() if not self._may_live(worker, holder)}
        for worker in gone:
            self.strike(worker)
        return {worker: holder for worker, holder in found.items() if worker not in gone}

    def _may_live(self, worker: str, holder: Holder) -> bool:
        """Not so if its process is gone, or never opened this file: then it is somebody else's, and not to be ended."""
        alive = holder.alive
        return alive is None or (alive and has_open(holder.pid, self.file(worker)) is not False)

    def file(self, worker: str) -> Path:
        return self.leases.folder / f"{worker}{SUFFIX}"

    def strike(self, worker: str) -> None:
        """Forget a worker that ended without signing out. Its name comes never again."""
        self.file(worker).unlink(missing_ok=True)

    def request(self) -> StopRequest:
        """Who is asked to stop now."""
        try:
            found = read_json(self._request)
            return StopRequest(frozenset(found["workers"]), frozenset(found["submissions"]))
        except (StoreError, KeyError, TypeError):
            return StopRequest()

    def ask(self, request: StopRequest) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {"workers": sorted(request.workers), "submissions": sorted(request.submissions)}
        write_json(self._request, content | {"at": time.strftime("%FT%TZ", time.gmtime())})

    def withdraw(self) -> None:
        self._request.unlink(missing_ok=True)


class WorkerHeartbeat:
    """This worker: signed in with its study until it leaves, and asking once a second whether it shall stop.

    Of several processes that are one worker, the one that starts the others signs in and they go by its name.
    """

    def __init__(self, store: Store, study: str) -> None:
        self._registry = WorkerRegistry(store, study)
        self.submission = os.environ.get(SUBMISSION, "")
        self._looked = -LOOK_SECONDS
        self._asked = False
        self._lease: Lease | None = None
        rank = os.environ.get("RANK", "")
        self.worker = os.environ.get(WORKER, "") if rank else ""
        if not self.worker and rank in ("", "0"):
            self.worker = f"{self.submission or HERE}.{uuid.uuid4().hex[:12]}"
            self._registry.workers()
            self._lease = self._registry.leases.take(self.worker)

    def asked(self, *, now: bool = False) -> bool:
        """Was this worker asked to stop? Looks at most once a second, unless `now`."""
        at = time.monotonic()
        if not self._asked and (now or at - self._looked >= LOOK_SECONDS):
            self._looked = at
            with contextlib.suppress(OSError):  # a file system that hiccups: the next look will tell
                self._asked = self._registry.request().names(self.worker, self.submission)
        return self._asked

    def leave(self) -> None:
        """Sign out."""
        if self._lease:
            self._lease.release()


def control(store: Store, study: str, seconds: float = 20.0) -> Lease:
    """The right to submit or stop workers of a study: one at a time."""
    leases = Leases(store.studies / study / "control")
    until = time.monotonic() + seconds
    while (lease := leases.take("control")) is None:
        if time.monotonic() > until:
            holder = leases.holders().get("control")
            who = f"process {holder.pid} on {holder.host}" if holder else "somebody"
            raise StoreError(f"{who} is submitting or stopping workers of {study}; try again when it is done")
        time.sleep(0.1)
    return lease


# ---------------------------------------------------------------- stopping
# End the workers of a study: cleanly, after their step and with a checkpoint, or at once.
#
# Everybody who is there is named in a request that workers read once a second. Those of this machine and Slurm's jobs
# are also told by a signal; jobs that wait leave the queue. Then it is waited for until all are gone.


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


class WorkerStopper:
    def __init__(self, store: Store, study: str, *, now: bool, say: Callable[[str], None]) -> None:
        self.store, self.study, self.now, self.say = store, study, now, say
        self.registry = WorkerRegistry(store, study)
        self.named = StopRequest()
        self.signalled: set[str] = set()
        self.told: dict[str, str] = {}  # by job: the state in which it was asked to end
        self.refused = ""  # what Slurm said when it was asked to end a job
        self.silent: set[str] = set()
        self.beats: dict[str, tuple[int, float]] = {}  # by worker: its last beat, and when it was new to us
        self.queue, self.queue_at, self.queue_told = slurm.Queue(), -SLURM_EVERY, False

    def stop(self, wait: float) -> Ended:
        """Ask all, and wait for `wait` seconds at most."""
        if not self.registry.folder.is_dir():
            return Ended(0, ())
        with control(self.store, self.study):
            workers = self.registry.workers()
            made = frozenset(slurm.submissions(self.store, self.study))
            self.named = StopRequest(frozenset(workers), made)
            self._look_at_queue()
            outside = sum(worker.startswith(HERE) for worker in workers)  # of Slurm
            # All jobs of the queue: one that is completing may be on its way back into it.
            asked = outside + max(len(self.queue.jobs), len(workers) - outside)
            if not asked and not self.queue.problem:
                return Ended(0, ())
            self.registry.ask(self.named | self.registry.request())
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
        request = self.registry.request()
        queue = slurm.queue_of(self.store, self.study, request.submissions)
        there = any(request.names(worker, worker.split(".")[0]) for worker in self.registry.workers())
        if not there and not queue.jobs and not queue.problem:
            self.registry.withdraw()

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
            for worker, holder in self.registry.workers().items()
            if self.named.names(worker, worker.split(".")[0])
        }
        for worker, holder in workers.items():
            self._signal(worker, holder)
        self._look_at_queue()
        self._tell_jobs()
        gone = {worker for worker, holder in workers.items() if self._is_silent(worker, holder)}
        for worker in gone - self.silent:
            self.registry.strike(worker)
        self.silent |= gone
        left = [f"{one.host}, process {one.pid}" for worker, one in workers.items() if worker not in gone]
        return left + [f"Slurm job {job.id} ({job.state})" for job in self.queue.jobs]

    def _signal(self, worker: str, holder: Holder) -> None:
        """Directly, where it is a process of this machine that has its file open. One that we may not look at gets none."""
        if worker in self.signalled or not holder.alive or holder.pid == os.getpid():
            return
        if not has_open(holder.pid, self.registry.file(worker)):
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
        return holder.alive is None and at - since >= self.registry.leases.stale_seconds
