"""The kernels in Triton: the functions of `plain`, where possible with one read and one write of memory, and AdamW."""

from __future__ import annotations

import math

import torch
import triton  # ty: ignore[import-not-found]  (installed only with a GPU)
import triton.language as tl  # ty: ignore[import-not-found]
from torch import Tensor

# Maximum tokens and elements per program: more elements would not fit its registers.
ROWS, HELD = (
    8,
    2**13,
)
# 8 for each of an H200's 132 SMs; each sums a fixed share of the tokens, so the result is deterministic.
PROGRAMS = 1056


def _share(width: int) -> tuple[int, int]:
    """Return the tokens per program, and the width rounded up to a power of two, as Triton requires."""
    wide = triton.next_power_of_2(width)
    return max(1, min(ROWS, HELD // wide)), wide


@triton.jit
def _add_norm(x, y, weight, total, normed, scales, count, width, eps,
              ADD: tl.constexpr, R: tl.constexpr, W: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    columns = tl.arange(0, W)
    at = rows[:, None] * width + columns[None, :]
    inside = (rows < count)[:, None] & (columns < width)[None, :]
    value = tl.load(x + at, inside, 0.0)
    if ADD:
        value = (value.to(tl.float32) + tl.load(y + at, inside, 0.0).to(tl.float32)).to(value.dtype)
        tl.store(total + at, value, inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / width + eps)
    factor = tl.load(weight + columns, columns < width, 0.0).to(tl.float32)
    tl.store(normed + at, wide * scale[:, None] * factor[None, :], inside)
    tl.store(scales + rows, scale, rows < count)


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    count, width = x.shape
    total = x if y is None else torch.empty_like(x)
    normed, scales = torch.empty_like(x), torch.empty(count, dtype=torch.float32, device=x.device)
    rows, wide = _share(width)
    _add_norm[(triton.cdiv(count, rows),)](
        x, x if y is None else y, weight, total, normed, scales, count, width, eps,
        ADD=y is not None, R=rows, W=wide, num_warps=4,
    )  # fmt: skip
    return total, normed, scales


@triton.jit
def _add_norm_backward(grad, total, weight, scales, beside, down, normed, partial, count, width, per_program,
                       BESIDE: tl.constexpr, AGAIN: tl.constexpr, R: tl.constexpr, W: tl.constexpr):  # fmt: skip
    columns = tl.arange(0, W)
    factor = tl.load(weight + columns, columns < width, 0.0).to(tl.float32)
    own = tl.zeros((W,), tl.float32)
    first = tl.program_id(0).to(tl.int64) * per_program
    for start in range(0, per_program, R):
        rows = first + start + tl.arange(0, R)
        there = (rows < count) & (start + tl.arange(0, R) < per_program)
        at = rows[:, None] * width + columns[None, :]
        inside = there[:, None] & (columns < width)[None, :]
        scale = tl.load(scales + rows, there, 0.0)
        wide = tl.load(total + at, inside, 0.0).to(tl.float32) * scale[:, None]
        upper = tl.load(grad + at, inside, 0.0).to(tl.float32)
        lower = upper * factor[None, :]
        gone = (lower - wide * (tl.sum(lower * wide, 1) / width)[:, None]) * scale[:, None]
        if BESIDE:
            gone += tl.load(beside + at, inside, 0.0).to(tl.float32)
        tl.store(down + at, gone, inside)
        if AGAIN:
            tl.store(normed + at, wide * factor[None, :], inside)
        own += tl.sum(upper * wide, 0)
    tl.store(partial + tl.program_id(0) * width + columns, own, columns < width)


def add_norm_backward(
    grad: Tensor, total: Tensor, weight: Tensor, scale: Tensor, beside: Tensor | None, *, again: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    count, width = total.shape
    rows, wide = _share(width)
    each = max(1, triton.cdiv(triton.cdiv(count, PROGRAMS), rows)) * rows
    programs = triton.cdiv(count, each)
    down, normed = torch.empty_like(total), torch.empty_like(total) if again else None
    partial = torch.empty(programs, width, dtype=torch.float32, device=total.device)
    _add_norm_backward[(programs,)](
        grad, total, weight, scale, total if beside is None else beside, down, down if normed is None else normed,
        partial, count, width, each, BESIDE=beside is not None, AGAIN=again,
        R=rows, W=wide, num_warps=4,
    )  # fmt: skip
    return down, normed, partial.sum(0)


@triton.jit
def _rotate(joined, positions, cos, sin, sign, count, turned, every,
            R: tl.constexpr, G: tl.constexpr, D: tl.constexpr, L: tl.constexpr):  # fmt: skip
    """Rotate the first `turned` heads of every token in place; one program holds both halves of a head."""
    HALF: tl.constexpr = D // 2
    rows, lanes = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, L)
    inside = (rows < count)[:, None] & (lanes < HALF)[None, :]
    table = tl.load(positions + rows, rows < count, 0)[:, None] * HALF + lanes[None, :]
    c, s = tl.load(cos + table, inside, 0.0), tl.load(sin + table, inside, 0.0) * sign
    for number in tl.static_range(G):
        head = tl.program_id(1) * G + number
        if head < turned:
            at = joined + (rows * every + head)[:, None] * D + lanes[None, :]
            one, two = tl.load(at, inside, 0.0).to(tl.float32), tl.load(at + HALF, inside, 0.0).to(tl.float32)
            tl.store(at, one * c - two * s, inside)
            tl.store(at + HALF, two * c + one * s, inside)


@triton.jit
def _unrotate(dq, dk, dv, joined, positions, cos, sin, count, queries, keys,
              R: tl.constexpr, G: tl.constexpr, D: tl.constexpr, L: tl.constexpr):  # fmt: skip
    """Join three gradients to (N, queries + 2 keys, D), with inverse RoPE on those of q and k."""
    HALF: tl.constexpr = D // 2
    rows, lanes = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, L)
    inside = (rows < count)[:, None] & (lanes < HALF)[None, :]
    table = tl.load(positions + rows, rows < count, 0)[:, None] * HALF + lanes[None, :]
    c, s = tl.load(cos + table, inside, 0.0), tl.load(sin + table, inside, 0.0)
    every = queries + 2 * keys
    for number in tl.static_range(G):
        head = tl.program_id(1) * G + number
        if head < every:
            if head < queries:
                read = dq + (rows * queries + head)[:, None] * D + lanes[None, :]
            elif head < queries + keys:
                read = dk + (rows * keys + head - queries)[:, None] * D + lanes[None, :]
            else:
                read = dv + (rows * keys + head - queries - keys)[:, None] * D + lanes[None, :]
            one, two = (
                tl.load(read, inside, 0.0).to(tl.float32),
                tl.load(read + HALF, inside, 0.0).to(tl.float32),
            )
            if head < queries + keys:
                one, two = one * c + two * s, two * c - one * s
            write = joined + (rows * every + head)[:, None] * D + lanes[None, :]
            tl.store(write, one, inside)
            tl.store(write + HALF, two, inside)


TOKENS, HEADS = 32, 4  # tokens and heads per program of the RoPE kernels


def _lanes(width: int) -> int:
    """Return half the head dimension rounded up to a power of two."""
    return triton.next_power_of_2(width // 2)


def rotate_(
    qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, *, turned: int, back: bool = False
) -> None:
    count, every, width = qkv.shape
    _rotate[(triton.cdiv(count, TOKENS), triton.cdiv(turned, HEADS))](
        qkv, positions, cos, sin, -1.0 if back else 1.0, count, turned, every,
        R=TOKENS, G=HEADS, D=width, L=_lanes(width), num_warps=4,
    )  # fmt: skip


def unrotate(dq: Tensor, dk: Tensor, dv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    count, queries, width = dq.shape
    keys = dk.shape[1]
    joined = torch.empty(count, queries + 2 * keys, width, dtype=dq.dtype, device=dq.device)
    dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
    _unrotate[(triton.cdiv(count, TOKENS), triton.cdiv(queries + 2 * keys, HEADS))](
        dq, dk, dv, joined, positions, cos, sin, count, queries, keys,
        R=TOKENS, G=HEADS, D=width, L=_lanes(width), num_warps=4,
    )  # fmt: skip
    return joined


@triton.jit
def _swiglu(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, inside, 0.0).to(tl.float32)
    tl.store(out + row * width + columns, gate * tl.sigmoid(gate) * up, inside)


def swiglu(gate_up: Tensor) -> Tensor:
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(count, width, dtype=gate_up.dtype, device=gate_up.device)
    _swiglu[(count, triton.cdiv(width, 1024))](gate_up, out, width, BLOCK=1024, num_warps=4)
    return out


@triton.jit
def _swiglu_backward(grad, gate_up, made, width, AGAIN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    at = gate_up + row * 2 * width + columns
    gate = tl.load(at, inside, 0.0).to(tl.float32)
    up = tl.load(at + width, inside, 0.0).to(tl.float32)
    above = tl.load(grad + row * width + columns, inside, 0.0).to(tl.float32)
    inner = tl.sigmoid(gate)
    swish = gate * inner
    if AGAIN:
        tl.store(made + row * width + columns, swish * up, inside)
    tl.store(at, above * up * inner * (1 + gate * (1 - inner)), inside)
    tl.store(at + width, above * swish, inside)


def swiglu_backward_(grad: Tensor, gate_up: Tensor, *, again: bool) -> Tensor | None:
    count, width = grad.shape
    made = torch.empty_like(grad) if again else None
    _swiglu_backward[(count, triton.cdiv(width, 1024))](
        grad, gate_up, grad if made is None else made, width, AGAIN=again, BLOCK=1024, num_warps=4
    )
    return made


LOWEST = tl.constexpr(
    -1e30
)  # below every logit but finite, so that the difference of two of them is 0, not NaN
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _softmax_error(logits, labels, losses, words, stride, z_loss,
                   Z: tl.constexpr, U: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Process one row, U blocks at a time. Each lane keeps its own maximum and sum, which are combined at the end.

    Exponentials dominate the cost, so they are powers of 2, one per value in each pass, plus one per U values to
    rescale a lane's sum to a new maximum. Without Z, z_loss is not read and costs nothing.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    start = logits + row * stride
    lanes = tl.arange(0, U)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    highest = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    even = words // (U * BLOCK) * (U * BLOCK)
    for first in range(0, even, U * BLOCK):
        value = tl.load(start + first + lanes).to(tl.float32) * LOG2E
        higher = tl.maximum(highest, tl.max(value, 0))
        total = total * tl.exp2(highest - higher) + tl.sum(tl.exp2(value - higher[None, :]), 0)
        highest = higher
    value = tl.load(start + even + lanes, even + lanes < words, LOWEST).to(tl.float32) * LOG2E
    higher = tl.maximum(highest, tl.max(value, 0))
    total = total * tl.exp2(highest - higher) + tl.sum(tl.exp2(value - higher[None, :]), 0)
    top = tl.max(higher, 0)
    top += tl.log2(tl.sum(total * tl.exp2(higher - top), 0))
    asked = tl.load(start + tl.maximum(label, 0)).to(tl.float32) * LOG2E
    loss = (top - asked) / LOG2E
    share = 1.0
    if Z:  # the derivative of z · lse² is 2 z · lse · softmax
        lse = top / LOG2E
        loss += z_loss * lse * lse
        share = 1.0 + 2.0 * z_loss * lse
    tl.store(losses + row, tl.where(label >= 0, loss, 0.0))
    top = tl.where(label >= 0, top, -LOWEST)  # without a label every power is 0
    tl.debug_barrier()  # the label's logit must be read before it is overwritten
    # Go backwards, since what was read last is still in the cache.
    power = tl.exp2(value - top)
    if Z:
        power *= share
    tl.store(start + even + lanes, power, even + lanes < words)
    for number in range(0, even, U * BLOCK):
        at = start + even - U * BLOCK - number + lanes
        power = tl.exp2(tl.load(at).to(tl.float32) * LOG2E - top)
        if Z:
            power *= share
        tl.store(at, power)
    tl.debug_barrier()  # all powers must be written before the label's is corrected
    power = tl.exp2(asked - top)
    if Z:
        power *= share
    tl.store(start + label, power - 1.0, label >= 0)


def softmax_error_(logits: Tensor, labels: Tensor, z_loss: float = 0.0) -> Tensor:
    losses = torch.empty(len(labels), dtype=torch.float32, device=logits.device)
    if len(labels):
        _softmax_error[(len(labels),)](
            logits, labels, losses, logits.shape[1], logits.stride(0), z_loss,
            Z=z_loss > 0, U=2, BLOCK=2048, num_warps=8,
        )  # fmt: skip
    return losses


# ---------------------------------------------------------------- adamw
# One AdamW step in one pass over memory: clipping, both moments, the weight, and its 16-bit copy.


BLOCK = 1024


@triton.jit
def _adamw(weight, grad, mean, square, copy, rate, steps, shrink, nonfinite, count, log1, log2, keep1, keep2, eps, decay,
           COPY: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    if tl.load(nonfinite) == 0.0:
        lr, step = tl.load(rate).to(tl.float32), tl.load(steps).to(tl.float64)
        # 1 − βⁿ in fp64: in early steps it is the small difference of two numbers near 1.
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
    nonfinite: Tensor,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> None:
    """Update a weight and its optimizer state in place, with its gradient divided by `shrink`, at step `steps`.

    If `nonfinite` is not 0, nothing changes. `copy`, the weight's 16-bit copy, is updated too.
    """
    assert weight.grad is not None
    logs = [math.log(beta) if beta else -math.inf for beta in betas]
    with torch.cuda.device_of(weight):
        _adamw[(triton.cdiv(weight.numel(), BLOCK),)](
            weight, weight.grad, mean, square, weight if copy is None else copy, rate, steps, shrink, nonfinite,
            weight.numel(), *logs, *betas, eps, decay, COPY=copy is not None, SIZE=BLOCK, num_warps=4,
        )  # fmt: skip
