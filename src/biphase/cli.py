"""The verbs. Results go to stdout, progress to stderr; every refusal is one line that ends with what to type.

Exit codes: 0 done, 1 jobs failed, 2 wrong use. Imports stand inside the functions, so that a verb pays for
what it needs: `plan`, `status` and `--help` never import torch.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from biphase.files import Store
    from biphase.keys import Identities
    from biphase.study.plan import Plan
    from biphase.training.pretrain import Manner

app = typer.Typer(
    help="biphase: the workbench for pretraining text encoders.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

StudyFile = Annotated[
    Path, typer.Argument(metavar="STUDY", help="a study file (.py), or the plan.json of one")
]
StoreFolder = Annotated[
    Path, typer.Option("--store", envvar="BIPHASE_STORE", help="the folder of all results", show_default=True)
]
AsJson = Annotated[bool, typer.Option("--json", help="for a program to read")]
DEFAULT_STORE = Path("store")


def main() -> None:
    """Run a verb; a refusal becomes one line and exit code 2."""
    from biphase.errors import BiphaseError

    try:
        app(standalone_mode=True)
    except BiphaseError as refusal:
        _tell(f"error: {refusal}")
        sys.exit(2)
    except KeyboardInterrupt:
        _tell("stopped at once; what was published is whole, the rest will be computed again")
        sys.exit(130)
    except OSError as wrong:
        if isinstance(wrong, BrokenPipeError):  # the reader of our output has gone, e.g. `| head`
            sys.stderr.close()
            sys.exit(0)
        _tell(
            f"error: {wrong.filename or 'the disk'}: {wrong.strerror or wrong}; free room there, or choose another --store"
        )
        sys.exit(2)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _plan(path: Path, store_folder: Path) -> tuple[Plan, Store, Identities]:
    from biphase.files import Store
    from biphase.study.identities import identities
    from biphase.study.load import load
    from biphase.study.plan import make_plan

    loaded = load(path)
    store = Store(store_folder)
    fingerprints = identities(store)
    return make_plan(loaded.study, fingerprints, loaded.question), store, fingerprints


@app.command()
def plan(
    study: StudyFile,
    store: StoreFolder = DEFAULT_STORE,
    device: Annotated[str, typer.Option(help="price the work on this device")] = "h200",
    efficiency: Annotated[
        float, typer.Option(min=0.001, max=1, help="share of its peak that is reached")
    ] = 0.4,
    as_json: AsJson = False,
) -> None:
    """The tree: what is shared, what is done, what the rest costs. Runs nothing."""
    from biphase.study.leaves import count
    from biphase.study.ledger import done_keys
    from biphase.study.tree import plan_json, render

    made, where, _ = _plan(study, store)
    done, tuned = done_keys(made, where), count(made, where).done
    if as_json:
        told = plan_json(made, done=done, tuned=tuned, device=device, efficiency=efficiency)
        print(json.dumps(told, indent=1))
    else:
        print(
            render(
                made, done=done, tuned=tuned, device=device, efficiency=efficiency, command_path=str(study)
            )
        )


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
    loaders: Annotated[int, typer.Option(min=0, help="threads that prepare batches")] = 1,
    micro_batch: Annotated[int, typer.Option(min=0, help="rows at a time; 0: what suits the device")] = 0,
    checkpoint: Annotated[
        str, typer.Option(metavar="TIME|STEPS", help="how often to save on the way")
    ] = "10m",
    compiled: Annotated[bool | None, typer.Option("--compile/--no-compile", help="default: on CUDA")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress while a piece runs")] = False,
) -> None:
    """Compute what is missing, with progress. Stop and start freely."""
    import os

    from biphase.study import launch

    made, where, fingerprints = _plan(study, store)
    wanted = _wanted(made, only)
    steps, seconds = launch.checkpoint_rule(checkpoint)
    limit = launch.seconds(for_time) if for_time else None
    if processes > 1 and "RANK" not in os.environ:
        _check_processes(made, wanted, processes)
        sys.exit(launch.in_processes(processes, sys.argv[1:]))

    from biphase.training.pretrain import Manner

    manner = Manner(
        loaders=loaders,
        micro_rows=micro_batch,
        checkpoint_steps=steps,
        checkpoint_seconds=seconds,
        compiled=compiled,
        quiet=quiet,
    )
    results = _matching(made, only)
    _work(made, where, fingerprints, manner, wanted, results, limit=limit, command=f"run {study}")


def _work(
    made: Plan,
    where: Store,
    fingerprints: Identities,
    manner: Manner,
    wanted: set[str],
    results: set[str],
    *,
    limit: float | None,
    command: str,
    as_json: bool = False,
) -> None:
    """Compute what is missing of a plan, here; then say what came out, and end."""
    from dataclasses import replace

    from biphase.study import launch
    from biphase.study.plan import save_plan
    from biphase.study.summary import closing, opening, status_json
    from biphase.study.worker import Worker
    from biphase.training import devices

    ranks = devices.join()
    say = _tell if ranks.first else lambda text: None
    if ranks.first:
        save_plan(made, where)
    ranks.wait()
    manner = replace(manner, stop=launch.Stop(limit, say))
    say(opening(made, where))
    worker = Worker(made, where, fingerprints, ranks, manner, wanted=wanted, evaluated=results, say=say)
    outcome = worker.work()
    if ranks.first:
        text = closing(made, where, outcome.failed, stopped=outcome.stopped, command=command)
        print(json.dumps(status_json(made, where), indent=1) if as_json else text, flush=True)
    devices.leave()
    sys.exit(1 if outcome.failed else 0)


def _check_processes(made: Plan, wanted: set[str], processes: int) -> None:
    """Refuse here what would otherwise be refused by every process at once."""
    import torch

    from biphase.errors import SpecError

    devices = torch.cuda.device_count()
    if devices and processes > devices:
        raise SpecError(
            f"--processes {processes}: this machine has {devices} GPUs; type --processes {devices}"
        )
    for key in wanted:
        run = made.states[key].run
        if run.rows_per_step < processes:
            raise SpecError(
                f"--processes {processes}: run {run.name!r} has {run.rows_per_step} rows a step, one for each at most; "
                f"type --processes {run.rows_per_step}"
            )


def _wanted(made: Plan, only: str) -> set[str]:
    """The states on the way to every result whose name matches."""
    return {state.key for key in _matching(made, only) for state in made.path(key)}


def _matching(made: Plan, only: str) -> set[str]:
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
def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="a folder, owner/name@commit, or the first digits of a key")
    ],
    tasks: Annotated[
        str,
        typer.Option(
            help="tasks by name, 'paper', a family (SC, TC, QA, IR), or a folder or file of your own"
        ),
    ],
    store: StoreFolder = DEFAULT_STORE,
    lrs: Annotated[str, typer.Option(help="learning rates, by commas")] = "1e-5,2e-5,5e-5,1e-4,2e-4,5e-4",
    seeds: Annotated[str, typer.Option(help="seeds, by commas, or how many as 0-4")] = "0-4",
    steps: Annotated[int, typer.Option(min=0, help="fine-tune each task for so many steps; 0: its own")] = 0,
    protocol: Annotated[str, typer.Option(help="standard or paper: docs/tasks.md")] = "standard",
    precision: Annotated[
        str, typer.Option(help="fp32, bf16 or pure-bf16; default: the protocol's, fp32 on a CPU")
    ] = "",
    length: Annotated[
        int, typer.Option(min=0, help="longest input in tokens; 0: 99% of the model's context")
    ] = 0,
    documents: Annotated[
        str, typer.Option(help="retrieve among judged or all; default: the protocol's")
    ] = "",
    data: Annotated[
        Path | None, typer.Option(help="read known tasks from local copies here, where it has them")
    ] = None,
    test: Annotated[Path | None, typer.Option(help="own data: the file to be scored by")] = None,
    family: Annotated[
        str, typer.Option(help="own data: SC, TC, QA or IR, where the columns do not tell")
    ] = "",
    text: Annotated[
        str,
        typer.Option(
            help="own data: the text column or a template; TC: the words; QA: before the context; IR: documents"
        ),
    ] = "",
    label: Annotated[str, typer.Option(help="own data: the column of labels, tags or answers")] = "",
    labels: Annotated[str, typer.Option(help="own data: names of numbered labels, in order, by commas")] = "",
    trained_on: Annotated[
        str,
        typer.Option(help="own retrieval data with nothing to train on: the task whose model is scored"),
    ] = "",
    for_time: Annotated[
        str, typer.Option("--for", metavar="TIME", help="stop cleanly after e.g. 9m or 2h")
    ] = "",
    processes: Annotated[int, typer.Option(min=1, help="fine-tune in this many processes at once")] = 1,
    quiet: Annotated[bool, typer.Option("--quiet", help="no live line")] = False,
    as_json: AsJson = False,
) -> None:
    """Fine-tune and score any encoder or decoder on tasks: learning rates × seeds, to a table with intervals."""
    import os

    from biphase.files import Store
    from biphase.study import launch
    from biphase.study.evaluation import evaluation, finetuning
    from biphase.study.identities import identities
    from biphase.study.plan import make_plan
    from biphase.study.tasks import tasks_named

    limit = launch.seconds(for_time) if for_time else None
    asked = tasks_named(
        tasks,
        data=data,
        family=family,
        text=text,
        label=label,
        labels=labels,
        test=test,
        trained_on=trained_on,
        steps=steps,
    )
    where = Store(store)
    grid = finetuning(asked, lrs, seeds, protocol, precision, documents, length)
    fingerprints = identities(where)
    made = make_plan(evaluation(model, grid, where), fingerprints)
    if processes > 1 and "RANK" not in os.environ:
        sys.exit(launch.in_processes(processes, sys.argv[1:]))

    from biphase.training.pretrain import Manner

    command = shlex.join(["evaluate", *sys.argv[2:]])
    _work(
        made, where, fingerprints, Manner(quiet=quiet), set(), set(made.results.values()),
        limit=limit, command=command, as_json=as_json,
    )  # fmt: skip


@app.command()
def status(study: StudyFile, store: StoreFolder = DEFAULT_STORE, as_json: AsJson = False) -> None:
    """Done, running, failed, left, and the time to go."""
    from biphase.study.summary import status_json, status_text

    made, where, _ = _plan(study, store)
    if as_json:
        print(json.dumps(status_json(made, where), indent=1))
    else:
        print(status_text(made, where, command_path=str(study)))


@app.command()
def tokenize(
    corpus: Annotated[
        str, typer.Argument(metavar="CORPUS", help="a corpus name, a file, a folder or hf://…")
    ],
    store: StoreFolder = DEFAULT_STORE,
    tokenizer: Annotated[
        str, typer.Option(help="bpe:32000 trains one; or a folder, a tokenizer.json, or owner/name@revision")
    ] = "",
    text: Annotated[str, typer.Option(help="the column or field that holds the text")] = "",
    heldout: Annotated[
        str, typer.Option(help="a file, folder or pattern to hold out, beside the corpus")
    ] = "",
    from_folder: Annotated[Path | None, typer.Option("--from", help="a local copy of a hub corpus")] = None,
    processes: Annotated[int, typer.Option(min=0, help="0: one per core")] = 0,
) -> None:
    """Corpus → shards, in parallel; may be killed and started again."""
    import time

    from biphase.data.identity import shards_key, write_link
    from biphase.data.shards import Shards
    from biphase.data.tokenize import tokenize as make_shards
    from biphase.files import Store
    from biphase.leases import Leases
    from biphase.study.corpora import corpus_named, shards_text

    made = corpus_named(corpus, tokenizer=tokenizer, text=text, heldout=heldout)
    where = Store(store)
    if from_folder is not None:
        write_link(made, where, from_folder)
    key = shards_key(made, where)
    leases = Leases(where.leases)
    while (lease := leases.take(f"shards-{key}")) is None:
        time.sleep(1)  # somebody else makes them
    with lease:
        folder = make_shards(made, where, processes=processes, report=_tell, lost=lambda: lease.lost)
    print(shards_text(Shards.open(folder), folder))


@app.command()
def doctor(store: StoreFolder = DEFAULT_STORE, as_json: AsJson = False) -> None:
    """Machine, versions, data: what is missing and the command that fixes it."""
    from dataclasses import asdict

    from biphase.doctor import examine, render
    from biphase.files import Store

    findings = examine(Store(store))
    print(json.dumps([asdict(one) for one in findings], indent=1) if as_json else render(findings))
    sys.exit(1 if any(one.ok is False for one in findings) else 0)
