"""Is a 210M model on one GPU as fast as measured, also in a whole study: real text, a kill, a grid of fine-tunings?

Text and SST-2 are local copies under ./data; docs/performance.md says which, and how long what took.
"""

from dataclasses import replace

from biphase import BPE, CATALOG, CLM, MLM, SIZES, WSD, Chunks, Corpus, Finetune, Pretrain, Stage, Study

text = Corpus("wikipedia", "data/text.jsonl.zst", BPE(128_256), heldout="validation.jsonl.zst")
run = Pretrain(
    "clm-mlm",
    SIZES["210m"],
    corpus=text,
    packing=Chunks(2_048),
    batch_tokens=48 * 2_048,
    stages=(Stage(CLM(), 240), Stage(MLM(0.4), 240)),
    schedule=WSD(5e-4, warmup=30, decay=60),
    heldout_every=1_000,
    heldout_tokens=200_000,
)
grid = Finetune(
    (replace(CATALOG["sst2"], source="data/sst2"),),
    lrs=(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4),
    seeds=range(5),
    protocol="standard",
    precision="bf16",
)
study = Study("speed", runs=(run,), finetune=grid)
