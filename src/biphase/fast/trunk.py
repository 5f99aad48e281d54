"""Matrix products whose result is wider than what is multiplied: sums that leave the product unrounded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from biphase import fast
from biphase.attention import AttentionPattern
from biphase.fast.attention import AttentionCall, attend, attend_backward, attention_call


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


# ---------------------------------------------------------------- weights
# Matrices that read the same input, as one: their 16-bit copy, their products, and their gradient in fp32.
#
# Products are made in 16 bits with sums in fp32. A gradient is added to what is there inside the product itself, in the
# precision of the weights: nothing is rounded to 16 bits on its way, and no second pass adds it up.


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


# ---------------------------------------------------------------- eight
# Matrices whose products are made in 8 bits: forward, and the gradient of their input. Weights learn as before.
#
# Each tensor is scaled as a whole, so that its largest number is the largest that 8 bits can hold; the scale is measured
# anew every time, so a run that was stopped needs to remember nothing. Activations and weights have four bits of
# exponent, gradients five. The gradient of a weight stays in 16 bits: in 8, its sums over all tokens would suffer most.


NEAR, FAR = torch.float8_e4m3fn, torch.float8_e5m2


def fp8_refusal(device: torch.device) -> str:
    """Why products in 8 bits cannot be had on `device`; empty if they can."""
    lacks = fast.lacking(device)
    if not lacks and torch.cuda.get_device_capability(device) < (8, 9):
        return "this GPU has no units for it"
    return lacks


class JoinedFp8(Joined):
    """As `Joined`, with copies in 8 bits beside those in 16: one for each direction, since products want rows."""

    def __init__(self, *weights: nn.Parameter, dtype: torch.dtype, ops: Any) -> None:
        super().__init__(*weights, dtype=dtype)
        self.ops = ops
        shape = self.copy.shape
        self.forth = torch.empty(shape, dtype=NEAR, device=self.copy.device)
        self.transposed = torch.empty(shape[::-1], dtype=NEAR, device=self.copy.device)
        self.scale = torch.ones((), dtype=torch.float32, device=self.copy.device)

    def derive(self) -> None:
        eight, scale = self.ops.to_fp8(self.copy, NEAR)
        self.forth.copy_(eight)
        self.transposed.copy_(eight.T)
        self.scale.copy_(scale)

    def project(self, x: Tensor) -> Tensor:
        eight, scale = self.ops.to_fp8(x, NEAR)
        return self.ops.fp8_product(eight, self.forth, scale, self.scale, x.dtype)

    def back(self, grad: Tensor) -> Tensor:
        eight, scale = self.ops.to_fp8(grad, FAR)
        return self.ops.fp8_product(eight, self.transposed, scale, self.scale, grad.dtype)


# ---------------------------------------------------------------- trunk
# The blocks of EuroBERT and Llama, forward and backward by hand.
#
#     r += y ; n = norm(r) ; q k v = n·W ; turned by position ; attention ; y = a·W
#     r += y ; n = norm(r) ; g u = n·W  ; h = silu(g)·u ;                  y = h·W
#
# Each line of element-wise work is one kernel. In small batches, what the backward pass can make again while it reads its
# inputs anyway (norms, h) is not kept: a block keeps r twice, q k v, a, and g u. Between blocks travel r and y, which the
# next block adds. Where hidden states are asked for at some tokens only, as by a masked objective, the last block does its
# second half for those alone. Weights are transformers' own, read through 16-bit copies (`Joined`); their gradients are
# put in place directly.


FAMILIES = ("EuroBertModel", "LlamaModel")
LEAN = 2**15  # tokens: whoever computes fewer at a time is short of memory, and the rest costs 1% of the time
EVEN = 16  # what products in 8 bits want of a matrix
ROTATIONS = ("default", "linear", "llama3")  # whose angles depend on the position alone


def refusal(trunk: Any, *, in_fp8: bool = False) -> str:
    """Why a trunk cannot be computed here, with products `in_eight` bits if asked for; empty if it can."""
    name, config = type(trunk).__name__, trunk.config
    if name not in FAMILIES:
        return f"{name} is not one of {', '.join(FAMILIES)}"
    linear = [
        one
        for block in trunk.layers
        for part in (block.self_attn, block.mlp)
        for one in part.children()
        if any(True for _ in one.parameters())
    ]
    if any(type(one) is not nn.Linear or one.bias is not None for one in linear):
        return "its matrices have biases or adapters"
    if config.hidden_act != "silu" or trunk.rotary_emb.rope_type not in ROTATIONS:
        return "its activation or its positions are of another kind"
    width = trunk.layers[0].self_attn.head_dim
    if width % 16 or not 16 <= width <= 128:
        return f"its heads are {width} wide"
    if in_fp8 and any(side % EVEN for one in linear for side in one.weight.shape):
        return f"its matrices have sides that are no multiples of {EVEN}"
    return ""


class TrunkBlock:
    """The weights of one block."""

    def __init__(self, block: Any, joined: Callable[..., Joined]) -> None:
        attention, mlp = block.self_attn, block.mlp
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


@dataclass(frozen=True)
class ForwardContext:
    """What all blocks of one forward share."""

    look: AttentionCall
    positions: Tensor  # (N,)
    tables: tuple[Tensor, Tensor]
    ops: Any
    lean: bool  # norms and h are made again in the backward pass, not kept
    only: Tensor | None = None  # (P,) tokens that are asked for: the last block goes on with these


class _BlockFunction(torch.autograd.Function):
    """r, y → r, y"""

    @staticmethod
    def forward(
        ctx: Any,
        r: Tensor,
        y: Tensor | None,
        first: Tensor,
        second: Tensor,
        block: TrunkBlock,
        how: ForwardContext,
    ) -> tuple[Tensor, Tensor]:
        ops, eps = how.ops, block.norms[0].variance_epsilon
        r1, n1, s1 = ops.add_norm(r, y, first, eps)
        qkv = block.qkv.project(n1).unflatten(-1, (-1, block.width))  # (N, H + 2K, D)
        ops.rotate_(qkv, how.positions, *how.tables, turned=block.heads + block.keys)
        a, kept = attend(qkv, how.look)
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
        # r and y have one gradient: the next block adds them before it does anything else.
        made = ops.swiglu_backward_(block.down.back(dy), gate_up, again=again)
        block.down.learn(dy, made if again else h)
        dr, made, d_second = ops.add_norm_backward(
            block.gate_up.back(gate_up), r2, second, s2, dr, again=again
        )
        block.gate_up.learn(gate_up, made if again else n2)
        del made, gate_up
        block.out.learn(dr, (a if how.only is None else a[how.only]).flatten(1))
        da = block.out.back(dr).unflatten(-1, (-1, block.width))
        if how.only is not None:  # what was not asked for has no gradient
            da = torch.zeros_like(a).index_copy_(0, how.only, da)
            dr = torch.zeros_like(r1).index_copy_(0, how.only, dr)
        below = attend_backward(da, qkv, a, tuple(kept), how.look)
        if isinstance(below, Tensor):
            ops.rotate_(below, how.positions, *how.tables, turned=block.heads + block.keys, back=True)
        else:
            below = ops.unrotate(*below, how.positions, *how.tables)
        below = below.flatten(1)
        dr, made, d_first = ops.add_norm_backward(block.qkv.back(below), r1, first, s1, dr, again=again)
        block.qkv.learn(below, made if again else n1)
        return dr, dr if ctx.added else None, d_first, d_second, None, None


class _LastNorm(torch.autograd.Function):
    """r, y → norm(r + y)"""

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
    """A view of a transformers trunk: (B, T) ids → (B, T, d). Holds copies of its weights, none of its own."""

    def __init__(self, trunk: Any, dtype: torch.dtype = torch.bfloat16, *, in_fp8: bool = False) -> None:
        self.trunk, self.dtype = trunk, dtype
        self.device = trunk.embed_tokens.weight.device
        self.ops = fast.of(self.device)
        joined: Any = partial(JoinedFp8, ops=self.ops) if in_fp8 else Joined
        self.blocks = [TrunkBlock(one, partial(joined, dtype=dtype)) for one in trunk.layers]
        self.in_fp8 = [
            matrix for block in self.blocks for matrix in block.matrices if isinstance(matrix, JoinedFp8)
        ]
        self.places: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.tables: tuple[Tensor, Tensor]
        self.seen: tuple[int, ...] = ()  # versions of all that copies were made of
        # Ids → embeddings, while another table than the trunk's own is trained in its place.
        self.words: Callable[[Tensor], Tensor] | None = None
        self.watch(*(matrix for block in self.blocks for matrix in block.matrices))

    def watch(self, *matrices: Joined) -> None:
        """Keep the copies of these as fresh as their weights."""
        self.seen = ()
        for matrix in matrices:
            for place, weight in matrix.stale():
                self.places.append(place)
                self.weights.append(weight)

    def copies(self) -> dict[int, Tensor]:
        """The copies by the addresses of what they are copies of."""
        return {one.data_ptr(): place for one, place in zip(self.weights, self.places, strict=True)}

    def refresh(self, copied: bool = False) -> None:
        """Make the copies anew, unless they were `copied` already: the weights, or the base of positions, have changed."""
        with torch.no_grad():
            if self.places and not copied:
                torch._foreach_copy_(self.places, self.weights)
            for matrix in self.in_fp8:
                matrix.derive()
            if not self.seen or self.seen[-1] != self._versions()[-1]:
                self.tables = self._rotations()
        self.seen = self._versions()

    def _versions(self) -> tuple[int, ...]:
        turned = next(iter(self.trunk.rotary_emb.buffers()))
        read = (weight for matrix in self.in_fp8 for weight in matrix.weights)
        return tuple(one._version for one in (*self.weights, *read, turned))

    def _rotations(self) -> tuple[Tensor, Tensor]:
        longest = torch.arange(self.trunk.config.max_position_embeddings, device=self.device)[None]
        wide = torch.zeros((), dtype=torch.float32, device=self.device)
        cos, sin = self.trunk.rotary_emb(wide, position_ids=longest)
        half = cos.shape[-1] // 2
        return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()

    def _own_words(self, ids: Tensor) -> Tensor:
        own = self.trunk.embed_tokens
        return F.embedding(ids, own.weight, own.padding_idx)

    def __call__(
        self, ids: Tensor, positions: Tensor, pattern: AttentionPattern, *, only: Tensor | None = None
    ) -> Tensor:
        """Hidden states of all tokens, or, with `only`, of those of the B·T tokens, each at most once: (P, d).

        At most once: their gradients are put back where they came from, not added up.
        """
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not capturing and self.seen != self._versions():
            self.refresh()
        with torch.autocast(self.device.type, enabled=False):
            first = self.blocks[0]
            look = attention_call(
                pattern, *ids.shape, self.device, heads=(first.heads, first.keys), width=first.width
            )
            how = ForwardContext(look, positions.flatten(), self.tables, self.ops, lean=ids.numel() < LEAN)
            r = (self.words or self._own_words)(ids.flatten()).to(self.dtype)
            if torch.is_grad_enabled() and not r.requires_grad:  # a frozen embedding: what follows may learn
                r.requires_grad_(any(one.requires_grad for one in self.trunk.parameters()))
            y: Tensor | None = None
            for number, block in enumerate(self.blocks, 1):
                if number == len(self.blocks):
                    how = replace(how, only=only)
                r, y = _BlockFunction.apply(r, y, *(norm.weight for norm in block.norms), block, how)
            assert y is not None
            last = self.trunk.norm
            hidden = _LastNorm.apply(r, y, last.weight, last.variance_epsilon, self.ops)
        return hidden.view(*ids.shape, -1) if only is None else hidden
