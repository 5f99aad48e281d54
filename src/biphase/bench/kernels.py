"""Where the time of a step goes, by kind of kernel."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType

from biphase.bench.clock import wait

PROFILED = 3  # steps
BLOCKS, HEAD = "GEMMs of the blocks", "GEMMs of the head"

# The first that is found in a name counts. Names of fused kernels list what was fused into them.
KINDS = (
    ("attention", r"flash|fmha|sdpa|attention|attn"),
    ("optimizer", r"adam|multi_tensor_apply|lpnorm|_foreach"),
    ("loss", r"cross_entropy|softmax|logsumexp|nll_loss|xent"),
    (BLOCKS, r"gemm|nvjet|cutlass|xmma|cublas|splitk|matmul|aten::(add|b|bad)?mm\b|scaled_mm|aten::linear"),
    ("rotary", r"rotary|rotate|rope|_cos_|_sin_|_neg_"),
    ("swiglu", r"swiglu|silu"),
    ("norm", r"norm|rsqrt|rms_"),
    ("copies", r"memcpy|memset|copy|(?<!broad)cast|fill|cat(?!ion)|clone|contiguous"),
)
_KINDS = tuple((kind, re.compile(pattern)) for kind, pattern in KINDS)
OTHER = "other"


def kind_of(name: str) -> str:
    """The kind of a kernel, or of an operation on a CPU."""
    low = name.lower()
    return next((kind for kind, pattern in _KINDS if pattern.search(low)), OTHER)


@dataclass(frozen=True)
class Breakdown:
    """Milliseconds of one step by kind, the most first, and the kernels that took longest."""

    by_kind: dict[str, float]
    longest: tuple[tuple[str, float], ...]

    @property
    def total(self) -> float:
        return sum(self.by_kind.values())

    def facts(self) -> dict[str, Any]:
        return {"ms": self.by_kind, "total_ms": self.total, "longest": [list(one) for one in self.longest]}


def breakdown(
    run: Callable[[], object], device: torch.device, *, vocab: int, steps: int = PROFILED
) -> Breakdown:
    """`run` takes `steps` steps."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    run()  # whatever only a first time needs
    wait(device)
    with torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True) as profiler:
        run()
        wait(device)
    events: Any = profiler.events()
    times = on_gpu(events, vocab) if device.type == "cuda" else on_cpu(events, vocab)
    return sorted_out(times, steps)


Times = dict[tuple[str, bool], float]  # microseconds by name, and whether it had the vocabulary in its shapes


def on_gpu(events: Any, vocab: int) -> Times:
    """Kernels by name. The operation that launched one tells its shapes; those in a graph have none."""
    every: dict[str, float] = defaultdict(float)
    of_head: dict[str, float] = defaultdict(float)
    for event in events:
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            every[event.name] += event.time_range.elapsed_us()
        elif event.kernels and _has(event, vocab):
            for kernel in event.kernels:
                of_head[kernel.name] += kernel.duration
    times: Times = {}
    for name, total in every.items():
        share = min(of_head.get(name, 0.0), total)
        times[name, True], times[name, False] = share, total - share
    return times


def on_cpu(events: Any, vocab: int) -> Times:
    times: Times = defaultdict(float)
    for event in events:
        if not event.is_user_annotation:
            times[event.name, _has(event, vocab)] += event.self_cpu_time_total
    return times


def _has(event: Any, vocab: int) -> bool:
    return any(vocab in shape for shape in event.input_shapes or () if isinstance(shape, (list, tuple)))


def sorted_out(times: Times, steps: int) -> Breakdown:
    kinds: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    for (name, with_vocab), microseconds in times.items():
        kind = kind_of(name)
        kinds[HEAD if kind == BLOCKS and with_vocab else kind] += microseconds / steps / 1000
        names[name] += microseconds / steps / 1000
    longest = sorted(names.items(), key=lambda one: -one[1])[:12]
    ordered = sorted(((kind, ms) for kind, ms in kinds.items() if ms > 0), key=lambda one: -one[1])
    return Breakdown(dict(ordered), tuple(longest))
