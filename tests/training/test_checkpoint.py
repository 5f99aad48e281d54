"""Checkpoints: written in the background whole or not at all, read in parts or whole, refused if they do not fit."""

import os
import shutil
import threading
from dataclasses import asdict

import pytest
import torch
from families.tiny import with_head
from safetensors.torch import load_file

from biphase import AdamW, LoRA, Size
from biphase.errors import StoreError
from biphase.models.backbone import LanguageModel, add_adapter, from_scratch
from biphase.store import publish, verify
from biphase.training import checkpoint
from biphase.training.checkpoint import CheckpointRecord, Progress, Saver
from biphase.training.distributed import Placed, Ranks
from biphase.training.optimizer import build, update
from biphase.training.tensors import RowRange

SIZE = Size("tiny", layers=1, hidden=16, heads=2, kv_heads=1, ffn=32, precision="fp32")
KEY = "1" * 32


def saver_of(model, store):
    rows = {name: RowRange.all_of(weight) for name, weight in model.model.named_parameters()}
    placed = Placed("plain", build(model, AdamW()), None, dict(model.named_parameters()), rows)
    return Saver(store, Ranks(0, 1, torch.device("cpu")), model, placed, job="training job")


@pytest.fixture
def model():
    return from_scratch(SIZE, vocab=40, mask_id=3, length=16, seed=1)


@pytest.fixture
def saver(model, store):
    return saver_of(model, store)


def record(key):
    about = {"run": {"kind": "Pretrain"}, "origin_step": 0, "epochs": 0.0}
    progress = asdict(Progress(step=1, next_sample=8))
    return CheckpointRecord(key, about | {"progress": progress}, '{"step": 1, "loss": 2.0}\n')


def take_a_step(model, saver):
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    update(saver.optimizer, rate=0.1, nonfinite=torch.zeros(()))


@pytest.fixture
def slow_disk(monkeypatch):
    """Writing waits until this event is set."""
    gate, plain = threading.Event(), os.fsync

    def sync(handle):
        assert gate.wait(20)
        return plain(handle)

    monkeypatch.setattr(os, "fsync", sync)
    yield gate
    gate.set()


# ---------------------------------------------------------------- writing


def test_training_continues_while_the_copy_is_written_and_published(model, saver, store, slow_disk):
    take_a_step(model, saver)
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    published = []
    saver.begin(record("one"), last=False, then=lambda: published.append("one"))
    take_a_step(model, saver)
    saver.settle()
    folder = store.checkpoints / "one"
    assert not store.has(folder), "nothing looks finished while it is written"
    assert not published
    threading.Timer(0.2, slow_disk.set).start()
    saver.begin(record("two"), last=False)
    assert published == ["one"], "the second waits for the first"
    saver.finish()
    verify(folder)
    saved = load_file(folder / "model.safetensors")
    assert all(torch.equal(saved[name], before[name]) for name in saved)
    assert not torch.equal(saved["model.norm.weight"], model.model.state_dict()["model.norm.weight"])
    assert load_file(folder / "optimizer.safetensors")["step.model.norm.weight"] == 1
    assert not list(store.attempts.iterdir())


def test_an_error_while_writing_is_raised_once_at_the_next_step(saver, store, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    saver.begin(record("one"), last=False)
    saver.unpublished.thread.join()
    with pytest.raises(OSError, match="No space"):
        saver.settle()
    assert not store.has(store.checkpoints / "one")
    assert not list(store.attempts.iterdir())
    saver.settle()


@pytest.mark.parametrize("end", ["abandon", "drop"])
def test_a_discarded_checkpoint_leaves_nothing(saver, store, slow_disk, end):
    saver.begin(record("one"), last=False)
    writing = saver.unpublished.thread
    if end == "abandon":
        slow_disk.set()
    getattr(saver, end)()  # `drop` does not wait for the disk
    assert not list(store.attempts.iterdir())
    slow_disk.set()
    writing.join()
    assert not store.has(store.checkpoints / "one")


@pytest.mark.parametrize("where", ["_host", "threading.Thread.start"])
def test_a_checkpoint_whose_writing_never_began_is_not_published(saver, store, monkeypatch, where):
    saver.begin(record("one"), last=False)
    saver.finish()

    def fails(*parts):
        raise RuntimeError("device error")

    pruned = []
    monkeypatch.setattr(f"biphase.training.checkpoint.{where}", fails)
    with pytest.raises(RuntimeError, match="device error"):
        saver.begin(record("two"), last=True, then=lambda: pruned.append("one"))
    saver.salvage(lost=False)
    assert not store.has(store.checkpoints / "two")
    assert store.has(store.checkpoints / "one")
    assert not pruned
    assert not list(store.attempts.iterdir())


def test_a_checkpoint_is_published_when_its_record_is_known_and_never_without(saver, store):
    """Held-out losses, which the record includes, are measured while the tensors are written."""
    saver.begin(CheckpointRecord("one"), last=True)
    saver.unpublished.thread.join()
    saver.settle()
    assert not store.has(store.checkpoints / "one")
    saver.complete(record("one"))
    assert store.has(store.checkpoints / "one")
    saver.begin(CheckpointRecord("two"), last=True)
    saver.salvage(lost=False)  # an error before the record was known
    assert not store.has(store.checkpoints / "two")
    assert not list(store.attempts.iterdir())


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_an_incomplete_checkpoint_is_not_published(saver, store, file):
    saver.begin(record("one"), last=False)
    saver.unpublished.thread.join()
    (saver.unpublished.folder / file).unlink()
    with pytest.raises(StoreError, match=file):
        saver.settle()
    assert not store.has(store.checkpoints / "one")


def test_weights_are_read_without_the_optimizer_state_which_is_verified_when_it_is_read(saver, store, model):
    saver.begin(record(KEY), last=False)
    saver.finish()
    path = store.checkpoints / KEY / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert checkpoint.load_weights(store, KEY, model).step == 1
    rows = {name: RowRange.all_of(weight) for name, weight in model.model.named_parameters()}
    placed = Placed("plain", saver.optimizer, None, dict(model.named_parameters()), rows)
    with pytest.raises(StoreError, match=path.name):
        checkpoint.load_optimizer_state(store, KEY, placed)


def test_a_suspended_worker_cannot_publish_what_the_removal_of_its_leftovers_has_left(
    saver, store, monkeypatch
):
    """It wakes up while its folder is removed, writes the manifest and publishes: all files, or nothing."""
    folder = store.new_attempt(saver.attempt)
    (folder / "checkpoint.json").write_text("{}")
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)  # the removal has only begun
    saver.remove_leftovers()
    with pytest.raises((OSError, StoreError), match=folder.name):
        publish(folder, store.checkpoints / KEY, {"checkpoint.json": {"bytes": 2, "sha256": ""}})
    assert not (store.checkpoints / KEY).exists()


# ---------------------------------------------------------------- reading

LLAMA, TIED = ("llama", {}), ("llama", {"tie_word_embeddings": True})
SHALLOW = ("llama", {"num_hidden_layers": 1})


def made(kind, seed=0):
    family, fields = kind
    return LanguageModel(with_head(family, seed=seed, **fields))


def saved(model, store):
    saver = saver_of(model, store)
    saver.begin(record(KEY), last=True)
    saver.finish()
    return saver.model.model.state_dict()


@pytest.mark.parametrize("kind", [LLAMA, TIED, ("gpt2", {}), ("bert", {})], ids=str)
def test_a_checkpoint_fills_a_model_of_its_architecture_tied_or_not(kind, store):
    weights, filled = saved(made(kind), store), made(kind, seed=1)
    checkpoint.load_weights(store, KEY, filled)
    assert all(torch.equal(filled.model.state_dict()[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("has", "wants", "tensor"),
    [
        (TIED, LLAMA, "lm_head.weight"),  # saved once; the model must not keep a random head
        (SHALLOW, LLAMA, "model.layers.1"),
        (LLAMA, SHALLOW, "model.layers.1"),
        (LLAMA, None, ""),
    ],
    ids=["untied", "deeper", "shallower", "adapted"],
)
def test_a_checkpoint_of_another_model_is_refused(has, wants, tensor, store):
    saved(made(has), store)
    other = made(wants or has)
    if wants is None:
        add_adapter(other, LoRA(rank=2), seed=1)
    with pytest.raises(StoreError, match=rf"another model \({tensor}"):
        checkpoint.load_weights(store, KEY, other)
