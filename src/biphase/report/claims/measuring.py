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
from biphase.report.evidence import Evidence, Grid
from biphase.report.statistics.intervals import Estimate, across, kept
from biphase.report.statistics.resampling import interval

Places = NDArray[np.intp]
LEVEL = 0.95
ALIKE = "every seed gives the same number, so there is no noise to judge it by"


@dataclass(frozen=True)
class Measured:
    """A test and what came out. `p` of the estimate is that of the margin; NaN: it cannot be told."""

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
    lost: int  # leaves that failed or cannot be read: their seeds are not complete

    @property
    def alike(self) -> bool:
        """Every seed gives the same number, so nothing tells how far chance could move it."""
        return math.isnan(self.estimate.p) and self.estimate.n > 1

    @property
    def missing(self) -> bool:
        return math.isnan(self.estimate.p) and not self.alike

    @property
    def p(self) -> float:
        """As a claim counts it: what is there and cannot be judged is no evidence. NaN: missing."""
        return 1.0 if self.alike else self.estimate.p

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
        note=_note(contrast, reading) if known else _why_unknown(contrast, evidence, estimate),
        shape=(len(rows), len(columns)),
        lost=sum(len(grid.missing) for grid in _grids(contrast, evidence)),
    )


def _clearest(test: AnyOf, evidence: Evidence, draws: Draws | None) -> Measured:
    """The option that is furthest from chance in the claimed direction, corrected for having been chosen."""
    tried = [_measure(one, evidence, None, len(test.options)) for one in test.options]
    known = [one for one in tried if not one.missing]
    judged = [one for one in known if not one.alike]
    if not judged:
        stands = known[0] if known else tried[0]
        every = tuple(one.name for one in test.models)
        return replace(stands, title=test.title, models=every, paper=test.paper)
    best = min(judged, key=lambda one: one.p if one.excess > 0 else 2 - one.p)
    again = _measure(best.said, evidence, draws, len(known))
    corrected = replace(again.estimate, p=min(1.0, again.estimate.p * len(known)))
    holes = f"; {len(tried) - len(known)} more are not complete" if len(known) < len(tried) else ""
    note = f"clearest of {len(known)} comparisons: {best.title}{holes}"
    return replace(again, title=test.title, paper=test.paper, estimate=corrected, note=note)


def detectable(measured: Measured, level: float) -> float:
    """The smallest true effect beyond the margin that this test would find with 80% power; none, where seeds are alike."""
    from biphase.report.statistics.power import detectable_in

    if measured.alike:
        return math.inf
    return math.nan if measured.missing else detectable_in(measured.estimate, level / measured.tries)


def _over_examples(
    contrast: Contrast, reading: Reading, point: float, rows: Places, columns: Places
) -> tuple[float, float] | None:
    """Of the mean over the same seeds, over resampled examples; of several test sets, the smallest decides on t."""
    resampled = contrast.quantity.resample(reading)
    if resampled is None:
        return None
    means = resampled[:, rows][:, :, columns].mean(axis=(1, 2))
    fewest = min(reading.evidence.examples(one, task) for one in contrast.models for task in contrast.tasks)
    if fewest < 2 or not np.isfinite(means).all():
        return None
    low, high = interval(means, np.array(point), examples=fewest, level=LEVEL)
    return (float(low), float(high)) if low < high else None


def _note(contrast: Contrast, reading: Reading) -> str:
    said = [contrast.remark(reading)] if contrast.remark else []
    if len(reading.rows) > 1 and not _paired(contrast):
        said.append("no pretraining seed in common: models are paired in the order of their seeds")
    return "; ".join(one for one in said if one)


def _paired(contrast: Contrast) -> bool:
    return bool(set.intersection(*(set(one.seeds) for one in contrast.models)))


def _grids(contrast: Contrast, evidence: Evidence) -> list[Grid]:
    return [
        evidence.grids[result, task]
        for model in contrast.models
        for result in model.results
        for task in contrast.tasks
    ]


def _why_unknown(contrast: Contrast, evidence: Evidence, estimate: Estimate) -> str:
    if estimate.n > 1:
        return ALIKE
    grids = _grids(contrast, evidence)
    done, of = sum(grid.done for grid in grids), sum(grid.of for grid in grids)
    lost = sum(len(grid.missing) for grid in grids)
    if done < of:
        failed = f", {lost:,} failed or cannot be read" if lost else ""
        return f"{'' if lost == of - done else 'not yet: '}{done:,} of {of:,} leaves done{failed}"
    return "one seed: an interval needs two" if estimate.n else "the metric it asks for was not scored"
