"""The verbs of a study file and its store: `papers`, `new`, `plan`, `run`, `status`, `stop`, `report`, `split`, `ledger pack`, `ledger merge`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from biphase.cli.app import (
    DEFAULT_STORE,
    NO_TRACK,
    AsJson,
    Device,
    ForTime,
    Head,
    Node,
    Nodes,
    Processes,
    Profile,
    Quiet,
    StoreFolder,
    StudyFile,
    Tasks,
    TextColumn,
    Tokenizer,
    Track,
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
    from biphase.keys import Identities
    from biphase.store import Store
    from biphase.study.archive import Merged
    from biphase.study.plan import Plan
    from biphase.study.worker import Outcome
    from biphase.training.options import RuntimeOptions

Only = Annotated[str, Option(help="only results whose name matches, e.g. 'clm-10k-*'")]


@app.command()
def papers(
    store_folder: StoreFolder = DEFAULT_STORE,
    device: Device = "",
) -> None:
    """List the papers whose claims a study can test, and what the studies that come with them would cost."""
    from biphase import papers
    from biphase.errors import BiphaseError
    from biphase.specs.study import PAPERS
    from biphase.store import Store
    from biphase.study.describe import brief
    from biphase.study.devices import device_named
    from biphase.study.load import studies_of
    from biphase.study.prices import bill

    if device:
        device_named(device, Store.open(store_folder))  # refuses an unknown one
    for name in PAPERS:
        paper, sources = papers.load(name), studies_of(name)
        show(f"{name}: {paper.authors}, {paper.title} ({paper.venue}); {len(paper.statements)} claims")
        for source in sources:
            try:
                made, store, _ = planned(Path(source), store_folder)
                line = brief(made, bill(made, store, device, None, tuned=0))
            except BiphaseError as refusal:  # of a model or of text that is not here
                line = str(refusal)
            show(f"  biphase plan {with_store(Path(source), store_folder)}: {line}")
    show('A study names the papers whose claims it tests: Study(…, papers="detour").')


@app.command()
def new(
    question: str = Argument(..., help="two-stage, ratio, adapt, evaluate or continue"),
    file: Path | None = Argument(None, metavar="[FILE]", help="file to write; default: QUESTION.py"),
    store_folder: StoreFolder = DEFAULT_STORE,
    hours: float = Option(
        0.0, min=0, max=10_000_000, help="hours of one device: chooses seeds, steps and batch"
    ),
    device: Device = "",
    size: str = Option("", help="of new models, e.g. 30m or modernbert-base; default: 30m, on a CPU 1m"),
    model: list[str] = Option([], help="adapt, evaluate, continue: folder or owner/name@commit"),
    corpus: str = Option("", help="name, file or folder; default: fineweb-edu-10b, on a CPU builtin"),
    text: TextColumn = "",
    tokenizer: Tokenizer = "",
    tasks: Tasks = "",
) -> None:
    """Write a study file for a question, to be read and changed before it is run."""
    from biphase.errors import SpecError
    from biphase.store import Store
    from biphase.study.build import Wishes, written
    from biphase.study.describe import brief

    file = file or Path(f"{question}.py")
    if file.suffix != ".py" or file.exists():
        problem = "is there already" if file.exists() else "is no Python file"
        raise SpecError(f"{file} {problem}; name another: biphase new {question} {file.stem}-2.py")
    wishes = Wishes(question, file.stem, corpus, text, tokenizer, size, tuple(model), tasks, hours, device)
    made, plan, priced = written(wishes, Store.open(store_folder))
    with file.open("x", encoding="utf-8") as new_file:
        new_file.write(made)
    show(f"{file}: {brief(plan, priced)}")
    for note in priced.notes:
        tell(f"  {note}")
    show(f"next: biphase plan {with_store(file, store_folder)}" + (f" --device {device}" if device else ""))


@app.command()
def plan(
    study_file: StudyFile,
    store_folder: StoreFolder = DEFAULT_STORE,
    device: Device = "",
    efficiency: float | None = Option(
        None, min=0.001, max=1, help="estimate from FLOPs at this share of the device's peak, e.g. 0.4"
    ),
    gpus: int = Option(
        0, min=0, help="elapsed time on this many GPUs, and memory and time of one job on all"
    ),
    price: float = Option(0.0, min=0, help="what one device costs an hour: prices the study and its runs"),
    verify: Verify = False,
    as_json: AsJson = False,
) -> None:
    """Show the training jobs of a study, their costs, and what its claims will detect. Computes nothing."""
    from biphase.papers import papers_of
    from biphase.report import verdicts
    from biphase.report.evidence import gather
    from biphase.study.describe import plan_json, render
    from biphase.study.ledger import count, settled
    from biphase.study.many_gpus import ManyGpus, gpus_at_hand
    from biphase.study.prices import bill

    plan, store, _ = planned(study_file, store_folder, verify=verify)
    tuned = count(plan, store)
    done = settled(plan, store, tuned)
    device = device or (gpus_at_hand() if gpus else "")
    priced = bill(plan, store, device, efficiency, tuned=tuned.done, workers=gpus)
    claims = []
    if tuned.done < tuned.of:
        claims = verdicts.prospects(plan, gather(plan, store) if tuned.done else None, papers_of(plan.study))
    scaled = ManyGpus(plan, store, gpus, device) if gpus else None
    if as_json:
        facts = plan_json(plan, done=done, tuned=tuned, bill=priced, price=price)
        facts |= {"claims": verdicts.as_json(claims)} | ({"gpus": scaled.as_json()} if scaled else {})
        print(json.dumps(facts, indent=1))
        return
    lines, path = verdicts.render(claims) if claims else [], with_store(study_file, store_folder)
    show(render(plan, done=done, tuned=tuned, bill=priced, command_path=path, claims=lines, price=price))
    if scaled:
        show("\n".join(scaled.render()))


@app.command()
def run(
    study_file: StudyFile,
    store_folder: StoreFolder = DEFAULT_STORE,
    only: Only = "*",
    for_time: ForTime = "",
    processes: Processes = 1,
    nodes: Nodes = 1,
    node: Node = 0,
    head: Head = "",
    shard: str = Option(
        "none",
        metavar="none|full|hybrid[:K]",
        help="distribute weights and optimizer state over the processes (FSDP2)",
    ),
    recompute: bool = Option(
        False, "--recompute", help="recompute activations: less memory, a third more FLOPs"
    ),
    loaders: int = Option(1, min=0, help="threads that prepare batches"),
    micro_batch: int = Option(0, min=0, help="rows per micro-batch; 0: chosen by memory"),
    checkpoint: str = Option("10m", metavar="TIME|STEPS", help="time or steps between checkpoints"),
    compiled: bool | None = Option(
        None, "--compile/--no-compile", help="torch.compile; default: on CUDA without our own kernels"
    ),
    deterministic: bool = Option(
        False, "--deterministic", help="bitwise reproducible pretraining on a GPU; slower"
    ),
    quiet: Quiet = False,
    track: Track = NO_TRACK,
    verify: Verify = False,
    slurm: Profile = None,
) -> None:
    """Compute what is missing. Stop it at any time; the same command resumes."""
    if deterministic:  # cuBLAS reads it once, at its first matrix product
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    from biphase.cluster import launch
    from biphase.cluster.machines import Machines
    from biphase.training.options import RuntimeOptions, Sharding

    machines = Machines.named(nodes, node, head)
    plan, store, identities = planned(study_file, store_folder, ask=True, verify=verify)
    results = matching(plan, only)
    jobs = plan.needed_for(results)
    steps, seconds = launch.checkpoint_rule(checkpoint)
    limit = launch.seconds(for_time) if for_time else None
    sharding = Sharding.named(shard)
    if slurm:
        typed = {
            "--only": only, "--for": for_time, "--loaders": loaders, "--micro-batch": micro_batch,
            "--checkpoint": checkpoint, "--compile": compiled, "--deterministic": deterministic,
            "--shard": shard, "--recompute": recompute, "--quiet": quiet, "--track": ",".join(track),
        }  # fmt: skip
        _submit(
            plan, store, slurm, {"processes": processes, "nodes": nodes}, with_store(study_file, store_folder), jobs=jobs, results=results,
            options=typed, sharding=sharding,
        )  # fmt: skip
        return
    options = RuntimeOptions(
        loaders=loaders, micro_rows=micro_batch, checkpoint_steps=steps, checkpoint_seconds=seconds,
        compiled=compiled, deterministic=deterministic, sharding=sharding, recompute=recompute, quiet=quiet,
        track=tuple(track),
    )  # fmt: skip
    compute(
        plan, store, identities, options, jobs=jobs, results=results, processes=processes, machines=machines,
        limit=limit, command=f"run {with_store(study_file, store_folder)}" + ("" if only == "*" else f" --only {shlex.quote(only)}"),
        study=with_store(study_file, store_folder),
    )  # fmt: skip


def matching(plan: Plan, only: str) -> set[str]:
    """Return the checkpoint keys of the results whose name matches."""
    from fnmatch import fnmatch

    from biphase.errors import SpecError, nearest

    keys = {key for name, key in plan.results.items() if fnmatch(name, only)}
    if not keys:
        raise SpecError(
            f"no result of {plan.study.name} matches --only {only!r}; {nearest(only, plan.results)}"
        )
    return keys


def compute(
    plan: Plan,
    store: Store,
    identities: Identities,
    options: RuntimeOptions,
    *,
    command: str,
    study: str,
    as_json: bool = False,
    more: Callable[[Plan], list[str]] = lambda plan: [],
    more_json: Callable[[Plan], dict[str, Any]] = lambda plan: {},
    **work: Any,
) -> None:
    """Run a worker, print its outcome, and exit.

    `command`, `study`: what was typed, and the study as typed after a verb. `more`, `more_json`: output that the calling
    verb adds. `work`: further arguments of `run_plan`.
    """
    from biphase.study.describe import closing, status_json
    from biphase.study.run import run_plan

    def summarize(outcome: Outcome) -> None:
        text = closing(
            plan, store, outcome.failed, stopped=outcome.stopped, command=command, study=study,
            unsaved=outcome.unsaved,
        )  # fmt: skip
        give(
            as_json,
            lambda: more_json(plan) | status_json(plan, store),
            lambda: "\n".join([text, *more(plan)]),
        )

    run_plan(plan, store, identities, options, say=tell, summarize=summarize, **work)


def _submit(
    plan: Plan, store: Store, profile: Path, counts: dict[str, int], command_path: str, **work: Any
) -> None:
    """Submit Slurm workers and print what was submitted; `work`: further arguments of `submit_workers`."""
    from biphase.errors import SpecError
    from biphase.study.run import submit_workers

    for name, count in counts.items():
        if count > 1:
            raise SpecError(f"--{name} and --slurm do not go together; type {name} = {count} in {profile}")
    lines = submit_workers(plan, store, profile, **work)
    if lines:
        lines += [f"How it goes: biphase status {command_path}", f"To end it: biphase stop {command_path}"]
    else:
        only = work["options"]["--only"]
        which = "" if only == "*" else f" that matches --only {only!r}"
        lines = [
            f"all of {plan.study.name}{which} is done: nothing to submit. What it shows: biphase report {command_path}"
        ]
    show("\n".join(lines))


@app.command()
def status(
    study_file: StudyFile,
    store_folder: StoreFolder = DEFAULT_STORE,
    verify: Verify = False,
    as_json: AsJson = False,
) -> None:
    """Show what is done, running, failed and left, the time left, and losses and scores so far."""
    from biphase.cluster import slurm
    from biphase.study.describe import status_json, status_text

    plan, store, _ = planned(study_file, store_folder, reads=True, verify=verify)
    jobs = slurm.queue_of(store, plan.study.name)
    cluster = slurm.lines(jobs, slurm.folder(store, plan.study.name))
    give(
        as_json,
        lambda: status_json(plan, store) | {"slurm": slurm.as_json(jobs)},
        lambda: status_text(plan, store, command_path=with_store(study_file, store_folder), cluster=cluster),
    )


@app.command()
def stop(
    study_file: StudyFile,
    store_folder: StoreFolder = DEFAULT_STORE,
    wait: str = Option("5m", metavar="TIME", help="how long to wait for the workers to end"),
) -> None:
    """Stop all workers of a study, also in Slurm, after their current step and with a checkpoint."""
    from biphase.cluster.launch import seconds
    from biphase.cluster.workers import WorkerStopper
    from biphase.study.load import load

    limit = seconds(wait)
    name = load(study_file).study.name
    ended = WorkerStopper(store_at(store_folder), name, say=tell).stop(limit)
    command_path = with_store(study_file, store_folder)
    if ended.problem:
        tell(f"  Slurm: {ended.problem}; running jobs will still see the request")
    if ended.silent:
        tell(f"  {ended.silent} of them had no heartbeat for a minute and count as gone")
    if ended.left:
        for worker in ended.left:
            show(f"still there: {worker}")
        show(
            "they were asked to stop and will; to kill them, type kill -9 PID on their machine, or scancel JOB"
        )
        sys.exit(1)
    if ended.asked:
        show(f"stopped; results and checkpoints are kept. To resume: biphase run {command_path}")
    else:
        show(f"no worker of {name} runs{', as far as can be seen here' if ended.problem else ''}")


@app.command()
def report(
    study_file: StudyFile,
    store_folder: StoreFolder = DEFAULT_STORE,
    out: Path | None = Option(None, help="folder to write to; default: studies/NAME/report in the store"),
    print_figures: bool = Option(True, "--print/--no-print", help="also draw the figures as SVG and PDF"),
    watch: bool = Option(
        False, "--watch", help="serve the page from this machine and refresh it while the study runs"
    ),
    port: int = Option(8_642, min=0, max=65_535, help="with --watch; 0: any free port"),
    as_json: AsJson = False,
) -> None:
    """Write the report of a study: verdicts, statistics, figures and tables, as one offline HTML page."""
    from biphase.report.build import build

    plan, store, _ = planned(study_file, store_folder, reads=True)
    folder = out or store.studies / plan.study.name / "report"
    if watch:
        from biphase.report.build import serve

        serve(lambda: planned(study_file, store_folder)[0], store, folder, port=port, say=tell)
        return
    built = build(plan, store, folder, static=print_figures)
    give(as_json, built.to_json, built.words)


@app.command()
def split(
    study_file: StudyFile,
    store_folder: StoreFolder = DEFAULT_STORE,
    loss: float | None = Option(
        None, min=0.01, max=100, help="points that a nearly best split may lose; default: the study's effect"
    ),
    device: Device = "",
    as_json: AsJson = False,
) -> None:
    """Find the best share of CLM before MLM at a fixed budget, and what to train next. Trains nothing."""
    from biphase.report.evidence import gather
    from biphase.report.splits import best_splits, render, to_json

    plan, store, identities = planned(study_file, store_folder)
    answers = best_splits(gather(plan, store), identities, loss, device)
    path = with_store(study_file, store_folder)
    give(
        as_json,
        lambda: {"study": plan.study.name, "splits": [to_json(answer) for answer in answers]},
        lambda: "\n\n".join([f"{plan.study.name}: {plan.question}", *(render(one, path) for one in answers)]),
    )


# ---------------------------------------------------------------- ledger


ledger = typer.Typer(help="Move results between machines as one file.", no_args_is_help=True)
app.add_typer(ledger, name="ledger")

SHOWN = 5  # results listed of those that a merge left unchanged


@ledger.command()
def pack(
    study_file: StudyFile,
    file: Path = Argument(..., metavar="FILE", help="file to write, e.g. results.tar.zst"),
    store_folder: StoreFolder = DEFAULT_STORE,
    only: Only = "*",
    without_predictions: bool = Option(
        False, "--without-predictions", help="leave out predictions, which no report needs"
    ),
    as_json: AsJson = False,
) -> None:
    """Pack what a report of the study needs elsewhere, without weights, into one file."""
    from dataclasses import asdict

    from biphase.study import archive
    from biphase.text import counted, si

    plan, store, identities = planned(study_file, store_folder, reads=True)
    results = None if only == "*" else matching(plan, only)
    packed = archive.pack(plan, store, identities, file, results=results, predictions=not without_predictions)
    for reason in packed.left_out:
        tell(f"left out: {reason}")
    text = (
        f"{packed.study}: {packed.scores:,} of {counted(packed.scores_planned, 'score')}, {packed.jobs:,} of "
        f"{counted(packed.jobs_planned, 'checkpoint')} without weights, {counted(packed.corpora, 'card')} of corpora\n"
        f"{file}: {si(packed.bytes)}B. On the other machine: biphase ledger merge {file.name}"
    )
    give(as_json, lambda: {"file": str(file), **asdict(packed)}, lambda: text)


@ledger.command()
def merge(
    files: list[Path] = Argument(..., metavar="FILE...", help="files from `ledger pack`"),
    store_folder: StoreFolder = DEFAULT_STORE,
    as_json: AsJson = False,
) -> None:
    """Merge packed results into this store. Results that are here stay as they are; safe to repeat."""
    from dataclasses import asdict

    from biphase.store import Store
    from biphase.study import archive

    checked = [archive.check(file) for file in files]  # check all files before anything is written
    merged = [archive.merge(contents, Store.open(store_folder)) for contents in checked]
    give(
        as_json,
        lambda: [{"file": str(file), **asdict(result)} for file, result in zip(files, merged, strict=True)],
        lambda: "\n".join(_merged(result, file) for file, result in zip(files, merged, strict=True)),
    )
    if not as_json:
        for path in dict.fromkeys(result.plan for result in merged):
            show(f"What they show: biphase report {with_store(path, store_folder)}")


def _merged(merged: Merged, file: Path) -> str:
    from biphase.text import counted

    scores, jobs, cards = (
        counted(merged.added[kind], noun)
        for kind, noun in (("scores", "score"), ("checkpoints", "checkpoint"), ("corpora", "card"))
    )
    lines = [
        f"{merged.study}: from {file}: {scores}, {jobs} without weights and {cards} of corpora are new; "
        f"{counted(merged.already, 'result')} here already"
    ]
    lines += [f"  kept as it is here: {result}" for result in merged.kept[:SHOWN]]
    lines += [f"  and {len(merged.kept) - SHOWN:,} more (--json)"] if len(merged.kept) > SHOWN else []
    return "\n".join(lines)
