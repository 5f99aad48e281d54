"""Shared by all tests: one core each, no network, and one tiny tokenized corpus."""

from __future__ import annotations

import os

# Two test processes share two cores; a tiny model gains nothing from threads, and waiting threads cost much.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from common import TINY, sentences, store_with, write_lines
from hub_server import Client, Hub, serving

from biphase import BPE, CLM, WSD, AdamW, Chunks, Corpus, Pretrain, Stage, Study
from biphase.records import encode
from biphase.store import Store, with_checksum, write_json


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A small local corpus with a held-out file."""
    folder = tmp_path_factory.mktemp("text")
    documents = sentences(600)
    for name, some in (("train.jsonl", documents[:540]), ("heldout.jsonl", documents[540:])):
        write_lines(folder / name, ({"text": text} for text in some))
    return Corpus("tiny", str(folder / "train.jsonl"), BPE(320), heldout="heldout.jsonl")


@pytest.fixture(scope="session")
def shards(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenized corpus, as a folder of a store."""
    from biphase.data.tokenize import tokenize

    store = Store(tmp_path_factory.mktemp("store"))
    return tokenize(corpus, store, processes=1, report=lambda text: None)


@pytest.fixture
def store(tmp_path: Path, shards: Path) -> Store:
    """An empty store that already has the tiny corpus."""
    return store_with(shards, tmp_path / "store")


@pytest.fixture
def tiny_run(corpus: Corpus):
    """Makes small runs: `tiny_run("name", Stage(CLM(), 12))`."""

    def make(name: str = "run", *stages: Stage, **fields) -> Pretrain:
        defaults = {
            "start": TINY,
            "corpus": corpus,
            "stages": stages or (Stage(CLM(), 12),),
            "packing": Chunks(32, shortest=4),
            "batch_tokens": 8 * 32,
            "schedule": WSD(peak=3e-3, warmup=2, decay=3),
            "optimizer": AdamW(),
            "heldout_every": 5,
            "heldout_tokens": 512,
            "seed": 7,
        }
        if "start" in fields:
            defaults = {name: defaults[name] for name in ("stages", "heldout_every", "heldout_tokens")}
        return Pretrain(name, **(defaults | fields))

    return make


@pytest.fixture
def study_file(tmp_path: Path):
    """Writes a study to a file that verbs take."""

    def write(study: Study, question: str = "") -> Path:
        path = tmp_path / f"{study.name}.json"
        write_json(path, with_checksum({"study": encode(study), "question": question}))
        return path

    return write


@pytest.fixture(scope="session")
def hub_of_session() -> Iterator[Hub]:
    with serving() as hub:
        yield hub


@pytest.fixture
def hub(hub_of_session: Hub) -> Hub:
    """A hub on this machine, without repositories."""
    hub_of_session.repositories.clear()
    return hub_of_session


@pytest.fixture(scope="session")
def client(hub_of_session: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Another process, which has that hub's address: `client("tokenize", …)`."""
    client = Client(f"http://127.0.0.1:{hub_of_session.port}", tmp_path_factory.mktemp("home"))
    yield client
    client.close()


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Type a command in this process; gives its exit code, what it printed, and what it told."""
    from biphase.cli import main

    def typed(*words):
        monkeypatch.setattr(sys, "argv", ["biphase", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return ended.value.code or 0, said.out, said.err

    return typed


@pytest.fixture
def refused(verb, tmp_path: Path):
    """Type a command that cannot be right: one line, exit code 2, no result in the store `tmp_path / "store"`."""

    def typed(*words: object) -> str:
        store = tmp_path / "store"
        code, out, err = verb(*words, "--store", store)
        assert code == 2, (code, out, err)
        assert "Traceback" not in out + err
        *before, line = err.splitlines()
        assert line.startswith("error: ")
        assert not [other for other in before if other.startswith("error: ")]
        assert len(line) < 1_500
        assert not [*store.glob("checkpoints/*"), *store.glob("trials/*")]
        return line

    return typed
