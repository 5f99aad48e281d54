"""A tiny study that is trained and fine-tuned once, and its best result as an exported folder."""

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # `families.build` makes models of many families

from biphase import (
    CATALOG,
    CLM,
    MLM,
    MNTP,
    WSD,
    Chunks,
    Classify,
    Finetune,
    Pretrain,
    Size,
    Splits,
    Stage,
    Study,
    Tag,
    Task,
)
from biphase.store import Store

TINY = Size("tiny", layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, precision="fp32")
SUBJECTS = ("the cat", "a dog", "two birds"), ("the river", "a mountain", "the long road")


def texts(count: int, first: int = 0) -> list[dict]:
    return [
        {"text": f"{SUBJECTS[n % 2][n % 3]} sees {SUBJECTS[n % 2][(n + 1) % 3]} {first + n}", "label": n % 2}
        for n in range(count)
    ]


def tagged(count: int, first: int = 0) -> list[dict]:
    rows = []
    for n in range(count):
        sentence = f"today {SUBJECTS[n % 2][n % 3]} met {('Ann', 'Bob')[n % 2]} at {first + n}".split()
        tags = ["B-PER" if word in ("Ann", "Bob") else "O" for word in sentence]
        rows.append({"tokens": sentence, "tags": tags})
    return rows


def write_parts(folder: Path, rows) -> str:
    folder.mkdir()
    for part, examples in (("train", rows(40)), ("validation", rows(12, 40)), ("test", rows(16, 60))):
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in examples))
    return str(folder)


@dataclass(frozen=True)
class Trained:
    """A store with results, and their keys by name."""

    store: Store
    study: Study
    results: dict[str, str]


@pytest.fixture(scope="session")
def tasks(tmp_path_factory) -> tuple[Task, ...]:
    """One of each family that can be exported, and one that borrows."""
    folder = tmp_path_factory.mktemp("tasks")
    ways = {"splits": Splits(validation="validation*"), "steps": 12, "batch": 8}
    facts = replace(
        CATALOG["scifact-mini"],
        name="facts",
        steps=3,
        batch=4,
        splits=replace(CATALOG["scifact-mini"].splits, rows=(16, 6, 8)),
    )
    return (
        Task(
            "kinds",
            Classify("About: {text}", ("a beast", "a place")),
            write_parts(folder / "kinds", texts),
            **ways,
        ),
        Task("names", Tag(("O", "B-PER", "I-PER")), write_parts(folder / "names", tagged), **ways),
        facts,
        replace(
            facts,
            name="facts-too",
            splits=replace(facts.splits, train="", rows=(0, 5, 6)),
            trained_on="facts",
        ),
    )


@pytest.fixture(scope="session")
def trained(corpus, shards, tasks, tmp_path_factory) -> Trained:
    """Three results; the masked one is fine-tuned too."""
    from biphase.study.plan import identities, make_plan, save_plan
    from biphase.study.worker import Worker
    from biphase.training.distributed import Ranks
    from biphase.training.options import RuntimeOptions

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
    store = Store(tmp_path_factory.mktemp("trained"))
    store.shards.mkdir(parents=True)
    (store.shards / shards.name).symlink_to(shards)
    known = identities(store)
    plan = make_plan(study, known)
    save_plan(plan, store)
    Worker(
        plan,
        store,
        known,
        Ranks(0, 1, torch.device("cpu")),
        RuntimeOptions(quiet=True, loaders=0),
        wanted=set(plan.jobs),
        evaluated={plan.results["masked"]},
        say=lambda text: None,
    ).work()
    return Trained(store, study, plan.results)


@pytest.fixture(scope="session")
def export(trained, tmp_path_factory):
    """Exports a result by its name, once: `export("masked")` gives the folder."""
    from biphase.export.checkpoint import export_checkpoint
    from biphase.export.folder import find

    folders = {}

    def exported(name: str) -> Path:
        if name not in folders:
            folder = tmp_path_factory.mktemp("exports") / name
            checkpoint = find(trained.results[name], trained.store)
            export_checkpoint(checkpoint, trained.store, folder, onnx=False, say=lambda text: None)
            folders[name] = folder
        return folders[name]

    return exported


@pytest.fixture(scope="session")
def folder(export) -> Path:
    """The exported masked model."""
    return export("masked")


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
        model = model_of_checkpoint(run, trained.results[name], trained.store, Shards.open(shards))
        return model.eval()

    return load
