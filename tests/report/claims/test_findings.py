"""Findings as a whole: order, correction, scale, caveats, and why; of full, half and empty ledgers."""

import math
from dataclasses import replace

import numpy as np
import pytest

from biphase import CATALOG, CLM, MLM, SIZES, Claim, Finetune, Hub, Pretrain, Stage, Study
from biphase.papers.gisserot2025.claims import STATEMENTS
from biphase.report.evidence import gather
from biphase.report.statistics.intervals import holm
from biphase.report.verdicts import ALPHA, judge

K = 1_000
TASKS = (
    "sst2",
    "mnli",
    "qqp",
    "conll2003",
    "ontonotes5",
    "uner_en",
    "squad",
    "squad_v2",
    "record",
    "msmarco",
    "nq",
    "mldr_en",
)


def run(name, *stages, **fields):
    return Pretrain(name, stages=stages, **({"start": SIZES["610m"], "corpus": "fineweb-edu"} | fields))


CAUSAL, MASKED = run("clm", Stage(CLM(), 42 * K)), run("mlm", Stage(MLM(0.4), 42 * K))
QUARTER = run("two", Stage(CLM(), 10 * K), Stage(MLM(0.4), 32 * K))


def study(*runs, tasks=TASKS, claims=(), **fields):
    finetune = {"lrs": (1e-5,), "seeds": (0, 1, 2, 3, 4)} | fields
    return Study("s", runs, Finetune(tuple(CATALOG[one] for one in tasks), **finetune), claims)


@pytest.fixture
def found(plan_of, evidence_of):
    """Findings by id, from mean scores by model, or by (model, family)."""

    def findings(made, means, noise=0.05, holes=(), metrics=("f1", "entity_f1", "ndcg@10")):
        draw = np.random.default_rng(11)
        plan = plan_of(made)

        def score(model, task, shape):
            mean = means.get((model.name, task.family), means.get(model.name))
            scores = mean + draw.normal(0, noise, shape)
            for model_name, task_name, seed in holes:
                if (model_name, task_name) == (model.name, task.name):
                    scores[:, seed] = math.nan
            return scores

        evidence = evidence_of(plan, score, metrics=metrics)
        return {one.id: one for one in judge(evidence)}

    return findings


AS_IN_THE_PAPER = {
    ("clm", "SC"): 83.58, ("mlm", "SC"): 87.00, ("two", "SC"): 87.85,
    ("clm", "TC"): 92.69, ("mlm", "TC"): 92.21, ("two", "TC"): 93.07,
    ("clm", "QA"): 42.09, ("mlm", "QA"): 62.77, ("two", "QA"): 67.77,
    ("clm", "IR"): 76.20, ("mlm", "IR"): 79.55, ("two", "IR"): 79.88,
}  # fmt: skip


def test_the_order_is_the_papers_then_beyond_then_the_studys_own(found):
    own = (Claim("mine", "it helps", "two", "mlm"), Claim("again", "it helps", "two", "clm", on="QA"))
    results = found(study(CAUSAL, MASKED, QUARTER, claims=own), AS_IN_THE_PAPER)
    assert list(results) == [*(one.id for one in STATEMENTS), "mine", "again"]
    assert [one.source for one in results.values()][-3:] == ["beyond", "study", "study"]
    assert (results["again"].verdict, results["again"].says) == ("reproduced", "it helps")
    assert [part.title for part in results["mine"].parts] == ["SC", "TC", "QA", "IR"]


def test_names_with_braces_are_only_names(found):
    runs = replace(CAUSAL, name="{clm}"), replace(MASKED, name="{0}")
    made = study(*runs, tasks=("sst2",), claims=Claim("mine", "it helps", "{0}", "{clm}"))
    result = found(made, {"{clm}": 80.0, "{0}": 81.0})["mine"]
    assert result.why.startswith("{0} scores 0.9")
    assert result.why.endswith(" points above {clm} on SC (paper: +3.42).")


def test_published_models_have_no_tokens_to_count(found):
    runs = [Pretrain(name, start=Hub(f"some/{name}", revision="1" * 40)) for name in ("bert", "modern")]
    made = study(*runs, tasks=("sst2",), claims=Claim("mine", "newer is better", "modern", "bert"))
    results = found(made, {"bert": 80.0, "modern": 81.0})
    assert results["mine"].verdict == "reproduced"
    assert results["mine"].scale == "modern, bert · 1 pretraining seed, 5 fine-tuning seeds"
    assert list(results) == ["mine"], "the paper says nothing of models that were not pretrained here"


def test_a_finding_can_be_read_alone(found):
    results = found(study(CAUSAL, MASKED, QUARTER), AS_IN_THE_PAPER)
    first = results["C1"]
    (part,) = first.parts
    half = (part.estimate.high - part.estimate.low) / 2
    assert first.verdict == "reproduced"
    assert first.why == (
        f"MLM 40% scores {part.estimate.mean:.2f} ± {half:.2f} points above CLM on SC at 610m (paper: +3.42)."
    )
    assert first.scale == "610m · 99.1B tokens · 1 pretraining seed, 5 fine-tuning seeds"
    assert (first.figure, first.paper) == ("objectives", "+2.09 (210m), +3.42 (610m), +5.55 (1b)")
    assert first.caveats == ()
    assert part.says in first.why
    two = results["C13"]
    assert two.why.startswith("CLM→MLM 25-75 minus MLM 40%, in points: +0.")
    assert two.why.count("paper +") == 4
    assert results["C5"].why == "Needs an MLM 40% and a CLM run of the same length at two sizes or more."
    assert (results["C5"].verdict, results["C5"].parts, results["C5"].scale) == ("not tested", (), "")


def test_every_tested_claim_is_corrected_for_all_of_them(found):
    own = Claim("mine", "it helps", "two", "mlm")
    results = found(study(CAUSAL, MASKED, QUARTER, claims=own), AS_IN_THE_PAPER, noise=1.0)
    tested = [one for one in results.values() if one.verdict != "not tested"]
    assert "mine" in [one.id for one in tested]
    assert [one.p_holm for one in tested] == pytest.approx(holm([one.p for one in tested]))
    assert all((one.p_holm <= ALPHA) == (one.verdict == "reproduced") for one in tested)
    assert all(math.isnan(one.p) and math.isnan(one.p_holm) for one in results.values() if one not in tested)
    for one in tested:
        assert one.p == max(
            part.estimate.p if part.estimate.mean > part.margin else 1.0 for part in one.parts
        )


def test_more_claims_ask_more_of_each(found):
    few = found(study(CAUSAL, MASKED, tasks=("sst2",)), AS_IN_THE_PAPER)["C1"].parts[0]
    own = tuple(Claim(f"c{n}", "again", "mlm", "clm") for n in range(30))
    many = found(study(CAUSAL, MASKED, tasks=("sst2",), claims=own), AS_IN_THE_PAPER)["C1"].parts[0]
    assert few.estimate.mean == many.estimate.mean
    assert many.detectable > 2 * few.detectable


def test_parts_of_a_claim_that_falls_short_say_which(found):
    means = AS_IN_THE_PAPER | {("two", "IR"): 79.0}
    result = found(study(CAUSAL, MASKED, QUARTER), means)["C13"]
    assert [part.supports for part in result.parts] == ["yes", "yes", "yes", "against"]
    assert result.verdict == "not reproduced"
    assert result.why.startswith("CLM→MLM 24-76 scores 0.5")
    assert (
        "points below MLM 40% on IR at 610m (paper: +0.33); 1 of 4 parts speaks against the claim."
        in result.why
    )


def test_noise_that_hides_the_papers_effect_is_underpowered(found):
    result = found(study(CAUSAL, MASKED, QUARTER), AS_IN_THE_PAPER, noise=0.6)["C13"]
    assert result.verdict == "underpowered"
    (weak,) = [part for part in result.parts if part.title == "610m · IR"]
    assert weak.supports == "underpowered"
    assert (
        f"only an effect of {weak.detectable:.2f} points would be found, and the paper's is 0.33"
        in result.why
    )
    assert weak.detectable > 0.33


def test_a_half_done_ledger_is_judged_on_what_is_there_and_says_what_is_missing(found):
    holes = [("two", "squad", seed) for seed in (0, 1, 2, 3)] + [
        ("two", "record", seed) for seed in (2, 3, 4)
    ]
    result = found(study(CAUSAL, MASKED, QUARTER), AS_IN_THE_PAPER, holes=holes)["C13"]
    assert [part.supports for part in result.parts] == ["yes", "yes", "missing", "yes"]
    assert result.verdict == "reproduced"
    assert result.why.endswith(" Missing: 610m · QA (not yet: 23 of 30 leaves done).")
    assert result.scale.endswith("1 pretraining seed, 5 fine-tuning seeds")
    part = result.parts[2]
    assert math.isnan(part.estimate.p)
    assert math.isnan(part.detectable)
    assert (part.says, part.note) == ("", "not yet: 23 of 30 leaves done")


def test_a_seed_that_is_missing_shortens_the_rows_that_need_it(found):
    result = found(study(CAUSAL, MASKED, QUARTER), AS_IN_THE_PAPER, holes=[("two", "squad", 1)])["C13"]
    assert [part.estimate.n for part in result.parts] == [5, 5, 4, 5]
    assert result.scale.endswith("1 pretraining seed, 4–5 fine-tuning seeds")


def test_an_empty_ledger_tests_nothing_and_says_so(plan_of, evidence_of):
    plan = plan_of(study(CAUSAL, MASKED, QUARTER))
    results = {
        one.id: one for one in judge(evidence_of(plan, lambda model, task, shape: np.full(shape, math.nan)))
    }
    assert {one.verdict for one in results.values()} == {"not tested"}
    assert results["C1"].why == "610m · SC (not yet: 0 of 30 leaves done)."
    assert results["C13"].why == "4 parts (not yet: 0 of 30 leaves done)."


def test_nothing_fine_tuned_tests_nothing(planned, invent, tmp_path):
    plan, store = invent(Study("s", (CAUSAL, MASKED)), tmp_path)
    results = {one.id: one for one in judge(gather(plan, store))}
    assert {one.verdict for one in results.values()} == {"not tested"}
    assert results["C1"].why == "Needs tasks to fine-tune on."


def test_families_that_are_not_there_leave_the_claim_open(found):
    result = found(study(CAUSAL, MASKED, QUARTER, tasks=("sst2", "mnli", "qqp")), AS_IN_THE_PAPER)
    assert [part.title for part in result["C13"].parts] == ["610m · SC"]
    assert "The study has no task of TC, QA and IR: this much of the claim is open." in result["C13"].caveats
    assert result["C3"].why == "Needs a task of retrieval (IR)."


def test_other_tasks_than_the_papers_are_a_caveat(found):
    results = found(study(CAUSAL, MASKED, tasks=("sst2", "conll2003")), AS_IN_THE_PAPER)
    assert results["C1"].caveats == ("SC here is sst2; the paper's is the mean of sst2, mnli and qqp.",)
    assert "SC here is" not in " ".join(results["C4"].caveats)
    assert any(one.startswith("TC here is conll2003; the paper's") for one in results["C4"].caveats)


def test_other_metrics_than_the_papers_are_a_caveat(found):
    warned = "The paper's numbers are in its own metrics, these in the usual ones: compare signs, not sizes."
    for protocol in ("paper", "standard"):
        results = found(study(CAUSAL, MASKED, protocol=protocol), AS_IN_THE_PAPER)
        assert (warned in results["C2"].caveats) == (protocol == "standard")
        assert warned not in results["C1"].caveats  # accuracy is accuracy
        assert warned not in results["B4"].caveats  # which shows none of the paper's


def test_what_is_clear_over_seeds_alone_is_a_caveat(invent, grid, three, tmp_path):
    means = {"clm-10": 80.0, "clm": 80.0, "mlm": 81.0, "both": 80.0}
    made = replace(three, finetune=grid("sst2", seeds=range(12)))
    plan, store = invent(made, tmp_path, means=means, shrink=0.5)
    results = {one.id: one for one in judge(gather(plan, store))}
    (part,) = results["C1"].parts
    assert part.supports == "yes"
    assert part.examples[0] <= 0 < part.examples[1]
    assert any(
        one.startswith("1m · SC: clear over seeds, not over test examples ([")
        for one in results["C1"].caveats
    )


def test_pretraining_seeds_are_used_wherever_they_are(found):
    runs = [
        replace(one, name=f"{one.name}{seed}", seed=seed) for one in (CAUSAL, MASKED) for seed in (1, 2, 3)
    ]
    means = {"clm1": 80.0, "mlm1": 81.0}
    result = found(study(*runs), means)["C1"]
    (part,) = result.parts
    assert part.estimate.covers == "pretraining and fine-tuning seeds"
    assert part.estimate.n == 15
    assert result.scale == "610m · 99.1B tokens · 3 pretraining seeds, 5 fine-tuning seeds"


def test_b6_tells_the_noise_of_pretraining(found, plan_of, evidence_of):
    runs = [
        replace(one, name=f"{one.name}{seed}", seed=seed) for one in (MASKED, QUARTER) for seed in range(8)
    ]
    plan = plan_of(study(*runs, tasks=("sst2",)))
    draw = np.random.default_rng(4)
    evidence = evidence_of(
        plan, lambda model, task, shape: (85 if "two" in model.name else 84) + draw.normal(0, 0.1, shape)
    )
    for result in plan.results:
        evidence.grids[result, "sst2"].test["accuracy"][:] += draw.normal(0, 0.003)
    (part,) = {one.id: one for one in judge(evidence)}["B6"].parts
    told = [float(word) for word in part.note.replace(",", "").split() if word[0].isdigit()]
    assert told[0] == pytest.approx(0.3 * math.sqrt(2), rel=0.5)
    assert told[1] == pytest.approx(0.1 * math.sqrt(2), rel=0.5)
    assert part.note.startswith("sd over pretraining seeds ")


def test_the_same_evidence_gives_the_same_findings(found):
    made = study(CAUSAL, MASKED, QUARTER)
    assert repr(found(made, AS_IN_THE_PAPER)) == repr(found(made, AS_IN_THE_PAPER))


@pytest.mark.parametrize("by", [-5.0, 5.0])
def test_a_part_whose_seeds_all_say_the_same_is_not_passed_over(plan_of, evidence_of, by):
    """Least of all where they all speak against the claim."""
    draw = np.random.default_rng(2)
    luck = {task: draw.normal(0, 0.05, 5) for task in TASKS}

    def score(model, task, shape):
        mean = AS_IN_THE_PAPER[model.name, task.family]
        if task.family != "IR":
            return mean + draw.normal(0, 0.05, shape)
        return [70 + by * (model.name == "two") + luck[task.name]]

    evidence = evidence_of(plan_of(study(CAUSAL, MASKED, QUARTER)), score)
    result = {one.id: one for one in judge(evidence)}["C13"]
    assert [part.supports for part in result.parts] == ["yes", "yes", "yes", "underpowered"]
    assert (result.verdict, result.p, result.p_holm) == ("underpowered", 1.0, 1.0)
    way = "above" if by > 0 else "below"
    assert result.why == (
        f"CLM→MLM 24-76 scores 5.00 points {way} MLM 40% on IR at 610m, but every seed gives the same number, so there "
        "is no noise to judge it by; of 4 parts 3 are clear."
    )


def test_seeds_left_out_because_something_failed_are_a_caveat(plan_of, evidence_of):
    draw = np.random.default_rng(2)
    plan = plan_of(study(CAUSAL, MASKED, tasks=("sst2", "conll2003")))
    evidence = evidence_of(plan, lambda model, task, shape: draw.normal(80, 0.1, shape))

    def warned():
        results = {one.id: one for one in judge(evidence)}
        return [name for name, one in results.items() if any("went well" in said for said in one.caveats)]

    grid = evidence.grids["mlm", "sst2"]
    for part in (grid.validation, grid.test):
        part["accuracy"][0, 3] = math.nan
    assert warned() == [], "not computed yet: chance"
    evidence.grids["mlm", "sst2"] = replace(grid, missing={"key": "the model gives no finite numbers"})
    vars(evidence.grids["mlm", "sst2"]).pop("chosen", None)
    assert "C1" in warned()
    assert "C4" not in warned(), "its tasks are whole"
