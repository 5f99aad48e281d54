"""A fine-tuning that is stopped goes on from its checkpoint to the same bits, on every path through the encoder."""

import random

import numpy as np
import pytest
import torch

from biphase import CATALOG
from biphase.fast.trunk import FusedTrunk
from biphase.finetune.trial import WORTH_KEEPING, Checkpoints, FineTuner, score
from biphase.specs import AdamW, Finetune
from biphase.store import Store, verify

STEPS, KEY = 14, "f" * 32
SPEC = Finetune((CATALOG["sources-mini"],), optimizer=AdamW(weight_decay=0.5, clip=0.05))


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def some(two_kinds):
    return two_kinds(train=30, steps=STEPS, batch=8)


@pytest.fixture
def tuner_of(encoder, dropping, options):
    """Makes tuners: transformers' own path with dropout, the fused one with its table of words, and pure bf16."""

    def make(path):
        if path == "dropout":
            return FineTuner(dropping(), options(train_tokens=100))
        tuner = FineTuner(encoder(), options("pure-bf16" if path == "pure-bf16" else "fp32"))
        if path == "words":
            tuner.encoder.fused = FusedTrunk(tuner.encoder.trunk, torch.float32)
        return tuner

    return make


def outcome(tuner, some, seed=1, **fields):
    """Weights, predictions, values and losses; None if it was stopped."""
    model, trained = tuner.finetune(some, SPEC, lr=2e-3, seed=seed, **fields)
    if not trained.finished:
        return None
    scored = score(model, some, tuner.options)
    arrays = {
        (part, name): each
        for part, one in scored.items()
        for name, each in (one.values | one.predictions).items()
    }
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return weights, arrays, trained.losses, trained.skipped, trained.examples


def assert_same(one, other):
    assert all(torch.equal(one[0][name], other[0][name]) for name in one[0])
    assert all(np.array_equal(one[1][name], other[1][name]) for name in one[1])
    assert one[2:] == other[2:]


def stop_after(steps):
    asked = iter(range(10**6))
    return lambda: next(asked) >= steps - 1


PATHS = pytest.mark.parametrize("path", ["dropout", "words", "pure-bf16"])


@PATHS
def test_stopped_at_random_steps_it_ends_in_the_same_bits(path, tuner_of, some, store):
    wanted = outcome(tuner_of(path), some)
    chance = random.Random(path)
    slots, found = 0, None
    tuner = tuner_of(path)
    while found is None:
        if chance.random() < 0.5:  # another process; else the same tuner, after another trial on it
            tuner = tuner_of(path)
        else:
            outcome(tuner, some, seed=2)
        found = outcome(
            tuner, some, checkpoints=Checkpoints(store, KEY, steps=3), stop=stop_after(chance.randint(1, 5))
        )
        slots += 1
    assert slots > 2
    assert_same(found, wanted)


@PATHS
def test_killed_it_goes_on_from_the_last_checkpoint_on_the_way(path, tuner_of, some, store):
    wanted = outcome(tuner_of(path), some)

    def killed(step, steps):
        if step == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        outcome(tuner_of(path), some, checkpoints=Checkpoints(store, KEY, steps=4), tell=killed)
    (place,) = store.unfinished.iterdir()
    assert place.name == f"{KEY}-8", "one, the last"
    verify(place)
    seen = []
    again = Checkpoints(store, KEY, steps=100)
    found = outcome(tuner_of(path), some, checkpoints=again, tell=lambda step, steps: seen.append(step))
    assert seen == list(range(9, STEPS + 1))
    assert_same(found, wanted)
    again.discard()
    assert not list(store.unfinished.iterdir())
    assert not list(store.attempts.iterdir())


def test_tensors_are_restored_where_they_lie_and_as_many_threads_as_at_the_beginning(tuner_of, some, store):
    """A captured graph reads the memory that it was captured with; other threads would sum in another order."""
    tuner, threads = tuner_of("words"), torch.get_num_threads()

    def places():
        return [one.data_ptr() for tensors in tuner.grid.tensors() for one in tensors.values()]

    try:
        torch.set_num_threads(1)
        outcome(tuner, some, checkpoints=Checkpoints(store, KEY, steps=5), stop=stop_after(6))
        before = places()
        torch.set_num_threads(2)
        outcome(tuner, some, checkpoints=Checkpoints(store, KEY))
        assert torch.get_num_threads() == 1
        assert places() == before
    finally:
        torch.set_num_threads(threads)


def test_a_trial_of_a_few_seconds_is_not_kept_and_a_lost_one_neither(tuner_of, some, store):
    tuner = tuner_of("words")
    outcome(tuner, some, checkpoints=Checkpoints(store, KEY), stop=stop_after(6))
    assert not store.unfinished.exists(), f"it ran for less than {WORTH_KEEPING} s"
    outcome(tuner, some, checkpoints=Checkpoints(store, KEY, steps=2), lost=stop_after(2))
    assert not store.unfinished.exists(), "another worker has it"
    assert outcome(tuner, some, checkpoints=Checkpoints(store, KEY, seconds=0.0), stop=stop_after(3)) is None
    assert not store.unfinished.exists()
    about = {"step": 3, "losses": [], "skipped": 0, "seconds": WORTH_KEEPING}
    assert Checkpoints(store, KEY).save(*tuner.grid.tensors(), about)


@pytest.mark.parametrize("damage", ["cut", "renamed", "another model", "no numbers"])
def test_a_checkpoint_that_does_not_fit_is_named_and_removed_and_the_trial_starts_again(
    damage, tuner_of, some, store
):
    wanted = outcome(tuner_of("words"), some)
    outcome(tuner_of("words"), some, checkpoints=Checkpoints(store, KEY, steps=5), stop=stop_after(6))
    (place,) = store.unfinished.iterdir()
    tuner = tuner_of("words")
    if damage == "cut":
        file = place / "optimizer.safetensors"
        file.write_bytes(file.read_bytes()[:-8])
    elif damage == "renamed":
        place = place.rename(store.unfinished / f"{KEY}-7")
    elif damage == "another model":  # all vocab rows are trained, as on another kind of device
        tuner, wanted = tuner_of("plain"), outcome(tuner_of("plain"), some)
    else:
        (place / "manifest.json").write_text('{"files": []}')
    said = []
    found = outcome(tuner, some, checkpoints=Checkpoints(store, KEY, steps=100, say=said.append))
    assert_same(found, wanted)
    assert len(said) == 1
    assert str(place) in said[0]
    assert not place.exists()
