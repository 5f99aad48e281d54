"""C7 to C9 and C16: does it matter how much is masked, where, and after what (Figures 3 and 7)?"""

from __future__ import annotations

from biphase.report.claims.contrasts import AnyOf, Contrast, Statement, Test, ahead, measured
from biphase.report.claims.lines import Bench, Group, Line
from biphase.report.claims.quantities import Quantity, Spread, mean, score, slope
from biphase.report.recipes import Model
from biphase.specs import Family

NOISY = "A spread holds noise too: where one side is noisier, its spread is larger for that alone."
TENTH = 10.0  # slopes are given for ten more tokens in a hundred


def percent(ratio: float) -> str:
    return f"{ratio * 100:g}%"


def masked(line: Line, at_least: int) -> dict[float, Model]:
    """The ratios of a line at the longest budget that has enough of them."""
    budgets = sorted({one.recipe.steps for one in line.models}, reverse=True)
    return next((found for steps in budgets if len(found := line.ratios(steps)) >= at_least), {})


def _lines(group: Group, at_least: int) -> list[tuple[Line, dict[float, Model]]]:
    return [(line, found) for line in group if (found := masked(line, at_least))]


def _steps(ratios: dict[float, Model]) -> int:
    return next(iter(ratios.values())).recipe.steps


def _about(group: Group) -> str:
    return f" · {group[0].about}" if group[0].about else ""


def _c7(bench: Bench) -> list[Test]:
    """For each ratio: somewhere another one is better."""
    found: list[Test] = []
    for group in bench.groups:
        known = _lines(group, 2)
        everywhere = [
            ratio
            for ratio in sorted({one for _, ratios in known for one in ratios})
            if all(ratio in ratios for _, ratios in known)
        ]
        if len(everywhere) < 2 or not bench.families:
            continue
        for ratio in everywhere:
            options = tuple(
                _better(bench, line, family, ratios, other, ratio)
                for line, ratios in known
                for family in bench.families
                for other in everywhere
                if other != ratio
            )
            paper = max((one.paper for one in options if one.paper is not None), default=0.0)
            found.append(AnyOf(f"{percent(ratio)}{_about(group)}", options, paper if paper > 0 else None))
    return found


def _better(
    bench: Bench, line: Line, family: Family, ratios: dict[float, Model], other: float, ratio: float
) -> Contrast:
    more, less = (f"MLM {percent(other)}", ratios[other]), (f"MLM {percent(ratio)}", ratios[ratio])
    return ahead(bench, line, family, more, less, title=f"{more[0]} on {family} at {line.title}")


def _preference(bench: Bench, ratios: dict[float, Model], families: tuple[Family, ...]) -> Quantity:
    """Points gained for ten percent more masking, mean over families."""
    return slope(
        (ratio * TENTH, mean(score(bench, model, family) for family in families))
        for ratio, model in ratios.items()
    )


def _c8(bench: Bench) -> list[Test]:
    found: list[Test] = []
    families = tuple(bench.families)
    for group in bench.groups:
        known, about = _lines(group, 2), _about(group)
        if known and "IR" in families:
            sizes = ", ".join(line.size for line, _ in known)
            found.append(
                measured(
                    f"IR over ratios{about}",
                    mean(_preference(bench, ratios, ("IR",)) for _, ratios in known),
                    f"IR gains {{}} points for ten percent more masking (mean over {sizes}{about})",
                    f"IR loses {{}} points for ten percent more masking (mean over {sizes}{about})",
                )
            )
        sized = [one for one in known if one[0].parameters and _steps(one[1]) == _steps(known[-1][1])]
        if len(sized) > 1 and families:
            (small, few), (large, many) = sized[0], sized[-1]
            both = [ratio for ratio in few if ratio in many]  # a slope over other ratios is another slope
            if len(both) < 2:
                continue
            few, many = ({ratio: models[ratio] for ratio in both} for models in (few, many))
            than = f"for ten percent more masking than {small.size} (mean over families{about})"
            found.append(
                measured(
                    f"{large.size} against {small.size}{about}",
                    _preference(bench, many, families) - _preference(bench, few, families),
                    f"{large.size} gains {{}} points more {than}",
                    f"{large.size} gains {{}} points less {than}",
                )
            )
    return found


def _c9(bench: Bench) -> list[Test]:
    """The ends against the middle, but at the smallest size, where the paper saw none."""
    wanted: tuple[Family, ...] = ("TC", "QA")
    found: list[Test] = []
    for group in bench.groups:
        for line in group[1:] if len(group) > 1 else group:
            ratios = masked(line, 3)
            if not ratios:
                continue
            low, *middle, high = ratios.values()
            for family in (one for one in wanted if one in bench.families):
                ends = mean(score(bench, one, family) for one in (low, high))
                between = mean(score(bench, one, family) for one in middle)
                where = f"those between on {family} at {line.title}"
                found.append(
                    measured(
                        f"{line.title} · {family}",
                        ends - between,
                        f"the lowest and the highest ratio score {{}} points above {where}",
                        f"the lowest and the highest ratio score {{}} points below {where}",
                    )
                )
    return found


def _c16(bench: Bench) -> list[Test]:
    found: list[Test] = []
    for line in bench.lines:
        both = robust(line)
        if not both or not bench.families:
            continue
        scratch, after = (
            mean(
                Spread(tuple(score(bench, one, family) for one in models.values()))
                for family in bench.families
            )
            for models in both
        )
        how = f"over {len(both[0])} ratios at {line.title} (mean over families)"
        found.append(
            measured(
                f"{line.title} · spread over {len(both[0])} ratios",
                scratch - after,
                f"MLM from scratch spreads {{}} points more than MLM after CLM {how}",
                f"MLM from scratch spreads {{}} points less than MLM after CLM {how}",
            )
        )
    return found


def robust(line: Line) -> tuple[dict[float, Model], dict[float, Model]] | None:
    """MLM from scratch and MLM after a long CLM, of one budget, at the same ratios: three or more."""
    for steps in sorted({one.recipe.steps for one in line.models}, reverse=True):
        scratch = line.ratios(steps)
        candidates = [
            (len(shared), switch, shared)
            for switch, after in line.mostly_causal(steps).items()
            if len(shared := sorted(set(scratch) & set(after))) >= 3
        ]
        if candidates:
            _, switch, shared = max(candidates)
            after = line.mostly_causal(steps)[switch]
            return {one: scratch[one] for one in shared}, {one: after[one] for one in shared}
    return None


EVERY: tuple[Family, ...] = ("SC", "TC", "QA", "IR")
STATEMENTS = (
    Statement(
        "C7",
        "No masking ratio is best for all families and sizes",
        "The clearest lead over each ratio",
        "for each ratio: some other ratio scores above it on some family at some size (Bonferroni over these); all ratios",
        "needs MLM runs of the same size and length at two ratios or more",
        _c7,
        EVERY,
        "ratio",
        "best at 610m: 20, 20, 20, 50%; at 1b: 40, 50, 40, 50% (SC, TC, QA, IR)",
    ),
    Statement(
        "C8",
        "Retrieval prefers high masking ratios, and larger models prefer higher ones",
        "Gain for ten percent more masking",
        "slope of IR over the ratio > 0, mean over sizes; slope, mean over families, at the largest − at the smallest size > 0",
        "needs MLM runs of the same size and length at two ratios or more",
        _c8,
        EVERY,
        "ratio",
    ),
    Statement(
        "C9",
        "Token classification and question answering are U-shaped over the ratio, but at the smallest size",
        "The ends of the ratios minus the middle",
        "mean of the lowest and the highest ratio − mean of those between > 0 on TC and QA; each size but the smallest",
        "needs MLM runs of the same size and length at three ratios or more",
        _c9,
        ("TC", "QA"),
        "ratio",
    ),
    Statement(
        "C16",
        "CLM first makes the masking ratio matter less",
        "Spread over ratios of MLM from scratch minus MLM after CLM",
        "spread over ratios (largest − smallest, seed by seed, mean over families) of MLM from scratch − after CLM > 0",
        "needs MLM runs at three ratios or more, and the same ratios after CLM for nine tenths of the same length",
        _c16,
        EVERY,
        "robustness",
        caveats=(
            "A short MLM stage has less time to make ratios differ, so a smaller spread is partly a matter of course.",
            NOISY,
        ),
    ),
)
