"""At equal steps, does causal pretraining before masking beat masking alone?"""

from biphase import CLM, MLM, SIZES, TASKS, Finetune, Pretrain, Size, Stage, Study

k = 1_000


def run(name: str, *stages: Stage, start: Size | Pretrain = SIZES["610m"]) -> Pretrain:
    return Pretrain(name, start=start, corpus="fineweb-edu", stages=stages)


clm = run("clm-42k", Stage(CLM(), 42 * k))
mlm = [run(f"mlm{r}-42k", Stage(MLM(r / 100), 42 * k)) for r in (20, 30, 40, 50)]
two = [run(f"clm-{n}k-mlm40-42k", Stage(CLM(), n * k), Stage(MLM(0.4), (42 - n) * k)) for n in (10, 21, 32)]
cpt = [run(f"clm-dec42k-mlm40-{42 + n}k", Stage(MLM(0.4), n * k), start=clm) for n in (2, 12, 22)]

study = Study(
    "two-stage-610m", runs=(clm, *mlm, *two, *cpt), finetune=Finetune(TASKS), papers=("gisserot2025",)
)
