"""biphase: the workbench for pretraining text encoders."""

from biphase import specs
from biphase.catalog import CATALOG, TASKS
from biphase.presets import CORPORA, LLAMA3, SIZES
from biphase.specs import *  # noqa: F403  (every record of a study)
from biphase.version import __version__

__all__ = [*specs.__all__, "CATALOG", "CORPORA", "LLAMA3", "SIZES", "TASKS", "__version__", "load"]  # noqa: F405


def __getattr__(name: str) -> object:
    """`load` needs torch, which planning does without: so it is imported when it is asked for."""
    if name != "load":
        raise AttributeError(f"module 'biphase' has no attribute {name!r}")
    from biphase.models.backbone import load

    return load
