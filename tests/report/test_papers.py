"""The papers beside gisserot2025: which models their claims find, the published numbers, and verdicts on invented truths.

Each claim is tested in the paper's own small study: the scores follow a truth in the claim's own words, and the verdict
must say what was put in. Truths never use the quantities of the claims.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from biphase import CLM, CONFIGS, MLM, SIZES, Stage, Study
from biphase.papers import load as paper_named
from biphase.report.contrasts import On
from biphase.report.selectors import Compare, Which, comparable_models
from biphase.report.verdicts import examined, judge
from biphase.specs.study import PAPERS
from biphase.study.load import load

BUNDLED = [name for name in PAPERS if name != "gisserot2025"]  # its claims: test_gisserot2025.py
SEEDS = (0, 1, 2, 3, 4)


@pytest.fixture(scope="module")
def small(plan_of):
    """The plan of a paper's small study, with five seeds of fine-tuning, so that its tests have power."""
    plans = {}

    def planned(paper: str):
        if paper not in plans:
            study = load(f"papers/{paper}/small").study
            plans[paper] = plan_of(replace(study, finetune=replace(study.finetune, seeds=SEEDS)))
        return plans[paper]

    return planned


@pytest.mark.parametrize("name", BUNDLED)
def test_every_claim_is_tested_in_the_full_study_and_in_the_small_one(plan_of, small, name):
    paper = paper_named(name)
    for plan in (plan_of(load(f"papers/{name}").study), small(name)):
        for one in examined(comparable_models(plan), [paper]):
            assert one.tests, one.statement.id
            assert len({test.title for test in one.tests}) == len(one.tests), one.statement.id


@pytest.mark.parametrize("name", BUNDLED)
def test_claims_of_papers_have_ids_of_their_own_and_say_what_they_need(name):
    others = [one.id for other in PAPERS if other != name for one in paper_named(other).statements]
    for one in paper_named(name).statements:
        assert one.id not in others
        assert one.needs.startswith("needs ")
        assert not one.needs.endswith(".")
        assert one.paper


@pytest.mark.parametrize("name", BUNDLED)
def test_the_page_has_every_claim_as_it_is_tested(name):
    page = (Path(__file__).parents[2] / "docs" / "papers.md").read_text(encoding="utf-8")
    for one in paper_named(name).statements:
        assert f"| {one.id} | {one.says} | {one.contrast} | {one.paper} |" in page, one.id


PUBLISHED = {  # of the full studies; one number for each test
    "antlm": {"A1": [2.2], "A2": [None], "A3": [None]},
    "detour": {"D1": [0.3], "D2": [None], "D3": [None], "D4": [None]},
    "dual_objective": {"O1": [None] * 8, "O2": [None], "O3": [None]},
    "ettin": {"E1": [2.93, 2.705], "E2": [1.94, 2.25], "E3": [2.41, 2.225]},
    "gpt_bert": {"G1": [None] * 2, "G2": [0.9], "G3": [3.1], "G4": [0.7]},
    "wsm": {"W1": [None], "W2": [None], "W3": [None], "W4": [None]},
}


@pytest.mark.parametrize("name", BUNDLED)
def test_a_published_gain_stands_beside_the_model_it_was_published_for(plan_of, small, name):
    def numbers(plan):
        claims = examined(comparable_models(plan), [paper_named(name)])
        return {one.statement.id: [test.paper for test in one.tests] for one in claims}

    assert numbers(plan_of(load(f"papers/{name}").study)) == {
        claim: [value if value is None else pytest.approx(value) for value in values]
        for claim, values in PUBLISHED[name].items()
    }
    assert not any(any(values) for values in numbers(small(name)).values())


# ---------------------------------------------------------------- hidden truths


class Draw:
    def __init__(self, *seed: object) -> None:
        self.chance = np.random.default_rng([ord(letter) for letter in repr(seed)])

    def effect(self, low=2.0, high=5.0):
        return float(self.chance.uniform(low, high))


Offsets = dict[str, float]  # result → points beside the level of the task


@dataclass(frozen=True)
class Scenario:
    paper: str
    parts: tuple[str, ...]
    truth: Callable[[Draw, dict[str, float]], Offsets]  # from what each part exceeds its margin by
    void: Callable[[Draw], Offsets] | None = None  # its premise fails


def removed(draw, x, gain=1):
    low = draw.effect()
    return {"frozen-low": low, "detour": low + x["gain"], "mlm": low + x["gain"] - gain * draw.effect(6, 8)}


def mixtures(draw, x):
    offsets = {}
    for times in ("x1", "x16"):
        best = draw.effect(5, 9)
        inner = ["ar50", "ar93.75"]
        draw.chance.shuffle(inner)
        offsets |= {f"{inner[0]}-{times}": best, f"{inner[1]}-{times}": best - draw.effect()}
        offsets |= {f"ar100-{times}": best - x[f"clm {times}"], f"ar0-{times}": best - x[f"masks {times}"]}
    return offsets


def preferences(draw, x):
    """Points for each ten percent of causal rows: on repeated text so many fewer."""
    shares = {"ar0": 0.0, "ar50": 5.0, "ar93.75": 9.375, "ar100": 10.0}
    fresh = draw.effect(-1, 1)
    slopes = {"x1": fresh, "x16": fresh - x["falls"]}
    return {f"{name}-{times}": slope * at for times, slope in slopes.items() for name, at in shares.items()}


def ahead(paper: str, leader: str, margin: float = 0.0, **others: str) -> Scenario:
    """One model leads others, one of them for each part."""

    def truth(draw, x):
        level = draw.effect()
        return {leader: level} | {other: level - margin - x[part] for part, other in others.items()}

    return Scenario(paper, tuple(others), truth)


SCENARIOS = {
    "D1": ahead("detour", "detour", gain="mlm"),
    "D2": Scenario("detour", ("gain",), removed, lambda draw: removed(draw, {"gain": draw.effect()}, -1)),
    "D3": ahead("detour", "frozen-mid", kept="frozen-low"),
    "D4": ahead("detour", "detour-even", gain="mlm"),
    "O1": Scenario("dual_objective", ("clm x1", "masks x1", "clm x16", "masks x16"), mixtures),
    "O2": Scenario(
        "dual_objective", ("cost",), lambda draw, x: {"ar93.75-x1": x["cost"] - 0.5, "ar93.75-x16": draw.effect(-9, 9)}
    ),
    "O3": Scenario("dual_objective", ("falls",), preferences),
    "G1": ahead("gpt_bert", "causal1", masks="causal0", clm="causal16"),
    "G2": ahead("gpt_bert", "causal15", clm="causal16"),
    "G3": ahead("gpt_bert", "causal1", many="causal15"),
    "G4": ahead("gpt_bert", "causal1", constant="constant"),
    "A1": ahead("antlm", "ant", masks="mlm"),
    "A2": ahead("antlm", "ant", clm="clm"),
    "A3": ahead("antlm", "ant", -0.5, first="clm-mlm"),
    "E1": ahead("ettin", "encoder", decoder="decoder"),
    "E2": ahead("ettin", "encoder", shifted="encoder-of-decoder", masks="decoder-mlm"),
    "E3": ahead("ettin", "encoder", clm="decoder-of-encoder"),
    "W1": ahead("wsm", "mean", decay="decayed"),
    "W2": ahead("wsm", "mean", window="late"),
    "W3": ahead("wsm", "mean", number="few"),
    "W4": ahead("wsm", "weighted", -0.5, weights="mean"),
}  # fmt: skip


def test_every_claim_has_a_scenario():
    assert set(SCENARIOS) == {one.id for name in BUNDLED for one in paper_named(name).statements}
    assert {name for name, one in SCENARIOS.items() if one.void} == {
        one.id for name in BUNDLED for one in paper_named(name).statements if one.premise
    }


@pytest.fixture(scope="module")
def judged(small, evidence_of):
    """The finding on a claim if the models' scores have these offsets; other models score anything."""

    def finding(name: str, draw: Draw, offsets: Offsets):
        paper = SCENARIOS[name].paper
        plan = small(paper)
        named = {name for run in plan.study.runs for name in run.results}
        assert set(offsets) <= named
        # A model that the claim does not name may score anything, but not one of a set of which it takes all.
        others = {
            result: 0.0 if "-x" in result or result == "mlm" else draw.effect(-20, 20) for result in named
        }
        noise = draw.chance.uniform(0.03, 0.08)
        tilt = {result: draw.effect(-4, 4) for result in named}  # alike on average over tasks, not on each

        def score(model, task, shape):
            tilted = tilt[model.name] * {"SC": 1, "TC": -1}[task.family]
            mean = 50 + (others | offsets)[model.name] + tilted
            return mean + draw.chance.normal(0, noise, shape)

        found = judge(evidence_of(plan, score, score), [paper_named(paper)])
        return next(one for one in found if one.id == name)

    return finding


CLAIMS = pytest.mark.parametrize("name", SCENARIOS)


def there(scenario: Scenario, draw: Draw) -> dict[str, float]:
    return {part: draw.effect() for part in scenario.parts}


@CLAIMS
@pytest.mark.parametrize("number", range(3))
def test_what_is_there_is_found(judged, name, number):
    scenario, draw = SCENARIOS[name], Draw(name, number)
    excess = there(scenario, draw)
    finding = judged(name, draw, scenario.truth(draw, excess))
    assert (finding.verdict, finding.condition) == ("reproduced", ""), finding.why
    measured = sorted(part.excess for part in finding.parts)
    assert measured == pytest.approx(sorted(excess.values()), abs=0.6)


@CLAIMS
def test_what_is_reversed_in_one_part_is_refuted(judged, name):
    scenario, draw = SCENARIOS[name], Draw(name, "reversed")
    for part in scenario.parts:
        excess = there(scenario, draw)
        finding = judged(name, draw, scenario.truth(draw, excess | {part: -excess[part]}))
        assert finding.verdict == "not reproduced", (part, finding.why)


@CLAIMS
def test_what_is_absent_is_hardly_ever_found_or_refuted(judged, name):
    """Each side errs in 5% of studies at most; of 10 studies more than 3 err in 0.1% of cases."""
    scenario, verdicts = SCENARIOS[name], []
    for number in range(10):
        draw = Draw(name, number, "absent")
        absent = there(scenario, draw) | {draw.chance.choice(scenario.parts): 0.0}
        verdicts.append(judged(name, draw, scenario.truth(draw, absent)).verdict)
    assert max(verdicts.count("reproduced"), verdicts.count("not reproduced")) <= 3


@pytest.mark.parametrize("name", [name for name, one in SCENARIOS.items() if one.void])
def test_without_its_premise_a_claim_is_not_applicable(judged, name):
    draw = Draw(name, "void")
    assert judged(name, draw, SCENARIOS[name].void(draw)).verdict == "not applicable"


# ---------------------------------------------------------------- models by description


def causal(recipe, run):
    return recipe.kind == "clm"


def masked(recipe, run):
    return recipe.kind == "mlm"


PAIR = Compare((Which(masked), Which(causal)))


def compared(plan_of, runs, grid, compare=PAIR):
    study = comparable_models(plan_of(Study("s", tuple(runs), grid("sst2"))))
    return [(case.line.title, tuple(model.name for model in case.models)) for case in compare.cases(study)]


def both(run, mark="", **fields):
    return run(f"clm{mark}", Stage(CLM(), 20), **fields), run(f"mlm{mark}", Stage(MLM(0.4), 20), **fields)


def test_models_that_differ_in_anything_but_what_is_named_are_not_compared(plan_of, run, grid):
    clm, mlm = both(run)
    differing = (
        replace(mlm, batch_tokens=256),
        replace(mlm, z_loss=1e-4),
        replace(mlm, schedule=replace(mlm.schedule, peak=2e-3)),
        replace(mlm, stages=(Stage(MLM(0.4), 24),)),
        replace(mlm, stages=(Stage(MLM(0.4), 20, freeze=("layers[:1]",)),)),
    )
    assert compared(plan_of, (clm, mlm), grid) == [("1m", ("mlm", "clm"))]
    for other in differing:
        assert compared(plan_of, (clm, other), grid) == []
    frozen = Compare(PAIR.models, ignoring=("freeze",))
    assert compared(plan_of, (clm, differing[-1]), grid, frozen) == [("1m", ("mlm", "clm"))]


def test_a_new_model_of_any_architecture_is_not_taken_for_an_adapted_encoder(plan_of, run, grid):
    detour = (Stage(CLM(), 18), Stage(MLM(0.4), 2))
    for start in (SIZES["1m"], CONFIGS["modernbert-1m"]):
        runs = run("mlm", Stage(MLM(0.4), 20), start=start), run("detour", *detour, start=start)
        assert compared(plan_of, runs, grid, paper_named("detour").statements[0].models) == []


def test_cases_are_told_apart_by_what_differs(plan_of, run, grid):
    longer = [
        replace(one, name=f"{one.name}-24", stages=(replace(one.stages[0], steps=24),)) for one in both(run)
    ]
    titles = [title for title, _ in compared(plan_of, (*both(run), *longer), grid)]
    assert titles == ["1m · 20 steps", "1m · 24 steps"]
    twice = (*both(run), *both(run, "-256", batch_tokens=256))
    titles = [title for title, _ in compared(plan_of, twice, grid)]
    assert len(set(titles)) == 2
    assert all(title.startswith("1m · (setting ") for title in titles)


def test_only_the_ends_of_equally_based_runs_are_compared(plan_of, run, grid):
    bases = run("base", Stage(MLM(0.3), 20), keep=(10,)), run("other", Stage(MLM(0.3), 24))
    on = [
        run(f"{base.name}-{stage.objective.name}", stage, start=base)
        for base, stage in ((bases[0], Stage(CLM(), 8)), (bases[1], Stage(MLM(0.4), 8)))
    ]
    assert compared(plan_of, (*bases, *on), grid) == []
    same = run("base-mlm", Stage(MLM(0.4), 8), start=bases[0])
    assert compared(plan_of, (*bases, *on, same), grid) == [("1m", ("base-mlm", "base-clm"))]


def test_several_models_come_in_their_order_or_not_at_all(plan_of, run, grid):
    runs = [run(f"mlm{percent}", Stage(MLM(percent / 100), 20)) for percent in (40, 20, 30)]
    several = Compare((Which(masked, at_least=3, order=lambda recipe, run: recipe.ratio),))
    study = comparable_models(plan_of(Study("s", tuple(runs), grid("sst2"))))
    (case,) = several.cases(study)
    assert [model.name for model in case.models[0]] == ["mlm20", "mlm30", "mlm40"]
    assert Compare((replace(several.models[0], at_least=4),)).cases(study) == []
    assert On(study, "SC").score(case.models[0][0]).tasks == ("sst2",)
