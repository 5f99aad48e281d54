"""Which fine-tuning rates and steps suit models of 2M and 8M parameters?"""

from dataclasses import replace

from biphase import (
    CATALOG,
    CLM,
    MLM,
    SIZES,
    WSD,
    Answer,
    Chunks,
    Corpus,
    Finetune,
    Pretrain,
    Pretrained,
    Retrieve,
    Splits,
    Stage,
    Study,
    Task,
)

text = Corpus(
    "core",
    "data/pretrain/*-core.jsonl.zst",
    Pretrained("./tokenizer", vocab=16_384),
    heldout="validation.jsonl.zst",
)


def run(size, name, objective, steps):
    return Pretrain(
        f"{size}-{name}",
        SIZES[size],
        corpus=text,
        packing=Chunks(256),
        batch_tokens=128 * 256,
        stages=(Stage(objective, steps),),
        schedule=WSD(2e-3, warmup=0.05, decay=0.1),
        precision="bf16",
        heldout_every=2_000,
        heldout_tokens=200_000,
        seed=99,
    )


runs = [
    run(size, name, o, steps)
    for size, steps in (("2m", 6_000), ("8m", 6_000))
    for name, o in (("mlm", MLM(0.4)), ("clm", CLM()))
]


def ir(name):
    return Task(
        name,
        Retrieve(document="Document: {title}. {text}" if name == "nq_boolq" else "Document: {text}"),
        f"data/{name}",
        Splits(train="qrels/train*", test="qrels/test*", cut=0.1),
    )


tasks = (
    replace(CATALOG["mnli"], source="data/mnli"),
    replace(CATALOG["qqp"], source="data/qqp"),
    replace(CATALOG["sst2"], source="data/sst2"),
    replace(CATALOG["conll2003"], source="data/conll2003"),
    Task("squad", Answer(), "data/squad", Splits(train="train*", test="validation*"), steps=2_000),
    ir("nq_boolq"),
    ir("reqa_squad"),
)
study = Study(
    "grids",
    tuple(runs),
    Finetune(tasks, lrs=(2e-4, 5e-4, 1e-3, 2e-3), seeds=(99,), protocol="standard"),
    papers="gisserot2025",
)
