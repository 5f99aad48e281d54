"""The ledger as arrays: chosen without the test part; what is missing stays missing, and is named; resampled scores."""

import math
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save

from biphase import CLM, Fewer, Stage, Study
from biphase.metadata import TRIAL, VALUES, check_values
from biphase.records import encode
from biphase.report import tables
from biphase.report.build import collect
from biphase.report.evidence import Resamples, gather
from biphase.store import MANIFEST, Store, publish, verify, write_json
from biphase.study.ledger import finetunings, note_failure, read_trial, score_rows, survey_trials
from biphase.tasks.metrics import correlations, entity_f1

SELECTS = {"SC": "accuracy", "TC": "sentence_f1", "QA": "token_f1", "IR": "paper_ndcg@10"}


def trials_of(plan):
    """Every trial: (result, task, rate, seed) → its training and its key."""
    names = {key: name for name, key in reversed(plan.results.items())}
    return {
        (names[one.model], trial.task.name, one.lr, one.seed): (one, trial.key)
        for one in finetunings(plan)
        for trial in one.trials
    }


def chosen(evidence):
    return {place: grid.chosen for place, grid in evidence.grids.items()}


def same(one, other, but=()):
    """Do two readings agree on every grid, apart from those of some (result, task)?"""
    return all(
        np.array_equal(grid.test[name], other.grids[place].test[name], equal_nan=True)
        for place, grid in one.grids.items()
        if place not in but
        for name in grid.test
    )


@pytest.fixture
def tiny(run, grid, invent, tmp_path):
    """One trial: one result, one task, one rate, one seed."""
    study = Study("tiny", (run("clm", Stage(CLM(), 20)),), grid("sst2", lrs=(5e-5,), seeds=(0,)))
    plan, store = invent(study, tmp_path / "tiny", shrink=0.1)
    ((training, key),) = trials_of(plan).values()
    return plan, store, training, key


# ---------------------------------------------------------------- what the trials hold


def test_what_is_not_planned_is_no_gap(run, grid, invent, tmp_path):
    fewer = Fewer(("sst2",), lrs=(5e-5,), seeds=(0, 2))
    clm = run("clm", Stage(CLM(), 20), keep=(10,))
    plan, store = invent(Study("part", (clm,), grid("sst2", "squad", on_the_way=fewer)), tmp_path)
    content = collect(plan, store)
    evidence = content.evidence
    way = evidence.grids["clm-10", "sst2"]
    assert (way.seconds.shape, way.done, way.of) == ((3, 3), 2, 2)
    assert way.chosen == {0: 1, 2: 1}  # the middle one of three rates, which is the only one
    assert np.isfinite(way.at_chosen(way.test)).tolist() == [True, False, True]
    assert evidence.grids["clm-10", "squad"].of == 0
    assert np.isnan(evidence.scores(evidence.models["clm-10"], "squad")).all()
    assert {(row.result, row.task) for row in score_rows(plan, survey_trials(plan, store).trials)} == {
        ("clm-10", "sst2"), ("clm", "sst2"), ("clm", "squad")
    }  # fmt: skip
    assert evidence.count == (20, 20)
    assert not content.missing.any
    assert len(tables.trial_table(evidence).rows) == 20
    planned = {place: score.planned for place, score in content.estimates.families.items()}
    assert [place for place, will in planned.items() if not will] == [("clm-10", "QA")]


def test_every_score_stands_where_its_trial_says(three, invent, tmp_path):
    shuffled = replace(three, finetune=replace(three.finetune, lrs=(2e-4, 2e-5, 5e-5), seeds=(9, 4, 7)))
    plan, store = invent(shuffled, tmp_path)
    evidence = gather(plan, store)
    assert evidence.count == (180, 180)
    assert evidence.unreadable == {}
    assert evidence.seeds == evidence.grids["clm", "nq"].seeds == (4, 7, 9)
    assert evidence.grids["clm", "nq"].lrs == (2e-5, 5e-5, 2e-4)
    for (result, task, lr, seed), (_, key) in trials_of(plan).items():
        grid, about = evidence.grids[result, task], read_trial(store, key)
        at = grid.lrs.index(lr), grid.seeds.index(seed)
        assert grid.keys[at[0]][at[1]] == key
        assert {name: array[at] for name, array in grid.test.items()} == about["scores"]["test"]
        assert {name: array[at] for name, array in grid.validation.items()} == about["scores"]["validation"]
        assert grid.seconds[at] == pytest.approx(sum(about["seconds"].values()))
        assert grid.metric == about["metric"] == SELECTS[grid.task.family]
        assert grid.examples == about["examples"]["test"]


def test_each_seed_is_scored_at_the_rate_its_own_validation_chose(ledger):
    plan, store = ledger
    evidence = gather(plan, store)
    by_row = {(row.result, row.task): row for row in score_rows(plan, survey_trials(plan, store).trials)}
    for model in evidence.models.values():
        for task in evidence.tasks:
            selected = by_row[model.name, task].by_seed
            grid = evidence.grids[model.name, task]
            assert {seed: grid.lrs[place] for seed, place in grid.chosen.items()} == selected.lr
            assert evidence.scores(model, task).tolist() == [selected.test]
            validation = evidence.scores(model, task, part="validation")
            best = grid.validation[grid.metric].max(axis=0)
            assert validation.tolist() == [best.tolist()]


def test_a_family_is_the_mean_of_its_tasks_seed_by_seed(ledger):
    evidence = gather(*ledger)
    assert list(evidence.families) == ["SC", "TC", "QA", "IR"]
    assert evidence.families["IR"] == ("msmarco", "nq")
    model = evidence.models["both"]
    two = evidence.scores(model, "msmarco"), evidence.scores(model, "nq")
    assert evidence.on(model, ("msmarco", "nq")) == pytest.approx((two[0] + two[1]) / 2)
    other = evidence.scores(model, "nq", "mrr@10")
    assert other.shape == (1, 3)
    assert not np.allclose(other, two[1])


# ---------------------------------------------------------------- who chooses


def test_test_scores_choose_nothing(ledger, rewrite):
    plan, store = ledger
    before, chance = gather(plan, store), random.Random(0)
    for _, key in trials_of(plan).values():

        def invent_test(about):
            about["scores"]["test"] = {name: chance.random() for name in about["scores"]["test"]}

        rewrite(store.trials / key, TRIAL, invent_test)
        verify(store.trials / key)
    after = gather(plan, store)
    assert after.unreadable == {}
    assert chosen(after) == chosen(before)
    model = before.models["clm"]
    assert not np.allclose(after.scores(model, "squad"), before.scores(model, "squad"))


# ---------------------------------------------------------------- what is missing


def test_a_missing_trial_takes_its_seed_and_nothing_else(ledger):
    plan, store = ledger
    whole = gather(plan, store)
    _, key = trials_of(plan)["mlm", "nq", 2e-5, 1]
    store.discard(store.trials / key)
    evidence = gather(plan, store)
    found, model = evidence.grids["mlm", "nq"], evidence.models["mlm"]
    assert evidence.count == (179, 180)
    assert (found.done, found.of, found.missing) == (8, 9, {})
    before, after = whole.scores(model, "nq")[0], evidence.scores(model, "nq")[0]
    assert np.isnan(after).tolist() == [False, True, False]
    assert after[[0, 2]].tolist() == before[[0, 2]].tolist()
    assert np.isnan(evidence.on(model, ("msmarco", "nq"))[0]).tolist() == [False, True, False]
    values = evidence.values(model, "nq")
    assert np.isnan(values).all(axis=-1).tolist() == [[False, True, False]]
    assert np.isfinite(values[0, [0, 2]]).all()
    assert evidence.unreadable == {}, "what is not computed yet is no damage"
    assert same(whole, evidence, but={("mlm", "nq")})


def test_a_failed_trial_says_why(ledger):
    plan, store = ledger
    every = trials_of(plan)
    lender, own = every["mlm", "msmarco", 5e-5, 2]
    _, borrowed = every["mlm", "nq", 5e-5, 2]
    done, _ = every["clm", "sst2", 5e-5, 0]
    for key in (own, borrowed):
        store.discard(store.trials / key)
    note_failure(plan, store, lender.key, RuntimeError("out of\nmemory"))
    note_failure(plan, store, done.key, RuntimeError("long ago, and tried again since"))
    (store.studies / "three" / "failures" / f"{'0' * 32}.json").write_text("[]")
    evidence = gather(plan, store)
    assert evidence.grids["mlm", "msmarco"].missing == {own: "RuntimeError: out of memory"}
    assert evidence.grids["mlm", "nq"].missing == {borrowed: "RuntimeError: out of memory"}
    assert evidence.grids["clm", "sst2"].missing == {}
    assert evidence.count == (178, 180)
    (store.studies / "three" / "failures" / f"{lender.key}.json").write_text("[]")
    assert gather(plan, store).grids["mlm", "nq"].missing == {}, "a note that says nothing"


# ---------------------------------------------------------------- what cannot be trusted


def flip(path, place=None, bit=2):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 1 << bit
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(("name", "every"), [(TRIAL, 11), (MANIFEST, 1), (VALUES, 3)])
def test_no_flipped_bit_ever_becomes_a_number(tiny, name, every):
    plan, store, _, key = tiny
    path = store.trials / key / name
    content, chance, refused = path.read_bytes(), random.Random(0), 0

    def read():
        evidence = gather(plan, store)
        model = evidence.models["clm"]
        scores, values = evidence.scores(model, "sst2"), evidence.values(model, "sst2")
        for why in evidence.unreadable.values():
            assert str(store.root) not in why, "a report does not tell where the store lies"
            assert all(fact in why for fact in (key, "remove"))
            assert "\n" not in why
        return scores, values, list(evidence.unreadable)

    right = read()
    for place in range(0, len(content), every):
        flip(path, place, chance.randrange(8))
        scores, values, unreadable = read()
        path.write_bytes(content)
        assert np.isnan(scores).all() or scores == right[0]
        assert values is None or np.array_equal(values, right[1])
        assert unreadable == ([key] if values is None else [])
        assert values is None or name == MANIFEST, "in a manifest, a space"
        refused += values is None
    assert refused > 100


def test_a_trial_under_the_key_of_another_is_refused(ledger):
    plan, store = ledger
    every = trials_of(plan)
    _, key = every["mlm", "sst2", 5e-5, 0]
    _, other = every["mlm", "sst2", 2e-4, 0]
    shutil.rmtree(store.trials / key)
    shutil.copytree(store.trials / other, store.trials / key)
    evidence = gather(plan, store)
    assert list(evidence.unreadable) == [key]
    assert other in evidence.unreadable[key]
    assert math.isnan(evidence.grids["mlm", "sst2"].test["accuracy"][1, 0])
    shutil.rmtree(store.trials / key)
    (store.trials / key).write_text("")  # a file instead of a folder
    assert list(gather(plan, store).unreadable) == [key]


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(86), torch.zeros(87, dtype=torch.bfloat16), torch.zeros(87, dtype=torch.float8_e4m3fn),
     torch.zeros(()), torch.zeros(87, 2)],
    ids=["another number", "bf16", "fp8", "no dimension", "two dimensions"],
)  # fmt: skip
def test_values_of_another_kind_are_not_used_and_named(tiny, tensor):
    plan, store, _, key = tiny
    folder = store.trials / key
    (folder / VALUES).write_bytes(save({"test/accuracy": tensor}))
    (folder / MANIFEST).unlink()
    assert publish(folder.rename(folder.with_name("built")), folder)
    evidence = gather(plan, store)
    assert evidence.values(evidence.models["clm"], "sst2") is None
    assert list(evidence.unreadable) == [key]
    assert key in evidence.unreadable[key]
    assert "\n" not in evidence.unreadable[key]
    assert evidence.count == (1, 1)


# ---------------------------------------------------------------- example by example


@pytest.mark.parametrize("protocol", ["paper", "standard"])
def test_values_come_to_the_score(run, grid, invent, tmp_path, protocol):
    finetune = grid("sst2", "conll2003", "squad", "msmarco", protocol=protocol)
    plan, store = invent(Study("s", (run("clm", Stage(CLM(), 20)),), finetune), tmp_path)
    evidence = gather(plan, store)
    (model,) = evidence.models.values()
    for task in evidence.tasks:
        grid_ = evidence.grids["clm", task]
        for metric in grid_.test:
            values, scores = evidence.values(model, task, metric), evidence.scores(model, task, metric)[0]
            assert values.dtype == np.float32
            if metric == "entity_f1":
                assert values.shape == (1, 3, grid_.examples, 3)
                told = [entity_f1(one.astype(int)) for one in values[0]]
            else:
                assert values.shape == (1, 3, grid_.examples)
                told = values[0].mean(axis=-1, dtype=float)
            assert told == pytest.approx(scores, abs=1e-9), metric
        assert np.array_equal(evidence.values(model, task), evidence.values(model, task, grid_.metric))
    assert evidence.unreadable == {}


# ---------------------------------------------------------------- names and seeds


def test_several_pretraining_seeds_are_rows_of_one_model(run, grid, invent, tmp_path):
    runs = (run("late", Stage(CLM(), 20), seed=8), run("early", Stage(CLM(), 20), seed=5))
    means = {"late": 60.0, "early": 80.0}
    plan, store = invent(Study("s", runs, grid("squad")), tmp_path, means=means, shrink=1.0)
    evidence = gather(plan, store)
    (model,) = evidence.models.values()
    assert (model.name, model.results, model.seeds) == ("early", ("early", "late"), (5, 8))
    scores, values = evidence.scores(model, "squad"), evidence.values(model, "squad")
    assert (scores.shape, values.shape) == ((2, 3), (2, 3, 10_570))
    assert scores.mean(axis=1) == pytest.approx([0.8, 0.6], abs=0.01)
    assert values.mean(axis=-1, dtype=float) == pytest.approx(scores)
    assert evidence.by_rate(model, "squad").shape == (2, 3, 3)
    draws = Resamples(evidence, draws=50).of(model, ("squad",))
    assert draws.mean(axis=(0, 2)) == pytest.approx([0.8, 0.6], abs=0.03)
    for seed in range(3):
        store.discard(store.trials / trials_of(plan)["late", "squad", 5e-5, seed][1])
    half = gather(plan, store)
    for array in (half.scores(model, "squad"), half.values(model, "squad")[:, :, 0]):
        assert np.isnan(array).tolist() == [[False] * 3, [True] * 3]


# ---------------------------------------------------------------- resampled scores


@pytest.fixture
def evidence(ledger):
    return gather(*ledger)


def test_resampled_scores_centre_on_the_scores(evidence):
    draws = Resamples(evidence)
    for model in evidence.models.values():
        for task, metric in (("sst2", ""), ("squad", ""), ("nq", ""), ("conll2003", "entity_f1")):
            found, scores = draws.of(model, (task,), metric), evidence.scores(model, task, metric)
            assert found.shape == (1000, *scores.shape)
            error = found.std(axis=0) / math.sqrt(1000)
            assert np.abs(found.mean(axis=0) - scores).max() < 5 * error.max()


def test_a_correlation_is_computed_again_from_the_pairs_of_numbers(run, grid, plan_of, tmp_path):
    study = Study("tiny", (run("clm", Stage(CLM(), 20)),), grid("stsb", lrs=(5e-5,), seeds=(0,)))
    plan, store = plan_of(study), Store(tmp_path)
    ((training, key),) = trials_of(plan).values()
    count, chance = 300, np.random.default_rng(0)
    true = chance.integers(0, 6, count)
    pairs = np.stack([true + chance.normal(0, 1, count), true], -1).astype(np.float32)
    about = {
        "key": key, "model": training.model, "task": encode(training.task), "trained_on": None,
        "finetune": {"protocol": study.finetune.protocol}, "lr": 5e-5, "seed": 0, "metric": "pearson_spearman",
        "scores": dict.fromkeys(("validation", "test"), correlations(*pairs.T)),
        "examples": {"validation": 9, "test": count}, "seconds": {"train": 1.0}, "machine": {"device": "cpu"},
    }  # fmt: skip
    folder = store.trials / key
    with store.attempt("trial") as built:
        write_json(built / TRIAL, about)
        (built / VALUES).write_bytes(save({"test/number_pairs": torch.from_numpy(pairs)}))
        assert publish(built, folder)
    check_values(VALUES, (folder / VALUES).read_bytes(), read_trial(store, key))
    evidence = gather(plan, store)
    model, scores = evidence.models["clm"], correlations(*pairs.T)
    assert evidence.values(model, "stsb").shape == (1, 1, count, 2)
    draws = Resamples(evidence)
    for metric in ("", "pearson", "spearman"):
        found = draws.of(model, ("stsb",), metric)[:, 0, 0]
        wanted = scores[metric or "pearson_spearman"]
        assert found.mean() == pytest.approx(wanted, abs=5 * found.std())
        assert 0 < found.std() < 0.2
    assert evidence.unreadable == {}


def test_missing_values_give_no_resamples(ledger):
    plan, store = ledger
    grid = gather(plan, store).grids["mlm", "squad"]
    for training in finetunings(plan):
        for trial in training.trials:
            if trial.task.name == "sst2":
                (store.trials / trial.key / VALUES).unlink()
    (store.trials / grid.keys[grid.chosen[1]][grid.seeds.index(1)] / VALUES).unlink()
    evidence = gather(plan, store)
    draws, model = Resamples(evidence, draws=10), evidence.models["mlm"]
    assert all(draws.of(one, ("sst2", "squad")) is None for one in evidence.models.values())
    assert draws.of(model, ("squad",), "no-such-metric") is None
    found = draws.of(model, ("squad",))
    for missing in (np.isnan(found).all(axis=0), np.isnan(found).any(axis=0)):
        assert missing.tolist() == [[False, True, False]], "a seed without values alone"
