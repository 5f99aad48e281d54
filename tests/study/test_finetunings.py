"""The leaves of a plan: which there are, what they are called, and what the store knows of them."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from biphase import (
    CATALOG,
    CLM,
    SIZES,
    TASKS,
    WSD,
    Fewer,
    Finetune,
    Hub,
    Pretrain,
    Rows,
    Splits,
    Stage,
    Study,
)
from biphase.errors import SpecError
from biphase.keys import Identities
from biphase.leases import Leases
from biphase.metadata import TRIAL
from biphase.specs import AdamW
from biphase.store import Store
from biphase.study import describe, ledger
from biphase.study.ledger import Count, count, finetunings, read_trial, survey_trials
from biphase.study.plan import identities, make_plan

OUTSIDE = Identities(data=lambda run: "data", hub=lambda hub: hub.source)
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


def test_every_result_task_rate_and_seed_is_a_trial_and_borrowers_train_nothing():
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


def test_a_grid_is_one_model_and_one_task_and_they_come_in_the_order_of_the_models():
    plan = planned(Finetune(TASKS[:2], lrs=(1e-4, 1e-5), seeds=(3, 1)))
    every = list(finetunings(plan))
    assert [one.model for one in every] == [plan.results["run-4"]] * 8 + [plan.results["run"]] * 8
    assert [one.task.name for one in every[:8]] == ["sst2"] * 4 + ["mnli"] * 4
    assert [(one.lr, one.seed) for one in every[:4]] == [(1e-4, 3), (1e-4, 1), (1e-5, 3), (1e-5, 1)]


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
    assert describe.trials_line(planned(part)) == (4 + 18, 4 + 18) == (len(fewer),) * 2


@pytest.mark.parametrize(
    ("fewer", "words"),
    [
        (Fewer(("sts2",), (1e-4,), (0,)), "'sts2'.*grid's tasks;"),
        (Fewer(("msmarco",), (3e-4,), (0,)), "0.0003.*grid's lrs"),
        (Fewer(("msmarco",), (1e-4,), (7,)), "7.*grid's seeds"),
        (Fewer((), (1e-4,), (0,)), "tasks must"),
        (Fewer(("msmarco",), (1e-4, 1e-4), (0,)), "be distinct"),
        (Fewer(("nq",), (1e-4,), (0,)), "'nq'.*scored.*'msmarco';.*name"),
    ],
)
def test_a_part_that_is_none_of_the_grid_is_refused(fewer, words):
    with pytest.raises(SpecError, match=words):
        Finetune((CATALOG["nq"], CATALOG["msmarco"]), lrs=(1e-4,), seeds=(0,), on_the_way=fewer)


def test_a_lender_need_not_stand_before_its_borrower():
    asked = Finetune((CATALOG["nq"], CATALOG["msmarco"]), lrs=(1e-4,), seeds=(0,))
    (one, _) = finetunings(planned(asked))
    assert one.task is asked.tasks[1]
    assert [trial.task.name for trial in one.trials] == ["nq", "msmarco"]
    other_order = Finetune(asked.tasks[::-1], lrs=(1e-4,), seeds=(0,))
    assert cells(planned(asked)) == cells(planned(other_order))


def test_a_study_without_fine_tuning_has_no_trials(tmp_path):
    plan = planned(None)
    assert list(finetunings(plan)) == []
    assert count(plan, Store(tmp_path)) == Count(0, 0)


def test_two_names_of_one_checkpoint_share_their_trials_and_are_both_named():
    grid = Finetune(TASKS[:1], lrs=(1e-4,), seeds=(0,))
    plan = planned(grid, replace(RUN, keep=()), replace(RUN, name="same", keep=()))
    (one,) = finetunings(plan)
    assert one.title(plan) == "run, same · sst2 · lr 0.0001 · seed 0"


def test_a_model_as_it_is_is_fine_tuned_like_any_other():
    grid = Finetune(TASKS[:1], lrs=(1e-4,), seeds=(0,))
    plan = planned(grid, Pretrain("as-is", Hub("./m")), RUN)
    assert next(finetunings(plan)).model in plan.roots
    only = {plan.results["as-is"]}
    assert [one.title(plan) for one in finetunings(plan, only)] == ["as-is · sst2 · lr 0.0001 · seed 0"]


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
def test_what_is_added_to_a_grid_changes_no_key_of_it(grid, data):
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


@settings(max_examples=40, deadline=None)
@given(finetunes())
def test_the_searched_documents_are_in_the_keys_of_retrieval_trials_alone(grid):
    other = replace(grid, documents="judged" if grid.documents == "all" else "all")
    before, after = planned(grid), planned(other)
    assert [one.key for one in finetunings(before)] == [one.key for one in finetunings(after)]
    families = {task.name: task.family for task in grid.tasks}
    for (model, trained, scored, *cell), trial in cells(before).items():
        same = cells(after)[model, trained, scored, *cell] == trial
        assert same == (families[scored] != "IR"), scored


def test_a_borrower_and_its_lender_come_from_the_same_training():
    every = cells(planned(Finetune(TASKS[-3:], lrs=(1e-4,), seeds=(0,))))
    assert {(trained, scored) for _, trained, scored, _, _ in every} == {
        ("msmarco", "msmarco"),
        ("msmarco", "nq"),
        ("msmarco", "mldr_en"),
    }


def rows_of(folder, names=("beast", "place")):
    rows = [{"text": f"t{n}", "label": names[n % 2]} for n in range(20)]
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "validation", "test"):
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_the_name_of_a_task_and_the_place_of_its_files_are_in_no_key_and_all_else_is(grid, tmp_path):
    known = identities(Store(tmp_path / "store"))

    def keys(task, **fields):
        plan = planned(
            Finetune(task, lrs=(1e-4,), seeds=(0,), **fields), outside=replace(OUTSIDE, task=known.task)
        )
        return [one.key for one in finetunings(plan)], [
            trial.key for one in finetunings(plan) for trial in one.trials
        ]

    task = replace(grid.tasks[0], source=rows_of(tmp_path / "here"))
    one = keys(task)
    assert keys(replace(task, name="other", source=rows_of(tmp_path / "there"))) == one
    changed = [
        replace(task, steps=4),
        replace(task, epochs=1),
        replace(task, batch=16),
        replace(task, form=replace(task.form, text="Text: {text}")),
        replace(task, form=replace(task.form, labels=("place", "beast"))),
        replace(task, splits=Splits()),
        replace(task, splits=replace(task.splits, rows=(9, 0, 0))),
        replace(task, source=rows_of(tmp_path / "else", names=("place", "beast"))),
    ]
    for other in changed:
        trained, scored = keys(other)
        assert not set(trained) & set(one[0]), other
        assert not set(scored) & set(one[1]), other
    for fields in (
        {"protocol": "standard"},
        {"precision": "fp32"},
        {"length": 9},
        {"optimizer": AdamW(eps=1e-8)},
    ):
        assert not set(keys(task, **fields)[1]) & set(one[1]), fields


def test_one_dataset_under_two_names_is_refused_unless_two_models_are_scored_on_it(grid, tmp_path):
    known = replace(OUTSIDE, task=identities(Store(tmp_path / "store")).task)
    toys, facts, plain = grid.tasks
    with pytest.raises(SpecError, match=r"tasks 'toys' and 'twin'.*same.*data.*leave out one") as refused:
        planned(replace(grid, tasks=(toys, facts, replace(toys, name="twin"))), outside=known)
    assert "\n" not in str(refused.value)
    longer = replace(facts, name="facts-longer", steps=4)
    both = replace(
        grid, tasks=(facts, longer, plain, replace(plain, name="second", trained_on="facts-longer"))
    )
    assert len(set(cells(planned(both, outside=known)).values())) == 2 * 4 * 4


# ---------------------------------------------------------------- what the store knows


def test_a_fine_tuning_is_finished_when_all_its_trials_are_there(plan, finished):
    every = list(finetunings(plan))
    assert count(plan, finished) == Count(len(every), len(every)) == Count(24, 24)
    lender = next(one for one in every if len(one.trials) == 2)
    finished.discard(finished.trials / lender.trials[1].key)
    assert count(plan, finished) == Count(23, 24)
    assert [one for one in every if not ledger.finished(one, finished)] == [lender]


def test_nothing_is_done_in_an_empty_store(plan, store):
    assert count(plan, store) == Count(0, 24)
    seen = survey_trials(plan, store)
    assert (seen.done, seen.of, seen.running, seen.failed, seen.seconds_left) == (0, 24, {}, {}, None)


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
    took = sum(
        sum(read_trial(finished, trial.key)["seconds"].values()) for one in every[3:] for trial in one.trials
    )
    assert seen.seconds_left == pytest.approx(took / 21 * 3)


def test_one_damaged_trial_is_named_and_the_others_are_reported(plan, finished, verb):
    one = next(finetunings(plan))
    path = finished.trials / one.trials[0].key / TRIAL
    path.write_text(path.read_text().replace("accuracy", "accurate"))
    seen = survey_trials(plan, finished)
    assert (seen.done, seen.of) == (23, 24)
    assert str(path) in seen.failed[one.key][1]
    place = finished.studies / "tuned" / "plan.json"
    code, out, _ = verb("status", place, "--store", finished.root)
    assert code == 0
    assert str(path) in out
    assert "23/24 fine-tunings" in out
    code, out, _ = verb("status", place, "--store", finished.root, "--json")
    rows = {(row["result"], row["task"]): row for row in json.loads(out)["scores"]}
    hurt = next(name for name, key in plan.results.items() if key == one.model), one.task.name
    assert (rows[hurt]["done"], rows[hurt]["test"]) == (3, None), "no score is made of the others"
    assert all(row["done"] == 4 for name, row in rows.items() if name != hurt)
    code, out, _ = verb("run", place, "--store", finished.root, "--quiet")
    assert code == 1
    assert str(path) in out
    assert "23 of 24 fine-tunings done, 1 failed" in out


def test_a_survey_shares_the_time_to_go_among_those_who_compute(plan, finished):
    every = list(finetunings(plan))
    for one in every[:4]:
        for trial in one.trials:
            finished.discard(finished.trials / trial.key)
    alone = survey_trials(plan, finished).seconds_left
    leases = [Leases(finished.leases).take(one.key) for one in every[:2]]
    assert survey_trials(plan, finished).seconds_left == pytest.approx(alone / 2)
    for lease in leases:
        lease.release()
