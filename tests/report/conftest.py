"""Small ledgers of known truth, written by benchmarks/synthetic_ledger.py, and evidence without a store."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from biphase import CATALOG, CLM, MLM, SIZES, WSD, Finetune, Pretrain, Rows, Stage, Study
from biphase.keys import Identities
from biphase.papers.gisserot2025 import PAPER
from biphase.report.evidence import Evidence, ScoreGrid
from biphase.report.recipes import models
from biphase.store import Store
from biphase.study.load import load
from biphase.study.plan import Plan, identities, make_plan

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))  # for small_studies.py

from synthetic_ledger import FAMILIES, LOST_ELSE, Ledger, Truth, flat_truth, write
from synthetic_states import put

OUTSIDE = Identities(data=str, hub=lambda hub: f"{hub.source}@{hub.revision}", reads=lambda hub: "")


def pretrain(name: str, *stages: Stage, **fields: Any) -> Pretrain:
    """A run of a few steps, that is planned and never computed."""
    usual: dict[str, Any] = {
        "start": SIZES["1m"],
        "corpus": "builtin",
        "schedule": WSD(1e-3, warmup=2, decay=4),
        "packing": Rows(64),
        "batch_tokens": 128,
        "heldout_every": 5,
        "heldout_tokens": 64,
    }
    if isinstance(fields.get("start"), Pretrain):  # what is not said is as there
        usual = {}
    return Pretrain(name, stages=stages, **(usual | fields))


def grid_of(*tasks: str, **fields: Any) -> Finetune:
    usual = {"lrs": (2e-5, 5e-5, 2e-4), "seeds": (0, 1, 2)}
    return Finetune(tuple(CATALOG[name] for name in tasks), **(usual | fields))


def plan_of(study: Study) -> Plan:
    return make_plan(study, OUTSIDE, "Is it so?")


def invented(
    study: Study,
    folder: Path,
    *,
    means: dict[str, float] | None = None,  # result → percent on every family
    results: tuple[str, ...] = (),  # whose trials are there; none named: all
    lines: int = 1_000,
    rows: int = 0,  # of the corpus; 0: not known
    **options: Any,
) -> tuple[Plan, Store]:
    """A ledger of this study, in full or in part, and its plan."""
    plan, store = plan_of(study), Store(folder)
    truth = flat_truth(plan)
    if means:
        by_family = {(name, family): mean for name, mean in means.items() for family in FAMILIES}
        truth = Truth(by_family, dict.fromkeys(plan.results, LOST_ELSE))
    options = {"shrink": 0.1, "every_metric": True} | options
    write(Ledger(plan, store, truth, **options), results=results, lines=lines, rows=rows)
    return plan, store


@pytest.fixture(scope="session")
def run() -> Callable[..., Pretrain]:
    return pretrain


@pytest.fixture(scope="session")
def planned() -> Callable[..., Plan]:
    """The plan of runs that are not fine-tuned, or of a study."""
    return lambda *runs: plan_of(runs[0] if isinstance(runs[0], Study) else Study("s", runs))


@pytest.fixture(scope="session")
def grid() -> Callable[..., Finetune]:
    return grid_of


@pytest.fixture(scope="session")
def invent() -> Callable[..., tuple[Plan, Store]]:
    return invented


@pytest.fixture(scope="session")
def three() -> Study:
    """CLM with a checkpoint, MLM, and one after the other; five tasks of four families, of which one borrows."""
    return Study(
        "three",
        (
            pretrain("clm", Stage(CLM(), 20), keep=(10,)),
            pretrain("mlm", Stage(MLM(0.4), 20)),
            pretrain("both", Stage(CLM(), 10), Stage(MLM(0.4), 10)),
        ),
        grid_of("sst2", "conll2003", "squad", "msmarco", "nq"),
        papers="gisserot2025",
    )


@pytest.fixture(scope="session")
def _three_store(three: Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    means = {"clm-10": 70.0, "clm": 80.0, "mlm": 82.0, "both": 85.0}
    invented(three, folder, means=means)
    return folder


@pytest.fixture
def ledger(three: Study, _three_store: Path, tmp_path: Path) -> tuple[Plan, Store]:
    """The whole ledger of `three`: a copy, so that a test may break it."""
    shutil.copytree(_three_store, tmp_path / "store")
    return plan_of(three), Store(tmp_path / "store")


@pytest.fixture(scope="session")
def rewrite() -> Callable[..., None]:
    """Publish a folder of a store anew with one JSON file changed: `change(content)` changes it in place."""

    def anew(place: Path, name: str, change: Callable[[Any], Any]) -> None:
        content = json.loads((place / name).read_text())
        change(content)
        files = {path.name: path.read_bytes() for path in place.iterdir() if path.name != "manifest.json"}
        shutil.rmtree(place)
        put(place, files | {name: json.dumps(content, indent=1).encode() + b"\n"})

    return anew


# ---------------------------------------------------------------- evidence without a store


STUDIES = Path(__file__).parents[2] / "studies"
METRICS = {"SC": "accuracy", "TC": "sentence_f1", "QA": "token_f1", "IR": "paper_ndcg@10"}


@pytest.fixture(scope="session", name="plan_of")
def plan_of_study(tmp_path_factory):
    """The plan of a study file by its name, or of a Study."""
    store = Store(tmp_path_factory.mktemp("no-store"))
    fingerprints = identities(store)
    known = {}

    def plan(study: str | Study) -> Plan:
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
    nowhere = Store(tmp_path_factory.mktemp("no-store-either"))

    def evidence(plan, score, validation=None, metrics=(), *, store=nowhere, seconds=1.0, machines=()):
        finetune = plan.study.finetune
        known, grids = models(plan), {}
        shape = len(finetune.lrs), len(finetune.seeds)
        tasks = {task.name: task for task in finetune.tasks}
        results = [(model, result) for model in known.values() for result in model.results]
        for (model, result), task in itertools.product(results, tasks.values()):
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
                seconds=np.where(np.isfinite(test), seconds, np.nan),
                examples=0,
                machines=machines,
            )
        return Evidence(plan, store, known, tasks, grids, {}, published=PAPER.published)

    return evidence
