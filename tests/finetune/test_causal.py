"""Fine-tuning that reads in one direction, as a decoder does: a yardstick for what adapting one brings."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from biphase.catalog import TASKS
from biphase.finetune.encoder import packs, per_token
from biphase.finetune.trial import FineTuner, batches_of, score
from biphase.specs import Finetune
from biphase.tasks.encode import Ragged

SPEC = Finetune(TASKS[:1], precision="fp32")
TEXTS = [np.arange(5, 5 + length, dtype=np.int32) for length in (9, 4, 12, 1)]


def ragged(texts):
    return Ragged(np.concatenate(texts), np.cumsum([0, *map(len, texts)]))


def hidden(encoder, texts, setting):
    """The hidden states of each text, as fine-tuning packs them."""
    found = {}
    with torch.no_grad():
        for chosen, packed in packs(ragged(texts), np.arange(len(texts)), setting, 10_000):
            states = encoder(packed.ids, packed.positions, packed.pattern).flatten(0, 1)[packed.at]
            for number, text in enumerate(chosen):
                found[int(text)] = states[packed.owner == number]
    return found


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_a_later_token_is_seen_only_by_those_that_read_both_ways(encoder, setting, causal):
    model, how = encoder().eval(), replace(setting(), causal=causal)
    changed = [text.copy() for text in TEXTS]
    changed[2][7] = 200
    before, after = hidden(model, TEXTS, how), hidden(model, changed, how)
    for other in (0, 1, 3):
        assert torch.equal(before[other], after[other]), "no text sees another"
    assert torch.equal(before[2][:7], after[2][:7]) is causal
    moved = (before[2] - after[2]).abs().amax(-1) > 0
    assert moved[7:].all()
    assert moved[:7].any() != causal


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_packed_texts_are_read_as_each_alone(encoder, setting, causal):
    model, how = encoder().eval(), replace(setting(), causal=causal)
    together = hidden(model, TEXTS, how)
    for number, text in enumerate(TEXTS):
        assert torch.allclose(together[number], hidden(model, [text], how)[0], atol=1e-5)


@pytest.mark.parametrize("varlen", [True, False])
def test_every_pack_of_a_setting_has_its_direction(setting, varlen):
    way = replace(setting(varlen=varlen), causal=True)
    made = [packed for _, packed in packs(ragged(TEXTS), np.arange(4), way, 10)]
    assert len(made) > 1
    assert all(packed.pattern.causal for packed in made)


def test_training_and_scoring_read_in_the_same_direction(encoder, two_kinds, setting):
    some, way = two_kinds(steps=4, batch=8), replace(setting(), causal=True)
    assert all(one.causal for batch in batches_of(some, 0, 0, way) for one in batch.inputs)
    losses = {}
    for causal in (True, False):
        bench = FineTuner(encoder(), replace(setting(), causal=causal))
        model, trained = bench.finetune(some, SPEC, lr=1e-3, seed=0)
        assert trained.finished
        assert len(score(model, some, bench.options)["test"].values["accuracy"]) == 20
        losses[causal] = trained.losses
    assert losses[True] != losses[False]


def test_a_tagger_that_reads_one_way_says_nothing_of_what_comes(encoder, two_kinds, setting):
    some, way = two_kinds(), replace(setting(), causal=True)
    model = FineTuner(encoder(), way).fresh(some, 0).eval()
    model.head = torch.nn.Module()
    model.head.forward = lambda states, packed: states.flatten(0, 1)[packed.at]
    changed = [text.copy() for text in TEXTS]
    changed[0][8] = 200
    one, two = (per_token(model, ragged(texts), way) for texts in (TEXTS, changed))
    assert np.array_equal(one[:8], two[:8])
    assert not np.array_equal(one[8], two[8])
