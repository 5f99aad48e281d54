"""biphase: pretrain text encoders with causal and masked objectives, and measure which is better."""

from biphase.catalog import CATALOG, TASKS
from biphase.presets import CORPORA, LLAMA3, SIZES
from biphase.specs import (
    BPE,
    CLM,
    MLM,
    MNTP,
    WSD,
    AdamW,
    Answer,
    Chunks,
    Claim,
    Classify,
    Corpus,
    Cosine,
    Fewer,
    Finetune,
    Hub,
    Linear,
    LoRA,
    Pretrain,
    Pretrained,
    Retrieve,
    Rows,
    Size,
    Splits,
    Stage,
    Study,
    Tag,
    Task,
)
from biphase.version import __version__

__all__ = [
    "BPE", "CATALOG", "CLM", "CORPORA", "LLAMA3", "MLM", "MNTP", "SIZES", "TASKS", "WSD", "AdamW", "Answer",
    "Chunks", "Claim", "Classify", "Corpus", "Cosine", "Fewer", "Finetune", "Hub", "Linear", "LoRA", "Pretrain", "Pretrained",
    "Retrieve", "Rows", "Size", "Splits", "Stage", "Study", "Tag", "Task", "__version__", "load",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import `load` when it is first used, because it needs torch and planning does not."""
    if name != "load":
        raise AttributeError(f"module 'biphase' has no attribute {name!r}")
    from biphase.models.loaded import load

    return load
