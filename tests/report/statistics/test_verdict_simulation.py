"""Verdicts on simulated studies: false ones are rarer than 5%, and true ones are found."""

import math

import pytest
from page_tables import percent, show
from simulated_studies import RULES, SCENARIOS, TWO_SD, Scenario, by_model, look_repeatedly, normal, simulate

from biphase.report.statistics.moderated import Looks

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
EFFECTS = [scenario for scenario in SCENARIOS if scenario.truth.any() and "null" not in scenario.name]
NULLS = [scenario for scenario in SCENARIOS if scenario not in EFFECTS]


def allowed(studies, sds=3):
    return 0.05 + sds * math.sqrt(0.05 * 0.95 / studies)


@pytest.mark.parametrize(
    "name",
    [
        "all equal",
        "noise shared by seed",
        "either-or on one task, 50%",
        "unequal variances over models",
        "one null part in each claim",
        "two models, one rate",
        "scores rounded to 1 point",
        "three or five seeds",
    ],
)
def test_false_verdicts_are_rare(name):
    rates = simulate(BY_NAME[name], ("used",), studies=200, batch=200)["used"]
    assert max(rates.false_reproduced, rates.false_refuted) < allowed(200)
    assert rates.covered > 0.945


def test_more_is_found_than_by_pairs():
    found = simulate(BY_NAME["the replica's scores and noise"], ("paired", "used"), studies=100, batch=100)
    assert found["used"].right > 2.5 * found["paired"].right
    assert found["used"].false_reproduced <= 0.05


def rules_for(scenario):
    return ("paired", "used") if scenario.name == "three or five seeds" else tuple(RULES)


@pytest.mark.campaign
def test_errors():
    studies, rows = 2000, []
    for scenario in NULLS:
        rates = simulate(scenario, rules_for(scenario), studies=studies)
        used = rates["used"]
        assert max(used.false_reproduced, used.false_refuted) < allowed(studies), scenario.name
        assert used.covered > 0.945, scenario.name
        cells = [
            " / ".join(percent(getattr(rates[rule], kind)) if rule in rates else "—" for rule in RULES)
            for kind in ("false_reproduced", "false_refuted", "covered")
        ]
        rows.append((scenario.name, "yes" if scenario.tuned else "no", *cells))
    header = ("scenario", "used to choose the rule", "false reproduced", "false refuted", "intervals cover")
    show(header, rows, error=2.5)


@pytest.mark.campaign
def test_power():
    rows = []
    for scenario in EFFECTS:
        rates = simulate(scenario, studies=2000)
        cells = [
            " / ".join(f"{getattr(rates[rule], kind):.2f}" for rule in RULES) for kind in ("right", "width")
        ]
        rows.append((scenario.name, *cells))
    show(("scenario", "right and clear verdicts of 12", "half width, points"), rows, error=0.4)


LOOKS = (
    Scenario("all equal", normal(), seeds=10),
    Scenario("unequal variances over models", by_model(0.7), seeds=10),
    Scenario("effects of 1 to 3 sd", normal(), truth=TWO_SD / 2, seeds=10),
)


def levels(spending):
    seeds = (3, 5, 10)
    if spending == "once":
        return {10: 0.05}
    if spending == "each time":
        return dict.fromkeys(seeds, 0.05)
    return {one: Looks(seeds).level(one) for one in seeds}


def test_looks_add_no_errors():
    rates = look_repeatedly(LOOKS[1], levels("declared"), 200)
    assert max(rates.false_reproduced, rates.false_refuted) < allowed(200)


@pytest.mark.campaign
def test_looks():
    rows = []
    for scenario in LOOKS:
        for spending in ("once", "declared", "each time"):
            rates = look_repeatedly(scenario, levels(spending), 1000)
            if spending != "each time":
                assert max(rates.false_reproduced, rates.false_refuted) < allowed(1000)
            errors = percent(rates.false_reproduced), percent(rates.false_refuted)
            rows.append((scenario.name, spending, *errors, f"{rates.right:.2f}"))
    header = ("scenario", "5% spent at 3, 5 and 10 seeds", "false reproduced", "false refuted", "right of 12")
    show(header, rows, error=2.5)
