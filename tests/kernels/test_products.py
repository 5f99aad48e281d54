"""Products whose result is wider than what is multiplied."""

import pytest
import torch

from biphase.fast.trunk import add_product, product


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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
