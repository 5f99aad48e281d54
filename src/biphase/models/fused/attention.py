"""Attention forward and backward by name: the kernel is chosen once, and both passes use it.

    cudnn       whole rows, and rows cut in the paper's chunks, whose number never changes: NVIDIA's frontend of cuDNN
    rows        whole rows without that package: cuDNN's kernels through torch, flash where runs must repeat to the bit
    flash       every other kind of segments: documents, short texts
    plain       other devices, and where a mask says who sees whom: torch's attention, differentiated by torch

cuDNN's kernels are about 1.5 times as fast as flash on an H200, but plan anew for each number of segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from biphase.models.attention import Sight
from biphase.models.fused import ragged

aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Look:
    """Who sees whom, for all layers of one forward. B rows of T tokens, N = B·T."""

    kernel: Literal["cudnn", "rows", "flash", "plain"]
    causal: bool
    rows: int
    longest: int
    heads: tuple[int, int]  # of queries, and of keys as of values
    boundaries: Tensor | None = None  # of segments, over all N tokens; None: whole rows
    mask: Tensor | None = None  # plain only
    plan: ragged.Plan | None = None  # cudnn only
    segments: ragged.Segments | None = None  # and where its segments are

    def parts(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys = self.heads
        q, k, v = qkv.split([queries, keys, keys], dim=1)
        return q, k, v


def look_of(
    sight: Sight, rows: int, length: int, device: torch.device, *, heads: tuple[int, int], width: int
) -> Look:
    ends, longest = sight.boundaries, sight.longest or length
    if device.type != "cuda" or sight.mask is not None:
        return Look("plain", sight.causal, rows, length, heads, mask=sight.mask)
    small = rows * length * (heads[0] + 2 * heads[1]) * width < 2**31  # its places are 32 bits wide
    planned = ragged.installed() and small and (ends is None or sight.steady)
    shape = ragged.Shape(
        rows if ends is None else len(ends) - 1,
        longest,
        rows * length,
        *heads,
        width,
        sight.causal,
        torch.cuda.current_device(),
        torch.are_deterministic_algorithms_enabled(),
        whole=ends is None,
    )
    plan = ragged.plan_of(shape) if planned else None
    if plan is None:
        return Look("rows" if ends is None else "flash", sight.causal, rows, longest, heads, ends)
    segments = None if ends is None else ragged.Segments.of(ends, shape)
    return Look("cudnn", sight.causal, rows, longest, heads, ends, plan=plan, segments=segments)


# N tokens, H query heads, K key heads, D head width
def attend(qkv: Tensor, look: Look) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(N, H + 2K, D) → (N, H, D), and what the backward pass needs."""
    ends, most = look.boundaries, look.longest
    match look.kernel:
        case "plain":
            return _plain(*look.parts(qkv), look), ()
        case "cudnn":
            assert look.plan is not None
            out, sums = look.plan.forward(qkv, look.segments)
            return out, (sums,)
        case "flash":
            found = aten._flash_attention_forward(
                *look.parts(qkv), ends, ends, most, most, 0.0, look.causal, False
            )
            return found[0], tuple(found[1:4])
        case "rows":
            parts = [_by_row(one, look) for one in look.parts(qkv)]
            if _by_flash():
                found = aten._scaled_dot_product_flash_attention(*_grouped(*parts), 0.0, look.causal, False)
            else:
                found = aten._scaled_dot_product_cudnn_attention(*parts, None, True, 0.0, look.causal, False)
            return found[0].transpose(1, 2).flatten(0, 1), (found[1], found[6], found[7])


def attend_backward(
    grad: Tensor, qkv: Tensor, out: Tensor, kept: tuple[Tensor, ...], look: Look
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, side by side as they are, or one by one."""
    ends, most = look.boundaries, look.longest
    if look.kernel == "cudnn":
        assert look.plan is not None
        return look.plan.backward(grad, qkv, out, *kept, look.segments)
    q, k, v = look.parts(qkv)
    match look.kernel:
        case "plain":
            with torch.enable_grad():
                inputs = [one.detach().requires_grad_() for one in (q, k, v)]
                again = _plain(*inputs, look)
            dq, dk, dv = torch.autograd.grad(again, inputs, grad)
        case "flash":
            lse, first, second = kept
            dq, dk, dv = aten._flash_attention_backward(
                grad, q, k, v, out, lse, ends, ends, most, most, 0.0, look.causal, first, second
            )
        case "rows":
            lse, first, second = kept
            above, *parts, there = (_by_row(one, look) for one in (grad, q, k, v, out))
            if _by_flash():
                found = aten._scaled_dot_product_flash_attention_backward(
                    above,
                    *_grouped(*parts),
                    there,
                    lse,
                    None,
                    None,
                    most,
                    most,
                    0.0,
                    look.causal,
                    first,
                    second,
                )
                found = [_summed(one, part) for one, part in zip(found, parts, strict=True)]
            else:
                found = aten._scaled_dot_product_cudnn_attention_backward(
                    above, *parts, there, lse, first, second, None, None, None, most, most, 0.0, look.causal
                )
            dq, dk, dv = (one.transpose(1, 2).flatten(0, 1) for one in found)
    return dq, dk, dv


def _by_flash() -> bool:
    """Whole rows by flash: where runs must repeat to the bit, and on GPUs whose rows cuDNN may refuse."""
    return torch.are_deterministic_algorithms_enabled() or torch.cuda.get_device_capability() < (9, 0)


def _by_row(one: Tensor, look: Look) -> Tensor:
    """(N, H, D) → (B, H, T, D)"""
    return one.unflatten(0, (look.rows, -1)).transpose(1, 2)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values for each query head, for a kernel that wants as many of all."""
    times = q.shape[1] // k.shape[1]
    if times == 1:
        return q, k, v
    return q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)


def _summed(grad: Tensor, like: Tensor) -> Tensor:
    """The gradient of heads that were repeated by `_grouped`."""
    return grad if grad.shape == like.shape else grad.unflatten(1, (like.shape[1], -1)).sum(2)


def _plain(q: Tensor, k: Tensor, v: Tensor, look: Look) -> Tensor:
    out = F.scaled_dot_product_attention(
        *(_by_row(one, look) for one in (q, k, v)),
        attn_mask=look.mask,
        is_causal=look.causal and look.mask is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1)
