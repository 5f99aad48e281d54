"""biphase: pretrain text encoders with causal and masked objectives, and measure which is better."""

import importlib

from biphase import specs
from biphase.catalog import CATALOG, TASKS
from biphase.papers import PRESETS
from biphase.presets import CONFIGS, CORPORA, LLAMA3, SIZES, modernbert
from biphase.specs import *  # noqa: F403  (every record of a study)
from biphase.version import __version__

# Imported when they are first used: `load` needs torch, and planning does not.
_LATER = {"Workbench": "biphase.workbench", "load": "biphase.models.backbone"}

__all__ = [
    *specs.__all__,
    *_LATER,
    "CATALOG",
    "CONFIGS",
    "CORPORA",
    "LLAMA3",
    "PRESETS",
    "SIZES",
    "TASKS",
    "__version__",
    "modernbert",
]


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'biphase' has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
