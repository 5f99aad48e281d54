"""The kernels in torch at their limits: 16 bits and large logits.

Their values and derivatives are compared with transformers' and torch's in models/test_fused.py and test_loss.py.
"""

import pytest
import torch
import torch.nn.functional as F

from biphase.fast import plain

N, WIDTH, EPS = 7, 24, 1e-5


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exact(x):
    """The same numbers in fp64, to be differentiated by torch."""
    return x.double().requires_grad_()


def close(ours, wanted, relative=2e-6):
    assert ours.shape == wanted.shape
    assert (ours.double() - wanted.double()).norm() <= relative * wanted.double().norm()


def norm_of(total, weight):
    return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * weight


LABELS = torch.tensor([3, 0, -100, 10, -1, 5, 3])


def theirs_of(logits):
    wide = exact(logits)
    losses = F.cross_entropy(wide, LABELS.clamp(min=-1), ignore_index=-1, reduction="none")
    return losses.detach(), torch.autograd.grad(losses.sum(), wide)[0]


def test_large_logits_overflow_nothing_and_no_rows_have_no_losses():
    logits = torch.tensor([[500.0, -500.0, 499.0]])
    loss = plain.softmax_error_(logits, torch.tensor([1]))
    assert loss.item() == pytest.approx(1000 + torch.tensor(1 + torch.e**-1).log().item())
    assert logits.isfinite().all()
    assert plain.softmax_error_(torch.empty(0, 11), torch.empty(0, dtype=torch.long)).shape == (0,)


def test_of_tensors_in_16_bits_sums_are_made_in_32_and_results_come_back_in_16():
    x, y, weight = drawn(N, WIDTH).bfloat16(), drawn(N, WIDTH, seed=1).bfloat16(), drawn(WIDTH, seed=2)
    total, normed, scale = plain.add_norm(x, y, weight, EPS)
    assert (total.dtype, normed.dtype, scale.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    # Rounded once at the end: each number is the nearest there is to the true one.
    close(normed, norm_of(total.double(), weight.double()).bfloat16(), relative=0)
    down, _, d_weight = plain.add_norm_backward(y, total, weight, scale, x, again=False)
    assert (down.dtype, d_weight.dtype) == (torch.bfloat16, torch.float32)
    r, w = exact(total), exact(weight)
    d_r, d_w = torch.autograd.grad((norm_of(r, w) * y.double()).sum() + (r * x.double()).sum(), (r, w))
    close(d_weight, d_w)
    close(down, d_r, relative=4e-3)

    gate_up = drawn(N, 2 * WIDTH).bfloat16()
    gate, up = gate_up.double().chunk(2, dim=-1)
    close(plain.swiglu(gate_up), (F.silu(gate) * up).bfloat16(), relative=0)

    logits = 5 * drawn(N, 11).bfloat16()
    losses, grad = theirs_of(logits)
    place = logits.data_ptr()
    close(plain.softmax_error_(logits, LABELS), losses)
    close(logits, grad, relative=4e-3)
    assert logits.data_ptr() == place


def test_turning_back_undoes_turning_wherever_the_gradients_lie():
    """On a CPU the fused trunk needs only one of the two ways, which the kernels of a GPU are compared with."""
    positions, heads, keys, width = torch.tensor([0, 1, 2, 40, 63, 0, 1]), 4, 2, 16
    angles = torch.outer(torch.arange(64), 0.1 ** torch.arange(width // 2))
    qkv, tables = drawn(N, heads + 2 * keys, width), (angles.cos(), angles.sin())
    turned = qkv.clone()
    plain.rotate_(turned, positions, *tables, turned=heads + keys)
    assert torch.equal(turned[:, heads + keys :], qkv[:, heads + keys :]), "values are not turned"
    joined = plain.unrotate(*turned.split([heads, keys, keys], dim=1), positions, *tables)
    plain.rotate_(turned, positions, *tables, turned=heads + keys, back=True)
    for found in (joined, turned):
        torch.testing.assert_close(found, qkv, rtol=1e-5, atol=1e-5)
