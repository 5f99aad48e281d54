"""`report`: what a study found, as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from biphase.cli.app import DEFAULT_STORE, AsJson, StoreFolder, StudyFile, app, give, planned, tell

Out = Annotated[
    Path | None,
    typer.Option(help="folder to write into; default: report/ beside the study's plan in the store"),
]
Watch = Annotated[
    bool, typer.Option("--watch", help="serve the page on this machine and refresh it while the study runs")
]


@app.command()
def report(
    study: StudyFile,
    store: StoreFolder = DEFAULT_STORE,
    out: Out = None,
    print_figures: Annotated[
        bool, typer.Option("--print/--no-print", help="also draw the figures for print: SVG and PDF")
    ] = True,
    watch: Watch = False,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="with --watch; 0: any that is free")] = 8_642,
    as_json: AsJson = False,
) -> None:
    """Statistics, verdicts, figures and tables of a study, on one page that needs no network."""
    from biphase.report.build import build

    _check_packages("jinja2", "plotly", *(["matplotlib"] if print_figures and not watch else []))
    made, where, _ = planned(study, store, reads=True)
    folder = out or where.studies / made.study.name / "report"
    if watch:
        from biphase.report.watch import serve

        serve(lambda: planned(study, store)[0], where, folder, port=port, say=tell)
        return
    built = build(made, where, folder, static=print_figures)
    give(as_json, built.to_json, built.words)


def _check_packages(*names: str) -> None:
    """Refuse before the work where a machine that only computes lacks what only the page needs."""
    from importlib.util import find_spec

    from biphase.errors import SpecError

    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise SpecError(
            f"the page needs {' and '.join(missing)}, not installed here; type pip install {' '.join(missing)}, "
            "or copy the store to a machine that has them and make the report there"
        )
