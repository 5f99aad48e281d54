"""Matrix products whose result is wider than what is multiplied: sums that leave the product unrounded."""

from __future__ import annotations

import torch
from torch import Tensor


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left·right in `dtype`, whatever both are in."""
    if left.dtype == dtype:
        return left @ right
    if _widens(left):
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left·right, inside the product where the device can."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif _widens(left):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _widens(operand: Tensor) -> bool:
    """Can a product of such tensors come out in fp32? NVIDIA's can; AMD's, which call themselves cuda, cannot."""
    return operand.is_cuda and not torch.version.hip
