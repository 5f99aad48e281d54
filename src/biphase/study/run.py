"""From a verb to workers.

`run_plan` is what the verbs `run`, `adapt`, `evaluate` and `compare` call: it checks the tasks, registers the worker, starts
several processes if asked for, and lets a `Worker` work. `submit_workers` starts the same command as Slurm jobs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from biphase.cluster import launch, slurm
from biphase.cluster.launch import WORKER
from biphase.cluster.machines import ALONE, Machines
from biphase.cluster.workers import WorkerHeartbeat, control
from biphase.errors import ClusterError, SpecError
from biphase.keys import Identities
from biphase.leases import end_with_parent
from biphase.records import content_key
from biphase.specs import Contrastive, Pretrain, Task
from biphase.store import Store
from biphase.study import ledger
from biphase.study.datasets import Description, describe, keep
from biphase.study.describe import opening, work_left
from biphase.study.ledger import screened_in, tuning_grids
from biphase.study.plan import PLAN, Plan, save_plan
from biphase.study.worker import Outcome, Worker
from biphase.tasks.files import on_hub, refuse_changed
from biphase.text import counted
from biphase.training import distributed
from biphase.training.contrastive import read_pairs
from biphase.training.options import RuntimeOptions, Sharding


def run_plan(
    plan: Plan,
    store: Store,
    identities: Identities,
    options: RuntimeOptions,
    *,
    jobs: set[str],
    results: set[str],
    processes: int,
    machines: Machines = ALONE,
    limit: float | None,
    say: Callable[[str], None],
    summarize: Callable[[Outcome], None],
    describe_tasks: bool = False,
) -> NoReturn:
    """Compute the missing training jobs `jobs` and fine-tunings of the models `results`, and exit.

    `processes`: on each of the `machines`. `limit`: seconds after which the worker stops. `summarize` prints the
    outcome. `describe_tasks`: also print what each dataset was read as. With several processes, this one starts those
    of this machine with its own arguments, and waits.
    """
    child = "RANK" in os.environ  # one of several processes, whose parent has done all checks
    if not child:
        for description in check_tasks(plan, store, download=describe_tasks):
            if describe_tasks:
                say("\n".join(description.lines()))
        launch.check_sharding(options.sharding, processes, machines=machines.nodes)
        if processes * machines.nodes > 1:
            gpus = torch.cuda.device_count()
            if gpus and processes > gpus:
                raise SpecError(
                    f"--processes {processes}: this machine has {gpus} GPUs; type --processes {gpus}"
                )
            _check_rows(processes, machines.nodes, [plan.jobs[key].run for key in jobs], "--processes {}")
    heartbeat = WorkerHeartbeat(store, plan.study.name, node=machines.node)
    if processes * machines.nodes > 1 and not child:
        machines = replace(
            machines,
            folder=str(store.studies.resolve() / plan.study.name),
            worker=heartbeat.worker,
            alike=_alike(plan, options, processes, jobs | results),
        )
        try:
            code, warned = launch.in_processes(
                processes, sys.argv[1:], {WORKER: heartbeat.worker} | machines.variables()
            )
        finally:
            heartbeat.leave()
        sys.exit(_exit_code(code, warned, plan, store, heartbeat, results))
    if child:
        end_with_parent()
        launch.note("joining")
    ranks = distributed.join()
    ranks.check()
    say = say if ranks.first else lambda text: None
    if ranks.first:
        save_plan(plan, store)
    ranks.wait()
    stop = launch.Stop(limit, say, heartbeat.asked)
    say(opening(plan, store))
    launch.note("begun")
    options = replace(options, stop=stop)
    worker = Worker(plan, store, identities, ranks, options, wanted=jobs, evaluated=results, say=say)
    try:
        outcome = worker.work()
    finally:
        heartbeat.leave()
    if ranks.first:
        summarize(outcome)  # adds unreadable results to the failed
    ranks.wait()  # torchrun kills the other ranks soon after one has exited with a failure
    code = 1 if outcome.failed else 0
    launch.note("ended", str(code))
    # Of several processes the parent says whether work is left; to torchrun, any code but 0 is a failure.
    if not child:
        code = _exit_code(code, stop.warned, plan, store, heartbeat, results)
    distributed.leave(code, at_once=not outcome.tracked)


def _alike(plan: Plan, options: RuntimeOptions, processes: int, chosen: set[str]) -> dict[str, str]:
    """Return what must be equal on all machines that train together, by the name that a message gives it."""
    parts = ("micro_rows", "checkpoint_steps", "compiled", "deterministic", "sharding", "recompute")
    return {
        **distributed.alike(),
        "the plan": content_key({"plan": plan.to_json()["jobs"], "chosen": sorted(chosen)})[:12],
        "--processes": str(processes),
        "the options of run": ", ".join(f"{name}={getattr(options, name)}" for name in parts),
    }


def _exit_code(
    code: int, warned: bool, plan: Plan, store: Store, heartbeat: WorkerHeartbeat, results: set[str]
) -> int:
    """Return WORK_LEFT, so that it is started again, for a worker that Slurm warned and no user stopped."""
    left = warned and not heartbeat.asked(now=True) and work_left(plan, store, results)
    return launch.WORK_LEFT if left else code


def check_tasks(plan: Plan, store: Store, *, download: bool = False) -> list[Description]:
    """Validate the tasks that are still to be scored and the pairs still to be trained on; describe the tasks.

    A bad row would otherwise be found when its fine-tuning or stage begins, perhaps after days of pretraining. Local
    files are read whole; those on the hub must at least be pinned.
    """
    done = ledger.done_keys(plan, store)
    for objective, job in {job.objective: job for key, job in plan.jobs.items() if key not in done}.items():
        if isinstance(objective, Contrastive) and not any(map(on_hub, objective.pairs)):
            read_pairs(objective, job.run.name)
    tasks: dict[str, Task] = {}
    for grid in tuning_grids(plan, screened_in(store)):
        missing = [
            trial.task
            for training in grid.tunings
            for trial in training.trials
            if not store.knows(store.trials / trial.key)
        ]
        if missing or grid.pending:
            every = (grid.task, *missing, *(grid.scored if grid.pending else ()))
            tasks |= {task.name: task for task in every}
    descriptions = [describe(task, download=download) for task in tasks.values()]
    for task in tasks.values():
        if not on_hub(task):
            refuse_changed(task, plan.tasks[task.name], store)
    if descriptions:
        keep(descriptions, plan.study.name, store)
    return descriptions


def _check_rows(processes: int, machines: int, runs: list[Pretrain], option: str) -> None:
    """Refuse more processes than a step has rows; `option`: how those of one of the `machines` are typed."""
    on_each = f" on each of {machines} machines" if machines > 1 else ""
    for run in runs:
        if run.rows_per_step < processes * machines:
            most = run.rows_per_step // machines
            raise SpecError(
                f"{option.format(processes)}{on_each}: run {run.name!r} has {run.rows_per_step} rows a step, one for "
                f"each process at most; type {option.format(most) if most else 'fewer machines'}"
            )


def submit_workers(
    plan: Plan,
    store: Store,
    path: Path,
    *,
    jobs: Collection[str],
    results: set[str],
    options: dict[str, Any],
    sharding: Sharding,
) -> list[str]:
    """Submit as many Slurm workers as the profile at `path` asks for and are not yet in the queue.

    `options`: the runtime options of `run` as typed. Returns lines that say what was submitted; none if all is done.
    """
    profile = slurm.read_profile(path)
    _check_rows(
        profile.together,
        profile.nodes,
        [plan.jobs[key].run for key in jobs],
        f"profile {path}, processes = {{}}",
    )
    launch.check_sharding(sharding, profile.together, f"processes = 2 in {path}", machines=profile.nodes)
    check_tasks(plan, store)
    if not work_left(plan, store, results):
        return []
    save_plan(plan, store)
    with control(store, plan.study.name):
        queue = slurm.queue_of(store, plan.study.name)
        if queue.problem:
            raise ClusterError(queue.problem)
        # Completing jobs count too: a warned worker is completing while it is requeued.
        missing = profile.jobs - len(queue.jobs)
        if missing > 0:
            arguments = _job_arguments(plan, store, options)
            id, script = slurm.submit(profile, store, plan.study.name, jobs=missing, arguments=arguments)
    there = f"{len(queue.jobs)} of {profile.jobs} jobs were there already" if queue.jobs else ""
    if missing <= 0:
        return [f"{there}; nothing submitted; for more workers raise jobs in {path}"]
    parts = [f"{profile.nodes} machines"] if profile.nodes > 1 else []
    parts += [f"{profile.together} processes"] if profile.together > 1 else []
    each = f", {' of '.join(parts)} in each" if parts else ""
    submitted = f"submitted job {id}: {counted(missing, 'worker')}{each}; script and logs: {script.parent}"
    return [there, submitted] if there else [submitted]


def _job_arguments(plan: Plan, store: Store, options: dict[str, Any]) -> list[str]:
    """Return the arguments of a Slurm job: the plan in the store, since the study file may move, and the options."""
    root = store.root.resolve()
    arguments = ["run", str(root / "studies" / plan.study.name / PLAN), "--store", str(root)]
    for option, value in options.items():
        if value is True:
            arguments.append(option)
        elif value is False and option == "--compile":
            arguments.append("--no-compile")
        elif value is not None and value is not False and value != "":
            arguments += [option, str(value)]
    return arguments
