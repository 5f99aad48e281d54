"""Resampled scores: once for a task, the same resamples for all models, at the rates that were chosen."""

import math
from dataclasses import replace

import numpy as np
import pytest

from biphase.report import evidence as module
from biphase.report.evidence import Resamples, gather, shared_resamples
from biphase.report.statistics.intervals import resample
from biphase.study.ledger import finetunings


@pytest.fixture
def evidence(ledger):
    return gather(*ledger)


def test_draws_have_the_seeds_of_the_model_and_centre_on_its_scores(evidence):
    draws = Resamples(evidence)
    for model in evidence.models.values():
        for task in ("sst2", "squad", "nq"):
            found, scores = draws.of(model, task), evidence.scores(model, task)
            assert found.shape == (1000, *scores.shape)
            error = found.std(axis=0) / math.sqrt(1000)
            assert np.abs(found.mean(axis=0) - scores).max() < 5 * error.max()


def test_each_seed_is_its_own_column(evidence):
    """Against one row at a time: the same task has the same resamples, in one call or in many."""
    draws, model = Resamples(evidence), evidence.models["mlm"]
    values = evidence.values(model, "sst2")
    for seed in range(values.shape[1]):
        alone = resample(values[0, seed : seed + 1], seed="sst2", draws=1000)[:, 0]
        assert draws.of(model, "sst2")[:, 0, seed] == pytest.approx(alone)


def test_pretraining_seeds_are_rows(three, invent, tmp_path):
    mlm = three.runs[1]
    runs = tuple(replace(mlm, name=f"mlm-{seed}", seed=seed) for seed in (1, 2))
    evidence = gather(*invent(replace(three, runs=runs), tmp_path, means={"mlm-1": 60.0, "mlm-2": 90.0}))
    (model,) = evidence.models.values()
    found = Resamples(evidence, draws=50).of(model, "sst2")
    assert found.shape == (50, 2, 3)
    assert found.mean(axis=(0, 2)) == pytest.approx([0.6, 0.9], abs=0.03)


def test_entity_f1_is_resampled_from_counts(evidence):
    draws, model = Resamples(evidence, draws=50), evidence.models["mlm"]
    found = draws.of(model, "conll2003", "entity_f1")
    assert found.shape == (50, 1, 3)
    assert found.mean() == pytest.approx(evidence.scores(model, "conll2003", "entity_f1").mean(), abs=0.05)


def test_a_task_is_resampled_once_for_all_models(evidence, monkeypatch):
    calls = []

    def counted(*args, **named):
        calls.append(named["seed"])
        return resample(*args, **named)

    monkeypatch.setattr(module, "resample", counted)
    draws = shared_resamples(evidence)
    for model in evidence.models.values():
        for task in ("sst2", "nq"):
            draws.of(model, task)
    assert sorted(calls) == ["nq", "sst2"]
    assert shared_resamples(evidence) is draws


def test_other_evidence_has_other_draws(ledger):
    assert shared_resamples(gather(*ledger)) is not shared_resamples(gather(*ledger))


def test_values_that_are_not_there_give_no_draws(ledger):
    plan, store = ledger
    for training in finetunings(plan):
        for trial in training.trials:
            if trial.task.name == "sst2":
                (store.trials / trial.key / "values.safetensors").unlink()
    evidence = gather(plan, store)
    draws = Resamples(evidence, draws=10)
    assert all(draws.of(model, "sst2") is None for model in evidence.models.values())
    assert draws.of(evidence.models["mlm"], "squad") is not None
    assert draws.of(evidence.models["mlm"], "squad", "no-such-metric") is None


def test_a_seed_without_values_is_missing_alone(ledger):
    plan, store = ledger
    evidence = gather(plan, store)
    grid = evidence.grids["mlm", "squad"]
    key = grid.keys[grid.chosen[1]][grid.seeds.index(1)]
    (store.trials / key / "values.safetensors").unlink()
    found = Resamples(gather(plan, store), draws=10).of(evidence.models["mlm"], "squad")
    assert np.isnan(found).all(axis=0).tolist() == [[False, True, False]]
    assert np.isnan(found).any(axis=0).tolist() == [[False, True, False]]
