"""Is a language model better trained by prediction, by masked diffusion, or by a share of each, on text that repeats?

The paper trains 50 models of 470M parameters on 32B tokens: causal rows and masked rows in every step, a share α of
them causal, on text that is read R times. Masked rows draw their ratio from 0 to 1, are weighted by its inverse, and
predict at the position before (MNTP), so that both objectives share one head; the causal loss counts twice.

    study   five shares at four of the nine repetitions, at the paper's shape, optimizer and length, on FineWeb-Edu
    small   the same structure on a CPU: 1M parameters, three shares, the built-in text read once and many times
    gpu     30M parameters, 52M tokens read 1 and 16 times, AdamW in place of Muon, whose steps are not captured

The paper scores what models predict without fine-tuning, causally and in both directions; here they are fine-tuned as
encoders, which is another question: whether the share that suits prediction also suits an encoder.
"""

from dataclasses import replace
from typing import Any

from biphase import (  # fmt: skip
    BPE,
    CLM,
    CORPORA,
    MNTP,
    TASKS,
    WSD,
    AdamW,
    Corpus,
    Finetune,
    Mix,
    Muon,
    Objective,
    Pretrain,
    Rows,
    Size,
    Stage,
    Study,
    Uniform,
)
from biphase.papers.material import GPU, TINY, gpu_study, small_study, text

DIFFUSION = MNTP(Uniform(0, 1), weight="1/ratio")


def objective(share: float) -> Objective:
    """Causal for a share of the rows."""
    if share in (0, 1):
        return CLM() if share else DIFFUSION
    return Mix(((CLM(), share), (DIFFUSION, 1 - share)), weights=((CLM(), 2.0),))


def grid(
    shares: tuple[float, ...],
    repetitions: tuple[int, ...],
    tokens: int,
    corpus: Corpus,
    steps: int,
    **common: Any,
) -> tuple[Pretrain, ...]:
    """One run for each share and number of repetitions; a corpus that is not repeated is taken as it is."""
    runs = []
    for times in repetitions:
        limited = replace(corpus, name=f"{corpus.name}-x{times}", tokens=tokens // times if times > 1 else 0)
        for share in shares:
            name = f"ar{share * 100:.6g}-x{times}"
            runs.append(Pretrain(name, corpus=limited, stages=(Stage(objective(share), steps),), **common))
    return tuple(runs)


BATCH = 2_048 * 2_048
STEPS = 8_192
study = Study(
    "dual-objective",
    grid(
        (0, 1 / 4, 3 / 4, 63 / 64, 1),
        (1, 16, 64, 256),
        32_000_000_000,
        replace(CORPORA["fineweb-edu"], name="fineweb-edu", tokenizer=BPE(51_200)),
        STEPS,
        start=Size(
            "470m",
            layers=24,
            hidden=1_024,
            heads=16,
            kv_heads=16,
            ffn=3_554,
            rope_base=160_000.0,
            norm_eps=1e-7,
        ),
        packing=Rows(2_048),
        batch_tokens=BATCH,
        schedule=WSD(7e-3, warmup=0, decay=0.25),
        optimizer=Muon(adamw=AdamW(betas=(0.9, 0.98), eps=1e-8)),
        z_loss=1e-4,
    ),
    Finetune(TASKS, lrs=(2e-5, 5e-5, 1e-4), protocol="standard"),
    papers=("dual_objective",),
)

small = small_study(
    "dual-objective-small",
    grid(
        (0, 1 / 2, 15 / 16, 1),
        (1, 16),
        120 * 1_024,
        CORPORA["builtin"],
        120,
        schedule=WSD(3e-3, warmup=8, decay=0.25),
        z_loss=1e-4,
        **TINY,
    ),
    papers=("dual_objective",),
)

GPU_STEPS = 1_600
gpu = gpu_study(
    "dual-objective-gpu",
    grid(
        (0, 1 / 4, 3 / 4, 63 / 64, 1),
        (1, 16),
        GPU_STEPS * GPU["batch_tokens"],
        text("english"),
        GPU_STEPS,
        schedule=WSD(2e-3, warmup=0.05, decay=0.25),
        z_loss=1e-4,
        **GPU,
    ),
    papers=("dual_objective",),
)
