"""Who works on a study, and how they are asked to stop. A shared folder is all they share.

    studies/<name>/workers/<worker>.lease   one for each worker, with its heartbeat
    studies/<name>/stop.json                which workers and which Slurm submissions shall stop

A request names those it is for. Names are never used twice, so a worker that starts later obeys no old request, and
none has to be cleared in time.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from biphase.errors import StoreError
from biphase.files import Store, read_json, write_json
from biphase.holders import Holder, has_open
from biphase.leases import SUFFIX, Lease, Leases
from biphase.study.slurm.script import SUBMISSION

LOOK_SECONDS = 1.0
HERE = "here"  # begins the names of workers that Slurm did not start
WORKER = "BIPHASE_WORKER"  # in the environment of processes that are one worker together


@dataclass(frozen=True)
class Request:
    """Who was asked to stop."""

    workers: frozenset[str] = frozenset()
    submissions: frozenset[str] = frozenset()

    def names(self, worker: str, submission: str) -> bool:
        return worker in self.workers or (submission != "" and submission in self.submissions)

    def __or__(self, other: Request) -> Request:
        return Request(self.workers | other.workers, self.submissions | other.submissions)


class Attendance:
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

    def request(self) -> Request:
        """Who is asked to stop now."""
        try:
            found = read_json(self._request)
            return Request(frozenset(found["workers"]), frozenset(found["submissions"]))
        except (StoreError, KeyError, TypeError):
            return Request()

    def ask(self, request: Request) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {"workers": sorted(request.workers), "submissions": sorted(request.submissions)}
        write_json(self._request, content | {"at": time.strftime("%FT%TZ", time.gmtime())})

    def withdraw(self) -> None:
        self._request.unlink(missing_ok=True)


class Presence:
    """This worker: signed in with its study until it leaves, and asking once a second whether it shall stop.

    Of several processes that are one worker, the one that starts the others signs in and they go by its name.
    """

    def __init__(self, store: Store, study: str) -> None:
        self._attendance = Attendance(store, study)
        self.submission = os.environ.get(SUBMISSION, "")
        self._looked = -LOOK_SECONDS
        self._asked = False
        self._lease: Lease | None = None
        rank = os.environ.get("RANK", "")
        self.worker = os.environ.get(WORKER, "") if rank else ""
        if not self.worker and rank in ("", "0"):
            self.worker = f"{self.submission or HERE}.{uuid.uuid4().hex[:12]}"
            self._attendance.workers()
            self._lease = self._attendance.leases.take(self.worker)

    def asked(self, *, now: bool = False) -> bool:
        """Was this worker asked to stop? Looks at most once a second, unless `now`."""
        at = time.monotonic()
        if not self._asked and (now or at - self._looked >= LOOK_SECONDS):
            self._looked = at
            with contextlib.suppress(OSError):  # a file system that hiccups: the next look will tell
                self._asked = self._attendance.request().names(self.worker, self.submission)
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
