"""What decides where a 2M model crosses: steps or tokens, new text or repeated text, new masks or the same ones?

Controls for studies/crossing.py, at one size and with its three pretraining seeds. Batch: the same 205M tokens in four
times as many and in a quarter of the steps, the peak rate scaled by the square root of the batch. Repetition: 20M, 40M
and 80M unique tokens of Wikipedia, each read until 205M tokens, with masks that are new in every epoch and with masks
that stay the same. docs/results/crossing/controls.md has the predictions; a block is one pretraining seed:

    biphase run crossing_controls.py --only '*-s1'
"""

from dataclasses import replace

from biphase import (  # fmt: skip
    CATALOG,
    CLM,
    MLM,
    SIZES,
    WSD,
    Answer,
    Chunks,
    Corpus,
    Finetune,
    Objective,
    Pretrain,
    Pretrained,
    Retrieve,
    Splits,
    Stage,
    Study,
    Task,
)

PEAK, ROWS, LENGTH = 2e-3, 128, 256  # as studies/crossing.py
STEPS = 6_250  # of 32,768 tokens: the fourth budget there, 205M tokens
TOKENIZER = Pretrained("./data/tokenizer", vocab=16_384)
OBJECTIVES = {"clm": CLM(), "mlm40": MLM(0.4), "mlm40-static": MLM(0.4, masks="static")}

whole = Corpus("english", "data/pretrain/*-*.jsonl.zst", TOKENIZER, heldout="validation.jsonl.zst")
limited = {
    millions: Corpus(
        f"wikipedia-{millions}m",
        "data/pretrain/wikipedia-*.jsonl.zst",
        TOKENIZER,
        heldout="validation.jsonl.zst",
        tokens=millions * 1_000_000,
    )
    for millions in (20, 40, 80)
}


def run(name: str, objective: Objective, corpus: Corpus, seed: int, scale: float = 1) -> Pretrain:
    """One model of 205M tokens, in steps of `scale` times the usual batch."""
    steps = round(STEPS / scale)
    return Pretrain(
        f"{name}-s{seed}",
        SIZES["2m"],
        corpus=corpus,
        packing=Chunks(LENGTH),
        batch_tokens=round(ROWS * scale) * LENGTH,
        stages=(Stage(objective, steps),),
        schedule=WSD(PEAK * scale**0.5, warmup=round(150 / scale), decay=0.1),
        precision="bf16",
        heldout_every=steps // 4,
        heldout_tokens=200_000,
        seed=seed,
    )


def of_seed(seed: int) -> list[Pretrain]:
    batches = [
        run(f"{name}-{rows}rows", OBJECTIVES[name], whole, seed, rows / ROWS)
        for rows in (32, 512)
        for name in ("clm", "mlm40")
    ]
    repeated = [
        run(f"{name}-{millions}m", objective, corpus, seed)
        for millions, corpus in limited.items()
        for name, objective in OBJECTIVES.items()
    ]
    return [*batches, *repeated]


tasks = (
    replace(CATALOG["mnli"], source="data/mnli"),
    replace(CATALOG["qqp"], source="data/qqp"),
    replace(CATALOG["conll2003"], source="data/conll2003"),
    Task("squad", Answer(), "data/squad", Splits(train="train*", test="validation*"), steps=2_000),
    Task(
        "reqa_squad",
        Retrieve(document="Document: {text}"),
        "data/reqa_squad",
        Splits(train="qrels/train*", test="qrels/test*", cut=0.1),
    ),
)
study = Study(
    "crossing-controls",
    tuple(model for seed in (1, 2, 3) for model in of_seed(seed)),
    Finetune(tasks, lrs=(5e-4, 1e-3), seeds=(0, 1), protocol="standard"),
    papers=("gisserot2025",),
)
