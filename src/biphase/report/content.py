"""The content of a report, computed once by `collect`; the page, the text and the tables only format it."""

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
from biphase.report.figures.training import losses_figure
from biphase.report.headline import Headline, headline
from biphase.report.pretraining import RunSummary
from biphase.report.provenance import Missing, Provenance, missing, provenance
from biphase.report.verdicts import Finding, judge
from biphase.store import Store
from biphase.study.plan import Plan


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
    overtaking = gaps(evidence, estimates)
    return Content(
        evidence=evidence,
        papers=papers,
        estimates=estimates,
        findings=findings,
        figures=figures(evidence, estimates, overtaking, live=live),
        runs=tuple(evidence.runs),
        headline=headline(evidence, findings),
        missing=missing(evidence),
        provenance=provenance(evidence),
        boards=tables.boards(evidence, estimates),
        edges=edges(evidence),
        tables=(
            tables.scores(evidence, estimates),
            tables.families(evidence, estimates),
            tables.noise(evidence, estimates),
            tables.crossings(overtaking),
            tables.claims(findings),
            tables.runs(evidence.runs),
            tables.trial_table(evidence),
        ),
    )


def figures(
    evidence: Evidence, estimates: Estimates, overtaking: list[Gap], *, live: bool = False
) -> tuple[Figure, ...]:
    """Every figure that the study has data for, in the order of the page; `live` includes losses being written now."""
    described = [figure(evidence, estimates) for figure in FIGURES] if evidence.count[0] else []
    described += [crossings_figure(evidence, overtaking), losses_figure(evidence, live=live)]
    return tuple(figure for figure in described if figure is not None)
