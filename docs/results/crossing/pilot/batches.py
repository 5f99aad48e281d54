"""Which peak learning rate suits batches of 32 and 512 rows at 2M parameters, and a model of 30M?"""

from biphase import CLM, MLM, SIZES, WSD, Chunks, Corpus, Pretrain, Pretrained, Stage, Study

text = Corpus(
    "core",
    "data/pretrain/*-core.jsonl.zst",
    Pretrained("./tokenizer", vocab=16_384),
    heldout="validation.jsonl.zst",
)


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
        seed=99,
    )


objectives = (("mlm", MLM(0.4)), ("clm", CLM()))
grid = [("30m", 128, peak, 49_152_000) for peak in (5e-4, 1e-3, 2e-3)]
grid += [("2m", 32, peak, 49_152_000) for peak in (5e-4, 1e-3, 2e-3)]
grid += [("2m", 512, peak, 49_152_000) for peak in (2e-3, 4e-3, 8e-3)]
grid += [("2m", 128, 2e-3, 49_152_000)]
study = Study("search2", tuple(run(s, n, o, r, p, t) for s, r, p, t in grid for n, o in objectives))
