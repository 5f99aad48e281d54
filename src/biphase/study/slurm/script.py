"""The job script: one array of workers that pull jobs from the store, warned before their time is up.

Slurm sends the warning to the script's own shell, which hands it to the worker; the worker stops after its step
with a checkpoint and says by its exit code that work is left; then the script puts itself back into the queue.
"""

from __future__ import annotations

import re
import shlex
import sys

from biphase.study.launch import WORK_LEFT
from biphase.study.slurm.profile import Profile

SUBMISSION = "BIPHASE_SUBMISSION"  # in the environment of a job: which submission it belongs to

BODY = """\
# A worker of {study}: it takes jobs from the store until none is left. Written by biphase.
export {variable}={submission}
{threads}
worker='' warned='' told='' heard=''
trap 'heard=1 warned=1; [ -z "$worker" ] || kill -USR1 "$worker" 2>/dev/null' USR1
trap 'heard=1 told=1; [ -z "$worker" ] || kill -TERM "$worker" 2>/dev/null' TERM

requeue() {{
  echo "$(date '+%F %T') the time is nearly up and work is left: back into the queue"
  exec scontrol requeue "$SLURM_JOB_ID"
}}

set -e
{setup}
set +e
[ -z "$told" ] || exit 0
[ -z "$warned" ] || requeue

{command} &
worker=$!
# Until it is a program of its own it may lose a signal: what comes in this second is handed on after it, and what
# came before it had a name is told now.
sleep 1
[ -z "$warned" ] || kill -USR1 "$worker" 2>/dev/null
[ -z "$told" ] || kill -TERM "$worker" 2>/dev/null
while :; do heard=''; wait "$worker"; code=$?; [ -n "$heard" ] || break; done
# {left}: warned, stopped, work is left. 138: warned before it had begun.
if [ "$code" = {left} ] || {{ [ "$code" = 138 ] && [ -n "$warned" ] && [ -z "$told" ]; }}; then requeue; fi
exit "$code"
"""


def job_name(study: str, submission: str) -> str:
    """How Slurm calls the jobs of a submission; the names of other submissions differ."""
    return f"biphase-{re.sub(r'[^A-Za-z0-9_.-]', '_', study)}-{submission}"


def job_script(profile: Profile, *, study: str, submission: str, jobs: int, arguments: list[str]) -> str:
    """The text of a script in which `jobs` workers type `biphase ARGUMENTS`."""
    options = [
        *profile.sbatch,  # of two that say the same the last counts: ours
        f'--job-name="{job_name(study, submission)}"',
        f"--array=0-{jobs - 1}",
        f"--signal=B:USR1@{profile.warning_seconds}",
        "--requeue",
        "--open-mode=append",
        "--nodes=1",
        "--ntasks=1",
        *_resources(profile),
    ]
    biphase = profile.command or shlex.join([sys.executable, "-m", "biphase"])
    processes = ["--processes", str(profile.together)] if profile.together > 1 else []
    threads = max(1, profile.cpus // profile.together) if profile.cpus else 0
    body = BODY.format(
        study=" ".join(study.split()),
        variable=SUBMISSION,
        submission=submission,
        threads=f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{threads}}}"' if threads else "",
        setup="\n".join(profile.setup) or ":",
        command=f"{biphase} {shlex.join([*arguments, *processes])}",
        left=WORK_LEFT,
    )
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options), body])


def _resources(profile: Profile) -> list[str]:
    named = {
        name: getattr(profile, name)
        for name in ("partition", "account", "qos", "constraint")
        if getattr(profile, name)
    }
    found = [f'--{name}="{value}"' for name, value in named.items()]
    if profile.time:
        found.append(f"--time={_slurm_time(profile.time_seconds)}")
    if profile.gpus:
        kind = f"{profile.gpu_type}:" if profile.gpu_type else ""
        found.append(f"--gres=gpu:{kind}{profile.gpus}")
    if profile.cpus:
        found.append(f"--cpus-per-task={profile.cpus}")
    if profile.memory:
        found.append(f"--mem={profile.memory}")
    return found


def _slurm_time(seconds: float) -> str:
    """As days-hours:minutes:seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02d}:{minutes:02d}:{rest:02d}"
