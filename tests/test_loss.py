"""The sliced loss equals torch's, forward and gradient, whatever the slices and the padding."""

import pytest
import torch
import torch.nn.functional as F

from biphase.batch import IGNORE
from biphase.loss import cross_entropy_sum


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
