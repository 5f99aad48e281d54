"""Products in fp8: close to the exact ones, made of current weights, and refused without hardware for them."""

import pytest
import torch

from biphase import Size
from biphase.attention import AttentionPattern
from biphase.errors import ModelError
from biphase.fast import plain
from biphase.fast.trunk import FAR, NEAR, FusedTrunk, JoinedFp8
from biphase.models.backbone import from_scratch

TINY = Size("tiny", layers=2, hidden=64, heads=4, kv_heads=2, ffn=96, precision="fp32")


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def apart(one, two):
    return ((one - two).norm() / two.norm()).item()


@pytest.mark.parametrize(("dtype", "limit"), [(NEAR, 0.04), (FAR, 0.08)])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_a_tensor_uses_the_whole_range_of_fp8(dtype, limit, size):
    x = drawn(33, 48) * size
    quantized, scale = plain.to_fp8(x, dtype)
    assert quantized.dtype == dtype
    assert quantized.float().abs().max() == torch.finfo(dtype).max
    assert apart(quantized.float() * scale, x) < limit


def test_zeros_stay_zeros():
    quantized, scale = plain.to_fp8(torch.zeros(4, 4), NEAR)
    assert not (quantized.float() * scale).any()


def matrix():
    weights = [torch.nn.Parameter(drawn(size, 48, seed=size)) for size in (32, 16)]
    made = JoinedFp8(*weights, dtype=torch.float32, ops=plain)
    for place, weight in made.stale():
        place.copy_(weight.detach())
    made.derive()
    return made, weights


def test_products_are_close_and_weight_gradients_exact():
    made, weights = matrix()
    whole = torch.cat([one.detach() for one in weights])
    x, grad = drawn(64, 48), drawn(64, 48, seed=1)
    assert 1e-3 < apart(made.project(x), x @ whole.T) < 0.06
    assert 1e-3 < apart(made.back(grad), grad @ whole) < 0.09
    made.learn(grad, x)
    torch.testing.assert_close(torch.cat([one.grad for one in weights]), grad.T @ x)


def test_fp8_copies_follow_the_weights():
    made, weights = matrix()
    with torch.no_grad():
        weights[1].mul_(3)
    for place, weight in made.stale():
        place.copy_(weight.detach())
    made.derive()
    x, whole = drawn(64, 48), torch.cat([one.detach() for one in weights])
    assert apart(made.project(x), x @ whole.T) < 0.06


def test_an_fp8_trunk_is_close_and_sees_updates():
    model = from_scratch(TINY, vocab=50, mask_id=3, length=32, seed=0)
    ids, positions = torch.randint(4, 50, (2, 32)), torch.arange(32).expand(2, 32)
    exact = model.hidden(ids, positions, AttentionPattern(False)).detach()
    model.encoder.fused = FusedTrunk(model.model.base_model, torch.float32, in_fp8=True)
    hidden = model.hidden(ids, positions, AttentionPattern(False))
    assert 1e-4 < apart(hidden.detach(), exact) < 0.1
    hidden.square().sum().backward()
    assert all(one.grad.isfinite().all() for one in model.model.base_model.parameters())
    with torch.no_grad():
        model.model.base_model.layers[0].mlp.down_proj.weight.mul_(5)
    assert apart(model.hidden(ids, positions, AttentionPattern(False)), hidden) > 0.01


@pytest.mark.parametrize("compiled", [None, True, False])
def test_fp8_is_refused_on_a_cpu(compiled):
    model = from_scratch(TINY, vocab=50, mask_id=3, length=32, seed=0)
    with pytest.raises(ModelError, match=r"precision='fp8' cannot be had \(.*cpu\); say precision='bf16'"):
        model.prepare(torch.device("cpu"), "fp8", compiled=compiled)


def test_a_batch_without_labels_gives_zero_gradients():
    model = from_scratch(TINY, vocab=50, mask_id=3, length=32, seed=0)
    trunk = FusedTrunk(model.model.base_model, torch.float32, in_fp8=True)
    ids, positions = torch.randint(4, 50, (1, 32)), torch.arange(32)[None]
    hidden = trunk(ids, positions, AttentionPattern(False), only=torch.zeros(0, dtype=torch.long))
    assert hidden.shape == (0, 64)
    hidden.sum().backward()
    assert not any(one.grad.any() for one in model.model.base_model.layers.parameters())
