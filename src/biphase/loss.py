"""Cross-entropy over the labelled positions, computed in slices so that the full logits never exist in memory.

With a vocabulary of 128k the head is 39% of a 210M model's FLOPs and its logits are the largest tensor of the step.
`cross_entropy_sum` therefore runs the head on labelled positions only, one slice of rows at a time, and computes the
gradients of a slice in the forward pass while its logits are in memory. Peak memory is one slice of logits plus one
gradient of the head, and no logit is computed twice. It returns a sum, not a mean: the caller divides by the number of
labels of the whole step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from biphase import fast
from biphase.fast.trunk import add_product, product
from biphase.protocol import rows_of_a_slice, words_of_a_row


class _SlicedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        cap: float | None,
        slice_rows: int,
        head: Tensor,  # the weight in the matmul dtype, zero-padded beyond the vocabulary
        wanted: tuple[bool, bool, bool],  # gradients to compute: of hidden states, weight, bias
    ) -> Tensor:
        ops, words = fast.of(hidden.device), len(weight)
        read = hidden.to(head.dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(read) if wanted[0] else None
        grad_weight: Tensor | None = None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wanted[2] and bias is not None else None
        for start in range(0, len(labels), slice_rows):
            rows = slice(start, start + slice_rows)
            logits = read[rows] @ head.T  # (P, padded V)
            if bias is not None or cap is not None:
                logits = logits.float()
            if bias is not None:
                logits[:, :words] += bias.float()
            slope = None
            if cap is not None:
                logits = logits.div_(cap).tanh_().mul_(cap)
                slope = 1 - (logits / cap).square_() if any(wanted) else None  # derivative of tanh
            total += ops.softmax_error_(logits[:, :words], labels[rows]).sum()
            if any(wanted):
                error = (
                    logits if slope is None else logits.mul_(slope)
                )  # softmax − one-hot, in place of the logits; the padding is still zero
                if grad_bias is not None:
                    grad_bias += error[:, :words].sum(0, dtype=torch.float32)
                error = error.to(head.dtype)
                if grad_hidden is not None:
                    torch.mm(error, head, out=grad_hidden[rows])
                if wanted[1] and grad_weight is None:
                    grad_weight = product(error.T, read[rows], torch.float32)
                elif grad_weight is not None:
                    add_product(grad_weight, error.T, read[rows])
            del logits
        if wanted[1] and grad_weight is None:  # no labels at all
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        if any(wanted):
            grad_weight = None if grad_weight is None else grad_weight[:words]
            ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:  # ty: ignore[incompatible-method-override]
        # In place: only this function uses these tensors, and the head's gradient is the largest one of the step.
        made = [
            None if grad is None else grad.mul_(scale).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*made, None, None, None, None, None)


def cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    cap: float | None = None,
    slice_rows: int = 0,
    head: Tensor | None = None,
) -> Tensor:
    """Return Σ −log p(label) over the rows of `hidden` (P, d), for a head `weight` (V, d) and its `bias` (V,).

    Rows with a negative label are ignored. With `cap`, logits become cap·tanh(logits / cap). `head` is an existing
    16-bit copy of the weight; without it the weight is cast here. Sums are in fp32 whatever dtype the matmuls use.
    """
    kind = hidden.device.type
    rows = slice_rows or rows_of_a_slice(len(labels), weight.shape[0], kind)
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    with torch.autocast(kind, enabled=False):
        # Checked here because gradients are always disabled inside `forward`.
        on = torch.is_grad_enabled()
        wanted = tuple(on and one is not None and one.requires_grad for one in (hidden, weight, bias))
        copy = _as_read(weight.detach(), dtype) if head is None else head
        return _SlicedCrossEntropy.apply(hidden, weight, bias, labels, cap, rows, copy, wanted)


def _as_read(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast the weight to the matmul dtype, padded with zero rows as `words_of_a_row` says."""
    words = words_of_a_row(len(weight), weight.device.type)
    if words == len(weight):
        return weight.to(dtype)
    copy = weight.new_zeros(words, weight.shape[1], dtype=dtype)
    copy[: len(weight)] = weight
    return copy
