"""`bench`: how fast this machine trains, beside the tools that people use instead."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from biphase.cli.app import DEFAULT_STORE, AsJson, StoreFolder, app, give, tell, with_store

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
    from biphase.bench.cases import Asked
    from biphase.files import Store

    asked = Asked(
        subject=subject or ("scale" if save else "pretrain"),
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
    from biphase.bench.run import run
    from biphase.training.devices import join

    command = shlex.join(["biphase", *sys.argv[1:]])
    report = run(asked, Store(store), device=join().device, command=command, tell=tell)
    study = with_store(Path("STUDY"), store)
    give(as_json, report.facts, lambda: report.words(study))
    if not report.measured:
        sys.exit(1)
