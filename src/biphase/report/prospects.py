"""Power analysis before a study is run: which claims it will test, and the smallest effects its seeds can detect.

Which tests exist follows from the plan's recipes alone. The noise of scores is estimated from the study's trials where
enough are finished; otherwise it is assumed, and the assumed numbers are printed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from textwrap import wrap
from typing import Any

import numpy as np

from biphase.report.contrasts import (
    AnyOf,
    ComparableModels,
    Noise,
    Source,
    Statement,
    Test,
    comparable_models,
    rows_in_common,
)
from biphase.report.evidence import Evidence
from biphase.report.verdicts import ALPHA, WORTH_FINDING, needs, sought, statements
from biphase.specs import Family, Hub
from biphase.specs.tasks import FAMILIES
from biphase.study.costs import shape_of
from biphase.study.plan import Plan
from biphase.text import counted, effect

# Standard deviation of one score over fine-tuning seeds, in points; small models are noisier.
ASSUMED, ASSUMED_OF_SMALL = (
    {short: family.assumed_sd[small] for short, family in FAMILIES.items()} for small in (0, 1)
)
SMALL = 100_000_000  # parameters in the blocks
ENOUGH = 3  # degrees of freedom from which a measured standard deviation replaces the assumed one
WIDTH, SAYS = 110, 44  # columns of the text, and of the claim


@dataclass(frozen=True)
class Expected:
    """A planned test and its power."""

    title: str
    models: tuple[str, ...]
    sd: float  # of the contrast, over fine-tuning seeds
    seeds: tuple[int, int]  # pretraining seeds, fine-tuning seeds
    detectable: (
        float  # smallest effect beyond the margin found with 80% power at the corrected level, in points
    )
    effect: float  # the effect it should find: the paper's beyond the margin, or 0.5 points
    paper: float | None
    margin: float

    @property
    def weak(self) -> bool:
        return self.detectable > self.effect


@dataclass(frozen=True)
class Prospect:
    """A claim, and the tests that a study plans for it."""

    id: str
    says: str
    source: Source
    tested: bool
    parts: tuple[Expected, ...]
    why: str  # why it will not be tested
    noise: str  # the source of the standard deviations
    assumed: dict[Family, float]  # the standard deviations used where none was measured


def prospects(plan: Plan, evidence: Evidence | None = None) -> list[Prospect]:
    """The prospects of every claim, in the order of the report. `evidence`: the finished trials of this plan."""
    over = comparable_models(plan, evidence.models if evidence else None)
    found = [(one, one.tests(over)) for one in statements(over)]
    tested = [any(max(_seeds(test, over)) > 1 for test in tests) for _, tests in found]
    level = ALPHA / max(1, sum(tested))
    measured = _measured(evidence) if evidence else {}
    assumed = ASSUMED_OF_SMALL if _small(plan) else ASSUMED
    return [
        _prospect(over, statement, tests if will else [], level, measured, assumed, bool(tests) and not will)
        for (statement, tests), will in zip(found, tested, strict=True)
    ]


def _prospect(
    over: ComparableModels,
    statement: Statement,
    tests: list[Test],
    level: float,
    measured: dict[str, float],
    assumed: dict[Family, float],
    one_seed: bool,
) -> Prospect:
    used = {task for test in tests for task in test.tasks}
    if used:
        known = used & set(measured)
        noise = "from this ledger" if known == used else "partly from this ledger" if known else "assumed"
    else:
        noise = ""
    why = "" if tests else "needs two fine-tuning seeds or more" if one_seed else needs(over, statement)

    def sd_of(task: str) -> float:
        return measured.get(task, assumed[over.tasks[task].family])

    return Prospect(
        id=statement.id,
        says=statement.says,
        source=statement.source,
        tested=bool(tests),
        parts=tuple(_expected(test, over, level, sd_of) for test in tests),
        why=why,
        noise=noise,
        assumed=assumed,
    )


def _small(plan: Plan) -> bool:
    """Whether every model is known to have fewer than `SMALL` parameters in its blocks."""
    shapes = [shape_of(run) if run.corpus or isinstance(run.start, Hub) else None for run in plan.study.runs]
    return all(shape is not None and shape.blocks < SMALL for shape in shapes)


def _seeds(test: Test, over: ComparableModels) -> tuple[int, int]:
    """The pretraining seeds that all its models share, and the fine-tuning seeds."""
    return min(len(one) for one in rows_in_common(list(test.models)).values()), over.seeds(test.models)


def _expected(test: Test, over: ComparableModels, level: float, noise: Noise) -> Expected:
    seeds = _seeds(test, over)
    if isinstance(test, AnyOf):
        options = [_expected(one, over, level / len(test.options), noise) for one in test.options]
        easiest = min(options, key=lambda one: one.detectable)
        sd, least = easiest.sd, easiest.detectable
    else:
        sd = math.sqrt(test.quantity.variance(noise))
        least = sd * _unit(*seeds, level)
    return Expected(
        title=test.title,
        models=tuple(one.name for one in test.models),
        sd=sd,
        seeds=seeds,
        detectable=least,
        effect=sought(test.paper, test.margin),
        paper=test.paper,
        margin=test.margin,
    )


@cache
def _unit(pretrained: int, tuned: int, level: float) -> float:
    """The detectable effect for a standard deviation of 1 over fine-tuning seeds; it scales linearly.

    Assumes that another pretraining seed changes a score as much as another fine-tuning seed does.
    """
    from biphase.report.statistics import power

    if pretrained < 2:
        return power.detectable(1.0, tuned, level)
    return power.detectable_crossed(power.Noise(1.0, 0.0, 1.0), pretrained, tuned, level)


def _measured(evidence: Evidence) -> dict[str, float]:
    """Task → standard deviation over fine-tuning seeds in points, pooled over all models, then over the family.

    Tasks with fewer than `ENOUGH` degrees of freedom in both are left out.
    """
    found: dict[str, float] = {}
    families: dict[Family, list[tuple[float, int]]] = {}
    for task, about in evidence.tasks.items():
        squares, free = 0.0, 0
        for model in evidence.models.values():
            for row in 100 * evidence.scores(model, task):
                known = row[np.isfinite(row)]
                if known.size > 1:
                    squares += float(np.square(known - known.mean()).sum())
                    free += known.size - 1
        families.setdefault(about.family, []).append((squares, free))
        if free >= ENOUGH and squares > 0:
            found[task] = math.sqrt(squares / free)
    for task, about in evidence.tasks.items():
        squares, free = (sum(part) for part in zip(*families[about.family], strict=True))
        if task not in found and free >= ENOUGH and squares > 0:
            found[task] = math.sqrt(squares / free)
    return found


# ---------------------------------------------------------------- as text


def as_json(found: list[Prospect]) -> list[dict[str, Any]]:
    """The prospects for JSON; unknown numbers are null."""
    return [
        {
            "id": one.id,
            "says": one.says,
            "source": one.source,
            "tested": one.tested,
            "noise": one.noise,
            "needs": one.why,
            "tests": [
                {
                    "title": part.title,
                    "models": list(part.models),
                    "seeds": list(part.seeds),
                    "sd": part.sd,
                    "detectable": part.detectable if math.isfinite(part.detectable) else None,
                    "paper": part.paper,
                    "margin": part.margin,
                    "weak": part.weak,
                }
                for part in one.parts
            ],
        }
        for one in found
    ]


def render(found: list[Prospect]) -> list[str]:
    """The prospects for a terminal: one line for each claim that will be tested, and one that names the others."""
    tested = [one for one in found if one.tested]
    if not tested:
        return _untested(found)
    lines = [
        f"{len(tested)} of {counted(len(found), 'claim')} will be tested; effects in points beyond any margin, found with 80% power",
        f"  noise of scores: {_noise(tested)}",
        *(_line(one) for one in tested),
    ]
    if any(part.weak for one in tested for part in one.parts):
        lines.append(
            f"  weak: tests that would miss the paper's effect, or {WORTH_FINDING:g} where it gives none"
        )
    return [*lines, *_untested(found)]


def _line(one: Prospect) -> str:
    weak = sum(part.weak for part in one.parts)
    finds = _span([part.detectable for part in one.parts])
    return (
        f"  {one.id:<4} {_cut(one.says, SAYS):<{SAYS}}  {counted(len(one.parts), 'test'):>8}  finds {finds:<11}  "
        f"{_paper(one):<17}  {f'{weak} weak' if weak else ''}"
    ).rstrip()


def _noise(tested: list[Prospect]) -> str:
    sources = {one.noise for one in tested}
    if sources == {"from this ledger"}:
        return "from this ledger"
    assumed = ", ".join(f"{family} {sd:g}" for family, sd in tested[0].assumed.items())
    some = "where this ledger does not tell, " if sources != {"assumed"} else ""
    return f"{some}assumed, an sd over seeds for each task of {assumed}"


def _untested(found: list[Prospect]) -> list[str]:
    names = [one.id for one in found if not one.tested]
    if not names:
        return []
    text = f"not tested: {', '.join(_runs(names))}; the report says what each would need"
    return wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")


def _runs(names: list[str]) -> list[str]:
    """Abbreviate consecutive ids: C5, C6, C7 becomes C5–C7."""
    runs: list[list[str]] = []
    for name in names:
        if runs and _follows(runs[-1][-1], name):
            runs[-1].append(name)
        else:
            runs.append([name])
    return [one[0] if len(one) == 1 else f"{one[0]}–{one[-1]}" for one in runs]


def _follows(name: str, other: str) -> bool:
    ours = all(one[:1] in ("C", "B") and one[1:].isdecimal() for one in (name, other))
    return ours and name[0] == other[0] and int(other[1:]) == int(name[1:]) + 1


def _paper(one: Prospect) -> str:
    known = [part.effect for part in one.parts if part.paper is not None]
    return f"paper {_span(known)}" if known else ""


def _span(values: list[float]) -> str:
    low, high = (effect(value) for value in (min(values), max(values)))
    return low if low == high else f"{low}–{high}"


def _cut(text: str, width: int) -> str:
    """Shorten a text to a width at a word boundary."""
    return text if len(text) <= width else f"{text[:width].rsplit(' ', 1)[0].rstrip(',')}…"
