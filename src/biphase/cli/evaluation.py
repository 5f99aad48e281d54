"""`evaluate`: any model on any tasks."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from biphase.cli.app import DEFAULT_STORE, AsJson, StoreFolder, app, with_store
from biphase.cli.studies import prepare, work

if TYPE_CHECKING:
    from biphase.specs import Finetune

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="a folder, owner/name@commit, or the first digits of a key")
]
Tasks = Annotated[
    str,
    typer.Option(help="tasks by name, 'paper', a family (SC, TC, QA, IR), or a folder or file of your own"),
]
Precision = Annotated[
    str, typer.Option(help="fp32, bf16 or pure-bf16; default: the protocol's, fp32 on a CPU")
]
Length = Annotated[int, typer.Option(min=0, help="longest input in tokens; 0: 99% of the model's context")]
Documents = Annotated[str, typer.Option(help="retrieve among judged or all; default: the protocol's")]
Data = Annotated[Path | None, typer.Option(help="read known tasks from local copies here, where it has them")]
OwnFamily = Annotated[str, typer.Option(help="own data: SC, TC, QA or IR, where the columns do not tell")]
OwnText = Annotated[
    str,
    typer.Option(
        help="own data: the text column or a template; TC: the words; QA: before the context; IR: documents"
    ),
]
TrainedOn = Annotated[
    str, typer.Option(help="own data: the task whose model is scored; nothing is trained on the folder")
]
ZeroShot = Annotated[
    bool, typer.Option("--zero-shot", help="retrieval: score the model as it is, without training")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="say what the data are read as, and stop")]
ForTime = Annotated[str, typer.Option("--for", metavar="TIME", help="stop cleanly after e.g. 9m or 2h")]
LRS, SEEDS = "1e-5,2e-5,5e-5,1e-4,2e-4,5e-4", "0-4"


@app.command()
def evaluate(
    model: Model,
    tasks: Tasks,
    store: StoreFolder = DEFAULT_STORE,
    lrs: Annotated[str, typer.Option(help="learning rates, by commas", show_default=LRS)] = "",
    seeds: Annotated[str, typer.Option(help="seeds, by commas, or how many as 0-4", show_default=SEEDS)] = "",
    steps: Annotated[int, typer.Option(min=0, help="fine-tune each task for so many steps; 0: its own")] = 0,
    protocol: Annotated[str, typer.Option(help="standard or paper: docs/tasks.md")] = "standard",
    precision: Precision = "",
    length: Length = 0,
    documents: Documents = "",
    data: Data = None,
    test: Annotated[Path | None, typer.Option(help="own data: the file to be scored by")] = None,
    family: OwnFamily = "",
    text: OwnText = "",
    label: Annotated[str, typer.Option(help="own data: the column of labels, tags or answers")] = "",
    labels: Annotated[str, typer.Option(help="own data: names of numbered labels, in order, by commas")] = "",
    query: Annotated[str, typer.Option(help="own retrieval data: the template of queries")] = "",
    trained_on: TrainedOn = "",
    zero_shot: ZeroShot = False,
    dry_run: DryRun = False,
    for_time: ForTime = "",
    processes: Annotated[int, typer.Option(min=1, help="fine-tune in this many processes at once")] = 1,
    quiet: Annotated[bool, typer.Option("--quiet", help="no live line")] = False,
    as_json: AsJson = False,
) -> None:
    """Fine-tune and score any encoder or decoder on tasks: learning rates × seeds, to a table with intervals."""
    from biphase.files import Store
    from biphase.study import launch
    from biphase.study.evaluation import evaluation, finetuning
    from biphase.study.identities import identities
    from biphase.study.model_names import run_named
    from biphase.study.plan import PLAN, make_plan
    from biphase.study.tasks import tasks_named

    limit = launch.seconds(for_time) if for_time else None
    asked = tasks_named(
        tasks, data=data, family=family, text=text, label=label, labels=labels, test=test, trained_on=trained_on,
        query=query, lrs=lrs, seeds=seeds, steps=steps, zero_shot=zero_shot,
    )  # fmt: skip
    usual = ("1e-5", "0") if zero_shot else (LRS, SEEDS)  # nothing depends on the first
    lrs, seeds = lrs or usual[0], seeds or usual[1]
    where = Store(store)
    precision = precision or ("fp32" if dry_run else "")  # what is not computed needs no look at the device
    grid = finetuning(asked, lrs, seeds, protocol, precision, documents, length)
    if dry_run:
        run_named(model, where, note=False)
        _tell_only(grid, as_json=as_json)
        return
    fingerprints = identities(where)
    made = make_plan(evaluation(model, grid, where), fingerprints)
    presence = prepare(made, where, processes, runs=[], describe=True)

    from biphase.training.manner import Manner

    command = shlex.join(["evaluate", *sys.argv[2:]])
    work(
        made, where, fingerprints, Manner(quiet=quiet), set(), set(made.results.values()),
        presence=presence, limit=limit, command=command, study=with_store(where.studies / made.study.name / PLAN, store), as_json=as_json,
    )  # fmt: skip


def _tell_only(grid: Finetune, *, as_json: bool) -> None:
    """What the datasets of a grid are read as, and how often a model would be fine-tuned on them."""
    from dataclasses import asdict

    from biphase.study.datasets import describe
    from biphase.wording import counted

    every = describe(grid.tasks, download=True)
    if as_json:
        print(json.dumps([asdict(one) for one in every], indent=1))
        return
    trained = sum(task.is_trained for task in grid.tasks) * len(grid.lrs) * len(grid.seeds)
    made = counted(trained, "fine-tuning") if trained else counted(len(every), "score")
    print("\n".join(line for one in every for line in one.lines()))
    print(f"{made} would be made; nothing was computed or written. To compute: the same without --dry-run")
