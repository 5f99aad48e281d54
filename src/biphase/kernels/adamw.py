"""One step of AdamW in one pass over memory: clipping, both moments, the weight, and its 16-bit copy."""

from __future__ import annotations

import math

import torch
import triton  # ty: ignore[import-not-found]  (there only where there is a GPU)
import triton.language as tl  # ty: ignore[import-not-found]
from torch import Tensor

BLOCK = 1024


@triton.jit
def _adamw(weight, grad, mean, square, copy, rate, steps, shrink, unsound, count, log1, log2, keep1, keep2, eps, decay,
           COPY: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    if tl.load(unsound) == 0.0:
        lr, step = tl.load(rate).to(tl.float32), tl.load(steps).to(tl.float64)
        # 1 − βⁿ, in fp64: early on it is the small difference of two numbers near 1.
        first = (1.0 - tl.exp(step * log1)).to(tl.float32)
        second = tl.sqrt((1.0 - tl.exp(step * log2)).to(tl.float32))
        at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
        inside = at < count
        g = tl.load(grad + at, inside, 0.0).to(tl.float32) / tl.load(shrink)
        m, v = tl.load(mean + at, inside, 0.0), tl.load(square + at, inside, 0.0)
        m += (g - m) * (1.0 - keep1)
        v += (g * g - v) * (1.0 - keep2)
        w = tl.load(weight + at, inside, 0.0) * (1.0 - lr * decay)
        w -= lr / first * m / (tl.sqrt(v) / second + eps)
        tl.store(mean + at, m, inside)
        tl.store(square + at, v, inside)
        tl.store(weight + at, w, inside)
        if COPY:
            tl.store(copy + at, w, inside)


def adamw_(
    weight: Tensor,
    mean: Tensor,
    square: Tensor,
    copy: Tensor | None,
    *,
    steps: Tensor,
    rate: Tensor,
    shrink: Tensor,
    unsound: Tensor,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> None:
    """Change a weight by its gradient divided by `shrink`, its `steps`-th; nothing at all where `unsound` is not 0."""
    assert weight.grad is not None
    logs = [math.log(beta) if beta else -math.inf for beta in betas]
    with torch.cuda.device_of(weight):
        _adamw[(triton.cdiv(weight.numel(), BLOCK),)](
            weight, weight.grad, mean, square, weight if copy is None else copy, rate, steps, shrink, unsound,
            weight.numel(), *logs, *betas, eps, decay, COPY=copy is not None, SIZE=BLOCK, num_warps=4,
        )  # fmt: skip
