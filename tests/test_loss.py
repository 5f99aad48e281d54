"""The sliced loss equals torch's, forward and gradient, whatever the slices, the padding and the head."""

import pytest
import torch
import torch.nn.functional as F

from biphase.fast.trunk import cross_entropy_sum
from biphase.objectives import IGNORE
from biphase.protocol import ROW_MULTIPLE, SLICE_LOGITS, SLICE_ROWS, SLICES, padded_vocab, rows_per_slice

ROWS, WIDTH, VOCAB = 37, 16, 53
HEADS = {"plain": (False, None), "bias": (True, None), "cap": (False, 3.0), "bias and cap": (True, 3.0)}
EVERY_HEAD = pytest.mark.parametrize(("biased", "cap"), HEADS.values(), ids=HEADS)


def parts(*, biased=False):
    """Hidden states, weight, bias or None, and labels, of which some are ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, generator=generator, requires_grad=True)
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    labels[::5] = IGNORE
    return hidden, weight, torch.linspace(-2, 2, VOCAB).requires_grad_() if biased else None, labels


def reference(hidden, weight, labels, bias=None, cap=None, z_loss=0.0):
    logits = hidden @ weight.T + (0 if bias is None else bias)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    z = logits[labels != IGNORE].logsumexp(-1).square().sum()
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum") + z_loss * z


def assert_same(loss, expected, *inputs):
    """Compare two losses and their gradients."""
    torch.testing.assert_close(loss, expected)
    inputs = [tensor for tensor in inputs if tensor is not None]
    pairs = zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True)
    for gradient, right in pairs:
        assert gradient.is_contiguous()
        torch.testing.assert_close(gradient, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("slice_rows", [1, 7, 37, 1000])
@EVERY_HEAD
def test_loss_and_gradients_equal_torchs(biased, cap, slice_rows):
    """Also with a z-loss, and with a head that is padded."""
    hidden, weight, bias, labels = parts(biased=biased)
    padded = F.pad(weight.detach(), (0, 0, 0, 11))
    for z_loss in (0.0, 0.1):
        fields = {"bias": bias, "cap": cap, "z_loss": z_loss}
        for head in (None, padded):
            loss = cross_entropy_sum(hidden, weight, labels, slice_rows=slice_rows, head=head, **fields)
            assert_same(loss / 3, reference(hidden, weight, labels, **fields) / 3, hidden, weight, bias)


@pytest.mark.parametrize("slice_rows", [7, 1000])
@EVERY_HEAD
def test_weights_multiply_losses_and_gradients(biased, cap, slice_rows):
    hidden, weight, bias, labels = parts(biased=biased)
    weights = torch.linspace(0.5, 40, ROWS)
    loss = cross_entropy_sum(
        hidden, weight, labels, bias=bias, cap=cap, slice_rows=slice_rows, weights=weights
    )
    each = [
        factor * reference(hidden[row : row + 1], weight, labels[row : row + 1], bias, cap)
        for row, factor in enumerate(weights)
    ]
    assert_same(loss / 30, sum(each) / 30, hidden, weight, bias)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_frozen_tensors_get_no_gradient_and_the_others_the_same(frozen):
    hidden, weight, bias, labels = parts(biased=True)
    tensors = {"hidden": hidden, "weight": weight, "bias": bias}

    def gradients(**tensors):
        cross_entropy_sum(**tensors, labels=labels, cap=3.0, slice_rows=8).backward()
        return {name: tensor.grad for name, tensor in tensors.items()}

    right = gradients(**tensors)
    some = gradients(**{name: one.detach().requires_grad_(name != frozen) for name, one in tensors.items()})
    assert some.pop(frozen) is None
    assert all(torch.equal(gradient, right[name]) for name, gradient in some.items())


def test_no_gradient_of_a_frozen_head_is_ever_computed(monkeypatch):
    """It would be as large as the head: the largest tensor of a step that trains an adapter."""
    hidden, weight, _, labels = parts()
    loss = cross_entropy_sum(hidden, weight.detach(), labels)
    shapes = [tensor.shape for tensor in loss.grad_fn.saved_tensors if tensor is not None]
    assert shapes == [hidden.shape]
    matmuls = []
    monkeypatch.setattr(torch, "mm", lambda *args, **kwargs: matmuls.append(1))
    with torch.no_grad():
        assert not cross_entropy_sum(hidden, weight, labels).requires_grad
    assert not matmuls


def test_ignored_labels_have_no_loss_and_no_gradient():
    hidden, weight, _, labels = parts()
    padded = cross_entropy_sum(torch.cat([hidden, hidden]), weight, F.pad(labels, (0, ROWS), value=IGNORE))
    torch.testing.assert_close(padded, cross_entropy_sum(hidden, weight, labels))
    loss = cross_entropy_sum(hidden, weight, torch.full_like(labels, IGNORE), z_loss=0.1)
    loss.backward()
    assert loss.item() == hidden.grad.abs().sum() == weight.grad.abs().sum() == 0


def test_bf16_matmuls_keep_the_gradient_of_the_head_in_fp32():
    hidden, weight, _, labels = parts()
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy_sum(hidden, weight, labels, slice_rows=8)
    loss.backward()
    assert loss.dtype == weight.grad.dtype == torch.float32
    torch.testing.assert_close(loss, reference(hidden, weight, labels), rtol=0.02, atol=0.5)


# ---------------------------------------------------------------- slices


def test_only_a_gpu_pads_the_vocabulary():
    found = [padded_vocab(vocab, device) for device in ("cuda", "cpu") for vocab in (49_153, 49_152)]
    assert found == [49_216, 49_152, 49_153, 49_152]


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
@pytest.mark.parametrize("vocab", [512, 49_152, 128_256])
@pytest.mark.parametrize("count", [0, 1, 128, 9_830, 52_000])
def test_slices_are_equal_and_small_batches_never_hold_all_their_logits(count, vocab, device):
    rows = rows_per_slice(count, vocab, device)
    number = -(-count // rows)
    assert rows % ROW_MULTIPLE == 0
    assert rows * vocab <= SLICE_LOGITS.get(device, SLICE_LOGITS["cpu"]) or rows == ROW_MULTIPLE
    assert number * rows - count < max(number, 1) * ROW_MULTIPLE  # none is much shorter than the others
    least = SLICES.get(device, SLICES["cpu"])
    if count >= least * SLICE_ROWS:
        assert number >= least
