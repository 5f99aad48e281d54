"""Attention kernels of the GPU path, forward and backward. The kernel is chosen once per forward pass.

    cudnn       whole rows, and the paper's chunks, whose number is constant: cuDNN through NVIDIA's Python frontend
    rows        whole rows without that package: cuDNN's kernels through torch, or flash if runs must be deterministic
    flash       all other segments: documents, short texts
    plain       other devices, and patterns given as a mask: torch's attention, differentiated by torch

cuDNN's kernels are about 1.5 times as fast as flash on an H200, but need a new plan for each number of segments.

`attention_call` chooses the kernel for an attention pattern; `attend` and `attend_backward` run it.

`CudnnPlan` uses cuDNN through the optional package `cudnn`, for rows and for varlen segments. torch reaches the same
kernels only for rows of equal length (torch 2.11 otherwise makes a new plan at every call, and its gradients are
wrong), and not if q, k and v are one tensor. A plan depends on shapes only and is cached; the boundaries of segments
are read on the device.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from biphase.attention import AttentionPattern
from biphase.errors import one_line

# Ids of tensors in a plan.
Q, K, V, OUT, D_OUT, STATS, DQ, DK, DV, LENGTHS, JOINED, ALONE = range(1, 13)


@cache
def installed() -> bool:
    """Return whether the `cudnn` package and its library are installed, and the GPU supports its varlen kernels."""
    if torch.version.hip or torch.cuda.get_device_capability() < (9, 0):
        return False
    try:
        importlib.import_module("cudnn")
    except (ImportError, OSError):
        return False
    return True


@dataclass(frozen=True)
class AttentionShape:
    """Everything that a plan depends on."""

    segments: int
    longest: int
    tokens: int
    heads: int
    keys: int
    width: int
    causal: bool
    device: int
    deterministic: bool
    whole: bool = False  # rows: all segments are as long as the longest

    @property
    def every(self) -> int:
        return self.heads + 2 * self.keys


@dataclass(frozen=True)
class Segments:
    """The boundaries of segments in the form that plans read, computed once per forward pass."""

    lengths: Tensor  # (S,)
    joined: Tensor  # (S+1,) offsets in the joined qkv tensor, in elements
    alone: Tensor  # (S+1,) offsets in the output tensor, in elements

    @classmethod
    def of(cls, boundaries: Tensor, shape: AttentionShape) -> Segments:
        return cls(
            boundaries.diff(),
            boundaries * (shape.every * shape.width),
            boundaries * (shape.heads * shape.width),
        )


class CudnnPlan:
    """cuDNN's forward and backward graphs for one shape.

    q, k and v are one tensor (N, H + 2K, D), and so are their gradients.
    """

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        self.cudnn: Any = importlib.import_module("cudnn")
        self.handle = _handle(shape.device)
        # Build both, so that a shape without a backward pass is rejected before anything is computed with it.
        self.forward_graph, self.backward_graph = self._forward(), self._backward()

    def forward(self, qkv: Tensor, where: Segments | None) -> tuple[Tensor, Tensor]:
        """(N, H + 2K, D) → (N, H, D), and the log-sum-exps that the backward pass needs"""
        shape = self.shape
        out = torch.empty(len(qkv), shape.heads, shape.width, dtype=qkv.dtype, device=qkv.device)
        sums = torch.empty(
            shape.segments, shape.heads, shape.longest, 1, dtype=torch.float32, device=qkv.device
        )
        self._run(self.forward_graph, self._parts(qkv, Q, K, V) | {OUT: out, STATS: sums}, where)
        return out, sums

    def backward(
        self, grad: Tensor, qkv: Tensor, out: Tensor, sums: Tensor, where: Segments | None
    ) -> Tensor:
        """Return the gradient of the joined q, k and v."""
        below = torch.empty_like(qkv)
        given = {OUT: out, D_OUT: grad, STATS: sums}
        self._run(
            self.backward_graph,
            given | self._parts(qkv, Q, K, V) | self._parts(below, DQ, DK, DV),
            where,
        )
        return below

    def _parts(self, joined: Tensor, *names: int) -> dict[int, Tensor]:
        shape = self.shape
        return dict(zip(names, joined.split([shape.heads, shape.keys, shape.keys], dim=1), strict=True))

    def _run(self, graph: Any, tensors: dict[int, Tensor], where: Segments | None) -> None:
        if where is not None:
            tensors |= {LENGTHS: where.lengths, JOINED: where.joined, ALONE: where.alone}
        space = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=tensors[OUT].device)
        self.cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(
            {name: one.data_ptr() for name, one in tensors.items()}, space.data_ptr(), handle=self.handle
        )

    def _graph(self) -> tuple[Any, dict[str, Any], Any, Any]:
        """Return a new graph, the arguments common to both passes, and functions that declare inputs and outputs."""
        shape, cudnn = self.shape, self.cudnn
        graph = cudnn.pygraph(
            io_data_type=cudnn.data_type.BFLOAT16,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=self.handle,
        )

        def whole(name: int, count: int) -> Any:
            return graph.tensor(
                dim=[count, 1, 1, 1], stride=[1, 1, 1, 1], data_type=cudnn.data_type.INT32, uid=name
            )

        said: dict[str, Any] = {"attn_scale": shape.width**-0.5, "use_causal_mask": shape.causal}
        starts: dict[int, Any] = {}
        if not shape.whole:
            lengths = whole(LENGTHS, shape.segments)
            said |= {"use_padding_mask": True, "seq_len_q": lengths, "seq_len_kv": lengths}
            starts = {one: whole(one, shape.segments + 1) for one in (JOINED, ALONE)}

        def layout(name: int) -> tuple[list[int], list[int], int]:
            heads = shape.keys if name in (K, V, DK, DV) else shape.heads
            place = ALONE if name in (OUT, D_OUT) else JOINED
            token = shape.width * (shape.heads if place == ALONE else shape.every)
            dim = [shape.segments, heads, shape.longest, shape.width]
            return dim, [shape.longest * token, shape.width, token, 1], place

        def given(name: int) -> Any:
            dim, stride, place = layout(name)
            made = graph.tensor(dim=dim, stride=stride, data_type=cudnn.data_type.BFLOAT16, uid=name)
            if starts:
                made.set_ragged_offset(starts[place])
            return made

        def gives(tensor: Any, name: int) -> None:
            dim, stride, place = layout(name)
            tensor.set_output(True).set_uid(name).set_dim(dim).set_stride(stride)
            if starts:
                tensor.set_ragged_offset(starts[place])

        return graph, said, given, gives

    def _forward(self) -> Any:
        graph, said, given, gives = self._graph()
        out, stats = graph.sdpa(name="read", q=given(Q), k=given(K), v=given(V), is_inference=False, **said)
        gives(out, OUT)
        stats.set_output(True).set_uid(STATS).set_data_type(self.cudnn.data_type.FLOAT)
        return self._built(graph)

    def _backward(self) -> Any:
        graph, said, given, gives = self._graph()
        shape = self.shape
        dim = [shape.segments, shape.heads, shape.longest, 1]
        stride = [shape.heads * shape.longest, shape.longest, 1, 1]
        stats = graph.tensor(dim=dim, stride=stride, data_type=self.cudnn.data_type.FLOAT, uid=STATS)
        if not shape.whole:
            said["max_total_seq_len_q"] = said["max_total_seq_len_kv"] = -(-shape.tokens // 64) * 64
        found = graph.sdpa_backward(
            name="learn",
            q=given(Q),
            k=given(K),
            v=given(V),
            o=given(OUT),
            dO=given(D_OUT),
            stats=stats,
            use_deterministic_algorithm=shape.deterministic,
            **said,
        )
        for tensor, name in zip(found, (DQ, DK, DV), strict=True):
            gives(tensor, name)
        return self._built(graph)

    def _built(self, graph: Any) -> Any:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self.cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        return graph


@cache
def cudnn_plan(shape: AttentionShape) -> CudnnPlan | None:
    """Return the cached plan for a shape; None if this version of cuDNN does not support it."""
    try:
        return CudnnPlan(shape)
    except Exception as wrong:  # the package's exception types differ between versions
        warnings.warn(
            f"cuDNN has no attention for {shape} ({one_line(wrong)}); torch's is used", stacklevel=2
        )
        return None


@cache
def _handle(device: int) -> Any:
    with torch.cuda.device(device):
        return importlib.import_module("cudnn").create_handle()


# ---------------------------------------------------------------- attention


aten: Any = torch.ops.aten


@dataclass(frozen=True)
class AttentionCall:
    """The attention kernel and its arguments for all layers of one forward pass. B rows of T tokens, N = B·T."""

    kernel: Literal["cudnn", "rows", "flash", "plain"]
    causal: bool
    rows: int
    longest: int
    heads: tuple[int, int]  # query heads, and key (= value) heads
    boundaries: Tensor | None = None  # of segments, over all N tokens; None: whole rows
    mask: Tensor | None = None  # plain only
    plan: CudnnPlan | None = None  # cudnn only
    segments: Segments | None = None  # cudnn only; None: whole rows

    def parts(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys = self.heads
        q, k, v = qkv.split([queries, keys, keys], dim=1)
        return q, k, v


def attention_call(
    pattern: AttentionPattern,
    rows: int,
    length: int,
    device: torch.device,
    *,
    heads: tuple[int, int],
    width: int,
) -> AttentionCall:
    ends, longest = pattern.boundaries, pattern.longest or length
    if device.type != "cuda" or pattern.mask is not None:
        return AttentionCall("plain", pattern.causal, rows, length, heads, mask=pattern.mask)
    small = rows * length * (heads[0] + 2 * heads[1]) * width < 2**31  # cuDNN's offsets have 32 bits
    planned = installed() and small and (ends is None or pattern.steady)
    shape = AttentionShape(
        rows if ends is None else len(ends) - 1,
        longest,
        rows * length,
        *heads,
        width,
        pattern.causal,
        torch.cuda.current_device(),
        torch.are_deterministic_algorithms_enabled(),
        whole=ends is None,
    )
    plan = cudnn_plan(shape) if planned else None
    if plan is None:
        return AttentionCall("rows" if ends is None else "flash", pattern.causal, rows, longest, heads, ends)
    segments = None if ends is None else Segments.of(ends, shape)
    return AttentionCall("cudnn", pattern.causal, rows, longest, heads, ends, plan=plan, segments=segments)


# N tokens, H query heads, K key heads, D head dimension
def attend(qkv: Tensor, look: AttentionCall) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Compute attention: (N, H + 2K, D) → (N, H, D), and the tensors that the backward pass needs."""
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
    grad: Tensor, qkv: Tensor, out: Tensor, kept: tuple[Tensor, ...], look: AttentionCall
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, joined as one tensor (cudnn) or separately."""
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
    """Return whether whole rows use flash: for deterministic runs, and on GPUs where cuDNN may not support them."""
    return torch.are_deterministic_algorithms_enabled() or torch.cuda.get_device_capability() < (9, 0)


def _by_row(one: Tensor, look: AttentionCall) -> Tensor:
    """Reshape (N, H, D) → (B, H, T, D)."""
    return one.unflatten(0, (look.rows, -1)).transpose(1, 2)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Repeat keys and values for each query head, for a kernel without grouped-query attention."""
    times = q.shape[1] // k.shape[1]
    if times == 1:
        return q, k, v
    return q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)


def _summed(grad: Tensor, like: Tensor) -> Tensor:
    """Sum the gradients of heads that `_grouped` repeated."""
    return grad if grad.shape == like.shape else grad.unflatten(1, (like.shape[1], -1)).sum(2)


def _plain(q: Tensor, k: Tensor, v: Tensor, look: AttentionCall) -> Tensor:
    out = F.scaled_dot_product_attention(
        *(_by_row(one, look) for one in (q, k, v)),
        attn_mask=look.mask,
        is_causal=look.causal and look.mask is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1)
