"""On a laptop, in minutes: what do causal, masked and causal-then-masked pretraining learn at equal steps?"""

from dataclasses import replace

from biphase import CATALOG, CLM, MLM, SIZES, WSD, Chunks, Finetune, Pretrain, Stage, Study

STEPS, SWITCH = 240, 120


def run(name, *stages):
    return Pretrain(
        name,
        start=SIZES["1m"],
        corpus="builtin",
        stages=stages,
        packing=Chunks(256),
        batch_tokens=2_048,
        schedule=WSD(peak=3e-3, warmup=20, decay=40),
        heldout_every=20,
        heldout_tokens=8_192,
    )


def task(name, steps, batch):
    return replace(CATALOG[name], steps=steps, batch=batch)


study = Study(
    "quickstart",
    runs=(
        run("clm", Stage(CLM(), STEPS)),
        run("clm-mlm40", Stage(CLM(), SWITCH), Stage(MLM(0.4), STEPS - SWITCH)),
        run("mlm40", Stage(MLM(0.4), STEPS)),
    ),
    finetune=Finetune(
        (
            task("sources-mini", steps=14, batch=16),
            task("wikiann-mini", steps=25, batch=32),
            task("squadshifts-mini", steps=6, batch=16),
            task("scifact-mini", steps=8, batch=12),
        ),
        lrs=(2e-3, 4e-3),
        seeds=(0, 1),
        protocol="standard",
        precision="fp32",  # a laptop's CPU computes bf16 slowly
        documents="judged",
    ),
    papers=("gisserot2025",),
)
