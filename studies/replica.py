"""On one GPU and real text: is an encoder better pretrained by masking, by prediction, or by one after the other?

The paper's comparison at a small size: about 30M parameters in the blocks, 131M tokens a run, its schedule in its
proportions. Text and tasks are local copies under ./data; docs/results/replica says which, and what came out. The corpus is
read four and a half times, which favours masking: its masks are new each time.
"""

from dataclasses import replace
from typing import Any

from biphase import (  # fmt: skip
    CATALOG,
    CLM,
    MLM,
    SIZES,
    WSD,
    Answer,
    Chunks,
    Corpus,
    Fewer,
    Finetune,
    Pretrain,
    Pretrained,
    Retrieve,
    Splits,
    Stage,
    Study,
    Task,
)

PEAK, ROWS = 1e-3, 64  # by studies/replica_search.py
STEPS = 4_000
ONE_EPOCH = 896  # steps
ON_THE_WAY = (100, 200, 500, ONE_EPOCH, 1_000, 2_000, 3_800)

text = Corpus(
    "core",
    "data/pretrain/*-core.jsonl.zst",
    Pretrained("./data/tokenizers/smollm2", vocab=49_153),
    heldout="validation.jsonl.zst",
)
common: dict[str, Any] = {
    "start": SIZES["30m"],
    "corpus": text,
    "packing": Chunks(512),
    "batch_tokens": ROWS * 512,
    "schedule": WSD(PEAK, warmup=0.05, decay=0.05),
    "precision": "bf16",
    "heldout_every": 200,
    "heldout_tokens": 200_000,
}


def split(causal: int) -> Pretrain:
    """So many percent of CLM, then MLM."""
    first = STEPS * causal // 100
    return Pretrain(
        f"clm{causal}-mlm{100 - causal}",
        stages=(Stage(CLM(), first), Stage(MLM(0.4), STEPS - first)),
        **common,
    )


masked = Pretrain("mlm", stages=(Stage(MLM(0.4), STEPS),), keep=ON_THE_WAY, **common)
causal = Pretrain("clm", stages=(Stage(CLM(), STEPS),), keep=ON_THE_WAY, **common)
continued = [
    Pretrain(f"{base.name}-more", base, stages=(Stage(MLM(0.4), STEPS // 2),)) for base in (causal, masked)
]
runs = (masked, *(split(percent) for percent in (25, 50, 75)), causal, *continued)

tasks = (
    replace(CATALOG["sst2"], source="data/sst2"),
    replace(CATALOG["conll2003"], source="data/conll2003"),
    Task("squad", Answer(), "data/squad", Splits(train="train*", test="validation*")),
    Task(
        "nq_boolq",
        Retrieve(document="Document: {title}. {text}"),
        "data/nq_boolq",
        Splits(train="qrels/train*", test="qrels/test*", cut=0.1),
    ),
)
study = Study(
    "replica",
    runs,
    Finetune(
        tasks,
        lrs=(1e-4, 2e-4, 5e-4),
        seeds=(0, 1, 2),
        protocol="standard",
        on_the_way=Fewer(("sst2", "squad"), lrs=(2e-4,), seeds=(0, 1)),
    ),
    papers=("gisserot2025",),
)
