"""Only the words that occur are trained, and the model is the one that training all of them gives."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from biphase import CATALOG
from biphase.fast.trunk import FusedTrunk
from biphase.finetune.families import family_of
from biphase.finetune.trial import MOST_MICRO, FineTuner
from biphase.specs import AdamW, Classify, Finetune, Task
from biphase.specs.tasks import LabelledText
from biphase.tasks.load import Examples

STEPS, RATE, DECAY, SHARE, LAYERS = 20, 2e-3, 0.5, 0.8, 2
NONFINITE = 7  # the step without finite numbers
EMBEDDING = "encoder.trunk.embed_tokens.weight"


def spec_of(**fields):
    """A decay that shows, and a norm that every step is cut down to."""
    return Finetune(
        (CATALOG["sources-mini"],), optimizer=AdamW(**({"weight_decay": DECAY, "clip": 0.05} | fields))
    )


@pytest.fixture
def tuner_of(encoder, options):
    """Makes benches on the fused path, in fp32 on this CPU."""

    def make(*, train_tokens=4_096, **fields):
        tuner = FineTuner(encoder(layers=LAYERS), replace(options(train_tokens=train_tokens), **fields))
        tuner.encoder.fused = FusedTrunk(tuner.encoder.trunk, torch.float32)
        return tuner

    return make


@pytest.fixture
def shouted(tokenization):
    """Makes a task whose scored texts have words that none of its training texts has."""

    def make():
        def text(number, more=""):
            said = ("the river crosses the garden", "a dog likes two birds")[number % 2]
            return LabelledText(f"{said} {number * 7919 % 10007}{more}", number % 2)

        loud = [text(number, " QUIZ & WAX, 50% OF JAZZ!") for number in range(16)]
        task = Task("loud", Classify("{text}", ("other", "dog")), "./nowhere", batch=8, steps=STEPS)
        return family_of(
            task, Examples([text(n) for n in range(24)], loud[:8], loud[8:]), tokenization, protocol="paper"
        )

    return make


@pytest.fixture
def stumbling(shouted):
    """The same with a step in between whose numbers are not finite."""
    some = shouted()
    plain = some.loss_sum

    def loss_sum(model, batch):
        loss = plain(model, batch)
        return loss * float("nan") if batch.index // MOST_MICRO == NONFINITE else loss

    some.loss_sum = loss_sum
    return some


def unseen_words(some):
    """Those of the scored texts that are in no training text."""
    return np.setdiff1d(some.ids["test"].flat, np.append(some.ids["train"].flat, 0))


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_alike(one, other):
    assert one.keys() == other.keys()
    for name, value in other.items():
        torch.testing.assert_close(
            one[name], value, rtol=1e-6, atol=1e-7, msg=lambda text, at=name: f"{at}: {text}"
        )


# ---------------------------------------------------------------- the same model


@pytest.mark.parametrize(
    ("layer_decay", "train_tokens", "stop"), [(1.0, 4_096, 99), (SHARE, 4_096, 5), (SHARE, 60, 99)]
)
def test_every_weight_is_that_of_training_the_whole_embedding(
    layer_decay, train_tokens, stop, tuner_of, stumbling
):
    """Two fine-tunings in a row, clipped, with decay, a step that is skipped, and a stop or none."""
    spec = spec_of(layer_decay=layer_decay)
    sparse_rows, full = (tuner_of(train_tokens=train_tokens, sparse_rows=one) for one in (True, False))
    came = sparse_rows.weights["trunk.embed_tokens.weight"]
    unseen, seen = unseen_words(stumbling), np.unique(stumbling.ids["train"].flat)
    assert len(unseen) > 3
    for seed in (1, 2):
        found = []
        for tuner in (sparse_rows, full):
            asked = iter(range(1, 99))
            found.append(
                tuner.finetune(
                    stumbling, spec, lr=RATE, seed=seed, stop=lambda asked=asked: next(asked) >= stop
                )
            )
        (model, trained), (wanted, told) = found
        assert trained.skipped == told.skipped == (stop > STEPS)
        assert trained.steps == told.steps == min(stop, STEPS)
        assert trained.losses == pytest.approx(told.losses, rel=1e-6, nan_ok=True)
        assert_alike(weights(model), weights(wanted))
        moved = (weights(model)[EMBEDDING] - came).abs().amax(1)
        assert (moved[unseen] > 0).all(), "words that are only scored decay"
        assert (moved[seen] > 1e-4).all(), "a word that occurs was not trained"
    assert sparse_rows.grid.rows is not None
    assert full.grid.rows is None


def test_a_fine_tuning_that_failed_leaves_no_trace_in_the_next(tuner_of, two_kinds):
    some = two_kinds(train=24, batch=8, steps=6)
    alone = weights(tuner_of(train_tokens=60).finetune(some, spec_of(), lr=RATE, seed=1)[0])
    tuner = tuner_of(train_tokens=60)
    plain, calls = some.loss_sum, []

    def breaks(model, batch):
        calls.append(batch.index)
        if batch.index == 2 * MOST_MICRO + 1:  # in the midst of a step: there are gradients
            raise RuntimeError("out of memory")
        return plain(model, batch)

    some.loss_sum = breaks
    with pytest.raises(RuntimeError, match="of memory"):
        tuner.finetune(some, spec_of(), lr=RATE, seed=0)
    assert tuner.grid.rows.table.grad is not None, "nothing that could be left behind"
    assert tuner.encoder.fused.embed is None
    del some.loss_sum
    after = weights(tuner.finetune(some, spec_of(), lr=RATE, seed=1)[0])
    assert all(torch.equal(alone[name], after[name]) for name in alone)
