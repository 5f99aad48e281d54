"""Slurm's own commands, and what its queue says of a study. Nothing here fails where there is no Slurm.

A submission is a script in studies/<name>/slurm/, written before it is handed over. Its file name is in the name of
its jobs, so the queue can be asked for them whatever happened to whoever submitted.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from biphase.errors import ClusterError
from biphase.files import Store
from biphase.study.slurm.profile import Profile
from biphase.study.slurm.script import job_name, job_script
from biphase.wording import counted

PATIENCE = 30  # seconds for one of Slurm's commands
SHOWN = 12  # jobs that `status` lists one by one
COLUMNS = ("JobArrayID", "State", "Reason", "NodeList", "RestartCnt", "TimeUsed", "TimeLeft")


class Unanswered(ClusterError):
    """A command was given up: what it was to do may have been done."""


@dataclass(frozen=True)
class Job:
    """One job of a study, as Slurm sees it."""

    id: str  # 12_3: task 3 of array 12
    state: str  # pending, running, completing, …
    reason: str  # why it waits
    nodes: str
    restarts: int
    used: str
    left: str

    @property
    def active(self) -> bool:
        """Does it work, or will it?"""
        return self.state not in ("completing", "cancelled", "completed", "failed", "timeout")


@dataclass(frozen=True)
class Queue:
    """The jobs of a study in Slurm's queue; `problem` if they could not be asked for."""

    jobs: tuple[Job, ...] = ()
    problem: str = ""
    submitted: bool = False  # were there submissions at all?

    @property
    def active(self) -> tuple[Job, ...]:
        return tuple(job for job in self.jobs if job.active)


def folder(store: Store, study: str) -> Path:
    """Where scripts and logs of a study's jobs lie."""
    return store.studies / study / "slurm"


def submissions(store: Store, study: str) -> list[str]:
    return sorted(path.stem for path in folder(store, study).glob("*.sh"))


def queue_of(store: Store, study: str, only: Collection[str] | None = None) -> Queue:
    """What Slurm says of the submissions of a study; of all, or of those that are named."""
    made = [one for one in submissions(store, study) if only is None or one in only]
    if not made:
        return Queue()
    names = ",".join(job_name(study, one) for one in made)
    try:
        text = _typed(
            "squeue", "--noheader", "--array", f"--name={names}",
            f"--Format={','.join(f'{column}:|' for column in COLUMNS)}",
        )  # fmt: skip
    except ClusterError as wrong:
        return Queue(problem=str(wrong), submitted=True)
    rows = [line.split("|") for line in text.splitlines() if line.count("|") >= len(COLUMNS)]
    return Queue(tuple(_job(row) for row in rows), submitted=True)


def _job(row: list[str]) -> Job:
    id, state, reason, nodes, restarts, used, left = (cell.strip() for cell in row[: len(COLUMNS)])
    return Job(
        id,
        state.lower(),
        "" if reason == "None" else reason,
        nodes,
        int(restarts) if restarts.isdigit() else 0,
        used,
        left,
    )


def submit(
    profile: Profile, store: Store, study: str, *, jobs: int, arguments: list[str]
) -> tuple[str, Path]:
    """Hand an array of workers to Slurm; gives its job id and its script."""
    if shutil.which("sbatch") is None:
        raise ClusterError(_absent("sbatch"))
    submission = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    place = folder(store, study).resolve()
    place.mkdir(parents=True, exist_ok=True)
    script = place / f"{submission}.sh"
    script.write_text(
        job_script(profile, study=study, submission=submission, jobs=jobs, arguments=arguments),
        encoding="utf-8",
    )
    log = str(place / submission).replace("%", "%%") + "-%a.log"
    try:
        text = _typed("sbatch", "--parsable", f"--chdir={Path.cwd()}", f"--output={log}", str(script))
    except Unanswered:
        raise  # perhaps it was submitted: then the script stands for it
    except ClusterError:
        script.unlink()
        raise
    return text.strip().splitlines()[-1].split(";")[0], script


def cancel(jobs: tuple[Job, ...]) -> None:
    """Take jobs out of the queue; those that run are killed."""
    if jobs:
        _typed("scancel", "--quiet", *(job.id for job in jobs))


def ask_to_end(jobs: tuple[Job, ...]) -> None:
    """Jobs that wait leave the queue; those that run are told to stop after their step."""
    waiting = [job.id for job in jobs if job.state != "running"]
    running = [job.id for job in jobs if job.state == "running"]
    if waiting:
        # One that starts in this moment is left to its request.
        _typed("scancel", "--quiet", "--state=PENDING", *waiting)
    if running:
        _typed("scancel", "--quiet", "--batch", "--signal=TERM", "--state=RUNNING", *running)


def lines(queue: Queue, logs: Path) -> list[str]:
    """What `status` adds."""
    if not queue.submitted:
        return []
    if queue.problem:
        return [f"  Slurm: {queue.problem}"]
    if not queue.jobs:
        return [f"  Slurm: no job of this study is queued or runs; logs in {logs}"]
    counts = Counter(job.state for job in queue.jobs)
    told = [
        f"  Slurm: {', '.join(f'{number} {state}' for state, number in sorted(counts.items()))}; logs in {logs}"
    ]
    told += [f"    {_line(job)}" for job in queue.jobs[:SHOWN]]
    if len(queue.jobs) > SHOWN:
        told.append(f"    and {counted(len(queue.jobs) - SHOWN, 'more job')}; type squeue --me")
    return told


def _line(job: Job) -> str:
    facts = [f"job {job.id}", job.state]
    if job.reason:
        facts.append(f"({job.reason})")
    if job.state == "running":
        facts.append(f"on {job.nodes} for {job.used}, {job.left} left")
    if job.restarts:
        facts.append(f"requeued {counted(job.restarts, 'time')}")
    return "  ".join(facts)


def as_json(queue: Queue) -> dict[str, Any]:
    return {"jobs": [asdict(job) for job in queue.jobs], "problem": queue.problem or None}


def _typed(command: str, *arguments: str) -> str:
    """One of Slurm's commands; what it prints."""
    try:
        done = subprocess.run(
            [command, *arguments], capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except FileNotFoundError:
        raise ClusterError(_absent(command)) from None
    except subprocess.TimeoutExpired:
        raise Unanswered(f"{command} did not answer within {PATIENCE} s; try again, or ask: sinfo") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"it ended with {done.returncode}"
        raise ClusterError(f"{command} failed: {said}; ask: sinfo")
    return done.stdout


def _absent(command: str) -> str:
    return f"{command} is not on this machine; type the command where Slurm's are, usually a login node"
