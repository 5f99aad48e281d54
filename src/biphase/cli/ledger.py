"""`ledger pack` and `ledger merge`: results of a study from one machine to another, in one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from biphase.cli.app import (
    DEFAULT_STORE,
    AsJson,
    StoreFolder,
    StudyFile,
    app,
    give,
    planned,
    show,
    tell,
    with_store,
)
from biphase.cli.studies import matching

if TYPE_CHECKING:
    from biphase.study.merge import Merged
    from biphase.study.pack import Packed

ledger = typer.Typer(help="Results from one machine to another, in one file.", no_args_is_help=True)
app.add_typer(ledger, name="ledger")

SHOWN = 5  # of what stays as it is


@ledger.command()
def pack(
    study: StudyFile,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="the file to write, e.g. results.tar.zst")],
    store: StoreFolder = DEFAULT_STORE,
    only: Annotated[str, typer.Option(help="results whose name matches, e.g. 'clm-10k-*'")] = "*",
    without_examples: Annotated[
        bool, typer.Option("--without-examples", help="scores without their values by example; much smaller")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Everything of a study that a report elsewhere needs, and no weights, as one file."""
    from dataclasses import asdict

    from biphase.study.pack import pack as pack_study

    made, where, fingerprints = planned(study, store, reads=True)
    results = None if only == "*" else matching(made, only)
    packed = pack_study(made, where, fingerprints, file, results=results, examples=not without_examples)
    for why in packed.left_out:
        tell(f"left out: {why}")
    give(as_json, lambda: {"file": str(file), **asdict(packed)}, lambda: _packed(packed, file))


def _packed(packed: Packed, file: Path) -> str:
    from biphase.wording import counted, si

    parts = []
    if packed.scores_planned:
        bare = ", without values by example" if packed.bare and packed.bare == packed.scores else ""
        parts.append(f"{packed.scores:,} of {counted(packed.scores_planned, 'score')}{bare}")
    if packed.states_planned:
        parts.append(f"{packed.states:,} of {counted(packed.states_planned, 'state')}, without weights")
    parts += [counted(packed.corpora, "card") + " of corpora"] if packed.corpora else []
    parts += [counted(packed.failures, "failure")] if packed.failures else []
    sizes = f"{si(packed.bytes)}B, {si(packed.unpacked)}B unpacked"
    return f"{packed.study}: {'; '.join(parts)}\n{file}: {sizes}. On the other machine: biphase ledger merge {file.name}"


@ledger.command()
def merge(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="what `ledger pack` has written")],
    store: StoreFolder = DEFAULT_STORE,
    as_json: AsJson = False,
) -> None:
    """What was packed elsewhere, into this store. What is here stays; may be killed and repeated."""
    from dataclasses import asdict

    from biphase.files import Store
    from biphase.study.merge import check
    from biphase.study.merge import merge as merge_parcel

    checked = [check(file) for file in files]  # all of them, before anything is written
    merged = [merge_parcel(one, Store(store)) for one in checked]
    if as_json:
        told = [{"file": str(file), **asdict(one)} for file, one in zip(files, merged, strict=True)]
        print(json.dumps(told, indent=1, default=str))
        return
    for file, one in zip(files, merged, strict=True):
        show(_merged(one, file))
    for plan in dict.fromkeys(one.plan for one in merged):
        show(f"What they show: biphase report {with_store(plan, store)}")


def _merged(merged: Merged, file: Path) -> str:
    from biphase.wording import counted, si

    words = {
        "scores": counted(merged.added["scores"], "score"),
        "states": counted(merged.added["states"], "state") + " without weights",
        "corpora": counted(merged.added["corpora"], "card") + " of corpora",
    }
    new = ", ".join(words[kind] for kind, number in merged.added.items() if number) or "nothing"
    size = f" ({si(merged.bytes)}B)" if merged.bytes else ""
    lines = [
        f"{merged.study}: new from {file}: {new}{size}; {counted(merged.already, 'result')} here already"
    ]
    if merged.kept:
        lines.append(f"  {len(merged.kept):,} here with other content, kept as they are here:")
        lines += [f"    {one}" for one in merged.kept[:SHOWN]]
        lines += [f"    and {len(merged.kept) - SHOWN:,} more (--json)"] if len(merged.kept) > SHOWN else []
    return "\n".join(lines)
