"""Can the average of checkpoints replace the decay of the learning rate?

A decay must be planned: when it begins, how long it is, its form. The paper keeps the rate constant and averages the
checkpoints of the last stage instead, in which the text is better than before; with weights c_j the update of step i
counts as if the rate had been multiplied by the sum of the c_j after it. Particular to it: nothing is trained for the
averages. All of them are merges of checkpoints of one run, which the plan keeps for them.

    study   a dense encoder of 610M parameters: 100B tokens of FineWeb-Edu, and 4% more, a quarter of them of PubMed,
            while its rate decays or checkpoints are kept
    small   the same structure on a CPU: 1M parameters, one text throughout
    gpu     30M parameters: general English, then Wikipedia

The paper trains a causal mixture of experts on 10.2T tokens and 400B of better text; mixtures of experts cannot be
built here. Its numbers are of causal models, the question here is asked of encoders.
"""

from dataclasses import replace
from math import sqrt
from typing import Any

from biphase import (  # fmt: skip
    MLM,
    SIZES,
    TASKS,
    WSD,
    Blend,
    Corpus,
    Finetune,
    Kept,
    Merge,
    Pretrain,
    Rows,
    Stage,
    Study,
)
from biphase.papers.material import GPU, SCIENTIFIC, TINY, gpu_study, refined, small_study, text

CHECKPOINTS = 8
# What 1−√ has more at the beginning of each eighth than at its end: earlier checkpoints count more.
WEIGHTS = tuple(sqrt((n + 1) / CHECKPOINTS) - sqrt(n / CHECKPOINTS) for n in range(CHECKPOINTS))


def averages(
    stable: int, last: int, peak: float, better: Corpus | Blend | str = "", **common: Any
) -> tuple[Pretrain, ...]:
    """A run at a constant rate, averages of its last checkpoints, and a run that decays instead; equal steps."""
    stages = Stage(MLM(0.4), stable), Stage(MLM(0.4), last, corpus=better)
    constant = WSD(peak, warmup=round(0.05 * stable), decay=0)
    run = Pretrain("constant", stages=stages, schedule=constant, **common)
    decay = replace(constant, decay=last, shape="1-sqrt")
    each = last // CHECKPOINTS
    kept = [Kept(run, stable + last - each * n) for n in reversed(range(CHECKPOINTS))]
    merges = {
        "mean": Merge(*kept),
        "weighted": Merge(*zip(kept, WEIGHTS, strict=True)),
        "few": Merge(kept[CHECKPOINTS // 2 - 1], kept[-1]),
        "late": Merge(*kept[-2:]),
    }
    return (
        run,
        Pretrain("decayed", stages=stages, schedule=decay, **common),
        *(Pretrain(name, start=merge) for name, merge in merges.items()),
    )


BATCH = 1_024 * 2_048
STABLE = 100_000_000_000 // BATCH
study = Study(
    "wsm",
    averages(
        STABLE,
        round(STABLE * 0.04 / CHECKPOINTS) * CHECKPOINTS,
        5e-4,
        SCIENTIFIC,
        start=SIZES["610m"],
        corpus="fineweb-edu",
        packing=Rows(2_048),
        batch_tokens=BATCH,
    ),
    Finetune(TASKS, lrs=(2e-5, 5e-5, 1e-4), protocol="standard"),
    papers=("wsm",),
)

small = small_study(
    "wsm-small",
    averages(120, 40, 3e-3, corpus="builtin", **TINY),
    papers=("wsm",),
)

gpu = gpu_study(
    "wsm-gpu",
    averages(
        1_280,
        320,
        2e-3,
        refined("wikipedia"),
        corpus=text("general", "[bfost]*-*.jsonl.zst"),
        **GPU,
    ),
    papers=("wsm",),
)
