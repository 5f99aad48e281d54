"""Is an encoder still better than the decoder of its pair after that decoder has learned to fill gaps?

The paper trains pairs of one shape on the same text in the same order: one masked, one causal. Each then goes on with the
objective of the other for 50B tokens. Particular to it: both members have ModernBERT's shape, the last stage has better
text and fewer masks, and the decoder becomes an encoder by MNTP, at a new warmup and decay.

    study   the pairs of 150M and 400M at the length of the paper: 1.7T tokens, 250B, 50B, then 50B of the other objective
    small   the same structure on a CPU: 1M parameters, one text throughout
    gpu     30M parameters: general English, then Wikipedia

gisserot2025 finds the opposite: CLM, then MLM is the better encoder. The small studies test the claims of both papers
on the same models. So they mask 40% throughout, as gisserot2025 does, and have two more runs: the decoder goes on with
that MLM, and so does the encoder, for as many steps. Ettin compares the converted decoder with the encoder that did not
go on (E2), gisserot2025 with the one that did (C17).

The paper's text, 2T tokens of DCLM and Dolma, is replaced by FineWeb-Edu's sample of 100B tokens, which is then read 20
times; its optimizer, StableAdamW, by AdamW. Batches do not grow, and rows keep the length of its first stage, 1,024.
"""

from dataclasses import replace
from typing import Any

from biphase import (  # fmt: skip
    CATALOG,
    CLM,
    CONFIGS,
    MLM,
    MNTP,
    WSD,
    AdamW,
    Blend,
    Corpus,
    Finetune,
    Objective,
    Pretrain,
    Rows,
    Stage,
    Study,
)
from biphase.papers.material import GPU, SCIENTIFIC, TINY, gpu_study, refined, small_study, text

FILLING = MNTP(0.15)  # by which a decoder becomes an encoder


def member(
    name: str,
    objectives: tuple[Objective, ...],
    steps: tuple[int, ...],
    last: Corpus | Blend | str,
    **common: Any,
) -> Pretrain:
    """A member of a pair: an objective for each stage; the last stage, if there are several, has text of its own."""
    stages = [Stage(one, count) for one, count in zip(objectives, steps, strict=True)]
    stages[-1] = replace(stages[-1], corpus=last)
    return Pretrain(name, stages=tuple(stages), **common)


def converted(start: Pretrain, name: str, objective: Objective, steps: int, schedule: WSD) -> Pretrain:
    """A member that goes on with another objective, at a new warmup and decay, on what it read last."""
    text = start.stages[-1].corpus or start.corpus
    again = "restart" if text != start.corpus else "continue"
    return Pretrain(
        name,
        start=start,
        corpus=text,
        stages=(Stage(objective, steps),),
        schedule=schedule,
        optimizer_state="reset",
        data=again,
    )


BATCH = 4_608 * 1_024
BILLION = 1_000_000_000 / BATCH  # tokens, in steps
LENGTHS = tuple(round(billions * BILLION) for billions in (1_700, 250, 50))


def pair(size: str, peak: float, warmup: int) -> tuple[Pretrain, ...]:
    fields: dict[str, Any] = {
        "start": CONFIGS[f"ettin-{size}"],
        "corpus": "fineweb-edu",
        "packing": Rows(1_024),
        "batch_tokens": BATCH,
        "schedule": WSD(
            peak, warmup=round(warmup * BILLION), decay=sum(LENGTHS[1:]), shape="1-sqrt", floor=0.02
        ),
        "optimizer": AdamW(betas=(0.9, 0.98), eps=1e-6, weight_decay=1e-5),
    }
    masked = member(f"encoder-{size}", (MLM(0.3), MLM(0.3), MLM(0.15)), LENGTHS, SCIENTIFIC, **fields)
    causal = member(f"decoder-{size}", (CLM(), CLM(), CLM()), LENGTHS, SCIENTIFIC, **fields)
    on = round(50 * BILLION)
    more = WSD(peak / 2, warmup=round(3 * BILLION), decay=round(10 * BILLION), floor=0.02)
    return (
        masked,
        causal,
        converted(causal, f"encoder-of-decoder-{size}", FILLING, on, more),
        converted(masked, f"decoder-of-encoder-{size}", CLM(), on, more),
    )


study = Study(
    "ettin",
    (*pair("150m", 8e-4, warmup=3), *pair("400m", 5e-4, warmup=2)),
    Finetune(
        (CATALOG["mnli"], CATALOG["scifact"]), lrs=(1e-5, 3e-5, 5e-5), seeds=(0, 1, 2), protocol="standard"
    ),
    papers=("ettin",),
)


def both_papers(
    steps: tuple[int, int], on: int, peak: float, last: Corpus | str = "", **common: Any
) -> tuple[Pretrain, ...]:
    """A pair, its conversions, and what gisserot2025 compares: both members after as much MLM."""
    usual = MLM(0.4)
    schedule = WSD(peak, warmup=0.05, decay=steps[1])
    masked = member("encoder", (usual, usual), steps, last, schedule=schedule, **common)
    causal = member("decoder", (CLM(), CLM()), steps, last, schedule=schedule, **common)
    more = WSD(peak / 2, warmup=0.06, decay=0.2, floor=0.02)
    return (
        masked,
        causal,
        converted(causal, "encoder-of-decoder", FILLING, on, more),
        converted(masked, "decoder-of-encoder", CLM(), on, more),
        converted(causal, "decoder-mlm", usual, on, more),
        converted(masked, "encoder-mlm", usual, on, more),
    )


def shaped(scale: dict[str, Any], config: str) -> dict[str, Any]:
    return scale | {"start": CONFIGS[config]}


BOTH = ("ettin", "gisserot2025")
small = small_study(
    "ettin-small",
    both_papers((120, 40), 48, 3e-3, corpus="builtin", **shaped(TINY, "modernbert-1m")),
    papers=BOTH,
)

gpu = gpu_study(
    "ettin-gpu",
    both_papers(
        (1_280, 320),
        480,
        2e-3,
        refined("wikipedia"),
        corpus=text("general", "[bfost]*-*.jsonl.zst"),
        **shaped(GPU, "modernbert-30m"),
    ),
    papers=BOTH,
)
