"""One fine-tuning: which examples each step sees, the same bits whenever it is made again, and its precision."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from biphase import CATALOG
from biphase.errors import ModelError
from biphase.finetune.families import FamilyTrainer
from biphase.finetune.trial import FineTuner, batches_of, build_optimizer, examples_of, rows_of, score
from biphase.randomness import permute, salt
from biphase.specs import Classify, Finetune, Task
from biphase.tasks.load import Examples
from biphase.training.optimizer import update

SPEC = Finetune((CATALOG["sources-mini"],))


class Sized(FamilyTrainer):
    """A family of which only the number of examples counts."""

    head = score = trivial = None

    def encode(self, examples, tokenization):
        self.inputs = (examples.train,)


def family(size, batch, **fields):
    task = Task("t", Classify("{text}", ("a", "b")), "./nowhere", batch=batch, **fields)
    return Sized(task, Examples(range(size), [], []), None, protocol="paper")


# ---------------------------------------------------------------- order


@settings(deadline=None, max_examples=60)
@example(20_000, 48, 1, 5)  # the order is computed in blocks
@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 3), st.integers(0, 2**31 - 1))
def test_each_epoch_is_its_permutation_in_batches_that_end_with_it(size, batch, epoch, seed):
    some, steps = family(size, batch), -(-size // batch)
    batches = [rows_of(some, epoch * steps + step, seed).tolist() for step in range(steps)]
    order = permute(torch.arange(size), size, salt(seed, "order", epoch)).tolist()
    assert [row for rows in batches for row in rows] == order
    assert sorted(order) == list(range(size))
    assert [len(rows) for rows in batches[:-1]] == [batch] * (steps - 1)
    assert examples_of(some, epoch * steps + 1) == epoch * size + len(batches[0])
    assert family(size, batch, epochs=3).steps == 3 * steps, "epochs count whole passes"


@settings(deadline=None, max_examples=20)
@given(st.integers(30, 300), st.integers(4, 40), st.integers(0, 2**31 - 2))
def test_the_order_is_a_function_of_seed_and_epoch(size, batch, seed):
    some, steps = family(size, batch), -(-size // batch)
    first, again, second, other = (
        [rows_of(some, epoch * steps + step, number).tolist() for step in range(steps)]
        for epoch, number in ((0, seed), (0, seed), (1, seed), (0, seed + 1))
    )
    assert first == again
    assert first not in (second, other)


# ---------------------------------------------------------------- the same again


def outcome(tuner, some, **fields):
    """All weights and all scores, copied."""
    model, trained = tuner.finetune(some, SPEC, **fields)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    values = {
        (part, name): each
        for part, scored in score(model, some, tuner.options).items()
        for name, each in scored.values.items()
    }
    return weights, values, trained.losses


def same(one, other):
    return (
        all(torch.equal(one[0][name], other[0][name]) for name in one[0])
        and all(np.array_equal(one[1][name], other[1][name]) for name in one[1])
        and one[2] == other[2]
    )


def test_a_repeated_trial_has_the_same_bits_whatever_else_ran(dropping, two_kinds, options):
    some, others = two_kinds(steps=6, batch=8), two_kinds(train=25, steps=4, batch=5)
    tuner = FineTuner(dropping(), options(train_tokens=100))
    first = outcome(tuner, some, lr=1e-3, seed=1)
    outcome(tuner, others, lr=5e-2, seed=3)
    other = outcome(tuner, some, lr=1e-3, seed=2)
    torch.manual_seed(12345)
    assert same(first, outcome(tuner, some, lr=1e-3, seed=1, loaders=1)), "loaded ahead"
    assert same(first, outcome(FineTuner(dropping(), options(train_tokens=100)), some, lr=1e-3, seed=1))
    assert not any(
        torch.equal(first[0][name], other[0][name]) for name in first[0] if "position_ids" not in name
    ), "another seed moves every weight elsewhere"
    assert not same(first, outcome(tuner, some, lr=1.1e-3, seed=1))


def test_dropout_drops_otherwise_in_each_step_and_nothing_when_scored(dropping, two_kinds, options):
    """Steps with the same examples and a rate of nearly 0: only what is dropped differs."""
    some = two_kinds(train=8, steps=3, batch=8)
    model, trained = FineTuner(dropping(), options()).finetune(some, SPEC, lr=1e-12, seed=1)
    assert len(set(trained.losses.values())) == 3
    assert not any(module.training for module in model.modules())


def test_scores_do_not_depend_on_how_texts_are_grouped(encoder, two_kinds, options):
    some = two_kinds(steps=10, batch=8)
    tuner = FineTuner(encoder(), options())
    model, _ = tuner.finetune(some, SPEC, lr=1e-3, seed=1)
    scored = [score(model, some, options(score_tokens=tokens))["test"] for tokens in (1, 100, 9_999)]
    assert all(np.array_equal(one.values["accuracy"], scored[0].values["accuracy"]) for one in scored)


def test_a_model_that_gives_no_numbers_has_no_score(encoder, two_kinds, options):
    """The largest of many NaN is the first: it would pass for a model that guesses."""
    some = two_kinds()
    tuner = FineTuner(encoder(), options())
    model = tuner.fresh(some, 0).eval()
    with torch.no_grad():
        model.encoder.trunk.embed_tokens.weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="finite numbers"):
        score(model, some, tuner.options)


# ---------------------------------------------------------------- precision


@pytest.mark.parametrize(
    ("precision", "dtype"), [("pure-bf16", torch.bfloat16), ("bf16", torch.float32), ("fp32", torch.float32)]
)
def test_weights_and_optimizer_state_have_the_requested_precision(
    precision, dtype, encoder, two_kinds, options
):
    some = two_kinds(steps=3, batch=8)
    tuner = FineTuner(encoder(), options(precision))
    model = tuner.fresh(some, 0).train()
    adam = build_optimizer(model, SPEC.optimizer)
    with tuner.options.autocast():
        loss = some.loss_sum(model, batches_of(some, 0, 0, tuner.options)[0])
    loss.backward()
    update(adam, rate=1e-3, nonfinite=torch.zeros(()))
    assert {one.dtype for one in model.parameters()} == {dtype}
    moments = [state[name] for state in adam.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert {one.dtype for one in moments} == {dtype}
    assert loss.dtype == torch.float32
    tuned, trained = tuner.finetune(some, SPEC, lr=1e-3, seed=0)
    assert trained.skipped == 0
    assert {one.dtype for one in tuned.parameters()} == {dtype}


@torch.no_grad()
def test_in_pure_bf16_positions_keep_their_full_precision(encoder, two_kinds, options):
    """Rotations by angles in bf16 would be wrong by radians at the end of a long text."""
    rotations = dict(encoder(context=2_048).named_buffers())
    tuner = FineTuner(encoder(context=2_048), options("pure-bf16"))
    tuner.fresh(two_kinds(), 0)
    assert rotations
    for name, value in tuner.encoder.named_buffers():
        assert value.dtype == rotations[name].dtype
        assert torch.equal(value, rotations[name]), name
