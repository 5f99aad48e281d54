"""The kernels in torch, as they would be written on paper. N tokens, d wide, f inner width."""

from __future__ import annotations

import torch
from torch import Tensor


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The residual x + y, its RMS norm times `weight`, and 1 / RMS. (N, d) → (N, d), (N, d), (N,)"""
    total = x if y is None else x + y
    wide = total.float()
    scale = torch.rsqrt(wide.square().mean(-1) + eps)
    return total, (wide * scale[:, None] * weight.float()).to(x.dtype), scale


def add_norm_backward(
    grad: Tensor, total: Tensor, weight: Tensor, scale: Tensor, beside: Tensor | None, *, again: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """From the gradient of the norm: that of the residual, with what came `beside` the norm; the norm `again`, if it was
    not kept; and that of the weight. (N, d) → (N, d), (N, d), (d,)
    """
    wide, upper, factor = total.float() * scale[:, None], grad.float(), weight.float()
    lower = upper * factor
    down = (lower - wide * (lower * wide).mean(-1, keepdim=True)) * scale[:, None]
    if beside is not None:
        down = down + beside.float()
    normed = (wide * factor).to(total.dtype) if again else None
    return down.to(total.dtype), normed, (upper * wide).sum(0)


def rotate_(
    qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, *, turned: int, back: bool = False
) -> None:
    """Turn the first `turned` heads by their positions, or `back`, in place. (N, heads, D), tables (positions, D / 2)"""
    heads = qkv[:, :turned]
    heads.copy_(
        _turned(heads.float(), cos[positions][:, None], sin[positions][:, None] * (-1 if back else 1))
    )


def unrotate(dq: Tensor, dk: Tensor, dv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn gradients back and lay them side by side. (N, H, D), (N, K, D), (N, K, D) → (N, H + 2K, D)"""
    around = cos[positions][:, None], -sin[positions][:, None]
    back = [_turned(one.float(), *around).to(one.dtype) for one in (dq, dk)]
    return torch.cat([*back, dv], dim=1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.chunk(2, dim=-1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up. (N, 2f) → (N, f)"""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def swiglu_backward_(grad: Tensor, gate_up: Tensor, *, again: bool) -> Tensor | None:
    """Puts the gradients of gate and up in their place; gives silu(gate) · up `again`, if it was not kept.

    (N, f), (N, 2f) → (N, f)
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    above, inner = grad.float(), torch.sigmoid(gate)
    swish = gate * inner
    made = (swish * up).to(gate_up.dtype) if again else None
    slope = inner * (1 + gate * (1 - inner))
    gate_up.copy_(torch.cat([above * up * slope, above * swish], dim=-1))
    return made


def softmax_error_(logits: Tensor, labels: Tensor) -> Tensor:
    """−log p(label) of each row, and softmax − one-hot in place of the logits. Rows without a label get 0. (P, V) → (P,)"""
    real = labels >= 0
    asked = labels.clamp(min=0)[:, None]
    wide = logits.float()
    top = wide.logsumexp(-1, keepdim=True)
    losses = (top - wide.gather(1, asked))[:, 0] * real
    error = wide.sub_(top).exp_()
    error.scatter_add_(1, asked, torch.full_like(top, -1.0)).mul_(real[:, None])
    if logits.data_ptr() != error.data_ptr():
        logits.copy_(error)
    return losses


def to_fp8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor in 8 bits, its largest number as large as they can hold, and what it was divided by."""
    most = torch.finfo(dtype).max
    if not x.numel():
        return x.to(dtype), torch.ones((), device=x.device)
    scale = (x.abs().amax().float() / most).clamp(min=1e-12)
    return (x.float() / scale).clamp(-most, most).to(dtype), scale


def fp8_product(left: Tensor, right: Tensor, by_left: Tensor, by_right: Tensor, dtype: torch.dtype) -> Tensor:
    """left·rightᵀ, both multiplied by what they were divided by."""
    return ((left.float() * by_left) @ (right.float() * by_right).T).to(dtype)
