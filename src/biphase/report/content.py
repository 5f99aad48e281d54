"""Everything a report says, worked out once; the page, the text and the tables only put it into words."""

from __future__ import annotations

from dataclasses import dataclass

from biphase.files import Store
from biphase.report import tables
from biphase.report.claims import Finding, judge
from biphase.report.draws import Draws
from biphase.report.edges import edges
from biphase.report.estimates import Estimates, estimate
from biphase.report.evidence import Evidence, gather
from biphase.report.figures import Figure, figures
from biphase.report.headline import Headline, headline
from biphase.report.missing import Missing, missing
from biphase.report.provenance import Provenance, provenance
from biphase.report.runs import Run, runs
from biphase.study.plan import Plan


@dataclass(frozen=True)
class Content:
    evidence: Evidence
    estimates: Estimates
    findings: tuple[Finding, ...]
    figures: tuple[Figure, ...]
    runs: tuple[Run, ...]
    headline: Headline
    missing: Missing
    provenance: Provenance
    boards: tuple[tables.Board, ...]
    edges: str  # of the grid of learning rates, where they won
    tables: tuple[tables.Table, ...]

    @property
    def name(self) -> str:
        return self.evidence.plan.study.name

    @property
    def question(self) -> str:
        return self.evidence.plan.question or f"What does the study {self.name} show?"


def collect(plan: Plan, store: Store, *, live: bool = False) -> Content:
    """Read the ledger of a plan and work out what it says."""
    evidence = gather(plan, store)
    draws = Draws(evidence)
    estimates = estimate(evidence, draws)
    findings = tuple(judge(evidence, draws))
    found = runs(evidence)
    return Content(
        evidence=evidence,
        estimates=estimates,
        findings=findings,
        figures=tuple(figures(evidence, estimates, live=live)),
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
            tables.claims(findings),
            tables.runs(found),
            tables.leaves(evidence),
        ),
    )
