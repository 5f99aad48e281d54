"""Only the words that occur are trained, and the model is the one that training all of them gives."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from biphase import CATALOG
from biphase.fast.trunk import FusedTrunk
from biphase.finetune.encoder import per_text
from biphase.finetune.families import family_of
from biphase.finetune.trial import MOST_MICRO, FineTuner, TrainedRows, score, trained_rows
from biphase.specs import AdamW, Classify, Finetune, Task
from biphase.tasks.encode import Ragged
from biphase.tasks.load import Examples, LabelledText
from biphase.training.optimizer import linear_rate

STEPS, RATE, DECAY, SHARE, LAYERS = 20, 2e-3, 0.5, 0.8, 2
UNSOUND = 7  # the step without finite numbers
EMBEDDING = "encoder.trunk.embed_tokens.weight"


def spec_of(**fields):
    """A decay that shows, and a norm that every step is cut down to."""
    return Finetune(
        (CATALOG["sources-mini"],), optimizer=AdamW(**({"weight_decay": DECAY, "clip": 0.05} | fields))
    )


@pytest.fixture
def bench_of(encoder, setting):
    """Makes benches on the fused path, in fp32 on this CPU."""

    def make(*, train_tokens=4_096, **fields):
        bench = FineTuner(encoder(layers=LAYERS), replace(setting(train_tokens=train_tokens), **fields))
        bench.encoder.fused = FusedTrunk(bench.encoder.trunk, torch.float32)
        return bench

    return make


@pytest.fixture
def shouted(reading):
    """Makes a task whose scored texts have words that none of its training texts has."""

    def make():
        def text(number, more=""):
            said = ("the river crosses the garden", "a dog likes two birds")[number % 2]
            return LabelledText(f"{said} {number * 7919 % 10007}{more}", number % 2)

        loud = [text(number, " QUIZ & WAX, 50% OF JAZZ!") for number in range(16)]
        task = Task("loud", Classify("{text}", ("other", "dog")), "./nowhere", batch=8, steps=STEPS)
        return family_of(
            task, Examples([text(n) for n in range(24)], loud[:8], loud[8:]), reading, protocol="paper"
        )

    return make


@pytest.fixture
def stumbling(shouted):
    """The same with a step in between whose numbers are not finite."""
    some = shouted()
    plain = some.loss_sum

    def loss_sum(model, batch):
        loss = plain(model, batch)
        return loss * float("nan") if batch.draw // MOST_MICRO == UNSOUND else loss

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


def decayed(share, *, taken):
    """What is left of a weight that never gets a gradient."""
    rates = [linear_rate(step, STEPS, peak=RATE, warmup=0.1) for step in taken]
    return float(np.prod([1 - rate * share * DECAY for rate in rates]))


# ---------------------------------------------------------------- the same model


@pytest.mark.parametrize("layer_decay", [1.0, SHARE])
@pytest.mark.parametrize("train_tokens", [4_096, 60], ids=["whole", "micro-batches"])
def test_every_weight_is_that_of_training_the_whole_embedding(layer_decay, train_tokens, bench_of, stumbling):
    """Two fine-tunings in a row, clipped, with decay and a step that is skipped."""
    spec = spec_of(layer_decay=layer_decay)
    sparing, full = (bench_of(train_tokens=train_tokens, sparing=one) for one in (True, False))
    for seed in (1, 2):
        (model, trained), (wanted, told) = (
            bench.finetune(stumbling, spec, lr=RATE, seed=seed) for bench in (sparing, full)
        )
        assert trained.skipped == told.skipped == 1
        assert trained.losses == pytest.approx(told.losses, rel=1e-6, nan_ok=True)
        assert_alike(weights(model), weights(wanted))
    assert sparing.grid.words is not None
    assert full.grid.words is None


@pytest.mark.parametrize("layer_decay", [1.0, SHARE])
def test_words_that_are_only_scored_decay_and_nothing_else(layer_decay, bench_of, stumbling):
    unseen = unseen_words(stumbling)
    assert len(unseen) > 3
    bench = bench_of()
    came = bench.weights["trunk.embed_tokens.weight"]
    model, _ = bench.finetune(stumbling, spec_of(layer_decay=layer_decay), lr=RATE, seed=1)
    now = weights(model)[EMBEDDING]
    taken = [step for step in range(STEPS) if step != UNSOUND]
    kept = decayed(layer_decay ** (LAYERS + 1), taken=taken)
    assert kept < 0.999
    torch.testing.assert_close(now[unseen], came[unseen] * kept, rtol=2e-6, atol=0)
    seen = np.unique(stumbling.ids["train"].flat)
    assert ((now[seen] - came[seen] * kept).abs().amax(1) > 1e-4).all(), "a word that occurs was not trained"


def test_words_that_are_only_scored_are_read_as_themselves(bench_of, shouted):
    some = shouted()
    texts = some.ids["test"]
    assert len(unseen_words(some)) > 3
    found = []
    for sparing in (True, False):
        bench = bench_of(sparing=sparing)
        model, _ = bench.finetune(some, spec_of(), lr=RATE, seed=1)
        accuracy = score(model, some, bench.setting)["test"].values["accuracy"]
        found.append((per_text(model, texts, bench.setting), accuracy))
        if sparing:  # and as transformers itself reads the finished weights
            bench.encoder.fused = None
            torch.testing.assert_close(
                per_text(model, texts, bench.setting), found[0][0], rtol=1e-4, atol=1e-5
            )
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-6)
    assert np.array_equal(found[0][1], found[1][1])


def test_a_fine_tuning_that_stops_early_leaves_a_whole_model(bench_of, two_kinds):
    some = two_kinds(train=24, batch=8, steps=STEPS)
    found = []
    for sparing in (True, False):
        asked = iter([False] * 4 + [True])
        bench = bench_of(sparing=sparing)
        model, trained = bench.finetune(
            some, spec_of(), lr=RATE, seed=1, stop=lambda asked=asked: next(asked)
        )
        assert (trained.steps, trained.finished) == (5, False)
        found.append(weights(model))
    assert_alike(*found)


def test_a_fine_tuning_that_failed_leaves_no_trace_in_the_next(bench_of, two_kinds):
    some = two_kinds(train=24, batch=8, steps=6)
    alone = weights(bench_of(train_tokens=60).finetune(some, spec_of(), lr=RATE, seed=1)[0])
    bench = bench_of(train_tokens=60)
    plain, calls = some.loss_sum, []

    def breaks(model, batch):
        calls.append(batch.draw)
        if batch.draw == 2 * MOST_MICRO + 1:  # in the midst of a step: there are gradients
            raise RuntimeError("out of memory")
        return plain(model, batch)

    some.loss_sum = breaks
    with pytest.raises(RuntimeError, match="out of memory"):
        bench.finetune(some, spec_of(), lr=RATE, seed=0)
    assert bench.grid.words.table.grad is not None, "nothing that could be left behind"
    assert bench.encoder.fused.embed is None
    del some.loss_sum
    after = weights(bench.finetune(some, spec_of(), lr=RATE, seed=1)[0])
    assert all(torch.equal(alone[name], after[name]) for name in alone)


# ---------------------------------------------------------------- what is trained


def test_moments_are_kept_of_the_words_that_occur_alone(bench_of, two_kinds):
    some = two_kinds(train=24, batch=8, steps=2)
    bench = bench_of()
    model, _ = bench.finetune(some, spec_of(layer_decay=SHARE), lr=RATE, seed=1)
    grid, whole = bench.grid, bench.encoder.trunk.embed_tokens.weight
    assert whole not in grid.adam.state
    assert whole.grad is None
    occurring = np.union1d(some.ids["train"].flat, [0])
    rows = len(occurring) + 1
    assert len(grid.adam.state[grid.words.table]["exp_avg"]) == rows < len(whole) / 1.3
    [group] = [one for one in grid.adam.param_groups if any(p is grid.words.table for p in one["params"])]
    assert group["share"] == pytest.approx(SHARE ** (LAYERS + 1))
    assert group["weight_decay"] == DECAY
    assert len(grid.parameters) == len(list(model.parameters()))
    assert {id(p) for one in grid.adam.param_groups for p in one["params"]} == {
        id(one) for one in grid.parameters
    }


def test_a_table_gives_each_word_its_own_row_and_padding_too():
    whole = torch.nn.Parameter(torch.arange(40.0).view(10, 4))
    words = TrainedRows(
        whole, [Ragged.from_lists([[7, 3], [3]], np.int32), Ragged.from_lists([[9]], np.int32)]
    )
    assert words.ids.tolist() == [0, 3, 7, 9]
    with torch.no_grad():
        words.table[:-1] = whole[words.ids]
    asked = torch.tensor([9, 0, 3, 3, 7])
    assert torch.equal(words.look_up(asked), whole[asked])


def test_what_cannot_be_told_by_one_number_is_trained_whole(bench_of, encoder, setting, two_kinds):
    some = two_kinds(train=8, batch=8, steps=1)
    assert trained_rows(some, bench_of().encoder) is not None
    assert trained_rows(some, FineTuner(encoder(), setting()).encoder) is None, "transformers' own trunk"
    in_16_bits = FineTuner(encoder(), setting("pure-bf16"))
    in_16_bits.encoder.fused = FusedTrunk(in_16_bits.encoder.trunk, torch.bfloat16)
    assert trained_rows(some, in_16_bits.encoder) is None
    frozen = bench_of()
    frozen.encoder.trunk.embed_tokens.requires_grad_(False)
    assert trained_rows(some, frozen.encoder) is None
