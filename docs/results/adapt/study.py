"""What does masking bring to a finished decoder, and is it worth less than masking from the start?

A decoder of the 30m size is trained by CLM and decayed, then adapted by MLM or by MNTP with a quarter of its tokens
more; beside them a model that was masked from the start, with as many tokens as both together. Text and tasks are
local copies under ./data; docs/adapt.md says which.
"""

from dataclasses import replace

from biphase import (  # fmt: skip
    CATALOG,
    CLM,
    MLM,
    MNTP,
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
    Pretrained("./data/tokenizers/smollm2"),
    heldout="validation.jsonl.zst",
)
common = {
    "corpus": text,
    "packing": Chunks(512),
    "batch_tokens": 128 * 512,
    "precision": "bf16",
    "heldout_every": 200,
    "heldout_tokens": 200_000,
}
whole = WSD(1e-3, warmup=0.05, decay=0.2)
short = WSD(5e-4, warmup=0.05, decay=0.25)

decoder = Pretrain("decoder", SIZES["30m"], stages=(Stage(CLM(), 1_600),), schedule=whole, **common)
masked = Pretrain("masked-only", SIZES["30m"], stages=(Stage(MLM(0.4), 2_000),), schedule=whole, **common)
adapted = [
    Pretrain(
        f"adapted-{name}", decoder, stages=(Stage(objective, 400),), schedule=short, optimizer_state="reset"
    )
    for name, objective in (("mlm", MLM(0.4)), ("mntp", MNTP(0.4)))
]

tasks = (
    replace(CATALOG["sst2"], source="data/sst2", steps=600),
    replace(CATALOG["conll2003"], source="data/conll2003"),
    Task(
        "squad",
        Answer(),
        "data/squad",
        Splits(train="train*", validation="", test="validation*", cut=0.05),
        steps=800,
    ),
    Task(
        "nq_boolq",
        Retrieve(document="Document: {title}. {text}"),
        "data/nq_boolq",
        Splits(train="qrels/train*", test="qrels/test*", cut=0.1),
        steps=300,
    ),
)
# Of 5e-5, 1e-4 and 3e-4 the last had won on validation in every grid of three that was finished when it was fixed.
grid = Finetune(tasks, lrs=(3e-4,), seeds=(0, 1, 2), protocol="standard")
study = Study("adapt", runs=(decoder, *adapted, masked), finetune=grid, papers="gisserot2025")
