"""Quantities worked by hand; contrasts paired over seeds, tested against their margin, and over resampled examples."""

import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from small_studies import K, clm, mlm

from biphase import CATALOG, Finetune, Study
from biphase.papers.gisserot2025 import PAPER
from biphase.papers.gisserot2025.remarks import Overtaking, crossing
from biphase.report.contrasts import (
    Contrast,
    Largest,
    On,
    ScoreView,
    Spread,
    any_of,
    mean,
    measure,
    slope,
)
from biphase.report.evidence import Resamples, gather
from biphase.report.selectors import Recipes, Select, comparable_models
from biphase.report.statistics.intervals import over_seeds
from biphase.report.verdicts import _classified

RATES = (1e-5, 1e-4, 1e-3)
RUNS = clm(42 * K, "clm"), mlm(42 * K, name="mlm40"), mlm(42 * K, 0.2, "mlm20")
TASKS = ("sst2", "mnli", "conll2003")
STUDY = Study("s", RUNS, Finetune(tuple(CATALOG[one] for one in TASKS), lrs=RATES, seeds=(0, 1)))
NAMES = ("clm", "mlm40", "mlm20")


@pytest.fixture
def case(plan_of, evidence_of):
    """(comparable models, evidence) of a study with these scores: (model, task) or model → (rates, seeds), percent."""

    def made(scores, validation=None, study=STUDY):
        plan = plan_of(study)

        def of(table):
            return lambda model, task, shape: table.get((model.name, task.name), table.get(model.name))

        evidence = evidence_of(plan, of(scores), None if validation is None else of(validation))
        return comparable_models(plan, evidence.models), evidence

    return made


@pytest.fixture
def any_case(case):
    draw = np.random.default_rng(3)
    scores = {(name, task): draw.normal(80, 2, (len(RATES), 2)) for name in NAMES for task in TASKS}
    return *case(scores), scores


def read(evidence, quantity):
    return quantity.measure(ScoreView.of(quantity.models, evidence))


def best(scores):
    return scores.max(axis=0)  # validation scores are the test scores here


# ---------------------------------------------------------------- quantities


def test_quantities_are_computed_seed_by_seed(any_case):
    study, evidence, scores = any_case
    clm, mlm, _ = every = tuple(study.models.values())
    sc, tc = On(study, "SC"), On(study, "TC")
    tagged = np.stack([best(scores[name, "conll2003"]) for name in NAMES])
    several = [tc.score(one) for one in every]
    xs = [1.0, 2.5, 3.0]
    spreads = [np.ptp(scores["mlm40", task], axis=0) for task in TASKS]
    for quantity, expected in [
        (sc.score(clm), (best(scores["clm", "sst2"]) + best(scores["clm", "mnli"])) / 2),
        (On(study, "mnli").score(clm), best(scores["clm", "mnli"])),
        (tc.gap(mlm, clm), tagged[1] - tagged[0]),
        (0.1 * tc.gap(mlm, clm), 0.1 * (tagged[1] - tagged[0])),
        (tc.gap(mlm, clm) + tc.gap(clm, mlm), np.zeros(2)),
        (mean(several), tagged.mean(axis=0)),
        (slope(zip(xs, several, strict=True)), [np.polyfit(xs, column, 1)[0] for column in tagged.T]),
        (sc.spread_of_rates(mlm), np.mean(spreads, axis=0)),
        (tc.spread(every), np.ptp(tagged, axis=0)),
        (Largest(tuple(several)), tagged.max(axis=0)),
    ]:
        assert read(evidence, quantity) == pytest.approx(np.array([expected]))


def test_the_best_model_is_chosen_on_validation_and_scored_on_test(case):
    test = {name: np.full((3, 2), at) for at, name in enumerate(NAMES)}
    opposite = {name: np.full((3, 2), 10.0 - at) for at, name in enumerate(NAMES)}
    # Only the seeds that all models have choose: a good seed of mlm40 does not count.
    partly = {"clm": [[60.0, math.nan]] * 3, "mlm40": [[55.0, 99.0]] * 3, "mlm20": np.full((3, 2), 50.0)}
    for validation in (opposite, partly):
        study, evidence = case(test, validation)
        quantity = On(study, "TC").best(tuple(study.models.values()))
        assert quantity.chosen(ScoreView.of(quantity.models, evidence)).name == "clm"
        assert read(evidence, quantity)[0, 0] == pytest.approx(0.0)


def test_a_seed_that_one_model_lacks_is_missing(case):
    scores = {name: np.full((3, 2), 50.0) for name in NAMES}
    scores["clm", "mnli"] = np.array([[50.0, 50.0], [50.0, math.nan], [50.0, 50.0]])
    study, evidence = case(scores)
    clm, mlm, _ = study.models.values()
    on = On(study, "SC")
    for quantity in (on.gap(mlm, clm), on.spread_of_rates(clm), on.spread((clm, mlm))):
        assert np.isnan(read(evidence, quantity)).tolist() == [[False, True]]


def test_the_predicted_variance_is_that_of_independent_scores(any_case):
    study, _, _ = any_case
    noise = {"sst2": 0.3, "mnli": 0.5, "conll2003": 0.2}.__getitem__
    clm, mlm, other = study.models.values()
    sc, tc = On(study, "SC"), On(study, "TC")
    single, tagged = (0.3**2 + 0.5**2) / 4, 0.2**2
    for quantity, expected in [
        (sc.score(clm), single),
        (sc.gap(mlm, clm), 2 * single),
        (0.1 * sc.gap(mlm, clm) - tc.gap(mlm, clm), 0.01 * 2 * single + 2 * tagged),
        (slope((x, tc.score(one)) for x, one in enumerate((clm, mlm, other))), tagged / 2),
        (sc.spread((clm, mlm)), 2 * single),  # a spread is assumed to be as noisy as a difference of two
        (replace(sc.spread_of_rates(clm), tasks=("sst2", "mnli")), 2 * single),
        (sc.best((clm, mlm)), single),
        (Largest((sc.score(clm), sc.score(mlm))), single),
    ]:
        assert quantity.variance(noise) == pytest.approx(expected)


def test_published_values_exist_for_families_in_the_papers_metric(any_case):
    study, _, _ = any_case
    clm, mlm, _ = study.models.values()
    sc, tc = On(study, "SC"), On(study, "TC")
    for quantity, expected in [
        (sc.score(clm), 83.58),
        (On(study, "sst2").score(clm), None),
        (On(study, "TC", "entity_f1").score(clm), None),
        (sc.gap(mlm, clm), 3.42),
        (sc.gap(mlm, clm) - On(study, "sst2").score(clm), None),
        (Largest((sc.gap(mlm, clm), tc.gap(mlm, clm))), 3.42),
        (Spread((sc.score(clm), sc.score(mlm))), None),
    ]:
        assert quantity.published(PAPER.published) == (expected and pytest.approx(expected))


# ---------------------------------------------------------------- measuring


ONE_TASK = replace(STUDY, finetune=Finetune((CATALOG["sst2"],), lrs=(1e-5,), seeds=(0, 1, 2, 3)))
SCORES = {
    "clm": [[80.0, 80.5, 81.0, 80.2]],
    "mlm40": [[81.0, 81.6, 81.9, 81.1]],
    "mlm20": [[80.4, 80.2, 81.3, 80.1]],
}
GAP = np.subtract(SCORES["mlm40"], SCORES["clm"])[0]


def contrast(study, more="mlm40", less="clm", on="SC", **fields):
    gap = On(study, on).gap(study.models[more], study.models[less])
    return Contrast(f"{more} over {less}", gap, f"{more} scores {{}} above", "below {}", **fields)


@pytest.fixture
def measured(case):
    """The result of a contrast, or of any of several (more, less), with some scores changed."""

    def made(*pairs, study=ONE_TASK, together=False, changed=None, **fields):
        comparable, evidence = case(SCORES | (changed or {}), study=study)
        options = tuple(contrast(comparable, *pair, **fields) for pair in pairs or [("mlm40", "clm")])
        return measure(any_of("any", options, 2.0) if together else options[0], evidence, None)

    return made


@pytest.mark.parametrize("margin", [0.0, -0.5, 0.9])
def test_differences_are_paired_by_seed_and_tested_against_the_margin(measured, margin):
    found = measured(margin=margin)
    low, high = stats.t.interval(0.95, 3, GAP.mean(), stats.sem(GAP))
    assert (found.estimate.low, found.estimate.high) == pytest.approx((low, high))
    assert found.estimate.p == pytest.approx(stats.ttest_1samp(GAP, margin).pvalue)
    assert found.excess == pytest.approx(GAP.mean() - margin)
    assert (found.models, found.shape, found.examples) == (("mlm40", "clm"), (1, 4), None)
    assert found.says == f"mlm40 scores 0.97 ± {(high - low) / 2:.2f} above"


def test_the_clearest_of_several_is_corrected_for_their_number(measured):
    pairs = ("mlm20", "clm"), ("mlm40", "clm"), ("mlm20", "mlm40"), ("clm", "mlm40")
    found, alone = measured(*pairs, together=True), measured()
    assert (found.title, found.contrast.title, found.paper, found.tries) == ("any", "mlm40 over clm", 2.0, 4)
    assert found.estimate.mean == alone.estimate.mean
    assert found.estimate.p == pytest.approx(4 * alone.estimate.p)
    assert found.estimate.low == pytest.approx(over_seeds(GAP, 1 - 0.05 / 4).low)
    assert "clearest of 4 comparisons: mlm40 over clm" in found.note
    # Where no option holds, the least contrary represents all.
    found = measured(("clm", "mlm40"), ("clm", "mlm20"), together=True)
    assert found.contrast.title == "clm over mlm20"
    assert found.estimate.p == pytest.approx(min(1, 2 * measured(("clm", "mlm20")).estimate.p))


def test_options_that_are_missing_or_without_noise_are_not_the_clearest(measured):
    pairs = ("mlm40", "clm"), ("mlm40", "mlm20")
    missing = {"mlm20": [[math.nan] * 4]}
    found = measured(*pairs, together=True, changed=missing)
    assert found.estimate.p == measured().estimate.p
    assert found.note.endswith("; 1 more are not complete")
    none = measured(pairs[1], together=True, changed=missing)
    assert (none.missing, none.title) == (True, "any")
    shifted = {"mlm20": np.add(SCORES["clm"], 5)}  # every seed gives the same difference
    found = measured(("mlm20", "clm"), ("mlm40", "clm"), together=True, changed=shifted)
    assert found.contrast.title == "mlm40 over clm"
    assert found.estimate.p == pytest.approx(2 * measured().estimate.p)
    alone = measured(("mlm20", "clm"), together=True, changed=shifted)
    assert (alone.title, alone.paper, alone.alike) == ("any", 2.0, True)


def test_what_is_missing_says_why(measured, case):
    gap = [[80.0, math.nan, math.nan, math.nan]]
    found = measured(changed={"clm": gap})
    assert (found.missing, found.note, found.says) == (True, "not yet: 5 of 8 scores done", "")
    assert math.isnan(_classified(found, 0.05, 0.05).detectable)
    one = replace(ONE_TASK, finetune=replace(ONE_TASK.finetune, seeds=(0,)))
    single = measured(study=one, changed={name: [row[0][:1]] for name, row in SCORES.items()})
    assert "one seed" in single.note
    assert single.estimate.mean == pytest.approx(1.0)
    study, evidence = case(SCORES | {"clm": gap}, study=ONE_TASK)
    grid = evidence.grids["clm", "sst2"]
    for failed, note in ((2, "not yet: 5 of 8 scores done, 2 failed"), (3, "5 of 8 scores done, 3 failed")):
        evidence.grids["clm", "sst2"] = replace(grid, missing=dict.fromkeys("abc"[:failed], "diverged"))
        found = measure(contrast(study), evidence, None)
        assert found.note.startswith(note)
        assert (found.lost, found.missing) == (failed, True)
    quantity = On(study, "SC", "entity_f1").gap(study.models["mlm40"], study.models["mlm20"])
    assert "was not scored" in measure(replace(contrast(study), quantity=quantity), evidence, None).note
    part = measured(changed={"clm": [[80.0, math.nan, 81.0, 80.2]]})  # the seed is left out
    assert (part.estimate.n, part.shape) == (3, (1, 3))
    assert part.estimate.mean == pytest.approx(np.mean([1.0, 0.9, 0.9]))


@pytest.mark.parametrize("by", [1.0, -1.0, 0.0])
def test_seeds_that_are_all_alike_prove_nothing(measured, by):
    found = measured(changed={"clm": np.subtract(SCORES["mlm40"], by)})
    assert (found.alike, found.missing, found.p) == (True, False, 1.0)
    assert found.estimate.mean == pytest.approx(by)
    assert _classified(found, 0.05, 0.05).detectable == math.inf
    assert "same number" in found.note


def test_pretraining_seeds_are_paired_by_seed_or_else_in_order(plan_of, evidence_of):
    def several(*seeds):
        runs = [
            replace(one, name=f"{one.name}-{seed}", seed=seed)
            for one, some in zip(RUNS, seeds, strict=False)
            for seed in some
        ]
        plan = plan_of(replace(ONE_TASK, runs=tuple(runs)))
        evidence = evidence_of(plan, lambda model, task, shape: np.zeros(shape))
        for (
            name
        ) in plan.results:  # of the first model as many points as its seed, of the second ten times that
            points = int(name[-1]) * (10 if name.startswith("mlm") else 1)
            evidence.grids[name, "sst2"].test["accuracy"][:] = points / 100
        study = comparable_models(plan, evidence.models)
        clm, mlm = study.models
        test = contrast(study, mlm, clm)
        table = test.quantity.measure(ScoreView.of(test.models, evidence))
        return table[:, 0].tolist(), measure(test, evidence, None)

    points, found = several((1, 2, 4), (2, 4, 3))
    assert points == pytest.approx([18.0, 36.0])
    assert found.shape == (2, 4)
    assert "in common" not in found.note
    points, found = several((1, 2), (3, 4, 5))
    assert points == pytest.approx([29.0, 38.0])
    assert "no pretraining seed in common" in found.note
    assert found.estimate.covers == "pretraining and fine-tuning seeds"


# ---------------------------------------------------------------- over test examples


def over_examples(evidence, more="mlm", less="clm", on="SC", draws=None):
    study = comparable_models(evidence.plan, evidence.models)
    return measure(contrast(study, more, less, on), evidence, draws or Resamples(evidence))


def test_the_interval_over_examples_is_that_of_resampled_differences(ledger):
    plan, store = ledger
    evidence = gather(plan, store)
    found = over_examples(evidence)
    values = [evidence.values(evidence.models[one], "sst2")[0] for one in ("mlm", "clm")]
    difference = (values[0] - values[1]).mean(axis=0, dtype=float)  # by example, over seeds
    half = 1.96 * 100 * difference.std() / math.sqrt(len(difference))
    low, high = found.examples
    assert (low + high) / 2 == pytest.approx(found.estimate.mean, abs=0.15 * half)
    assert (high - low) / 2 == pytest.approx(half, rel=0.15)
    # It rests on the seeds of the estimate: without one seed, on the others.
    grid = evidence.grids["clm", "sst2"]
    for keys in grid.keys:
        shutil.rmtree(store.trials / keys[grid.seeds.index(0)])
    found = over_examples(gather(plan, store))
    means = [some[[1, 2]].mean(dtype=float) for some in values]
    assert found.shape == (1, 2)
    assert found.estimate.mean == pytest.approx(100 * (means[0] - means[1]), abs=1e-4)
    assert sum(found.examples) / 2 == pytest.approx(found.estimate.mean, abs=1.0)


def test_the_interval_over_examples_needs_two_of_them(ledger):
    evidence = gather(*ledger)
    for place in evidence.grids:
        evidence.grids[place] = replace(evidence.grids[place], examples=1)

    class Two:
        def of(self, model, tasks, metric=""):
            return np.arange(2 * 3.0).reshape(2, 1, 3)

    single = over_examples(evidence, draws=Two())
    assert (single.missing, single.examples) == (False, None)


# ---------------------------------------------------------------- crossings of learning curves


STEPS = (1 * K, 2 * K, 4 * K, 8 * K)
X = np.array(STEPS, dtype=float)
RISING, LEVEL = np.array([0.0, 1.0, 2.0, 3.0]), np.ones(4)


@pytest.mark.parametrize(
    ("curves", "expected"),
    [
        ((X, RISING, X, 1.5 * LEVEL), math.sqrt(2 * 4) * K),  # between checkpoints, over the logarithm
        ((X, RISING, X, 1.25 * LEVEL), 2 * K * 2**0.25),
        ((X, np.array([0.0, 2.0, 0.0, 2.0]), X, LEVEL), math.sqrt(32) * K),  # the last of two
        ((X, RISING[::-1], X, 1.5 * LEVEL), math.nan),  # from above
        ((X, 3 * LEVEL, X, 1.5 * LEVEL), math.nan),
        ((X, RISING, 2 * X, LEVEL), 2 * K),  # each curve on its own axis
        ((X, RISING + 0.5, 2 * X, RISING - 1), math.nan),  # ahead from where both are known
        ((2 * X, RISING + 1, X, np.array([1.5, 1.75, 2.0, 2.25])), 4 * K),
    ],
)
def test_the_last_crossing_from_below_is_found(curves, expected):
    assert crossing(*curves) == pytest.approx(expected, nan_ok=True)


@pytest.fixture
def overtaking(plan_of, evidence_of):
    """What is said of MLM scores at the four steps, (steps, seeds), beside CLM at 50."""

    def said(masked, pretrainings=(0,)):
        seeds = range(len(masked[0]))
        runs = tuple(
            one(name=f"{word}{seed}", keep=STEPS, seed=seed)
            for word, one in (("clm", clm), ("mlm", mlm))
            for seed in pretrainings
        )
        plan = plan_of(Study("s", runs, Finetune((CATALOG["sst2"],), lrs=(1e-5,), seeds=seeds)))

        def score(model, task, shape):
            kept = model.recipe.kind == "mlm" and model.recipe.steps in STEPS
            return [masked[STEPS.index(model.recipe.steps)]] if kept else np.full(shape, 50.0)

        evidence = evidence_of(plan, score)
        for step in STEPS if len(pretrainings) > 1 else ():
            evidence.grids[f"mlm{pretrainings[1]}-{step}", "sst2"].test["accuracy"][:] -= 0.005
        study = comparable_models(plan, evidence.models)
        select = Select((Recipes("mlm", 0.4, before_decay=True), Recipes("clm", before_decay=True)))
        (case,) = select.cases(study)
        quantity = On(study, "SC").gap(*case.models)
        return Overtaking(case, On(study, "SC"))(ScoreView.of(quantity.models, evidence), quantity)

    return said


def test_the_crossing_is_given_in_steps_tokens_and_flops(overtaking):
    said = overtaking([[48.0, 48.0], [49.0, 49.2], [51.0, 51.2], [52.0, 52.0]])
    steps = math.exp(np.mean(np.log([2 * K * math.sqrt(2), 2 * K * 2**0.4])))
    assert f"MLM 40% overtakes CLM near step {steps:,.0f} (95%: " in said
    assert f", {steps * 2_359_296 / 1e9:.3g}B tokens; at equal FLOPs near " in said
    # A step of CLM costs more: its head is computed for every token.
    assert steps * 2_359_296 * 2.5e9 < float(said.rsplit(" ", 1)[1]) < steps * 2_359_296 * 4e9


@pytest.mark.parametrize(
    ("masked", "facts"),
    [
        ([[48.0, 49.0]] * 4, ("has not overtaken", "step 8,000")),
        ([[51.0, 52.0]] * 4, ("is ahead from", "step 1,000")),
        (
            [[48.0, math.nan], [49.0] * 2, [51.0] * 2, [52.0] * 2],
            ("step 2,828,", "6.67B tokens"),
        ),  # no interval
        ([[48.0, 51.0], [49.0, 51.0], [51.0] * 2, [52.0] * 2], ("2,828 in 1 of 2 seeds",)),
        ([[math.nan] * 2] * 4, ()),
    ],
)
def test_curves_that_do_not_cross_in_every_seed_are_described(overtaking, masked, facts):
    said = overtaking(masked)
    assert all(fact in said for fact in facts)
    assert bool(said) == bool(facts)


def test_two_pretrainings_with_five_seeds_each_are_not_ten_samples(overtaking):
    rising = np.array([[48.0], [49.0], [51.0], [52.0]]) + np.linspace(0, 0.1, 5)
    said = overtaking(rising, pretrainings=(1, 2))
    low, high = (float(one.replace(",", "")) for one in said.split("95%: ")[1].split(")")[0].split(" to "))
    assert high > 5 * low
