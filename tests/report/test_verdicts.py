"""Verdicts: the decision rules, the sentences, findings of full, half and empty ledgers; and power before a study."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_studies import FAMILIES as FOUR
from small_studies import K, claims_of, clm, mlm, run, study, two

from biphase import CLM, MLM, SIZES, TASKS, WSD, Claim, Hub, Pretrain, Stage, Study
from biphase.papers.gisserot2025 import PAPER
from biphase.report import verdicts
from biphase.report.build import collect, latex, markdown
from biphase.report.build import render as render_page
from biphase.report.contrasts import ClaimPart
from biphase.report.evidence import gather
from biphase.report.statistics.intervals import Estimate
from biphase.report.verdicts import (
    ALPHA,
    as_json,
    judge,
    prospects,
    render,
    sought,
    supports,
    verdict,
    why,
)
from biphase.specs.tasks import FAMILIES

ROOT = Path(__file__).parents[2]
NAN = math.nan
ALL = tuple(task.name for task in TASKS)

# ---------------------------------------------------------------- decision rules, on both sides of every boundary


PARTS = {
    # p above, p below, detectable, effect → class, at a level of 0.01, of one part and of two
    "clear": (0.001, 0.999, 0.1, 0.5, "yes", "yes"),
    "clear, just": (0.01, 0.99, 0.1, 0.5, "yes", "yes"),
    "clear, though power was low": (0.001, 0.999, 9.0, 0.5, "yes", "yes"),
    "reversed": (0.999, 0.001, 0.1, 0.5, "against", "against"),
    "reversed, just, though power was low": (0.99, 0.01, 9.0, 0.5, "against", "underpowered"),
    "not clear": (0.0101, 0.9899, 0.1, 0.5, "unclear", "unclear"),
    "not clear, and wrong": (0.9899, 0.0101, 0.1, 0.5, "unclear", "unclear"),
    "exactly nothing": (0.5, 0.5, 0.1, 0.5, "unclear", "unclear"),
    "low power": (0.02, 0.98, 0.6, 0.5, "underpowered", "underpowered"),
    "just enough power": (0.02, 0.98, 0.5, 0.5, "unclear", "unclear"),
    "missing": (NAN, NAN, NAN, 0.5, "missing", "missing"),
}


@pytest.mark.parametrize("case", PARTS)
def test_class_of_a_part(case):
    above, below, detectable, effect, alone, of_two = PARTS[case]
    about = {"level": 0.01, "detectable": detectable, "effect": effect}
    one = part(above=above, below=below)
    assert [supports(one, parts=count, **about) for count in (1, 2)] == [alone, of_two]


@pytest.mark.parametrize(
    ("parts", "holds", "refuted", "complete", "expected"),
    [
        (("yes", "yes"), 0.05, 1.0, True, "reproduced"),
        (("yes", "yes"), 0.05, 1.0, False, "holds in part"),
        (("yes", "missing"), 0.01, 1.0, False, "holds in part"),
        (("yes", "unclear"), 0.0501, 1.0, True, "no effect found"),
        (("unclear",), 0.3, 0.7, False, "no effect found"),
        (("yes", "unclear", "underpowered"), 0.3, 1.0, True, "underpowered"),
        (("underpowered", "against"), 1.0, 0.05, True, "not reproduced"),
        (("underpowered", "against"), 1.0, 0.0501, True, "underpowered"),
        (("yes", "against"), 1.0, 0.01, False, "not reproduced"),
        (("missing", "missing"), NAN, NAN, False, "not tested"),
        ((), NAN, NAN, True, "not tested"),
    ],
)
def test_verdict_of_a_claim(parts, holds, refuted, complete, expected):
    assert verdict(parts, holds, refuted, complete=complete) == expected


def test_the_effect_to_find_is_the_published_one_or_the_one_stated():
    effects = [
        sought(0.33, 0.0, 2.0),
        sought(0.05, -0.5, 2.0),
        sought(-0.05, -0.5, 2.0),
        sought(None, -0.5, 2.0),
    ]
    assert effects == pytest.approx([0.33, 0.55, 0.45, 2.0])


# ---------------------------------------------------------------- sentences


def part(mean=0.2, half=0.3, title="610m · SC", se=0.1, above=0.2, margin=0.0, paper=None, note="", **fields):
    estimate = Estimate(mean, 0.2, 5, mean - half, mean + half, 2 * min(above, 1 - above), "seeds", se, 4)
    about = {"tries": 1, "examples": None, "note": note, "shape": (1, 5), "lost": 0}
    fields = {"detectable": 0.4, "supports": "yes", "below": 1 - above} | fields
    return ClaimPart(title, ("a", "b"), estimate, above, margin=margin, paper=paper, **about, **fields)


CLEAR = part(3.416, 0.15, se=0.05, above=1e-6, paper=3.42)
MISSING = replace(
    part(above=NAN, title="1b · SC", supports="missing", note="13 of 60 done"),
    estimate=Estimate(NAN, NAN, 0, NAN, NAN, NAN, ""),
)
WEAK = {"supports": "underpowered"}
UNCLEAR = {"supports": "unclear"}
AGAINST = {"supports": "against"}
CASES = {  # verdict, parts → facts of the sentence, and what it does not say
    "one part": ("reproduced", [CLEAR], ["A minus B", "+3.42 ± 0.15 (610m · SC; paper +3.42)"], "Missing"),
    "many": (
        "reproduced",
        [CLEAR] * 4 + [part(title="weak", above=0.01)],
        ["5 parts", "+0.20 ± 0.30 (weak)"],
        "3.42",
    ),
    "unclear": (
        "no effect found",
        [CLEAR, part(**UNCLEAR, paper=0.51)],
        ["+0.20 ± 0.30", "paper +0.51", "p = 0.23", "the paper's is excluded", "of 2 parts 1 clear"],
        "3.42",
    ),
    "against": (
        "not reproduced",
        [CLEAR, part(-0.6, **AGAINST, margin=-0.2, paper=0.5)],
        ["−0.60 ± 0.30", "paper +0.50", "margin −0.20", "1 against"],
        "3.42",
    ),
    "many against": (
        "not reproduced",
        [CLEAR]
        + [part(-5.0, above=1 - 1e-6, **AGAINST)] * 4
        + [part(-0.6, title="weak", above=0.99, **AGAINST)],
        ["5 parts, the least clear −0.60 ± 0.30 (weak)", "of 6 parts 1 clear, 5 against"],
        "5.00",
    ),
    "against by the last step of Holm's procedure": (
        "not reproduced",
        [part(-0.1, **WEAK), part(-0.6, above=0.99, **WEAK)],
        ["−0.60 ± 0.30", "of 2 parts none clear, 1 against"],
        "0.10",
    ),
    "underpowered": (
        "underpowered",
        [CLEAR, part(**WEAK, detectable=0.9, paper=0.33, margin=-0.5)],
        ["only 0.90 beyond −0.50", "paper's is 0.83", "of 2 parts 1 clear"],
        "3.42",
    ),
    "hopeless": (
        "underpowered",
        [part(**WEAK, detectable=400.0), part(**WEAK)],
        ["no possible effect"],
        "400",
    ),
    "one missing": (
        "holds in part",
        [CLEAR, MISSING],
        ["+3.42", "Missing: 1b · SC (13 of 60 done)"],
        "2 parts",
    ),
    "two missing alike": ("not tested", [MISSING, MISSING], ["2 parts (13 of 60 done)"], "1b"),
    "no runs": ("not tested", [], ["Needs something."], "part"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_deciding_numbers_explain_a_verdict(case):
    judged, parts, facts, absent = CASES[case]
    sentence = why("A minus B", judged, parts, 0.234, "needs something", 1.5)
    assert [fact for fact in facts if fact not in sentence] == []
    assert absent not in sentence


# ---------------------------------------------------------------- findings


CAUSAL, MASKED, QUARTER = clm(42 * K, "clm"), mlm(42 * K, name="mlm"), two(10 * K, 42 * K, name="two")
SEEDS = {"lrs": (1e-5,), "seeds": (0, 1, 2, 3, 4)}
AS_PUBLISHED = {
    ("clm", "SC"): 83.58, ("mlm", "SC"): 87.00, ("two", "SC"): 87.85,
    ("clm", "TC"): 92.69, ("mlm", "TC"): 92.21, ("two", "TC"): 93.07,
    ("clm", "QA"): 42.09, ("mlm", "QA"): 62.77, ("two", "QA"): 67.77,
    ("clm", "IR"): 76.20, ("mlm", "IR"): 79.55, ("two", "IR"): 79.88,
}  # fmt: skip


def three(tasks=ALL, **fields):
    return study(CAUSAL, MASKED, QUARTER, tasks=tasks, **(SEEDS | fields))


def by_id(found):
    return {one.id: one for one in found}


@pytest.fixture
def found(plan_of, evidence_of):
    """Findings by id, from mean scores by model, or by (model, family)."""

    def findings(made, means=AS_PUBLISHED, noise=0.05, holes=(), draw=11):
        draw = np.random.default_rng(draw)

        def score(model, task, shape):
            mean = means.get((model.name, task.family), means.get(model.name))
            scores = mean + draw.normal(0, noise, shape)
            for name, on, seed in holes:
                if (name, on) == (model.name, task.name):
                    scores[:, seed] = NAN
            return scores

        evidence = evidence_of(plan_of(made), score, metrics=("f1", "entity_f1", "ndcg@10"))
        return by_id(judge(evidence, (PAPER,)))

    return findings


def test_claims_of_papers_come_first_and_all_are_corrected_together(found):
    own = (Claim("mine", "it helps", "two", "mlm"), Claim("again", "it helps", "two", "clm", on="QA"))
    results = found(three(claims=own), noise=1.0)
    assert list(results) == [*(one.id for one in PAPER.statements), "mine", "again"]
    assert [one.source for one in results.values()][-3:] == ["beyond", "study", "study"]
    assert [part.title for part in results["mine"].parts] == ["SC", "TC", "QA", "IR"]
    tested = [one for one in results.values() if one.verdict != "not tested"]
    assert results["mine"] in tested
    # B4 repeats parts of C2 and C4 in other metrics, which are invented alike here.
    for side in ("p_holm", "p_refuted"):
        assert all(getattr(one, side) >= (one.p if side == "p_holm" else 0) for one in tested)
    assert all((one.p_holm <= ALPHA) == (one.verdict == "reproduced") for one in tested)
    assert all(math.isnan(one.p) and math.isnan(one.p_holm) for one in results.values() if one not in tested)
    for one in tested:
        assert one.p == max(part.above for part in one.parts)


def test_a_study_without_papers_tests_its_own_claims_only(plan_of, evidence_of):
    own = Claim("mine", "it helps", "{0}", "{clm}")  # braces in names are only names
    runs = replace(CAUSAL, name="{clm}"), replace(MASKED, name="{0}")
    plan = plan_of(replace(study(*runs, tasks=("sst2",), claims=own, **SEEDS), papers=()))
    draw = np.random.default_rng(0)
    level = {"{clm}": 80.0, "{0}": 81.0}
    evidence = evidence_of(plan, lambda model, task, shape: level[model.name] + draw.normal(0, 0.05, shape))
    (alone,), (beside, *_) = judge(evidence), judge(evidence, (PAPER,))[::-1]
    assert alone.why.startswith("{0} minus {clm}, in points: +")
    assert "paper +3.42" in beside.why


def test_published_models_are_tested_by_own_claims_only(found):
    runs = [Pretrain(name, start=Hub(f"some/{name}", revision="1" * 40)) for name in ("bert", "modern")]
    own = Claim("mine", "newer is better", "modern", "bert")
    results = found(study(*runs, tasks=("sst2",), claims=own, **SEEDS), {"bert": 80.0, "modern": 81.0})
    assert list(results) == ["mine"]
    assert results["mine"].verdict == "reproduced"
    assert results["mine"].scale == "modern, bert · 1 pretraining seed, 5 fine-tuning seeds"


def test_a_finding_can_be_read_alone(found):
    results = found(three())
    first = results["C1"]
    (only,) = first.parts
    assert first.verdict == "reproduced"
    points = f"+{only.estimate.mean:.2f} ± {only.half:.2f}"
    assert first.why == f"MLM 40% minus CLM on SC, in points: {points} (610m · SC; paper +3.42)."
    assert first.scale == "610m · 99.1B tokens · 1 pretraining seed, 5 fine-tuning seeds"
    assert (first.figure, first.paper) == ("objectives", "+2.09 (210m), +3.42 (610m), +5.55 (1b)")
    assert first.caveats == ()
    assert results["C13"].why.count("paper +") == 4
    untested = results["C5"]
    assert untested.why.startswith("Needs an MLM 40%")
    assert (untested.verdict, untested.parts, untested.scale) == ("not tested", (), "")
    assert repr(results) == repr(found(three())), "the same evidence gives the same findings"


def test_parts_say_which_of_them_failed_or_are_missing(found):
    result = found(three(), AS_PUBLISHED | {("two", "IR"): 79.0})["C13"]
    assert [part.supports for part in result.parts] == ["yes", "yes", "yes", "against"]
    assert result.verdict == "not reproduced"
    assert "(610m · IR; paper +0.33); of 4 parts 3 clear, 1 against" in result.why
    result = found(three(), noise=0.6)["C13"]
    weak = result.parts[3]
    assert (result.verdict, weak.supports) == ("underpowered", "underpowered")
    clear = sum(part.supports == "yes" for part in result.parts)
    assert 0 < clear < 4
    assert result.condition == f"in {4 - clear} of 4 parts"
    assert f"only {weak.detectable:.2f} would be detected" in result.why
    assert weak.detectable > 0.33
    gone = {"squad": (0, 1, 2, 3), "record": (2, 3, 4)}
    result = found(three(), holes=[("two", task, seed) for task, seeds in gone.items() for seed in seeds])[
        "C13"
    ]
    assert [part.supports for part in result.parts] == ["yes", "yes", "missing", "yes"]
    assert (result.verdict, result.condition) == ("holds in part", "on 3 of 4 parts")
    assert result.why.endswith(" Missing: 610m · QA (not yet: 23 of 30 scores done).")
    result = found(three(), holes=[("two", "squad", 1)])["C13"]
    assert [part.estimate.n for part in result.parts] == [5, 5, 4, 5]
    assert result.scale.endswith("1 pretraining seed, 4–5 fine-tuning seeds")


def test_an_empty_ledger_tests_nothing(found, invent, tmp_path):
    results = found(three(), dict.fromkeys(("clm", "mlm", "two"), NAN))
    assert {one.verdict for one in results.values()} == {"not tested"}
    assert "0 of 30 scores" in results["C1"].why
    results = by_id(judge(gather(*invent(study(CAUSAL, MASKED, tasks=()), tmp_path)), (PAPER,)))
    assert {one.verdict for one in results.values()} == {"not tested"}
    assert "tasks to fine-tune" in results["C1"].why


def test_what_limits_a_claim_is_a_caveat(found):
    results = found(three(("sst2", "conll2003")))
    assert [part.title for part in results["C13"].parts] == ["610m · SC", "610m · TC"]
    assert any("QA and IR" in one for one in results["C13"].caveats)
    assert (results["C13"].verdict, results["C13"].condition) == ("holds in part", "on 2 of 4 families")
    assert "retrieval (IR)" in results["C3"].why
    (caveat,) = results["C1"].caveats
    assert all(fact in caveat for fact in ("SC here is sst2;", "sst2, mnli and qqp"))
    assert any("TC here is conll2003" in one for one in results["C4"].caveats)
    for protocol in ("paper", "standard"):
        results = found(three(protocol=protocol))
        warned = [any("own metrics" in one for one in results[name].caveats) for name in ("C1", "C2", "B4")]
        # Accuracy is accuracy, and B4 shows no published number.
        assert warned == [False, protocol == "standard", False]


def test_what_is_clear_over_seeds_alone_is_a_caveat(invent, grid, three, tmp_path):
    means = {"clm-10": 80.0, "clm": 80.0, "mlm": 81.0, "both": 80.0}
    made = replace(three, finetune=grid("sst2", seeds=range(12)))
    plan, store = invent(made, tmp_path, means=means, shrink=0.5)
    result = by_id(judge(gather(plan, store), (PAPER,)))["C1"]
    (only,) = result.parts
    assert only.supports == "yes"
    assert only.examples[0] <= 0 < only.examples[1]
    assert any("1m · SC: clear over seeds" in one for one in result.caveats)


def test_b6_gives_the_noise_of_pretraining_and_of_fine_tuning(plan_of, evidence_of):
    runs = [
        replace(one, name=f"{one.name}{seed}", seed=seed) for one in (MASKED, QUARTER) for seed in range(8)
    ]
    plan, draw = plan_of(study(*runs, tasks=("sst2",), **SEEDS)), np.random.default_rng(4)
    evidence = evidence_of(
        plan, lambda model, task, shape: (85 if "two" in model.name else 84) + draw.normal(0, 0.1, shape)
    )
    for result in plan.results:
        evidence.grids[result, "sst2"].test["accuracy"][:] += draw.normal(0, 0.003)
    finding = by_id(judge(evidence, (PAPER,)))["B6"]
    (only,) = finding.parts
    assert (only.estimate.covers, only.estimate.n) == ("pretraining seeds", 8)
    assert finding.scale == "610m · 99.1B tokens · 8 pretraining seeds, 5 fine-tuning seeds"
    sds = [float(word) for word in only.note.replace(",", "").split() if word[0].isdigit()]
    assert sds == pytest.approx([0.3 * math.sqrt(2), 0.1 * math.sqrt(2)], rel=0.5)


def test_a_claim_without_its_premise_is_not_applicable(found):
    """The advantage of MLM cannot grow where there is none, and a gap cannot close that was never open."""
    sizes = [
        replace(one, name=f"{one.name}-{size}", start=SIZES[size])
        for one in (CAUSAL, MASKED)
        for size in ("210m", "610m", "1b")
    ]
    gaps = dict(zip(("210m", "610m", "1b"), (1.0, 2.0, 3.0), strict=True))
    for shift, judged in ((0.0, "reproduced"), (-4.0, "not applicable"), (-2.0, "not applicable")):
        means = {f"clm-{size}": 80.0 for size in gaps} | {
            f"mlm-{size}": 80 + gap + shift for size, gap in gaps.items()
        }
        result = found(study(*sizes, tasks=("sst2",), **SEEDS), means)["C5"]
        assert result.verdict == judged, shift
        assert result.parts[0].above < 0.001
    assert all(fact in result.why for fact in ("premise", "SC gap, mean over 3 sizes"))
    assert result.p_refuted == 1, "it stays among the claims that are corrected for"
    more = [run(f"{one.name}+", Stage(MLM(0.4), 2 * K), start=one) for one in (CAUSAL, MASKED)]
    before = {"clm": 60.0, "mlm": 60.0, "clm+": 70.0, "mlm+": 65.0}
    for masked, judged in ((60.0, "not applicable"), (80.0, "reproduced")):
        result = found(study(CAUSAL, MASKED, *more, tasks=("squad",), **SEEDS), before | {"mlm": masked})[
            "C18"
        ]
        assert result.verdict == judged


def test_a_study_with_declared_looks_is_judged_at_those_alone(found):
    made = replace(three(), looks=(3, 5, 10))
    assert found(made)["C1"].verdict == "reproduced", "five seeds are the second look"
    # O'Brien and Fleming's spending leaves 0.006 of the 0.05 for it.
    close = [found(one, {"clm": 80.0, "mlm": 80.06, "two": 80.0})["C1"] for one in (three(), made)]
    assert [one.verdict for one in close] == ["reproduced", "no effect found"]
    assert close[0].p_holm == close[1].p_holm <= ALPHA
    for seeds, planned in (((0, 1, 2, 3), "at 5 seeds"), ((0, 1), "at 3 seeds"), (range(11), "at 10 seeds")):
        result = found(replace(made, finetune=replace(made.finetune, seeds=tuple(seeds))))["C1"]
        assert (result.verdict, planned in result.why) == ("not tested", True)
        assert math.isnan(result.p_holm), "nothing tells what the verdict would be"
        assert {part.supports for part in result.parts} == {"missing"}


def test_looks_count_pretraining_seeds_where_a_study_plans_several(found):
    runs = [
        replace(one, name=f"{one.name}{seed}", seed=seed) for one in (CAUSAL, MASKED) for seed in (1, 2, 3)
    ]
    made = replace(study(*runs, tasks=("sst2",), **SEEDS), looks=(3, 5))
    means = {"clm1": 80.0, "mlm1": 85.0}
    assert found(made, means)["C1"].verdict == "reproduced", (
        "three pretraining seeds, whatever the fine-tunings"
    )
    assert "5 seeds" in found(replace(made, looks=(2, 5)), means)["C1"].why


def test_a_model_with_one_pretraining_seed_borrows_the_noise_of_pretraining(plan_of, evidence_of):
    """Its fine-tunings, however many, do not say how much another pretraining would change it."""
    runs = [replace(CAUSAL, name=f"clm{seed}", seed=seed) for seed in range(4)] + [
        replace(MASKED, name="mlm", seed=0)
    ]
    plan, draw = plan_of(study(*runs, tasks=("sst2",), **SEEDS)), np.random.default_rng(4)
    evidence = evidence_of(plan, lambda model, task, shape: 84 + draw.normal(0, 0.02, shape))
    for number, result in enumerate(name for name in plan.results if name.startswith("clm")):
        evidence.grids[result, "sst2"].test["accuracy"][:] += (-0.02, 0.02, -0.01, 0.01)[number]
    (part,) = by_id(judge(evidence, (PAPER,)))["C1"].parts
    assert part.estimate.covers == "pretraining seeds"
    assert (part.shape, part.estimate.n) == ((1, 5), 1)
    assert part.estimate.se > 1.5, "the sd over pretraining seeds is 1.8 points"


def test_seeds_left_out_because_something_failed_are_a_caveat(plan_of, evidence_of):
    draw = np.random.default_rng(2)
    plan = plan_of(study(CAUSAL, MASKED, tasks=("sst2", "conll2003"), **SEEDS))
    evidence = evidence_of(plan, lambda model, task, shape: draw.normal(80, 0.1, shape))

    def warned():
        results = judge(evidence, (PAPER,))
        return [one.id for one in results if any("biased" in caveat for caveat in one.caveats)]

    grid = evidence.grids["mlm", "sst2"]
    for some in (grid.validation, grid.test):
        some["accuracy"][0, 3] = NAN
    assert warned() == [], "not computed yet: chance"
    evidence.grids["mlm", "sst2"] = replace(grid, missing={"key": "the model gives no finite numbers"})
    vars(evidence.grids["mlm", "sst2"]).pop("chosen", None)
    assert "C1" in warned()
    assert "C4" not in warned(), "its tasks are whole"


# ---------------------------------------------------------------- repeated data


KEPT = (50, 100, 300)
MEANS = {
    "clm-50": 70.0, "clm-100": 72.0, "clm-300": 73.0, "clm": 75.0,
    "mlm-50": 60.0, "mlm-100": 71.0, "mlm-300": 76.0, "mlm": 80.0,
    "two": 81.0, "m20": 78.0,
}  # fmt: skip


@pytest.fixture
def content(run, grid, invent, tmp_path):
    """CLM and MLM with checkpoints, a quarter CLM, another ratio; claims of its own about both kinds of pairs."""
    how = {"schedule": WSD(1e-3, warmup=2, decay=20)}
    runs = (
        run("clm", Stage(CLM(), 400), keep=KEPT, **how),
        run("mlm", Stage(MLM(0.4), 400), keep=KEPT, **how),
        run("two", Stage(CLM(), 100), Stage(MLM(0.4), 300), **how),
        run("m20", Stage(MLM(0.2), 400), **how),
    )
    own = (Claim("causal", "it helps", "two", "mlm"), Claim("ratio", "more is better", "mlm", "m20"))
    made = Study("s", runs, grid("sst2"), own, papers="gisserot2025")
    return lambda rows: collect(*invent(made, tmp_path / f"store-{rows}", means=MEANS, rows=rows))


def test_claims_on_equal_data_are_marked_where_the_corpus_was_repeated(content):
    shown = content(200)
    results = by_id(shown.findings)
    tested = {name for name, one in results.items() if one.parts}
    marked = {name for name, one in results.items() if "repetition" in one.condition}
    assert {"C1", "C11", "C13", "causal"} <= marked
    # Half an epoch; other questions than what the same data is worth; two that are masked alike.
    assert {"C10", "C12", "B2", "ratio"} <= tested - marked
    first = results["C1"]
    assert (first.condition, first.scale[-18:]) == ("under repetition", "· under repetition")
    assert "read 4.0 times" in first.caveats[0]
    assert "read 0.5 to 3.0 times" in results["C11"].caveats[0]
    repeated = results["C11"].parts[0].note
    assert all(fact in repeated for fact in (" epochs;", "step 100, 1.00 epochs", "points behind"))
    (table,) = (one for one in shown.tables if one.name == "claims")
    for text in (markdown(shown), render_page(shown), latex(shown)["claims.tex"], table.csv()):
        assert "under repetition" in text


@pytest.mark.parametrize("rows", [0, 800])
def test_nothing_is_marked_where_nothing_was_repeated_or_epochs_are_unknown(content, rows):
    findings = by_id(content(rows).findings)
    for one in findings.values():
        assert "repetition" not in " ".join((one.condition, one.scale, *one.caveats))
    note = findings["C11"].parts[0].note
    assert "within one" not in note
    assert ("epoch" in note) == (rows == 800)


# ---------------------------------------------------------------- prospects


TESTED = {
    "paper": {f"C{n}" for n in range(1, 21)} | {"B1", "B2", "B3", "B4"},
    "two_stage": {*(f"C{n}" for n in (1, 2, 3, 4, 7, 8, 9, 12, 13, 14)), "B1", "B3", "B4"},
}
BOTH = CAUSAL, MASKED


@pytest.fixture
def prospect(plan_of):
    """Prospects of a study by claim."""
    return lambda made: by_id(prospects(plan_of(made), None, (PAPER,)))


def pair(*runs, tasks=("sst2",), **fields):
    return study(*(runs or BOTH), tasks=tasks, **fields)


@pytest.mark.parametrize("name", TESTED)
def test_what_is_planned_is_what_the_report_will_test(prospect, name):
    every = prospect(name)
    assert {one.id for one in every.values() if one.tested} == TESTED[name]
    assert list(every) == [one.id for one in PAPER.statements]
    assert {one.noise for one in every.values()} == {"assumed", ""}
    assert all(bool(one.tests) == one.tested == (one.needs == "") for one in every.values())
    lines = render(list(every.values()))
    assert max(map(len, lines)) <= 110
    shown = {line.split()[0] for line in lines if line.startswith("  ")}
    assert TESTED[name] <= shown
    assert lines[0].startswith(f"{len(TESTED[name])} of 27 claims")


def test_the_detectable_effect_is_found_four_times_in_five(prospect, plan_of, evidence_of):
    """As the report of simulated studies finds it, with the noise that is assumed."""
    made = pair(lrs=(1e-5,))
    (only,) = prospect(made)["C1"].tests
    sd = FAMILIES["SC"].assumed_sd[0]
    assert only.se == pytest.approx(sd * math.sqrt(2 / 5))
    assert (only.paper, only.weak) == (3.42, False)
    draw, plan, found = np.random.default_rng(8), plan_of(made), 0
    level = {"clm": 80.0, "mlm": 80.0 + only.detectable}
    for _ in range(200):
        evidence = evidence_of(plan, lambda model, task, shape: level[model.name] + draw.normal(0, sd, shape))
        found += by_id(judge(evidence, (PAPER,)))["C1"].verdict == "reproduced"
    assert 0.65 < found / 200 < 0.95


def test_seeds_tasks_claims_and_choices_are_part_of_the_power(prospect):
    only = prospect(pair())["C1"].tests[0]
    three = prospect(pair(tasks=("sst2", "mnli", "qqp")))["C1"].tests[0]
    assert three.se == pytest.approx(only.se / math.sqrt(3))
    own = tuple(Claim(f"c{n}", "again", "mlm", "clm") for n in range(20))
    many = prospect(pair(claims=own))["C1"].tests[0]
    assert (many.se, many.detectable > 1.3 * only.detectable) == (only.se, True)
    ten = prospect(pair(seeds=range(10)))["C1"].tests[0]
    assert ten.detectable < 0.75 * only.detectable
    one_seed = prospect(pair(seeds=(0,)))["C1"]
    assert (one_seed.tested, one_seed.tests) == (False, ())
    assert "two fine-tuning seeds" in one_seed.needs
    runs = [replace(one, name=f"{one.name}{seed}", seed=seed) for one in BOTH for seed in (1, 2, 3)]
    (several,) = prospect(pair(*runs))["C1"].tests
    assert (several.seeds, several.se) == ((3, 5), pytest.approx(only.se * math.sqrt(5 / 3 * 6 / 5)))
    every = prospect(pair(*(mlm(42 * K, ratio) for ratio in (0.2, 0.3, 0.4))))
    assert [one.id for one in every.values() if one.tested] == ["C7"]
    (alone,) = prospect(pair(lrs=(1e-5,)))["C1"].tests
    assert every["C7"].tests[0].detectable > alone.detectable  # the clearer of two comparisons
    small = [replace(one, start=SIZES["30m"]) for one in BOTH]  # assumed to be noisier
    sds = FAMILIES["SC"].assumed_sd
    assert prospect(pair(*small))["C1"].tests[0].se == pytest.approx(only.se * sds[1] / sds[0])


def test_pretraining_seeds_add_the_noise_that_was_measured_for_small_models(prospect):
    runs = [
        replace(one, name=f"{one.name}{seed}", start=SIZES["30m"], seed=seed)
        for one in BOTH
        for seed in (1, 2, 3)
    ]
    (test,) = prospect(pair(*runs))["C1"].tests
    classification = FAMILIES["SC"]
    one = classification.pretraining_sd**2 + classification.assumed_sd[1] ** 2 / 5
    assert test.se == pytest.approx(math.sqrt(2 * one / 3))


def test_both_spreads_are_measured_where_the_ledger_has_pretraining_seeds(plan_of, evidence_of):
    """Scores whose fine-tunings vary with an sd of 1 and whose pretraining seeds vary with one of 3."""
    draw = np.random.default_rng(3)
    runs = [replace(clm(42 * K), name=f"clm{seed}", seed=seed) for seed in range(400)]
    plan = plan_of(pair(*runs, lrs=(1e-5,), seeds=(0, 1)))
    evidence = evidence_of(plan, lambda model, task, shape: 50 + draw.normal(0, 3) + draw.normal(0, 1, shape))
    ((tuning, pretraining),) = verdicts.measured_spread(evidence).values()
    assert tuning == pytest.approx(1.0, rel=0.1)
    assert pretraining == pytest.approx(3.0, rel=0.1)


def test_the_study_says_which_effect_is_worth_finding(prospect):
    small = [replace(one, start=SIZES["30m"]) for one in BOTH]
    for effect, weak in ((1.0, True), (9.0, False)):
        (test,) = prospect(replace(pair(*small), effect=effect))["C1"].tests
        assert (test.effect, test.weak) == (effect, weak)
    own = Claim("mine", "it helps", "mlm", "clm", effect=0.3)
    assert prospect(pair(*small, claims=own))["mine"].tests[0].effect == 0.3


def test_noise_is_taken_from_the_ledger_where_it_has_enough(three, invent, tmp_path):
    plan, store = invent(three, tmp_path / "whole")
    evidence = gather(plan, store)
    every = by_id(prospects(plan, evidence, (PAPER,)))
    assert every["C1"].noise == "from this ledger"
    rows = [100 * evidence.scores(model, "sst2")[0] for model in evidence.models.values()]
    sd = math.sqrt(np.mean([row.var(ddof=1) for row in rows]))
    assert every["C1"].tests[0].se == pytest.approx(sd * math.sqrt(2 / 3))
    plan, store = invent(three, tmp_path / "part", results=("clm",))  # two degrees of freedom for a task
    every = by_id(prospects(plan, gather(plan, store), (PAPER,)))
    assert every["C1"].noise == "assumed"
    assert every["C3"].noise == "from this ledger"  # two tasks of a family, pooled


def test_the_text_shows_detectable_beside_published_effects(prospect, plan_of):
    lines = render(list(prospect("paper").values()))
    row = next(line for line in lines if line.startswith("  C13"))
    assert all(fact in row for fact in (" 4 tests ", "0.34–1.45", "0.33–5.00", "1 weak"))
    assert "C21, B5–B6;" in lines[-1]
    own = tuple(Claim(f"c{n}", "again", "mlm", "clm") for n in range(9))
    lines = render(list(prospect(pair(tasks=("squad",), claims=own)).values()))
    assert any(line.startswith("  c8") for line in lines)
    (line,) = render(list(prospect(study(*BOTH, tasks=())).values()))
    assert "C1–C21, B1–B6;" in line
    assert prospects(plan_of(replace(pair(), papers=()))) == []


def test_prospects_as_json(prospect):
    every = prospect(pair(claims=Claim("mine", "it helps", "mlm", "clm", margin=-1), seeds=(0,)))
    found = {one["id"]: one for one in json.loads(json.dumps(as_json(list(every.values())), allow_nan=False))}
    assert len(found) == 28
    assert (found["B5"]["tested"], found["B5"]["tests"]) == (False, [])
    assert "retrieval (IR)" in found["B5"]["needs"]


def test_claims_of_papers_do_not_count_families_that_their_paper_has_none_of(plan_of):
    runs = (*BOTH, two(3 * K), two(6 * K), two(9 * K), mlm(24 * K), clm(24 * K))

    def tests_of(tasks, **fields):
        every = claims_of(plan_of(study(*runs, tasks=tasks, **fields)))
        return {claim: [(test.title, test.tasks, test.paper) for test in every[claim]] for claim in every}

    more = (*FOUR, "stsb", "go_emotions", "swag")
    assert tests_of(more) == tests_of(FOUR)
    own = Claim("own", "about all families of the study", more=runs[0].name, less=runs[1].name)
    assert len(tests_of(more, claims=(own,))["own"]) == 7
