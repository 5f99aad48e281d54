"""Models side by side on tasks, for `biphase compare`: differences from the first model, with intervals and verdicts.

A verdict is about two kinds of noise. "better" and "worse": the difference is clear over fine-tuning seeds, at a p-value
corrected for the number of differences in the table (Holm), and clear over test examples. "equal": the interval lies
within the effect worth finding. "open": neither; `detectable` says which difference these seeds would show.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from biphase.report.contrasts import Contrast, MeanScore, Measure, Quantity
from biphase.report.evidence import Evidence, Resamples
from biphase.report.headline import over_families
from biphase.report.recipes import Model
from biphase.report.selectors import comparable_models
from biphase.report.statistics.intervals import Estimate, detectable_by, holm
from biphase.report.verdicts import ALPHA
from biphase.text import aligned, counted, finite, fixed, interval, listed, signed

AVERAGE = "average"  # over families of tasks, equally weighted
Word = Literal["better", "worse", "equal", "open", "missing"]


@dataclass(frozen=True)
class Difference:
    """How much better another model scores than the first, in points."""

    on: str  # a task, or `AVERAGE`
    metric: str
    other: str
    scores: tuple[float, float]  # of the first and of the other, in percent
    estimate: Estimate
    examples: tuple[float, float] | None  # 95% interval over test examples
    p: float  # two-sided; corrected once all differences are known
    detectable: float  # the smallest difference found with 80% power
    verdict: Word
    note: str

    def to_json(self) -> dict[str, Any]:
        """The difference as JSON; numbers that are not known are None."""
        about = {name: value for name, value in asdict(self).items() if name not in ("estimate", "examples")}
        spans = {"seeds": (self.estimate.low, self.estimate.high), "examples": self.examples}
        about |= {"difference": self.estimate.mean, "intervals": spans}
        return finite(about)


def compare(evidence: Evidence) -> list[Difference]:
    """Compare the first model of a study with each other one, on each task and on average."""
    study = comparable_models(evidence.plan, evidence.models)
    first, *others = dict.fromkeys(study.of_result(name) for name in evidence.plan.results)
    measure = Measure(evidence, Resamples(evidence))
    found = []
    for other in others:
        own = [_difference(measure, first, other, task, (task,)) for task in evidence.tasks]
        if len(evidence.tasks) > 1:
            own.append(_difference(measure, first, other, AVERAGE, tuple(evidence.tasks)))
        found += own
    corrected = holm([one.p for one in found])
    effect = evidence.plan.study.effect
    tests = sum(math.isfinite(one.p) for one in found)
    return [_judged(one, p, effect, tests) for one, p in zip(found, corrected, strict=True)]


def _difference(measure: Measure, first: Model, other: Model, on: str, tasks: tuple[str, ...]) -> Difference:
    def score(model: Model) -> Quantity:
        return over_families(measure.evidence, model) if on == AVERAGE else MeanScore((model,), tasks)

    part = measure(Contrast(on, score(other) - score(first)))
    means = measure.means((first, other), score)
    return Difference(
        on=on,
        metric="" if on == AVERAGE else measure.evidence.metric(on),
        other=other.name,
        scores=(_mean(means, first), _mean(means, other)),
        estimate=part.estimate,
        examples=part.examples,
        p=min(1.0, 2 * min(part.above, part.below)) if not part.missing else math.nan,
        detectable=math.nan,
        verdict="missing",
        note=part.note,
    )


def _mean(means: dict[str, Any], model: Model) -> float:
    return means[model.name].mean if model.name in means else math.nan


def _judged(one: Difference, p: float, effect: float, tests: int) -> Difference:
    """The difference with its verdict; `p`: corrected for the number of `tests`."""
    if math.isnan(p):
        return one
    estimate, over = one.estimate, one.examples
    word: Word = "open"
    if p <= ALPHA:
        word = "better" if estimate.mean > 0 else "worse"
        if over and over[0] <= 0 <= over[1]:
            word = "open"
            one = replace(
                one, note="clear over seeds, but not over test examples: another test set may differ"
            )
    elif -effect <= estimate.low and estimate.high <= effect:
        word = "equal"
    return replace(one, p=p, verdict=word, detectable=detectable_by(estimate.se, estimate.df, ALPHA / tests))


def render(evidence: Evidence, differences: list[Difference]) -> list[str]:
    """The table as lines, one block for each pair of models, and how to read it."""
    names = list(dict.fromkeys(one.other for one in differences))
    first = next(iter(evidence.models))
    if not names:
        return [f"All names stand for one model, {first}: there is nothing to compare."]
    lines = []
    for name in names:
        own = [one for one in differences if one.other == name]
        rows = aligned([("", "A", "B", "B − A", "over seeds", "B is"), *map(_cells, own)])
        notes = [f"{one.on}: {one.note}" for one in own if one.note]
        lines += ["", f"  A  {first}", f"  B  {name}", "", *(f"  {row}" for row in (*rows, *notes))]
    metrics = listed(list(dict.fromkeys(one.metric for one in differences if one.metric)))
    number, effect = counted(len(differences), "difference"), fixed(evidence.plan.study.effect)
    return [
        *lines,
        "",
        f"Scores: {metrics}, in percent; 95% intervals over {counted(len(evidence.seeds), 'fine-tuning seed')}.",
        f'Verdicts are corrected for {number}; "equal": within {effect} of 0.',
    ]


def _cells(one: Difference) -> tuple[str, ...]:
    means = tuple(fixed(mean) if math.isfinite(mean) else "" for mean in one.scores)
    estimate = one.estimate
    gap = signed(estimate.mean) if math.isfinite(estimate.mean) else ""
    return (one.on, *means, gap, interval(estimate.low, estimate.high, sign=True), one.verdict)
