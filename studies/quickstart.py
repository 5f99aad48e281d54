"""On a laptop, in minutes: what do causal, masked and causal-then-masked pretraining learn at equal steps?"""

from biphase import CLM, MLM, SIZES, WSD, Chunks, Pretrain, Stage, Study

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


study = Study(
    "quickstart",
    runs=(
        run("clm", Stage(CLM(), STEPS)),
        run("clm-mlm40", Stage(CLM(), SWITCH), Stage(MLM(0.4), STEPS - SWITCH)),
        run("mlm40", Stage(MLM(0.4), STEPS)),
    ),
)
