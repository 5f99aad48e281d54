"""The attention function of every model: direction and segment boundaries are arguments that select the kernel.

`attend` is registered with transformers under the name `biphase`, and transformers' own masks are switched off, so
this module alone decides which tokens attend to which. An `AttentionPattern` is passed through the model as a forward
argument:

    whole rows                           scaled_dot_product_attention(is_causal=…)
    segments or windows, CUDA, 16-bit    varlen kernel: no mask and no work across segments or outside windows
    segments or windows, otherwise       scaled_dot_product_attention with a mask (the reference path)
    logit softcap or attention sinks     computed step by step with a mask: no kernel supports them

Every path is tested against the reference path. A layer's sliding window restricts attention backwards if attention is
causal, and to both sides if it is bidirectional. Other model-specific arguments that change the scores (position
biases) raise an error instead of being ignored.

The second part of the module is the kernels that `fast.trunk` calls, forward and backward, on q, k and v joined in one
tensor. `attention_call` chooses one per forward pass, `fused_attend` and `fused_attend_backward` run it:

    cudnn       whole rows, and chunks, whose number is constant: cuDNN through NVIDIA's Python frontend
    rows        whole rows without that package: cuDNN's kernels through torch, or flash if runs must be deterministic
    flash       all other segments: documents, short texts
    plain       other devices, and patterns given as a mask: torch's attention, differentiated by torch

cuDNN's kernels are about 1.5 times as fast as flash on an H200, but need a new plan for each number of segments.
`CudnnPlan` uses cuDNN through the optional package `cudnn`, for rows and for varlen segments. torch reaches the same
kernels only for rows of equal length (torch 2.11 otherwise makes a new plan at every call, and its gradients are
wrong), and not if q, k and v are one tensor. A plan depends on shapes only and is cached; the boundaries of segments
are read on the device.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from biphase.errors import ModelError, one_line
from biphase.objectives import Batch

varlen_attn: Any = None
with contextlib.suppress(ImportError):  # older torch: masks are used instead
    from torch.nn.attention.varlen import varlen_attn

aten: Any = torch.ops.aten
NAME = "biphase"
CHANGES_THE_SCORES = ("position_bias", "cache_position_bias")


@dataclass(frozen=True)
class AttentionPattern:
    """Which tokens attend to which in one forward pass: the direction, and the segments attention stays inside."""

    causal: bool
    boundaries: Tensor | None = None  # (S+1,) int32, for the varlen kernel
    longest: int = 0  # upper bound on the length of a segment
    steady: bool = False  # every batch has the same number of segments
    mask: Tensor | None = None  # (B, 1, T, T) bool, for scaled_dot_product_attention
    windows: bool = True  # sliding windows also apply to bidirectional attention
    callers: list[str] | None = None  # for probes: collects the class names of the modules that call `attend`


@dataclass
class CurrentPattern:
    """The attention pattern of the current forward pass, for layers whose model does not pass the argument on."""

    pattern: AttentionPattern | None = None


CURRENT_PATTERN = "biphase_pattern"  # attribute of each module of a backbone that holds its CurrentPattern


def pattern_of(batch: Batch, *, varlen: bool) -> AttentionPattern:
    """Return the attention pattern of a batch; `varlen` says whether the varlen kernel can be used."""
    if batch.segments is None:
        return AttentionPattern(batch.causal)
    if varlen:
        return AttentionPattern(batch.causal, batch.boundaries, batch.ids.shape[1], steady=batch.steady)
    return AttentionPattern(batch.causal, mask=segment_mask(batch.segments, causal=batch.causal))


def segment_mask(segments: Tensor, *, causal: bool) -> Tensor:
    """Return a mask that is True where a query (row) may attend to a key (column). (B, T) → (B, 1, T, T)"""
    mask = segments[:, None, :, None] == segments[:, None, None, :]
    if causal:
        length = segments.shape[1]
        mask = mask & torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    return mask


def without_attention_dropout(config: Any) -> None:
    """Set attention dropout to 0 in a model's config, since the varlen kernel has none. Other dropout stays."""
    for name in ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"):
        if getattr(config, name, None):
            setattr(config, name, 0.0)


def varlen_works(device: torch.device, precision: str) -> bool:
    return device.type == "cuda" and precision != "fp32" and varlen_attn is not None


# B rows, H query heads, K key heads, T tokens, D head dimension
def attend(
    module: nn.Module,
    query: Tensor,  # (B, H, T, D)
    key: Tensor,  # (B, K, T, D)
    value: Tensor,  # (B, K, T, D)
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    pattern: AttentionPattern | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Compute attention under `pattern`. Returns (B, T, H, D), as transformers expects."""
    if pattern is None:
        pattern = getattr(module, CURRENT_PATTERN, CurrentPattern()).pattern
    if pattern is None:
        raise ModelError(
            f"{type(module).__name__} has no attention pattern; read with an Encoder, or set its attention back"
        )
    if pattern.callers is not None:
        pattern.callers.append(type(module).__name__)
    for name in CHANGES_THE_SCORES:
        if rest.get(name) is not None:
            shown = "…" if isinstance(rest[name], Tensor) else rest[name]  # a tensor would print many lines
            raise ModelError(f"{type(module).__name__} needs {name}={shown}, which is not supported yet")
    reach = -1
    if sliding_window is not None and (pattern.causal or pattern.windows):
        reach = sliding_window - 1  # transformers counts the token itself
    if softcap is not None or s_aux is not None:
        mask = _whole_mask(pattern, reach, query)
        return _step_by_step(query, key, value, mask, scaling, dropout, softcap, s_aux), None
    rows, _, length, _ = query.shape
    boundaries, longest, mask = pattern.boundaries, pattern.longest, pattern.mask
    windowed = 0 <= reach < length - 1
    if windowed and boundaries is None and mask is None and not dropout and _by_varlen(query):
        # A mask would make the kernel compute the scores outside the window too.
        boundaries = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=query.device)
        longest = length
    if boundaries is not None:
        window = (reach, 0) if pattern.causal else (reach, reach)
        return _varlen(query, key, value, boundaries, longest, window, scaling, dropout), None
    if windowed:
        near = _near(length, reach, causal=pattern.causal, device=query.device)
        mask = near if mask is None else mask & near
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=pattern.causal and mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None


def _whole_mask(pattern: AttentionPattern, reach: int, query: Tensor) -> Tensor:
    """Return the pattern as a mask (B or 1, 1, T, T), computed from the boundaries if there are any."""
    rows, _, length, _ = query.shape
    mask = pattern.mask
    if pattern.boundaries is not None:
        positions = torch.arange(rows * length, device=query.device)
        segments = torch.bucketize(positions, pattern.boundaries[1:].long(), right=True).view(rows, length)
        mask = segment_mask(segments, causal=pattern.causal)
    near = _near(length, length if reach < 0 else reach, causal=pattern.causal, device=query.device)[
        None, None
    ]
    return near if mask is None else mask & near


def _step_by_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,  # (H,): the score of an extra key without a value
) -> Tensor:
    """Compute attention without a fused kernel; scores and softmax are in fp32."""
    heads, width = query.shape[1], query.shape[3]
    if heads != key.shape[1]:
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    scores = (query @ key.mT).float() * (width**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        aside = sinks.float().view(1, -1, 1, 1).expand(len(scores), -1, scores.shape[2], 1)
        scores = torch.cat([scores, aside], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    weights = F.dropout(weights, dropout)
    return (weights @ value).transpose(1, 2).contiguous()


def _near(length: int, reach: int, *, causal: bool, device: torch.device) -> Tensor:
    """Return a mask that is True where a key is within `reach` of its query, and not after it if causal."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions[None, :]
    return (distance <= reach) & (distance >= (0 if causal else -reach))


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    longest: int,
    window: tuple[int, int],
    scaling: float | None,
    dropout: float,
) -> Tensor:
    if dropout:
        raise ModelError(
            "attention dropout is not supported on packed rows; set attention_dropout to 0 in the model's config"
        )
    rows, heads, length, width = query.shape
    if heads != key.shape[1] and not _GROUPED:
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
    # (B, heads, T, D) → (B·T, heads, D): all rows as one varlen sequence
    flat = [x.transpose(1, 2).reshape(rows * length, -1, width).to(dtype) for x in (query, key, value)]
    grouped = {"enable_gqa": True} if _GROUPED and heads != key.shape[1] else {}
    out = varlen_attn(
        *flat,
        boundaries,
        boundaries,
        longest,
        longest,
        scale=scaling,
        window_size=window,
        **grouped,
    )
    return out.view(rows, length, heads, width)


def _by_varlen(query: Tensor) -> bool:
    """Return whether the varlen kernel takes this query: on CUDA, in 16 bits, with a head width that it has."""
    half = query.dtype != torch.float32 or torch.is_autocast_enabled("cuda")
    width = query.shape[3]
    return query.is_cuda and varlen_attn is not None and half and width % 8 == 0 and width <= 256


_GROUPED = varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Replaces transformers' mask builders: build no mask, since `attend` decides."""


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, _no_mask)


# ---------------------------------------------------------------- kernels of the fused path


# Ids of tensors in a plan.
Q, K, V, OUT, D_OUT, STATS, DQ, DK, DV, LENGTHS, JOINED, ALONE = range(1, 13)


@cache
def cudnn_installed() -> bool:
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
            {name: tensor.data_ptr() for name, tensor in tensors.items()},
            space.data_ptr(),
            handle=self.handle,
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

        arguments: dict[str, Any] = {"attn_scale": shape.width**-0.5, "use_causal_mask": shape.causal}
        starts: dict[int, Any] = {}
        if not shape.whole:
            lengths = whole(LENGTHS, shape.segments)
            arguments |= {"use_padding_mask": True, "seq_len_q": lengths, "seq_len_kv": lengths}
            starts = {name: whole(name, shape.segments + 1) for name in (JOINED, ALONE)}

        def layout(name: int) -> tuple[list[int], list[int], int]:
            heads = shape.keys if name in (K, V, DK, DV) else shape.heads
            offsets = ALONE if name in (OUT, D_OUT) else JOINED
            token = shape.width * (shape.heads if offsets == ALONE else shape.every)
            dim = [shape.segments, heads, shape.longest, shape.width]
            return dim, [shape.longest * token, shape.width, token, 1], offsets

        def input_of(name: int) -> Any:
            dim, stride, offsets = layout(name)
            tensor = graph.tensor(dim=dim, stride=stride, data_type=cudnn.data_type.BFLOAT16, uid=name)
            if starts:
                tensor.set_ragged_offset(starts[offsets])
            return tensor

        def declare_output(tensor: Any, name: int) -> None:
            dim, stride, offsets = layout(name)
            tensor.set_output(True).set_uid(name).set_dim(dim).set_stride(stride)
            if starts:
                tensor.set_ragged_offset(starts[offsets])

        return graph, arguments, input_of, declare_output

    def _forward(self) -> Any:
        graph, arguments, input_of, declare_output = self._graph()
        out, stats = graph.sdpa(
            name="read", q=input_of(Q), k=input_of(K), v=input_of(V), is_inference=False, **arguments
        )
        declare_output(out, OUT)
        stats.set_output(True).set_uid(STATS).set_data_type(self.cudnn.data_type.FLOAT)
        return self._built(graph)

    def _backward(self) -> Any:
        graph, arguments, input_of, declare_output = self._graph()
        shape = self.shape
        dim = [shape.segments, shape.heads, shape.longest, 1]
        stride = [shape.heads * shape.longest, shape.longest, 1, 1]
        stats = graph.tensor(dim=dim, stride=stride, data_type=self.cudnn.data_type.FLOAT, uid=STATS)
        if not shape.whole:
            arguments["max_total_seq_len_q"] = arguments["max_total_seq_len_kv"] = -(-shape.tokens // 64) * 64
        gradients = graph.sdpa_backward(
            name="learn",
            q=input_of(Q),
            k=input_of(K),
            v=input_of(V),
            o=input_of(OUT),
            dO=input_of(D_OUT),
            stats=stats,
            use_deterministic_algorithm=shape.deterministic,
            **arguments,
        )
        for tensor, name in zip(gradients, (DQ, DK, DV), strict=True):
            declare_output(tensor, name)
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
    planned = cudnn_installed() and small and (ends is None or pattern.steady)
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
def fused_attend(qkv: Tensor, call: AttentionCall) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Compute attention: (N, H + 2K, D) → (N, H, D), and the tensors that the backward pass needs."""
    ends, most = call.boundaries, call.longest
    match call.kernel:
        case "plain":
            return _torch_attention(*call.parts(qkv), call), ()
        case "cudnn":
            assert call.plan is not None
            out, sums = call.plan.forward(qkv, call.segments)
            return out, (sums,)
        case "flash":
            outputs = aten._flash_attention_forward(
                *call.parts(qkv), ends, ends, most, most, 0.0, call.causal, False
            )
            return outputs[0], tuple(outputs[1:4])
        case "rows":
            parts = [_by_row(part, call) for part in call.parts(qkv)]
            if _by_flash():
                outputs = aten._scaled_dot_product_flash_attention(*_grouped(*parts), 0.0, call.causal, False)
            else:
                outputs = aten._scaled_dot_product_cudnn_attention(
                    *parts, None, True, 0.0, call.causal, False
                )
            return outputs[0].transpose(1, 2).flatten(0, 1), (outputs[1], outputs[6], outputs[7])


def fused_attend_backward(
    grad: Tensor, qkv: Tensor, out: Tensor, kept: tuple[Tensor, ...], call: AttentionCall
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, joined as one tensor (cudnn) or separately."""
    ends, most = call.boundaries, call.longest
    if call.kernel == "cudnn":
        assert call.plan is not None
        return call.plan.backward(grad, qkv, out, *kept, call.segments)
    q, k, v = call.parts(qkv)
    match call.kernel:
        case "plain":
            with torch.enable_grad():
                inputs = [x.detach().requires_grad_() for x in (q, k, v)]
                again = _torch_attention(*inputs, call)
            dq, dk, dv = torch.autograd.grad(again, inputs, grad)
        case "flash":
            lse, first, second = kept
            dq, dk, dv = aten._flash_attention_backward(
                grad, q, k, v, out, lse, ends, ends, most, most, 0.0, call.causal, first, second
            )
        case "rows":
            lse, first, second = kept
            above, *parts, output = (_by_row(x, call) for x in (grad, q, k, v, out))
            if _by_flash():
                gradients = aten._scaled_dot_product_flash_attention_backward(
                    above,
                    *_grouped(*parts),
                    output,
                    lse,
                    None,
                    None,
                    most,
                    most,
                    0.0,
                    call.causal,
                    first,
                    second,
                )
                gradients = [_summed(x, part) for x, part in zip(gradients, parts, strict=True)]
            else:
                gradients = aten._scaled_dot_product_cudnn_attention_backward(
                    above, *parts, output, lse, first, second, None, None, None, most, most, 0.0, call.causal
                )
            dq, dk, dv = (x.transpose(1, 2).flatten(0, 1) for x in gradients)
    return dq, dk, dv


def _by_flash() -> bool:
    """Return whether whole rows use flash: for deterministic runs, and on GPUs where cuDNN may not support them."""
    return torch.are_deterministic_algorithms_enabled() or torch.cuda.get_device_capability() < (9, 0)


def _by_row(x: Tensor, call: AttentionCall) -> Tensor:
    """Reshape (N, H, D) → (B, H, T, D)."""
    return x.unflatten(0, (call.rows, -1)).transpose(1, 2)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Repeat keys and values for each query head, for a kernel without grouped-query attention."""
    times = q.shape[1] // k.shape[1]
    if times == 1:
        return q, k, v
    return q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)


def _summed(grad: Tensor, like: Tensor) -> Tensor:
    """Sum the gradients of heads that `_grouped` repeated."""
    return grad if grad.shape == like.shape else grad.unflatten(1, (like.shape[1], -1)).sum(2)


def _torch_attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    out = F.scaled_dot_product_attention(
        *(_by_row(x, call) for x in (q, k, v)),
        attn_mask=call.mask,
        is_causal=call.causal and call.mask is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1)
