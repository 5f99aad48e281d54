"""`evaluate`: any model on any tasks."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from biphase.cli.app import DEFAULT_STORE, AsJson, StoreFolder, app, with_store
from biphase.cli.studies import prepare, work

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
    str,
    typer.Option(help="own retrieval data: the task whose model is scored; nothing is trained on the folder"),
]
ForTime = Annotated[str, typer.Option("--for", metavar="TIME", help="stop cleanly after e.g. 9m or 2h")]


@app.command()
def evaluate(
    model: Model,
    tasks: Tasks,
    store: StoreFolder = DEFAULT_STORE,
    lrs: Annotated[str, typer.Option(help="learning rates, by commas")] = "1e-5,2e-5,5e-5,1e-4,2e-4,5e-4",
    seeds: Annotated[str, typer.Option(help="seeds, by commas, or how many as 0-4")] = "0-4",
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
    trained_on: TrainedOn = "",
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
    from biphase.study.plan import PLAN, make_plan
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
    presence = prepare(made, where, processes, runs=[])

    from biphase.training.manner import Manner

    command = shlex.join(["evaluate", *sys.argv[2:]])
    work(
        made, where, fingerprints, Manner(quiet=quiet), set(), set(made.results.values()),
        presence=presence, limit=limit, command=command, study=with_store(where.studies / made.study.name / PLAN, store), as_json=as_json,
    )  # fmt: skip
