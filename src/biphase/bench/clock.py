"""How long steps take, as the device sees it, and one measurement after another without anything left behind."""

from __future__ import annotations

import contextlib
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from biphase.errors import BiphaseError, one_line
from biphase.models.silence import quietly

READY = 3  # a step by then has been compiled, captured and cached


@dataclass(frozen=True)
class Measured:
    """What one side needs for a case."""

    seconds: float  # of a step: the median
    mean_seconds: float
    tokens: float  # of a step, padding not counted
    peak_bytes: int | None = None  # None: not a GPU
    ready_seconds: float | None = None  # until the third step is done, compilation included
    graphs: int = 0  # compiled
    recompilations: int = 0  # of them, after the third step
    path: str = ""  # how it was computed
    idle: float | None = None  # the share of the time that the device waits for data
    failed: str = ""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def facts(self) -> dict[str, Any]:
        if self.failed:
            return {"failed": self.failed}
        known = {name: value for name, value in asdict(self).items() if name != "failed"}
        known |= {"tokens_per_second": self.tokens_per_second}
        # How many tokens a step has is counted by our side: where that failed, nobody knows.
        return {name: value for name, value in known.items() if value == value}  # NaN is not itself


def failure(why: str) -> Measured:
    return Measured(float("nan"), float("nan"), float("nan"), failed=why)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class StepClock:
    """Notes when each step ends. On a GPU these are events in its stream, which is waited for once, at step `ready_at`."""

    def __init__(self, device: torch.device, *, ready_at: int = READY) -> None:
        self.device, self.ready_at = device, ready_at
        self.marks: list[Any] = []
        self.graphs = compiled_graphs()
        self.graphs_when_ready = self.graphs
        self.ready: float | None = None
        self.began = time.perf_counter()

    def mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())
        if len(self.marks) == self.ready_at:
            wait(self.device)
            self.ready = time.perf_counter() - self.began
            self.graphs_when_ready = compiled_graphs()

    def seconds(self, warm: int) -> list[float]:
        """Of each step after the first `warm`."""
        wait(self.device)
        pairs = list(zip(self.marks[warm - 1 :], self.marks[warm:], strict=False))
        if self.device.type == "cuda":
            return [before.elapsed_time(after) / 1000 for before, after in pairs]
        return [after - before for before, after in pairs]

    def measured(self, warm: int, *, tokens: float, path: str = "") -> Measured:
        steps, graphs = self.seconds(warm), compiled_graphs()

        return Measured(
            statistics.median(steps),
            statistics.fmean(steps),
            tokens,
            peak_bytes=peak_bytes(self.device),
            ready_seconds=self.ready,
            graphs=graphs - self.graphs,
            recompilations=graphs - self.graphs_when_ready,
            path=path,
        )


def peak_bytes(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def compiled_graphs() -> int:
    """How many graphs torch.compile has made since it was last reset."""
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


# ---------------------------------------------------------------- one at a time

_DYNAMO = ("recompile_limit", "fail_on_recompile_limit_hit")  # what our models set for themselves


def ours(device: torch.device, advice: str, measure: Callable[[], Measured]) -> Measured:
    """Our side, by itself. That it does not fit into memory is a finding, which ends with the advice."""
    try:
        return _alone(device, measure)
    except torch.OutOfMemoryError:
        pass  # outside this handler, where the traceback holds nothing any more
    free(device)
    return failure(f"out of memory; {advice}")


def theirs(device: torch.device, measure: Callable[[], Measured]) -> Measured:
    """A peer's side, by itself: its words do not mix with ours, and its failure is a finding."""
    why = ""
    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings(), quietly():
            warnings.simplefilter("ignore")
            return _alone(device, measure)
    except BiphaseError:
        raise
    except torch.OutOfMemoryError:
        why = "out of memory"
    except Exception as wrong:  # whatever another project raises
        why = one_line(wrong)
    free(device)
    return failure(why)


def _alone(device: torch.device, measure: Callable[[], Measured]) -> Measured:
    free(device)
    compiles = device.type == "cuda" or "torch._dynamo" in sys.modules
    dynamo: Any = torch._dynamo.config if compiles else None
    kept = {name: getattr(dynamo, name) for name in _DYNAMO} if dynamo else {}
    try:
        return measure()
    finally:
        for name, value in kept.items():
            setattr(dynamo, name, value)
        free(device)


def free(device: torch.device) -> None:
    """Forget compiled code and give memory back, so that what comes next begins alike."""
    if "torch._dynamo" in sys.modules:
        from torch._dynamo.utils import counters

        torch._dynamo.reset()
        counters.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def with_idle(measured: Measured, kept_seconds: float) -> Measured:
    """The share of a step that is spent waiting for data: what the same step takes less with its data at hand."""
    return replace(measured, idle=max(0.0, 1 - kept_seconds / measured.seconds))
