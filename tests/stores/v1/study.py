"""Can a store of this version be read by the next ones? `biphase run study.py` wrote the store beside this file."""

from biphase import (
    BPE,
    CLM,
    WSD,
    Chunks,
    Classify,
    Corpus,
    Finetune,
    Pretrain,
    Size,
    Splits,
    Stage,
    Study,
    Task,
)

run = Pretrain(
    "clm",
    start=Size("tiniest", layers=1, hidden=4, heads=2, kv_heads=1, ffn=8, precision="fp32"),
    corpus=Corpus("toys", "text.jsonl", BPE(300), heldout="heldout.jsonl"),
    stages=Stage(CLM(), 8),
    packing=Chunks(32),
    batch_tokens=4 * 32,
    schedule=WSD(peak=3e-3, warmup=1, decay=0),
    heldout_tokens=64,
)
toys = Task(
    "toys", Classify("{text}", ("beast", "place")), "toys", Splits(validation="validation*"), steps=2, batch=4
)
study = Study("v1", run, Finetune(toys, lrs=1e-3, seeds=(0,), protocol="standard", precision="fp32"))
