"""Does one model that learns to predict and to fill gaps in every step beat a model that learns one of the two?

The paper won the BabyLM Challenge 2024 with it. A fixed share of the rows of every step is causal, the rest is masked;
masked tokens are predicted at the position before (MNTP), so that both share one head. Particular to it: nine shares
of causal rows, a masking ratio that falls from 30 to 15%, BERT's replacement of masked tokens, and little text that is
read often.

    study   the base model (119M) at all nine shares on 100M words, and the small one (30M) on 10M words with and
            without the falling ratio
    small   the same structure on a CPU: 1M parameters, four shares
    gpu     30M parameters, 6.5M tokens read eight times

The text is FineWeb-Edu, a third of the paper's. Its growing batches and rows, LAMB, gated attention and weighted layers
are not rebuilt: batches have the paper's mean size, rows its first length, and the optimizer is AdamW.
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
    Linear,
    Mix,
    Objective,
    Pretrain,
    Rows,
    Size,
    Stage,
    Study,
)
from biphase.papers.material import BERT, GPU, TINY, gpu_study, small_study, text


def objective(causal: float, ratio: float | Linear) -> Objective:
    """Causal for a share of the rows, masked at a ratio for the others."""
    masked = MNTP(ratio, replace=BERT)
    if causal in (0, 1):
        return CLM() if causal else masked
    return Mix(((CLM(), causal), (masked, 1 - causal)))


def hybrids(
    shares: tuple[float, ...], steps: int, *, ablated: bool = True, mark: str = "", **common: Any
) -> tuple[Pretrain, ...]:
    """A run for each share of causal rows, named by its sixteenths; `ablated`: that of 1/16 at a constant ratio, too."""
    falling = Linear(0.3, 0.15, steps)
    recipes = {f"causal{share * 16:g}{mark}": objective(share, falling) for share in shares}
    if ablated:
        recipes[f"constant{mark}"] = objective(1 / 16, 0.15)
    return tuple(Pretrain(name, stages=(Stage(made, steps),), **common) for name, made in recipes.items())


def babylm(name: str, tokens: int, vocab: int) -> Corpus:
    return replace(CORPORA["fineweb-edu-10b"], name=name, tokenizer=BPE(vocab), tokens=tokens)


def like_the_paper(
    name: str, width: int, ffn: int, steps: int, corpus: Corpus, peak: float
) -> dict[str, Any]:
    """The fields of a run of the full study."""
    heads, warmup = width // 64, round(0.016 * steps)
    return {
        "start": Size(name, layers=12, hidden=width, heads=heads, kv_heads=heads, ffn=ffn, precision="bf16"),
        "corpus": corpus,
        "packing": Rows(128),
        "batch_tokens": 1 << 21,
        "schedule": WSD(peak, warmup=warmup, decay=steps - warmup, shape="cosine", floor=0.1),
        "optimizer": AdamW(betas=(0.9, 0.98), eps=1e-8, clip=2.0),
        "z_loss": 1e-4,
    }


NINE = (0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 15 / 16, 1)
STEPS, STEPS_SMALL = 15_625, 7_812
# A token of so small a vocabulary is about three quarters of a word.
BASE = like_the_paper("gpt-bert-base", 768, 2_560, STEPS, babylm("words-100m", 133_000_000, 16_384), 2e-3)
SMALL = like_the_paper(
    "gpt-bert-small", 384, 1_280, STEPS_SMALL, babylm("words-10m", 13_300_000, 8_192), 3e-3
)
study = Study(
    "gpt-bert",
    (
        *hybrids(NINE, STEPS, ablated=False, **BASE),
        *hybrids((1 / 16,), STEPS_SMALL, mark="-10m", **SMALL),
    ),
    Finetune(TASKS, lrs=(3e-5, 5e-5, 1e-4), seeds=(0, 1, 2), protocol="standard"),
    papers=("gpt_bert",),
)

FOUR = (0, 1 / 16, 15 / 16, 1)
small = small_study(
    "gpt-bert-small",
    hybrids(
        FOUR,
        140,
        corpus="builtin",
        schedule=WSD(3e-3, warmup=0.05, decay=0.9, shape="cosine", floor=0.1),
        z_loss=1e-4,
        **TINY,
    ),
    papers=("gpt_bert",),
)

GPU_STEPS = 1_600
gpu = gpu_study(
    "gpt-bert-gpu",
    hybrids(
        FOUR,
        GPU_STEPS,
        corpus=text("little-english", tokens=GPU_STEPS * GPU["batch_tokens"] // 8),
        schedule=WSD(2e-3, warmup=0.05, decay=0.9, shape="cosine", floor=0.1),
        z_loss=1e-4,
        **GPU,
    ),
    papers=("gpt_bert",),
)
