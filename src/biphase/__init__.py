"""biphase: pretrain text encoders with causal and masked objectives, and measure which is better."""

from biphase import specs
from biphase.catalog import CATALOG, PRESETS, TASKS
from biphase.presets import CONFIGS, CORPORA, LLAMA3, SIZES, modernbert
from biphase.specs import *  # noqa: F403  (every record of a study)
from biphase.version import __version__

__all__ = [
    *specs.__all__,
    "CATALOG", "CONFIGS", "CORPORA", "LLAMA3", "PRESETS", "SIZES", "TASKS", "__version__", "load", "modernbert",  # noqa: F405
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import `load` when it is first used, because it needs torch and planning does not."""
    if name != "load":
        raise AttributeError(f"module 'biphase' has no attribute {name!r}")
    from biphase.models.backbone import load

    return load
