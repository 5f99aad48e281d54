"""Processes and devices: who computes what, and how they agree."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import sys
from collections.abc import Generator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import transformers

from biphase.errors import TrainingError
from biphase.version import code_version

# Processes wait for each other's fine-tunings, of which one may take hours longer. One that died is noticed at once.
PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class Ranks:
    """This process among its peers."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, *numbers: int) -> list[int]:
        """The sums of some integers over all processes, on the host."""
        if self.world == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(total)
        return total.tolist()

    def sum_float(self, number: float) -> float:
        """The sum of a number over all processes, on the host."""
        if self.world == 1:
            return number
        total = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total)

    def share(self, value: Any) -> Any:
        """The first process's value, for all. JSON values only: torch's own helper would pickle them."""
        if self.world == 1:
            return value
        text = json.dumps(value if self.first else None).encode()
        length = self.sum(len(text) if self.first else 0)[0]
        data = (
            torch.frombuffer(bytearray(text), dtype=torch.uint8)
            if self.first
            else torch.empty(length, dtype=torch.uint8)
        )
        dist.broadcast(data, src=0)
        return json.loads(bytes(data.tolist()))

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, for all, in the order of ranks. JSON values only."""
        if self.world == 1:
            return [value]
        text = json.dumps(value).encode()
        lengths = self.sum(*(len(text) if rank == self.rank else 0 for rank in range(self.world)))
        padded = torch.frombuffer(bytearray(text.ljust(max(lengths))), dtype=torch.uint8)
        all_of_them = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(all_of_them, padded)
        return [json.loads(bytes(one.tolist())) for one in all_of_them]

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()


def join() -> Ranks:
    """Find the device, and the other processes if torchrun started us among them."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1 and not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo") if _one_machine() else None
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=PATIENCE)
    return Ranks(rank, world, device)


def _one_machine() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def leave(code: int) -> NoReturn:
    """End this process, and its part in the group."""
    if not dist.is_initialized():
        sys.exit(code)
    dist.destroy_process_group()
    # All is written. Taking a process of a group down piece by piece, with threads of gloo's and NCCL's own, now and
    # then ends in an abort, and the whole launch would count as failed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[object]:
    """fp32 weights, 16-bit products: bf16 under autocast; fp32 as it is."""
    match precision:
        case "fp32":
            return contextlib.nullcontext()
        case "bf16" | "fp8":  # what is not made in 8 bits is made in 16
            return torch.autocast(device.type, torch.bfloat16)
        case _:
            raise TrainingError(f"precision={precision!r} is not known; say precision='bf16'")


@contextlib.contextmanager
def repeatable(*, enabled: bool) -> Generator[None]:
    """While this lasts, equal inputs give equal bits on a GPU too. Slower: some kernels must not add in any order."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    if enabled:
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # what cuBLAS wants, if it was not used before
        torch.use_deterministic_algorithms(True)
        settings.fill_uninitialized_memory = False  # nothing here reads what was not written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]


def draw_from(seed: int, device: torch.device) -> None:
    """What is drawn from now on, on the host and on `device`, follows from `seed`.

    As torch.manual_seed, but for the kinds of devices that are not used: to each of those that one tells who called,
    which takes the host longer than the seeding, in every step.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)
    torch.default_generator.manual_seed(seed)


def poor_precision(device: torch.device, precision: str, where: str) -> str:
    """What to tell a user whose machine cannot do `precision` well; empty if it can."""
    if precision not in ("bf16", "pure-bf16") or device.type != "cpu" or _cpu_has_bf16():
        return ""
    return (
        "this CPU has no bf16 units and computes bf16 about 50 times slower than fp32; "
        f"here, say precision='fp32' in {where}"
    )


def _cpu_has_bf16() -> bool:
    has = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return any(check() for check in has if check)


def micro_rows(device: torch.device, rows: int, length: int) -> int:
    """Rows a micro-batch where the user says nothing: what keeps this kind of device busy."""
    tokens = 8_192
    if device.type == "cuda":
        large = torch.cuda.get_device_properties(device).total_memory > 100 * 2**30
        tokens = 49_152 if large else 24_576
    most = max(1, min(rows, tokens // length))
    # Equal micro-batches if that costs little: a smaller last one would be one more shape to compile.
    return next((count for count in range(most, most // 2, -1) if rows % count == 0), most)


def joules(device: torch.device) -> float | None:
    """What the GPU has used since its driver was loaded; None where nothing tells: a CPU, or no nvidia-ml-py."""
    if device.type != "cuda":
        return None
    try:
        pynvml = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
    except Exception:  # no library, no driver, or a GPU that does not count: whatever NVML calls it
        return None


def machine(device: torch.device) -> dict[str, str]:
    """What computed a state: recorded, never part of its key."""
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine()
    )
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "biphase": code_version(),
    }
    return {"device": name, **versions, "python": platform.python_version()}
