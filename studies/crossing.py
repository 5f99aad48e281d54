"""Where does masking overtake prediction: at a number of tokens for each parameter, or at a number of steps?

In the paper's 610M model MLM overtakes CLM on classification and question answering near 10,000 steps, on retrieval
near 20,000. If tokens per parameter decide, a model of 2M parameters crosses 3.6 times earlier than one of 8M; if steps
decide, both cross at the same step. Both sizes are trained from three pretraining seeds, and their trunks have decayed
ends at six budgets. docs/results/crossing has the predictions, and says where text and tasks under ./data come from.

The study is computed in blocks, each whole by itself:

    biphase run crossing.py --only '2m-*-s1*'     then s2 and s3; then '8m-*-s1*' and so on; then '30m-*'
"""

from dataclasses import replace
from typing import Any

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

PEAK, ROWS, LENGTH = 2e-3, 128, 256  # by the pilot, for both objectives and all sizes
WARMUP = 150  # steps, the same for every budget, so that they share a trunk
SEEDS = (1, 2, 3)
# Steps of 32,768 tokens, each budget 1.6 times the one before: 50M to 524M tokens, 83M to 865M, and 524M.
BUDGETS = {
    "2m": (1_525, 2_440, 3_900, 6_250, 10_000, 16_000),
    "8m": (2_520, 4_030, 6_450, 10_300, 16_500, 26_400),
    "30m": (16_000,),
}
MASKED = MLM(0.4)

text = Corpus(
    "english",
    "data/pretrain/*-*.jsonl.zst",
    Pretrained("./data/tokenizer", vocab=16_384),
    heldout="validation.jsonl.zst",
)


# Undecayed checkpoints of the longest trunks: at an eighth of the budget, and where the decay begins.
KEPT = {"2m": (2_000, 14_400), "8m": (3_300, 23_760), "30m": ()}


def run(
    size: str, seed: int, name: str, *stages: tuple[Objective, int], keep: tuple[int, ...] = ()
) -> Pretrain:
    steps = sum(count for _, count in stages)
    common: dict[str, Any] = {"schedule": WSD(PEAK, warmup=WARMUP, decay=0.1)} if stages else {}
    return Pretrain(
        f"{size}-{name}-s{seed}",
        SIZES[size],
        corpus=text,
        packing=Chunks(LENGTH),
        batch_tokens=ROWS * LENGTH,
        stages=tuple(Stage(objective, count) for objective, count in stages),
        precision="bf16",
        heldout_every=max(1, steps // 4),
        heldout_tokens=200_000,
        keep=keep,
        seed=seed,
        **common,
    )


def split(size: str, seed: int, percent: int) -> Pretrain:
    """So many percent of the largest budget are CLM, the rest MLM."""
    last = BUDGETS[size][-1]
    first = last * percent // 100
    return run(size, seed, f"clm{percent}-mlm{100 - percent}", (CLM(), first), (MASKED, last - first))


def ends(size: str, seed: int) -> list[Pretrain]:
    """CLM alone and MLM alone, decayed at every budget."""
    return [
        run(
            size,
            seed,
            f"{objective.name}-{steps}",
            (objective, steps),
            keep=KEPT[size] if steps == BUDGETS[size][-1] else (),
        )
        for objective in (CLM(), MASKED)
        for steps in BUDGETS[size]
    ]


def of_2m(seed: int) -> list[Pretrain]:
    trunks = ends("2m", seed)
    last = BUDGETS["2m"][-1]
    ratios = [run("2m", seed, f"mlm{percent}-{last}", (MLM(percent / 100), last)) for percent in (20, 50)]
    continued = [
        Pretrain(base.name.replace(f"-s{seed}", f"-more-s{seed}"), base, stages=(Stage(MASKED, last // 5),))
        for base in trunks
        if base.steps == last
    ]
    splits = [split("2m", seed, percent) for percent in (25, 50, 75)]
    return [*trunks, *splits, *ratios, *continued, run("2m", seed, "random")]


def of_8m(seed: int) -> list[Pretrain]:
    return [
        *ends("8m", seed),
        *(split("8m", seed, percent) for percent in (25, 50)),
        run("8m", seed, "random"),
    ]


runs = [
    *(model for seed in SEEDS for model in of_2m(seed)),
    *(model for seed in SEEDS for model in of_8m(seed)),
    *ends("30m", 1),
    split("30m", 1, 25),
]
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
    "crossing",
    tuple(runs),
    Finetune(tasks, lrs=(5e-4, 1e-3), seeds=(0, 1), protocol="standard"),
    papers=("gisserot2025",),
)
