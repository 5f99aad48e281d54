"""Contrasts with their numbers: the estimate over seeds, the interval over test examples, the effect they could find."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from biphase.report.claims.contrasts import AnyOf, Contrast, Test
from biphase.report.claims.lines import rows_in_common
from biphase.report.claims.quantities import Reading
from biphase.report.draws import Draws
from biphase.report.evidence import Evidence
from biphase.report.statistics.intervals import Estimate, across, kept
from biphase.report.statistics.resampling import interval

Places = NDArray[np.intp]
LEVEL = 0.95


@dataclass(frozen=True)
class Measured:
    """A test and what came out. `p` of the estimate is that of the margin; NaN: missing."""

    title: str
    models: tuple[str, ...]
    said: Contrast  # whose words say it
    estimate: Estimate
    margin: float
    paper: float | None
    tries: int  # how many tests it is the clearest of; its p-value and interval are corrected for them
    examples: tuple[float, float] | None
    note: str
    shape: tuple[int, int]  # pretraining seeds, fine-tuning seeds that are complete

    @property
    def missing(self) -> bool:
        return math.isnan(self.estimate.p)

    @property
    def excess(self) -> float:
        return self.estimate.mean - self.margin


def measure(test: Test, evidence: Evidence, draws: Draws | None) -> Measured:
    return _clearest(test, evidence, draws) if isinstance(test, AnyOf) else _measure(test, evidence, draws)


def _measure(contrast: Contrast, evidence: Evidence, draws: Draws | None, tries: int = 1) -> Measured:
    reading = Reading(evidence, draws, rows_in_common(list(contrast.models)))
    matrix = np.atleast_2d(contrast.quantity.measure(reading))
    estimate = across(matrix, 1 - (1 - LEVEL) / tries)
    if contrast.margin:
        estimate = replace(estimate, p=across(matrix - contrast.margin).p)
    rows, columns = kept(matrix)
    known = not math.isnan(estimate.p)
    return Measured(
        title=contrast.title,
        models=tuple(one.name for one in contrast.models),
        said=contrast,
        estimate=estimate,
        margin=contrast.margin,
        paper=contrast.paper,
        tries=tries,
        examples=_over_examples(contrast, reading, estimate.mean, rows, columns) if known and draws else None,
        note=_note(contrast, reading) if known else _why_missing(contrast, evidence, estimate),
        shape=(len(rows), len(columns)),
    )


def _clearest(test: AnyOf, evidence: Evidence, draws: Draws | None) -> Measured:
    """The option that is furthest from chance in the claimed direction, corrected for having been chosen."""
    tried = [_measure(one, evidence, None, len(test.options)) for one in test.options]
    known = [one for one in tried if not one.missing]
    if not known:
        return replace(tried[0], title=test.title, models=tuple(one.name for one in test.models))
    best = min(known, key=lambda one: one.estimate.p if one.excess > 0 else 2 - one.estimate.p)
    again = _measure(best.said, evidence, draws, len(known))
    corrected = replace(again.estimate, p=min(1.0, again.estimate.p * len(known)))
    holes = f"; {len(tried) - len(known)} more are not complete" if len(known) < len(tried) else ""
    note = f"clearest of {len(known)} comparisons: {best.title}{holes}"
    return replace(again, title=test.title, paper=test.paper, estimate=corrected, note=note)


def detectable(measured: Measured, level: float) -> float:
    """The smallest true effect beyond the margin that this test would find with 80% power."""
    from biphase.report.statistics.power import detectable_in

    return math.nan if measured.missing else detectable_in(measured.estimate, level / measured.tries)


def _over_examples(
    contrast: Contrast, reading: Reading, point: float, rows: Places, columns: Places
) -> tuple[float, float] | None:
    """Of the mean over the same seeds, over resampled examples; of several test sets, the smallest decides on t."""
    resampled = contrast.quantity.resample(reading)
    if resampled is None:
        return None
    means = resampled[:, rows][:, :, columns].mean(axis=(1, 2))
    grids = [
        reading.evidence.grids[one.results[0], task] for one in contrast.models for task in contrast.tasks
    ]
    low, high = interval(means, np.array(point), examples=min(grid.examples for grid in grids), level=LEVEL)
    return (float(low), float(high)) if np.isfinite(means).all() and low < high else None


def _note(contrast: Contrast, reading: Reading) -> str:
    said = [contrast.remark(reading)] if contrast.remark else []
    if len(reading.rows) > 1 and not _paired(contrast):
        said.append("no pretraining seed in common: models are paired in the order of their seeds")
    return "; ".join(one for one in said if one)


def _paired(contrast: Contrast) -> bool:
    return bool(set.intersection(*(set(one.seeds) for one in contrast.models)))


def _why_missing(contrast: Contrast, evidence: Evidence, estimate: Estimate) -> str:
    grids = [
        evidence.grids[result, task]
        for model in contrast.models
        for result in model.results
        for task in contrast.tasks
    ]
    done, of = sum(grid.done for grid in grids), sum(grid.of for grid in grids)
    if done < of:
        return f"not yet: {done:,} of {of:,} leaves done"
    if estimate.n > 1:
        return "every seed gives the same number, so there is no noise to judge it by"
    return "one seed: an interval needs two" if estimate.n else "the metric it asks for was not scored"
