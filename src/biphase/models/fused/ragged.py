"""cuDNN's attention over rows and over segments of different lengths, through NVIDIA's Python frontend of it.

torch reaches the same kernels only for rows of one length (2.11 plans anew at every call otherwise, and its gradients
are wrong), and not where q, k and v lie side by side. A plan depends on shapes and on nothing else, so it is made once; where segments begin is read on the
device. The package is optional: without it, torch's kernels are used.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from biphase.errors import one_line

# Names of tensors in a plan.
Q, K, V, OUT, D_OUT, STATS, DQ, DK, DV, LENGTHS, JOINED, ALONE = range(1, 13)


@cache
def installed() -> bool:
    """Is the package there, with the library it fronts, and a GPU that its kernels for segments are made for?"""
    if torch.version.hip or torch.cuda.get_device_capability() < (9, 0):
        return False
    try:
        importlib.import_module("cudnn")
    except (ImportError, OSError):
        return False
    return True


@dataclass(frozen=True)
class Shape:
    """All that a plan depends on."""

    segments: int
    longest: int
    tokens: int
    heads: int
    keys: int
    width: int
    causal: bool
    device: int
    deterministic: bool
    whole: bool = False  # all segments are as long as the longest: rows

    @property
    def every(self) -> int:
        return self.heads + 2 * self.keys


@dataclass(frozen=True)
class Segments:
    """Where segments lie, as plans want it: once for all layers of a forward."""

    lengths: Tensor  # (S,)
    joined: Tensor  # (S+1,) where they begin among q, k and v, in numbers, not tokens
    alone: Tensor  # (S+1,) and among what attention gives

    @classmethod
    def of(cls, boundaries: Tensor, shape: Shape) -> Segments:
        return cls(
            boundaries.diff(),
            boundaries * (shape.every * shape.width),
            boundaries * (shape.heads * shape.width),
        )


class Plan:
    """Forward and backward for one shape. q, k and v lie side by side, and so do their gradients: (N, H + 2K, D)."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.cudnn: Any = importlib.import_module("cudnn")
        self.handle = _handle(shape.device)
        # Both at once: what cannot be differentiated is refused before anything was computed with it.
        self.forward_graph, self.backward_graph = self._forward(), self._backward()

    def forward(self, qkv: Tensor, where: Segments | None) -> tuple[Tensor, Tensor]:
        """(N, H + 2K, D) → (N, H, D), and the logarithms of the sums that the backward pass needs."""
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
        """The gradients of q, k and v."""
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
        """A new graph, what both passes say of segments, and how tensors that are given and made are named."""
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
def plan_of(shape: Shape) -> Plan | None:
    """The plan for a shape; None where this version of cuDNN has none."""
    try:
        return Plan(shape)
    except Exception as wrong:  # the package's own errors, which it names differently from version to version
        warnings.warn(
            f"cuDNN has no attention for {shape} ({one_line(wrong)}); torch's is used", stacklevel=2
        )
        return None


@cache
def _handle(device: int) -> Any:
    with torch.cuda.device(device):
        return importlib.import_module("cudnn").create_handle()
