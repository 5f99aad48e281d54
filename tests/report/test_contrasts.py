"""Quantities worked by hand; contrasts tested against their margin with moderated variances, and over examples."""

import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
from small_studies import K, clm, mlm

from biphase import CATALOG, Finetune, Study
from biphase.papers.gisserot2025 import PAPER
from biphase.papers.gisserot2025.measures import Sensitivity, spread
from biphase.papers.gisserot2025.remarks import Overtaking, interpolated
from biphase.report.contrasts import (
    Contrast,
    Measure,
    On,
    ScoreView,
    any_of,
    mean,
    slope,
)
from biphase.report.evidence import Baseline, Resamples, gather
from biphase.report.selectors import Recipes, Select, comparable_models
from biphase.report.statistics.moderated import cells_of, contrast_of

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


def view_of(evidence, quantity):
    return ScoreView.of(quantity.models, quantity.tasks, evidence)


def value(evidence, quantity):
    """The mean of a quantity over seeds."""
    view = view_of(evidence, quantity)
    terms = quantity.terms(view).items()
    return sum(np.nanmean(view.table(evidence.models[name], cells)) for name, cells in terms)


def best(scores):
    return scores.max(axis=0).mean()  # validation scores are the test scores here


# ---------------------------------------------------------------- quantities


def test_quantities_are_weighted_sums_of_scores(any_case):
    study, evidence, scores = any_case
    clm, mlm, _ = every = tuple(study.models.values())
    sc, tc = On(study, "SC"), On(study, "TC")
    tagged = np.array([best(scores[name, "conll2003"]) for name in NAMES])
    several = [tc.score(one) for one in every]
    xs = [1.0, 2.5, 3.0]
    by_rate = {key: of.mean(axis=1) for key, of in scores.items()}
    spreads = {name: np.mean([np.ptp(by_rate[name, task]) for task in TASKS]) for name in NAMES}
    for quantity, expected in [
        (sc.score(clm), (best(scores["clm", "sst2"]) + best(scores["clm", "mnli"])) / 2),
        (On(study, "mnli").score(clm), best(scores["clm", "mnli"])),
        (tc.gap(mlm, clm), tagged[1] - tagged[0]),
        (0.1 * tc.gap(mlm, clm), 0.1 * (tagged[1] - tagged[0])),
        (tc.gap(mlm, clm) + tc.gap(clm, mlm), 0),
        (mean(several), tagged.mean()),
        (slope(zip(xs, several, strict=True)), np.polyfit(xs, tagged, 1)[0]),
        (Sensitivity((mlm, clm), TASKS), spreads["mlm40"] - spreads["clm"]),
        (spread(tc, every), np.ptp(tagged)),
    ]:
        assert value(evidence, quantity) == pytest.approx(expected)


def test_models_and_rates_are_chosen_on_validation_and_scored_on_test(case):
    test = {name: np.full((3, 2), at) for at, name in enumerate(NAMES)}
    validation = {name: np.full((3, 2), 90.0 - at) for at, name in enumerate(NAMES)}
    study, evidence = case(test, validation)
    _, mlm, other = every = tuple(study.models.values())
    tc = On(study, "TC")
    assert value(evidence, tc.best(every)) == 0  # the best on validation is the worst on test
    assert value(evidence, spread(tc, every)) == -2
    test["mlm40"] = np.array([[50.0], [60.0], [70.0]]) + np.zeros(2)
    validation["mlm40"] = 160 - test["mlm40"]
    study, evidence = case(test, validation)
    assert value(evidence, Sensitivity((mlm, other), TASKS)) == pytest.approx(-20)


def test_a_task_that_a_model_has_not_learnt_says_nothing_about_its_rates(case):
    """A model at the floor scores alike at every rate, which is no robustness."""
    scores = {name: np.array([[70.0], [80.0], [90.0]]) + np.zeros(2) for name in NAMES}
    scores["clm", "sst2"] = np.full((3, 2), 52.0)
    study, evidence = case(scores)
    for key, grid in evidence.grids.items():
        trivial = {grid.metric: Baseline("always the same", 0.5, 0.5)}
        evidence.grids[key] = replace(grid, baselines={"trivial": trivial})
    clm, mlm, _ = study.models.values()
    quantity = Sensitivity((mlm, clm), TASKS)
    view = view_of(evidence, quantity)
    assert {task for task, _, _ in quantity.terms(view)["clm"]} == {"mnli", "conll2003"}
    assert "sst2" in quantity.note(view)
    for task in TASKS:
        evidence.grids["clm", task] = evidence.grids["clm", "sst2"]
    assert quantity.terms(view_of(evidence, quantity)) == {}
    found = Measure(evidence)(Contrast("c", quantity))
    assert (found.missing, found.note) == (True, "no task that both have learnt")


def test_the_predicted_variance_is_that_of_independent_scores(any_case):
    study, _, _ = any_case
    noise = {"sst2": 0.3, "mnli": 0.5, "conll2003": 0.2}
    clm, mlm, _ = every = tuple(study.models.values())
    sc, tc = On(study, "SC"), On(study, "TC")
    single = (0.3**2 + 0.5**2) / 4
    for quantity, expected in [
        (0.1 * sc.gap(mlm, clm) - tc.gap(mlm, clm), 2 * (0.01 * single + 0.04)),
        (slope((x, tc.score(one)) for x, one in enumerate(every)), 2 * 0.25 * 0.04),
        (spread(sc, (clm, mlm)), 2 * single),
        (Sensitivity((clm, mlm), ("sst2", "mnli")), 4 * single),
        (sc.best((clm, mlm)), single),
    ]:
        assert quantity.variance(noise.__getitem__, lambda model: 5) == pytest.approx(expected / 5)


def test_published_values_exist_for_families_in_the_papers_metric(any_case):
    clm = any_case[0].models["clm"]
    every = On(any_case[0], "SC"), On(any_case[0], "sst2"), On(any_case[0], "TC", "entity_f1")
    assert [on.score(clm).published(PAPER.published) for on in every] == [83.58, None, None]


# ---------------------------------------------------------------- measuring


ONE_TASK = replace(STUDY, finetune=Finetune((CATALOG["sst2"],), lrs=(1e-5,), seeds=(0, 1, 2, 3)))
SCORES = {
    "clm": [[80.0, 80.5, 81.0, 80.2]],
    "mlm40": [[81.0, 81.6, 81.9, 81.1]],
    "mlm20": [[80.4, 80.2, 81.3, 80.1]],
}
GAP = np.mean(SCORES["mlm40"]) - np.mean(SCORES["clm"])


def contrast(study, more="mlm40", less="clm", on="SC", **fields):
    gap = On(study, on).gap(study.models[more], study.models[less])
    return Contrast(f"{more} over {less}", gap, **fields)


@pytest.fixture
def measured(case):
    """The result of a contrast, or of any of several (more, less), with some scores changed."""

    def made(*pairs, study=ONE_TASK, several=False, changed=None, **fields):
        comparable, evidence = case(SCORES | (changed or {}), study=study)
        options = tuple(contrast(comparable, *pair, **fields) for pair in pairs or [("mlm40", "clm")])
        return Measure(evidence)(any_of("any", options, paper=2.0) if several else options[0])

    return made


@pytest.mark.parametrize("margin", [0.0, -0.5, 0.9])
def test_a_difference_is_tested_with_the_variances_of_all_models(measured, margin):
    found = measured(margin=margin)
    cells = cells_of(np.concatenate([SCORES[name] for name in NAMES]))
    parts = np.array([0, 1])
    expected = contrast_of(np.asarray(GAP), cells.variance[parts] / 4, cells.df[parts], margin)
    assert found.estimate.mean == pytest.approx(GAP)
    assert (found.estimate.low, found.estimate.high) == pytest.approx(
        (float(expected.low), float(expected.high))
    )
    assert (found.above, found.below) == pytest.approx((float(expected.above), float(expected.below)))
    assert found.excess == pytest.approx(GAP - margin)
    assert (found.models, found.shape, found.examples) == (("mlm40", "clm"), (1, 4), None)


def test_noise_is_learnt_at_every_learning_rate(case):
    """At one rate four seeds say little; at thirty rates of the same task they say much."""
    draw = np.random.default_rng(4)
    few, many = (
        replace(ONE_TASK, finetune=replace(ONE_TASK.finetune, lrs=lrs))
        for lrs in ((1e-5,), tuple(np.geomspace(1e-6, 1e-3, 30)))
    )
    widths = []
    for made in (few, many):
        # The last rate is the best for every seed.
        rates = len(made.finetune.lrs)
        scores = {
            name: draw.normal(70, 0.5, (rates, 4)) + np.linspace(0, 20, rates)[:, None] for name in NAMES
        }
        study, evidence = case(
            scores | {name: [*of[:-1], SCORES[name][0]] for name, of in scores.items()}, study=made
        )
        widths.append(Measure(evidence)(contrast(study)).half)
    assert widths[1] < widths[0]


def test_the_clearest_of_several_is_corrected_for_their_number(measured):
    pairs = ("mlm20", "clm"), ("mlm40", "clm"), ("mlm20", "mlm40"), ("clm", "mlm40")
    found, alone = measured(*pairs, several=True), measured()
    assert (found.title, found.paper, found.tries) == ("any", 2.0, 4)
    assert found.estimate.mean == alone.estimate.mean
    assert found.above == pytest.approx(4 * alone.above)
    assert found.below == pytest.approx(max(measured(pair).below for pair in pairs))
    assert found.estimate.low < alone.estimate.low
    assert "clearest of 4 comparisons: mlm40 over clm" in found.note
    # Where no option holds, the least contrary represents all.
    found = measured(("clm", "mlm40"), ("clm", "mlm20"), several=True)
    assert "clm over mlm20" in found.note
    missing = {"mlm20": [[math.nan] * 4]}
    found = measured(("mlm40", "clm"), ("mlm40", "mlm20"), several=True, changed=missing)
    assert (found.above, found.below) == (measured(changed=missing).above, 1.0), "what is not known may hold"
    assert found.note.endswith("; 1 more are not complete")
    none = measured(("mlm40", "mlm20"), several=True, changed=missing)
    assert (none.missing, none.title) == (True, "any")


def test_what_is_missing_says_why(measured, case):
    nan = math.nan
    found = measured(changed={"clm": [[nan] * 4]})
    assert (found.missing, found.note) == (True, "not yet: 4 of 8 scores done")
    one = replace(ONE_TASK, finetune=replace(ONE_TASK.finetune, seeds=(0,)))
    single = measured(study=one, changed={name: [row[0][:1]] for name, row in SCORES.items()})
    assert "two seeds" in single.note
    assert (single.missing, single.estimate.mean) == (True, pytest.approx(1.0))
    study, evidence = case(SCORES | {"clm": [[nan] * 4]}, study=ONE_TASK)
    grid = evidence.grids["clm", "sst2"]
    for failed, note in ((2, "not yet: 4 of 8 scores done, 2 failed"), (4, "4 of 8 scores done, 4 failed")):
        evidence.grids["clm", "sst2"] = replace(grid, missing=dict.fromkeys("abcd"[:failed], "diverged"))
        found = Measure(evidence)(contrast(study))
        assert found.note.startswith(note)
        assert (found.lost, found.missing) == (failed, True)
    study, evidence = case(SCORES, study=ONE_TASK)
    gap = On(study, "SC", "entity_f1").gap(study.models["mlm40"], study.models["clm"])
    assert "was not scored" in Measure(evidence)(replace(contrast(study), quantity=gap)).note


def test_a_model_whose_seeds_are_alike_or_single_borrows_the_noise_of_the_others(measured):
    usual = measured()
    for few in ([[80.4] * 4], [[80.4, math.nan, math.nan, math.nan]]):
        found = measured(changed={"clm": few})
        assert found.estimate.mean == pytest.approx(np.mean(SCORES["mlm40"]) - 80.4)
        assert found.half > 0.5 * usual.half
    alike = measured(
        changed={name: [[level] * 4] for level, name in zip((80.0, 81.0, 80.5), NAMES, strict=True)}
    )
    assert (alike.missing, alike.estimate.mean) == (True, 1.0)
    assert "no noise to judge it by" in alike.note


def test_models_are_compared_at_the_learning_rates_that_both_have(case):
    """A checkpoint that was tuned at one rate is not compared with the best of three."""
    scores = {name: np.array([[70.0], [80.0], [90.0]]) + np.arange(2) for name in NAMES}
    study, evidence = case(scores)
    for task in TASKS:
        grid = evidence.grids["clm", task]
        evidence.grids["clm", task] = replace(grid, keys=(("", ""), grid.keys[1], ("", "")))
    found = Measure(evidence)(contrast(study))
    assert found.estimate.mean == 0
    assert "sst2, mnli" in found.note
    both = Measure(evidence)(contrast(study, "mlm40", "mlm20"))
    assert (both.estimate.mean, both.note) == (0, "")


def test_pretraining_seeds_are_the_unit_where_there_are_several(plan_of, evidence_of):
    runs = [replace(one, name=f"{one.name}-{seed}", seed=seed) for one in RUNS[:2] for seed in (1, 2, 4)]
    plan = plan_of(replace(ONE_TASK, runs=tuple(runs)))
    evidence = evidence_of(plan, lambda model, task, shape: np.zeros(shape))
    draw = np.random.default_rng(5)
    for name in plan.results:
        level = 0.8 + 0.01 * name.startswith("mlm") + 0.01 * draw.normal()
        evidence.grids[name, "sst2"].test["accuracy"][:] = level + draw.normal(0, 0.001, 4)
    study = comparable_models(plan, evidence.models)
    found = Measure(evidence)(contrast(study, "mlm40-1", "clm-1"))
    means = {
        name: np.array(
            [100 * evidence.grids[result, "sst2"].test["accuracy"].mean() for result in model.results]
        )
        for name, model in study.models.items()
    }
    assert found.estimate.mean == pytest.approx(means["mlm40-1"].mean() - means["clm-1"].mean())
    assert found.estimate.se >= np.sqrt(sum(of.var(ddof=1) for of in means.values()) / 3) * 0.99
    assert (found.shape, found.estimate.covers, found.estimate.n) == ((3, 4), "pretraining seeds", 3)


def test_the_same_test_has_the_same_key_whichever_claim_makes_it(case):
    study, evidence = case(SCORES, study=ONE_TASK)
    measure = Measure(evidence)
    usual = measure(contrast(study))
    named = On(study, "SC", "accuracy").gap(study.models["mlm40"], study.models["clm"])
    assert measure(replace(contrast(study), quantity=named, title="other")).key == usual.key
    others = [contrast(study, margin=-0.5), contrast(study, "mlm20"), contrast(study, "clm", "mlm40")]
    assert len({usual.key, *(measure(one).key for one in others)}) == 4


# ---------------------------------------------------------------- over test examples


def over_examples(evidence, more="mlm", less="clm", on="SC", draws=None):
    study = comparable_models(evidence.plan, evidence.models)
    return Measure(evidence, draws or Resamples(evidence))(contrast(study, more, less, on))


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
    means = values[0].mean(dtype=float), values[1][[1, 2]].mean(dtype=float)
    assert found.shape == (1, 2)
    assert found.estimate.mean == pytest.approx(100 * (means[0] - means[1]), abs=1e-4)
    assert sum(found.examples) / 2 == pytest.approx(found.estimate.mean, abs=1.0)


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
    assert interpolated(*curves) == pytest.approx(expected, nan_ok=True)


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
        on = On(study, "SC")
        quantity = on.gap(*case.models)
        return Overtaking(case, on)(view_of(evidence, quantity), quantity)

    return said


def test_the_crossing_is_given_in_steps_tokens_and_flops(overtaking):
    masked = [[48.0, 48.1], [49.0, 49.2], [51.0, 51.2], [52.0, 52.1]]
    said = overtaking(masked)
    slope, level = np.polyfit(np.log(X), np.mean(masked, axis=1) - 50, 1)
    steps = math.exp(-level / slope)
    assert f"MLM 40% overtakes CLM near step {steps:,.0f} (95%: " in said
    assert f", {steps * 2_359_296 / 1e9:.3g}B tokens; at equal FLOPs near " in said
    # A step of CLM costs more: its head is computed for every token.
    assert steps * 2_359_296 * 2.2e9 < float(said.rsplit(" ", 1)[1]) < steps * 2_359_296 * 4e9


@pytest.mark.parametrize(
    ("masked", "facts"),
    [
        ([[48.0, 49.0]] * 4, ("has not overtaken", "step 8,000")),
        ([[51.0, 52.0]] * 4, ("is ahead from", "step 1,000")),
        (
            [[48.0] * 2, [49.0] * 2, [51.0] * 2, [52.0] * 2],
            ("step 2,828,", "6.67B tokens"),
        ),  # no noise: no limits
        ([[44.0, 51.0], [46.0, 53.0], [47.0, 54.0], [48.0, 55.0]], ("not located",)),
        ([[math.nan] * 2] * 4, ()),
    ],
)
def test_curves_that_do_not_clearly_cross_are_described(overtaking, masked, facts):
    said = overtaking(masked)
    assert all(fact in said for fact in facts)
    assert bool(said) == bool(facts)
