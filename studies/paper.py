"""Should we still pretrain encoders with masked language modelling? All 50 models of arXiv 2507.00994.

38 final models and 12 intermediate checkpoints, under their names on the hub (organisation MLMvsCLM),
each fine-tuned on 12 datasets × 6 learning rates × 5 seeds: 18,000 scores. The recipe is the default of
every field. See docs/paper-steps.md for how the steps computed here compare with the paper's count.
"""

from biphase import CLM, MLM, SIZES, TASKS, Finetune, Pretrain, Size, Stage, Study

k = 1_000
ON_THE_WAY = (1 * k, 2 * k, 5 * k, 10 * k, 20 * k, 40 * k)


def run(
    name: str, *stages: Stage, start: Size | Pretrain = SIZES["610m"], keep: tuple[int, ...] = ()
) -> Pretrain:
    return Pretrain(name, start=start, corpus="fineweb-edu", stages=stages, keep=keep)


def two_stage(causal: int, total: int, ratio: int = 40) -> Pretrain:
    """Thousands of steps: `causal` of CLM, then MLM until `total`."""
    stages = Stage(CLM(), causal * k), Stage(MLM(ratio / 100), (total - causal) * k)
    return run(f"610m-clm-{causal}k-mlm{ratio}-{total}k", *stages)


# One objective, three sizes; two of the 610m keep checkpoints of the constant-rate phase (Figures 2-5).
objectives: dict[str, CLM | MLM] = {"clm": CLM()} | {f"mlm{r}": MLM(r / 100) for r in (20, 30, 40, 50)}
base = {}
for size in ("210m", "610m", "1b"):
    for word, objective in objectives.items():
        name = f"{size}-{word}-42k"
        keep = ON_THE_WAY if name in ("610m-clm-42k", "610m-mlm40-42k") else ()
        base[name] = run(name, Stage(objective, 42 * k), start=SIZES[size], keep=keep)

# From scratch: CLM then MLM at three budgets (Figure 6); the ends of the 42k row are base models.
from_scratch = []
for total, splits in {12: (3, 6, 9), 22: (5, 11, 17)}.items():
    from_scratch += [run(f"610m-clm-{total}k", Stage(CLM(), total * k))]
    from_scratch += [run(f"610m-mlm40-{total}k", Stage(MLM(0.4), total * k))]
    from_scratch += [two_stage(causal, total) for causal in splits]
from_scratch += [two_stage(causal, 42) for causal in (10, 21, 32)]

# Is the masking ratio less delicate after CLM? (Figure 7)
robustness = [two_stage(40, 42, ratio) for ratio in (20, 30, 40, 50)]

# Continued pretraining of both decayed bases (Figures 8 and 9).
continued = [
    run(f"610m-{word}-dec42k-mlm40-{42 + n}k", Stage(MLM(0.4), n * k), start=base[f"610m-{word}-42k"])
    for word in ("clm", "mlm40")
    for n in (2, 12, 22)
]

study = Study(
    "paper",
    runs=(*base.values(), *from_scratch, *robustness, *continued),
    finetune=Finetune(TASKS),
    papers=("gisserot2025",),
)
