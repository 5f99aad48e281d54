"""Which peak learning rate and which batch suit both objectives, for studies/replica.py?

A tenth of its budget each. The best pair is the one whose held-out losses, each as a distance from the lowest of its
objective, add up to the least.
"""

from biphase import CLM, MLM, SIZES, WSD, Chunks, Corpus, Pretrain, Pretrained, Stage, Study

TOKENS = 200 * 128 * 512

text = Corpus(
    "core",
    "data/pretrain/*-core.jsonl.zst",
    Pretrained("./data/tokenizers/smollm2", vocab=49_153),
    heldout="validation.jsonl.zst",
)
runs = [
    Pretrain(
        f"{name}-{rows}rows-{peak:g}",
        SIZES["30m"],
        corpus=text,
        packing=Chunks(512),
        batch_tokens=rows * 512,
        stages=(Stage(objective, TOKENS // (rows * 512)),),
        schedule=WSD(peak, warmup=0.05, decay=0.05),
        precision="bf16",
        heldout_every=10_000,
        heldout_tokens=200_000,
    )
    for name, objective in (("mlm", MLM(0.4)), ("clm", CLM()))
    for rows in (64, 128)
    for peak in (5e-4, 1e-3, 2e-3)
]
study = Study("replica-search", tuple(runs), papers=("gisserot2025",))
