"""Workers on a Slurm cluster: the profile of a job, its script, and the queue.

`read_profile` reads a TOML file that says what each job requests; it never changes what is computed. `job_script`
writes the script of an array of workers, `submit` hands it to Slurm, `queue_of` returns the jobs of a study. A
profile:

    jobs = 4
    processes = 1
    setup = ["module load cuda"]

    [sbatch]
    partition = "gpu"
    time = "8:00:00"
    gres = "gpu:1"
    cpus-per-task = 8

Every field has a default; an unknown field is refused with the nearest name. The table [sbatch] has sbatch's own option
names. They are written before the options that biphase sets, and of two equal options the last takes effect.

With `nodes` = 4 a job has four machines: `srun` starts one launcher on each, and they train together.

Each job of the array is a worker that takes jobs from the store until none is left. Slurm sends a warning (SIGUSR1)
to the script's shell before the time is up, and the shell passes it to the worker. The worker stops after its step
with a checkpoint and reports by its exit code that work is left; then the script requeues itself.

A submission is a script in studies/<name>/slurm/, written before it is submitted. Its file name is part of the name
of its jobs, so they can be found in the queue even if the submitting process died. Queries return a problem instead
of failing where there is no Slurm.
"""

from __future__ import annotations

import re
import secrets
import shlex
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from biphase.cluster.launch import WORK_LEFT, seconds
from biphase.errors import ClusterError, SpecError, one_line
from biphase.records import record
from biphase.store import Store

# Options of sbatch that the profile says in a field of its own.
OWN_OPTIONS = {
    "array": "jobs", "signal": "warning", "nodes": "nodes", "ntasks": "processes", "ntasks-per-node": "processes",
}  # fmt: skip
IMPOSSIBLE = ("wrap", "wait", "parsable", "test-only")
# Fields of profiles before there was the table [sbatch].
FORMER_FIELDS = ("partition", "account", "qos", "constraint", "time", "gpus", "gpu_type", "cpus", "memory")
EXAMPLE = 'partition = "gpu", time = "8:00:00", gres = "gpu:1", cpus-per-task = 8, mem = "64G"'


@record
class Profile:
    """The resources that each job of an array requests, and what it runs before the worker."""

    jobs: int = 1  # size of the array: number of workers
    nodes: int = 1  # machines of each job, which train together
    processes: int = 0  # on each machine, which train together; 0: one per GPU of `gres` or `gpus-per-node`
    warning: str = "5m"  # time before the end at which the job is warned: enough for a step and a checkpoint
    setup: tuple[str, ...] = ()  # shell lines before the worker starts
    command: str = ""  # the `biphase` command in the job; empty: that of this Python
    sbatch: tuple[tuple[str, bool | int | str], ...] = ()  # further options by sbatch's names

    @property
    def together(self) -> int:
        """Number of processes of one worker on each of its machines."""
        options = dict(self.sbatch)
        gpus = re.search(r"(?:^|,)gpu:(?:[^,:]+:)?(\d+)", str(options.get("gres", "")))
        gpus = gpus or re.fullmatch(r"(?:[^,:]+:)?(\d+)", str(options.get("gpus-per-node", "")))
        return self.processes or max(1, int(gpus[1]) if gpus else 1)

    @property
    def warning_seconds(self) -> int:
        return round(seconds(self.warning))

    def check(self) -> None:
        for name, least in (("jobs", 1), ("nodes", 1), ("processes", 0)):
            if getattr(self, name) < least:
                raise SpecError(f"{name} = {getattr(self, name)} is too small; type for example {name} = 1")
        if not 1 <= self.warning_seconds <= 65_535:
            raise SpecError(f"warning = {self.warning!r} must lie between 1s and 18h")
        for name, value in self.sbatch:
            if name in IMPOSSIBLE:
                raise SpecError(
                    f"sbatch: {name} cannot be used, since biphase writes and follows the job; leave it out"
                )
            if name in OWN_OPTIONS:
                raise SpecError(f"sbatch: {name} is set by biphase; use the field {OWN_OPTIONS[name]!r}")
            if not re.fullmatch(r"[a-z][a-z0-9-]+", name):
                raise SpecError(f"sbatch: {name!r} is no option's long name; write for example {EXAMPLE}")
            if re.search(r'["\\\x00-\x1f\x7f]', str(value)):  # would break the lines of the script
                raise SpecError(f"sbatch: {name} must be one line without quotation marks, not {value!r}")


def read_profile(path: Path) -> Profile:
    """Read and check the profile at `path`; any error becomes one line."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        former = [name for name in FORMER_FIELDS if name in data]
        former += [] if isinstance(data.get("sbatch", {}), dict) else ["sbatch"]
        if former:
            raise SpecError(
                f"{', '.join(former)}: options of sbatch are in the table [sbatch] by their own names now, one a line; "
                f"write [sbatch] at the end of the file, and below it for example {EXAMPLE}"
            )
        return Profile(**data)
    except FileNotFoundError:
        example = 'jobs = 4\\n[sbatch]\\ntime = "8:00:00"\\ngres = "gpu:1"\\n'
        raise SpecError(f"no profile {path}; write one, e.g.: printf '{example}' > {path}") from None
    except SpecError as error:
        raise SpecError(f"profile {path}: {error}") from None
    except (OSError, ValueError) as error:  # tomllib's errors and undecodable text are ValueErrors
        raise SpecError(f"profile {path} cannot be read: {one_line(error)}; correct it") from None


# ---------------------------------------------------------------- script


SUBMISSION = "BIPHASE_SUBMISSION"  # environment variable of a job: its submission

BODY = """\
# A worker of {study}: it takes jobs from the store until none is left. Written by biphase.
export {variable}={submission}
{threads}
worker='' warned='' stopped='' signalled=''
pass_on() {{ [ -z "$worker" ] || {signal} 2>/dev/null; }}
trap 'signalled=1 warned=1; pass_on USR1' USR1
trap 'signalled=1 stopped=1; pass_on TERM' TERM

requeue() {{
  echo "$(date '+%F %T') the time is nearly up and work is left: requeued"
  exec scontrol requeue "$SLURM_JOB_ID"
}}

set -e
{setup}
set +e
[ -z "$stopped" ] || exit 0
[ -z "$warned" ] || requeue

{command}
worker=$!
# Between fork and exec the child may lose a signal, and a signal before worker=$! was not forwarded: forward again.
sleep 1
[ -z "$warned" ] || pass_on USR1
[ -z "$stopped" ] || pass_on TERM
# A trapped signal interrupts wait.
while :; do signalled=''; wait "$worker"; code=$?; [ -n "$signalled" ] || break; done
# {left}: the worker was warned and stopped with work left. 138: killed by the warning (SIGUSR1) before it handled it.
if [ "$code" = {left} ] || {{ [ "$code" = 138 ] && [ -n "$warned" ] && [ -z "$stopped" ]; }}; then requeue; fi
exit "$code"
"""


# srun starts a launcher on each machine. A signal goes to them through Slurm: srun itself would end at once.
ON_MACHINES = """\
export BIPHASE_HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$((20000 + SLURM_JOB_ID % 20000))"
srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} \\
  --kill-on-bad-exit=0 bash -c {line} &"""
# By its number in the array, since the number of one of its jobs means the whole array.
SIGNAL_MACHINES = 'scancel --quiet --signal="$1" "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'


def job_name(study: str, submission: str) -> str:
    """Return Slurm's name for the jobs of a submission, which is unique to it."""
    return f"biphase-{re.sub(r'[^A-Za-z0-9_.-]', '_', study)}-{submission}"


def job_script(profile: Profile, *, study: str, submission: str, jobs: int, arguments: list[str]) -> str:
    """Return the text of a script for an array of `jobs` workers that run `biphase ARGUMENTS`."""
    options = [
        *(
            f"--{name}" if on is True else f'--{name}="{on}"'
            for name, on in profile.sbatch
            if on is not False
        ),
        f'--job-name="{job_name(study, submission)}"',
        f"--array=0-{jobs - 1}",
        f"--signal=B:USR1@{profile.warning_seconds}",
        "--requeue",
        "--open-mode=append",
        f"--nodes={profile.nodes}",
        *(["--ntasks-per-node=1"] if profile.nodes > 1 else ["--ntasks=1"]),
    ]
    biphase = profile.command or shlex.join([sys.executable, "-m", "biphase"])
    processes = ["--processes", str(profile.together)] if profile.together > 1 else []
    cpus = dict(profile.sbatch).get("cpus-per-task", 0)
    threads = max(1, int(cpus) // profile.together) if str(cpus).isdigit() and cpus else 0
    line, several = f"{biphase} {shlex.join([*arguments, *processes])}", profile.nodes > 1
    if several:
        line += f' --nodes {profile.nodes} --node "$SLURM_NODEID" --head "$BIPHASE_HEAD"'
        line = ON_MACHINES.format(nodes=profile.nodes, line=shlex.quote(f"exec {line}"))
    body = BODY.format(
        study=" ".join(study.split()),
        variable=SUBMISSION,
        submission=submission,
        threads=f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{threads}}}"' if threads else "",
        setup="\n".join(profile.setup) or ":",
        command=line if several else f"{line} &",
        signal=SIGNAL_MACHINES if several else 'kill -"$1" "$worker"',
        left=WORK_LEFT,
    )
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options), body])


# ---------------------------------------------------------------- queue


TIMEOUT = 30  # timeout in seconds for one Slurm command
COLUMNS = ("JobArrayID", "State", "Reason", "RestartCnt")


class Unanswered(ClusterError):
    """A command timed out; it may have taken effect all the same."""


@dataclass(frozen=True)
class Job:
    """One job of a study as Slurm reports it."""

    id: str  # 12_3: task 3 of array 12
    state: str  # pending, running, completing, …
    reason: str  # why it is pending
    restarts: int


@dataclass(frozen=True)
class Queue:
    """The jobs of a study in Slurm's queue, or the `problem` that prevented the query."""

    jobs: tuple[Job, ...] = ()
    problem: str = ""
    submitted: bool = False  # whether the study has any submissions


def folder(store: Store, study: str) -> Path:
    """Return the folder of the scripts and logs of a study's jobs."""
    return store.studies / study / "slurm"


def submissions(store: Store, study: str) -> list[str]:
    return sorted(path.stem for path in folder(store, study).glob("*.sh"))


def queue_of(store: Store, study: str, only: Collection[str] | None = None) -> Queue:
    """Query Slurm for the jobs of a study's submissions, all or those in `only`."""
    names = [job_name(study, name) for name in submissions(store, study) if only is None or name in only]
    if not names:
        return Queue()
    try:
        columns = ",".join(f"{column}:|" for column in COLUMNS)
        text = _run("squeue", "--noheader", "--array", f"--name={','.join(names)}", f"--Format={columns}")
    except ClusterError as error:
        return Queue(problem=str(error), submitted=True)
    jobs = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > len(COLUMNS):
            id, state, reason, restarts = cells[: len(COLUMNS)]
            restarted = int(restarts) if restarts.isdigit() else 0
            jobs.append(Job(id, state.lower(), "" if reason == "None" else reason, restarted))
    return Queue(tuple(jobs), submitted=True)


def submit(
    profile: Profile, store: Store, study: str, *, jobs: int, arguments: list[str]
) -> tuple[str, Path]:
    """Submit an array of workers to Slurm; return its job id and its script."""
    submission = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    path = folder(store, study).resolve()
    path.mkdir(parents=True, exist_ok=True)
    script = path / f"{submission}.sh"
    text = job_script(profile, study=study, submission=submission, jobs=jobs, arguments=arguments)
    script.write_text(text, encoding="utf-8")
    log = str(path / submission).replace("%", "%%") + "-%a.log"
    try:
        text = _run("sbatch", "--parsable", f"--chdir={Path.cwd()}", f"--output={log}", str(script))
    except Unanswered:
        raise  # it may have been submitted, so keep the script
    except ClusterError:
        script.unlink()
        raise
    return text.strip().splitlines()[-1].split(";")[0], script


def cancel_pending(jobs: tuple[Job, ...]) -> None:
    """Remove jobs from the queue that have not started; one that starts just now will read the stop request."""
    if waiting := [job.id for job in jobs if job.state == "pending"]:
        _run("scancel", "--quiet", "--state=PENDING", *waiting)


def lines(queue: Queue, logs: Path) -> list[str]:
    """Return the lines that `status` prints about the queue."""
    if not queue.submitted:
        return []
    if queue.problem:
        return [f"  Slurm: {queue.problem}"]
    if not queue.jobs:
        return [f"  Slurm: no job of this study is queued or runs; logs in {logs}"]
    states = Counter(f"{job.state} ({job.reason})" if job.reason else job.state for job in queue.jobs)
    shown = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
    return [f"  Slurm: {shown}; each of them: squeue --me; logs in {logs}"]


def as_json(queue: Queue) -> dict[str, Any]:
    return {"jobs": [asdict(job) for job in queue.jobs], "problem": queue.problem or None}


def _run(command: str, *arguments: str) -> str:
    try:
        ended = subprocess.run(
            [command, *arguments], capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except FileNotFoundError:
        raise ClusterError(
            f"{command} is not on this machine; type the command where Slurm's are, usually a login node"
        ) from None
    except subprocess.TimeoutExpired:
        raise Unanswered(f"{command} did not answer within {TIMEOUT} s; try again, or ask: sinfo") from None
    if ended.returncode:
        message = " ".join(ended.stderr.split()) or f"it ended with {ended.returncode}"
        raise ClusterError(f"{command} failed: {message}; ask: sinfo")
    return ended.stdout
