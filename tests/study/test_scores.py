"""Scores as a table: the rate is chosen without the test part, intervals are t-intervals, holes are said."""

import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from biphase.metadata import TRIAL
from biphase.records import encode
from biphase.specs.tasks import FAMILIES
from biphase.store import MANIFEST, publish, verify, write_json
from biphase.study.ledger import finetunings, read_trial
from biphase.study.scores import as_json, half_width, rows, table, with_interval

SCORES = st.floats(0, 1)


def rewrite(store, key, **scores):
    """The trial with other scores, published like any other."""
    about = read_trial(store, key)
    for part, metrics in scores.items():
        about["scores"][part] |= metrics
    store.discard(store.trials / key)
    with store.attempt("test") as folder:
        write_json(folder / TRIAL, about)
        assert publish(folder, store.trials / key)


def invent(plan, store, score, **more):
    """Publish every trial of a plan with the scores that `score(task, lr, seed, part)` gives, and what `more` says."""
    for training in finetunings(plan):
        for trial in training.trials:
            metric = FAMILIES[trial.task.family].selects["standard"]
            about = {
                "key": trial.key,
                "model": training.model,
                "task": encode(trial.task),
                "trained_on": None,
                "finetune": {"protocol": "standard"},
                "lr": training.lr,
                "seed": training.seed,
                "metric": metric,
                "scores": {
                    part: {metric: score(trial.task.name, training.lr, training.seed, part), "mcc": 0.25}
                    if trial.task.family == "SC"
                    else {metric: score(trial.task.name, training.lr, training.seed, part)}
                    for part in ("validation", "test")
                },
                "examples": {"validation": 4, "test": 4},
                "machine": {},
                "seconds": {"train": 90.0 if trial.task is training.task else 0.0, "score": 30.0},
                **more,
            }
            store.discard(store.trials / trial.key)
            with store.attempt("test") as folder:
                write_json(folder / TRIAL, about)
                publish(folder, store.trials / trial.key)


@pytest.fixture
def one_grid(study, store):
    """A plan of one result, one task, two rates and two seeds."""
    from biphase.study.plan import identities, make_plan

    run = replace(study.runs[0], keep=())
    spec = replace(study.finetune, tasks=study.finetune.tasks[:1])
    return make_plan(replace(study, runs=(run,), finetune=spec), identities(store))


# ---------------------------------------------------------------- who chooses


def chosen(plan, store):
    return {(row.result, row.task): (row.by_mean[0], row.by_seed[0]) for row in rows(plan, store)}


def test_test_scores_change_no_choice_in_a_store_of_real_leaves(plan, finished):
    before, reported = chosen(plan, finished), as_json(plan, finished)
    assert len(before) == 9
    chance = random.Random(0)
    every = [trial.key for training in finetunings(plan) for trial in training.trials]
    for key in every:
        names = read_trial(finished, key)["scores"]["test"]
        rewrite(finished, key, test={name: chance.random() for name in names})
        verify(finished.trials / key)
    assert chosen(plan, finished) == before
    assert as_json(plan, finished) != reported, "what is reported is the test part"
    for key in every:
        names = read_trial(finished, key)["scores"]["validation"]
        rewrite(finished, key, validation={name: chance.random() for name in names})
    assert chosen(plan, finished) != before, "validation scores are what chooses"


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(validation=st.lists(SCORES, min_size=4, max_size=4), test=st.lists(SCORES, min_size=8, max_size=8))
def test_whatever_the_test_scores_are_the_choice_is_the_same(one_grid, store, validation, test):
    cells = {cell: place for place, cell in enumerate((lr, s) for lr in (1e-3, 4e-3) for s in (0, 1))}
    found = []
    for some in (test[:4], test[4:]):
        invent(
            one_grid,
            store,
            lambda task, lr, seed, part, some=some: (some if part == "test" else validation)[cells[lr, seed]],
        )
        (row,) = rows(one_grid, store)
        found.append((row.by_mean[0], row.by_seed[0]))
        assert row.by_mean[1] == [some[cells[row.by_mean[0], seed]] for seed in (0, 1)]
        assert row.by_seed[1] == [some[cells[row.by_seed[0][seed], seed]] for seed in (0, 1)]
    assert found[0] == found[1]


def test_all_metrics_are_given_at_the_rate_that_the_mean_chose(plan, finished):
    for row in rows(plan, finished):
        lr, scores = row.by_mean
        assert row.metrics[row.metric] == scores
        trials = [
            read_trial(finished, trial.key)
            for training in finetunings(plan, {plan.results[row.result]})
            for trial in training.trials
            if trial.task.name == row.task and training.lr == lr
        ]
        for name, values in row.metrics.items():
            assert values == [trial["scores"]["test"][name] for trial in trials]
    names = {row.task: set(row.metrics) for row in rows(plan, finished)}
    assert names["toys"] == {"accuracy", "macro_f1", "mcc"}
    assert {"ndcg@10", "paper_ndcg@10"} < names["facts"]


# ---------------------------------------------------------------- intervals


@given(st.lists(SCORES, min_size=2, max_size=9))
def test_half_an_interval_is_that_of_scipys_t(values):
    mean, error = sum(values) / len(values), stats.sem(values)
    if max(values) - min(values) < 1e-9:
        assert not half_width(values), "equal values have no interval"
        return
    low, high = stats.t.interval(0.95, len(values) - 1, loc=mean, scale=error)
    assert half_width(values) == pytest.approx((high - low) / 2, rel=1e-6, abs=1e-12)


def test_five_seeds_are_weighed_by_the_known_quantile():
    # The mean of 1 … 5 has a standard error of √(2.5 / 5), and t(0.975, 4) is 2.7764.
    assert half_width([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2.7764451 * math.sqrt(0.5))


def test_a_mean_without_an_interval_says_why():
    assert half_width([0.5]) is None
    assert with_interval([0.84891]) == "84.89 (one seed: no interval)"
    assert with_interval([0.5, 0.5]) == "50.00 (all seeds alike: no interval)"
    assert with_interval([0.84, 0.86]) == "85.00 ± 12.71"
    assert with_interval([0.90, 0.94]) == "92.00 [66.59, 100.00]", "no score is above 100"
    assert with_interval([0.01, 0.05]) == "3.00 [0.00, 28.41]"


@pytest.mark.parametrize("seeds", [2, 5])
def test_an_interval_over_seeds_covers_the_mean_as_often_as_it_says(seeds):
    chance = random.Random(seeds)
    hits = 0
    for _ in range(1_000):
        values = [chance.gauss(0.7, 0.02) for _ in range(seeds)]
        hits += abs(sum(values) / seeds - 0.7) <= half_width(values)
    assert 0.93 < hits / 1_000 < 0.97


# ---------------------------------------------------------------- the table


def test_a_finished_table_reads_as_written_here(one_grid, store):
    validation = {(1e-3, 0): 0.6, (1e-3, 1): 0.2, (4e-3, 0): 0.5, (4e-3, 1): 0.9}
    test = {(1e-3, 0): 0.5, (1e-3, 1): 0.9, (4e-3, 0): 0.7, (4e-3, 1): 0.8}
    invent(one_grid, store, lambda task, lr, seed, part: (test if part == "test" else validation)[lr, seed])
    assert table(one_grid, store) == [
        "  test score, %  task  metric    mean ± 95%             lr     with an lr per seed   time   other metrics",
        "  clm            toys  accuracy  75.00 [11.47, 100.00]  0.004  65.00 [0.00, 100.00]  8 min  mcc 25.00",
        "  Learning rates are chosen on validation scores; intervals are over 2 fine-tuning seeds.",
        "",
    ]
    (told,) = as_json(one_grid, store)
    assert (told["result"], told["task"], told["metric"]) == ("clm", "toys", "accuracy")
    assert (told["done"], told["of"], told["seconds"]) == (4, 4, 480.0)
    assert (told["lr"], told["test"]) == (4e-3, [0.7, 0.8])
    assert told["half_width"] == pytest.approx(0.6353, abs=1e-4)
    assert (told["lr_by_seed"], told["test_by_seed"]) == ({"0": 1e-3, "1": 4e-3}, [0.5, 0.8])
    assert told["half_width_by_seed"] == pytest.approx(1.9059, abs=1e-4)
    assert told["metrics"] == {"accuracy": [0.7, 0.8], "mcc": [0.25, 0.25]}
    json.dumps(told, allow_nan=False)


def test_a_grid_with_a_hole_says_how_far_it_is_and_gives_no_score(one_grid, store):
    invent(one_grid, store, lambda task, lr, seed, part: 0.75)
    first = next(finetunings(one_grid)).trials[0]
    (store.trials / first.key / MANIFEST).unlink()  # as if a copy of the store had been broken off
    assert table(one_grid, store)[1].split() == ["clm", "toys", "accuracy", "3/4", "done", "6", "min"]
    (told,) = as_json(one_grid, store)
    assert (told["done"], told["of"]) == (3, 4)
    assert not any(
        told[name]
        for name in ("lr", "test", "half_width", "lr_by_seed", "test_by_seed", "metrics", "constant")
    )
    assert "not done" in told["no_interval"]


TRIVIAL = {
    "trivial": {"accuracy": {"what": "majority class: beast", "validation": 0.5, "test": 0.625}},
    "tf-idf": {
        "accuracy": {"what": "TF-IDF", "validation": 0.7, "test": 0.75},
        "mcc": {"what": "TF-IDF", "validation": 0.0, "test": 0.1},
    },
}


def test_every_baseline_stands_beside_the_score(one_grid, store):
    invent(one_grid, store, lambda task, lr, seed, part: 0.75, baselines=TRIVIAL)
    head, row, *_ = table(one_grid, store)
    at = head.index("baseline")
    assert row[at:].startswith("62.50 majority class: beast, 75.00 TF-IDF")
    (told,) = as_json(one_grid, store)
    assert told["baselines"] == TRIVIAL


def test_trials_with_other_metrics_than_their_neighbours_share_a_row(one_grid, store):
    invent(one_grid, store, lambda task, lr, seed, part: 0.75)
    key = [one.trials[0].key for one in finetunings(one_grid)][-1]
    about = read_trial(store, key)
    del about["scores"]["test"]["mcc"]
    store.discard(store.trials / key)
    with store.attempt("test") as folder:
        write_json(folder / TRIAL, about)
        publish(folder, store.trials / key)
    (told,) = as_json(one_grid, store)
    assert told["metrics"] == {"accuracy": [0.75, 0.75]}
    assert "mcc" not in "".join(table(one_grid, store))


def test_trials_of_earlier_versions_show_no_baseline_and_no_flag(one_grid, store):
    invent(one_grid, store, lambda task, lr, seed, part: 0.75)
    lines = table(one_grid, store)
    assert "baseline" not in lines[0]
    assert "!" not in "".join(lines)
    (told,) = as_json(one_grid, store)
    assert told["baselines"] is None
    assert told["constant"] == ["", ""]


def test_constant_predictions_are_flagged_beside_their_score(one_grid, store):
    invent(
        one_grid,
        store,
        lambda task, lr, seed, part: 0.6649,
        constant={"validation": "", "test": "beast"},
        baselines=TRIVIAL,
    )
    _, row, *notes = table(one_grid, store)
    assert "66.49 (all seeds alike: no interval) !" in row
    (note,) = (line for line in notes if "!" in line)
    assert all(word in note for word in ("clm", "toys", "beast", "2 of 2 seeds"))
    (told,) = as_json(one_grid, store)
    assert told["constant"] == told["constant_by_seed"] == ["beast", "beast"]
    assert told["no_interval"] == "all seeds alike: no interval"
    first = next(finetunings(one_grid)).trials[0].key
    about = read_trial(store, first) | {"constant": {"validation": "beast", "test": ""}}
    store.discard(store.trials / first)
    with store.attempt("test") as folder:
        write_json(folder / TRIAL, about)
        publish(folder, store.trials / first)
    assert any("1 of 2 seeds" in line for line in table(one_grid, store)), "one seed is enough"


def test_tasks_not_begun_stand_in_the_table_once_any_leaf_is_there(plan, finished):
    every = [trial for training in finetunings(plan) for trial in training.trials]
    for trial in every[1:]:
        finished.discard(finished.trials / trial.key)
    lines = table(plan, finished)
    assert len(lines) == 1 + 9 + 1 + 1
    assert "1/4 done" in lines[1]
    assert all("0/4 done" in line for line in lines[2:10])
    finished.discard(finished.trials / every[0].key)
    assert table(plan, finished) == []


def test_one_seed_has_no_interval_and_the_table_says_so(one_grid, store):
    from biphase.study.plan import identities, make_plan

    single = make_plan(
        replace(one_grid.study, finetune=replace(one_grid.study.finetune, seeds=(1,))), identities(store)
    )
    invent(single, store, lambda task, lr, seed, part: 0.75)
    assert table(single, store) == [
        "  test score, %  task  metric    mean ± 95%                     lr     with an lr per seed            time   other metrics",
        "  clm            toys  accuracy  75.00 (one seed: no interval)  0.001  75.00 (one seed: no interval)  4 min  mcc 25.00",
        "  Learning rates are chosen on validation scores; one seed has no interval.",
        "",
    ]
    (told,) = as_json(single, store)
    assert (told["half_width"], told["half_width_by_seed"]) == (None, None)
    assert told["no_interval"] == "one seed: no interval"


def test_a_study_without_fine_tuning_has_no_rows(one_grid, store):
    bare = replace(one_grid, study=replace(one_grid.study, finetune=None))
    assert rows(bare, store) == []
    assert table(bare, store) == []


def test_the_time_of_a_shared_training_is_counted_once(plan, finished):
    spent = sum(row.seconds for row in rows(plan, finished))
    trials = [read_trial(finished, trial.key) for one in finetunings(plan) for trial in one.trials]
    trained = sum(
        {
            trial["training"]: max(trial["seconds"]["train"], 0)
            for trial in trials
            if not trial["trained_on"]
        }.values()
    )
    assert spent == pytest.approx(trained + sum(trial["seconds"]["score"] for trial in trials))
    assert all(trial["seconds"]["train"] == 0 for trial in trials if trial["trained_on"])
    assert all(trial["seconds"]["train"] > 0 for trial in trials if not trial["trained_on"])
