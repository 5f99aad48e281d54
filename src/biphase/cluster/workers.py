"""The workers of a study, and how they are asked to stop, through files in a shared folder only.

    studies/<name>/workers/<worker>.lease   one for each worker, with its heartbeat
    studies/<name>/stop.json                the workers and Slurm submissions that shall stop

`WorkerRegistry` lists the workers, `WorkerHeartbeat` registers this one, and `WorkerStopper` ends them. A stop request
names the workers it is for. Names are never reused, so a worker that starts later ignores old requests, and these are
not cleared: a worker that was suspended, or a job that Slurm requeues, still finds its name.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from biphase.cluster import slurm
from biphase.cluster.launch import WORKER
from biphase.cluster.slurm import SUBMISSION
from biphase.errors import ClusterError, StoreError
from biphase.leases import SUFFIX, Holder, Lease, Leases
from biphase.store import Store, read_json, write_json
from biphase.text import counted, duration

CHECK_SECONDS = 1.0
HERE = "here"  # prefix of the names of workers that Slurm did not start


@dataclass(frozen=True)
class StopRequest:
    """The workers and submissions that were asked to stop."""

    workers: frozenset[str] = frozenset()
    submissions: frozenset[str] = frozenset()

    def names(self, worker: str, submission: str) -> bool:
        return worker in self.workers or (submission != "" and submission in self.submissions)

    def __or__(self, other: StopRequest) -> StopRequest:
        return StopRequest(self.workers | other.workers, self.submissions | other.submissions)


class WorkerRegistry:
    """The registered workers of one study, and the stop request for them."""

    def __init__(self, store: Store, study: str) -> None:
        self.folder = store.studies / study
        self._request = self.folder / "stop.json"
        self.leases = Leases(self.folder / "workers")

    def workers(self) -> dict[str, Holder]:
        """Return the registered workers, after removing those that are dead."""
        living = self.living()
        for worker in self.leases.holders().keys() - living.keys():
            self.remove(worker)
        return living

    def living(self) -> dict[str, Holder]:
        """Return the registered workers without those that are dead; writes nothing."""
        return {
            worker: holder for worker, holder in self.leases.holders().items() if holder.alive is not False
        }

    def file(self, worker: str) -> Path:
        return self.leases.folder / f"{worker}{SUFFIX}"

    def remove(self, worker: str) -> None:
        """Remove a worker that ended without unregistering; its name is never used again."""
        self.file(worker).unlink(missing_ok=True)

    def request(self) -> StopRequest:
        try:
            request = read_json(self._request)
            return StopRequest(frozenset(request["workers"]), frozenset(request["submissions"]))
        except (StoreError, KeyError, TypeError):
            return StopRequest()

    def ask(self, request: StopRequest) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {"workers": sorted(request.workers), "submissions": sorted(request.submissions)}
        write_json(self._request, content | {"at": time.strftime("%FT%TZ", time.gmtime())})


class WorkerHeartbeat:
    """Registers this worker with its study until it leaves, and checks once a second whether it shall stop.

    If several processes form one worker, the process that starts the others registers, and they use its name; on
    several machines, the one of node 0.
    """

    def __init__(self, store: Store, study: str, *, node: int = 0) -> None:
        self._registry = WorkerRegistry(store, study)
        self.submission = os.environ.get(SUBMISSION, "")
        self._checked_at = -CHECK_SECONDS
        self._asked = False
        self._lease: Lease | None = None
        rank = os.environ.get("RANK", "")
        self.worker = os.environ.get(WORKER, "") if rank else ""
        if not self.worker and rank in ("", "0") and node == 0:
            self.worker = f"{self.submission or HERE}.{uuid.uuid4().hex[:12]}"
            self._registry.workers()
            self._lease = self._registry.leases.take(self.worker)

    def asked(self, *, now: bool = False) -> bool:
        """Whether this worker was asked to stop; the file is read at most once a second, unless `now`."""
        clock = time.monotonic()
        if not self._asked and (now or clock - self._checked_at >= CHECK_SECONDS):
            self._checked_at = clock
            with contextlib.suppress(OSError):  # a file system error: try again at the next check
                self._asked = self._registry.request().names(self.worker, self.submission)
        return self._asked

    def leave(self) -> None:
        if self._lease:
            self._lease.release()


def control(store: Store, study: str, seconds: float = 20.0) -> Lease:
    """Take the lease that lets one process at a time submit or stop workers of a study."""
    leases = Leases(store.studies / study / "control")
    until = time.monotonic() + seconds
    while (lease := leases.take("control")) is None:
        if time.monotonic() > until:
            holder = leases.holders().get("control")
            who = f"process {holder.pid} on {holder.host}" if holder else "another process"
            raise StoreError(f"{who} is submitting or stopping workers of {study}; try again when it is done")
        time.sleep(0.1)
    return lease


# ---------------------------------------------------------------- stop
# `stop` names all present workers in the stop request, which they read once a second, and takes pending jobs out of
# Slurm's queue. Workers end after their step and with a checkpoint; `stop` waits until their heartbeats and jobs are
# gone. It signals no process: what a file in the store says of a process id need not be true.


POLL_SECONDS = 0.5  # between two looks at the workers
PROGRESS_EVERY = 5.0  # seconds between two progress lines
SLURM_SECONDS = 2.0  # the same if Slurm is queried too


@dataclass(frozen=True)
class Ended:
    """The result of a stop."""

    asked: int  # workers and jobs that were present
    left: tuple[str, ...]  # those still present
    silent: int = 0  # workers on other machines without heartbeat, which count as gone
    problem: str = ""  # what Slurm could not do


class WorkerStopper:
    def __init__(self, store: Store, study: str, *, say: Callable[[str], None]) -> None:
        self.store, self.study, self.say = store, study, say
        self.registry = WorkerRegistry(store, study)
        self.named = StopRequest()
        self.silent: set[str] = set()
        self.beats: dict[str, tuple[int, float]] = {}  # worker → its last heartbeat, and when we first saw it
        self.problem = ""  # what Slurm could not do

    def stop(self, wait: float) -> Ended:
        """Ask all workers to stop, and wait for at most `wait` seconds."""
        if not self.registry.folder.is_dir():
            return Ended(0, ())
        with control(self.store, self.study):
            workers = self.registry.workers()
            submissions = frozenset(slurm.submissions(self.store, self.study))
            self.named = StopRequest(frozenset(workers), submissions)
            queue = slurm.queue_of(self.store, self.study, submissions)
            outside = sum(worker.startswith(HERE) for worker in workers)  # workers not started by Slurm
            # All jobs of the queue, since a completing one may be requeued.
            asked = outside + max(len(queue.jobs), len(workers) - outside)
            if not asked and not queue.problem:
                return Ended(0, ())
            self.registry.ask(self.named | self.registry.request())
        if asked:
            self.say(f"asked {counted(asked, 'worker')} to stop after the current step")
        left = self._wait(wait)
        return Ended(asked, tuple(left), len(self.silent), self.problem)

    def _wait(self, wait: float) -> list[str]:
        began = shown = time.monotonic()
        while True:
            left = self._left()
            now = time.monotonic()
            if not left or now - began >= wait:
                return left
            if now - shown >= PROGRESS_EVERY:
                shown = now
                names = "; ".join(left[:4]) + (" …" if left[4:] else "")
                self.say(f"  {duration(now - began)}: waiting for {names}")
            time.sleep(SLURM_SECONDS if self.named.submissions else POLL_SECONDS)

    def _left(self) -> list[str]:
        """Return the named workers and jobs that are still present, after taking pending jobs out of the queue."""
        # A job that had started but not registered is found by its submission.
        workers = {
            worker: holder
            for worker, holder in self.registry.workers().items()
            if self.named.names(worker, worker.split(".")[0])
        }
        # Only the named submissions: what is submitted while we wait is not included.
        queue = slurm.queue_of(self.store, self.study, self.named.submissions)
        self.problem = queue.problem
        try:
            slurm.cancel_pending(queue.jobs)
        except ClusterError as error:  # a job that ended just now, or belongs to another user
            self.problem = str(error)
        gone = {worker for worker, holder in workers.items() if self._is_silent(worker, holder)}
        for worker in gone - self.silent:
            self.registry.remove(worker)
        self.silent |= gone
        left = [
            f"{holder.host}, process {holder.pid}" for worker, holder in workers.items() if worker not in gone
        ]
        return left + [f"Slurm job {job.id} ({job.state})" for job in queue.jobs]

    def _is_silent(self, worker: str, holder: Holder) -> bool:
        """Whether a worker on another machine has had no heartbeat for as long as it takes its leases to expire."""
        at = time.monotonic()
        beats, since = self.beats.get(worker, (-1, at))
        if holder.beats != beats:
            self.beats[worker] = holder.beats, at
            return False
        return holder.alive is None and at - since >= self.registry.leases.stale_seconds
