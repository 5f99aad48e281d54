"""The GPU path: fused element-wise kernels, attention kernels, and a hand-written backward pass for known families.

Two modules have the same functions: `kernels` in Triton, for speed, and `plain` in torch, for other devices and as the
reference that `kernels` is tested against. Sums are in fp32 whatever the dtype of the tensors. No function waits for
the host, and all are deterministic.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType

import torch


def of(device: torch.device) -> ModuleType:
    """Return the module of kernels for `device`."""
    return importlib.import_module(f"biphase.fast.{'kernels' if fast_on(device) else 'plain'}")


def lacking(device: torch.device) -> str:
    """Return why there are no Triton kernels for `device`; "" if there are."""
    if device.type != "cuda":
        return f"there are no kernels for {device.type}"
    if torch.version.hip:  # ROCm's device type is "cuda" too
        return "there are no kernels for AMD's GPUs"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "this GPU has no bf16 units"
    return "" if importlib.util.find_spec("triton") else "triton is not installed"


@cache
def fast_on(device: torch.device) -> bool:
    """Return whether the Triton kernels can be used on `device`."""
    return not lacking(device)
