"""Does an encoder adapt better to a domain by a detour through causal language modeling than by MLM throughout?

The paper continues ModernBERT on biomedical text: CLM for 50B tokens, then MLM 15% for 5B while the learning rate
decays, against MLM on the same text for as many steps. In three more runs some layers are frozen while the objective is
causal, or the MLM phase is as long as the causal one.

    study   ModernBERT-base at the length of the paper, on PubMed abstracts: the paper's mix has text that is not public
    small   the same structure on a CPU: an encoder of 1M parameters, made here by MLM, goes on with the built-in text
    gpu     30M parameters, made here by MLM on general English, goes on with articles of eLife: life sciences
"""

from dataclasses import replace
from typing import Any

from biphase import CATALOG, CLM, MLM, SIZES, WSD, AdamW, Finetune, Hub, Pretrain, Rows, Stage, Study
from biphase.papers.material import GPU, TINY, gpu_study, pubmed, small_study, text
from biphase.specs import Pretrained

MASKED = MLM(0.15)
LAYERS = 22  # of ModernBERT-base: the paper freezes 0 to 7, the lower third, and 8 to 14
DETOUR, EVEN = 10 / 11, 1 / 2  # of the steps, before MLM: 50B of 55B tokens, and as many as of MLM


def detours(
    start: Pretrain | Hub, steps: int, peak: float, warmup: float, layers: int, **fields: Any
) -> tuple[Pretrain, ...]:
    """MLM throughout, and every detour of the paper, from one start."""
    low, mid = round(layers * 8 / LAYERS), round(layers * 15 / LAYERS)
    schedule = WSD(peak, warmup=warmup, decay=steps - round(steps * DETOUR), shape="1-sqrt", floor=0.1)
    common: dict[str, Any] = {"start": start, "schedule": schedule} | fields

    def detour(name: str, share: float = DETOUR, freeze: tuple[str, ...] = ()) -> Pretrain:
        causal = round(steps * share)
        stages = Stage(CLM(), causal, freeze=freeze), Stage(MASKED, steps - causal)
        return Pretrain(f"{name}{mark}", stages=stages, **common)

    mark = start.name.removeprefix("base") if isinstance(start, Pretrain) else ""
    return (
        Pretrain(f"mlm{mark}", stages=(Stage(MASKED, steps),), **common),
        detour("detour"),
        detour("detour-even", EVEN),
        detour("frozen-low", freeze=(f"layers[:{low}]",)),
        detour("frozen-mid", freeze=(f"layers[{low}:{mid}]",)),
    )


modernbert = Hub("answerdotai/ModernBERT-base", revision="8949b909ec900327062f0ebf497f51aef5e6f0c8")
BATCH = 384 * 8_192
study = Study(
    "detour",
    detours(
        modernbert,
        steps=55_000_000_000 // BATCH,
        peak=2e-4,
        warmup=0.02,
        layers=LAYERS,
        corpus=replace(
            pubmed("pubmed"), tokenizer=Pretrained(modernbert.source, revision=modernbert.revision)
        ),
        packing=Rows(8_192),
        batch_tokens=BATCH,
        optimizer=AdamW(betas=(0.9, 0.98)),
        precision="bf16",
    ),
    Finetune(
        tuple(CATALOG[name] for name in ("scifact", "mnli", "conll2003")),
        lrs=(2e-5, 5e-5, 1e-4),
        seeds=tuple(range(9)),
        protocol="standard",
    ),
    papers=("detour",),
)


def base(name: str, steps: int, peak: float, **fields: Any) -> Pretrain:
    """The encoder that is adapted in the small studies: MLM 30% as in ModernBERT, decayed."""
    schedule = WSD(peak, warmup=0.05, decay=0.1)
    return Pretrain(name, stages=(Stage(MLM(0.3), steps),), schedule=schedule, **fields)


tiny = base("base", 160, 3e-3, corpus="builtin", **TINY)
small = small_study(
    "detour-small",
    (tiny, *detours(tiny, 110, 2e-3, 4, SIZES["1m"].layers, optimizer_state="reset")),
    papers=("detour",),
)

SEEDS = (1, 2, 3)
STEPS, ADAPTING = 1_600, 770  # of 32,768 tokens: 52M and 25M a run, with all seeds 510M
life = text("life", "elife-*.jsonl.zst", hub=pubmed("life"))
general = text("general", "[bfostw]*-*.jsonl.zst")


def on_gpu(seed: int) -> tuple[Pretrain, ...]:
    made = base(f"base-s{seed}", STEPS, 2e-3, corpus=general, seed=seed, **GPU)
    adapted = {"corpus": life, "data": "restart", "optimizer_state": "reset"}
    return made, *detours(made, ADAPTING, 1e-3, 40, SIZES["30m"].layers, **adapted)


gpu = gpu_study(
    "detour-gpu",
    tuple(run for seed in SEEDS for run in on_gpu(seed)),
    papers=("detour",),
    seeds=(0, 1),
)
