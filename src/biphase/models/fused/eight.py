"""Matrices whose products are made in 8 bits: forward, and the gradient of their input. Weights learn as before.

Each tensor is scaled as a whole, so that its largest number is the largest that 8 bits can hold; the scale is measured
anew every time, so a run that was stopped needs to remember nothing. Activations and weights have four bits of
exponent, gradients five. The gradient of a weight stays in 16 bits: in 8, its sums over all tokens would suffer most.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from biphase import kernels
from biphase.models.fused.weights import Joined

NEAR, FAR = torch.float8_e4m3fn, torch.float8_e5m2


def without_eight(device: torch.device) -> str:
    """Why products in 8 bits cannot be had on `device`; empty if they can."""
    lacks = kernels.lacking(device)
    if not lacks and torch.cuda.get_device_capability(device) < (8, 9):
        return "this GPU has no units for it"
    return lacks


class JoinedInEight(Joined):
    """As `Joined`, with copies in 8 bits beside those in 16: one for each direction, since products want rows."""

    def __init__(self, *weights: nn.Parameter, dtype: torch.dtype, ops: Any) -> None:
        super().__init__(*weights, dtype=dtype)
        self.ops = ops
        shape = self.copy.shape
        self.forth = torch.empty(shape, dtype=NEAR, device=self.copy.device)
        self.aback = torch.empty(shape[::-1], dtype=NEAR, device=self.copy.device)
        self.scale = torch.ones((), dtype=torch.float32, device=self.copy.device)

    def derive(self) -> None:
        eight, scale = self.ops.to_eight(self.copy, NEAR)
        self.forth.copy_(eight)
        self.aback.copy_(eight.T)
        self.scale.copy_(scale)

    def project(self, x: Tensor) -> Tensor:
        eight, scale = self.ops.to_eight(x, NEAR)
        return self.ops.product_of_eights(eight, self.forth, scale, self.scale, x.dtype)

    def back(self, grad: Tensor) -> Tensor:
        eight, scale = self.ops.to_eight(grad, FAR)
        return self.ops.product_of_eights(eight, self.aback, scale, self.scale, grad.dtype)
