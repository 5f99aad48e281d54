"""biphase: the workbench for pretraining text encoders."""

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
    """`load` needs torch, which planning does without: so it is imported when it is asked for."""
    if name != "load":
        raise AttributeError(f"module 'biphase' has no attribute {name!r}")
    from biphase.models.backbone import load

    return load
