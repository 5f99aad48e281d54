"""Contrasts with numbers: paired over seeds, tested against their margin, and over resampled examples."""

import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from biphase import CATALOG, CLM, MLM, SIZES, Finetune, Pretrain, Stage, Study
from biphase.report.contrasts import AnyOf, Contrast, comparable_models, detectable, gap, measure
from biphase.report.evidence import gather, shared_resamples
from biphase.report.statistics.intervals import over_seeds
from biphase.report.statistics.power import power_of


def run(name, objective, **fields):
    return Pretrain(
        name, start=SIZES["610m"], corpus="fineweb-edu", stages=Stage(objective, 12_000), **fields
    )


RUNS = (run("clm", CLM()), run("mlm40", MLM(0.4)), run("mlm20", MLM(0.2)))
STUDY = Study("s", RUNS, Finetune((CATALOG["sst2"],), lrs=(1e-5,), seeds=(0, 1, 2, 3)))


@pytest.fixture
def case(plan_of, evidence_of):
    """The bench and evidence of scores by model: one row of seeds each, in percent."""

    def made(scores, study=STUDY):
        plan = plan_of(study)
        evidence = evidence_of(plan, lambda model, task, shape: [scores[model.name]])
        return comparable_models(plan, evidence.models), evidence

    return made


def contrast(over, more="mlm40", less="clm", **fields):
    made = gap(over, over.models[more], over.models[less], "SC")
    return Contrast(f"{more} over {less}", made, f"{more} scores {{}} above", "below {}", **fields)


SCORES = {
    "clm": [80.0, 80.5, 81.0, 80.2],
    "mlm40": [81.0, 81.6, 81.9, 81.1],
    "mlm20": [80.4, 80.2, 81.3, 80.1],
}


def test_differences_are_paired_by_seed(case):
    over, evidence = case(SCORES)
    found = measure(contrast(over), evidence, None)
    differences = np.subtract(SCORES["mlm40"], SCORES["clm"])
    interval = stats.t.interval(0.95, 3, differences.mean(), stats.sem(differences))
    assert (found.estimate.low, found.estimate.high) == pytest.approx(interval)
    assert found.estimate.p == pytest.approx(stats.ttest_1samp(differences, 0).pvalue)
    assert found.excess == pytest.approx(1.0 - 0.025)
    assert (found.models, found.shape, found.examples) == (("mlm40", "clm"), (1, 4), None)


def test_the_margin_moves_the_p_value_and_nothing_else(case):
    over, evidence = case(SCORES)
    plain = measure(contrast(over), evidence, None)
    for margin in (-0.5, 0.9):
        found = measure(contrast(over, margin=margin), evidence, None)
        differences = np.subtract(SCORES["mlm40"], SCORES["clm"])
        assert found.estimate.p == pytest.approx(stats.ttest_1samp(differences, margin).pvalue)
        assert replace(found.estimate, p=0) == replace(plain.estimate, p=0)
        assert found.excess == pytest.approx(plain.estimate.mean - margin)


def test_the_clearest_of_several_pays_for_their_number(case):
    over, evidence = case(SCORES)
    options = tuple(
        contrast(over, more, less)
        for more, less in (("mlm20", "clm"), ("mlm40", "clm"), ("mlm20", "mlm40"), ("clm", "mlm40"))
    )
    alone = measure(options[1], evidence, None)
    found = measure(AnyOf("any", options, paper=2.0), evidence, None)
    assert (found.title, found.said.title, found.paper, found.tries) == ("any", "mlm40 over clm", 2.0, 4)
    assert found.estimate.mean == alone.estimate.mean
    assert found.estimate.p == pytest.approx(4 * alone.estimate.p)
    differences = np.subtract(SCORES["mlm40"], SCORES["clm"])
    assert found.estimate.low == pytest.approx(over_seeds(differences, 1 - 0.05 / 4).low)
    assert "clearest of 4 comparisons: mlm40 over clm" in found.note


def test_where_no_option_holds_the_least_contrary_stands_for_all(case):
    over, evidence = case(SCORES)
    found = measure(
        AnyOf("any", (contrast(over, "clm", "mlm40"), contrast(over, "clm", "mlm20"))), evidence, None
    )
    assert found.said.title == "clm over mlm20"
    unclear = measure(contrast(over, "clm", "mlm20"), evidence, None)
    assert found.estimate.p == pytest.approx(min(1, 2 * unclear.estimate.p))


def test_options_that_are_missing_do_not_count(case):
    over, evidence = case(SCORES | {"mlm20": [math.nan] * 4})
    options = (contrast(over, "mlm40", "clm"), contrast(over, "mlm40", "mlm20"))
    found = measure(AnyOf("any", options), evidence, None)
    assert found.estimate.p == measure(options[0], evidence, None).estimate.p
    assert found.note.endswith("; 1 more are not complete")
    none = measure(AnyOf("any", options[1:]), evidence, None)
    assert none.missing
    assert none.title == "any"


@pytest.mark.parametrize(
    ("clm", "note"),
    [
        ([80.0, math.nan, math.nan, math.nan], "not yet: 5 of 8 leaves done"),
        ([math.nan] * 4, "not yet: 4 of 8 leaves done"),
    ],
)
def test_what_is_missing_says_why(case, clm, note):
    over, evidence = case(SCORES | {"clm": clm})
    found = measure(contrast(over), evidence, None)
    assert found.missing
    assert math.isnan(detectable(found, 0.05))
    assert found.note == note


def test_one_seed_gives_no_interval(case):
    study = replace(STUDY, finetune=replace(STUDY.finetune, seeds=(0,)))
    over, evidence = case({name: some[:1] for name, some in SCORES.items()}, study)
    found = measure(contrast(over), evidence, None)
    assert found.note == "one seed: an interval needs two"
    assert found.estimate.mean == pytest.approx(1.0)


def test_a_metric_that_was_not_scored_is_said(case):
    over, evidence = case(SCORES)
    unknown = gap(over, over.models["mlm40"], over.models["clm"], "SC", "entity_f1")
    found = measure(replace(contrast(over), quantity=unknown), evidence, None)
    assert found.note == "the metric it asks for was not scored"


def test_half_a_ledger_speaks_through_its_complete_seeds(case):
    over, evidence = case(SCORES | {"clm": [80.0, math.nan, 81.0, 80.2]})
    found = measure(contrast(over), evidence, None)
    assert (found.estimate.n, found.shape) == (3, (1, 3))
    assert found.estimate.mean == pytest.approx(np.mean([1.0, 0.9, 0.9]))


def test_the_detectable_effect_is_found_four_times_in_five(case):
    over, evidence = case(SCORES)
    found = measure(contrast(over), evidence, None)
    for level in (0.05, 0.002):
        effect = detectable(found, level)
        assert power_of(effect, found.estimate.sd, 4, level) == pytest.approx(0.8, abs=1e-6)
    assert detectable(replace(found, tries=10), 0.05) == pytest.approx(detectable(found, 0.005))


def test_models_without_a_common_pretraining_seed_are_paired_in_order_and_it_is_said(plan_of, evidence_of):
    def several(seeds):
        runs = [
            replace(one, name=f"{one.name}-{seed}", seed=seed)
            for one, some in zip(RUNS, seeds, strict=False)
            for seed in some
        ]
        plan = plan_of(replace(STUDY, runs=tuple(runs)))
        draw = np.random.default_rng(5)
        evidence = evidence_of(plan, lambda model, task, shape: draw.normal(80, 1, shape))
        over = comparable_models(plan, evidence.models)
        clm, mlm = over.models.values()
        return measure(contrast(over, mlm.name, clm.name), evidence, None)

    apart, together = several(((1, 2), (3, 4, 5))), several(((1, 2, 3), (2, 3)))
    assert (apart.shape, together.shape) == ((2, 4), (2, 4))
    assert "no pretraining seed in common" in apart.note
    assert together.note == ""
    assert apart.estimate.covers == "pretraining and fine-tuning seeds"


def test_the_interval_over_examples_is_that_of_the_same_contrast(ledger):
    """With the values of a ledger: resampled differences, not differences of intervals."""
    evidence = gather(*ledger)
    over = comparable_models(evidence.plan, evidence.models)
    clm, mlm = over.models["clm"], over.models["mlm"]
    test = Contrast("x", gap(over, mlm, clm, "SC"), "{}", "{}")
    found = measure(test, evidence, shared_resamples(evidence))
    values = [evidence.values(one, "sst2")[0] for one in (mlm, clm)]
    difference = (values[0] - values[1]).mean(axis=0, dtype=float)  # by example, over seeds
    half = 1.96 * 100 * difference.std() / math.sqrt(len(difference))
    low, high = found.examples
    assert (low + high) / 2 == pytest.approx(found.estimate.mean, abs=0.15 * half)
    assert (high - low) / 2 == pytest.approx(half, rel=0.15)
    assert measure(test, evidence, None).examples is None


def test_the_interval_over_examples_rests_on_the_seeds_of_the_estimate(ledger):
    plan, store = ledger
    whole = gather(plan, store)
    grid = whole.grids["clm", "sst2"]
    for keys in grid.keys:
        shutil.rmtree(store.trials / keys[grid.seeds.index(0)])
    evidence = gather(plan, store)
    over = comparable_models(plan, evidence.models)
    test = Contrast("x", gap(over, over.models["mlm"], over.models["clm"], "SC"), "{}", "{}")
    found = measure(test, evidence, shared_resamples(evidence))
    values = [
        evidence.values(over.models[one], "sst2")[0, [1, 2]].mean(dtype=float) for one in ("mlm", "clm")
    ]
    assert found.shape == (1, 2)
    assert found.estimate.mean == pytest.approx(100 * (values[0] - values[1]), abs=1e-4)
    assert sum(found.examples) / 2 == pytest.approx(found.estimate.mean, abs=1.0)


@pytest.mark.parametrize("by", [1.0, -1.0, 0.0])
def test_seeds_that_all_say_the_same_are_there_and_prove_nothing(case, by):
    over, evidence = case(SCORES | {"clm": [one - by for one in SCORES["mlm40"]]})
    found = measure(contrast(over), evidence, None)
    assert (found.alike, found.missing, found.p) == (True, False, 1.0)
    assert found.estimate.mean == pytest.approx(by)
    assert detectable(found, 0.05) == math.inf
    assert found.note == "every seed gives the same number, so there is no noise to judge it by"


def test_options_that_prove_nothing_are_not_the_clearest_but_count(case):
    over, evidence = case(SCORES | {"mlm20": [one + 5 for one in SCORES["clm"]]})
    options = (contrast(over, "mlm20", "clm"), contrast(over, "mlm40", "clm"))
    found = measure(AnyOf("any", options), evidence, None)
    assert found.said.title == "mlm40 over clm"
    assert found.estimate.p == pytest.approx(2 * measure(options[1], evidence, None).estimate.p)
    alone = measure(AnyOf("any", options[:1], paper=2.0), evidence, None)
    assert (alone.title, alone.paper, alone.alike) == ("any", 2.0, True)


def test_what_failed_is_told_from_what_is_not_yet_there(case):
    over, evidence = case(SCORES | {"clm": [80.0, math.nan, math.nan, math.nan]})
    grid = evidence.grids["clm", "sst2"]
    for failed, note in (
        (2, "not yet: 5 of 8 leaves done, 2 failed or cannot be read"),
        (3, "5 of 8 leaves done, 3 failed or cannot be read"),
    ):
        evidence.grids["clm", "sst2"] = replace(grid, missing=dict.fromkeys("abc"[:failed], "diverged"))
        found = measure(contrast(over), evidence, None)
        assert (found.note, found.lost, found.missing) == (note, failed, True)


def test_one_test_example_has_no_interval_over_examples(invent, run, grid, tmp_path):
    """Its scores differ by seed all the same."""
    plan, store = invent(
        Study("s", (run("clm", Stage(CLM(), 20)), run("mlm", Stage(MLM(0.4), 20))), grid("squad")), tmp_path
    )
    evidence = gather(plan, store)
    for name in ("clm", "mlm"):
        evidence.grids[name, "squad"] = replace(evidence.grids[name, "squad"], examples=1)

    class One:
        def of(self, model, task, metric=""):
            return np.arange(2 * 3.0).reshape(2, 1, 3)

    over = comparable_models(plan, evidence.models)
    test = Contrast("x", gap(over, over.models["mlm"], over.models["clm"], "QA"), "{}", "{}")
    found = measure(test, evidence, One())
    assert not found.missing
    assert found.examples is None


def test_the_interval_over_examples_does_not_hang_on_the_first_pretraining(invent, run, grid, tmp_path):
    runs = [
        run(f"{name}{seed}", Stage(objective, 20), seed=seed)
        for name, objective in (("clm", CLM()), ("mlm", MLM(0.4)))
        for seed in (1, 2)
    ]
    plan, store = invent(Study("s", tuple(runs), grid("squad")), tmp_path, results=("clm2", "mlm2"))
    evidence = gather(plan, store)
    over = comparable_models(plan, evidence.models)
    test = Contrast("x", gap(over, over.models["mlm1"], over.models["clm1"], "QA"), "{}", "{}")
    found = measure(test, evidence, shared_resamples(evidence))
    assert found.shape == (1, 3)
    assert found.examples[0] < found.estimate.mean < found.examples[1]
