"""Studies of the paper's sizes that are planned and never computed, for the tests of claims."""

from __future__ import annotations

from biphase import CATALOG, CLM, MLM, SIZES, Finetune, Pretrain, Stage, Study
from biphase.papers.gisserot2025 import PAPER
from biphase.report.selectors import comparable_models
from biphase.report.verdicts import examined

K = 1_000
FAMILIES = ("sst2", "conll2003", "squad", "msmarco")  # one task of each


def run(name, *stages, **fields):
    return Pretrain(name, stages=stages, **({"start": SIZES["610m"], "corpus": "fineweb-edu"} | fields))


def clm(steps=12 * K, name="", **fields):
    return run(name or f"clm-{steps}", Stage(CLM(), steps), **fields)


def mlm(steps=12 * K, ratio=0.4, name="", **fields):
    return run(name or f"mlm{ratio * 100:g}-{steps}", Stage(MLM(ratio), steps), **fields)


def two(causal, steps=12 * K, ratio=0.4, name="", **fields):
    stages = Stage(CLM(), causal), Stage(MLM(ratio), steps - causal)
    return run(name or f"clm-{causal}-mlm{ratio * 100:g}-{steps}", *stages, **fields)


def study(*runs, tasks=FAMILIES, claims=(), **finetune):
    grid = Finetune(tuple(CATALOG[name] for name in tasks), **finetune) if tasks else None
    return Study("s", runs, grid, claims, papers="gisserot2025")


def claims_of(plan):
    """Claim id → its tests in a plan."""
    return {one.statement.id: one.tests for one in examined(comparable_models(plan), (PAPER,))}


def names(models):
    return [model.name for model in models]
