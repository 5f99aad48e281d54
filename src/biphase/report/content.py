"""The content of a report, computed once by `collect`; the page, the text and the tables only format it.

`READING` explains how to read a report: what its intervals cover and what its verdicts mean. All formats print this
same text.
"""

from __future__ import annotations

from dataclasses import dataclass

from biphase.papers import papers_of
from biphase.report import tables
from biphase.report.contrasts import Paper
from biphase.report.estimates import Estimates, edges, estimate
from biphase.report.evidence import Evidence, Resamples, gather
from biphase.report.figures.crossings import Gap, crossings_figure, gaps
from biphase.report.figures.description import Figure
from biphase.report.figures.scores import FIGURES
from biphase.report.figures.training import losses_figure, repetition_figure
from biphase.report.headline import Headline, headline
from biphase.report.provenance import Missing, Provenance, RunSummary, missing, provenance, runs
from biphase.report.verdicts import Finding, judge
from biphase.specs.tasks import FAMILIES
from biphase.store import Store
from biphase.study.plan import Plan

READING: tuple[tuple[str, str], ...] = (
    (
        "Scores.",
        "A score is measured on test examples, at the learning rate that was best on validation examples, seed by seed. "
        "So each seed is one repetition of the whole procedure, the choice of the rate included. Everything is in percent; "
        "differences are in percentage points.",
    ),
    (
        "Families.",
        f"{', '.join(f'{short}: {family.name}' for short, family in FAMILIES.items())}. A family is the plain mean of its "
        "tasks, seed by seed.",
    ),
    (
        "Intervals.",
        "The interval beside a mean is a 95% t-interval over fine-tuning seeds of the same model. "
        "If a recipe was pretrained with several seeds, the interval covers those too and says so. With one pretraining seed "
        "it does not cover the noise of pretraining. The interval over examples resamples the "
        "test set. Intervals of scores are cut at 0 and 100; a cut interval is shown by its ends in brackets "
        "instead of ±.",
    ),
    (
        "Comparisons.",
        "Models are compared at the learning rates that all of them have; where rates were discarded early, each at its own, "
        "of which all have equally many. Two or three seeds hardly determine a variance, so "
        "the noise of a model is estimated from its own seeds and from those of all other models on the same tasks (moderated "
        "variances). With several pretraining seeds, a value is the mean of a seed's fine-tunings. A difference can be "
        "significant although the intervals of the two means overlap.",
    ),
    (
        "Verdicts.",
        "Reproduced: every part of the claim exceeds its margin; the largest of their one-sided p-values, corrected by Holm for "
        "all distinct claims tested here, is at most 0.05. Holds in part: the same, but the study has no scores for some parts "
        "or families. Not reproduced: some part is significantly reversed; the smallest p-value times the number of parts, "
        "corrected alike, is at most 0.05. No effect found: neither, although an effect as large as the paper's (or as the study "
        "states) would probably have been found. Underpowered: neither, and such an effect could have been missed. Not "
        "applicable: the claim presupposes something that the study does not show. Not tested: the study has no runs for it, or "
        "too few seeds are complete.",
    ),
    (
        "Detectable.",
        "The smallest true effect that a test with this noise and so many seeds finds in 80 of 100 tries, at the corrected "
        "level; no effect can exceed the 100 points of the scale. Smaller effects may exist and not be detected.",
    ),
    (
        "Missing.",
        "Results that are not computed, failed or cannot be read are missing. Nothing is imputed; a claim is judged on the results that exist.",
    ),
)
OF_CLAIMS = ("Verdicts.", "Detectable.")


def reading(*, claims: bool) -> list[tuple[str, str]]:
    """The explanations that a report needs; those about claims are left out if it has none."""
    return [entry for entry in READING if claims or entry[0] not in OF_CLAIMS]


# ---------------------------------------------------------------- content


@dataclass(frozen=True)
class Content:
    """Everything that a report shows."""

    evidence: Evidence
    papers: tuple[Paper, ...]
    estimates: Estimates
    findings: tuple[Finding, ...]
    figures: tuple[Figure, ...]
    runs: tuple[RunSummary, ...]
    headline: Headline
    missing: Missing
    provenance: Provenance
    boards: tuple[tables.Board, ...]
    edges: str  # a warning where the ends of the learning-rate grid won
    tables: tuple[tables.Table, ...]

    @property
    def name(self) -> str:
        return self.evidence.plan.study.name

    @property
    def question(self) -> str:
        return self.evidence.plan.question or f"What does the study {self.name} show?"


def collect(plan: Plan, store: Store, *, live: bool = False) -> Content:
    """Read the scores of a plan from a store and compute the report's content."""
    papers = papers_of(plan.study)
    evidence = gather(plan, store, papers[0].published if papers else None)
    draws = Resamples(evidence)
    estimates = estimate(evidence, draws)
    findings = tuple(judge(evidence, papers, draws))
    found, overtaking = runs(evidence), gaps(evidence, estimates)
    return Content(
        evidence=evidence,
        papers=papers,
        estimates=estimates,
        findings=findings,
        figures=figures(evidence, estimates, overtaking, live=live),
        runs=tuple(found),
        headline=headline(evidence, findings),
        missing=missing(evidence, found),
        provenance=provenance(evidence),
        boards=tables.boards(evidence, estimates),
        edges=edges(evidence),
        tables=(
            tables.scores(evidence, estimates),
            tables.families(evidence, estimates),
            tables.noise(evidence, estimates),
            tables.crossings(overtaking),
            tables.claims(findings),
            tables.runs(found),
            tables.trial_table(evidence),
        ),
    )


def figures(
    evidence: Evidence, estimates: Estimates, overtaking: list[Gap], *, live: bool = False
) -> tuple[Figure, ...]:
    """Every figure that the study has data for, in the order of the page; `live` includes losses being written now."""
    described = [figure(evidence, estimates) for figure in FIGURES] if evidence.count[0] else []
    described += [
        crossings_figure(evidence, overtaking),
        losses_figure(evidence, live=live),
        repetition_figure(evidence, live=live),
    ]
    return tuple(figure for figure in described if figure is not None)
