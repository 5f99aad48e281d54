"""Many workers on one store waste nothing: what one of them has computed or hashed, the others do not repeat."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from common import write_lines

from biphase.data import corpus as corpora
from biphase.data.corpus import HashMemory
from biphase.presets import SIZES
from biphase.specs import BPE, CLM, Classify, Corpus, Finetune, Pretrain, Stage, Study, Task
from biphase.store import Store, read_checked, sha256, with_checksum, write_json
from biphase.study.plan import Plan
from biphase.study.worker import PlanTuner
from biphase.tracking import Tracking
from biphase.training.distributed import Ranks
from biphase.training.options import RuntimeOptions


def at_once(count: int, work: Callable[[int], None]) -> None:
    """Run `work` in so many processes at the same time."""
    context = multiprocessing.get_context("fork")
    begin = context.Barrier(count)

    def run(number: int) -> None:
        begin.wait()
        work(number)

    processes = [context.Process(target=run, args=(number,)) for number in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0


@pytest.fixture
def store(tmp_path) -> Store:
    made = Store(tmp_path / "store")
    made.root.mkdir()
    return made


@pytest.fixture
def files(tmp_path, monkeypatch) -> list[Path]:
    """Four large files, as far as the limits go, and a note of each time one is hashed."""
    monkeypatch.setattr(corpora, "SMALL_BYTES", 1_000)
    monkeypatch.setattr(corpora, "LARGE_BYTES", 1_000)
    monkeypatch.setattr(corpora, "BATCH_BYTES", 8_000)
    monkeypatch.setattr(corpora, "WAIT_SECONDS", 0.05)

    def noted(path: Path) -> str:
        with (tmp_path / "hashed").open("a") as notes:
            notes.write(f"{path.name}\n")
        time.sleep(0.1)
        return sha256(path)

    monkeypatch.setattr(corpora, "sha256", noted)
    return [
        write_lines(tmp_path / "text" / f"{n}.jsonl", ({"text": f"{n} {line}"} for line in range(300)))
        for n in range(4)
    ]


def hashed(files: list[Path]) -> list[str]:
    notes = files[0].parents[1] / "hashed"
    return sorted(notes.read_text().split()) if notes.exists() else []


def test_workers_that_start_at_once_hash_a_corpus_once(files, store):
    corpus = Corpus("text", str(files[0].parent), BPE(300))
    at_once(6, lambda number: corpora.shards_key(corpus, store))
    assert hashed(files) == [path.name for path in files]
    corpora.fingerprints(corpus, store, again=True)  # as tokenizing does, in a later process
    assert len(hashed(files)) == 4
    cache = store.root / "corpora" / "cache.json"
    older = {name: [*entry[:2], entry[2] - 2 * corpora.DAY] for name, entry in read_checked(cache).items()}
    write_json(cache, with_checksum(older))
    corpora.fingerprints(corpus, store)
    assert len(hashed(files)) == 4
    corpora.fingerprints(corpus, store, again=True)
    assert len(hashed(files)) == 8, "a day later the content is read again"
    store.verify = True
    corpora.fingerprints(corpus, Store(store.root), again=True)
    assert len(hashed(files)) == 8
    store.hashed.clear()
    corpora.fingerprints(corpus, store)
    assert len(hashed(files)) == 12, "--verify trusts no one"


def test_writers_of_the_hash_memory_keep_each_others_entries(tmp_path, store):
    def write(number: int) -> None:
        memory = HashMemory(store)
        for each in range(10):
            path = tmp_path / f"{number}-{each}"
            path.write_text(path.name)
            memory.hashes([path])

    at_once(6, write)
    names = {Path(name).name for name in HashMemory(store).entries}
    assert names == {f"{number}-{each}" for number in range(6) for each in range(10)}


def test_workers_compute_a_baseline_once(tmp_path, store):
    task = Task("toys", Classify("{text}", ("a", "b")), str(tmp_path / "toys"))
    run = Pretrain("run", start=SIZES["2m"], corpus="prose", stages=(Stage(CLM(), 5_000),))
    study = Study("s", (run,), Finetune((task,), lrs=(1e-3,), seeds=(0,), protocol="standard"))
    plan = Plan(study, "", {}, {}, {}, 0, {"toys": "0" * 16})
    ranks, options = Ranks(0, 1, torch.device("cpu")), RuntimeOptions(quiet=True)

    def compute():
        with (tmp_path / "computed").open("a") as notes:
            notes.write("once\n")
        time.sleep(0.3)
        return "BM25", {"test": {"ndcg@10": 0.1}}

    tracking = Tracking((), "s", tmp_path / "tracked")

    def recall(number: int) -> None:
        tuner = PlanTuner(
            plan, store, ranks, options, shards=lambda run: None, live=lambda text: None, tracking=tracking
        )
        assert tuner.recall(task, compute) == ("BM25", {"test": {"ndcg@10": 0.1}})

    at_once(4, recall)
    recall(4)
    assert (tmp_path / "computed").read_text() == "once\n"
