"""The verbs `adapt`, `evaluate`, `compare`, `export` and `verify`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from biphase.cli.app import DEFAULT_STORE, AsJson, StoreFolder, app, give, show, store_at, tell, with_store
from biphase.cli.study import NO_TRACK, ForTime, Quiet, Track, compute

if TYPE_CHECKING:
    from biphase.report.comparison import Difference
    from biphase.report.evidence import Evidence
    from biphase.specs import Finetune, Study
    from biphase.store import Store
    from biphase.study.plan import Plan

Model = Annotated[
    str,
    Argument(metavar="MODEL", help="folder, owner/name@commit, or first digits of a checkpoint's key"),
]
Keep = Annotated[
    int,
    Option(
        "--discard", min=0, metavar="K", help="screen the learning rates briefly, keep the best K; 0: all"
    ),
]
Data = Annotated[Path | None, Option(help="folder with local copies of known tasks")]


@app.command()
def adapt(
    model: Model,
    corpus: str = Option(
        "", help="corpus by name, a file or folder, or several with weights: ./web=3,./code=1"
    ),
    steps: int = Option(1_000, min=0, help="optimizer steps; 0: none, with --pairs"),
    store_folder: StoreFolder = DEFAULT_STORE,
    objective: str = Option("mlm", help="mlm, or mntp: predict each masked token one position before"),
    ratio: float = Option(0.4, help="share of tokens that is masked"),
    lr: float = Option(0.0, min=0, help="peak learning rate; 0: 2e-4, or 1e-3 with --lora"),
    length: int = Option(0, min=0, help="tokens per row; 0: the model's context, at most 1,024"),
    batch: int = Option(0, min=0, help="rows per step; 0: 32"),
    warmup: float = Option(0.05, min=0, max=0.99, help="share of the steps"),
    decay: float = Option(0.2, min=0, max=0.99, help="share of the steps, at the end"),
    lora: int = Option(0, min=0, help="train LoRA adapters of this rank; 0: all weights"),
    freeze_embeddings: bool = Option(False, "--freeze-embeddings", help="do not train the embeddings"),
    layer_decay: float = Option(1.0, help="learning rate of a layer as a share of that of the layer above"),
    rope_base: float = Option(0.0, min=0, help="base of the rotary embeddings; 0: unchanged"),
    windows: str = Option("symmetric", help="make sliding windows symmetric, or full attention"),
    gguf: str = Option("", metavar="FILE", help="read this GGUF file of the folder or repository"),
    text: str = Option("", help="column or field with the text"),
    heldout: str = Option("", help="held-out file or folder; default: 1 document of 1,000"),
    heldout_tokens: int = Option(0, min=0, help="tokens for held-out losses; 0: 131,072, on a CPU 8,192"),
    tokens: int = Option(0, min=0, help="tokenize at most this many tokens; 0: the whole corpus"),
    precision: str = Option("", help="fp32 or bf16; default: bf16, on a CPU fp32"),
    seed: int = Option(42, help="of data order, masks and new weights"),
    pairs: str = Option("", help="then train embeddings on these text pairs: a file, or a retrieval task"),
    pair_steps: int = Option(500, min=1, help="with --pairs: optimizer steps"),
    pair_batch: int = Option(256, min=2, help="with --pairs: pairs per step; the others are the negatives"),
    pair_lr: float = Option(
        0.0, min=0, help="with --pairs: peak learning rate; 0: 5e-5, or 5e-4 with --lora"
    ),
    temperature: float = Option(0.05, help="with --pairs: of the contrastive loss"),
    tasks: str = Option("", help="fine-tune before and after on these tasks, as `evaluate` does"),
    lrs: str = Option("2e-5,5e-5,1e-4", help="with --tasks: learning rates, comma-separated"),
    seeds: str = Option("0-2", help="with --tasks: seeds as 0,1,2 or 0-2; a single number is one seed"),
    task_steps: int = Option(0, min=0, help="with --tasks: steps per task; 0: the task's own"),
    discard: Keep = 0,
    data: Data = None,
    for_time: ForTime = "",
    processes: int = Option(1, min=1, help="processes that train together (torchrun)"),
    quiet: Quiet = False,
    track: Track = NO_TRACK,
    as_json: AsJson = False,
) -> None:
    """Turn a decoder into an encoder by continued masked pretraining, and with --pairs into an embedding model."""
    from biphase.cluster import launch
    from biphase.store import Store
    from biphase.study.build import AdaptOptions, adaptation, before_after, finetuning
    from biphase.study.datasets import tasks_named

    limit = launch.seconds(for_time) if for_time else None
    options = AdaptOptions(
        steps=steps, objective=objective, ratio=ratio, lr=lr, length=length, batch_rows=batch, warmup=warmup,
        decay=decay, lora=lora, freeze_embeddings=freeze_embeddings, layer_decay=layer_decay, rope_base=rope_base,
        precision=precision, seed=seed, heldout_tokens=heldout_tokens, corpus=corpus, text=text, heldout=heldout,
        tokens=tokens, gguf=gguf, windows=windows, pairs=pairs, pair_steps=pair_steps, pair_batch=pair_batch,
        pair_lr=pair_lr, temperature=temperature,
    )  # fmt: skip
    chosen = tasks_named(tasks, data=data, steps=task_steps) if tasks else ()
    grid = finetuning(chosen, lrs, seeds, "standard", "", "", 0, discard) if chosen else None
    store = Store.open(store_folder)
    study = adaptation(model, options, store, grid)
    at = "" if with_store(Path("x"), store_folder) == "x" else f" --store {shlex.quote(str(store_folder))}"
    _compute(
        "adapt", study, store, pretrains=True, quiet=quiet, track=track, processes=processes, limit=limit, as_json=as_json,
        more=lambda plan: before_after(plan, store, at),
        more_json=lambda plan: {"key": plan.results[study.runs[-1].name]},
    )  # fmt: skip


LRS, SEEDS = "1e-5,2e-5,5e-5,1e-4,2e-4,5e-4", "0-4"


@app.command()
def evaluate(
    model: Model,
    tasks: str = Option(
        "",
        help="tasks by name, 'paper', a family (SC, TC, QA, IR, SR, ML, MC), or a folder or file of your own",
    ),
    preset: str = Option("", help="a paper's protocol on GLUE: bert-glue, roberta-glue or modernbert-glue"),
    store_folder: StoreFolder = DEFAULT_STORE,
    lrs: str = Option("", help="learning rates, comma-separated", show_default=LRS),
    seeds: str = Option("", help="seeds as 0,1,2 or 0-2; a single number is one seed", show_default=SEEDS),
    steps: int = Option(0, min=0, help="fine-tuning steps per task; 0: the task's own"),
    epochs: int = Option(0, min=0, help="fine-tuning epochs per task, instead of steps"),
    discard: Keep = 0,
    protocol: str = Option("standard", help="standard or paper, see docs/tasks.md"),
    precision: str = Option("", help="fp32, bf16 or pure-bf16; default: the protocol's, on a CPU fp32"),
    length: int = Option(0, min=0, help="longest input in tokens; 0: 99% of the model's context"),
    documents: str = Option("", help="retrieve among judged or all; default: the protocol's"),
    data: Data = None,
    test: Path | None = Option(None, help="own data: file with the test examples"),
    family: str = Option("", help="own data: SC, TC, QA, IR, SR, ML or MC, if the columns are ambiguous"),
    text: str = Option(
        "",
        help="own data: text column or template; TC: column of words; QA: text before the context; IR: documents",
    ),
    label: str = Option("", help="own data: column of labels, tags, answers or numbers"),
    labels: str = Option("", help="own data: names of numbered labels in order, comma-separated"),
    query: str = Option("", help="own retrieval data: template of the queries"),
    trained_on: str = Option(
        "", help="own data: score the model fine-tuned on this task, without training on the folder"
    ),
    zero_shot: bool = Option(False, "--zero-shot", help="retrieval: score the model without training"),
    dry_run: bool = Option(False, "--dry-run", help="print how the data are read, and stop"),
    for_time: ForTime = "",
    processes: int = Option(1, min=1, help="processes that fine-tune in parallel"),
    quiet: Quiet = False,
    track: Track = NO_TRACK,
    as_json: AsJson = False,
) -> None:
    """Fine-tune any encoder or decoder on tasks over learning rates and seeds, and score it with intervals."""
    from biphase.cluster import launch
    from biphase.papers import PRESETS
    from biphase.store import Store
    from biphase.study.build import evaluation, finetuning, lengths_of
    from biphase.study.datasets import OwnData, tasks_named
    from biphase.study.load import run_named

    limit = launch.seconds(for_time) if for_time else None
    own = OwnData(family, text, label, labels, test, trained_on, query, zero_shot)
    known = PRESETS[preset] if preset else None
    tasks = tasks or ",".join(task.name for task in known.tasks) if known else tasks
    chosen = tasks_named(tasks, own, data=data, steps=steps, lrs=lrs, seeds=seeds)
    chosen = lengths_of(chosen, known, steps, epochs)
    default = ("1e-5", "0") if zero_shot else (LRS, SEEDS)  # zero-shot scores do not depend on the rate
    default = (",".join(map(str, known.lrs)), SEEDS) if known else default
    precision = precision or ("fp32" if dry_run else "")  # a dry run needs no device
    grid = finetuning(
        chosen,
        lrs or default[0],
        seeds or default[1],
        protocol,
        precision,
        documents,
        length,
        discard,
        known,
    )
    store = Store.open(store_folder)
    if dry_run:
        run_named(model, store, note=False)
        _describe_datasets(grid, as_json=as_json)
        return
    _compute(
        "evaluate", evaluation(model, grid, store), store, pretrains=False, quiet=quiet, track=track, processes=processes,
        limit=limit, as_json=as_json, describe_tasks=True,
    )  # fmt: skip


@app.command()
def compare(
    models: list[str] = Argument(
        ..., metavar="MODEL OTHER...", help="folders, owner/name@commit, or first digits of checkpoints' keys"
    ),
    tasks: str = Option(
        ...,
        help="tasks by name, 'paper', a family (SC, TC, QA, IR, SR, ML, MC), or a folder or file of your own",
    ),
    store_folder: StoreFolder = DEFAULT_STORE,
    lrs: str = Option("1e-5,3e-5,1e-4", help="learning rates, comma-separated"),
    seeds: str = Option(SEEDS, help="seeds as 0,1,2 or 0-2; a single number is one seed"),
    steps: int = Option(0, min=0, help="fine-tuning steps per task; 0: the task's own"),
    effect: float = Option(1.0, min=0.01, max=99, help="a difference worth finding, in points"),
    discard: Keep = 0,
    precision: str = Option("", help="fp32, bf16 or pure-bf16; default: bf16, on a CPU fp32"),
    length: int = Option(0, min=0, help="longest input in tokens; 0: 99% of the model's context"),
    documents: str = Option("", help="retrieve among judged or all; default: judged"),
    data: Data = None,
    for_time: ForTime = "",
    processes: int = Option(1, min=1, help="processes that fine-tune in parallel"),
    quiet: Quiet = False,
    track: Track = NO_TRACK,
    as_json: AsJson = False,
) -> None:
    """Fine-tune two or more models on the same tasks, and say on which the others differ from the first."""
    from biphase.cluster import launch
    from biphase.report.comparison import compare as differences
    from biphase.report.comparison import render
    from biphase.report.evidence import gather
    from biphase.store import Store
    from biphase.study.build import comparison, finetuning
    from biphase.study.datasets import tasks_named

    limit = launch.seconds(for_time) if for_time else None
    chosen = tasks_named(tasks, data=data, steps=steps, lrs=lrs, seeds=seeds)
    grid = finetuning(chosen, lrs, seeds, "standard", precision, documents, length, discard)
    store = Store.open(store_folder)

    def compared(plan: Plan) -> tuple[Evidence, list[Difference]]:
        evidence = gather(plan, store)
        return evidence, differences(evidence)

    _compute(
        "compare", comparison(models, grid, store, effect), store, pretrains=False, quiet=quiet, track=track, processes=processes,
        limit=limit, as_json=as_json, describe_tasks=True,
        more=lambda plan: render(*compared(plan)),
        more_json=lambda plan: {"differences": [one.to_json() for one in compared(plan)[1]]},
    )  # fmt: skip


def _compute(
    verb: str, study: Study, store: Store, *, pretrains: bool, quiet: bool, track: list[str], **work: Any
) -> None:
    """Compute a study of models; `pretrains`: also its training jobs. `work`: further arguments of `compute`."""
    from biphase.study.plan import PLAN, identities, make_plan
    from biphase.training.options import RuntimeOptions

    known = identities(store)
    plan = make_plan(study, known)
    compute(
        plan, store, known, RuntimeOptions(quiet=quiet, track=tuple(track)), jobs=set(plan.jobs) if pretrains else set(),
        results=set(plan.results.values()), command=shlex.join([verb, *sys.argv[2:]]),
        study=with_store(store.studies / study.name / PLAN, store.root), **work,
    )  # fmt: skip


def _describe_datasets(grid: Finetune, *, as_json: bool) -> None:
    """Print how the datasets of a grid are read, and the number of fine-tunings, without computing anything."""
    from dataclasses import asdict

    from biphase.study.datasets import describe
    from biphase.text import counted

    datasets = [describe(task, download=True) for task in grid.tasks]
    trained = sum(task.is_trained for task in grid.tasks) * grid.rates * len(grid.seeds)
    count = counted(trained, "fine-tuning") if trained else counted(len(datasets), "score")
    count += f" and {counted(grid.screenings, 'short one')}" if grid.screenings else ""
    lines = [line for dataset in datasets for line in dataset.lines()]
    lines.append(
        f"{count} would be made; nothing was computed or written. To compute: the same without --dry-run"
    )
    give(as_json, lambda: [asdict(dataset) for dataset in datasets], lambda: "\n".join(lines))


@app.command()
def export(
    key: str = Argument(
        ..., metavar="KEY", help="first digits of the key of a checkpoint, or of a trial (fine-tuned)"
    ),
    folder: Path = Argument(..., metavar="FOLDER", help="folder to write; must not exist"),
    store_folder: StoreFolder = DEFAULT_STORE,
    task: str = Option(
        "", help="of a checkpoint: its model fine-tuned on this task, chosen by validation scores"
    ),
    onnx: bool = Option(False, "--onnx", help="also write onnx/model.onnx"),
    push: str = Option("", metavar="REPO", help="then upload it to the hub as owner/name, private"),
    public: bool = Option(False, "--public", help="with --push: visible to everybody"),
    revision: str = Option(
        "", metavar="BRANCH", help="with --push: upload to this branch, such as step-2000"
    ),
) -> None:
    """Write a trained model as a folder for transformers and sentence-transformers, verified by loading it."""
    from biphase.errors import SpecError
    from biphase.export.card import trial_for_task
    from biphase.export.folder import SavedTrial, check_push, find, is_exported, refuse_taken, upload

    if (public or revision) and not push:
        raise SpecError(
            "--public and --revision say how --push uploads; type --push owner/name, or leave them out"
        )
    store = store_at(store_folder)
    model = find(key, store)
    if task and isinstance(model, SavedTrial):
        raise SpecError(f"--task {task}: {key} is the key of a fine-tuned model already; leave out --task")
    if task:
        model = trial_for_task(model.key, task, store)
    if push:
        check_push(push, revision)
    if push and is_exported(folder, model.key, onnx=onnx):
        show(upload(folder, push, public=public, say=tell, revision=revision))
        return
    refuse_taken(folder)
    if onnx:
        from biphase.export.writing import check_onnx_packages

        check_onnx_packages()
    if isinstance(model, SavedTrial):
        from biphase.export.tuned import export_tuned

        exported = export_tuned(model, store, folder, onnx=onnx, say=tell)
    else:
        from biphase.export.checkpoint import export_checkpoint

        exported = export_checkpoint(model, store, folder, onnx=onnx, say=tell)
    show(exported.describe())
    if push:
        show(upload(folder, push, public=public, say=tell, revision=revision))


@app.command()
def verify(
    folder: Path = Argument(..., metavar="FOLDER", help="folder that `biphase export` wrote"),
    tools: list[str] = Option(
        [], "--with", metavar="TOOL",
        help="transformers, sentence-transformers, onnx or mteb; repeatable; default: all that apply",
    ),
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Compute the test vectors of an exported folder again with other tools, and say what differs."""
    from dataclasses import asdict

    from biphase.errors import SpecError
    from biphase.export import vectors

    recorded = vectors.read(folder)
    refused = {tool: vectors.why_not(tool, folder, recorded) for tool in tools or vectors.TOOLS}
    for tool, why in refused.items():
        if why and tools:
            raise SpecError(f"--with {tool}: {why}")
        tell(f"not checked with {tool}: {why}" if why else "")
    results = [vectors.verify(folder, tool) for tool, why in refused.items() if not why]
    give(
        as_json,
        lambda: [asdict(result) for result in results],
        lambda: "\n".join(result.describe() for result in results),
    )
    sys.exit(1 if any(result.differs for result in results) else 0)
