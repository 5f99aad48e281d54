"""Yu et al. (2024): "AntLM: Bridging Causal and Masked Language Models" (BabyLM Challenge 2024).

`PAPER` holds its claims A1 and A2, and A3 that goes beyond them; study.py has the runs. The paper scores the macro-average
of BabyLM's suite; here a claim is about the mean of all tasks of the study.

Only the abstract (arXiv:2412.03275) could be looked up: the two gains are from it. The tables could not.
"""

from collections.abc import Callable

from biphase.papers.claims import claim
from biphase.report.contrasts import Paper, above
from biphase.report.recipes import Published, Recipe
from biphase.report.selectors import Compare, Which
from biphase.specs import Pretrain

CLOSE = 0.5  # points: the margin of "no worse"


def _stages(*objectives: str) -> Callable[[Recipe, Pretrain], bool]:
    """From scratch, with these objectives in turn."""
    return lambda recipe, run: recipe.base is None and recipe.objectives == objectives


def _ants(recipe: Recipe, run: Pretrain) -> bool:
    """CLM, MLM, and CLM again for as many steps as before."""
    if not _stages("clm", "mlm", "clm")(recipe, run):
        return False
    before, _, after = recipe.own
    return abs(before.steps - after.steps) <= 1


ANT = Which(_ants)
FIRST = Which(_stages("clm", "mlm"))
MASKED = Which(_stages("mlm"))
CAUSAL = Which(_stages("clm"))
NEEDS = "needs runs of equal steps on one corpus: CLM, MLM and CLM again, and "


PAPER = Paper(
    authors="Yu, Guo, Luo, Wang, Ji, Wu",
    title="AntLM: Bridging Causal and Masked Language Models",
    venue="arXiv:2412.03275, CoNLL-BabyLM 2024",
    address="https://arxiv.org/abs/2412.03275",
    statements=(
        claim(
            "A1",
            "Epochs of CLM, then of MLM, then of CLM again score above as many epochs of MLM",
            gist="CLM, MLM and CLM again minus MLM alone, mean over tasks",
            contrast="CLM, MLM, CLM − MLM alone, from scratch, equal steps; mean over tasks",
            needs=NEEDS + "MLM alone",
            models=Compare((ANT, MASKED)),
            paper="+2.2 for LTG-BERT (abstract: macro-average of BabyLM's tasks)",
        ),
        claim(
            "A2",
            "They score above as many epochs of CLM",
            gist="CLM, MLM and CLM again minus CLM alone, mean over tasks",
            contrast="CLM, MLM, CLM − CLM alone, from scratch, equal steps; mean over tasks",
            needs=NEEDS + "CLM alone",
            models=Compare((ANT, CAUSAL)),
            paper="+1 for BabyLlama (abstract: macro-average of BabyLM's tasks)",
        ),
        claim(
            "A3",
            "Ending with CLM is no worse for an encoder than having all of CLM first",
            gist="CLM, MLM and CLM again minus as much CLM first, which must exceed −0.5, mean over tasks",
            contrast="CLM, MLM, CLM − CLM, MLM with as many steps of each > −0.5 points; mean over tasks",
            needs=NEEDS + "as much CLM and then MLM",
            models=Compare((ANT, FIRST)),
            contrasts=(above(on=None, margin=-CLOSE),),
            paper="no such pair known: the paper ends with CLM, others with MLM",
            source="beyond",
            caveats=("No worse means: less than 0.5 points below.",),
        ),
    ),
    published=Published({("A1", "ltg-bert"): 2.2}),
    tasks={"SC": (), "TC": (), "QA": (), "IR": ()},
    protocol="standard",
)
