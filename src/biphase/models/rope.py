"""The base of the rotary positions of a model: longer texts ask for a larger one.

Of a model whose layers differ in it (windows and whole texts), only those that see whole texts change: a window never
grows. The rotations are buffers, changed in place, so a compiled model follows.
"""

from __future__ import annotations

from typing import Any

import torch

from biphase.errors import ModelError

WINDOWS = ("sliding_attention", "chunked_attention")


def set_rope_base(model: Any, base: float) -> None:
    """Turn positions by `base` from now on, also in the model's configuration."""
    config = model.config
    said = getattr(config, "rope_parameters", None)
    tables = [
        module for _, module in model.named_modules() if any("inv_freq" in name for name, _ in _own(module))
    ]
    if not isinstance(said, dict) or not tables:
        raise ModelError(f"{type(model).__name__} has no rotary positions; leave out rope_base")
    nested = {kind: one for kind, one in said.items() if isinstance(one, dict)}
    changed = [one for kind, one in nested.items() if kind not in WINDOWS] if nested else [said]
    for one in changed:
        one["rope_theta"] = float(base)
    for table in tables:
        fresh = type(table)(config=config)
        for (name, buffer), (same, value) in zip(_own(table), _own(fresh), strict=True):
            if name != same or buffer.shape != value.shape:
                raise ModelError(
                    f"{type(model).__name__} makes its rotary positions in a way that is not known here"
                )
            with torch.no_grad():
                buffer.copy_(value)


def rope_base_of(model: Any) -> float:
    """The base that texts as a whole are turned by; 0 where there is none."""
    said = getattr(model.config, "rope_parameters", None) or {}
    nested = [one for kind, one in said.items() if isinstance(one, dict) and kind not in WINDOWS]
    return float((nested[0] if nested else said).get("rope_theta") or 0.0)


def _own(module: Any) -> list[tuple[str, torch.Tensor]]:
    return list(module.named_buffers(recurse=False))
