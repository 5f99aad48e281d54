"""Matrices that read the same input, as one: their 16-bit copy, their products, and their gradient in fp32.

Products are made in 16 bits with sums in fp32. A gradient is added to what is there inside the product itself, in the
precision of the weights: nothing is rounded to 16 bits on its way, and no second pass adds it up.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from biphase.kernels.products import add_product, product


class Joined:
    """Weights (out, in) that stand one upon another. `project` is x·Wᵀ, `back` is dy·W, `learn` adds dyᵀ·x.

    With more `rows` than the weights have, zeros stand behind their copy: `whole` has them, `copy` does not.
    """

    def __init__(self, *weights: nn.Parameter, dtype: torch.dtype, rows: int = 0) -> None:
        self.weights = weights
        self.sizes = [len(one) for one in weights]
        first = weights[0]
        # A single matrix that is in the right precision needs no copy.
        filled = sum(self.sizes)
        self.is_weight = len(weights) == 1 and first.dtype == dtype and rows <= filled
        self.whole = (
            first.detach()
            if self.is_weight
            else torch.zeros(max(rows, filled), first.shape[1], dtype=dtype, device=first.device)
        )
        self.copy = self.whole[:filled]

    def stale(self) -> list[tuple[Tensor, Tensor]]:
        """What has to be copied after the weights have changed: (place, weight)."""
        if self.is_weight:
            return []
        return list(zip(self.copy.split(self.sizes), [one.detach() for one in self.weights], strict=True))

    def project(self, x: Tensor) -> Tensor:
        return x @ self.copy.T

    def back(self, grad: Tensor) -> Tensor:
        return grad @ self.copy

    def learn(self, grad: Tensor, x: Tensor) -> None:
        """Add gradᵀ·x to the gradients of the weights that learn."""
        if not any(one.requires_grad for one in self.weights):
            return
        there = self._gradient()
        if there is not None:
            add_product(there, grad.T, x)
            return
        parts = product(grad.T, x, self.weights[0].dtype).split(self.sizes)
        for weight, part in zip(self.weights, parts, strict=True):
            if weight.requires_grad:
                weight.grad = part if weight.grad is None else weight.grad.add_(part)

    def _gradient(self) -> Tensor | None:
        """The gradients of all of them as one tensor, if that is how they lie: they were put there by `learn`."""
        grads = [one.grad for one in self.weights]
        first = grads[0]
        if first is None:
            return None
        whole = first if first._base is None else first._base
        if whole.shape != (sum(self.sizes), first.shape[1]):
            return None
        parts = zip(grads, whole.split(self.sizes), strict=True)
        return (
            whole
            if all(one is not None and one.data_ptr() == part.data_ptr() for one, part in parts)
            else None
        )
