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


def as_decoder(config: Any) -> None:
    """Take back what an export says so that plain transformers reads a decoder in both directions.

    Here the direction is an argument. transformers counts a window to both sides without the token itself, and one to
    the past with it, as we count both.
    """
    if vars(config).get("is_causal", True):
        return
    del config.is_causal
    for name, width in windows_of(config).items():
        setattr(config, name, width + 1)
