"""The claims that a study makes itself (`Study(claims=…)`), as statements like those of the catalog."""

from __future__ import annotations

from biphase.report.claims.contrasts import Contrast, Statement, Test, measured
from biphase.report.claims.lines import Bench
from biphase.report.claims.quantities import gap
from biphase.report.recipes import Model
from biphase.specs import Claim


def own_statements(bench: Bench) -> list[Statement]:
    """In the order of the study file."""
    return [_statement(bench, claim) for claim in bench.plan.study.claims]


def _statement(bench: Bench, claim: Claim) -> Statement:
    more, less = _model(bench, claim.more), _model(bench, claim.less)
    on = claim.on or tuple(bench.families)
    beyond = f", which must exceed {claim.margin:g}" if claim.margin else ""
    alike = more is less
    return Statement(
        id=claim.name,
        says=claim.says,
        gist=f"{claim.more} minus {claim.less}{beyond}",
        contrast=f"{claim.more} − {claim.less} > {claim.margin:g} on each of {', '.join(on)}",
        needs=f"cannot be tested: {claim.more} and {claim.less} are one recipe, so there is nothing to compare",
        find=lambda bench: [] if alike else _tests(bench, claim, more, less, on),
        on=tuple(one for one in bench.families if one in on),
        figure="",
        paper="",
        source="study",
        equal_data=True,
    )


def _tests(bench: Bench, claim: Claim, more: Model, less: Model, on: tuple[str, ...]) -> list[Test]:
    return [_test(bench, claim, more, less, where) for where in on]


def _test(bench: Bench, claim: Claim, more: Model, less: Model, where: str) -> Contrast:
    what = f"{where} ({claim.metric})" if claim.metric else where
    return measured(
        what,
        gap(bench, more, less, where, claim.metric),
        f"{claim.more} scores {{}} points above {claim.less} on {what}",
        f"{claim.more} scores {{}} points below {claim.less} on {what}",
        margin=claim.margin,
    )


def _model(bench: Bench, result: str) -> Model:
    """The model that a result is a draw of; two names of one state are one model."""
    at = bench.plan.results[result]
    return next(
        model for model in bench.models.values() if at in [bench.plan.results[name] for name in model.results]
    )
