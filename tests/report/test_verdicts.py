"""Verdicts: the decision rules, the sentences, findings of full, half and empty ledgers; and power before a study."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_studies import K, clm, mlm, study, two

from biphase import CLM, MLM, SIZES, TASKS, WSD, Claim, Hub, Pretrain, Stage, Study
from biphase.papers.gisserot2025 import PAPER
from biphase.report.build import latex, markdown
from biphase.report.content import collect
from biphase.report.contrasts import ClaimPart, Contrast
from biphase.report.evidence import gather
from biphase.report.page.render import render as render_page
from biphase.report.statistics.intervals import Estimate, Noise, holm, power_crossed, power_of
from biphase.report.verdicts import (
    ALPHA,
    WORTH_FINDING,
    as_json,
    claim_p,
    judge,
    level_of_parts,
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


@pytest.mark.parametrize(
    ("excess", "p", "detectable", "expected"),
    [  # at a level of 0.01, for an effect of 0.5
        (0.4, 0.01, 0.1, "yes"),
        (0.4, 0.001, 9.0, "yes"),  # though power was low
        (-0.4, 0.01, 9.0, "against"),
        (0.4, 0.0101, 0.1, "direction"),
        (-0.4, 0.0101, 0.1, "against"),
        (0.0, 1.0, 0.1, "against"),
        (0.4, 0.02, 0.6, "underpowered"),
        (-0.4, 0.02, 0.6, "underpowered"),
        (0.4, 0.02, 0.5, "direction"),
        (NAN, NAN, NAN, "missing"),
        (0.4, NAN, NAN, "missing"),  # one seed
    ],
)
def test_class_of_a_part(excess, p, detectable, expected):
    assert supports(excess, p, level=0.01, detectable=detectable, effect=0.5) == expected


@pytest.mark.parametrize(
    ("parts", "p_holm", "expected"),
    [
        (("yes", "yes"), 0.05, "reproduced"),
        (("yes", "missing"), 0.01, "reproduced"),
        (("yes", "direction"), 0.0501, "direction only"),
        (("direction",), 0.3, "direction only"),
        (("yes", "direction", "underpowered"), 0.3, "underpowered"),
        (("underpowered", "against"), 1.0, "not reproduced"),
        (("yes", "against"), 1.0, "not reproduced"),
        (("missing", "direction"), 0.3, "direction only"),
        (("missing", "missing"), NAN, "not tested"),
        ((), NAN, "not tested"),
    ],
)
def test_verdict_of_a_claim(parts, p_holm, expected):
    assert verdict(parts, p_holm) == expected


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([(0.5, 0.001), (0.2, 0.04), (0.3, 0.02)], 0.04),  # the weakest part counts
        ([(0.5, 0.001), (-0.2, 1e-9)], 1.0),  # a wrong sign is no evidence, however clear
        ([(0.0, 0.5)], 1.0),
        ([(0.5, 0.001), (NAN, NAN)], 0.001),  # missing parts are left out
        ([(NAN, NAN)], NAN),
        ([], NAN),
    ],
)
def test_p_value_of_a_claim(parts, expected):
    assert claim_p(parts) == pytest.approx(expected, nan_ok=True)


def test_effects_to_find_and_levels_of_parts():
    effects = [sought(0.33, 0.0), sought(0.05, -0.5), sought(-0.05, -0.5), sought(None, -0.5)]
    assert effects == pytest.approx([0.33, 0.55, 0.45, WORTH_FINDING])
    assert WORTH_FINDING == 0.5
    levels = [level_of_parts(some) for some in ([0.01, 0.2, 0.3, 1.0], [0.01, 0.02], [])]
    assert levels == [ALPHA / 3, ALPHA, ALPHA]  # of the step where Holm's procedure stopped


def test_all_parts_are_clear_exactly_where_the_claim_is_reproduced():
    ps = (0.0001, 0.004, 0.0124, 0.0126, 0.02, 0.03, 0.04, 0.6)
    for chosen in itertools.product(ps, repeat=4):
        adjusted = holm(chosen)
        stopped = level_of_parts(adjusted)
        for p, p_holm in zip(chosen, adjusted, strict=True):
            level = ALPHA if p_holm <= ALPHA else stopped
            part = supports(0.1, p, level=level, detectable=0.0, effect=1.0)
            assert (part == "yes") == (verdict([part], p_holm) == "reproduced")


# ---------------------------------------------------------------- sentences


def part(mean=0.2, half=0.3, title="610m · SC", se=0.1, p=0.2, margin=0.0, paper=None, note="", **fields):
    estimate = Estimate(mean, 0.2, 5, mean - half, mean + half, p, "fine-tuning seeds", se, 4)
    contrast = Contrast(title, None, "A scores {} points above B", "A scores {} points below B")
    about = {"tries": 1, "examples": None, "note": note, "shape": (1, 5), "lost": 0}
    fields = {"detectable": 0.4, "supports": "yes"} | fields
    return ClaimPart(title, ("a", "b"), contrast, estimate, margin, paper, **about, **fields)


CLEAR = part(3.416, 0.15, se=0.05, p=1e-6, paper=3.42)
MISSING = replace(
    part(p=NAN, title="1b · SC", supports="missing", note="13 of 60 done"),
    estimate=Estimate(NAN, NAN, 0, NAN, NAN, NAN, ""),
)
WEAK = {"supports": "underpowered"}
DIRECTION = {"supports": "direction"}
AGAINST = {"supports": "against"}
CASES = {  # verdict, parts → facts of the sentence, and what it does not say
    "one part": ("reproduced", [CLEAR], ["3.42 ± 0.15 points above B", "paper: +3.42"], "Missing"),
    "many": (
        "reproduced",
        [CLEAR] * 4 + [part(title="weak", p=0.01)],
        ["5 parts", "+0.20 ± 0.30 (weak)"],
        "3.42",
    ),
    "smaller than published": (
        "direction only",
        [part(**DIRECTION, paper=0.51)],
        ["0.20 ± 0.30 points above", "paper: +0.51", "p = 0.23", "the paper's is"],
        "clear",
    ),
    "direction in part": (
        "direction only",
        [CLEAR, part(**DIRECTION, title="x", paper=-0.05), part(**DIRECTION, title="y")],
        ["+0.20 ± 0.30 (x; paper −0.05)", "+0.20 ± 0.30 (y)", "of 3 parts 1"],
        "3.42",
    ),
    "against": (
        "not reproduced",
        [CLEAR, part(-0.1, **AGAINST), part(-0.6, **AGAINST, margin=-0.2, paper=0.5)],
        ["0.60 ± 0.30 points below B", "paper: +0.50", "margin of −0.20", "2 of 3 parts"],
        "3.42",
    ),
    "underpowered": (
        "underpowered",
        [CLEAR, part(**WEAK, detectable=0.9, paper=0.33)],
        ["effect of 0.90", "paper's is 0.33", "of 2 parts 1"],
        "margin",
    ),
    "underpowered beyond a margin": (
        "underpowered",
        [part(**WEAK, detectable=0.9, margin=-0.5)],
        ["0.90 points beyond −0.50", "0.50 should"],
        "paper",
    ),
    "the other way": (
        "underpowered",
        [CLEAR, part(-2.0, 0.5, margin=-1.0, p=0.03, **WEAK), part(**WEAK)],
        ["2.00 ± 0.50 points below B", "the other way (p = 0.030)", "1 of 3 parts"],
        "found",
    ),
    "hopeless": (
        "underpowered",
        [part(**WEAK, detectable=400.0), part(**WEAK)],
        ["no possible effect", "of 2 parts none"],
        "400",
    ),
    "one missing": ("reproduced", [CLEAR, MISSING], ["+3.42", "Missing: 1b · SC (13 of 60 done)"], "2 parts"),
    "two missing alike": ("not tested", [MISSING, MISSING], ["2 parts (13 of 60 done)"], "1b"),
    "no runs": ("not tested", [], ["Needs something."], "part"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_deciding_numbers_explain_a_verdict(case):
    judged, parts, facts, absent = CASES[case]
    sentence = why("A minus B", judged, parts, 0.234, "needs something")
    assert [fact for fact in facts if fact not in sentence] == []
    assert absent not in sentence


def test_an_effect_in_the_claimed_direction_never_points_the_other_way():
    assert not part(mean=0.5, half=0.2, margin=1.0, **WEAK).contrary
    assert part(mean=-0.5, half=0.2, margin=1.0, **WEAK).contrary
    assert not part(mean=-0.5, half=0.2, margin=-1.0, **WEAK).contrary


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

    def findings(made, means=AS_PUBLISHED, noise=0.05, holes=()):
        draw = np.random.default_rng(11)

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
    assert [one.p_holm for one in tested] == pytest.approx(holm([one.p for one in tested]))
    assert all((one.p_holm <= ALPHA) == (one.verdict == "reproduced") for one in tested)
    assert all(math.isnan(one.p) and math.isnan(one.p_holm) for one in results.values() if one not in tested)
    for one in tested:
        assert one.p == max(part.estimate.p if part.excess > 0 else 1.0 for part in one.parts)


def test_a_study_without_papers_tests_its_own_claims_only(plan_of, evidence_of):
    own = Claim("mine", "it helps", "{0}", "{clm}")  # braces in names are only names
    runs = replace(CAUSAL, name="{clm}"), replace(MASKED, name="{0}")
    plan = plan_of(replace(study(*runs, tasks=("sst2",), claims=own, **SEEDS), papers=()))
    draw = np.random.default_rng(0)
    level = {"{clm}": 80.0, "{0}": 81.0}
    evidence = evidence_of(plan, lambda model, task, shape: level[model.name] + draw.normal(0, 0.05, shape))
    (alone,), (beside, *_) = judge(evidence), judge(evidence, (PAPER,))[::-1]
    assert alone.why.startswith("{0} scores ")
    assert alone.why.endswith(" points above {clm} on SC.")
    assert "paper: +3.42" in beside.why


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
    points = f"{only.estimate.mean:.2f} ± {only.half:.2f} points"
    assert first.why == f"MLM 40% scores {points} above CLM on SC at 610m (paper: +3.42)."
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
    assert "below MLM 40% on IR" in result.why
    result = found(three(), noise=0.6)["C13"]
    weak = result.parts[3]
    assert (result.verdict, weak.supports) == ("underpowered", "underpowered")
    assert f"{weak.detectable:.2f} points" in result.why
    assert weak.detectable > 0.33
    gone = {"squad": (0, 1, 2, 3), "record": (2, 3, 4)}
    result = found(three(), holes=[("two", task, seed) for task, seeds in gone.items() for seed in seeds])[
        "C13"
    ]
    assert [part.supports for part in result.parts] == ["yes", "yes", "missing", "yes"]
    assert result.verdict == "reproduced"
    assert result.why.endswith(" Missing: 610m · QA (not yet: 23 of 30 scores done).")
    result = found(three(), holes=[("two", "squad", 1)])["C13"]
    assert [part.estimate.n for part in result.parts] == [5, 5, 4, 5]
    assert result.scale.endswith("1 pretraining seed, 4–5 fine-tuning seeds")


def test_an_empty_ledger_tests_nothing(found, invent, tmp_path):
    results = found(three(), dict.fromkeys(("clm", "mlm", "two"), NAN))
    assert {one.verdict for one in results.values()} == {"not tested"}
    assert "0 of 30 scores" in results["C1"].why
    plan, store = invent(study(CAUSAL, MASKED, tasks=()), tmp_path)
    results = by_id(judge(gather(plan, store), (PAPER,)))
    assert {one.verdict for one in results.values()} == {"not tested"}
    assert "tasks to fine-tune" in results["C1"].why


def test_what_limits_a_claim_is_a_caveat(found):
    results = found(three(("sst2", "conll2003")))
    assert [part.title for part in results["C13"].parts] == ["610m · SC", "610m · TC"]
    assert any("no task of QA and IR" in one for one in results["C13"].caveats)
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


def test_pretraining_seeds_are_used_and_b6_gives_their_noise(plan_of, evidence_of):
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
    assert (only.estimate.covers, only.estimate.n) == ("pretraining and fine-tuning seeds", 40)
    assert finding.scale == "610m · 99.1B tokens · 8 pretraining seeds, 5 fine-tuning seeds"
    sds = [float(word) for word in only.note.replace(",", "").split() if word[0].isdigit()]
    assert sds == pytest.approx([0.3 * math.sqrt(2), 0.1 * math.sqrt(2)], rel=0.5)


@pytest.mark.parametrize("by", [-5.0, 5.0])
def test_a_part_whose_seeds_are_all_alike_keeps_a_claim_open(plan_of, evidence_of, by):
    draw = np.random.default_rng(2)
    luck = {task: draw.normal(0, 0.05, 5) for task in ALL}

    def score(model, task, shape):
        if task.family != "IR":
            return AS_PUBLISHED[model.name, task.family] + draw.normal(0, 0.05, shape)
        return [70 + by * (model.name == "two") + luck[task.name]]

    result = by_id(judge(evidence_of(plan_of(three()), score), (PAPER,)))["C13"]
    assert [part.supports for part in result.parts] == ["yes", "yes", "yes", "underpowered"]
    assert (result.verdict, result.p, result.p_holm) == ("underpowered", 1.0, 1.0)
    facts = f"5.00 points {'above' if by > 0 else 'below'} MLM 40% on IR", "of 4 parts 3 are clear"
    assert all(fact in result.why for fact in facts)


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
    marked = {name for name, one in results.items() if one.condition}
    assert {"C1", "C11", "C13", "causal"} <= marked
    # Half an epoch; other questions than what the same data is worth; two that are masked alike.
    assert {"C10", "C12", "B2", "ratio"} <= tested - marked
    first = results["C1"]
    assert (first.condition, first.scale[-18:]) == ("under repetition", "· under repetition")
    assert "read 4.0 times" in first.caveats[0]
    assert "read 3.0" in results["C11"].caveats[0]
    repeated = results["C11"].parts[0].note
    assert all(fact in repeated for fact in (" epochs;", "step 100, 1.00 epochs", "points behind"))
    (table,) = (one for one in shown.tables if one.name == "claims")
    for text in (markdown(shown), render_page(shown).main, latex(shown)["claims.tex"], table.csv()):
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
    "quickstart": {"C1", "C2", "C3", "C4", "B4"},
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


def test_the_detectable_effect_is_found_four_times_in_five(prospect):
    """A difference of two scores of one SC task, with the noise that is assumed, at the level of the first step."""
    (only,) = prospect(pair())["C1"].tests
    assert only.sd == pytest.approx(math.sqrt(2) * FAMILIES["SC"].assumed_sd[0])
    assert power_of(only.detectable, only.sd, 5, ALPHA / 2) == pytest.approx(0.8, abs=1e-4)  # C1 and C12
    assert (only.paper, only.weak) == (3.42, False)
    alone = prospect(pair(lrs=(1e-5,)))["C1"].tests[0]
    gaps = alone.detectable + np.random.default_rng(8).normal(0, alone.sd, (4_000, 5))
    t = gaps.mean(axis=1) / (gaps.std(axis=1, ddof=1) / math.sqrt(5))
    assert np.mean(t > 2.776) == pytest.approx(0.8, abs=0.02), "as simulated studies find it"
    three = prospect(pair(tasks=("sst2", "mnli", "qqp"), lrs=(1e-5,)))["C1"].tests[0]
    assert three.sd == pytest.approx(alone.sd / math.sqrt(3))
    assert three.sd / math.sqrt(2) == pytest.approx(0.12, abs=0.005)  # as in the paper's Figure 1
    own = tuple(Claim(f"c{n}", "again", "mlm", "clm") for n in range(20))
    many = prospect(pair(claims=own))["C1"].tests[0]
    assert (many.sd, many.detectable > 1.5 * only.detectable) == (only.sd, True)
    ten = prospect(pair(seeds=range(10)))["C1"].tests[0]
    assert ten.detectable < 0.6 * only.detectable
    one_seed = prospect(pair(seeds=(0,)))["C1"]
    assert (one_seed.tested, one_seed.tests) == (False, ())
    assert "two fine-tuning seeds" in one_seed.needs


def test_pretraining_seeds_and_choices_are_part_of_the_power(prospect):
    runs = [replace(one, name=f"{one.name}{seed}", seed=seed) for one in BOTH for seed in (1, 2, 3)]
    (only,) = prospect(pair(*runs))["C1"].tests
    assert only.seeds == (3, 5)
    noise = Noise(only.sd, 0.0, only.sd)
    assert power_crossed(only.detectable, noise, 3, 5, ALPHA / 2) == pytest.approx(0.8, abs=1e-3)
    every = prospect(pair(*(mlm(42 * K, ratio) for ratio in (0.2, 0.3, 0.4))))
    assert [one.id for one in every.values() if one.tested] == ["C7"]
    # Two other ratios, one size, one family: two comparisons.
    power = power_of(
        every["C7"].tests[0].detectable, math.sqrt(2) * FAMILIES["SC"].assumed_sd[0], 5, ALPHA / 2
    )
    assert power == pytest.approx(0.8, abs=1e-4)
    small = [replace(one, start=SIZES["30m"]) for one in BOTH]  # assumed to be noisier
    assert prospect(pair(*small))["C1"].tests[0].sd == pytest.approx(
        math.sqrt(2) * FAMILIES["SC"].assumed_sd[1]
    )


def test_noise_is_taken_from_the_ledger_where_it_has_enough(three, invent, tmp_path):
    plan, store = invent(three, tmp_path / "whole")
    evidence = gather(plan, store)
    every = by_id(prospects(plan, evidence, (PAPER,)))
    assert every["C1"].noise == "from this ledger"
    rows = [100 * evidence.scores(model, "sst2")[0] for model in evidence.models.values()]
    sd = math.sqrt(np.mean([row.var(ddof=1) for row in rows]))
    assert every["C1"].tests[0].sd == pytest.approx(math.sqrt(2) * sd)
    plan, store = invent(three, tmp_path / "part", results=("clm",))  # two degrees of freedom for a task
    every = by_id(prospects(plan, gather(plan, store), (PAPER,)))
    assert every["C1"].noise == "assumed"
    assert every["C3"].noise == "from this ledger"  # two tasks of a family, pooled


def test_the_text_shows_detectable_beside_published_effects(prospect, plan_of):
    lines = render(list(prospect("paper").values()))
    row = next(line for line in lines if line.startswith("  C13"))
    assert all(fact in row for fact in (" 4 tests ", "0.65–2.75", "0.33–5.00", "1 weak"))
    assert "C21, B5–B6;" in lines[-1]
    own = tuple(Claim(f"c{n}", "again", "mlm", "clm") for n in range(9))
    lines = render(list(prospect(pair(tasks=("squad",), seeds=(0, 1), claims=own)).values()))
    assert next(row for row in lines if row.startswith("  C2")).split("finds ")[1].split()[0] == ">100"
    assert any(line.startswith("  c8") for line in lines)
    (line,) = render(list(prospect(study(*BOTH, tasks=())).values()))
    assert "C1–C21, B1–B6;" in line
    assert prospects(plan_of(replace(pair(), papers=()))) == []


def test_prospects_as_json(prospect):
    every = prospect(pair(claims=Claim("mine", "it helps", "mlm", "clm", margin=-1)))
    found = {one["id"]: one for one in json.loads(json.dumps(as_json(list(every.values())), allow_nan=False))}
    assert len(found) == 28
    (test,) = found["mine"]["tests"]
    (only,) = every["mine"].tests
    expected = {"title": "SC", "models": ["mlm", "clm"], "seeds": [1, 5], "margin": -1, "paper": 3.42}
    expected |= {"detectable": only.detectable, "sd": only.sd, "weak": only.weak}
    assert test == expected
    assert (found["B5"]["tested"], found["B5"]["tests"]) == (False, [])
    assert "retrieval (IR)" in found["B5"]["needs"]
