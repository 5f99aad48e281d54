"""The verbs `adapt`, `evaluate` and `export`."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from biphase.cli.app import DEFAULT_STORE, AsJson, StoreFolder, app, show, store_at, tell, with_store
from biphase.cli.study import prepare, work

if TYPE_CHECKING:
    from biphase.specs import Study

AdaptedModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="a folder, owner/name or owner/name@commit, or the first digits of a key"
    ),
]
CorpusName = Annotated[
    str, typer.Option(help="a known corpus, or a file or folder of text, jsonl or parquet")
]
Objective = Annotated[str, typer.Option(help="mlm, or mntp: hidden tokens asked for one position before")]
Rate = Annotated[float, typer.Option(min=0, help="peak learning rate; 0: 2e-4, or 1e-3 with --lora")]
RowLength = Annotated[int, typer.Option(min=0, help="tokens of a row; 0: the model's context, at most 1,024")]
Windows = Annotated[str, typer.Option(help="sliding windows become symmetric, or full attention")]
Gguf = Annotated[str, typer.Option(metavar="FILE", help="read this GGUF file of the folder or repository")]
AdaptTasks = Annotated[
    str, typer.Option(help="fine-tune before and after on these tasks, as `evaluate` does")
]
TextField = Annotated[str, typer.Option(help="the column or field of the text")]
HeldOut = Annotated[str, typer.Option(help="a held-out file or folder; default: 1 document of 1,000")]
HeldOutTokens = Annotated[
    int, typer.Option(min=0, help="measure held-out losses on so many; 0: 131,072, on a CPU 8,192")
]
Freeze = Annotated[bool, typer.Option("--freeze-embeddings", help="leave them as they are")]
AdaptForTime = Annotated[str, typer.Option("--for", metavar="TIME", help="stop cleanly after e.g. 9m or 2h")]
Tokens = Annotated[int, typer.Option(min=0, help="stop tokenizing after so many; 0: all of the corpus")]


@app.command()
def adapt(
    model: AdaptedModel,
    corpus: CorpusName = "",
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps")] = 1_000,
    store: StoreFolder = DEFAULT_STORE,
    objective: Objective = "mlm",
    ratio: Annotated[float, typer.Option(help="share of tokens that is hidden")] = 0.4,
    lr: Rate = 0.0,
    length: RowLength = 0,
    batch: Annotated[int, typer.Option(min=0, help="rows of a step; 0: 32")] = 0,
    warmup: Annotated[float, typer.Option(min=0, max=0.99, help="share of the steps")] = 0.05,
    decay: Annotated[float, typer.Option(min=0, max=0.99, help="share of the steps, at the end")] = 0.2,
    lora: Annotated[int, typer.Option(min=0, help="train LoRA adapters of this rank; 0: all weights")] = 0,
    freeze_embeddings: Freeze = False,
    layer_decay: Annotated[float, typer.Option(help="each layer's rate as a share of the one above")] = 1.0,
    rope_base: Annotated[float, typer.Option(min=0, help="base of the rotary positions; 0: as it is")] = 0.0,
    windows: Windows = "symmetric",
    gguf: Gguf = "",
    text: TextField = "",
    heldout: HeldOut = "",
    heldout_tokens: HeldOutTokens = 0,
    tokens: Tokens = 0,
    precision: Annotated[str, typer.Option(help="fp32 or bf16; default: bf16, on a CPU fp32")] = "",
    seed: Annotated[int, typer.Option(help="of the order of the text, the masks and new weights")] = 42,
    tasks: AdaptTasks = "",
    lrs: Annotated[str, typer.Option(help="with --tasks: learning rates, by commas")] = "2e-5,5e-5,1e-4",
    seeds: Annotated[str, typer.Option(help="with --tasks: seeds, by commas, or as 0-4")] = "0-2",
    task_steps: Annotated[int, typer.Option(min=0, help="with --tasks: steps of each; 0: its own")] = 0,
    data: Annotated[Path | None, typer.Option(help="with --tasks: local copies of known tasks")] = None,
    for_time: AdaptForTime = "",
    processes: Annotated[int, typer.Option(min=1, help="train in this many processes (torchrun)")] = 1,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress while it runs")] = False,
    as_json: AsJson = False,
) -> None:
    """Make an encoder of an existing decoder by masked continued pretraining; a study of one run."""
    from biphase.cluster import launch
    from biphase.store import Store
    from biphase.study.build import AdaptOptions, CorpusOptions, adaptation, finetuning
    from biphase.study.names import tasks_named

    limit = launch.seconds(for_time) if for_time else None
    wishes = AdaptOptions(
        steps=steps, objective=objective, ratio=ratio, lr=lr, length=length, batch_rows=batch, warmup=warmup,
        decay=decay, lora=lora, freeze_embeddings=freeze_embeddings, layer_decay=layer_decay, rope_base=rope_base,
        precision=precision, seed=seed, heldout_tokens=heldout_tokens,
    )  # fmt: skip
    asked = tasks_named(tasks, data=data, steps=task_steps) if tasks else ()
    grid = finetuning(asked, lrs, seeds, "standard", "", "", 0) if asked else None
    read = CorpusOptions(corpus, text, heldout, tokens)
    study = adaptation(model, read, wishes, Store.open(store), gguf=gguf, windows=windows, finetune=grid)
    _work(study, store, processes, limit=limit, quiet=quiet, as_json=as_json)


def _work(
    study: Study, store: Path, processes: int, *, limit: float | None, quiet: bool, as_json: bool
) -> None:
    from biphase.store import Store
    from biphase.study.build import before_after
    from biphase.study.plan import PLAN, identities, make_plan

    where = Store.open(store)
    fingerprints = identities(where)
    made = make_plan(study, fingerprints)
    heartbeat = prepare(made, where, processes, runs=[state.run for state in made.jobs.values()])

    from biphase.training.options import RuntimeOptions

    at = "" if with_store(Path("x"), store) == "x" else f" --store {shlex.quote(str(store))}"
    work(
        made, where, fingerprints, RuntimeOptions(quiet=quiet), set(made.jobs), set(made.results.values()),
        heartbeat=heartbeat, limit=limit, command=shlex.join(["adapt", *sys.argv[2:]]),
        study=with_store(where.studies / made.study.name / PLAN, store), as_json=as_json,
        more=lambda: before_after(made, where, at), more_json=lambda: {"key": made.results[made.study.runs[-1].name]},
    )  # fmt: skip


# ---------------------------------------------------------------- evaluate


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
    from biphase.cluster import launch
    from biphase.store import Store
    from biphase.study.build import evaluation, finetuning
    from biphase.study.names import run_named, tasks_named
    from biphase.study.plan import PLAN, identities, make_plan

    limit = launch.seconds(for_time) if for_time else None
    asked = tasks_named(
        tasks, data=data, family=family, text=text, label=label, labels=labels, test=test, trained_on=trained_on,
        query=query, lrs=lrs, seeds=seeds, steps=steps, zero_shot=zero_shot,
    )  # fmt: skip
    usual = ("1e-5", "0") if zero_shot else (LRS, SEEDS)  # zero-shot scores do not depend on the rate
    lrs, seeds = lrs or usual[0], seeds or usual[1]
    where = Store.open(store)
    precision = precision or ("fp32" if dry_run else "")  # a dry run needs no device
    grid = finetuning(asked, lrs, seeds, protocol, precision, documents, length)
    if dry_run:
        run_named(model, where, note=False)
        _tell_only(grid, as_json=as_json)
        return
    fingerprints = identities(where)
    made = make_plan(evaluation(model, grid, where), fingerprints)
    heartbeat = prepare(made, where, processes, runs=[], describe=True)

    from biphase.training.options import RuntimeOptions

    command = shlex.join(["evaluate", *sys.argv[2:]])
    work(
        made, where, fingerprints, RuntimeOptions(quiet=quiet), set(), set(made.results.values()),
        heartbeat=heartbeat, limit=limit, command=command, study=with_store(where.studies / made.study.name / PLAN, store), as_json=as_json,
    )  # fmt: skip


def _tell_only(grid: Finetune, *, as_json: bool) -> None:
    """Describe the datasets of a grid and the number of fine-tunings, without computing anything."""
    from dataclasses import asdict

    from biphase.study.datasets import describe
    from biphase.text import counted

    every = describe(grid.tasks, download=True)
    if as_json:
        print(json.dumps([asdict(one) for one in every], indent=1))
        return
    trained = sum(task.is_trained for task in grid.tasks) * len(grid.lrs) * len(grid.seeds)
    made = counted(trained, "fine-tuning") if trained else counted(len(every), "score")
    print("\n".join(line for one in every for line in one.lines()))
    print(f"{made} would be made; nothing was computed or written. To compute: the same without --dry-run")


# ---------------------------------------------------------------- export


Key = Annotated[
    str,
    typer.Argument(metavar="KEY", help="the first digits of the key of a state, or of a trial (fine-tuned)"),
]
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="where to write; must not be there yet")]
TaskName = Annotated[
    str, typer.Option(help="of a state: its fine-tuned model for this task, chosen by validation scores")
]
Push = Annotated[str, typer.Option(metavar="REPO", help="then upload it to the hub, as owner/name; private")]


@app.command()
def export(
    key: Key,
    folder: Folder,
    store: StoreFolder = DEFAULT_STORE,
    task: TaskName = "",
    onnx: Annotated[bool, typer.Option("--onnx", help="also write onnx/model.onnx")] = False,
    push: Push = "",
    public: Annotated[bool, typer.Option("--public", help="with --push: for everybody to see")] = False,
) -> None:
    """A trained model as a transformers and sentence-transformers folder, with its card; read again before it is kept."""
    from biphase.errors import SpecError
    from biphase.export.card import trial_for_task
    from biphase.export.folder import SavedTrial, find, refuse_taken

    if public and not push:
        raise SpecError(
            "--public says who may see what --push uploads; type --push owner/name, or leave it out"
        )
    where = store_at(store)
    refuse_taken(folder)
    found = find(key, where)
    if task and isinstance(found, SavedTrial):
        raise SpecError(f"--task {task}: {key} is the key of a fine-tuned model already; leave out --task")
    if task:
        found = trial_for_task(found.key, task, where)
    if push:
        from biphase.export.folder import check_push

        check_push(push)
    if onnx:
        from biphase.export.writing import check_onnx_packages

        check_onnx_packages()
    if isinstance(found, SavedTrial):
        from biphase.export.tuned import export_tuned

        made = export_tuned(found, where, folder, onnx=onnx, say=tell)
    else:
        from biphase.export.checkpoint import export_checkpoint

        made = export_checkpoint(found, where, folder, onnx=onnx, say=tell)
    show(made.describe())
    if push:
        from biphase.export.folder import upload

        show(upload(folder, push, public=public, say=tell))
