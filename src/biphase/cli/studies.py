"""`plan`, `run` and `status`: a study file and its store."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from biphase.cli.app import (
    DEFAULT_STORE,
    AsJson,
    StoreFolder,
    StudyFile,
    Verify,
    app,
    give,
    planned,
    show,
    tell,
    with_store,
)
from biphase.cli.workers import share_rows, submit

if TYPE_CHECKING:
    from biphase.files import Store
    from biphase.keys import Identities
    from biphase.report.prospects import Prospect
    from biphase.specs import Pretrain
    from biphase.study.attendance import Presence
    from biphase.study.leaves import Count
    from biphase.study.plan import Plan
    from biphase.training.manner import Manner, Sharding


@app.command()
def plan(
    study: StudyFile,
    store: StoreFolder = DEFAULT_STORE,
    device: Annotated[str, typer.Option(help="price the work on this device; default: the one at hand")] = "",
    efficiency: Annotated[
        float | None,
        typer.Option(min=0.001, max=1, help="price by FLOPs, at this share of its peak; 0.4 is good"),
    ] = None,
    gpus: Annotated[
        int,
        typer.Option(min=0, help="elapsed time on this many of it, and memory and time of one job on all"),
    ] = 0,
    verify: Verify = False,
    as_json: AsJson = False,
) -> None:
    """The tree: what is shared, what is done, what the rest costs, what it will show. Runs nothing."""
    from biphase.report import prospects
    from biphase.study.gpus import ManyGpus, gpus_at_hand
    from biphase.study.leaves import count, settled
    from biphase.study.totals import bill
    from biphase.study.tree import plan_json, render

    made, where, _ = planned(study, store, verify=verify)
    tuned = count(made, where)
    done = settled(made, where, tuned)
    measure = f"biphase bench {with_store(Path('scale'), store)} --save"
    device = device or (gpus_at_hand() if gpus else "")
    priced = bill(made, where, device, efficiency, tuned=tuned.done, measure=measure, workers=gpus)
    to_come = _to_come(made, where, tuned)
    scaled = ManyGpus(made, where, gpus, device) if gpus else None
    if as_json:
        told = plan_json(made, done=done, tuned=tuned.done, bill=priced)
        told |= {"claims": prospects.as_json(to_come)} | ({"gpus": scaled.as_json()} if scaled else {})
        print(json.dumps(told, indent=1))
        return
    claims, path = prospects.render(to_come) if to_come else [], with_store(study, store)
    show(render(made, done=done, tuned=tuned.done, bill=priced, command_path=path, claims=claims))
    show("\n".join(scaled.render())) if scaled else None


def _to_come(made: Plan, where: Store, tuned: Count) -> list[Prospect]:
    """What a study that is to be fine-tuned, and is not done, will be able to say; by the noise measured so far."""
    from biphase.report.prospects import prospects

    if not tuned.of or tuned.done == tuned.of:
        return []
    if not tuned.done:
        return prospects(made)
    from biphase.report.evidence import gather

    return prospects(made, gather(made, where))


Shard = Annotated[
    str,
    typer.Option(
        metavar="none|full|hybrid[:K]", help="spread weights and moments over the processes (FSDP2)"
    ),
]
Recompute = Annotated[
    bool, typer.Option("--recompute", help="layers keep only their input; less memory, a third more work")
]
Compiled = Annotated[
    bool | None, typer.Option("--compile/--no-compile", help="default: on CUDA, where nothing is faster")
]
Deterministic = Annotated[
    bool,
    typer.Option("--deterministic", help="on a GPU too, pretraining the same gives the same bits; slower"),
]
Slurm = Annotated[
    Path | None, typer.Option(metavar="PROFILE", help="start workers as Slurm jobs, as this file says")
]


@app.command()
def run(
    study: StudyFile,
    store: StoreFolder = DEFAULT_STORE,
    only: Annotated[str, typer.Option(help="results whose name matches, e.g. 'clm-10k-*'")] = "*",
    for_time: Annotated[
        str, typer.Option("--for", metavar="TIME", help="stop cleanly after e.g. 9m or 2h")
    ] = "",
    processes: Annotated[
        int, typer.Option(min=1, help="train each piece in this many processes (torchrun)")
    ] = 1,
    shard: Shard = "none",
    recompute: Recompute = False,
    loaders: Annotated[int, typer.Option(min=0, help="threads that prepare batches")] = 1,
    micro_batch: Annotated[int, typer.Option(min=0, help="rows at a time; 0: what suits the device")] = 0,
    checkpoint: Annotated[
        str, typer.Option(metavar="TIME|STEPS", help="how often to save on the way")
    ] = "10m",
    compiled: Compiled = None,
    deterministic: Deterministic = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress while a piece runs")] = False,
    verify: Verify = False,
    slurm: Slurm = None,
) -> None:
    """Compute what is missing, with progress. Stop and start freely."""
    if deterministic:
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # cuBLAS reads it once, at its first product

    from biphase.study import launch
    from biphase.training.manner import Manner, Sharding

    made, where, fingerprints = planned(study, store, ask=True, verify=verify)
    wanted = _wanted(made, only)
    steps, seconds = launch.checkpoint_rule(checkpoint)
    limit = launch.seconds(for_time) if for_time else None
    sharding = Sharding.named(shard)
    runs = [made.states[key].run for key in wanted]
    results = matching(made, only)
    if slurm:
        manners = {
            "--only": only, "--for": for_time, "--loaders": loaders, "--micro-batch": micro_batch,
            "--checkpoint": checkpoint, "--compile": compiled, "--deterministic": deterministic,
            "--shard": shard, "--recompute": recompute, "--quiet": quiet,
        }  # fmt: skip
        named = with_store(study, store)
        submit(made, where, slurm, runs, manners, processes, sharding, results=results, named=named)
        return
    presence = prepare(made, where, processes, runs, sharding, results)

    manner = Manner(
        loaders=loaders,
        micro_rows=micro_batch,
        checkpoint_steps=steps,
        checkpoint_seconds=seconds,
        compiled=compiled,
        deterministic=deterministic,
        sharding=sharding,
        recompute=recompute,
        quiet=quiet,
    )
    named = with_store(study, store)
    command = f"run {named}" + ("" if only == "*" else f" --only {shlex.quote(only)}")
    work(
        made, where, fingerprints, manner, wanted, results,
        presence=presence, limit=limit, command=command, study=named,
    )  # fmt: skip


def work(
    made: Plan,
    where: Store,
    fingerprints: Identities,
    manner: Manner,
    wanted: set[str],
    results: set[str],
    *,
    presence: Presence,
    limit: float | None,
    command: str,
    study: str,
    as_json: bool = False,
    more: Callable[[], list[str]] = list,
    more_json: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Compute what is missing of a plan, here; then say what came out, and end.

    `study`: as a verb after it names it. `more`, `more_json`: what this verb has to add.
    """
    from dataclasses import replace

    from biphase.holders import end_with_parent
    from biphase.study import launch, refusal
    from biphase.study.leaves import survey
    from biphase.study.plan import save_plan
    from biphase.study.summary import closing, opening, status_json
    from biphase.study.worker import Worker
    from biphase.training import devices

    if "RANK" in os.environ:
        end_with_parent()
    ranks = devices.join()
    say = tell if ranks.first else lambda text: None
    if ranks.first:
        save_plan(made, where)
    ranks.wait()
    stop = launch.Stop(limit, say, presence.asked)
    manner = replace(manner, stop=stop)
    say(opening(made, where))
    refusal.note_beginning()
    worker = Worker(made, where, fingerprints, ranks, manner, wanted=wanted, evaluated=results, say=say)
    try:
        outcome = worker.work()
    finally:
        presence.leave()
    if ranks.first:
        tuned = survey(made, where)
        text = closing(  # adds what cannot be read to the failed
            made,
            where,
            outcome.failed,
            stopped=outcome.stopped,
            command=command,
            study=study,
            tuned=tuned,
            unsaved=outcome.unsaved,
        )
        lines = [text, *more()]
        give(as_json, lambda: more_json() | status_json(made, where), lambda: "\n".join(lines))
    ranks.wait()  # torchrun ends the others soon after one has ended with a failure
    code = 1 if outcome.failed else 0
    refusal.note_ending(code)
    devices.leave(_code(code, stop.warned, made, where, presence, results))


def _code(
    code: int, warned: bool, made: Plan, where: Store, presence: Presence, results: set[str] | None
) -> int:
    """How a worker ends: one that was warned, but not asked to stop, says whether it should start again."""
    from biphase.study.launch import WORK_LEFT
    from biphase.study.summary import work_left

    again = warned and not presence.asked(now=True) and work_left(made, where, results)
    return WORK_LEFT if again else code


def prepare(
    made: Plan,
    where: Store,
    processes: int,
    runs: list[Pretrain],
    sharding: Sharding | None = None,
    results: set[str] | None = None,
    *,
    describe: bool = False,
) -> Presence:
    """Before any job: refuse what is wrong with the tasks, sign in, and hand over to several processes if asked for.

    With `describe`, also say what each dataset was read as.
    """
    from biphase.study import launch
    from biphase.study.attendance import WORKER, Presence
    from biphase.study.preflight import check_tasks

    if "RANK" in os.environ:  # one of those processes: all this was done before it was started
        return Presence(where, made.study.name)
    for one in check_tasks(made, where, download=describe):
        if describe:
            tell("\n".join(one.lines()))
    if sharding is not None:
        launch.check_sharding(sharding, processes)
    if processes > 1:
        check_processes(processes, runs)
    presence = Presence(where, made.study.name)
    if processes > 1:
        try:
            code, warned = launch.in_processes(processes, sys.argv[1:], {WORKER: presence.worker})
        finally:
            presence.leave()
        sys.exit(_code(code, warned, made, where, presence, results))
    return presence


def check_processes(processes: int, runs: list[Pretrain]) -> None:
    """Refuse here what would otherwise be refused by every process at once."""
    import torch

    from biphase.errors import SpecError

    devices = torch.cuda.device_count()
    if devices and processes > devices:
        raise SpecError(
            f"--processes {processes}: this machine has {devices} GPUs; type --processes {devices}"
        )
    share_rows(processes, runs, "--processes {}")


def _wanted(made: Plan, only: str) -> set[str]:
    """The states on the way to every result whose name matches."""
    return {state.key for key in matching(made, only) for state in made.path(key)}


def matching(made: Plan, only: str) -> set[str]:
    """The keys of the results whose name matches."""
    from fnmatch import fnmatch

    from biphase.errors import SpecError, nearest

    matching = [key for name, key in made.results.items() if fnmatch(name, only)]
    if not matching:
        raise SpecError(
            f"no result of {made.study.name} matches --only {only!r}; {nearest(only, made.results)}"
        )
    return set(matching)


@app.command()
def status(
    study: StudyFile, store: StoreFolder = DEFAULT_STORE, verify: Verify = False, as_json: AsJson = False
) -> None:
    """Done, running, failed, left, and the time to go."""
    from biphase.study.slurm import queue
    from biphase.study.summary import status_json, status_text

    made, where, _ = planned(study, store, reads=True, verify=verify)
    jobs = queue.queue_of(where, made.study.name)
    cluster = queue.lines(jobs, queue.folder(where, made.study.name))
    give(
        as_json,
        lambda: status_json(made, where) | {"slurm": queue.as_json(jobs)},
        lambda: status_text(made, where, command_path=with_store(study, store), cluster=cluster),
    )
