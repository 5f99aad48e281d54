"""The records of a study: what is trained, on which data, how, and how the results are evaluated.

A study is a Python file that builds these records. They contain only plain values and each other, so a study can be
written as JSON, hashed and read back; none of them names a device or a results folder. The defaults are the recipe of
arXiv 2507.00994, so a study states only where it differs from that paper.
"""

from biphase.specs.claims import Claim
from biphase.specs.objectives import (
    CLM,
    MLM,
    MNTP,
    Contrastive,
    Cosine,
    Linear,
    Mix,
    Objective,
    RowObjective,
    Uniform,
)
from biphase.specs.sources import (
    BPE,
    Blend,
    Chunks,
    Config,
    Corpus,
    Hub,
    Packing,
    Pairs,
    Pretrained,
    Rows,
    Size,
)
from biphase.specs.study import Discard, Fewer, Finetune, Study
from biphase.specs.tasks import (
    Answer,
    Choose,
    Classify,
    Family,
    MultiLabel,
    Regress,
    Retrieve,
    Splits,
    Tag,
    Task,
)
from biphase.specs.training import WSD, AdamW, Alternate, Kept, LoRA, Merge, Muon, Phase, Pretrain, Stage

__all__ = [
    "BPE", "CLM", "MLM", "MNTP", "WSD", "AdamW", "Alternate", "Answer", "Blend", "Choose", "Chunks", "Claim", "Classify",
    "Config", "Contrastive", "Corpus", "Cosine", "Discard", "Family", "Fewer", "Finetune", "Hub", "Kept", "Linear", "LoRA",
    "Merge", "Mix", "MultiLabel", "Muon", "Objective", "Packing", "Pairs", "Phase", "Pretrain", "Pretrained", "Regress", "Retrieve",
    "RowObjective", "Rows", "Size", "Splits", "Stage", "Study", "Tag", "Task", "Uniform",
]  # fmt: skip
