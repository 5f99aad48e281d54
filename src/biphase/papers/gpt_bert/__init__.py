"""Charpentier and Samuel (2024): "GPT or BERT: why not both?" (BabyLM Challenge 2024).

`PAPER` holds its claims G1 to G4; study.py has the runs. The paper scores MNLI, BLiMP, EWoK and LAMBADA; here a claim is
about the mean of all tasks of the study, fine-tuned with bidirectional attention.

Sources of the numbers: the paper's text (arXiv:2410.24159). Section 4.2 with Figure 2 has the nine shares of causal rows
at 100M words, Table 2 the ablation at 10M words. The recipe is that of its Section 2 and of its code (ltgoslo/gpt-bert).
"""

from biphase.papers.claims import claim
from biphase.report.contrasts import Paper, above
from biphase.report.recipes import Published, Recipe
from biphase.report.selectors import Compare, Which
from biphase.specs import MLM, Mix, Pretrain
from biphase.specs.objectives import RatioSchedule

FEW = 1 / 8  # at most this share of causal rows are a few; the paper has 1/16


def masks(recipe: Recipe) -> MLM | None:
    """The masked objective of a run with one phase from scratch; None if there is none or its ratio is drawn."""
    if recipe.base or len(recipe.own) != 1:
        return None
    objective = recipe.own[0].objective
    parts = objective.objectives if isinstance(objective, Mix) else (objective,)
    found = [part for part in parts if isinstance(part, MLM) and part.highest_ratio and part.weight == "1"]
    return found[0] if len(found) == 1 else None


def falls(recipe: Recipe) -> bool:
    """Whether the masking ratio falls."""
    objective = masks(recipe)
    ratio = objective and objective.ratio
    return isinstance(ratio, RatioSchedule) and ratio.last < ratio.first


def constant(recipe: Recipe) -> bool:
    objective = masks(recipe)
    return objective is not None and isinstance(objective.ratio, float)


def hybrid(recipe: Recipe, low: float, high: float) -> bool:
    return recipe.objectives == ("mix",) and low <= recipe.causal_rows <= high


def _hybrid(recipe: Recipe, run: Pretrain) -> bool:
    return hybrid(recipe, 0, FEW) and falls(recipe)


HYBRID = Which(_hybrid, order=lambda recipe, run: recipe.causal_rows)
CAUSAL_HYBRID = Which(
    lambda recipe, run: hybrid(recipe, 1 - FEW, 1) and falls(recipe),
    order=lambda recipe, run: -recipe.causal_rows,
)
CONSTANT = Which(
    lambda recipe, run: hybrid(recipe, 0, FEW) and constant(recipe),
    order=lambda recipe, run: recipe.causal_rows,
)
CAUSAL = Which(lambda recipe, run: recipe.base is None and recipe.objectives == ("clm",))
MASKED = Which(lambda recipe, run: recipe.objectives == ("mntp",) and falls(recipe))
NEEDS = "needs runs of equal steps on one corpus, MNTP with a falling masking ratio: "

# In points, of MNLI alone, by claim and model.
GAINS = {("G2", "gpt-bert-base"): 0.9, ("G3", "gpt-bert-base"): 84.2 - 81.1, ("G4", "gpt-bert-small"): 0.7}


PAPER = Paper(
    authors="Charpentier, Samuel",
    title="GPT or BERT: why not both?",
    venue="arXiv:2410.24159, CoNLL-BabyLM 2024",
    address="https://arxiv.org/abs/2410.24159",
    statements=(
        claim(
            "G1",
            "One model that learns both objectives in every step scores above masked rows alone and above CLM alone",
            gist="The hybrid minus masked rows alone and minus CLM, mean over tasks",
            contrast="at most 1/8 of the rows causal, the rest MNTP − MNTP alone, and − CLM alone; mean over tasks",
            needs=NEEDS + "a mixture with at most 1/8 causal rows, masked rows alone, and CLM alone",
            models=Compare((HYBRID, MASKED, CAUSAL)),
            contrasts=(
                above(0, 1, on=None, title="{line} · over masked rows alone"),
                above(0, 2, on=None, title="{line} · over CLM"),
            ),
            paper="84.2 on MNLI with 1/16 causal rows, the best of nine shares (Section 4.2, Figure 2)",
            caveats=("On the paper's zero-shot tasks, too, the best models have few causal rows or none.",),
        ),
        claim(
            "G2",
            "One masked row in sixteen already makes a causal model a better encoder",
            gist="The hybrid with a few masked rows minus CLM, mean over tasks",
            contrast="at least 7/8 of the rows causal, the rest MNTP − CLM alone; mean over tasks",
            needs=NEEDS + "a mixture with at least 7/8 causal rows, and CLM alone",
            models=Compare((CAUSAL_HYBRID, CAUSAL)),
            paper="+0.9 on MNLI, +4.2 on BLiMP (read bidirectionally, 15/16 causal rows; Section 4.2)",
        ),
        claim(
            "G3",
            "An encoder wants few causal rows rather than few masked ones",
            gist="The hybrid with a few causal rows minus that with a few masked rows, mean over tasks",
            contrast="at most 1/8 of the rows causal − at least 7/8 of them; mean over tasks",
            needs=NEEDS + "mixtures with at most 1/8 and with at least 7/8 causal rows",
            models=Compare((HYBRID, CAUSAL_HYBRID)),
            paper="84.2 against 81.1 on MNLI (1/16 against 15/16 causal rows; Figure 2, read with Section 4.2)",
        ),
        claim(
            "G4",
            "A masking ratio that falls from 30% to 15% beats a constant one",
            gist="The hybrid with a falling masking ratio minus that with a constant one, mean over tasks",
            contrast="at most 1/8 of the rows causal: MNTP 30 → 15% − MNTP at a constant ratio; mean over tasks",
            needs=NEEDS
            + "the mixture with at most 1/8 causal rows, and the same with a constant masking ratio",
            models=Compare((HYBRID, CONSTANT)),
            paper="+0.7 on MNLI, +0.6 on EWoK, +0.1 on BLiMP (30M parameters, 10M words; Table 2)",
        ),
    ),
    published=Published(GAINS),
    tasks={"SC": ("mnli",), "TC": (), "QA": (), "IR": ()},
    protocol="standard",
)
