"""Should we still pretrain encoders with masked language modelling?

The paper trains CLM, MLM and CLM then MLM at equal steps, at three sizes, five masking ratios and three budgets, and goes
on with MLM from both kinds of decayed models. Particular to it: runs share their beginnings, so most of the 38 models cost
a branch of a few thousand steps; every one is fine-tuned on twelve datasets at six learning rates with five seeds.

    study   all 50 models: 38 final ones and 12 intermediate checkpoints, under their names on the hub (MLMvsCLM)
    small   the same runs at one size on a CPU: 1M parameters, four steps for a thousand of the paper's
    gpu     30M parameters at one size, without the smaller budgets: what the main claims need

The recipe of `study` is the default of every field. docs/paper-steps.md compares its steps with the paper's own count.
"""

from typing import Any

from biphase import CLM, MLM, SIZES, TASKS, WSD, Finetune, Pretrain, Stage, Study
from biphase.papers.material import GPU, TINY, gpu_study, small_study, text

RATIOS = (20, 30, 40, 50)
# In thousands of steps.
LONGEST = 42
ON_THE_WAY = (1, 2, 5, 10, 20, 40)
SPLITS = {12: (3, 6, 9), 22: (5, 11, 17), LONGEST: (10, 21, 32)}  # budget → steps of CLM before MLM 40%
LATE = 40  # steps of CLM before each masking ratio, to the longest budget
CONTINUED = (2, 12, 22)
MEASURED = (
    "heldout_every",
    "heldout_tokens",
)  # the fields that a run does not inherit from the one it starts from


def models(
    sizes: tuple[str, ...], main: str, thousand: int, budgets: tuple[int, ...] = tuple(SPLITS), **common: Any
) -> tuple[Pretrain, ...]:
    """The paper's runs: one objective at every size, all others at the size `main`. `thousand`: of its steps, in ours."""
    base = {}
    for size in sizes:
        for name, objective in {
            "clm": CLM(),
            **{f"mlm{ratio}": MLM(ratio / 100) for ratio in RATIOS},
        }.items():
            # Two keep checkpoints of the constant-rate phase (Figures 2 to 5).
            kept = ON_THE_WAY if size == main and name in ("clm", "mlm40") else ()
            base[size, name] = Pretrain(
                f"{size}-{name}-{LONGEST}k",
                start=SIZES[size],
                stages=(Stage(objective, LONGEST * thousand),),
                keep=tuple(step * thousand for step in kept),
                **common,
            )

    def from_scratch(name: str, *stages: Stage) -> Pretrain:
        return Pretrain(f"{main}-{name}", start=SIZES[main], stages=stages, **common)

    def two_stage(causal: int, total: int, ratio: int = 40) -> Pretrain:
        stages = Stage(CLM(), causal * thousand), Stage(MLM(ratio / 100), (total - causal) * thousand)
        return from_scratch(f"clm-{causal}k-mlm{ratio}-{total}k", *stages)

    others = []
    for total in budgets:  # CLM, then MLM (Figure 6); at the longest budget both ends are base models
        if total < LONGEST:
            others.append(from_scratch(f"clm-{total}k", Stage(CLM(), total * thousand)))
            others.append(from_scratch(f"mlm40-{total}k", Stage(MLM(0.4), total * thousand)))
        others += [two_stage(causal, total) for causal in SPLITS[total]]
    others += [
        two_stage(LATE, LONGEST, ratio) for ratio in RATIOS
    ]  # does the ratio matter after CLM? (Figure 7)
    others += [  # MLM on top of both decayed bases (Figures 8 and 9)
        Pretrain(
            f"{main}-{name}-dec{LONGEST}k-mlm40-{LONGEST + more}k",
            start=base[main, name],
            stages=(Stage(MLM(0.4), more * thousand),),
            **{field: common[field] for field in MEASURED if field in common},
        )
        for name in ("clm", "mlm40")
        for more in CONTINUED
    ]
    return (*base.values(), *others)


study = Study(
    "paper",
    models(("210m", "610m", "1b"), "610m", thousand=1_000, corpus="fineweb-edu"),
    Finetune(TASKS),
    papers=("gisserot2025",),
)


def scaled(scale: dict[str, Any], peak: float, thousand: int) -> dict[str, Any]:
    """The fields of small runs: warmup and decay are 2,000 of the paper's steps, as in the full study."""
    fields = {field: value for field, value in scale.items() if field != "start"}
    return fields | {"schedule": WSD(peak, warmup=2 * thousand, decay=2 * thousand), "thousand": thousand}


small = small_study(
    "paper-small", models(("1m",), "1m", corpus="builtin", **scaled(TINY, 3e-3, 4)), papers=("gisserot2025",)
)

gpu = gpu_study(
    "paper-gpu",
    models(("30m",), "30m", budgets=(LONGEST,), corpus=text("english"), **scaled(GPU, 2e-3, 38)),
    papers=("gisserot2025",),
    seeds=(0, 1),
)
