"""The verbs `tokenize`, `doctor` and `bench`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from biphase.cli.app import DEFAULT_STORE, AsJson, StoreFolder, app, give, show, tell, with_store


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

    from biphase.data.corpus import shards_key, write_link
    from biphase.data.shards import Shards
    from biphase.data.tokenize import tokenize as make_shards
    from biphase.leases import Leases
    from biphase.store import Store
    from biphase.study.names import corpus_named, shards_text

    made = corpus_named(corpus, tokenizer=tokenizer, text=text, heldout=heldout)
    where = Store.open(store)
    if from_folder is not None:
        write_link(made, where, from_folder)
    key = shards_key(made, where)
    leases = Leases(where.leases)
    while (lease := leases.take(f"shards-{key}")) is None:
        time.sleep(1)  # another process is making them
    with lease:
        folder = make_shards(made, where, processes=processes, report=tell, lost=lambda: lease.lost)
    show(shards_text(Shards.open(folder), folder))


@app.command()
def doctor(store: StoreFolder = DEFAULT_STORE, as_json: AsJson = False) -> None:
    """Machine, versions, data: what is missing and the command that fixes it."""
    from dataclasses import asdict

    from biphase.doctor import examine, render
    from biphase.store import Store

    findings = examine(Store.open(store))
    give(as_json, lambda: [asdict(one) for one in findings], lambda: render(findings))
    sys.exit(1 if any(one.ok is False for one in findings) else 0)


# ---------------------------------------------------------------- bench


Subject = Annotated[
    str,
    typer.Argument(
        metavar="[pretrain|finetune|retrieval|scale|all]",
        help="what to measure; without it pretrain, or scale with --save",
        show_default=False,
    ),
]
Against = Annotated[
    list[str] | None,
    typer.Option(help="trainer, trainer-compiled or none; may be repeated [default: both on a GPU]"),
]
Save = Annotated[
    bool, typer.Option("--save", help="keep the cases of scale for `plan --device`, in STORE/devices")
]


@app.command()
def bench(
    subject: Subject = "",
    store: StoreFolder = DEFAULT_STORE,
    size: Annotated[str, typer.Option(help="of the model; 210m on a GPU, 8m on a CPU")] = "",
    objective: Annotated[str, typer.Option(help="pretrain: mlm or clm; without it mlm")] = "",
    ratio: Annotated[float | None, typer.Option(help="pretrain: the share that mlm hides; 0.4")] = None,
    packing: Annotated[str, typer.Option(help="pretrain: chunks, rows or documents; chunks")] = "",
    rows: Annotated[int, typer.Option(help="pretrain, scale: rows of a micro-batch; 0: what suits")] = 0,
    micro_batches: Annotated[int, typer.Option(help="pretrain: micro-batches of a step; 0: one")] = 0,
    vocab: Annotated[int, typer.Option(help="pretrain: words; 128,256 on a GPU, 2,048 on a CPU")] = 0,
    length: Annotated[int, typer.Option(help="pretrain: tokens of a row; 2,048 on a GPU, 128 on a CPU")] = 0,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="pretrain: as `run --deterministic` computes")
    ] = False,
    steps: Annotated[int, typer.Option(help="steps that are counted; 0: 20 on a GPU, 3 on a CPU")] = 0,
    against: Against = None,
    precision: Annotated[str, typer.Option(help="bf16, fp32 or fp8; bf16 on a GPU, fp32 on a CPU")] = "",
    profile: Annotated[bool, typer.Option("--profile", help="where a step's time goes")] = False,
    save: Save = False,
    as_json: AsJson = False,
) -> None:
    """How fast this machine trains and reads, side by side with transformers' Trainer in one run."""
    from biphase.bench.cases import BenchRequest
    from biphase.store import Store

    asked = BenchRequest(
        workload=subject or ("scale" if save else "pretrain"),
        size=size,
        objective=objective,
        ratio=ratio,
        packing=packing,
        rows=rows,
        micro_batches=micro_batches,
        vocab=vocab,
        length=length,
        deterministic=deterministic,
        steps=steps,
        against=tuple(against or ()),
        precision=precision,
        profile=profile,
        save=save,
    )
    from biphase.bench.compare import run
    from biphase.training.distributed import join

    command = shlex.join(["biphase", *sys.argv[1:]])
    report = run(asked, Store.open(store), device=join().device, command=command, tell=tell)
    study = with_store(Path("STUDY"), store)
    give(as_json, report.facts, lambda: report.describe(study))
    if not report.measured:
        sys.exit(1)
