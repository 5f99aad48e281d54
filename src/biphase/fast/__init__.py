"""What stands between the matrix products of a model, each as one pass over memory.

Two modules with the same functions: `cuda` in Triton, for speed, and `plain` in torch, for every other device and as
what `cuda` is tested against. Sums are kept in fp32 whatever the tensors are in. Nothing here waits for the host,
and no result depends on which thread came first.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType

import torch


def of(device: torch.device) -> ModuleType:
    """The kernels for `device`."""
    return importlib.import_module(f"biphase.fast.{'kernels' if fast_on(device) else 'plain'}")


def lacking(device: torch.device) -> str:
    """Why there are no fast kernels for `device`; empty if there are."""
    if device.type != "cuda":
        return f"there are no kernels for {device.type}"
    if torch.version.hip:  # which calls itself cuda
        return "there are no kernels for AMD's GPUs"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "this GPU has no bf16 units"
    return "" if importlib.util.find_spec("triton") else "triton is not installed"


@cache
def fast_on(device: torch.device) -> bool:
    """Are there kernels for this device, and is what they are written in installed?"""
    return not lacking(device)
