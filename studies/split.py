"""On a laptop, in minutes: which share of a small budget should be causal before masked pretraining?

Four splits of 160 steps, from MLM alone (0%) to three quarters of CLM, with two pretraining seeds. The splits of a seed
branch off one CLM trunk, so each costs only its own MLM stage. After `biphase run studies/split.py`, type

    biphase split studies/split.py

It names the splits that may be best, what to train next, and the runs that confirm the choice on a fresh seed.
"""

from dataclasses import replace

from biphase import CATALOG, CLM, MLM, SIZES, WSD, Chunks, Finetune, Pretrain, Stage, Study

STEPS, DECAY = 160, 30
CAUSAL = (
    0,
    40,
    80,
    120,
)  # steps of CLM; the MLM stage must contain the decay, or the trunk could not be shared
SEEDS = (0, 1)  # of pretraining; from three on, the intervals are about the recipe and not about these seeds


def run(causal, seed):
    stages = (Stage(CLM(), causal),) if causal else ()
    return Pretrain(
        f"clm{causal}-mlm40-{STEPS}-seed{seed}",
        start=SIZES["1m"],
        corpus="builtin",
        stages=(*stages, Stage(MLM(0.4), STEPS - causal)),
        packing=Chunks(256),
        batch_tokens=2_048,
        schedule=WSD(peak=3e-3, warmup=20, decay=DECAY),
        seed=seed,
        heldout_every=40,
        heldout_tokens=8_192,
    )


def task(name, steps, batch):
    return replace(CATALOG[name], steps=steps, batch=batch)


study = Study(
    "split",
    runs=tuple(run(causal, seed) for seed in SEEDS for causal in CAUSAL),
    finetune=Finetune(
        (task("sources-mini", steps=14, batch=16), task("wikiann-mini", steps=25, batch=32)),
        lrs=(4e-3,),  # one rate keeps this example short; a real study tries several
        seeds=(0, 1),
        protocol="standard",
        precision="fp32",  # a laptop's CPU computes bf16 slowly
    ),
    effect=2.0,  # points: "any split between a and b loses less than 2 points"
)
