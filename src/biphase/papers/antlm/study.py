"""On little text that is read for many epochs: do epochs of CLM before and after MLM make a better model than either?

The paper changes the objective and, with it, the direction of attention between epochs: 4 epochs of CLM, 16 of MLM, 4
of CLM, on the 10M words of BabyLM's strict-small track. Particular to it: the objective changes twice, training ends
with CLM, and every objective sees the same text several times.

    study   LTG-BERT's shape, 24 epochs of 10M words; beside it MLM alone, CLM alone, and CLM for 8 epochs, then MLM
    small   the same structure on a CPU: 1M parameters, 1, 4 and 1 epochs of 25k tokens
    gpu     30M parameters, 24 epochs of 2.2M tokens

Only the abstract could be looked up. The text is FineWeb-Edu; masks (15%, BERT's), batch, rate and schedule are ours.
Epochs are written in steps, since a plan knows the size of a corpus only once it is tokenized.
"""

from dataclasses import replace
from typing import Any

from biphase import (  # fmt: skip
    BPE,
    CLM,
    CORPORA,
    MLM,
    TASKS,
    WSD,
    AdamW,
    Alternate,
    Corpus,
    Finetune,
    Pretrain,
    Rows,
    Size,
    Stage,
    Study,
)
from biphase.papers.material import BERT, GPU, TINY, gpu_study, small_study, text

MASKED = MLM(0.15, replace=BERT)


def ants(causal: int, masked: int, epoch: int, corpus: Corpus, **common: Any) -> tuple[Pretrain, ...]:
    """CLM, MLM and CLM for so many epochs, of `epoch` steps each, and what it is compared with."""
    ends, middle = causal * epoch, masked * epoch
    recipes = {
        "ant": Alternate((CLM(), ends), (MASKED, middle), (CLM(), ends)),
        "mlm": (Stage(MASKED, 2 * ends + middle),),
        "clm": (Stage(CLM(), 2 * ends + middle),),
        "clm-mlm": (Stage(CLM(), 2 * ends), Stage(MASKED, middle)),
    }
    return tuple(Pretrain(name, stages=stages, corpus=corpus, **common) for name, stages in recipes.items())


WORDS = 13_300_000  # tokens: about 10M words
BATCH = 64 * 512
study = Study(
    "antlm",
    ants(
        4,
        16,
        WORDS // BATCH,
        replace(CORPORA["fineweb-edu-10b"], name="words-10m", tokenizer=BPE(16_384), tokens=WORDS),
        start=Size("ltg-bert", layers=12, hidden=768, heads=12, kv_heads=12, ffn=2_048),
        packing=Rows(512),
        batch_tokens=BATCH,
        schedule=WSD(5e-4, warmup=0.02, decay=0.98, shape="cosine", floor=0.1),
        optimizer=AdamW(betas=(0.9, 0.98)),
    ),
    Finetune(TASKS, lrs=(2e-5, 5e-5, 1e-4), protocol="standard"),
    papers=("antlm",),
)

EPOCH = 24
small = small_study(
    "antlm-small",
    ants(
        1,
        4,
        EPOCH,
        replace(CORPORA["builtin"], name="little", tokens=EPOCH * TINY["batch_tokens"]),
        schedule=WSD(3e-3, warmup=0.05, decay=0.25),
        **TINY,
    ),
    papers=("antlm",),
)

GPU_EPOCH = 68
gpu = gpu_study(
    "antlm-gpu",
    ants(
        4,
        16,
        GPU_EPOCH,
        text("little-english", tokens=GPU_EPOCH * GPU["batch_tokens"]),
        schedule=WSD(2e-3, warmup=0.05, decay=0.25),
        **GPU,
    ),
    papers=("antlm",),
)
