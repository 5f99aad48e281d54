"""Fine-tunings and trials of a plan, selection of learning rates by validation, and the table of scores."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from biphase import (
    CATALOG,
    CLM,
    SIZES,
    TASKS,
    WSD,
    Fewer,
    Finetune,
    Pretrain,
    Rows,
    Stage,
    Study,
)
from biphase.errors import SpecError
from biphase.keys import Identities
from biphase.leases import Leases
from biphase.metadata import TRIAL
from biphase.records import encode
from biphase.specs.tasks import FAMILIES
from biphase.store import Store, publish, write_json
from biphase.study import ledger
from biphase.study.describe import score_table
from biphase.study.ledger import (
    Choice,
    choose,
    finetunings,
    half_width,
    read_trial,
    score_rows,
    scores_json,
    survey_trials,
    with_interval,
)
from biphase.study.plan import identities, make_plan

OUTSIDE = Identities(data=lambda corpus: "data", hub=lambda hub: hub.source)
RUN = Pretrain(
    "run",
    SIZES["1m"],
    "builtin",
    (Stage(CLM(), 10),),
    WSD(1e-3, warmup=0, decay=2),
    keep=(4,),
    batch_tokens=128,
    packing=Rows(64),
)


def planned(finetune, *runs, outside=OUTSIDE):
    return make_plan(Study("s", runs or (RUN,), finetune), outside)


def cells(plan):
    """Every trial by what it is, with its key."""
    return {
        (one.model, one.task.name, trial.task.name, one.lr, one.seed): trial.key
        for one in finetunings(plan)
        for trial in one.trials
    }


# ---------------------------------------------------------------- which there are


def test_every_result_times_task_times_rate_times_seed_is_a_trial_and_borrowers_train_nothing():
    plan = planned(Finetune(TASKS))
    every = list(finetunings(plan))
    assert len(every) == len({one.key for one in every}) == 2 * 300
    assert len(cells(plan)) == len(set(cells(plan).values())) == 2 * 360
    assert {one.task.name for one in every} == {task.name for task in TASKS} - {"nq", "mldr_en"}
    shared = [one for one in every if one.task.name == "msmarco"]
    assert {tuple(trial.task.name for trial in one.trials) for one in shared} == {
        ("msmarco", "nq", "mldr_en")
    }
    assert all(len(one.trials) == 1 for one in every if one not in shared)


def test_steps_on_the_way_may_get_a_part_of_the_grid_and_keep_their_keys():
    whole = Finetune((*TASKS[:2], CATALOG["squad"]), lrs=(1e-4, 1e-5), seeds=(0, 1, 2))
    part = replace(whole, on_the_way=Fewer(("squad", "sst2"), lrs=(1e-4,), seeds=(1, 2)))
    every, fewer = cells(planned(whole)), cells(planned(part))
    way, end = planned(part).results["run-4"], planned(part).results["run"]
    assert {what[1:] for what in fewer if what[0] == way} == {
        (task, task, 1e-4, seed) for task in ("sst2", "squad") for seed in (1, 2)
    }
    assert {what for what in fewer if what[0] == end} == {what for what in every if what[0] == end}
    assert fewer.items() <= every.items()
    grids = planned(part).tuned.values()
    assert (
        sum(each.finetunings for each in grids) == sum(each.scores for each in grids) == 4 + 18 == len(fewer)
    )


@pytest.mark.parametrize(
    ("fewer", "facts"),
    [
        (Fewer(("sts2",), (1e-4,), (0,)), "'sts2'.*tasks.*nq, msmarco"),
        (Fewer(("msmarco",), (3e-4,), (0,)), "0.0003.*lrs"),
        (Fewer(("msmarco",), (1e-4,), (7,)), "7.*seeds"),
        (Fewer((), (1e-4,), (0,)), "tasks.*empty"),
        (Fewer(("msmarco",), (1e-4, 1e-4), (0,)), "lrs.*distinct"),
        (Fewer(("nq",), (1e-4,), (0,)), "'nq'.*'msmarco'"),
    ],
)
def test_a_part_that_is_none_of_the_grid_is_refused(fewer, facts):
    with pytest.raises(SpecError, match=facts):
        Finetune((CATALOG["nq"], CATALOG["msmarco"]), lrs=(1e-4,), seeds=(0,), on_the_way=fewer)


# ---------------------------------------------------------------- what they are called


@st.composite
def finetunes(draw):
    names = draw(st.lists(st.sampled_from(sorted(CATALOG)), min_size=1, max_size=6, unique=True))
    tasks = dict.fromkeys(one for name in names for one in (CATALOG[name].trained_on or name, name))
    return Finetune(
        tuple(CATALOG[name] for name in tasks),
        lrs=tuple(draw(st.lists(st.floats(1e-6, 0.1), min_size=1, max_size=3, unique=True))),
        seeds=tuple(draw(st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True))),
        protocol=draw(st.sampled_from(["paper", "standard"])),
        length=draw(st.sampled_from([0, 128])),
    )


@settings(max_examples=40, deadline=None)
@given(finetunes(), st.data())
def test_what_is_added_to_a_grid_changes_no_key_of_a_trial(grid, data):
    before = cells(planned(grid))
    known = {task.name for task in grid.tasks}
    more = [task for task in CATALOG.values() if task.name not in known and not task.trained_on]
    added = data.draw(st.sampled_from(more))
    place = data.draw(st.integers(0, len(grid.tasks)))
    tasks = (*grid.tasks[:place], added, *grid.tasks[place:])
    larger = replace(
        grid,
        tasks=tasks,
        lrs=(*grid.lrs[::-1], data.draw(st.floats(0.2, 0.9))),
        seeds=(data.draw(st.integers(100, 199)), *grid.seeds),
    )
    after = cells(planned(larger, RUN, replace(RUN, name="another", seed=1, keep=())))
    assert before.items() <= after.items()
    assert len(after) > len(before)


def test_one_dataset_under_two_names_is_refused_unless_two_models_are_scored_on_it(grid, tmp_path):
    known = replace(OUTSIDE, task=identities(Store(tmp_path / "store")).task)
    toys, facts, plain = grid.tasks
    with pytest.raises(SpecError, match=r"'toys'.*'twin'.*out one") as refused:
        planned(replace(grid, tasks=(toys, facts, replace(toys, name="twin"))), outside=known)
    assert "\n" not in str(refused.value)
    longer = replace(facts, name="facts-longer", steps=4)
    both = replace(
        grid, tasks=(facts, longer, plain, replace(plain, name="second", trained_on="facts-longer"))
    )
    assert len(set(cells(planned(both, outside=known)).values())) == 2 * 4 * 4


# ---------------------------------------------------------------- what the store knows


def test_a_survey_tells_who_computes_what_failed_and_how_long_it_may_take(plan, finished):
    every = list(finetunings(plan))
    for one in every[:3]:
        for trial in one.trials:
            finished.discard(finished.trials / trial.key)
    ledger.note_failure(plan, finished, every[0].key, RuntimeError("no\nluck"))
    ledger.note_failure(plan, finished, every[5].key, RuntimeError("long ago"))
    held = Leases(finished.leases).take(every[1].key)
    assert held
    with held:
        seen = survey_trials(plan, finished)
    assert (seen.done, seen.of) == (21, 24)
    assert {key: error for key, (_, error) in seen.failed.items()} == {every[0].key: "RuntimeError: no luck"}
    assert list(seen.running) == [every[1].key]
    training, holder = seen.running[every[1].key]
    assert training == every[1]
    assert holder.alive


# ---------------------------------------------------------------- selection by validation


RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4)
# Few values, so that equals are common; and any at all.
CELL_SCORES = st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.5, 1.0]) | st.floats(0, 1)


@st.composite
def grids(draw):
    rates = draw(st.lists(st.sampled_from(RATES), min_size=1, unique=True))
    seeds = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
    return {(lr, seed): draw(CELL_SCORES) for lr in rates for seed in seeds}


def best(scored):
    """The plain way: the lowest rate that nothing beats."""
    highest = max(scored.values())
    return min(lr for lr, score in scored.items() if score == highest)


@given(grids())
def test_the_choice_is_what_looking_at_every_cell_gives(grid):
    rates, seeds = {lr for lr, _ in grid}, {seed for _, seed in grid}
    means = {lr: math.fsum(grid[lr, seed] for seed in seeds) / len(seeds) for lr in rates}
    by_seed = {seed: best({lr: grid[lr, seed] for lr in rates}) for seed in seeds}
    assert choose(grid) == Choice(best(means), by_seed)


def test_equal_means_are_equal_however_their_sums_are_rounded():
    assert sum((0.3, 0.2, 0.1)) != sum((0.1, 0.2, 0.3))  # so it is: the second is larger by a rounding
    scores = {1e-5: (0.3, 0.2, 0.1), 1e-4: (0.1, 0.2, 0.3)}
    grid = {(lr, seed): score for lr, some in scores.items() for seed, score in enumerate(some)}
    assert choose(grid).by_mean == 1e-5


@given(
    grids().filter(lambda grid: len({lr for lr, _ in grid}) > 1 and len({s for _, s in grid}) > 1), st.data()
)
def test_a_grid_with_a_hole_is_not_chosen_from(grid, data):
    del grid[data.draw(st.sampled_from(sorted(grid)))]
    assert choose(grid) is None


# ---------------------------------------------------------------- scores


SCORES = st.floats(0, 1)


def rows(plan, store):
    return score_rows(plan, survey_trials(plan, store).trials)


def republish(store, key, about):
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
                    for part in ("validation", "test")
                },
                "examples": {"validation": 4, "test": 4},
                "machine": {},
                "seconds": {"train": 90.0 if trial.task is training.task else 0.0, "score": 30.0},
            }
            republish(store, trial.key, about | more)


@pytest.fixture
def one_grid(study, store):
    """A plan of one result, one task, two rates and two seeds."""
    run = replace(study.runs[0], keep=())
    spec = replace(study.finetune, tasks=study.finetune.tasks[:1])
    return make_plan(replace(study, runs=(run,), finetune=spec), identities(store))


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
        found.append((row.by_mean.lr, row.by_seed.lr))
        assert row.by_mean.test == [some[cells[row.by_mean.lr, seed]] for seed in (0, 1)]
        assert row.by_seed.test == [some[cells[row.by_seed.lr[seed], seed]] for seed in (0, 1)]
    assert found[0] == found[1]


# ---------------------------------------------------------------- intervals


@given(st.lists(SCORES, min_size=2, max_size=9))
def test_half_an_interval_is_that_of_scipys_t(values):
    mean, error = sum(values) / len(values), stats.sem(values)
    if max(values) - min(values) < 1e-9:
        assert not half_width(values), "equal values have no interval"
        return
    low, high = stats.t.interval(0.95, len(values) - 1, loc=mean, scale=error)
    assert half_width(values) == pytest.approx((high - low) / 2, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("scores", "text"),
    [
        ([0.84891], "84.89 (one seed: no interval)"),
        ([0.5, 0.5], "50.00 (all seeds alike: no interval)"),
        ([0.84, 0.86], "85.00 ± 12.71"),
        ([0.90, 0.94], "92.00 [66.59, 100.00]"),  # no score is above 100
        ([0.01, 0.05], "3.00 [0.00, 28.41]"),
    ],
)
def test_a_mean_without_an_interval_says_why(scores, text):
    assert with_interval(scores) == text


# ---------------------------------------------------------------- the table


def test_a_finished_table_and_its_json_agree(one_grid, store):
    validation = {(1e-3, 0): 0.6, (1e-3, 1): 0.2, (4e-3, 0): 0.5, (4e-3, 1): 0.9}
    test = {(1e-3, 0): 0.5, (1e-3, 1): 0.9, (4e-3, 0): 0.7, (4e-3, 1): 0.8}
    invent(one_grid, store, lambda task, lr, seed, part: (test if part == "test" else validation)[lr, seed])
    head, row, *_ = score_table(one_grid, survey_trials(one_grid, store))
    assert "baseline" not in head, "trials of earlier versions have none"
    facts = ("clm", "toys", "accuracy", "75.00 [11.47, 100.00]", "0.004", "65.00 [0.00, 100.00]", "8 min")
    assert all(fact in row for fact in facts)
    (told,) = scores_json(rows(one_grid, store))
    assert (told["result"], told["task"], told["metric"]) == ("clm", "toys", "accuracy")
    assert (told["done"], told["of"], told["seconds"]) == (4, 4, 480.0)
    assert (told["lr"], told["test"]) == (4e-3, [0.7, 0.8])
    assert told["half_width"] == pytest.approx(0.6353, abs=1e-4)
    assert (told["lr_by_seed"], told["test_by_seed"]) == ({"0": 1e-3, "1": 4e-3}, [0.5, 0.8])
    assert told["half_width_by_seed"] == pytest.approx(1.9059, abs=1e-4)
    assert told["metrics"] == {"accuracy": [0.7, 0.8], "mcc": [0.25, 0.25]}
    assert (told["baselines"], told["constant"]) == (None, ["", ""])
    json.dumps(told, allow_nan=False)
    key = [tuning.trials[0].key for tuning in finetunings(one_grid)][-1]
    about = read_trial(store, key)
    del about["scores"]["test"]["mcc"]
    republish(store, key, about)
    assert scores_json(rows(one_grid, store))[0]["metrics"] == {"accuracy": [0.7, 0.8]}, (
        "one lacks the other metric"
    )
    one_seed = replace(one_grid.study.finetune, seeds=(1,))
    single = make_plan(replace(one_grid.study, finetune=one_seed), identities(store))
    (told,) = scores_json(rows(single, store))
    assert (told["half_width"], told["half_width_by_seed"]) == (None, None)
    assert "one seed" in told["no_interval"]


TRIVIAL = {
    "trivial": {"accuracy": {"what": "majority class: beast", "validation": 0.5, "test": 0.625}},
    "tf-idf": {
        "accuracy": {"what": "TF-IDF", "validation": 0.7, "test": 0.75},
        "mcc": {"what": "TF-IDF", "validation": 0.0, "test": 0.1},
    },
}


def test_baselines_and_constant_predictions_stand_beside_the_score(one_grid, store):
    said = {"constant": {"validation": "", "test": "beast"}, "baselines": TRIVIAL}
    invent(one_grid, store, lambda task, lr, seed, part: 0.6649, **said)
    head, row, *notes = score_table(one_grid, survey_trials(one_grid, store))
    assert row[head.index("baseline") :].startswith("62.50 majority class: beast, 75.00 TF-IDF")
    assert "66.49 (all seeds alike: no interval) !" in row
    (note,) = (line for line in notes if "!" in line)
    assert all(word in note for word in ("clm", "toys", "beast", "2 of 2"))
    (told,) = scores_json(rows(one_grid, store))
    assert told["constant"] == told["constant_by_seed"] == ["beast", "beast"]
    assert told["baselines"] == TRIVIAL
    first = next(finetunings(one_grid)).trials[0].key
    republish(store, first, read_trial(store, first) | {"constant": {"validation": "beast", "test": ""}})
    assert any("1 of 2" in line for line in score_table(one_grid, survey_trials(one_grid, store))), (
        "one seed is enough"
    )
