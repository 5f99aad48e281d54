"""Claims (hypotheses) of a study, stated before it is run: one result scores above another, by how much, on what.

A claim is written in the study file beside the runs it compares. The report tests it together with the claims of
papers (`Study.papers`) and corrects for their number, so claims should not be added after the scores are known.
"""

from __future__ import annotations

import re

from biphase.errors import SpecError, nearest
from biphase.records import ranged, record
from biphase.specs.sources import check_name
from biphase.specs.tasks import FAMILIES, Family

_OF_PAPERS = re.compile(r"[CB]\d+")


@record
class Claim:
    """The claim that `more` scores above `less` by more than `margin` percentage points, on each entry of `on`.

    A negative margin claims non-inferiority: `more` is not worse by that much. If a recipe was trained with several
    seeds, naming one of its results means all of them.
    """

    name: str
    says: str  # the claim as a sentence, for the report
    more: str  # name of a result of the study
    less: str  # name of another
    on: tuple[str, ...] = ()  # families or tasks, each tested separately; empty: every family of the study
    margin: float = ranged(0.0, above=-100, below=100)  # percentage points
    metric: str = ""  # empty: the metric that selects the learning rate
    # Percentage points beyond the margin that are worth finding; 0: as the study says
    effect: float = ranged(0.0, least=0, added=True)

    def settle(self) -> None:
        # One line, since it is shown in table rows.
        object.__setattr__(self, "says", " ".join(self.says.split()))

    def check(self) -> None:
        where = f"Claim {self.name!r}"
        check_name("Claim", self.name)
        if _OF_PAPERS.fullmatch(self.name):
            raise SpecError(
                f"{where}: C and B with a number are the names of claims of papers; choose a word"
            )
        if not self.says.strip():
            raise SpecError(f"{where} says nothing; put it in words: says='causal first helps to tag'")
        if self.more == self.less:
            raise SpecError(f"{where} compares {self.more!r} with itself; name two results")
        if len(set(self.on)) != len(self.on):
            raise SpecError(f"{where}: on={self.on} names one thing twice")
        metrics = [metric for family in FAMILIES.values() for metric in family.metrics]
        if self.metric and self.metric not in metrics:
            raise SpecError(f"{where}: there is no metric {self.metric!r}; {nearest(self.metric, metrics)}")

    def check_within(self, results: list[str], tasks: dict[str, Family]) -> None:
        """Raise SpecError unless a study with these results and tasks (name → family) can test the claim."""
        where = f"Claim {self.name!r}"
        for name in (self.more, self.less):
            if name not in results:
                raise SpecError(f"{where}: the study has no result {name!r}; {nearest(name, results)}")
        if not tasks:
            raise SpecError(
                f"{where}: nothing is fine-tuned, so nothing is scored; say finetune=Finetune(TASKS)"
            )
        families: dict[str, Family] = {family: family for family in tasks.values()}
        known = families | tasks
        for name in self.on or families:
            if name not in known:
                raise SpecError(f"{where}: the study has no task or family {name!r}; {nearest(name, known)}")
            metrics = FAMILIES[known[name]].metrics
            if self.metric and self.metric not in metrics:
                raise SpecError(
                    f"{where}: {name} is not scored with {self.metric!r} but with {', '.join(metrics)}; "
                    "make one claim for each metric"
                )
