"""How a run is computed. What it computes stands in its records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Manner:
    """How to compute, never what: nothing here is part of a key."""

    loaders: int = 1
    micro_rows: int = 0  # 0: what suits the device, or what the state was made with
    checkpoint_steps: int = 0  # 0: by time
    checkpoint_seconds: float = 600.0
    compiled: bool | None = None  # torch's compiler; None: on CUDA where there is nothing faster
    deterministic: bool = False  # on a GPU too, the same run gives the same bits; slower
    board: Path | None = None
    live: Path | None = None
    quiet: bool = False
    stop: Callable[[], bool] = lambda: False
    lost: Callable[[], bool] = lambda: False  # the lease is another's now: stop, and publish nothing more
