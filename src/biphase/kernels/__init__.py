"""What stands between the matrix products of a model, each as one pass over memory.

Two modules with the same functions: `cuda` in Triton, for speed, and `plain` in torch, for every other device and as
what `cuda` is tested against. Sums are kept in fp32 whatever the tensors are in. Nothing here waits for the host,
and no result depends on which thread came first.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import torch


def of(device: torch.device) -> ModuleType:
    """The kernels for `device`."""
    return importlib.import_module(f"biphase.kernels.{'cuda' if fast_on(device) else 'plain'}")


def fast_on(device: torch.device) -> bool:
    """Are there kernels for this kind of device, and is what they are written in installed?"""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
