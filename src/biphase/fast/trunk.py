"""The blocks of EuroBERT and Llama with a hand-written forward and backward pass: `FusedTrunk`.

    r += y ; n = norm(r) ; q k v = n·W ; RoPE ; attention ; y = a·W
    r += y ; n = norm(r) ; g u = n·W  ; h = silu(g)·u ;     y = h·W

Each line of element-wise work is one kernel. In small batches the norms and h are not kept but recomputed in the
backward pass, which reads their inputs anyway; a block then keeps r twice, q k v, a, and g u. r and y are passed
between blocks, and the next block adds them. If hidden states are needed at some tokens only, as for a masked
objective, the last block computes its second half for those alone. Weights are transformers' own, read through 16-bit
copies; their gradients are written directly.

`Joined` holds matrices that read the same input as one: their 16-bit copy, their products, and their gradient. Matmuls
are in 16 bits with sums in fp32. A gradient is accumulated inside the matmul in the precision of the weights, so it is
never rounded to 16 bits and needs no second pass.

`cross_entropy_sum` is the loss over the labelled positions, computed in slices so that the full logits never exist in
memory. With a vocabulary of 128k the head is 39% of a 210M model's FLOPs and its logits are the largest tensor of the
step. The head therefore runs on labelled positions only, one slice of rows at a time, and the gradients of a slice are
computed in the forward pass while its logits are in memory. Peak memory is one slice of logits plus one gradient of the
head, and no logit is computed twice. It returns a sum, not a mean: the caller divides by the number of labels of the
whole step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from biphase import fast
from biphase.attention import (
    AttentionCall,
    AttentionPattern,
    attention_call,
    fused_attend,
    fused_attend_backward,
)
from biphase.protocol import RECOMPUTE_TOKENS, padded_vocab, rows_per_slice, supported_head_width


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return left·right in `dtype`; the result is not rounded to the dtype of the inputs if the device allows."""
    if left.dtype == dtype:
        return left @ right
    if _widens(left):
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute total += left·right, inside the matmul if the device supports it."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif _widens(left):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _widens(operand: Tensor) -> bool:
    """Return whether a 16-bit matmul can output fp32: on NVIDIA GPUs, but not on AMD's (also device type "cuda")."""
    return operand.is_cuda and not torch.version.hip


# ---------------------------------------------------------------- weights


class Joined:
    """Weights (out, in) concatenated along `out`. `project` is x·Wᵀ, `back` is dy·W, `learn` adds dyᵀ·x.

    If `rows` exceeds the weights' rows, the copy is padded with zero rows: `whole` includes them, `copy` does not.
    """

    def __init__(self, *weights: nn.Parameter, dtype: torch.dtype, rows: int = 0) -> None:
        self.weights = weights
        self.sizes = [len(weight) for weight in weights]
        first = weights[0]
        # A single matrix in the right precision needs no copy.
        filled = sum(self.sizes)
        self.is_weight = len(weights) == 1 and first.dtype == dtype and rows <= filled
        self.whole = (
            first.detach()
            if self.is_weight
            else torch.zeros(max(rows, filled), first.shape[1], dtype=dtype, device=first.device)
        )
        self.copy = self.whole[:filled]

    def stale(self) -> list[tuple[Tensor, Tensor]]:
        """Return the pairs (copy, weight) to copy after the weights have changed."""
        if self.is_weight:
            return []
        return list(
            zip(self.copy.split(self.sizes), [weight.detach() for weight in self.weights], strict=True)
        )

    def project(self, x: Tensor) -> Tensor:
        return x @ self.copy.T

    def back(self, grad: Tensor) -> Tensor:
        return grad @ self.copy

    def learn(self, grad: Tensor, x: Tensor) -> None:
        """Add gradᵀ·x to the gradients of the trainable weights."""
        if not any(weight.requires_grad for weight in self.weights):
            return
        joined = self._gradient()
        if joined is not None:
            add_product(joined, grad.T, x)
            return
        parts = product(grad.T, x, self.weights[0].dtype).split(self.sizes)
        for weight, part in zip(self.weights, parts, strict=True):
            if weight.requires_grad:
                weight.grad = part if weight.grad is None else weight.grad.add_(part)

    def _gradient(self) -> Tensor | None:
        """Return all gradients as one tensor if they are views of one, as `learn` creates them, else None."""
        grads = [weight.grad for weight in self.weights]
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


# ---------------------------------------------------------------- trunk


FAMILIES = ("EuroBertModel", "LlamaModel")
ROTATIONS = ("default", "linear", "llama3")  # rope types whose angles depend on the position alone


def refusal(trunk: Any) -> str:
    """Return why a backbone is not supported by `FusedTrunk`; "" if it is."""
    name, config = type(trunk).__name__, trunk.config
    if name not in FAMILIES:
        return f"{name} is not one of {', '.join(FAMILIES)}"
    linear = [
        module
        for block in trunk.layers
        for part in (block.self_attn, block.mlp)
        for module in part.children()
        if any(True for _ in module.parameters())
    ]
    if any(type(module) is not nn.Linear or module.bias is not None for module in linear):
        return "its matrices have biases or adapters"
    if config.hidden_act != "silu" or trunk.rotary_emb.rope_type not in ROTATIONS:
        return "its activation or its positions are of another kind"
    width = trunk.layers[0].self_attn.head_dim
    if not supported_head_width(width):
        return f"its heads are {width} wide"
    return ""


class TrunkBlock:
    """The weights of one block."""

    def __init__(self, block: Any, dtype: torch.dtype) -> None:
        attention, mlp, joined = block.self_attn, block.mlp, partial(Joined, dtype=dtype)
        self.qkv = joined(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        self.out = joined(attention.o_proj.weight)
        self.gate_up = joined(mlp.gate_proj.weight, mlp.up_proj.weight)
        self.down = joined(mlp.down_proj.weight)
        self.norms = block.input_layernorm, block.post_attention_layernorm
        self.width = attention.head_dim
        self.heads = len(attention.q_proj.weight) // self.width
        self.keys = len(attention.k_proj.weight) // self.width

    @property
    def matrices(self) -> tuple[Joined, ...]:
        return self.qkv, self.out, self.gate_up, self.down

    @property
    def weights(self) -> list[nn.Parameter]:
        """The weights of all matrices."""
        return [weight for matrix in self.matrices for weight in matrix.weights]


@dataclass(frozen=True)
class ForwardContext:
    """What all blocks of one forward pass share."""

    call: AttentionCall
    positions: Tensor  # (N,)
    tables: tuple[Tensor, Tensor]
    ops: Any
    lean: bool  # recompute norms and h in the backward pass instead of keeping them
    only: Tensor | None = None  # (P,) tokens whose hidden states are needed, for the last block


class _BlockFunction(torch.autograd.Function):
    """One block: r, y → r, y

    The matrices' weights may be inputs too, though their gradients are written directly: so autograd knows whether a
    block is trained, and when the gradients of a weight are complete.
    """

    @staticmethod
    def forward(
        ctx: Any,
        r: Tensor,
        y: Tensor | None,
        first: Tensor,
        second: Tensor,
        block: TrunkBlock,
        how: ForwardContext,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ops, eps = how.ops, block.norms[0].variance_epsilon
        r1, n1, s1 = ops.add_norm(r, y, first, eps)
        qkv = block.qkv.project(n1).unflatten(-1, (-1, block.width))  # (N, H + 2K, D)
        ops.rotate_(qkv, how.positions, *how.tables, turned=block.heads + block.keys)
        a, kept = fused_attend(qkv, how.call)
        seen, r = (a, r1) if how.only is None else (a[how.only], r1[how.only])
        r2, n2, s2 = ops.add_norm(r, block.out.project(seen.flatten(1)), second, eps)
        gate_up = block.gate_up.project(n2)
        h = ops.swiglu(gate_up)
        y = block.down.project(h)
        ctx.block, ctx.how, ctx.added = block, how, ctx.needs_input_grad[1]
        made = (None, None, None) if how.lean else (n1, n2, h)
        ctx.save_for_backward(r1, s1, first, qkv, a, r2, s2, second, gate_up, *made, *kept)
        return r2, y

    @staticmethod
    def backward(ctx: Any, dr: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:  # ty: ignore[incompatible-method-override]
        block, how = ctx.block, ctx.how
        ops, again = how.ops, how.lean
        r1, s1, first, qkv, a, r2, s2, second, gate_up, n1, n2, h, *kept = ctx.saved_tensors
        # r and y have the same gradient, since the next block adds them first.
        made = ops.swiglu_backward_(block.down.back(dy), gate_up, again=again)
        block.down.learn(dy, made if again else h)
        dr, made, d_second = ops.add_norm_backward(
            block.gate_up.back(gate_up), r2, second, s2, dr, again=again
        )
        block.gate_up.learn(gate_up, made if again else n2)
        del made, gate_up
        block.out.learn(dr, (a if how.only is None else a[how.only]).flatten(1))
        da = block.out.back(dr).unflatten(-1, (-1, block.width))
        if how.only is not None:  # the other tokens have no gradient
            da = torch.zeros_like(a).index_copy_(0, how.only, da)
            dr = torch.zeros_like(r1).index_copy_(0, how.only, dr)
        below = fused_attend_backward(da, qkv, a, tuple(kept), how.call)
        if isinstance(below, Tensor):
            ops.rotate_(below, how.positions, *how.tables, turned=block.heads + block.keys, back=True)
        else:
            below = ops.unrotate(*below, how.positions, *how.tables)
        below = below.flatten(1)
        dr, made, d_first = ops.add_norm_backward(block.qkv.back(below), r1, first, s1, dr, again=again)
        block.qkv.learn(below, made if again else n1)
        # As many as the inputs, or more: autograd ignores what is left over.
        return dr, dr if ctx.added else None, d_first, d_second, None, None, *(None for _ in block.weights)


class _LastNorm(torch.autograd.Function):
    """The final norm: r, y → norm(r + y)"""

    @staticmethod
    def forward(ctx: Any, r: Tensor, y: Tensor, weight: Tensor, eps: float, ops: Any) -> Tensor:
        total, n, s = ops.add_norm(r, y, weight, eps)
        ctx.ops = ops
        ctx.save_for_backward(total, weight, s)
        return n

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # ty: ignore[incompatible-method-override]
        total, weight, s = ctx.saved_tensors
        dr, _, d_weight = ctx.ops.add_norm_backward(grad.contiguous(), total, weight, s, None, again=False)
        return dr, dr, d_weight, None, None


class FusedTrunk:
    """Computes a transformers backbone with our kernels: (B, T) ids → (B, T, d). Holds only copies of its weights."""

    def __init__(self, trunk: Any, dtype: torch.dtype = torch.bfloat16) -> None:
        self.trunk, self.dtype = trunk, dtype
        self.device = trunk.embed_tokens.weight.device
        self.ops = fast.of(self.device)
        self.blocks = [TrunkBlock(block, dtype) for block in trunk.layers]
        self.weight_copies: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.tables: tuple[Tensor, Tensor]
        self.seen: tuple[int, ...] = ()  # version counters of the tensors that copies were made from
        # Ids → embeddings, if another table than the backbone's own is trained in its place.
        self.embed: Callable[[Tensor], Tensor] | None = None
        self.watch(*(matrix for block in self.blocks for matrix in block.matrices))

    def watch(self, *matrices: Joined) -> None:
        """Add matrices whose copies are to be refreshed when their weights change."""
        self.seen = ()
        for matrix in matrices:
            for copy, weight in matrix.stale():
                self.weight_copies.append(copy)
                self.weights.append(weight)

    def copies(self) -> dict[int, Tensor]:
        """Return the 16-bit copies by the address of the weight."""
        return {
            weight.data_ptr(): copy for weight, copy in zip(self.weights, self.weight_copies, strict=True)
        }

    def refresh(self, copied: bool = False) -> None:
        """Update copies and rotation tables after the weights or the rope base changed.

        `copied` says that the 16-bit copies are up to date.
        """
        with torch.no_grad():
            if self.weight_copies and not copied:
                torch._foreach_copy_(self.weight_copies, self.weights)
            if not self.seen or self.seen[-1] != self._versions()[-1]:
                self.tables = self._rotations()
        self.seen = self._versions()

    def _versions(self) -> tuple[int, ...]:
        turned = next(iter(self.trunk.rotary_emb.buffers()))
        return tuple(tensor._version for tensor in (*self.weights, turned))

    def _rotations(self) -> tuple[Tensor, Tensor]:
        longest = torch.arange(self.trunk.config.max_position_embeddings, device=self.device)[None]
        wide = torch.zeros((), dtype=torch.float32, device=self.device)
        cos, sin = self.trunk.rotary_emb(wide, position_ids=longest)
        half = cos.shape[-1] // 2
        return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()

    def _own_embedding(self, ids: Tensor) -> Tensor:
        own = self.trunk.embed_tokens
        return F.embedding(ids, own.weight, own.padding_idx)

    def __call__(
        self, ids: Tensor, positions: Tensor, pattern: AttentionPattern, *, only: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states of all tokens, or of the tokens `only` among the B·T: (P, d).

        `only` must not contain a token twice, since gradients are copied back to their tokens, not added.
        """
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not capturing and self.seen != self._versions():
            self.refresh()
        with torch.autocast(self.device.type, enabled=False):
            first = self.blocks[0]
            call = attention_call(
                pattern, *ids.shape, self.device, heads=(first.heads, first.keys), width=first.width
            )
            how = ForwardContext(
                call, positions.flatten(), self.tables, self.ops, lean=ids.numel() < RECOMPUTE_TOKENS
            )
            r = (self.embed or self._own_embedding)(ids.flatten()).to(self.dtype)
            y: Tensor | None = None
            for number, block in enumerate(self.blocks, 1):
                if number == len(self.blocks):
                    how = replace(how, only=only)
                norms = (norm.weight for norm in block.norms)
                # They cost the host some time, so only if other processes wait for them, or if all below is frozen.
                weights = block.weights if dist.is_initialized() or not r.requires_grad else ()
                r, y = _BlockFunction.apply(r, y, *norms, block, how, *weights)
            assert y is not None
            last = self.trunk.norm
            hidden = _LastNorm.apply(r, y, last.weight, last.variance_epsilon, self.ops)
        return hidden.view(*ids.shape, -1) if only is None else hidden


# ---------------------------------------------------------------- loss


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
        weights: Tensor | None,  # (P,) of the labels
        needed: tuple[bool, bool, bool],  # gradients to compute: of hidden states, weight, bias
        z_loss: float,
    ) -> Tensor:
        ops, vocab = fast.of(hidden.device), len(weight)
        read = hidden.to(head.dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(read) if needed[0] else None
        grad_weight: Tensor | None = None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needed[2] and bias is not None else None
        for start in range(0, len(labels), slice_rows):
            rows = slice(start, start + slice_rows)
            logits = read[rows] @ head.T  # (P, padded V)
            if bias is not None or cap is not None:
                logits = logits.float()
            if bias is not None:
                logits[:, :vocab] += bias.float()
            slope = None
            if cap is not None:
                logits = logits.div_(cap).tanh_().mul_(cap)
                slope = 1 - (logits / cap).square_() if any(needed) else None  # derivative of tanh
            losses = ops.softmax_error_(logits[:, :vocab], labels[rows], z_loss)
            if weights is not None:
                losses = losses * weights[rows]
                if any(needed):
                    logits.mul_(weights[rows, None])  # the error, of which the gradients are made
            total += losses.sum()
            if any(needed):
                error = (
                    logits if slope is None else logits.mul_(slope)
                )  # softmax − one-hot, in place of the logits; the padding is still zero
                if grad_bias is not None:
                    grad_bias += error[:, :vocab].sum(0, dtype=torch.float32)
                error = error.to(head.dtype)
                if grad_hidden is not None:
                    torch.mm(error, head, out=grad_hidden[rows])
                if needed[1] and grad_weight is None:
                    grad_weight = product(error.T, read[rows], torch.float32)
                elif grad_weight is not None:
                    add_product(grad_weight, error.T, read[rows])
            del logits
        if needed[1] and grad_weight is None:  # no labels at all
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        if any(needed):
            grad_weight = None if grad_weight is None else grad_weight[:vocab]
            ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:  # ty: ignore[incompatible-method-override]
        # In place: only this function uses these tensors, and the head's gradient is the largest one of the step.
        gradients = [
            None if grad is None else grad.mul_(scale).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*gradients, None, None, None, None, None, None, None)


def cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    cap: float | None = None,
    slice_rows: int = 0,
    head: Tensor | None = None,
    weights: Tensor | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Return Σ −log p(label) over the rows of `hidden` (P, d), for a head `weight` (V, d) and its `bias` (V,).

    Rows with a negative label are ignored; `weights` (P,) multiply the losses of the others. With `cap`, logits become
    cap·tanh(logits / cap). `head` is an existing 16-bit copy of the weight; without it the weight is cast here. `z_loss`
    times the squared log-sum-exp of each row's logits is added, which keeps it near 0. Sums are in fp32 whatever dtype
    the matmuls use.
    """
    kind = hidden.device.type
    rows = slice_rows or rows_per_slice(len(labels), weight.shape[0], kind)
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    with torch.autocast(kind, enabled=False):
        # Checked here because gradients are always disabled inside `forward`.
        on = torch.is_grad_enabled()
        needed = tuple(
            on and tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)
        )
        copy = _padded(weight.detach(), dtype) if head is None else head
        return _SlicedCrossEntropy.apply(
            hidden, weight, bias, labels, cap, rows, copy, weights, needed, z_loss
        )


def _padded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast the weight to the matmul dtype, padded with zero rows as `padded_vocab` says."""
    vocab = padded_vocab(len(weight), weight.device.type)
    if vocab == len(weight):
        return weight.to(dtype)
    copy = weight.new_zeros(vocab, weight.shape[1], dtype=dtype)
    copy[: len(weight)] = weight
    return copy
