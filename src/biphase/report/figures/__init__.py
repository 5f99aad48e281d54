"""The figures of a report: described as data, drawn by Vega on the page and by vl-convert for print."""

from __future__ import annotations

from biphase.report.estimates import Estimates
from biphase.report.evidence import Evidence
from biphase.report.figures import crossings, scores, training
from biphase.report.figures.description import PALETTES, Figure
from biphase.report.figures.vega import draw, screen_height, script, specification

__all__ = ["PALETTES", "Figure", "draw", "figures", "screen_height", "script", "specification"]


def figures(evidence: Evidence, estimates: Estimates, *, live: bool = False) -> list[Figure]:
    """Every figure that the study has data for, in the order of the page; `live` includes losses being written now."""
    described = [figure(evidence, estimates) for figure in scores.FIGURES] if evidence.count[0] else []
    described += [
        crossings.crossings_figure(evidence, crossings.gaps(evidence, estimates)),
        training.losses_figure(evidence, live=live),
        training.repetition_figure(evidence, live=live),
    ]
    return [figure for figure in described if figure is not None]
