"""`stop`, and what `run --slurm` does: the workers of a study, wherever they run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from biphase.cli.app import DEFAULT_STORE, StoreFolder, StudyFile, app, show, store_at, tell, with_store

if TYPE_CHECKING:
    from biphase.files import Store
    from biphase.specs import Pretrain
    from biphase.study.plan import Plan
    from biphase.study.slurm.profile import Profile
    from biphase.training.manner import Sharding


@app.command()
def stop(
    study: StudyFile,
    store: StoreFolder = DEFAULT_STORE,
    wait: Annotated[str, typer.Option(metavar="TIME", help="how long to wait for them to end")] = "5m",
    now: Annotated[bool, typer.Option("--now", help="at once: what was not saved is computed again")] = False,
) -> None:
    """End the workers of a study: after their step, with a checkpoint. Also those of Slurm."""
    from biphase.study.launch import seconds
    from biphase.study.load import load
    from biphase.study.stopping import Stopping

    limit = seconds(wait)
    name = load(study).study.name
    ended = Stopping(store_at(store), name, now=now, say=tell).stop(limit)
    named = with_store(study, store)
    if ended.problem:
        tell(f"  Slurm: {ended.problem}; jobs that run see the request all the same")
    if ended.silent:
        tell(f"  {ended.silent} of them gave no sign of life for a minute and count as gone")
    if ended.left:
        for one in ended.left:
            show(f"still there: {one}")
        again = (
            "look at them with: squeue --me" if now else f"to end them at once: biphase stop {named} --now"
        )
        show(f"they were asked to stop and will; {again}")
        sys.exit(1)
    if not ended.asked:
        show(
            f"no worker of {name} runs{', as far as one can see here' if ended.problem else ', here or elsewhere'}"
        )
    else:
        show(f"stopped; results and checkpoints are kept. To go on: biphase run {named}")


def submit(
    made: Plan,
    where: Store,
    path: Path,
    runs: list[Pretrain],
    manners: dict[str, Any],
    processes: int,
    sharding: Sharding,
    *,
    results: set[str],
    named: str,
) -> None:
    """Start as many workers in Slurm as the profile says and are not there yet."""
    from biphase.errors import ClusterError, SpecError
    from biphase.study.attendance import control
    from biphase.study.launch import check_sharding
    from biphase.study.plan import save_plan
    from biphase.study.preflight import check_tasks
    from biphase.study.slurm import queue
    from biphase.study.slurm.profile import read_profile
    from biphase.study.summary import work_left

    if processes > 1:
        raise SpecError(f"--processes and --slurm do not go together; type processes = {processes} in {path}")
    profile = read_profile(path)
    share_rows(profile.together, runs, f"profile {path}, processes = {{}}")
    check_sharding(sharding, profile.together, f"processes = 2 in {path}")
    check_tasks(made, where)
    name = made.study.name
    if not work_left(made, where, results):
        which = "" if results == set(made.results.values()) else f" that matches --only {manners['--only']!r}"
        show(f"all of {name}{which} is done: nothing to submit. What it shows: biphase report {named}")
        return
    save_plan(made, where)
    with control(where, name):
        there = queue.queue_of(where, name)
        if there.problem:
            raise ClusterError(there.problem)
        # Also those that are completing: one that was warned is, while it goes back into the queue.
        jobs = profile.jobs - len(there.jobs)
        if jobs > 0:
            id, script = queue.submit(profile, where, name, jobs=jobs, arguments=_typed(made, where, manners))
    if there.jobs:
        ids = ", ".join(job.id + ("" if job.active else f" ({job.state})") for job in there.jobs[:8])
        show(
            f"{len(there.jobs)} of {profile.jobs} jobs were there already: {ids}{' …' if there.jobs[8:] else ''}"
        )
    if jobs > 0:
        show(f"submitted job {id}: {_workers(profile, jobs)}; script and logs: {script.parent}")
    else:
        show(f"nothing submitted; for more workers raise jobs in {path}")
    show(f"How it goes: biphase status {named}")
    show(f"To end it: biphase stop {named}")


def share_rows(processes: int, runs: list[Pretrain], typed: str) -> None:
    """Refuse more processes than a step has rows; `typed` is how a number of them is said."""
    from biphase.errors import SpecError

    for run in runs:
        if run.rows_per_step < processes:
            raise SpecError(
                f"{typed.format(processes)}: run {run.name!r} has {run.rows_per_step} rows a step, one for each at most; "
                f"type {typed.format(run.rows_per_step)}"
            )


def _workers(profile: Profile, jobs: int) -> str:
    from biphase.wording import counted

    each = f", {profile.together} processes in each" if profile.together > 1 else ""
    return f"{counted(jobs, 'worker')}{each}"


def _typed(made: Plan, where: Store, manners: dict[str, Any]) -> list[str]:
    """What a job types after `biphase`: the plan in the store, wherever the study file goes, and the manners."""
    from biphase.study.plan import PLAN

    root = where.root.resolve()
    words = ["run", str(root / "studies" / made.study.name / PLAN), "--store", str(root)]
    for option, value in manners.items():
        if value is True:
            words.append(option)
        elif value is False and option == "--compile":
            words.append("--no-compile")
        elif value is not None and value is not False and value != "":
            words += [option, str(value)]
    return words
