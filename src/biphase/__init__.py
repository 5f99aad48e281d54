"""biphase: the workbench for pretraining text encoders."""

from biphase.presets import CORPORA, LLAMA3, SIZES, TASKS
from biphase.specs import (
    BPE,
    CLM,
    MLM,
    MNTP,
    WSD,
    AdamW,
    Chunks,
    Corpus,
    Cosine,
    Finetune,
    Hub,
    Linear,
    Pretrain,
    Pretrained,
    Rows,
    Size,
    Stage,
    Study,
    Task,
)

__version__ = "0.1.0"

__all__ = [
    "BPE", "CLM", "CORPORA", "LLAMA3", "MLM", "MNTP", "SIZES", "TASKS", "WSD", "AdamW", "Chunks", "Corpus",
    "Cosine", "Finetune", "Hub", "Linear", "Pretrain", "Pretrained", "Rows", "Size", "Stage", "Study", "Task",
    "__version__",
]  # fmt: skip
