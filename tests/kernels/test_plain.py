"""The kernels as on paper: each against torch's own derivatives in fp64, in place where that is promised."""

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from biphase import fast
from biphase.fast import plain
from biphase.fast.trunk import add_product, product

N, WIDTH, EPS = 7, 24, 1e-5
HEADS, KEYS, HEAD = 4, 2, 16


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


def test_a_device_without_kernels_of_its_own_has_the_plain_ones():
    assert fast.of(torch.device("cpu")) is plain
    assert not fast.fast_on(torch.device("cpu"))


@pytest.mark.parametrize("added", [True, False])
def test_a_norm_reads_the_sum_and_equals_transformers_own(added):
    x, y, weight = drawn(N, WIDTH), drawn(N, WIDTH, seed=1) if added else None, drawn(WIDTH, seed=2)
    total, normed, scale = plain.add_norm(x, y, weight, EPS)
    assert torch.equal(total, x + y if added else x)
    theirs = LlamaRMSNorm(WIDTH, EPS)
    theirs.weight.data.copy_(weight)
    close(normed, theirs(total).detach())
    close(scale, total.double().square().mean(-1).add(EPS).rsqrt())
    assert scale.dtype == torch.float32


@pytest.mark.parametrize("again", [True, False], ids=["again", "kept"])
@pytest.mark.parametrize("beside", [True, False], ids=["beside", "alone"])
def test_the_norms_gradients_are_torchs_own_and_the_norm_is_made_again_if_asked(beside, again):
    x, y, weight, grad = (
        drawn(N, WIDTH),
        drawn(N, WIDTH, seed=1),
        drawn(WIDTH, seed=2),
        drawn(N, WIDTH, seed=3),
    )
    past = drawn(N, WIDTH, seed=4) if beside else None
    total, normed, scale = plain.add_norm(x, y, weight, EPS)
    down, made, d_weight = plain.add_norm_backward(grad, total, weight, scale, past, again=again)
    r, w = exact(total), exact(weight)
    loss = (norm_of(r, w) * grad).sum() + (0 if past is None else (r * past).sum())
    d_r, d_w = torch.autograd.grad(loss, (r, w))
    close(down, d_r)
    close(d_weight, d_w)
    if again:
        close(made, normed)
    else:
        assert made is None


def rotary(theta=10_000.0):
    said = {"rope_type": "default", "rope_theta": theta}
    sizes = {"hidden_size": HEADS * HEAD, "num_attention_heads": HEADS, "max_position_embeddings": 64}
    return LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=said))


def turning():
    """Positions that restart; tables of half a head as kernels read them; cosines and sines as transformers does."""
    positions = torch.tensor([0, 1, 2, 40, 63, 0, 1])
    made = rotary()
    whole = made(torch.zeros(()), position_ids=torch.arange(64)[None])
    tables = [one[0, :, : HEAD // 2].contiguous() for one in whole]
    return positions, tables, made(torch.zeros(()), position_ids=positions[None])


def turned(qkv, *, back=False):
    positions, tables, _ = turning()
    ours, both = qkv.clone(), HEADS + KEYS
    assert plain.rotate_(ours, positions, *tables, turned=both, back=back) is None
    assert torch.equal(ours[:, both:], qkv[:, both:]), "values are not turned"
    return ours


def test_queries_and_keys_are_turned_in_place_as_transformers_turns_them():
    _, _, (cos, sin) = turning()
    qkv = drawn(N, HEADS + 2 * KEYS, HEAD)
    q, k, _ = turned(qkv).split([HEADS, KEYS, KEYS], dim=1)
    before = [one.transpose(0, 1)[None] for one in qkv.split([HEADS, KEYS, KEYS], dim=1)]  # (1, H, N, D)
    their_q, their_k = apply_rotary_pos_emb(before[0], before[1], cos, sin)
    close(q, their_q[0].transpose(0, 1))
    close(k, their_k[0].transpose(0, 1))
    assert not torch.allclose(q[1], qkv[1, :HEADS])


def test_turning_back_undoes_turning_and_is_its_gradient():
    positions, tables, (cos, sin) = turning()
    qkv = drawn(N, HEADS + 2 * KEYS, HEAD)
    close(turned(turned(qkv), back=True), qkv)
    grads = drawn(N, HEADS, HEAD, seed=1), drawn(N, KEYS, HEAD, seed=2), drawn(N, KEYS, HEAD, seed=3)
    wide = exact(qkv)
    q, k, v = (one.transpose(0, 1)[None] for one in wide.split([HEADS, KEYS, KEYS], dim=1))
    q, k = apply_rotary_pos_emb(q, k, cos.double(), sin.double())
    loss = sum((one[0].transpose(0, 1) * grad).sum() for one, grad in zip((q, k, v), grads, strict=True))
    wanted = torch.autograd.grad(loss, wide)[0]
    close(plain.unrotate(*grads, positions, *tables), wanted)
    close(turned(torch.cat(grads, dim=1), back=True), wanted)


@pytest.mark.parametrize("again", [True, False], ids=["again", "kept"])
def test_swiglu_and_its_gradient_which_takes_the_place_of_its_input(again):
    gate_up, grad = 3 * drawn(N, 2 * WIDTH), drawn(N, WIDTH, seed=1)
    wide = exact(gate_up)
    gate, up = wide.chunk(2, dim=-1)
    wanted = F.silu(gate) * up
    out = plain.swiglu(gate_up)
    close(out, wanted.detach())
    place = gate_up.data_ptr()
    made = plain.swiglu_backward_(grad, gate_up, again=again)
    if again:
        close(made, wanted.detach())
    else:
        assert made is None
    close(gate_up, torch.autograd.grad((wanted * grad).sum(), wide)[0])
    assert gate_up.data_ptr() == place


LABELS = torch.tensor([3, 0, -100, 10, -1, 5, 3])


def theirs_of(logits):
    wide = exact(logits)
    losses = F.cross_entropy(wide, LABELS.clamp(min=-1), ignore_index=-1, reduction="none")
    return losses.detach(), torch.autograd.grad(losses.sum(), wide)[0]


def test_the_losses_of_rows_and_their_gradient_in_place_of_the_logits():
    logits = 20 * drawn(N, 11)
    losses, grad = theirs_of(logits)
    place = logits.data_ptr()
    ours = plain.softmax_error_(logits, LABELS)
    close(ours, losses)
    close(logits, grad)
    assert logits.data_ptr() == place
    without = LABELS < 0
    assert (ours[without] == 0).all()
    assert (logits[without] == 0).all()


def test_large_logits_overflow_nothing():
    logits = torch.tensor([[500.0, -500.0, 499.0]])
    loss = plain.softmax_error_(logits, torch.tensor([1]))
    assert loss.item() == pytest.approx(1000 + torch.tensor(1 + torch.e**-1).log().item())
    assert logits.isfinite().all()


def test_no_rows_have_no_losses():
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


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_a_product_has_the_precision_that_is_asked_for(dtype, near):
    left, right = drawn(5, 6).to(dtype), drawn(6, 4, seed=1).to(dtype)
    found = product(left, right, torch.float32)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, left.float() @ right.float(), rtol=near, atol=near)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_a_product_is_added_in_place_to_what_is_there(dtype, near):
    total, left, right = drawn(5, 4, seed=2), drawn(5, 6).to(dtype), drawn(6, 4, seed=1).to(dtype)
    wanted, place = total + left.float() @ right.float(), total.data_ptr()
    add_product(total, left, right)
    assert total.data_ptr() == place
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, wanted, rtol=near, atol=near)
