"""C13 to C15 and C21: causal first, then masked, from scratch at equal steps (Figures 1, 6 and 11)."""

from __future__ import annotations

from biphase.report.claims.contrasts import Contrast, Statement, Test, ahead, measured
from biphase.report.claims.lines import Bench, Group, Line, common
from biphase.report.claims.objectives import CLM, CLOSE, MLM
from biphase.report.claims.quantities import mean, score
from biphase.report.recipes import Model
from biphase.specs import Family

EVERY: tuple[Family, ...] = ("SC", "TC", "QA", "IR")
QUARTER = 0.25
FIRST = "needs a run that is CLM for about a quarter of its steps and then MLM 40%"
PAIR = f"{FIRST}, and an MLM 40% run of the same size and length"


def shares(model: Model) -> str:
    """How a two-stage recipe is called: CLM→MLM 24-76."""
    causal = round(model.recipe.causal_share * 100)
    return f"CLM→MLM {causal}-{100 - causal}"


def pairs(line: Line) -> dict[int, tuple[Model, Model]]:
    """25-75 and MLM 40% by budget."""
    first, masked = line.split(QUARTER), line.mlm()
    return {steps: (first[steps], masked[steps]) for steps in common(first, masked)}


def smallest(group: Group) -> Line | None:
    """The smallest size of a group that has the pair."""
    return next((line for line in group if pairs(line)), None)


def compared(bench: Bench, line: Line, steps: int, when: str = "") -> list[Contrast]:
    first, masked = pairs(line)[steps]
    return [
        ahead(bench, line, family, (shares(first), first), (MLM, masked), when=when)
        for family in bench.families
    ]


def _c13(bench: Bench) -> list[Test]:
    chosen = [line for group in bench.groups if (line := smallest(group))]
    return [test for line in chosen for test in compared(bench, line, max(pairs(line)))]


def _c14(bench: Bench) -> list[Test]:
    if "SC" not in bench.families:
        return []
    found: list[Test] = []
    for line in bench.lines:
        splits = (*(line.split(share) for share in (0.25, 0.5, 0.75)), line.mlm(), line.clm())
        steps = common(*splits)
        if steps:
            found += _best_split(bench, line, *(one[steps[-1]] for one in splits))
    return found


def _best_split(
    bench: Bench, line: Line, quarter: Model, half: Model, most: Model, masked: Model, causal: Model
) -> list[Contrast]:
    best = mean(score(bench, one, "SC") for one in (quarter, half))
    name = f"{shares(quarter)} and {shares(half).removeprefix('CLM→MLM ')}"
    where = f"on SC at {line.title}"
    found = [
        measured(
            f"{line.title} · SC · {name} over {other}",
            best - score(bench, model, "SC"),
            f"{name} score {{}} points above {other} {where} (their mean)",
            f"{name} score {{}} points below {other} {where} (their mean)",
        )
        for other, model in ((shares(most), most), (MLM, masked), (CLM, causal))
    ]
    both = (shares(most), most), (MLM, masked)
    return [
        *found,
        *(
            ahead(
                bench, line, "SC", more, less, margin=-CLOSE, title=f"{line.title} · SC · {more[0]} no worse"
            )
            for more, less in (both, both[::-1])
        ),
    ]


def _c15(bench: Bench) -> list[Test]:
    chosen = [line for group in bench.groups if (line := smallest(group))]
    return [
        test
        for line in chosen
        for steps in sorted(pairs(line))[:-1]
        for test in compared(bench, line, steps, f"{steps:,} steps")
    ]


def _c21(bench: Bench) -> list[Test]:
    return [
        test
        for group in bench.groups
        for line in group
        if (least := smallest(group)) and line is not least and pairs(line)
        for test in compared(bench, line, max(pairs(line)))
    ]


STATEMENTS = (
    Statement(
        "C13",
        "A quarter CLM, then MLM, scores above MLM alone at equal steps, on all four families",
        "CLM→MLM 25-75 minus MLM 40%",
        "25-75 − MLM 40% from scratch, largest budget, smallest size that has both; each family",
        PAIR,
        _c13,
        EVERY,
        "splits",
        "610m: +0.85, +0.86, +5.00, +0.33 (SC, TC, QA, IR)",
        equal_data=True,
    ),
    Statement(
        "C14",
        "A quarter to a half of CLM is the best split; three quarters are as good as MLM alone",
        "Mean of 25-75 and 50-50 minus the others on SC; 75-25 within 0.5 of MLM 40%",
        "mean(25-75, 50-50) − each of 75-25, MLM 40%, CLM > 0; and 75-25 − MLM 40% within ±0.5 points; on SC",
        "needs runs of one size and length that are CLM for 0, 25, 50, 75 and 100% of their steps and MLM 40% for the "
        "rest",
        _c14,
        ("SC",),
        "splits",
        "SC at 610m: 87.85, 87.57, 87.06 (25-75, 50-50, 75-25), 87.00 (MLM), 83.58 (CLM)",
        caveats=("As good as means: within 0.5 points, tested from both sides.",),
        equal_data=True,
    ),
    Statement(
        "C15",
        "A quarter CLM, then MLM, is also ahead at smaller budgets",
        "CLM→MLM 25-75 minus MLM 40% at smaller budgets",
        "C13's contrast at every smaller budget of that size; each family",
        f"{FIRST}, and an MLM 40% run of the same size and length, both at two lengths or more",
        _c15,
        EVERY,
        "splits",
        "no such pairs known; at 22,000 steps 50-50 is best on QA (55.97), 75-25 on IR (77.81)",
        equal_data=True,
    ),
    Statement(
        "C21",
        "A quarter CLM, then MLM, is also ahead at larger sizes",
        "CLM→MLM 25-75 minus MLM 40% at larger sizes",
        "C13's contrast at every larger size; each family",
        f"{FIRST}, and an MLM 40% run of the same length, both at two sizes or more",
        _c21,
        EVERY,
        "splits",
        "1b: the same broad advantage, no numbers",
        equal_data=True,
    ),
)
