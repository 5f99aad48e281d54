"""A test as a record: a quantity that is positive if a claim holds, the margin it must exceed, and how to say it.

Contrasts are found from recipes, so they exist before any score does: the plan lists them, the report measures them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from biphase.report.claims.lines import Bench, Line
from biphase.report.claims.quantities import Quantity, Reading, gap
from biphase.report.recipes import Model
from biphase.specs import Family

Source = Literal["paper", "beyond", "study"]
Remark = Callable[[Reading], str]  # what else the scores say, once they are there


@dataclass(frozen=True)
class Contrast:
    """One test. `above` and `below` are sentences without a full stop; the first {} is a number without its sign."""

    title: str  # "610m · SC"
    quantity: Quantity
    above: str  # "MLM 40% scores {} points above CLM on SC at 610m"
    below: str
    margin: float = 0.0
    paper: float | None = None
    remark: Remark | None = None

    @property
    def models(self) -> tuple[Model, ...]:
        return self.quantity.models

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.quantity.tasks


@dataclass(frozen=True)
class AnyOf:
    """At least one of several contrasts holds: the clearest stands for all, its p-value times their number."""

    title: str
    options: tuple[Contrast, ...]
    paper: float | None = None
    margin: float = 0.0

    @property
    def models(self) -> tuple[Model, ...]:
        return tuple(dict.fromkeys(model for one in self.options for model in one.models))

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(task for one in self.options for task in one.tasks))


Test = Contrast | AnyOf


@dataclass(frozen=True)
class Statement:
    """What is claimed, and how it is found out. Every test of it must hold."""

    id: str
    says: str
    gist: str  # the same as the beginning of a list of numbers: "MLM 40% minus CLM on SC"
    contrast: str  # in one line, for docs/claims.md
    needs: str  # the runs, in words
    find: Callable[[Bench], list[Test]]
    on: tuple[Family, ...]  # the families it speaks of
    figure: str
    paper: str = "no numbers known"
    source: Source = "paper"
    caveats: tuple[str, ...] = ()
    equal_data: bool = False  # objectives are compared by what they make of the same data

    def tests(self, bench: Bench) -> list[Test]:
        """Those whose models are all fine-tuned on what they ask about."""
        return [one for one in self.find(bench) if bench.plans(one.models, one.tasks)]


def ahead(
    bench: Bench,
    line: Line,
    on: str,
    more: tuple[str, Model],
    less: tuple[str, Model],
    *,
    when: str = "",
    title: str = "",
    metric: str = "",
    margin: float = 0.0,
    remark: Remark | None = None,
) -> Contrast:
    """`more` scores above `less`, both as (how it is called, model)."""
    difference = gap(bench, more[1], less[1], on, metric)
    what = f"{on} ({metric})" if metric else on
    where = f"on {what} at {line.title}{f', {when}' if when else ''}"
    return Contrast(
        title or " · ".join(one for one in (line.title, when, what) if one),
        difference,
        f"{more[0]} scores {{}} points above {less[0]} {where}",
        f"{more[0]} scores {{}} points below {less[0]} {where}",
        margin,
        _rounded(difference.in_paper()),
        remark,
    )


def measured(
    title: str,
    quantity: Quantity,
    above: str,
    below: str,
    *,
    margin: float = 0.0,
    paper: float | None = None,
    remark: Remark | None = None,
) -> Contrast:
    """A contrast of any quantity; the paper's number is the same quantity of the paper's scores, where all are known."""
    known = _rounded(quantity.in_paper()) if paper is None else paper
    return Contrast(title, quantity, above, below, margin, known, remark)


def _rounded(points: float | None) -> float | None:
    """The paper prints two decimals; differences of them need no more."""
    return None if points is None else round(points, 6)
