"""The sliced loss equals torch's, forward and gradient, whatever the slices, the padding and the head."""

import pytest
import torch
import torch.nn.functional as F

from biphase.fast.trunk import cross_entropy_sum
from biphase.objectives import IGNORE
from biphase.protocol import ROW_MULTIPLE, SLICE_LOGITS, SLICE_ROWS, SLICES, padded_vocab, rows_per_slice


def parts(rows=37, width=16, vocab=53, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, width, generator=generator, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    labels[::5] = IGNORE
    return hidden, weight, labels


@pytest.mark.parametrize("slice_rows", [1, 7, 37, 1000])
def test_loss_and_gradients_equal_the_plain_ones(slice_rows):
    hidden, weight, labels = parts(dtype=torch.float32)
    ours = cross_entropy_sum(hidden, weight, labels, slice_rows=slice_rows) / 3
    ours_grads = torch.autograd.grad(ours, (hidden, weight))
    plain = F.cross_entropy(hidden @ weight.T, labels, ignore_index=IGNORE, reduction="sum") / 3
    plain_grads = torch.autograd.grad(plain, (hidden, weight))
    torch.testing.assert_close(ours, plain)
    for one, two in zip(ours_grads, plain_grads, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


HEADS = {"bias": (True, None), "cap": (False, 3.0), "bias and cap": (True, 3.0)}


def bias_of(weight):
    return torch.linspace(-2, 2, len(weight)).requires_grad_()


def written_out(hidden, weight, labels, bias, cap):
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")


@pytest.mark.parametrize("slice_rows", [1, 8, 1000])
@pytest.mark.parametrize(("biased", "cap"), HEADS.values(), ids=HEADS)
def test_a_bias_and_a_cap_are_those_of_the_written_out_head(biased, cap, slice_rows):
    hidden, weight, labels = parts(dtype=torch.float32)
    bias = bias_of(weight) if biased else None
    wanted = (hidden, weight, bias) if biased else (hidden, weight)
    ours = cross_entropy_sum(hidden, weight, labels, bias=bias, cap=cap, slice_rows=slice_rows) / 3
    plain = written_out(hidden, weight, labels, bias, cap) / 3
    torch.testing.assert_close(ours, plain)
    for one, two in zip(torch.autograd.grad(ours, wanted), torch.autograd.grad(plain, wanted), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(frozen):
    hidden, weight, labels = parts(dtype=torch.float32)
    everything = {"hidden": hidden, "weight": weight, "bias": bias_of(weight)}

    def gradients(**parts_of):
        cross_entropy_sum(**parts_of, labels=labels, cap=3.0, slice_rows=8).backward()
        return {name: one.grad for name, one in parts_of.items()}

    right = gradients(**everything)
    some = {name: one.detach().requires_grad_(name != frozen) for name, one in everything.items()}
    made = gradients(**some)
    assert made.pop(frozen) is None
    for name, gradient in made.items():
        assert torch.equal(gradient, right[name]), name


def test_no_gradient_of_a_frozen_head_is_ever_made():
    """It would be as large as the head: the largest tensor of a step that trains an adapter."""
    hidden, weight, labels = parts(dtype=torch.float32)
    loss = cross_entropy_sum(hidden, weight.detach(), labels)
    shapes = [one.shape for one in loss.grad_fn.saved_tensors if one is not None]
    assert shapes == [hidden.shape]


@pytest.mark.parametrize(("biased", "cap"), [*HEADS.values(), (False, None)], ids=[*HEADS, "plain"])
def test_words_that_are_not_there_change_nothing(biased, cap):
    """A GPU multiplies with an even number of words; the last are zeros."""
    hidden, weight, labels = parts(dtype=torch.float32)
    bias = bias_of(weight) if biased else None
    wanted = (hidden, weight, bias) if biased else (hidden, weight)
    how = {"bias": bias, "cap": cap, "slice_rows": 8}
    plain = cross_entropy_sum(hidden, weight, labels, **how)
    wider = cross_entropy_sum(hidden, weight, labels, **how, head=F.pad(weight.detach(), (0, 0, 0, 11)))
    torch.testing.assert_close(wider, plain)
    for one, two in zip(torch.autograd.grad(wider, wanted), torch.autograd.grad(plain, wanted), strict=True):
        assert one.is_contiguous()
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "words"), [("cuda", 49_216), ("cpu", 49_153)])
def test_only_a_gpu_makes_words_even(kind, words):
    assert padded_vocab(49_153, kind) == words
    assert padded_vocab(49_152, kind) == 49_152


def test_padding_rows_count_for_nothing():
    hidden, weight, labels = parts(dtype=torch.float32)
    padded = cross_entropy_sum(torch.cat([hidden, hidden]), weight, F.pad(labels, (0, 37), value=IGNORE))
    torch.testing.assert_close(padded, cross_entropy_sum(hidden, weight, labels))


def test_only_ignored_labels_give_zero_and_zero_gradients():
    hidden, weight, labels = parts(dtype=torch.float32)
    loss = cross_entropy_sum(hidden, weight, torch.full_like(labels, IGNORE))
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad is not None
    assert hidden.grad.abs().sum() == 0


def test_bf16_products_keep_fp32_gradients_of_the_head():
    hidden, weight, labels = parts(dtype=torch.float32)
    plain = F.cross_entropy(hidden @ weight.T, labels, ignore_index=IGNORE, reduction="sum")
    with torch.autocast("cpu", torch.bfloat16):
        ours = cross_entropy_sum(hidden, weight, labels, slice_rows=8)
    ours.backward()
    assert ours.dtype == weight.grad.dtype == torch.float32
    torch.testing.assert_close(ours, plain, rtol=0.02, atol=0.5)


def test_no_gradient_is_made_where_none_is_wanted():
    hidden, weight, labels = parts(dtype=torch.float32)
    with torch.no_grad():
        assert not cross_entropy_sum(hidden, weight, labels).requires_grad


def test_measuring_makes_no_gradient_of_the_head(monkeypatch):
    hidden, weight, labels = parts(dtype=torch.float32)
    made = []
    monkeypatch.setattr(torch, "mm", lambda *args, **kwargs: made.append(1))
    with torch.no_grad():
        cross_entropy_sum(hidden, weight, labels)
    assert not made


@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps"])
@pytest.mark.parametrize("vocab", [512, 49_152, 128_256])
@pytest.mark.parametrize("count", [0, 1, 128, 9_830, 52_000])
def test_slices_are_alike_and_small_batches_never_hold_all_their_logits(count, vocab, kind):
    rows = rows_per_slice(count, vocab, kind)
    number = -(-count // rows)
    assert rows % ROW_MULTIPLE == 0
    assert rows * vocab <= SLICE_LOGITS.get(kind, SLICE_LOGITS["cpu"]) or rows == ROW_MULTIPLE
    assert number * rows - count < max(number, 1) * ROW_MULTIPLE  # none is much shorter than the others
    if count >= SLICES * SLICE_ROWS:
        assert number >= SLICES
