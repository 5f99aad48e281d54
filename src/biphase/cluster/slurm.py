"""Workers on a Slurm cluster: the profile of a job, its script, and the queue.

`read_profile` reads a TOML file that says what each job requests; it never changes what is computed. `job_script`
writes the script of an array of workers, `submit` hands it to Slurm, `queue_of` returns the jobs of a study. A
profile:

    partition = "gpu"
    time = "8h"
    gpus = 1
    cpus = 8
    memory = "64G"
    jobs = 4
    setup = ["module load cuda"]

Every field has a default; an unknown field is refused with the nearest name.

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
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from biphase.cluster.launch import WORK_LEFT, seconds
from biphase.errors import ClusterError, SpecError, one_line
from biphase.records import record
from biphase.store import Store
from biphase.text import counted

# sbatch options that the script sets itself → the field of the profile to use instead.
OWN_OPTIONS = {
    "--array": "jobs", "-a": "jobs", "--time": "time", "-t": "time", "--signal": "warning", "--job-name": "", "-J": "",
    "--output": "", "-o": "", "--error": "", "-e": "", "--open-mode": "", "--requeue": "", "--no-requeue": "",
    "--chdir": "", "-D": "", "--wrap": "", "--parsable": "", "--wait": "", "-W": "", "--ntasks": "processes",
    "-n": "processes", "--nodes": "nodes", "-N": "nodes", "--ntasks-per-node": "processes",
}  # fmt: skip


@record
class Profile:
    """The resources that each job of an array requests, and what it runs before the worker."""

    jobs: int = 1  # size of the array: number of workers
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    time: str = ""  # 8h, or Slurm's own 1-12:00:00; empty: the partition's default
    warning: str = "5m"  # time before the end at which the job is warned: enough for a step and a checkpoint
    gpus: int = 0
    gpu_type: str = ""
    cpus: int = 0  # 0: the partition's default
    memory: str = ""
    nodes: int = 1  # machines of each job, which train together
    processes: int = 0  # processes on each machine that train together; 0: one per GPU
    sbatch: tuple[str, ...] = ()  # further options, as written after #SBATCH
    setup: tuple[str, ...] = ()  # shell lines before the worker starts
    command: str = ""  # the `biphase` command in the job; empty: that of this Python

    @property
    def together(self) -> int:
        """Number of processes of one worker on each of its machines."""
        return self.processes or max(1, self.gpus)

    @property
    def time_seconds(self) -> float:
        return _time(self.time) if self.time else 0.0

    @property
    def warning_seconds(self) -> int:
        return round(seconds(self.warning))

    def check(self) -> None:
        for field in fields(self):  # values that would break the lines of the script
            value = getattr(self, field.name)
            if isinstance(value, int) and value < (field.name in ("jobs", "nodes")):
                raise SpecError(f"{field.name} = {value} is too small; type for example {field.name} = 1")
            if isinstance(value, str) and re.search(r'["\x00-\x1f\x7f]', value):
                raise SpecError(f"{field.name} must be one line without quotation marks, not {value!r}")
            if field.name in ("memory", "gpu_type") and re.search(r"\s", value):
                raise SpecError(f"{field.name} must be one word, not {value!r}")
        if self.gpus and self.processes and self.processes != self.gpus:
            raise SpecError(
                f"processes = {self.processes} does not fit gpus = {self.gpus}: a worker uses one GPU in each process; "
                "leave processes out"
            )
        if self.gpu_type and not self.gpus:
            raise SpecError("gpu_type is set, but gpus is not; type gpus = 1")
        if not 1 <= self.warning_seconds <= 65_535:
            raise SpecError(f"warning = {self.warning!r} must lie between 1s and 18h")
        if self.time and 2 * self.warning_seconds > self.time_seconds:
            raise SpecError(
                f"warning = {self.warning!r} leaves less than half of time = {self.time!r} to work in; shorten it"
            )
        for line in self.sbatch:
            _check_options(line)


def read_profile(path: Path) -> Profile:
    """Read and check the profile at `path`; any error becomes one line."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return Profile(
            **{name: value.strip() if isinstance(value, str) else value for name, value in data.items()}
        )
    except FileNotFoundError:
        raise SpecError(
            f'no profile {path}; write one, e.g.: printf \'partition = "gpu"\\ntime = "8h"\\ngpus = 1\\njobs = 4\\n\' > {path}'
        ) from None
    except SpecError as error:
        raise SpecError(f"profile {path}: {error}") from None
    except (OSError, ValueError) as error:  # tomllib's errors and undecodable text are ValueErrors
        raise SpecError(f"profile {path} cannot be read: {one_line(error)}; correct it") from None


def _check_options(line: str) -> None:
    """Refuse a line after #SBATCH, of one option or several, if the script sets one of them itself."""
    if re.search(r"[\x00-\x1f\x7f]", line):
        raise SpecError(f"sbatch: {line!r} must be one line without tabs and control characters")
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise SpecError(f"sbatch: {line!r} cannot be read: {one_line(error)}; correct it") from None
    if not words or not re.match(r"--?\w", words[0]):
        raise SpecError(f'sbatch: {line!r} is no option; type for example sbatch = ["--exclude=node7"]')
    for word in words:
        # As getopt parses it: a value may follow a short option directly, and a long option may be abbreviated.
        option = word.split("=")[0] if word.startswith("--") else word[:2]
        if not re.match(r"--?\w", option):
            continue
        own = next((name for name in OWN_OPTIONS if name.startswith(option)), "")
        if own:
            instead = OWN_OPTIONS[own]
            hint = f"use the field {instead!r}" if instead else "biphase needs it as it is; leave it out"
            raise SpecError(f"sbatch: {option} is set by biphase; {hint}")


def _time(text: str) -> float:
    """Parse 8h, or Slurm's own [days-]hours:minutes:seconds, to seconds."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text)
    if match:
        days, hours, minutes, rest = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + rest
    try:
        return seconds(text)
    except SpecError:
        raise SpecError(
            f"time = {text!r} is not a length of time; type for example 90m, 8h or 1-12:00:00"
        ) from None


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
        *profile.sbatch,  # first, since the last of two equal options takes effect
        f'--job-name="{job_name(study, submission)}"',
        f"--array=0-{jobs - 1}",
        f"--signal=B:USR1@{profile.warning_seconds}",
        "--requeue",
        "--open-mode=append",
        f"--nodes={profile.nodes}",
        *(["--ntasks-per-node=1"] if profile.nodes > 1 else ["--ntasks=1"]),
        *_resources(profile),
    ]
    biphase = profile.command or shlex.join([sys.executable, "-m", "biphase"])
    processes = ["--processes", str(profile.together)] if profile.together > 1 else []
    threads = max(1, profile.cpus // profile.together) if profile.cpus else 0
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


def _resources(profile: Profile) -> list[str]:
    names = ("partition", "account", "qos", "constraint")
    options = [f'--{name}="{getattr(profile, name)}"' for name in names if getattr(profile, name)]
    if profile.time:
        minutes, rest = divmod(round(profile.time_seconds), 60)
        options.append(f"--time={minutes}:{rest:02d}")
    if profile.gpus:
        kind = f"{profile.gpu_type}:" if profile.gpu_type else ""
        options.append(f"--gres=gpu:{kind}{profile.gpus}")
    if profile.cpus:
        options.append(f"--cpus-per-task={profile.cpus}")
    if profile.memory:
        options.append(f"--mem={profile.memory}")
    return options


# ---------------------------------------------------------------- queue


TIMEOUT = 30  # timeout in seconds for one Slurm command
SHOWN = 12  # jobs that `status` lists individually
COLUMNS = ("JobArrayID", "State", "Reason", "NodeList", "RestartCnt", "TimeUsed", "TimeLeft")


class Unanswered(ClusterError):
    """A command timed out; it may have taken effect all the same."""


@dataclass(frozen=True)
class Job:
    """One job of a study as Slurm reports it."""

    id: str  # 12_3: task 3 of array 12
    state: str  # pending, running, completing, …
    reason: str  # why it is pending
    nodes: str
    restarts: int
    used: str
    left: str

    @property
    def active(self) -> bool:
        """Whether the job runs or will run."""
        return self.state not in ("completing", "cancelled", "completed", "failed", "timeout")


@dataclass(frozen=True)
class Queue:
    """The jobs of a study in Slurm's queue, or the `problem` that prevented the query."""

    jobs: tuple[Job, ...] = ()
    problem: str = ""
    submitted: bool = False  # whether the study has any submissions

    @property
    def active(self) -> tuple[Job, ...]:
        return tuple(job for job in self.jobs if job.active)


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
            id, state, reason, nodes, restarts, used, left = cells[: len(COLUMNS)]
            reason = "" if reason == "None" else reason
            restarted = int(restarts) if restarts.isdigit() else 0
            jobs.append(Job(id, state.lower(), reason, nodes, restarted, used, left))
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


def cancel(jobs: tuple[Job, ...]) -> None:
    """Remove jobs from the queue; running ones are killed."""
    if jobs:
        _run("scancel", "--quiet", *(job.id for job in jobs))


def ask_to_end(jobs: tuple[Job, ...]) -> None:
    """Remove pending jobs from the queue, and signal running ones to stop after their step."""
    waiting = [job.id for job in jobs if job.state != "running"]
    running = [job.id for job in jobs if job.state == "running"]
    if waiting:
        # A job that starts just now is not killed: it will read the stop request.
        _run("scancel", "--quiet", "--state=PENDING", *waiting)
    if running:
        _run("scancel", "--quiet", "--batch", "--signal=TERM", "--state=RUNNING", *running)


def lines(queue: Queue, logs: Path) -> list[str]:
    """Return the lines that `status` prints about the queue."""
    if not queue.submitted:
        return []
    if queue.problem:
        return [f"  Slurm: {queue.problem}"]
    if not queue.jobs:
        return [f"  Slurm: no job of this study is queued or runs; logs in {logs}"]
    counts = Counter(job.state for job in queue.jobs)
    states = ", ".join(f"{number} {state}" for state, number in sorted(counts.items()))
    shown = [f"  Slurm: {states}; logs in {logs}", *(f"    {_line(job)}" for job in queue.jobs[:SHOWN])]
    if len(queue.jobs) > SHOWN:
        shown.append(f"    and {counted(len(queue.jobs) - SHOWN, 'more job')}; type squeue --me")
    return shown


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
