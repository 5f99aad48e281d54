"""The figures of a report: described once as data, then drawn by Plotly for the page and by matplotlib for print."""

from __future__ import annotations

from biphase.report.estimates import Estimates
from biphase.report.evidence import Evidence
from biphase.report.figures import losses, plan, scores
from biphase.report.figures.description import PALETTES, Figure
from biphase.report.figures.interactive import SCRIPT, plotly_json
from biphase.report.figures.static import draw

__all__ = ["PALETTES", "SCRIPT", "Figure", "draw", "figures", "plotly_json"]


def figures(evidence: Evidence, estimates: Estimates, *, live: bool = False) -> list[Figure]:
    """Every figure that the study has data for, in the order of the paper; `live` includes losses being written now."""
    scored = (
        scores.objectives_figure,
        scores.ratio_figure,
        scores.efficiency_figure,
        scores.rates_figure,
        scores.splits_figure,
        scores.robustness_figure,
        scores.continued_figure,
    )
    made = [figure(evidence, estimates) for figure in scored] if evidence.count[0] else []
    made += [losses.losses_figure(evidence, live=live), losses.repetition_figure(evidence, live=live)]
    made += [plan.tree_figure(evidence), plan.costs_figure(evidence)]
    return [figure for figure in made if figure is not None]
