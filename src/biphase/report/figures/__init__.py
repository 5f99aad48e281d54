"""The figures of a report, each from the ledger alone: described once, drawn for the page and for print."""

from __future__ import annotations

from biphase.report.estimates import Estimates
from biphase.report.evidence import Evidence
from biphase.report.figures import (
    continued,
    costs,
    efficiency,
    losses,
    objectives,
    rates,
    ratio,
    repetition,
    robustness,
    splits,
    tree,
)
from biphase.report.figures.description import Figure
from biphase.report.figures.interactive import plotly_json
from biphase.report.figures.palette import PALETTES
from biphase.report.figures.script import SCRIPT
from biphase.report.figures.static import draw

__all__ = ["PALETTES", "SCRIPT", "Figure", "draw", "figures", "plotly_json"]


def figures(evidence: Evidence, estimates: Estimates, *, live: bool = False) -> list[Figure]:
    """Every figure the study has data for, in the order of the paper; `live` also shows losses that are being written."""
    scored = (
        objectives.figure,
        ratio.figure,
        efficiency.figure,
        rates.figure,
        splits.figure,
        robustness.figure,
        continued.figure,
    )
    made = [figure(evidence, estimates) for figure in scored] if evidence.count[0] else []
    made += [losses.figure(evidence, live=live), repetition.figure(evidence, live=live)]
    made += [tree.figure(evidence), costs.figure(evidence)]
    return [figure for figure in made if figure is not None]
