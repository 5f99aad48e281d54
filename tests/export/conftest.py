"""A tiny study that is trained and fine-tuned once, and its best result as an exported folder."""

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from common import BEASTS, store_with, toys, write_task

from biphase import CATALOG, CLM, MLM, MNTP, WSD, Chunks, Finetune, Pretrain, Size, Stage, Study
from biphase.specs import Answer, Classify, Splits, Tag, Task
from biphase.store import Store, publish, read_json, write_json

TINY = Size("tiny", layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, precision="fp32")


def quiet(text):
    """Print nothing."""


def tagged(count, first=0):
    rows = []
    for n in range(count):
        words = f"today {BEASTS[n % 2][n % 3]} met {('Ann', 'Bob')[n % 2]} at {first + n}".split()
        rows.append({"tokens": words, "tags": ["B-PER" if word in ("Ann", "Bob") else "O" for word in words]})
    return rows


def seen(count, first=0):
    rows = []
    for number in range(first, first + count):
        name = ("Ann", "Bob", "Eve")[number % 3]
        context = f"the cat saw {name} by the river {number}"
        answers = {"text": [name], "answer_start": [context.index(name)]}
        rows.append({"question": "who was seen?", "context": context, "answers": answers})
    return rows


def make_task(folder, name, form, rows, steps):
    source = str(write_task(folder / name, rows))
    return Task(name, form, source, Splits(validation="validation*"), steps=steps, batch=8)


@pytest.fixture
def own_task(tmp_path):
    """Makes a task of any form: `own_task(form, rows, steps)`."""
    return lambda form, rows, steps: make_task(tmp_path, "own", form, rows, steps)


def train(study, store, *, evaluated=None):
    from biphase.study.plan import identities, make_plan, save_plan
    from biphase.study.worker import Worker
    from biphase.training.distributed import Ranks
    from biphase.training.options import RuntimeOptions

    known = identities(store)
    plan = make_plan(study, known)
    save_plan(plan, store)
    options, alone = RuntimeOptions(quiet=True, loaders=0), Ranks(0, 1, torch.device("cpu"))
    chosen = None if evaluated is None else {plan.results[name] for name in evaluated}
    worker = Worker(plan, store, known, alone, options, wanted=set(plan.jobs), evaluated=chosen, say=quiet)
    assert not worker.work().failed
    return plan


@pytest.fixture(scope="session")
def work():
    """Trains and fine-tunes a study in this process: `work(study, store)` gives its plan."""
    return train


@dataclass(frozen=True)
class Trained:
    """A store with results, and their keys by name."""

    store: Store
    study: Study
    results: dict[str, str]


@pytest.fixture(scope="session")
def tasks(tmp_path_factory) -> tuple[Task, ...]:
    """One of each family that can be exported, and one that borrows."""
    folder, facts = tmp_path_factory.mktemp("tasks"), CATALOG["scifact-mini"]
    splits = replace(facts.splits, rows=(16, 6, 8))
    facts = replace(facts, name="facts", steps=3, batch=4, splits=splits)
    borrowed = replace(splits, train="", rows=(0, 5, 6))
    return (
        make_task(folder, "kinds", Classify("About: {text}", ("a beast", "a place")), toys, 12),
        make_task(folder, "names", Tag(("O", "B-PER", "I-PER")), tagged, 12),
        facts,
        replace(facts, name="facts-too", splits=borrowed, trained_on="facts"),
    )


@pytest.fixture(scope="session")
def answering(tmp_path_factory) -> Task:
    """A task of questions."""
    return make_task(tmp_path_factory.mktemp("answers"), "seen", Answer(), seen, 3)


@pytest.fixture(scope="session")
def trained(corpus, shards, tasks, tmp_path_factory) -> Trained:
    """Three results; the masked one is fine-tuned too."""
    ways = {
        "corpus": corpus,
        "packing": Chunks(32, shortest=4),
        "batch_tokens": 256,
        "schedule": WSD(3e-3, warmup=2, decay=3),
        "heldout_every": 5,
        "heldout_tokens": 512,
    }
    masked = Pretrain("masked", start=TINY, stages=(Stage(CLM(), 4), Stage(MLM(0.4), 8)), **ways)
    early = Pretrain("early", start=replace(TINY, tied=True), stages=Stage(MNTP(0.4), 6), **ways)
    causal = Pretrain("causal", start=TINY, stages=Stage(CLM(), 6), **ways)
    grid = Finetune(tasks, lrs=(1e-3, 1e-2), seeds=(0, 1), protocol="standard", precision="fp32")
    study = Study("exported", (masked, early, causal), grid)
    store = store_with(shards, tmp_path_factory.mktemp("trained"))
    return Trained(store, study, train(study, store, evaluated=["masked"]).results)


@pytest.fixture(scope="session")
def export(trained, tmp_path_factory):
    """Exports a result by its name, once: `export("masked")` gives the folder."""
    from biphase.export.checkpoint import export_checkpoint
    from biphase.export.folder import find

    folders = {}

    def exported(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("exports") / name
            checkpoint = find(trained.results[name], trained.store)
            export_checkpoint(checkpoint, trained.store, folders[name], onnx=False, say=quiet)
        return folders[name]

    return exported


@pytest.fixture(scope="session")
def folder(export) -> Path:
    """The exported masked model."""
    return export("masked")


@pytest.fixture
def changeable(trained, tmp_path):
    """The trained store, with trials that may be changed: `changeable.change(key, edit)`."""

    class Changeable(Store):
        def change(self, key, edit):
            folder, moved = self.trials / key, self.root / "moved"
            about = read_json(folder / "trial.json")
            edit(about)
            write_json(folder / "trial.json", about)
            (folder / "manifest.json").unlink()
            folder.rename(moved)
            publish(moved, folder)

    store = Changeable(tmp_path / "store")
    store.root.mkdir()
    for kind in ("checkpoints", "shards", "studies"):
        (store.root / kind).symlink_to(getattr(trained.store, kind))
    shutil.copytree(trained.store.trials, store.trials)
    return store


@pytest.fixture(autouse=True, scope="session")
def no_bars():
    """Hide the progress bars of transformers."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    os.environ["TQDM_DISABLE"] = "1"


@pytest.fixture(scope="session")
def ours(trained, shards):
    """The trained model of a result, as the store has it."""
    from biphase.data.shards import Shards
    from biphase.training.pretrain import model_of_checkpoint

    def load(name: str):
        run = next(run for run in trained.study.runs if run.name == name)
        return model_of_checkpoint(run, trained.results[name], trained.store, Shards.open(shards)).eval()

    return load
