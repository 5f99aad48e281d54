"""Fine-tunings of a worker: whole leaves, once each, the same in whatever company; failures noted, others go on."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file

from biphase.finetune.trial import Checkpoints
from biphase.finetune.tune import Stopped
from biphase.leases import Leases
from biphase.metadata import PREDICTIONS, TRIAL, VALUES
from biphase.store import MANIFEST, publish, verify
from biphase.study import ledger
from biphase.study.describe import closing, status_json, status_text
from biphase.study.ledger import finetunings, read_trial
from biphase.study.plan import identities, make_plan
from biphase.study.worker import PlanTuner
from biphase.training.distributed import Ranks

ALONE = Ranks(0, 1, torch.device("cpu"))


def made(store):
    """What every trial says: its scores, losses and the bytes of its values. Times may differ, nothing else."""
    return {
        place.name: (
            {k: v for k, v in json.loads((place / TRIAL).read_text()).items() if k != "seconds"},
            (place / VALUES).read_bytes(),
            (place / PREDICTIONS).read_bytes(),
        )
        for place in store.trials.iterdir()
    }


def keys(plan, *, of=lambda training, trial: True):
    return {trial.key for one in finetunings(plan) for trial in one.trials if of(one, trial)}


def discard(store, some):
    for key in some:
        store.discard(store.trials / key)


# ---------------------------------------------------------------- what comes out


def test_every_trial_of_the_plan_is_published_whole_and_nothing_else(plan, finished):
    assert {place.name for place in finished.trials.iterdir()} == keys(plan)
    for training in finetunings(plan):
        for trial in training.trials:
            assert set(verify(finished.trials / trial.key)) == {TRIAL, VALUES, PREDICTIONS}
            about = read_trial(finished, trial.key)
            assert (about["key"], about["training"]) == (trial.key, training.key)
            where = about["model"], about["lr"], about["seed"]
            assert where == (training.model, training.lr, training.seed)
            assert (about["steps"], about["skipped"]) == (training.task.steps, 0)
            assert about["trained_examples"] == training.task.steps * training.task.batch
            assert [step for step, _ in about["losses"]] == list(range(1, training.task.steps + 1))
            assert about["finetune"]["protocol"] == "standard"
            assert not {"tasks", "lrs", "seeds"} & set(about["finetune"])
        if training.task.name == "facts":  # what borrows is scored with the training it borrows
            own, borrowed = (read_trial(finished, trial.key) for trial in training.trials)
            assert own["losses"] == borrowed["losses"]
            assert (own["trained_on"], borrowed["trained_on"]["name"]) == (None, "facts")
            assert borrowed["task"]["name"] == "facts-untitled"
            assert own["seconds"]["train"] > borrowed["seconds"]["train"] == 0 < borrowed["seconds"]["score"]
    losses = {tuple(map(tuple, read_trial(finished, key)["losses"])) for key in keys(plan)}
    assert len(losses) == 24, "no two fine-tunings were the same"
    assert not finished.attempts.exists() or not list(finished.attempts.iterdir())


def test_every_trial_keeps_values_predictions_and_the_baselines_of_its_task(plan, finished):
    rows = {"toys": (12, 16), "facts": (6, 8), "facts-untitled": (6, 8)}
    for trial in (trial for training in finetunings(plan) for trial in training.trials):
        about = read_trial(finished, trial.key)
        values, kept = (load_file(finished.trials / trial.key / name) for name in (VALUES, PREDICTIONS))
        for part, count in zip(("validation", "test"), rows[trial.task.name], strict=True):
            assert about["examples"][part] == count
            for name in set(about["scores"][part]) - {"macro_f1", "mcc"}:  # which are no means
                each = values[f"{part}/{name}"]
                assert len(each) == count
                assert np.isfinite(each).all()
                assert about["scores"][part][name] == pytest.approx(each.mean(), abs=1e-6)
        ids = json.loads(kept["test/ids"].tobytes())
        predicted = kept["test/predictions"]
        assert len(set(ids)) == len(ids) == about["examples"]["test"]
        assert set(about["constant"]) == {"validation", "test"}
        for metric in about["scores"]["test"]:
            known = about["baselines"]["trivial"][metric]
            assert known["what"]
            assert 0 <= known["test"] <= 1
        if trial.task.name == "toys":
            assert ids == list(range(16))
            assert values["test/accuracy"].tolist() == (predicted == np.arange(16) % 2).tolist()
            assert bool(about["constant"]["test"]) == (len(set(predicted.tolist())) == 1)
            assert about["baselines"]["trivial"]["accuracy"]["test"] == 0.5
        else:
            assert {len(row) for row in json.loads(predicted.tobytes())} == {10}


def test_the_rescoring_example_of_the_docs_gives_the_recorded_score(plan, finished, capsys):
    guide = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    code = guide.split("## Rescoring from predictions")[1].split("```python\n")[1].split("```")[0]
    scores = set()
    for key in keys(plan, of=lambda training, trial: trial.task.name == "toys"):
        exec(code.replace('"store/trials/KEY"', repr(str(finished.trials / key))), {})
        again, recorded = map(float, capsys.readouterr().out.split())
        assert again == pytest.approx(recorded)
        scores.add(recorded)
    assert len(scores) > 1


def test_a_trial_computed_again_after_others_is_the_same(plan, finished, worker):
    before = made(finished)
    chance = random.Random(1)
    lost = set(chance.sample(sorted(keys(plan)), 7))
    lost |= keys(plan, of=lambda training, trial: trial.task is not training.task)  # one of two trials
    discard(finished, lost)
    kept = {path: path.stat().st_mtime_ns for path in finished.trials.rglob("*") if path.is_file()}
    again = worker(plan, finished).work()
    assert made(finished) == before
    assert again.computed == len({read_trial(finished, key)["training"] for key in lost})
    assert kept == {path: path.stat().st_mtime_ns for path in kept}, "only the missing ones are published"
    assert worker(plan, finished).work().computed == 0
    assert not Leases(finished.leases).holders()


# ---------------------------------------------------------------- the order of work


def test_a_result_is_fine_tuned_before_the_next_training_job(plan, store, worker):
    said = []
    outcome = worker(plan, store, said).work()
    assert outcome.computed == 5 + 24
    order = ["tune" if "fine-tunings" in line else "train" for line in said if "note:" not in line]
    # clm-4, its grid; clm to its decay and its end, its grid; both to its decay and its end, its grid.
    assert order == ["train", *["tune"] * 8, "train", "train", *["tune"] * 8, "train", "train", *["tune"] * 8]


def test_a_stop_leaves_whole_trials_and_the_rest_follows(plan, finished, worker):
    before = made(finished)
    shutil.rmtree(finished.trials)
    stopped = worker(plan, finished, stop=stop_after(17)).work()
    assert stopped.stopped
    assert 0 < len(list(finished.trials.iterdir())) < 36
    assert not list(finished.attempts.iterdir())
    assert not Leases(finished.leases).holders()
    assert made(finished).items() <= before.items()
    assert stopped.unsaved > 0, "a fine-tuning of less than 10 s starts again"
    said = closing(
        plan, finished, {}, stopped=True, command="run s.py", study="s.py", unsaved=stopped.unsaved
    )
    assert f"{ledger.count(plan, finished).done} of 24" in said
    assert "nothing lost" not in said
    assert not ledger.unfinished(finished)
    assert worker(plan, finished).work().computed == 24 - stopped.computed
    assert made(finished) == before


def longer(plan, store, steps=12):
    """The same plan with fine-tunings of more steps."""
    spec = plan.study.finetune
    tasks = tuple(replace(task, steps=steps) for task in spec.tasks)
    fewer = replace(spec, tasks=tasks, lrs=spec.lrs[:1], seeds=spec.seeds[:1])
    return make_plan(replace(plan.study, finetune=fewer), identities(store))


def stop_after(calls):
    asked = iter(range(10**6))
    return lambda: next(asked) >= calls


def test_fine_tunings_longer_than_their_time_slots_end_in_the_same_bits_after_several(plan, finished, worker):
    plan = longer(plan, finished)
    shutil.rmtree(finished.trials)
    calm = worker(plan, finished).work()
    before = made(finished)
    shutil.rmtree(finished.trials)
    chance, slots, stops = random.Random(3), 0, []
    while ledger.count(plan, finished).done < calm.computed:
        slots += 1
        outcome = worker(
            plan, finished, checkpoint_steps=100, stop=stop_after(chance.randint(2, 9))
        ).work()  # a trial asks 12 times and more
        stops.append(ledger.kept(plan, finished))
        assert outcome.unsaved < 5, "only of scoring"
        assert slots < 200
    assert slots > calm.computed, "no slot was long enough for a whole fine-tuning"
    assert any(stops)
    assert made(finished) == before
    assert not list(finished.unfinished.iterdir()), "swept when it is done"
    assert not list(finished.attempts.iterdir())


def tuner_of(plan, store, worker, **options):
    """A tuner as a worker makes it."""
    of = worker(plan, store, **options)
    return PlanTuner(
        plan, store, ALONE, of.options, shards=of.shards.alone, live=[].append, tracking=of.tracking
    )


def test_a_stop_while_a_model_is_scored_keeps_its_training(plan, finished, worker):
    plan = longer(plan, finished)
    first = next(finetunings(plan))
    discard(finished, [trial.key for trial in first.trials])
    stopped = tuner_of(plan, finished, worker, checkpoint_steps=100, stop=stop_after(13))
    with pytest.raises(Stopped):
        stopped.compute(first, lambda: False)
    assert ledger.unfinished(finished) == {first.key: 12}
    shown = []
    again = tuner_of(plan, finished, worker, checkpoint_steps=100)
    again.live = shown.append
    assert again.compute(first, lambda: False).metrics
    assert not any("step" in line for line in shown), "nothing was trained again"
    assert not ledger.unfinished(finished)


def test_checkpoints_of_finished_fine_tunings_are_swept_by_the_next_worker(plan, finished, worker):
    done, other = next(finetunings(plan)).key, "e" * 32
    for key in (done, other):
        assert Checkpoints(finished, key, steps=1).save({}, {}, {"step": 3, "seconds": 0.0})
    assert ledger.unfinished(finished) == {done: 3, other: 3}
    assert not ledger.kept(plan, finished)
    worker(plan, finished).work()
    assert ledger.unfinished(finished) == {other: 3}, "another study's is left alone"


def test_a_training_whose_lease_was_lost_publishes_nothing(plan, finished, worker):
    discard(finished, keys(plan))
    one = next(finetunings(plan))
    tuner = tuner_of(plan, finished, worker)
    with pytest.raises(Stopped):
        tuner.compute(one, lambda: True)
    assert not list(finished.trials.iterdir())
    assert tuner.compute(one, lambda: False).metrics["accuracy"] >= 0


# ---------------------------------------------------------------- failures


def with_broken_weights(plan, store, result):
    """The store after the weights of a result became NaN. Gives what puts them right."""
    place = store.checkpoints / plan.results[result]
    whole = store.root / "whole"
    shutil.copytree(place, whole)
    broken = store.root / "broken"
    place.rename(broken)
    (broken / MANIFEST).unlink()
    weights = load_tensors(broken / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, broken / "model.safetensors")
    assert publish(broken, place)

    def mend():
        store.discard(place)
        whole.rename(place)

    return mend


def test_a_model_without_finite_numbers_fails_alone_and_the_next_run_tries_again(plan, finished, worker):
    before = made(finished)
    shutil.rmtree(finished.trials)
    mend = with_broken_weights(plan, finished, "clm")
    said = []
    outcome = worker(plan, finished, said).work()
    model = plan.results["clm"]
    failed = {one.key for one in finetunings(plan, models={model})}
    assert set(outcome.failed) == set(ledger.failures(plan, finished)) == failed
    assert outcome.computed == 16
    assert all("finite numbers" in error for error in outcome.failed.values())
    assert sum("finite numbers" in line for line in said) == 8
    others = keys(plan, of=lambda training, trial: training.model != model)
    assert {place.name for place in finished.trials.iterdir()} == others
    seen = ledger.survey_trials(plan, finished)
    assert (seen.done, seen.of, set(seen.failed)) == (16, 24, failed)
    text = status_text(plan, finished, command_path="s.py")
    assert "16/24" in text
    assert text.count("finite numbers") == 8
    told = status_json(plan, finished)
    assert (told["finetunings"]["done"], len(told["finetunings"]["failed"])) == (16, 8)
    assert {row["result"] for row in told["scores"] if not row["lr"]} == {"clm"}, (
        "a grid with a hole has no score"
    )
    mend()
    again = worker(plan, finished).work()
    assert (again.computed, again.failed) == (8, {})
    assert not ledger.failures(plan, finished)
    assert made(finished) == before
