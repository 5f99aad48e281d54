"""Padding to a few sizes: every step has one, little is wasted, and what is padding can be felt by nothing."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from biphase import CATALOG
from biphase.finetune.encoder import TuningOptions
from biphase.finetune.families import TextClassification, family_of
from biphase.finetune.trial import RATIO, ROUND, FineTuner, batches_of, buckets_of
from biphase.specs import Classify, Task
from biphase.tasks.collection import Ragged
from biphase.tasks.load import load

NAMES = ["sources-mini", "wikiann-mini", "squadshifts-mini", "scifact-mini"]


# ---------------------------------------------------------------- sizes


class OfLengths(TextClassification):
    """Texts of which only the lengths count."""

    def __init__(self, lengths, batch):
        self.task = Task("t", Classify("{text}", ("a", "b")), "./nowhere", batch=batch, steps=1_000)
        self.size, starts = len(lengths), np.concatenate([[0], np.cumsum(lengths)])
        self.inputs = (Ragged(np.zeros(starts[-1], np.int32), starts),)
        self.targets = np.zeros(self.size, np.int64)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=80), st.integers(1, 40), st.integers(1, 5_000))
def test_sizes_ascend_by_a_tenth_and_each_has_room_for_padding(lengths, batch, budget):
    some = OfLengths(np.array(lengths), batch)
    sizes = buckets_of(some, TuningOptions(torch.device("cpu"), "fp32", True, budget, budget))
    assert sizes.texts == min(batch, len(lengths))
    assert all(width > 0 and width % ROUND == 0 for width in sizes.widths)
    assert all(low < high <= low * RATIO + 2 * ROUND for low, high in pairwise(sizes.widths))
    for tokens in range(1, sizes.widths[-1]):
        width = sizes.width_for(tokens)
        if width:
            assert sizes.spare(width) <= width - tokens <= sizes.spare(width) * sizes.longest


# ---------------------------------------------------------------- places


def test_a_batch_in_one_buffer_is_the_same_batch_wherever_the_buffer_is(two_kinds, options):
    way = options(varlen=True)
    (batch,) = batches_of(two_kinds(train=40, batch=11), 0, 0, way)
    together = batch.gathered(pinned=False)
    elsewhere = together.within(together.buffer.clone())
    for one in (together, elsewhere):
        start, end = one.buffer.data_ptr(), one.buffer.data_ptr() + one.buffer.nbytes
        for wanted, found in zip(batch.tensors, one.tensors, strict=True):
            assert torch.equal(wanted, found)
            assert wanted.dtype == found.dtype
            assert start <= found.data_ptr() <= end
            assert found.data_ptr() != wanted.data_ptr()
    elsewhere.buffer.zero_()
    assert not any(one.any() for one in elsewhere.tensors)


# ---------------------------------------------------------------- padding cannot be felt


@pytest.fixture(scope="module")
def small():
    """The tasks that ship with the package, each read once and cut short."""
    return {name: load(CATALOG[name], documents="judged") for name in NAMES}


def family(name, small, tokenization, made, protocol):
    if name in ("SR", "ML", "MC"):
        return made(name, batch=6)
    task = replace(CATALOG[name], batch=6, steps=3)
    return family_of(task, small[name], replace(tokenization, length=48), protocol=protocol)


def seen_by_mask(batch):
    """The same batch, end to end in one row, for a device without the kernel: a mask says what boundaries said."""
    return replace(batch, inputs=tuple(replace(one, boundaries=None) for one in batch.inputs))


def loss_and_gradients(some, model, batch):
    model.zero_grad(set_to_none=True)
    loss = some.loss_sum(model, seen_by_mask(batch))
    loss.backward()
    return loss.detach(), {name: one.grad.clone() for name, one in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "protocol"), [(name, "standard") for name in (*NAMES, "SR", "ML", "MC")] + [(NAMES[2], "paper")]
)
def test_a_padded_batch_has_the_loss_and_the_gradients_of_the_bare_one_whatever_the_padding(
    name, protocol, small, tokenization, made, encoder, options
):
    some, way = family(name, small, tokenization, made, protocol), options(varlen=True)
    model = FineTuner(encoder(), way).fresh(some, 0)
    (bare,), (wide,) = batches_of(some, 0, 0, way), batches_of(some, 0, 0, way, buckets_of(some, way))
    packed = wide.inputs[0]
    assert wide.width > bare.inputs[0].ids.numel()
    assert wide.count == bare.count
    loss, gradients = loss_and_gradients(some, model, bare)
    again, padded = loss_and_gradients(some, model, wide)
    assert again.item() == pytest.approx(loss.item(), rel=1e-6)
    for part, wanted in gradients.items():
        torch.testing.assert_close(padded[part], wanted, rtol=1e-5, atol=1e-6, msg=part)

    ids, padding = packed.ids.clone(), packed.owner == len(packed)
    ids[0, padding] = torch.arange(1, int(padding.sum()) + 1) % 300
    other = replace(wide, inputs=(replace(packed, ids=ids),))
    perturbed_loss, perturbed = loss_and_gradients(some, model, other)
    assert torch.equal(again, perturbed_loss), "other tokens in the padding change not a bit"
    assert all(torch.equal(padded[part], perturbed[part]) for part in padded)
    ids[0, 0] = ids[0, 0] + 1  # and a token that is none of it does
    assert not torch.equal(again, loss_and_gradients(some, model, other)[0])
