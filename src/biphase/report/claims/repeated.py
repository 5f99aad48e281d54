"""The mark on verdicts about equal data where the corpus was read more than once.

Steps are equal there, and what they teach is not: a row that comes again has new masks and the same causal targets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from biphase.report.claims.contrasts import Statement, Test
from biphase.report.claims.findings import Finding
from biphase.report.recipes import Model
from biphase.report.repetition import Epochs
from biphase.specs import CLM
from biphase.study.corpora import REPEATED

MARK = "under repetition"


def marked(finding: Finding, statement: Statement, tests: Iterable[Test], epochs: Epochs) -> Finding:
    """The finding, told as one under repetition where it is one. Where epochs are not known nothing is said."""
    if not statement.equal_data or finding.verdict == "not tested":
        return finding
    compared = [one for one in tests if len({_causal(model) for model in one.models}) > 1]
    models = dict.fromkeys(model for one in compared for model in one.models)
    times = [at for model in models for name in model.results if (at := epochs.at(name)) is not None]
    if max(times, default=0.0) <= REPEATED:
        return finding
    often = " to ".join(dict.fromkeys(f"{one:.1f}" for one in (min(times), max(times))))
    caveat = (
        f"Under repetition: by the steps compared the corpus had been read {often} times. Masks were new each time, "
        "causal targets were not, which favours MLM."
    )
    return replace(
        finding, scale=f"{finding.scale} · {MARK}", condition=MARK, caveats=(caveat, *finding.caveats)
    )


def _causal(model: Model) -> float:
    """The share of all its steps that were causal: where it differs, so does what a second reading brings."""
    spans = model.recipe.spans
    causal = sum(one.steps for one in spans if isinstance(one.objective, CLM))
    return round(causal / model.recipe.steps, 6) if spans else 0.0
