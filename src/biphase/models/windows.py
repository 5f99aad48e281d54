"""Layers that see only a part of the text, as a configuration says it."""

from __future__ import annotations

import re
from typing import Any


def windows_of(config: Any) -> dict[str, int]:
    """How wide each window is, by the name of its field."""
    return {
        name: value
        for name, value in config.to_dict().items()
        if re.search("window|chunk|local_attention", name)
        and not re.search("pattern|layers", name)  # which layers have one
        and isinstance(value, int)
        and not isinstance(value, bool)
        and value > 1
    }


def narrowest(config: Any) -> int | None:
    """The narrowest window that some layer has; None where none has one."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and not any("sliding" in str(kind) or "chunked" in str(kind) for kind in kinds):
        return None
    return min(windows_of(config).values(), default=None)


def as_decoder(config: Any) -> None:
    """Take back what an export says so that plain transformers reads a decoder in both directions.

    Here the direction is an argument. transformers counts a window to both sides without the token itself, and one to
    the past with it, as we count both.
    """
    if vars(config).get("is_causal", True):
        return
    del config.is_causal
    for name in windows_of(config):
        setattr(config, name, getattr(config, name) + 1)  # which may not be what it writes down
