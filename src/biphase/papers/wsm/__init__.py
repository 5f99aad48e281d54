"""Tian et al. (2025): "WSM: Decay-Free Learning Rate Schedule via Checkpoint Merging for LLM Pre-training" (ICLR 2026).

`PAPER` holds its claims W1 to W4; study.py has the runs. The paper trains a mixture of experts of 16.3B parameters and
scores more than 20 benchmarks without fine-tuning; here a claim is about the mean of all tasks of the study.

Sources of the numbers: the abstract (arXiv:2507.17634); its Tables 1, 3 and 4 as two published summaries of the paper
give them alike. The tables themselves could not be looked up.
"""

from biphase.report.contrasts import Paper, Statement, above
from biphase.report.recipes import Published, Recipe
from biphase.report.selectors import Compare, Which
from biphase.specs import Merge, Pretrain

CLOSE = 0.5  # points: the margin of "no worse"
LONG, SHORT = 0.15, 0.08  # shares of all steps that a long window covers at least, and a short one at most
MANY, FEW = 6, 3  # checkpoints


def _merge(run: Pretrain) -> tuple[int, float, bool]:
    """Of a merge of checkpoints of one run: their number, the share of the steps they cover, whether all count alike."""
    start = run.start
    if run.stages or not isinstance(start, Merge) or len({part.run for part in start.parts}) > 1:
        return 0, 0.0, False
    steps = [part.total_steps for part in start.by_steps]
    covered = (
        (steps[0] - steps[-1]) * len(steps) / (len(steps) - 1)
    )  # each stands for the steps since the one before
    return len(steps), covered / steps[0], max(start.weights) - min(start.weights) < 1e-6


def _mean(recipe: Recipe, run: Pretrain) -> bool:
    count, window, alike = _merge(run)
    return alike and count >= MANY and window >= LONG


def _weighted(recipe: Recipe, run: Pretrain) -> bool:
    """Whether the weights emulate a decay that is steep at first: earlier checkpoints count more."""
    count, window, alike = _merge(run)
    if alike or count < MANY or window < LONG or not isinstance(run.start, Merge):
        return False
    by_steps = sorted(
        zip(run.start.parts, run.start.weights, strict=True), key=lambda one: one[0].total_steps
    )
    weights = [weight for _, weight in by_steps]
    return weights == sorted(weights, reverse=True)


def _few(recipe: Recipe, run: Pretrain) -> bool:
    count, window, alike = _merge(run)
    return alike and 2 <= count <= FEW and window >= LONG


def _short(recipe: Recipe, run: Pretrain) -> bool:
    _, window, alike = _merge(run)
    return alike and 0 < window <= SHORT


def _decayed(recipe: Recipe, run: Pretrain) -> bool:
    return bool(run.stages) and not recipe.merged and recipe.decayed


MEAN = Which("the mean of the last checkpoints", _mean)
WEIGHTED = Which("their mean by the weights of a 1−√ decay", _weighted)
SPARSE = Which("the mean of fewer checkpoints", _few)
LATE = Which("the mean of a shorter window", _short)
DECAYED = Which("the decayed run", _decayed)
# A merge has no schedule of its own, and the run that it averages no decay.
IGNORED = ("merge", "decay", "shape", "floor")
NEEDS = "needs an undecayed run and "


PAPER = Paper(
    authors="Tian, Wang, Zhao, Chen, Liu, Liu, Mao, Zhao, Zhang, Zhou",
    title="WSM: Decay-Free Learning Rate Schedule via Checkpoint Merging for LLM Pre-training",
    venue="arXiv:2507.17634, ICLR 2026",
    address="https://arxiv.org/abs/2507.17634",
    statements=(
        Statement(
            "W1",
            "The mean of checkpoints at a constant learning rate scores above a run whose rate decays",
            gist="The mean of the last checkpoints minus the decayed run, mean over tasks",
            contrast="mean of 6 checkpoints or more over the last 15% of the steps or more − a run that decays, equal steps; mean over tasks",
            needs=NEEDS + "the mean of its last checkpoints (Merge), and a run of equal steps that decays",
            on=(),
            models=Compare((MEAN, DECAYED), IGNORED),
            contrasts=(above(on=None),),
            figure="objectives",
            paper="63.95 against 62.67 (Table 1: mean of all benchmarks, best checkpoints)",
            caveats=("The paper's gain is on high-quality text that both branches change to.",),
        ),
        Statement(
            "W2",
            "The longer the window that is averaged, the better",
            gist="The mean over a long window minus that over a short one, mean over tasks",
            contrast="mean over at least 15% of the steps − mean over at most 8%; mean over tasks",
            needs=NEEDS + "means over a long and over a short window of its last checkpoints",
            on=(),
            models=Compare((MEAN, LATE), IGNORED),
            contrasts=(above(on=None),),
            figure="objectives",
            paper="no numbers seen: the abstract calls the duration the most critical factor",
        ),
        Statement(
            "W3",
            "In one window more checkpoints are better than two or three",
            gist="The mean of many checkpoints minus that of few in one window, mean over tasks",
            contrast="mean of 6 checkpoints or more − mean of 2 or 3, both over at least 15% of the steps; mean over tasks",
            needs=NEEDS + "means of many and of two or three checkpoints of one window",
            on=(),
            models=Compare((MEAN, SPARSE), IGNORED),
            contrasts=(above(on=None),),
            figure="objectives",
            paper="63.78 for 8, 62.77 for 2 checkpoints of 80B tokens (Table 4)",
        ),
        Statement(
            "W4",
            "Weights that emulate a 1−√ decay are no worse than equal ones",
            gist="The weighted mean minus the mean, which must exceed −0.5, mean over tasks",
            contrast="mean by the weights of a 1−√ decay − mean with equal weights, of the same checkpoints > −0.5 points; mean over tasks",
            needs=NEEDS + "two means of its last checkpoints, one of them with weights that fall",
            on=(),
            models=Compare((WEIGHTED, MEAN), IGNORED),
            contrasts=(above(on=None, margin=-CLOSE),),
            figure="objectives",
            paper="64.06 against 63.95 (Table 3)",
            caveats=("No worse means: less than 0.5 points below.",),
        ),
    ),
    published=Published(),
    tasks={"SC": (), "TC": (), "QA": (), "IR": ()},
    protocol="standard",
)
