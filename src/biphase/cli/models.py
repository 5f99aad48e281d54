"""The verbs of models and machines: `adapt`, `evaluate`, `compare`, `export`, `verify`, `tokenize`, `doctor`, `validate`, `bench`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from biphase.cli.app import (
    DEFAULT_STORE,
    NO_TRACK,
    AsJson,
    ForTime,
    Head,
    Heldout,
    Node,
    Nodes,
    Processes,
    Profile,
    Quiet,
    StoreFolder,
    Tasks,
    TextColumn,
    Tokenizer,
    Track,
    app,
    give,
    show,
    store_at,
    tell,
    with_store,
)
from biphase.cli.study import compute
from biphase.errors import SpecError

if TYPE_CHECKING:
    from biphase.specs import Finetune, Study
    from biphase.store import Store
    from biphase.study.plan import Plan

Keep = Annotated[
    int,
    Option(
        "--discard", min=0, metavar="K", help="screen the learning rates briefly, keep the best K; 0: all"
    ),
]
USUAL_RATES = {"evaluate": "1e-5,2e-5,5e-5,1e-4,2e-4,5e-4", "compare": "1e-5,3e-5,1e-4"}
USUAL_SEEDS = "0-4"
Rates = Annotated[
    str,
    Option(
        help="learning rates of fine-tuning, comma-separated; usually "
        + ", ".join(f"{rates} ({verb})" for verb, rates in USUAL_RATES.items())
    ),
]
Seeds = Annotated[
    str,
    Option(help=f"of fine-tuning, as 0,1,2 or 0-2; a single number is one seed; usually {USUAL_SEEDS}"),
]
Data = Annotated[Path | None, Option(help="folder with local copies of known tasks")]


@app.command()
def adapt(
    model: str = Argument(
        ..., metavar="MODEL", help="folder, owner/name@commit, or first digits of a checkpoint's key"
    ),
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
    text: TextColumn = "",
    heldout: Heldout = "",
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
    lrs: Rates = "2e-5,5e-5,1e-4",
    seeds: Seeds = "0-2",
    task_steps: int = Option(0, min=0, help="with --tasks: steps per task; 0: the task's own"),
    discard: Keep = 0,
    data: Data = None,
    for_time: ForTime = "",
    processes: Processes = 1,
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
    at = with_store(Path(), store_folder).removeprefix(".")
    _compute(
        "adapt", study, store, pretrains=True, quiet=quiet, track=track, processes=processes, limit=limit, as_json=as_json,
        more=lambda plan: before_after(plan, store, at),
        more_json=lambda plan: {"key": plan.results[study.runs[-1].name]},
    )  # fmt: skip


@app.command(
    "compare",
    help="Fine-tune two or more models on the same tasks, and say on which the others differ from the first.",
)
@app.command()
def evaluate(
    context: typer.Context,
    models: list[str] = Argument(
        ...,
        metavar="MODEL [OTHER...]",
        help="folder, owner/name@commit, or first digits of a checkpoint's key; `compare` takes several",
    ),
    tasks: Tasks = "",
    preset: str = Option("", help="a paper's protocol on GLUE: bert-glue, roberta-glue or modernbert-glue"),
    store_folder: StoreFolder = DEFAULT_STORE,
    lrs: Rates = "",
    seeds: Seeds = "",
    steps: int = Option(0, min=0, help="fine-tuning steps per task; 0: the task's own"),
    epochs: int = Option(0, min=0, help="fine-tuning epochs per task, instead of steps"),
    effect: float | None = Option(
        None, min=0.01, max=99, help="compare: a difference worth finding, in points", show_default="1"
    ),
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
    processes: Processes = 1,
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

    verb = context.info_name or ""
    compares = verb == "compare"
    if not compares and (effect or len(models) > 1):
        raise SpecError(f"evaluate scores one model; several: biphase compare {shlex.join(models)}")
    limit = launch.seconds(for_time) if for_time else None
    own = OwnData(family, text, label, labels, test, trained_on, query, zero_shot)
    known = PRESETS[preset] if preset else None
    tasks = tasks or (",".join(task.name for task in known.tasks) if known else "")
    chosen = tasks_named(tasks, own, data=data, steps=steps, lrs=lrs, seeds=seeds)
    rates, usual = (
        ("1e-5", "0") if zero_shot else (USUAL_RATES[verb], USUAL_SEEDS)
    )  # a score without training has neither
    grid = finetuning(
        lengths_of(chosen, known, steps, epochs), lrs or ("" if known else rates), seeds or usual, protocol,
        precision or ("fp32" if dry_run else ""),  # a dry run needs no device
        documents, length, discard, known,
    )  # fmt: skip
    store = Store.open(store_folder)
    if dry_run:
        for model in models:
            run_named(model, store, note=False)
        _describe_datasets(grid, len(models), as_json=as_json)
        return
    study = evaluation(models, grid, store, (effect or 1.0) if compares else None)
    _compute(
        verb, study, store, pretrains=False, quiet=quiet, track=track, processes=processes, limit=limit, as_json=as_json,
        describe_tasks=True, **(_differences(store) if compares else {}),
    )  # fmt: skip


def _differences(store: Store) -> dict[str, Any]:
    """Return what `compare` prints below the scores, as further arguments of `compute`."""
    from biphase.report.comparison import Difference, compare, render
    from biphase.report.evidence import Evidence, gather

    def compared(plan: Plan) -> tuple[Evidence, list[Difference]]:
        evidence = gather(plan, store)
        return evidence, compare(evidence)

    return {
        "more": lambda plan: render(*compared(plan)),
        "more_json": lambda plan: {"differences": [one.to_json() for one in compared(plan)[1]]},
    }


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


def _describe_datasets(grid: Finetune, models: int, *, as_json: bool) -> None:
    """Print how the datasets of a grid are read, and the fine-tunings of so many models, without computing anything."""
    from dataclasses import asdict

    from biphase.study.datasets import describe
    from biphase.text import counted

    datasets = [describe(task, download=True) for task in grid.tasks]
    trained = models * sum(task.is_trained for task in grid.tasks) * grid.rates * len(grid.seeds)
    count = counted(trained, "fine-tuning") if trained else counted(models * len(datasets), "score")
    count += f" and {counted(models * grid.screenings, 'short one')}" if grid.screenings else ""
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


# ---------------------------------------------------------------- machines


@app.command()
def tokenize(
    corpus: str = Argument(
        ..., metavar="CORPUS|STUDY", help="corpus by name, a file, a folder, hf://…, or a study's .py"
    ),
    store_folder: StoreFolder = DEFAULT_STORE,
    tokenizer: Tokenizer = "",
    text: TextColumn = "",
    heldout: Heldout = "",
    from_folder: Path | None = Option(None, "--from", help="local copy of a hub corpus"),
    processes: int = Option(0, min=0, help="0: one per core"),
) -> None:
    """Tokenize a corpus, or those of a study, in parallel. Stop it at any time; the same command resumes."""
    import time

    from biphase.data.corpus import shards_key, write_link
    from biphase.data.shards import Shards
    from biphase.data.tokenize import tokenize as make_shards
    from biphase.leases import Leases
    from biphase.store import Store
    from biphase.study.describe import shards_text
    from biphase.study.load import corpus_named, load
    from biphase.study.plan import corpora_of

    if corpus.endswith(".py"):
        if tokenizer or text or heldout or from_folder:
            raise SpecError(f"{corpus} says how its corpora are read; type: biphase tokenize {corpus}")
        corpora = corpora_of(load(Path(corpus)).study)
    else:
        corpora = [corpus_named(corpus, tokenizer=tokenizer, text=text, heldout=heldout)]
    store = Store.open(store_folder)
    leases = Leases(store.leases)
    for each in corpora:
        if from_folder is not None:
            write_link(each, store, from_folder)
        key = shards_key(each, store)
        while (lease := leases.take(f"shards-{key}")) is None:
            time.sleep(1)  # another process is making them
        with lease:
            folder = make_shards(each, store, processes=processes, report=tell, lost=lambda: lease.lost)
        show(shards_text(Shards.open(folder), folder))


@app.command()
def doctor(store_folder: StoreFolder = DEFAULT_STORE, as_json: AsJson = False) -> None:
    """Check this machine, its packages and the store, and print the command that fixes each problem."""
    from dataclasses import asdict

    from biphase.doctor import examine, render
    from biphase.store import Store

    diagnoses = examine(Store.open(store_folder))
    give(as_json, lambda: [asdict(diagnosis) for diagnosis in diagnoses], lambda: render(diagnoses))
    sys.exit(1 if any(diagnosis.ok is False for diagnosis in diagnoses) else 0)


@app.command()
def validate(
    store_folder: StoreFolder = DEFAULT_STORE,
    processes: Processes = 1,
    nodes: Nodes = 1,
    node: Node = 0,
    head: Head = "",
    link: float = Option(0.0, min=0, help="GB/s that sums must reach half of; default: as known of the GPUs"),
    study: bool = Option(True, "--study/--no-study", help="run the small study, killed, resumed and sharded"),
    slurm: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Test the machines, links and shared folder that a run will use. Leaves nothing in the store."""
    import os

    from biphase import validate
    from biphase.cluster.machines import Machines
    from biphase.store import Store

    store = Store.open(store_folder)
    if slurm:
        show(_submit_validation(store, slurm, link, study=study, as_json=as_json))
        return
    machines = Machines.named(nodes, node, head)
    validation = validate.Validation(store, processes, machines, link, study, tell)
    if validate.RESULT in os.environ:
        validation.group()
    rows = validation.check()
    give(as_json, lambda: validation.facts(rows), lambda: validation.page(rows))
    sys.exit(1 if any(row.ok is False for row in rows) else 0)


def _submit_validation(store: Store, profile: Path, link: float, *, study: bool, as_json: bool) -> str:
    from biphase.cluster import slurm

    root = store.root.resolve()
    arguments = ["validate", "--store", str(root), "--link", str(link)]
    arguments += [] if study else ["--no-study"]
    arguments += ["--json"] if as_json else []
    id, script = slurm.submit(slurm.read_profile(profile), store, "validate", jobs=1, arguments=arguments)
    return f"submitted job {id}; the page will be in {script.with_name(script.stem)}-0.log"


@app.command()
def bench(
    subject: Literal["pretrain", "finetune", "job", "scale"] | None = Argument(
        None, help="what to measure; default: pretrain, or scale with --save", show_default=False
    ),
    store_folder: StoreFolder = DEFAULT_STORE,
    size: str = Option("", help="model size; default: 210m on a GPU, 8m on a CPU"),
    objective: Literal["mlm", "clm"] | None = Option(None, help="pretrain; default: mlm"),
    ratio: float | None = Option(
        None, min=0.01, max=0.99, help="pretrain: share of masked tokens; default: 0.4"
    ),
    packing: Literal["chunks", "rows", "documents"] | None = Option(None, help="pretrain; default: chunks"),
    rows: int = Option(0, min=0, help="pretrain, scale: rows per micro-batch; 0: chosen by memory"),
    vocab: int | None = Option(
        None, min=64, max=2**20, help="pretrain; default: 128,256 on a GPU, 2,048 on a CPU"
    ),
    length: int | None = Option(
        None, min=64, max=2**20, help="pretrain: tokens per row; default: 2,048 on a GPU, 128 on a CPU"
    ),
    steps: int = Option(0, min=0, help="measured steps; 0: 20 on a GPU, 3 on a CPU; of job 600 and 12"),
    against: list[str] | None = Option(
        None, help="trainer, trainer-compiled or none; may be repeated [default: both on a GPU]"
    ),
    precision: Literal["bf16", "fp32"] | None = Option(None, help="default: bf16 on a GPU, fp32 on a CPU"),
    profile: bool = Option(False, "--profile", help="show where the time of a step goes"),
    save: bool = Option(False, "--save", help="keep the measurements of scale in STORE/devices, for `plan`"),
    as_json: AsJson = False,
) -> None:
    """Measure how fast this machine trains and encodes, beside transformers' Trainer."""
    from biphase.bench.cases import BenchRequest
    from biphase.store import Store

    request = BenchRequest(
        workload=subject or ("scale" if save else "pretrain"), size=size, objective=objective, ratio=ratio,
        packing=packing, rows=rows, vocab=vocab, length=length, steps=steps, against=tuple(against or ()),
        precision=precision, profile=profile, save=save,
    )  # fmt: skip
    from biphase.bench.measure import run
    from biphase.training.distributed import exit_now, join

    command, device = shlex.join(["biphase", *sys.argv[1:]]), join().device
    report = run(request, Store.open(store_folder), device=device, command=command, tell=tell)
    study = with_store(Path("STUDY"), store_folder)
    give(as_json, report.facts, lambda: report.describe(study))
    code = 0 if report.measured else 1
    if device.type == "cuda":
        exit_now(code)  # torch.compile's worker processes, which the peers started, take long to end
    if code:
        sys.exit(code)
