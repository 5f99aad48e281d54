"""Quantities worked by hand: what they are of every seed, how noisy they will be, and what they were in the paper."""

import math
from dataclasses import replace

import numpy as np
import pytest

from biphase import CATALOG, CLM, MLM, SIZES, Finetune, Pretrain, Stage, Study
from biphase.report.contrasts import (
    Best,
    Largest,
    ScoreQuantity,
    ScoreView,
    Spread,
    SpreadOfRates,
    Sum,
    comparable_models,
    gap,
    mean,
    rows_in_common,
    score,
    slope,
)

K = 1_000
RATES = (1e-5, 1e-4, 1e-3)


def run(name, objective, steps=42 * K, **fields):
    return Pretrain(
        name,
        start=SIZES["610m"],
        corpus="fineweb-edu",
        stages=Stage(objective, steps),
        **fields,
    )


RUNS = (run("clm", CLM()), run("mlm40", MLM(0.4)), run("mlm20", MLM(0.2)))
TASKS = tuple(CATALOG[one] for one in ("sst2", "mnli", "conll2003"))
STUDY = Study("s", RUNS, Finetune(TASKS, lrs=RATES, seeds=(0, 1)))


@pytest.fixture
def draw():
    return np.random.default_rng(3)


@pytest.fixture
def case(plan_of, evidence_of):
    """(bench, evidence) of a study with these test scores: (result, task) → (rates, seeds), in percent."""

    def made(scores, validation=None, study=STUDY):
        plan = plan_of(study)
        evidence = evidence_of(
            plan,
            lambda model, task, shape: scores[model.name, task.name],
            None if validation is None else lambda model, task, shape: validation[model.name, task.name],
        )
        return comparable_models(plan, evidence.models), evidence

    return made


@pytest.fixture
def any_case(case, draw):
    scores = {(one.name, task.name): draw.normal(80, 2, (len(RATES), 2)) for one in RUNS for task in TASKS}
    over, evidence = case(scores)
    return over, evidence, scores


def read(evidence, quantity):
    return quantity.measure(ScoreView(evidence, None, rows_in_common(list(quantity.models))))


def best(scores):
    return scores.max(axis=0)  # validation scores are the test scores here


def test_a_score_is_the_mean_of_its_tasks_at_the_rates_that_validation_chose(any_case):
    over, evidence, scores = any_case
    expected = (best(scores["clm", "sst2"]) + best(scores["clm", "mnli"])) / 2
    assert read(evidence, score(over, over.models["clm"], "SC")) == pytest.approx(expected[None])
    assert read(evidence, score(over, over.models["clm"], "mnli")) == pytest.approx(
        best(scores["clm", "mnli"])[None]
    )


def test_sums_subtract_and_weigh_seed_by_seed(any_case):
    over, evidence, scores = any_case
    clm, mlm = over.models["clm"], over.models["mlm40"]
    tagged = best(scores["mlm40", "conll2003"]) - best(scores["clm", "conll2003"])
    assert read(evidence, gap(over, mlm, clm, "TC")) == pytest.approx(tagged[None])
    assert read(evidence, 0.1 * gap(over, mlm, clm, "TC")) == pytest.approx(0.1 * tagged[None])
    both = gap(over, mlm, clm, "TC") + gap(over, clm, mlm, "TC")
    assert read(evidence, both) == pytest.approx(np.zeros((1, 2)))


def test_a_mean_and_a_slope_over_models(any_case):
    over, evidence, scores = any_case
    tagged = {name: best(scores[name, "conll2003"]) for name in over.models}
    several = [score(over, over.models[name], "TC") for name in tagged]
    assert read(evidence, mean(several)) == pytest.approx(np.mean(list(tagged.values()), axis=0)[None])
    xs = [1.0, 2.5, 3.0]
    expected = [np.polyfit(xs, [tagged[name][seed] for name in tagged], 1)[0] for seed in (0, 1)]
    assert read(evidence, slope(zip(xs, several, strict=True))) == pytest.approx(np.array([expected]))


def test_the_spread_of_rates_is_best_minus_worst_of_each_seed_mean_over_tasks(any_case):
    over, evidence, scores = any_case
    spreads = [np.ptp(scores["mlm40", task.name], axis=0) for task in TASKS]
    quantity = SpreadOfRates(over.models["mlm40"], tuple(over.tasks))
    assert read(evidence, quantity) == pytest.approx(np.mean(spreads, axis=0)[None])


def test_the_spread_over_models_is_taken_seed_by_seed(any_case):
    over, evidence, scores = any_case
    among = tuple(score(over, one, "TC") for one in over.models.values())
    tagged = np.stack([best(scores[name, "conll2003"]) for name in over.models])
    assert read(evidence, Spread(among)) == pytest.approx(np.ptp(tagged, axis=0)[None])
    assert read(evidence, Largest(among)) == pytest.approx(tagged.max(axis=0)[None])


def test_the_best_is_chosen_on_validation_and_scored_on_test(case):
    names = ("clm", "mlm40", "mlm20")
    test = {(name, task.name): np.full((3, 2), at) for at, name in enumerate(names) for task in TASKS}
    validation = {
        (name, task.name): np.full((3, 2), 10.0 - at) for at, name in enumerate(names) for task in TASKS
    }
    over, evidence = case(test, validation)
    quantity = Best(tuple(over.models.values()), ("conll2003",), "TC")
    reading = ScoreView(evidence, None, rows_in_common(list(quantity.models)))
    assert quantity.chosen(reading).name == "clm"
    assert read(evidence, quantity) == pytest.approx(np.zeros((1, 2)))


def test_the_best_is_chosen_on_seeds_that_all_have(case):
    scores = {
        (name, task.name): np.full((3, 2), 50.0) for name in ("clm", "mlm40", "mlm20") for task in TASKS
    }
    validation = {key: value.copy() for key, value in scores.items()}
    validation["clm", "conll2003"] = np.array([[60.0, math.nan]] * 3)  # a good seed, and one that is missing
    validation["mlm40", "conll2003"] = np.array([[55.0, 99.0]] * 3)
    over, evidence = case(scores, validation)
    quantity = Best((over.models["clm"], over.models["mlm40"]), ("conll2003",))
    assert quantity.chosen(ScoreView(evidence, None, rows_in_common(list(quantity.models)))).name == "clm"


def test_what_is_missing_on_either_side_is_missing(case):
    scores = {
        (name, task.name): np.full((3, 2), 50.0) for name in ("clm", "mlm40", "mlm20") for task in TASKS
    }
    scores["clm", "mnli"] = np.array([[50.0, 50.0], [50.0, math.nan], [50.0, 50.0]])
    over, evidence = case(scores)
    clm, mlm = over.models["clm"], over.models["mlm40"]
    assert np.isnan(read(evidence, gap(over, mlm, clm, "SC"))).tolist() == [[False, True]]
    assert np.isnan(read(evidence, SpreadOfRates(clm, ("sst2", "mnli")))).tolist() == [[False, True]]
    assert np.isnan(read(evidence, Spread((score(over, clm, "SC"), score(over, mlm, "SC"))))).tolist() == [
        [False, True]
    ]


def test_pretraining_seeds_are_paired_by_seed(plan_of, evidence_of):
    runs = [replace(one, name=f"{one.name}-{seed}", seed=seed) for one in RUNS[:2] for seed in (1, 2)]
    runs += [replace(RUNS[0], name="clm-0", seed=0)]
    plan = plan_of(replace(STUDY, runs=tuple(runs)))
    evidence = evidence_of(plan, lambda model, task, shape: np.zeros(shape))
    for result, level in {"clm-0": 9, "clm-1": 1, "clm-2": 2, "mlm40-1": 11, "mlm40-2": 22}.items():
        evidence.grids[result, "conll2003"].test["sentence_f1"][:] = level / 100
    over = comparable_models(plan, evidence.models)
    clm, mlm = (
        next(one for one in over.models.values() if one.recipe.kind == kind) for kind in ("clm", "mlm")
    )
    assert read(evidence, gap(over, mlm, clm, "TC")) == pytest.approx(np.array([[10.0] * 2, [20.0] * 2]))


# ---------------------------------------------------------------- noise to come


def test_variances_add_up_as_the_noise_of_independent_scores_does(any_case, draw):
    """Against scores drawn anew: what `variance` predicts is what the seeds then show."""
    over, _, _ = any_case
    noise = {"sst2": 0.3, "mnli": 0.5, "conll2003": 0.2}
    clm, mlm = over.models["clm"], over.models["mlm40"]
    quantities = [
        score(over, clm, "SC"),
        gap(over, mlm, clm, "SC"),
        0.1 * gap(over, mlm, clm, "SC") - gap(over, mlm, clm, "TC"),
        slope((x, score(over, one, "TC")) for x, one in enumerate(over.models.values())),
    ]
    draws = 20_000
    scores = {
        (model, task): draw.normal(0, noise[task], draws) for model in over.models.values() for task in noise
    }

    def value(quantity):
        if isinstance(quantity, ScoreQuantity):
            return np.mean([scores[quantity.model, task] for task in quantity.on], axis=0)
        assert isinstance(quantity, Sum)
        return sum(weight * value(one) for weight, one in quantity.terms)

    for quantity in quantities:
        assert math.sqrt(quantity.variance(noise.__getitem__)) == pytest.approx(
            np.std(value(quantity)), rel=0.03
        )


def test_a_spread_is_taken_to_be_as_noisy_as_a_difference_of_two(any_case):
    over, _, _ = any_case
    one = score(over, over.models["clm"], "SC")
    single = one.variance(lambda task: 0.3)
    assert single == pytest.approx(0.3**2 / 2)
    assert Spread((one, one)).variance(lambda task: 0.3) == pytest.approx(2 * single)
    assert SpreadOfRates(over.models["clm"], ("sst2", "mnli")).variance(lambda task: 0.3) == pytest.approx(
        2 * single
    )
    assert Largest((one, one)).variance(lambda task: 0.3) == pytest.approx(single)
    assert Best((over.models["clm"],), ("sst2", "mnli")).variance(lambda task: 0.3) == pytest.approx(single)


# ---------------------------------------------------------------- the paper


def test_the_paper_is_asked_for_families_in_its_own_metric(any_case):
    over, _, _ = any_case
    clm, mlm = over.models["clm"], over.models["mlm40"]
    assert score(over, clm, "SC").in_paper() == 83.58
    assert score(over, clm, "sst2").in_paper() is None
    assert score(over, clm, "TC", "entity_f1").in_paper() is None
    assert gap(over, mlm, clm, "SC").in_paper() == pytest.approx(3.42)
    assert (gap(over, mlm, clm, "SC") - score(over, clm, "sst2")).in_paper() is None
    assert Largest((gap(over, mlm, clm, "SC"), gap(over, mlm, clm, "TC"))).in_paper() == pytest.approx(3.42)
