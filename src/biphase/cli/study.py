"""The verbs of a study file and its store: `plan`, `run`, `status`, `stop`, `ledger pack`, `ledger merge`, `report`."""

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
    store_at,
    tell,
    with_store,
)

if TYPE_CHECKING:
    from biphase.cluster.workers import WorkerHeartbeat
    from biphase.keys import Identities
    from biphase.report.prospects import Prospect
    from biphase.specs import Pretrain
    from biphase.store import Store
    from biphase.study.ledger import Count
    from biphase.study.plan import Plan
    from biphase.training.options import RuntimeOptions, Sharding


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
    from biphase.study.describe import bill, plan_json, render
    from biphase.study.ledger import count, settled
    from biphase.study.scaling import ManyGpus, gpus_at_hand

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
    """The power analysis of a study with unfinished trials, with the noise measured so far."""
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
        int, typer.Option(min=1, help="train each training job in this many processes (torchrun)")
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
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress while a training job runs")] = False,
    verify: Verify = False,
    slurm: Slurm = None,
) -> None:
    """Compute what is missing, with progress. Stop and start freely."""
    if deterministic:
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # cuBLAS reads it once, at its first matrix product

    from biphase.cluster import launch
    from biphase.training.options import RuntimeOptions, Sharding

    made, where, fingerprints = planned(study, store, ask=True, verify=verify)
    wanted = _wanted(made, only)
    steps, seconds = launch.checkpoint_rule(checkpoint)
    limit = launch.seconds(for_time) if for_time else None
    sharding = Sharding.named(shard)
    runs = [made.jobs[key].run for key in wanted]
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
    heartbeat = prepare(made, where, processes, runs, sharding, results)

    options = RuntimeOptions(
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
        made, where, fingerprints, options, wanted, results,
        heartbeat=heartbeat, limit=limit, command=command, study=named,
    )  # fmt: skip


def work(
    made: Plan,
    where: Store,
    fingerprints: Identities,
    options: RuntimeOptions,
    wanted: set[str],
    results: set[str],
    *,
    heartbeat: WorkerHeartbeat,
    limit: float | None,
    command: str,
    study: str,
    as_json: bool = False,
    more: Callable[[], list[str]] = list,
    more_json: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Compute what is missing of a plan in this process, print the outcome, and exit.

    `study`: the study as typed after a verb. `more`, `more_json`: output that the calling verb adds.
    """
    from dataclasses import replace

    from biphase.cluster import launch
    from biphase.leases import end_with_parent
    from biphase.study.ledger import survey_trials
    from biphase.study.plan import save_plan
    from biphase.study.status import closing, opening, status_json
    from biphase.study.worker import Worker
    from biphase.training import distributed

    if "RANK" in os.environ:
        end_with_parent()
    ranks = distributed.join()
    say = tell if ranks.first else lambda text: None
    if ranks.first:
        save_plan(made, where)
    ranks.wait()
    stop = launch.Stop(limit, say, heartbeat.asked)
    options = replace(options, stop=stop)
    say(opening(made, where))
    launch.note_beginning()
    worker = Worker(made, where, fingerprints, ranks, options, wanted=wanted, evaluated=results, say=say)
    try:
        outcome = worker.work()
    finally:
        heartbeat.leave()
    if ranks.first:
        tuned = survey_trials(made, where)
        text = closing(  # adds unreadable results to the failed
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
    ranks.wait()  # torchrun kills the other ranks soon after one has exited with a failure
    code = 1 if outcome.failed else 0
    launch.note_ending(code)
    distributed.leave(_code(code, stop.warned, made, where, heartbeat, results))


def _code(
    code: int, warned: bool, made: Plan, where: Store, heartbeat: WorkerHeartbeat, results: set[str] | None
) -> int:
    """The exit code of a worker: one that Slurm warned (SIGUSR1) and no user stopped asks to be restarted."""
    from biphase.cluster.launch import WORK_LEFT
    from biphase.study.status import work_left

    again = warned and not heartbeat.asked(now=True) and work_left(made, where, results)
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
) -> WorkerHeartbeat:
    """Before any job: check the tasks, register the worker, and start several processes if asked for.

    With `describe`, also print what each dataset was read as. With several processes, this one waits and exits.
    """
    from biphase.cluster import launch
    from biphase.cluster.workers import WORKER, WorkerHeartbeat
    from biphase.study.worker import check_tasks

    if "RANK" in os.environ:  # one of those processes: its parent has done all this
        return WorkerHeartbeat(where, made.study.name)
    for one in check_tasks(made, where, download=describe):
        if describe:
            tell("\n".join(one.lines()))
    if sharding is not None:
        launch.check_sharding(sharding, processes)
    if processes > 1:
        check_processes(processes, runs)
    heartbeat = WorkerHeartbeat(where, made.study.name)
    if processes > 1:
        try:
            code, warned = launch.in_processes(processes, sys.argv[1:], {WORKER: heartbeat.worker})
        finally:
            heartbeat.leave()
        sys.exit(_code(code, warned, made, where, heartbeat, results))
    return heartbeat


def check_processes(processes: int, runs: list[Pretrain]) -> None:
    """Refuse here what every process would otherwise refuse at once."""
    import torch

    from biphase.errors import SpecError

    devices = torch.cuda.device_count()
    if devices and processes > devices:
        raise SpecError(
            f"--processes {processes}: this machine has {devices} GPUs; type --processes {devices}"
        )
    share_rows(processes, runs, "--processes {}")


def _wanted(made: Plan, only: str) -> set[str]:
    """The keys of the training jobs on the path to every result whose name matches."""
    return {state.key for key in matching(made, only) for state in made.path(key)}


def matching(made: Plan, only: str) -> set[str]:
    """The checkpoint keys of the results whose name matches."""
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
    from biphase.cluster import slurm as slurm_module
    from biphase.study.status import status_json, status_text

    made, where, _ = planned(study, store, reads=True, verify=verify)
    jobs = slurm_module.queue_of(where, made.study.name)
    cluster = slurm_module.lines(jobs, slurm_module.folder(where, made.study.name))
    give(
        as_json,
        lambda: status_json(made, where) | {"slurm": slurm_module.as_json(jobs)},
        lambda: status_text(made, where, command_path=with_store(study, store), cluster=cluster),
    )


# ---------------------------------------------------------------- workers


if TYPE_CHECKING:
    from biphase.cluster.slurm import Profile
    from biphase.specs import Pretrain
    from biphase.store import Store
    from biphase.study.plan import Plan
    from biphase.training.options import Sharding


@app.command()
def stop(
    study: StudyFile,
    store: StoreFolder = DEFAULT_STORE,
    wait: Annotated[str, typer.Option(metavar="TIME", help="how long to wait for them to end")] = "5m",
    now: Annotated[bool, typer.Option("--now", help="at once: what was not saved is computed again")] = False,
) -> None:
    """End the workers of a study: after their step, with a checkpoint. Also those of Slurm."""
    from biphase.cluster.launch import seconds
    from biphase.cluster.workers import WorkerStopper
    from biphase.study.load import load

    limit = seconds(wait)
    name = load(study).study.name
    ended = WorkerStopper(store_at(store), name, now=now, say=tell).stop(limit)
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
    """Submit as many Slurm workers as the profile asks for and are not yet in the queue."""
    from biphase.cluster import slurm
    from biphase.cluster.launch import check_sharding
    from biphase.cluster.slurm import read_profile
    from biphase.cluster.workers import control
    from biphase.errors import ClusterError, SpecError
    from biphase.study.plan import save_plan
    from biphase.study.status import work_left
    from biphase.study.worker import check_tasks

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
        there = slurm.queue_of(where, name)
        if there.problem:
            raise ClusterError(there.problem)
        # Completing jobs count too: a warned worker is completing while it is requeued.
        jobs = profile.jobs - len(there.jobs)
        if jobs > 0:
            id, script = slurm.submit(profile, where, name, jobs=jobs, arguments=_typed(made, where, manners))
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
    """Refuse more processes than a step has rows; `typed`: how the number of processes is typed."""
    from biphase.errors import SpecError

    for run in runs:
        if run.rows_per_step < processes:
            raise SpecError(
                f"{typed.format(processes)}: run {run.name!r} has {run.rows_per_step} rows a step, one for each at most; "
                f"type {typed.format(run.rows_per_step)}"
            )


def _workers(profile: Profile, jobs: int) -> str:
    from biphase.text import counted

    each = f", {profile.together} processes in each" if profile.together > 1 else ""
    return f"{counted(jobs, 'worker')}{each}"


def _typed(made: Plan, where: Store, manners: dict[str, Any]) -> list[str]:
    """The arguments of a Slurm job: the plan in the store, since the study file may move, and the runtime options."""
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


# ---------------------------------------------------------------- ledger


if TYPE_CHECKING:
    from biphase.study.archive import Merged, PackSummary

ledger = typer.Typer(help="Results from one machine to another, in one file.", no_args_is_help=True)
app.add_typer(ledger, name="ledger")

SHOWN = 5  # of the results that are kept unchanged


@ledger.command()
def pack(
    study: StudyFile,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="the file to write, e.g. results.tar.zst")],
    store: StoreFolder = DEFAULT_STORE,
    only: Annotated[str, typer.Option(help="results whose name matches, e.g. 'clm-10k-*'")] = "*",
    without_examples: Annotated[
        bool, typer.Option("--without-examples", help="scores without their values by example; much smaller")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Everything of a study that a report elsewhere needs, and no weights, as one file."""
    from dataclasses import asdict

    from biphase.study.archive import pack as pack_study

    made, where, fingerprints = planned(study, store, reads=True)
    results = None if only == "*" else matching(made, only)
    packed = pack_study(made, where, fingerprints, file, results=results, examples=not without_examples)
    for why in packed.left_out:
        tell(f"left out: {why}")
    give(as_json, lambda: {"file": str(file), **asdict(packed)}, lambda: _packed(packed, file))


def _packed(packed: PackSummary, file: Path) -> str:
    from biphase.text import counted, si

    parts = []
    if packed.scores_planned:
        bare = ", without values by example" if packed.bare and packed.bare == packed.scores else ""
        parts.append(f"{packed.scores:,} of {counted(packed.scores_planned, 'score')}{bare}")
    if packed.jobs_planned:
        parts.append(f"{packed.jobs:,} of {counted(packed.jobs_planned, 'checkpoint')}, without weights")
    parts += [counted(packed.corpora, "card") + " of corpora"] if packed.corpora else []
    parts += [counted(packed.failures, "failure")] if packed.failures else []
    sizes = f"{si(packed.bytes)}B, {si(packed.unpacked)}B unpacked"
    return f"{packed.study}: {'; '.join(parts)}\n{file}: {sizes}. On the other machine: biphase ledger merge {file.name}"


@ledger.command()
def merge(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="what `ledger pack` has written")],
    store: StoreFolder = DEFAULT_STORE,
    as_json: AsJson = False,
) -> None:
    """What was packed elsewhere, into this store. What is here stays; may be killed and repeated."""
    from dataclasses import asdict

    from biphase.store import Store
    from biphase.study.archive import check
    from biphase.study.archive import merge as merge_parcel

    checked = [check(file) for file in files]  # check all files before anything is written
    merged = [merge_parcel(one, Store.open(store)) for one in checked]
    if as_json:
        told = [{"file": str(file), **asdict(one)} for file, one in zip(files, merged, strict=True)]
        print(json.dumps(told, indent=1, default=str))
        return
    for file, one in zip(files, merged, strict=True):
        show(_merged(one, file))
    for plan in dict.fromkeys(one.plan for one in merged):
        show(f"What they show: biphase report {with_store(plan, store)}")


def _merged(merged: Merged, file: Path) -> str:
    from biphase.text import counted, si

    words = {
        "scores": counted(merged.added["scores"], "score"),
        "checkpoints": counted(merged.added["checkpoints"], "checkpoint") + " without weights",
        "corpora": counted(merged.added["corpora"], "card") + " of corpora",
    }
    new = ", ".join(words[kind] for kind, number in merged.added.items() if number) or "nothing"
    size = f" ({si(merged.bytes)}B)" if merged.bytes else ""
    lines = [
        f"{merged.study}: new from {file}: {new}{size}; {counted(merged.already, 'result')} here already"
    ]
    if merged.kept:
        lines.append(f"  {len(merged.kept):,} here with other content, kept as they are here:")
        lines += [f"    {one}" for one in merged.kept[:SHOWN]]
        lines += [f"    and {len(merged.kept) - SHOWN:,} more (--json)"] if len(merged.kept) > SHOWN else []
    return "\n".join(lines)


# ---------------------------------------------------------------- report


Out = Annotated[
    Path | None,
    typer.Option(help="folder to write into; default: report/ beside the study's plan in the store"),
]
Watch = Annotated[
    bool, typer.Option("--watch", help="serve the page on this machine and refresh it while the study runs")
]


@app.command()
def report(
    study: StudyFile,
    store: StoreFolder = DEFAULT_STORE,
    out: Out = None,
    print_figures: Annotated[
        bool, typer.Option("--print/--no-print", help="also draw the figures for print: SVG and PDF")
    ] = True,
    watch: Watch = False,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="with --watch; 0: any that is free")] = 8_642,
    as_json: AsJson = False,
) -> None:
    """Statistics, verdicts, figures and tables of a study, on one page that needs no network."""
    from biphase.report.build import build

    _check_packages({"jinja2": "jinja2", "vl_convert": "vl-convert-python"})
    made, where, _ = planned(study, store, reads=True)
    folder = out or where.studies / made.study.name / "report"
    if watch:
        from biphase.report.watch import serve

        serve(lambda: planned(study, store)[0], where, folder, port=port, say=tell)
        return
    built = build(made, where, folder, static=print_figures)
    give(as_json, built.to_json, built.words)


def _check_packages(packages: dict[str, str]) -> None:
    """Refuse early if modules are missing that only the report needs; `packages`: module → its name for pip."""
    from importlib.util import find_spec

    from biphase.errors import SpecError

    missing = [package for module, package in packages.items() if find_spec(module) is None]
    if missing:
        raise SpecError(
            f"the page needs {' and '.join(missing)}, not installed here; type pip install {' '.join(missing)}, "
            "or copy the store to a machine that has them and make the report there"
        )
