"""`tokenize` and `doctor`: what a machine needs before it trains."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from biphase.cli.app import DEFAULT_STORE, AsJson, StoreFolder, app, give, show, tell


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
        folder = make_shards(made, where, processes=processes, report=tell, lost=lambda: lease.lost)
    show(shards_text(Shards.open(folder), folder))


@app.command()
def doctor(store: StoreFolder = DEFAULT_STORE, as_json: AsJson = False) -> None:
    """Machine, versions, data: what is missing and the command that fixes it."""
    from dataclasses import asdict

    from biphase.doctor import examine, render
    from biphase.files import Store

    findings = examine(Store(store))
    give(as_json, lambda: [asdict(one) for one in findings], lambda: render(findings))
    sys.exit(1 if any(one.ok is False for one in findings) else 0)
