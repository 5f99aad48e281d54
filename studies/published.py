"""What do the 50 models that the paper published score here, as they are? Nothing is pretrained.

The 38 final models and 12 intermediate checkpoints of arXiv 2507.00994, from the hub (organisation MLMvsCLM), each
fine-tuned as in studies/paper.py: 12 datasets × 6 learning rates × 5 seeds. They load as EuroBERT, without the custom
code beside them. The commit of each is noted in the store when the study first runs, and stays.
"""

from biphase import TASKS, Finetune, Hub, Pretrain, Study

RATIOS = (20, 30, 40, 50)

# One objective, three sizes; two of the 610m with checkpoints of the constant-rate phase.
names = [
    f"{size}-{word}-42k" for size in ("210m", "610m", "1b") for word in ("clm", *(f"mlm{r}" for r in RATIOS))
]
names += [f"610m-{word}-42k-{k}000" for word in ("clm", "mlm40") for k in (1, 2, 5, 10, 20, 40)]

# From scratch: CLM then MLM at three budgets; the ends of the 42k row are above.
names += [f"610m-{word}-{total}k" for total in (12, 22) for word in ("clm", "mlm40")]
for total, splits in {12: (3, 6, 9), 22: (5, 11, 17), 42: (10, 21, 32)}.items():
    names += [f"610m-clm-{causal}k-mlm40-{total}k" for causal in splits]

# The masking ratio after CLM, and continued pretraining of both decayed bases.
names += [f"610m-clm-40k-mlm{ratio}-42k" for ratio in RATIOS]
names += [f"610m-{word}-dec42k-mlm40-{total}k" for word in ("clm", "mlm40") for total in (44, 54, 64)]

study = Study(
    "published",
    runs=tuple(Pretrain(name, start=Hub(f"MLMvsCLM/{name}")) for name in names),
    finetune=Finetune(TASKS),
)
