"""Which peak learning rate and batch suit each objective at 2M and 8M parameters?"""

from biphase import CLM, MLM, SIZES, WSD, Chunks, Corpus, Pretrain, Pretrained, Stage, Study

text = Corpus(
    "core",
    "data/pretrain/*-core.jsonl.zst",
    Pretrained("./tokenizer", vocab=16_384),
    heldout="validation.jsonl.zst",
)
SEED = 99


def run(size, name, objective, rows, peak, tokens):
    return Pretrain(
        f"{size}-{name}-{rows}rows-{peak:g}",
        SIZES[size],
        corpus=text,
        packing=Chunks(256),
        batch_tokens=rows * 256,
        stages=(Stage(objective, tokens // (rows * 256)),),
        schedule=WSD(peak, warmup=0.05, decay=0.1),
        precision="bf16",
        heldout_every=100_000,
        heldout_tokens=200_000,
        seed=SEED,
    )


objectives = (("mlm", MLM(0.4)), ("clm", CLM()))
grid = [("8m", 128, peak, 98_304_000) for peak in (5e-4, 1e-3, 2e-3, 4e-3)]
grid += [("2m", 128, peak, 65_536_000) for peak in (1e-3, 2e-3, 4e-3, 8e-3)]
grid += [("2m", 32, peak, 32_768_000) for peak in (1e-3, 2e-3, 4e-3)]
study = Study(
    "search",
    tuple(
        run(size, name, o, rows, peak, tokens) for size, rows, peak, tokens in grid for name, o in objectives
    ),
    papers="gisserot2025",
)
