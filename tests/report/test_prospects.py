"""What a study will be able to find, said before it runs: which claims, how large an effect, by what noise."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from biphase import CATALOG, CLM, MLM, SIZES, Claim, Finetune, Pretrain, Stage, Study
from biphase.papers.gisserot2025.claims import STATEMENTS
from biphase.report.evidence import gather
from biphase.report.prospects import ASSUMED, ASSUMED_OF_SMALL, as_json, prospects, render
from biphase.report.statistics.power import Noise, power_crossed, power_of
from biphase.report.verdicts import ALPHA
from biphase.store import Store
from biphase.study.load import load
from biphase.study.plan import identities, make_plan

ROOT = Path(__file__).parents[2]


@pytest.fixture
def plan_of(tmp_path):
    def plan(study):
        loaded = study if isinstance(study, Study) else load(ROOT / "studies" / f"{study}.py").study
        return make_plan(loaded, identities(Store(tmp_path)))

    return plan


def run(name, objective, steps=42_000, **fields):
    return Pretrain(name, start=SIZES["610m"], corpus="fineweb-edu", stages=Stage(objective, steps), **fields)


BOTH = run("clm", CLM()), run("mlm", MLM(0.4))


def study(*runs, tasks=("sst2",), claims=(), **fields):
    return Study("s", runs or BOTH, Finetune(tuple(CATALOG[one] for one in tasks), **fields), claims)


def by_id(found):
    return {one.id: one for one in found}


TESTED = {"paper": 24, "two_stage": 13, "quickstart": 5}


@pytest.mark.parametrize("name", TESTED)
def test_what_is_planned_is_what_the_report_will_test(plan_of, name):
    plan = plan_of(name)
    found = prospects(plan)
    assert sum(one.tested for one in found) == TESTED[name]
    assert [one.id for one in found] == [one.id for one in STATEMENTS]
    assert {one.noise for one in found} == {"assumed", ""}
    for one in found:
        assert bool(one.parts) == one.tested == (one.why == "")


def test_the_detectable_effect_is_found_four_times_in_five(plan_of):
    """A difference of two scores of one SC task, with the noise that is assumed, at the level of the first step."""
    (part,) = by_id(prospects(plan_of(study())))["C1"].parts
    tested = 2  # C1 and C12
    assert part.sd == pytest.approx(math.sqrt(2) * ASSUMED["SC"])
    assert power_of(part.detectable, part.sd, 5, ALPHA / tested) == pytest.approx(0.8, abs=1e-4)
    assert (part.paper, part.effect, part.weak) == (3.42, 3.42, False)


def test_three_tasks_are_less_noisy_than_one(plan_of):
    one = by_id(prospects(plan_of(study(tasks=("sst2",), lrs=(1e-5,)))))["C1"].parts[0]
    three = by_id(prospects(plan_of(study(tasks=("sst2", "mnli", "qqp"), lrs=(1e-5,)))))["C1"].parts[0]
    assert three.sd == pytest.approx(one.sd / math.sqrt(3))
    assert three.sd / math.sqrt(2) == pytest.approx(0.12, abs=0.005)  # as in the paper's Figure 1


def test_more_seeds_find_smaller_effects_and_one_finds_none(plan_of):
    def detectable(seeds):
        return by_id(prospects(plan_of(study(seeds=range(seeds)))))["C1"]

    assert detectable(10).parts[0].detectable < 0.6 * detectable(5).parts[0].detectable
    alone = detectable(1)
    assert (alone.tested, alone.parts, alone.why) == (False, (), "needs two fine-tuning seeds or more")


def test_pretraining_seeds_are_judged_by_the_crossed_test(plan_of):
    runs = [replace(one, name=f"{one.name}{seed}", seed=seed) for one in BOTH for seed in (1, 2, 3)]
    (part,) = by_id(prospects(plan_of(study(*runs))))["C1"].parts
    noise = Noise(part.sd, 0.0, part.sd)
    assert part.seeds == (3, 5)
    assert power_crossed(part.detectable, noise, 3, 5, ALPHA / 2) == pytest.approx(0.8, abs=1e-3)


def test_every_claim_that_is_tested_raises_the_bar(plan_of):
    own = tuple(Claim(f"c{n}", "again", "mlm", "clm") for n in range(20))
    few, many = (by_id(prospects(plan_of(study(claims=some))))["C1"].parts[0] for some in ((), own))
    assert many.detectable > 1.5 * few.detectable
    assert many.sd == few.sd


def test_what_beats_each_ratio_pays_for_the_choice(plan_of):
    runs = [run(f"mlm{ratio}", MLM(ratio / 100)) for ratio in (20, 30, 40)]
    found = prospects(plan_of(study(*runs)))
    assert [one.id for one in found if one.tested] == ["C7"]
    (part, *_) = by_id(found)["C7"].parts
    # Two other ratios, one size, one family: two comparisons.
    assert power_of(part.detectable, math.sqrt(2) * ASSUMED["SC"], 5, ALPHA / 2) == pytest.approx(
        0.8, abs=1e-4
    )


def test_the_predicted_power_is_what_simulated_studies_have(plan_of):
    """At the detectable effect, four studies in five reproduce the claim."""
    made = study(lrs=(1e-5,))  # C1 alone
    plan = plan_of(made)
    (part,) = by_id(prospects(plan))["C1"].parts
    draw = np.random.default_rng(8)
    gaps = part.detectable + draw.normal(0, part.sd, (4_000, 5))
    t = gaps.mean(axis=1) / (gaps.std(axis=1, ddof=1) / math.sqrt(5))
    assert np.mean(t > 2.776) == pytest.approx(0.8, abs=0.02)


# ---------------------------------------------------------------- noise from the ledger


def test_noise_is_taken_from_the_ledger_where_it_has_enough(three, invent, tmp_path):
    plan, store = invent(three, tmp_path)
    evidence = gather(plan, store)
    found = by_id(prospects(plan, evidence))
    assert found["C1"].noise == "from this ledger"
    rows = [100 * evidence.scores(model, "sst2")[0] for model in evidence.models.values()]
    sd = math.sqrt(np.mean([row.var(ddof=1) for row in rows]))
    assert found["C1"].parts[0].sd == pytest.approx(math.sqrt(2) * sd)


def test_noise_is_assumed_where_the_ledger_has_too_little(three, invent, tmp_path):
    plan, store = invent(three, tmp_path, results=("clm",))  # one model: two degrees of freedom for a task
    found = by_id(prospects(plan, gather(plan, store)))
    assert found["C1"].noise == "assumed"
    assert found["C3"].noise == "from this ledger"  # two tasks of a family, pooled


# ---------------------------------------------------------------- as text


@pytest.mark.parametrize("name", TESTED)
def test_the_text_fits_a_terminal_and_names_every_claim(plan_of, name):
    found = prospects(plan_of(name))
    lines = render(found)
    assert max(len(line) for line in lines) <= 110
    shown = {line.split()[0] for line in lines if line.startswith("  ")}
    assert {one.id for one in found if one.tested} <= shown
    assert lines[0].startswith(f"{TESTED[name]} of 27 claims will be tested")


def test_the_text_shows_what_is_found_beside_the_papers(plan_of):
    lines = render(prospects(plan_of("paper")))
    row = next(line for line in lines if line.startswith("  C13"))
    assert row == (
        "  C13  A quarter CLM, then MLM, scores above MLM…     4 tests  finds 0.65–2.75    paper 0.33–5.00    1 weak"
    )
    assert lines[1] == (
        "  noise of scores: assumed, an sd over seeds for each task of SC 0.2, TC 0.2, QA 0.85, IR 0.5"
    )
    assert lines[-1] == "  not tested: C21, B5–B6; the report says what each would need"


def test_effects_that_no_score_can_have_are_not_spelt_out(plan_of):
    many = tuple(Claim(f"c{n}", "again", "mlm", "clm") for n in range(9))
    rows = render(prospects(plan_of(study(tasks=("squad",), seeds=(0, 1), claims=many))))
    assert next(row for row in rows if row.startswith("  C2")).split("finds ")[1].split()[0] == ">100"


def test_a_program_reads_the_same(plan_of):
    plan = plan_of(study(claims=Claim("mine", "it helps", "mlm", "clm", margin=-1)))
    told = json.loads(json.dumps(as_json(prospects(plan)), allow_nan=False))
    found = {one["id"]: one for one in told}
    assert len(told) == 28
    (test,) = found["mine"]["tests"]
    assert (test["title"], test["models"], test["seeds"], test["margin"]) == (
        "SC",
        ["mlm", "clm"],
        [1, 5],
        -1,
    )
    (part,) = by_id(prospects(plan))["mine"].parts
    assert (test["detectable"], test["sd"], test["weak"]) == (part.detectable, part.sd, part.weak)
    assert (found["B5"]["tested"], found["B5"]["tests"]) == (False, [])
    assert found["B5"]["needs"] == "needs a task of retrieval (IR)"


def test_own_claims_stand_in_the_text(plan_of):
    lines = render(prospects(plan_of(study(claims=Claim("mine", "it helps", "mlm", "clm")))))
    assert any(line.startswith("  mine it helps") for line in lines)


def test_a_study_that_tests_nothing_says_so(plan_of):
    (line,) = render(prospects(plan_of(Study("s", BOTH))))
    assert line == "  not tested: C1–C21, B1–B6; the report says what each would need"


def test_planning_stays_without_torch():
    code = (
        "import sys\nfrom pathlib import Path\nfrom biphase.cli.app import planned\n"
        "plan, _, _ = planned(Path('studies/paper.py'), Path('no-such-store'))\n"
        "from biphase.report.prospects import prospects; from biphase.report.prospects import render\nrender(prospects(plan))\n"
        "print(*sorted({'torch', 'transformers', 'vl_convert'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_small_models_are_taken_to_be_noisier(plan_of):
    """As they were measured; one large model beside them, or one of unknown size, and the paper's noise is assumed."""
    small = tuple(replace(one, start=SIZES["30m"]) for one in BOTH)
    (part,) = by_id(prospects(plan_of(study(*small))))["C1"].parts
    assert part.sd == pytest.approx(math.sqrt(2) * ASSUMED_OF_SMALL["SC"])
    assert "SC 0.7, TC 0.45, QA 3, IR 1.4" in render(prospects(plan_of(study(*small))))[1]
    mixed = by_id(prospects(plan_of(study(*small, replace(BOTH[0], name="large")))))["C1"].parts
    assert mixed[0].sd == pytest.approx(math.sqrt(2) * ASSUMED["SC"])
