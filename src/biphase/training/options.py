"""Runtime options: how a run is computed. What is computed is in the study's records."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from biphase.errors import SpecError
from biphase.tracking import TrackedRun


@dataclass(frozen=True)
class Sharding:
    """How weights, gradients and optimizer state are distributed over processes.

    none    every process holds all of them; gradients are summed
    full    every process holds its rows of each; the rest is gathered layer by layer (FSDP2, ZeRO-3)
    hybrid  full inside groups of processes; the groups are copies of each other (HSDP)
    """

    kind: Literal["none", "full", "hybrid"] = "none"
    group: int = 0  # processes per group for hybrid; 0: those of one machine

    @classmethod
    def named(cls, text: str) -> Sharding:
        """Parse `none`, `full`, `hybrid` or `hybrid:4`."""
        match = re.fullmatch(r"(none|full|hybrid)(?::([1-9][0-9]*))?", text.strip())
        if not match or (match[2] and match[1] != "hybrid"):
            raise SpecError(f"--shard {text}: type none, full, hybrid, or hybrid:4 for groups of 4 processes")
        return cls(match[1], int(match[2] or 0))  # ty: ignore[invalid-argument-type]

    def __str__(self) -> str:
        return f"{self.kind}:{self.group}" if self.group else self.kind

    def groups_of(self, world: int, on_a_machine: int) -> int:
        """Return how many of `world` processes hold one copy of the model together.

        `on_a_machine` is the number of processes per machine.
        """
        match self.kind:
            case "none":
                return 1
            case "full":
                return world
        size = self.group or on_a_machine
        if not self.group and size >= world:
            raise SpecError(
                f"--shard hybrid: all {world} processes are on one machine; type --shard full, or say how many keep "
                f"a copy together: --shard hybrid:{max(2, world // 2)}"
            )
        if world % size or size == 1:
            divisors = [n for n in range(2, world + 1) if world % n == 0]
            raise SpecError(
                f"--shard {self}: {world} processes cannot be cut into groups of {size}; "
                f"type --shard hybrid:{min(divisors, key=lambda divisor: abs(divisor - size))}"
            )
        return size


@dataclass(frozen=True)
class RuntimeOptions:
    """Runtime options, none of which is part of a key."""

    loaders: int = 1
    micro_rows: int = 0  # rows per micro-batch; 0: as in the checkpoint, or what suits the device
    checkpoint_steps: int = 0  # steps between checkpoints; 0: by time
    checkpoint_seconds: float = 600.0
    compiled: bool | None = None  # torch.compile; None: on CUDA if our own kernels do not support the model
    graphs: bool = True  # capture steps as CUDA graphs where our own kernels compute them
    deterministic: bool = False  # bitwise reproducible on a GPU too; slower
    sharding: Sharding = Sharding()
    recompute: bool = False  # activation checkpointing: recompute activations in the backward pass
    track: tuple[str, ...] = ()  # names of trackers; none: TensorBoard, if installed, for training jobs
    tracked: TrackedRun | None = None  # the training job, in the trackers
    live: Path | None = None
    quiet: bool = False
    study_left: Callable[[], str] = lambda: ""  # the time that the whole study will still take, for progress
    stop: Callable[[], bool] = lambda: False
    lost: Callable[[], bool] = lambda: False  # another worker has the lease: stop, publish nothing

    @property
    def slower_path(self) -> str:
        """Why these options prevent our own GPU kernels from being used; "" if they do not."""
        if self.sharding.kind != "none":
            return (
                f"--shard {self.sharding}: layers are compiled by torch; our own kernels need whole weights"
            )
        if self.recompute:
            return (
                "--recompute: layers are compiled by torch; our own kernels choose themselves what they keep"
            )
        return ""
