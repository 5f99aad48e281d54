"""Reference implementations of the kernels in plain torch. N tokens, d hidden size, f FFN size."""

from __future__ import annotations

import torch
from torch import Tensor


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the residual x + y, its RMS norm times `weight`, and 1 / RMS. (N, d) → (N, d), (N, d), (N,)"""
    total = x if y is None else x + y
    wide = total.float()
    scale = torch.rsqrt(wide.square().mean(-1) + eps)
    return total, (wide * scale[:, None] * weight.float()).to(x.dtype), scale


def add_norm_backward(
    grad: Tensor, total: Tensor, weight: Tensor, scale: Tensor, beside: Tensor | None, *, again: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Backward pass of `add_norm`: return the gradient of the residual, the norm, and the gradient of the weight.

    `grad` is the gradient of the norm; `beside`, the residual's gradient from elsewhere, is added. With `again` the
    norm is recomputed and returned, else None. (N, d) → (N, d), (N, d), (d,)
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
    """Apply RoPE to the first `turned` heads in place, or its inverse with `back`.

    qkv (N, heads, D), tables (positions, D / 2)
    """
    heads = qkv[:, :turned]
    heads.copy_(
        _turned(heads.float(), cos[positions][:, None], sin[positions][:, None] * (-1 if back else 1))
    )


def unrotate(dq: Tensor, dk: Tensor, dv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply inverse RoPE to the gradients of q and k, and join all three.

    (N, H, D), (N, K, D), (N, K, D) → (N, H + 2K, D)
    """
    around = cos[positions][:, None], -sin[positions][:, None]
    back = [_turned(one.float(), *around).to(one.dtype) for one in (dq, dk)]
    return torch.cat([*back, dv], dim=1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.chunk(2, dim=-1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up. (N, 2f) → (N, f)"""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def swiglu_backward_(grad: Tensor, gate_up: Tensor, *, again: bool) -> Tensor | None:
    """Overwrite gate and up with their gradients; with `again`, recompute and return silu(gate) · up, else None.

    (N, f), (N, 2f) → (N, f)
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    above, inner = grad.float(), torch.sigmoid(gate)
    swish = gate * inner
    made = (swish * up).to(gate_up.dtype) if again else None
    slope = inner * (1 + gate * (1 - inner))
    gate_up.copy_(torch.cat([above * up * slope, above * swish], dim=-1))
    return made


def softmax_error_(logits: Tensor, labels: Tensor, z_loss: float = 0.0) -> Tensor:
    """Return −log p(label) of each row, and overwrite the logits with softmax − one-hot. (P, V) → (P,)

    With `z_loss`, this many times the square of the row's log-sum-exp is added to the loss. All is 0 for rows with a
    negative label.
    """
    real = labels >= 0
    asked = labels.clamp(min=0)[:, None]
    wide = logits.float()
    top = wide.logsumexp(-1, keepdim=True)
    losses = (top - wide.gather(1, asked))[:, 0] * real
    error = wide.sub_(top).exp_()
    if z_loss:
        losses += z_loss * top[:, 0].square() * real
        error *= 1 + 2 * z_loss * top
    error.scatter_add_(1, asked, torch.full_like(top, -1.0)).mul_(real[:, None])
    if logits.data_ptr() != error.data_ptr():
        logits.copy_(error)
    return losses
