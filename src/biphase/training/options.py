"""How a run is computed. What it computes stands in its records."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from biphase.errors import SpecError


@dataclass(frozen=True)
class Sharding:
    """Who keeps which weights, gradients and moments where several processes train together.

    none    every process keeps all of them; gradients are summed
    full    every process keeps its rows of each; the rest is fetched layer by layer (FSDP2, ZeRO-3)
    hybrid  the same inside groups of processes; the groups are copies of each other (HSDP)
    """

    kind: Literal["none", "full", "hybrid"] = "none"
    group: int = 0  # processes of a group, where hybrid; 0: those of one machine

    @classmethod
    def named(cls, text: str) -> Sharding:
        """`none`, `full`, `hybrid` or `hybrid:4`."""
        match = re.fullmatch(r"(none|full|hybrid)(?::([1-9][0-9]*))?", text.strip())
        if not match or (match[2] and match[1] != "hybrid"):
            raise SpecError(f"--shard {text}: type none, full, hybrid, or hybrid:4 for groups of 4 processes")
        return cls(match[1], int(match[2] or 0))  # ty: ignore[invalid-argument-type]

    def __str__(self) -> str:
        return f"{self.kind}:{self.group}" if self.group else self.kind

    def groups_of(self, world: int, on_a_machine: int) -> int:
        """How many of `world` processes keep one copy of the model together; `on_a_machine` of them share a machine."""
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
            fits = [one for one in range(2, world + 1) if world % one == 0]
            raise SpecError(
                f"--shard {self}: {world} processes cannot be cut into groups of {size}; "
                f"type --shard hybrid:{min(fits, key=lambda one: abs(one - size))}"
            )
        return size


@dataclass(frozen=True)
class RuntimeOptions:
    """How to compute, never what: nothing here is part of a key."""

    loaders: int = 1
    micro_rows: int = 0  # 0: what suits the device, or what the state was made with
    checkpoint_steps: int = 0  # 0: by time
    checkpoint_seconds: float = 600.0
    compiled: bool | None = None  # torch's compiler; None: on CUDA where there is nothing faster
    deterministic: bool = False  # on a GPU too, the same run gives the same bits; slower
    sharding: Sharding = Sharding()
    recompute: bool = False  # what layers computed is not kept for the backward pass, but made again
    board: Path | None = None
    live: Path | None = None
    quiet: bool = False
    stop: Callable[[], bool] = lambda: False
    lost: Callable[[], bool] = lambda: False  # the lease is another's now: stop, and publish nothing more

    @property
    def slower_path(self) -> str:
        """Why our own kernels for a GPU are not taken; empty if nothing here forbids them."""
        if self.sharding.kind != "none":
            return (
                f"--shard {self.sharding}: layers are compiled by torch; our own kernels need whole weights"
            )
        if self.recompute:
            return (
                "--recompute: layers are compiled by torch; our own kernels choose themselves what they keep"
            )
        return ""
