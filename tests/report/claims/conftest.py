"""Evidence without a store: the plan of a real study file, and scores from arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from biphase import Study
from biphase.report.evidence import Evidence, ScoreGrid
from biphase.report.recipes import models
from biphase.store import Store
from biphase.study.load import load
from biphase.study.plan import identities, make_plan

STUDIES = Path(__file__).parents[3] / "studies"
METRICS = {"SC": "accuracy", "TC": "sentence_f1", "QA": "token_f1", "IR": "paper_ndcg@10"}


@pytest.fixture(scope="session")
def plan_of(tmp_path_factory):
    """The plan of a study file by its name, or of a Study."""
    store = Store(tmp_path_factory.mktemp("no-store"))
    fingerprints = identities(store)
    known = {}

    def plan(study: str | Study):
        if isinstance(study, Study):
            return make_plan(study, fingerprints)
        if study not in known:
            loaded = load(STUDIES / f"{study}.py")
            known[study] = make_plan(loaded.study, fingerprints, loaded.question)
        return known[study]

    return plan


@pytest.fixture(scope="session")
def evidence_of(tmp_path_factory):
    """Evidence of a plan from `score(model, task, shape)`: (rates, seeds) of test scores in percent, for each result.

    Validation scores are the test scores, unless `validation` gives others in the same way. `metrics` names more than
    the selecting metric; all have the same scores. NaN: that trial is missing.
    """
    store = Store(tmp_path_factory.mktemp("no-store-either"))

    def evidence(plan, score, validation=None, metrics=()):
        finetune = plan.study.finetune
        known, grids = models(plan), {}
        shape = len(finetune.lrs), len(finetune.seeds)
        for model in known.values():
            for result in model.results:
                for task in finetune.tasks:
                    names = (METRICS[task.family], *metrics)
                    test = np.asarray(score(model, task, shape), dtype=float) / 100
                    chosen = test if validation is None else np.asarray(validation(model, task, shape)) / 100
                    grids[result, task.name] = ScoreGrid(
                        result=result,
                        task=task,
                        metric=names[0],
                        lrs=tuple(sorted(finetune.lrs)),
                        seeds=tuple(sorted(finetune.seeds)),
                        keys=tuple(tuple(f"{lr}-{seed}" for seed in finetune.seeds) for lr in finetune.lrs),
                        validation=dict.fromkeys(names, chosen),
                        test=dict.fromkeys(names, test),
                        seconds=np.where(np.isfinite(test), 1.0, np.nan),
                        examples=0,
                        machines=(),
                    )
        return Evidence(plan, store, known, {task.name: task for task in finetune.tasks}, grids, {})

    return evidence
