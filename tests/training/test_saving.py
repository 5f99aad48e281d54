"""States written beside the training: what was copied is what is published, whole or not at all."""

import os
import threading
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file

from biphase import AdamW, Size
from biphase.errors import StoreError
from biphase.models.backbone import from_scratch
from biphase.store import verify
from biphase.training.checkpoint import CheckpointRecord, Progress, Saver
from biphase.training.distributed import Placed, Ranks
from biphase.training.optimizer import build, update
from biphase.training.tensors import RowRange

SIZE = Size("tiny", layers=1, hidden=16, heads=2, kv_heads=1, ffn=32, precision="fp32")


@pytest.fixture
def model():
    return from_scratch(SIZE, vocab=40, mask_id=3, length=16, seed=1)


@pytest.fixture
def saver(model, store):
    rows = {name: RowRange.all_of(one) for name, one in model.model.named_parameters()}
    placed = Placed("plain", build(model, AdamW()), None, list(model.parameters()), rows)
    return Saver(store, Ranks(0, 1, torch.device("cpu")), model, placed, job="training job")


def told(key):
    return CheckpointRecord(
        key, {"progress": asdict(Progress(step=1, next_sample=8))}, [{"step": 1, "loss": 2.0}]
    )


def take_a_step(model, saver):
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    update(saver.optimizer, rate=0.1, nonfinite=torch.zeros(()))


@pytest.fixture
def held(monkeypatch):
    """The disk is slow until it is let go."""
    gate, plain = threading.Event(), os.fsync

    def sync(handle):
        assert gate.wait(20)
        return plain(handle)

    monkeypatch.setattr(os, "fsync", sync)
    yield gate
    gate.set()


def test_training_goes_on_and_what_was_copied_is_published(model, saver, store, held):
    take_a_step(model, saver)
    before = {name: one.clone() for name, one in model.model.state_dict().items()}
    published = []
    saver.begin(told("one"), last=False, then=lambda: published.append("one"))
    take_a_step(model, saver)
    saver.settle()
    assert not store.has(store.checkpoints / "one"), "nothing looks finished while it is written"
    assert not published
    held.set()
    saver.finish()
    assert published == ["one"]
    verify(store.checkpoints / "one")
    saved = load_file(store.checkpoints / "one" / "model.safetensors")
    assert all(torch.equal(saved[name], before[name]) for name in saved)
    assert not torch.equal(saved["model.norm.weight"], model.model.state_dict()["model.norm.weight"])
    assert load_file(store.checkpoints / "one" / "optimizer.safetensors")["step.model.norm.weight"] == 1
    assert not list(store.attempts.iterdir())


def test_at_most_one_is_under_way(saver, store, held):
    saver.begin(told("one"), last=False)
    threading.Timer(0.2, held.set).start()
    saver.begin(told("two"), last=False)
    assert store.has(store.checkpoints / "one"), "the second waits for the first"
    saver.finish()
    assert store.has(store.checkpoints / "two")


def test_an_error_while_writing_is_raised_at_the_next_step(saver, store, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    saver.begin(told("one"), last=False)
    saver.under_way.thread.join()
    with pytest.raises(OSError, match="No space left"):
        saver.settle()
    assert not store.has(store.checkpoints / "one")
    assert not list(store.attempts.iterdir())
    saver.settle()  # it was said once


def test_what_is_given_up_leaves_nothing(saver, store, held):
    saver.begin(told("one"), last=False)
    held.set()
    saver.abandon()
    assert not store.checkpoints.exists() or not list(store.checkpoints.iterdir())
    assert not list(store.attempts.iterdir())


def test_an_error_in_a_step_does_not_cost_the_state_before_it(saver, store, held):
    saver.begin(told("one"), last=False)
    held.set()
    saver.salvage(lost=False)
    assert store.has(store.checkpoints / "one")
    saver.begin(told("two"), last=False)
    saver.salvage(lost=True)
    assert not store.has(store.checkpoints / "two"), "who lost the lease publishes nothing more"


def test_what_stands_already_is_not_written_again(saver, store):
    saver.begin(told("one"), last=True)
    saver.finish()
    again = []
    saver.begin(told("one"), last=True, then=lambda: again.append(True))
    assert saver.under_way is None
    assert again


@pytest.mark.parametrize("where", ["_host", "threading.Thread.start"])
def test_what_could_not_be_begun_is_never_taken_for_written(saver, store, monkeypatch, where):
    saver.begin(told("one"), last=False)
    saver.finish()

    def fails(*parts):
        raise RuntimeError("an error of the device that comes to light here")

    pruned = []
    monkeypatch.setattr(f"biphase.training.checkpoint.{where}", fails)
    with pytest.raises(RuntimeError, match="comes to light"):
        saver.begin(told("two"), last=True, then=lambda: pruned.append("one"))
    saver.salvage(lost=False)
    assert not store.has(store.checkpoints / "two")
    assert store.has(store.checkpoints / "one")
    assert not pruned
    assert not list(store.attempts.iterdir())


@pytest.mark.parametrize("lacking", ["checkpoint.json", "metrics.jsonl"])
def test_a_part_of_a_state_is_not_published(saver, store, held, lacking):
    held.set()
    saver.begin(told("one"), last=False)
    saver.under_way.thread.join()
    (saver.under_way.folder / lacking).unlink()
    with pytest.raises(StoreError, match=f"has no {lacking}; it was not published"):
        saver.settle()
    assert not store.has(store.checkpoints / "one")


def test_what_a_killed_process_left_is_removed_by_the_next_one_of_that_piece(saver, store, model):
    left, other = store.new_attempt("checkpoint-training job"), store.new_attempt("checkpoint-another")
    saver.remove_leftovers()
    assert not left.exists()
    assert other.exists()


def test_at_once_is_at_once(saver, store, held):
    saver.begin(told("one"), last=False)
    writing = saver.under_way.thread
    saver.drop()  # while the disk still writes
    assert not list(store.attempts.iterdir())
    held.set()
    writing.join()
    assert not store.has(store.checkpoints / "one")
