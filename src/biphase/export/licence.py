"""The licence of the model that another was made from, as its own card says it."""

from __future__ import annotations

import re
from pathlib import Path

from biphase.specs import Hub

_NAME = re.compile(r"[\w.+-]{1,60}")


def licence_of(hub: Hub) -> str:
    """The `license:` of its card; empty where nothing is said, or nothing that can be passed on."""
    from huggingface_hub import metadata_load

    try:
        said = (metadata_load(_card_file(hub)) or {}).get("license")
    except Exception:  # no card, no network, or a card that is no YAML: then nobody said anything
        return ""
    return said if isinstance(said, str) and _NAME.fullmatch(said) else ""


def _card_file(hub: Hub) -> Path:
    if hub.local:
        return Path(hub.source).expanduser() / "README.md"
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(hub.source, "README.md", revision=hub.revision))
