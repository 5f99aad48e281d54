"""What a study says to a claim, as records: the finding, and the parts that it rests on."""

from __future__ import annotations

from dataclasses import dataclass

from biphase.report.claims.contrasts import Source
from biphase.report.claims.verdicts import Supports, Verdict
from biphase.report.statistics.intervals import Estimate

CONTRARY = "points the other way"
READS = ("reproduced", "direction only", "not reproduced", CONTRARY, "underpowered", "not tested")


@dataclass(frozen=True)
class Part:
    """One test of a claim; numbers in percent points."""

    title: str  # "610m · SC"
    models: tuple[str, ...]
    estimate: Estimate  # of the contrast, positive: as claimed; its p is that of the margin
    margin: float  # what the contrast must exceed
    paper: float | None  # the same contrast of the paper's scores, where they are known for these recipes
    detectable: (
        float  # the smallest effect beyond the margin that is found with 80% power at the corrected level
    )
    examples: tuple[float, float] | None  # the contrast's 95% interval over test examples
    supports: Supports
    note: str
    says: str  # in words, without a full stop; empty where it is missing

    @property
    def contrary(self) -> bool:
        """The 95% interval lies wholly on the other side of nought and of the margin; the corrected test does not say so."""
        return self.supports == "underpowered" and self.estimate.high < min(self.margin, 0.0)


@dataclass(frozen=True)
class Finding:
    """A claim and what the study says to it."""

    id: str
    says: str
    source: Source
    verdict: Verdict
    why: str
    parts: tuple[Part, ...]
    p: float  # NaN where not tested
    p_holm: float
    scale: str
    figure: str  # the id of the figure that shows it
    caveats: tuple[str, ...]
    contrast: str  # how it is tested, in one line
    paper: str  # the paper's numbers, in words
    condition: str = ""  # that the verdict stands under, in two words

    @property
    def reads(self) -> str:
        """The verdict as a report shows it: an underpowered claim whose numbers point the other way is called that."""
        contrary = self.verdict == "underpowered" and any(one.contrary for one in self.parts)
        return CONTRARY if contrary else self.verdict
