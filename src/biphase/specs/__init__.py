"""The words of a study: what is trained, on what, how, and what is done with it.

A study is a Python file that builds these records. They hold plain values and each other, so a study
can be written out, hashed and read back; nothing in them names a device or a folder of results.
The paper's recipe (arXiv 2507.00994) is the default of every field: a departure is a field that says so.
"""

from biphase.specs.claims import Claim
from biphase.specs.objectives import CLM, MLM, MNTP, Cosine, Linear, Objective
from biphase.specs.sources import BPE, Chunks, Corpus, Hub, Pretrained, Rows, Size
from biphase.specs.study import Fewer, Finetune, Study
from biphase.specs.tasks import Answer, Classify, Family, Retrieve, Splits, Tag, Task
from biphase.specs.training import WSD, AdamW, LoRA, Pretrain, Stage

__all__ = [
    "BPE",
    "CLM",
    "MLM",
    "MNTP",
    "WSD",
    "AdamW",
    "Answer",
    "Chunks",
    "Claim",
    "Classify",
    "Corpus",
    "Cosine",
    "Family",
    "Fewer",
    "Finetune",
    "Hub",
    "Linear",
    "LoRA",
    "Objective",
    "Pretrain",
    "Pretrained",
    "Retrieve",
    "Rows",
    "Size",
    "Splits",
    "Stage",
    "Study",
    "Tag",
    "Task",
]
