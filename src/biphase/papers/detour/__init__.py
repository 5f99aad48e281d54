"""Touchent and de la Clergerie (2026): "A Causal Language Modeling Detour Improves Encoder Continued Pretraining".

`PAPER` holds its claims D1 to D3, and D4 that goes beyond them; study.py has the runs. The paper scores the mean of 11
English and of 8 French biomedical tasks; here a claim is about the mean of all tasks of the study.

Sources of the numbers: the abstract (arXiv:2605.12438) has the gains over MLM, the model cards of
almanach/ModernBERT-bio and almanach/ModernCamemBERT-bio say which size they belong to and have the recipe; the means
with frozen layers are those of the freeze interventions in the first author's thesis (French, base size, 9 seeds).
"""

from collections.abc import Callable

from biphase.papers.claims import claim
from biphase.report.contrasts import Paper, above
from biphase.report.recipes import Published, Recipe
from biphase.report.selectors import Compare, Which
from biphase.specs import Hub, Pretrain

Fits = Callable[[Recipe, Pretrain], bool]


def _detour(low: float, high: float, frozen: Callable[[str], bool] | None = None) -> Fits:
    """CLM for such a share of the steps since the base, then MLM; `frozen`: what the causal phase does not train."""

    def fits(recipe: Recipe, run: Pretrain) -> bool:
        freeze = run.phases[0].freeze
        return (
            recipe.kind == "clm-mlm"
            and low <= recipe.causal_share <= high
            and (all(map(frozen, freeze)) and bool(freeze) if frozen else not freeze)
            and _adapts(recipe, run)
        )

    return fits


def _adapts(recipe: Recipe, run: Pretrain) -> bool:
    """Whether it continues an encoder: a decayed MLM run, or a published model."""
    return bool(run.stages) and (
        recipe.base.kind == "mlm" if recipe.base else isinstance(run.root.start, Hub)
    )


MASKED = Which(lambda recipe, run: recipe.kind == "mlm" and _adapts(recipe, run))
LONG = Which(_detour(0.8, 0.95))
EVEN = Which(_detour(0.4, 0.6))
LOW = Which(_detour(0.8, 0.95, lambda name: name.startswith("layers[:")))
MID = Which(_detour(0.8, 0.95, lambda name: name[7:8].isdigit()))
NEEDS = "needs runs of equal steps that continue one encoder on new text: "


# In points, by claim and the model that is adapted.
GAINS = {
    ("D1", "ModernBERT-base"): 0.3,
    ("D1", "ModernBERT-large"): 0.8,
    ("D1", "moderncamembert-base"): 2.8,
    ("D1", "moderncamembert-large"): 1.2,
    ("D2", "moderncamembert-base"): 60.8 - 58.4,
    ("D3", "moderncamembert-base"): 60.3 - 58.4,
}


PAPER = Paper(
    authors="Touchent, de la Clergerie",
    title="A Causal Language Modeling Detour Improves Encoder Continued Pretraining",
    venue="arXiv:2605.12438, 2026",
    address="https://arxiv.org/abs/2605.12438",
    statements=(
        claim(
            "D1",
            "An encoder that continues with CLM and then a short MLM phase scores above one that continues with MLM",
            gist="The detour minus MLM throughout, mean over tasks",
            contrast="CLM for 80 to 95% of the steps, then MLM − MLM throughout, from one encoder, equal steps; mean over tasks",
            needs=NEEDS + "MLM throughout, and CLM for 80 to 95% and then MLM",
            models=Compare((LONG, MASKED)),
            figure="continued",
            paper="+0.3 (base) and +0.8 (large) over 11 English tasks, +2.8 and +1.2 over 8 French ones (abstract, model cards)",
        ),
        claim(
            "D2",
            "Freezing the low layers while the objective is causal removes the gain",
            gist="The detour minus the detour with frozen low layers, mean over tasks",
            contrast="the detour − the detour whose first third of layers is frozen during CLM; mean over tasks; if the detour gains",
            needs=NEEDS + "the detour with and without frozen low layers, and MLM throughout",
            models=Compare((LONG, LOW, MASKED), ignoring=("freeze",)),
            premise=(above(0, 2, on=None, title="{line} · the detour minus MLM throughout"),),
            figure="continued",
            paper="60.8 for the detour, 58.4 with layers 0 to 7 frozen, 57.9 for MLM (French, base, mean F1; thesis)",
            equal_data=False,
        ),
        claim(
            "D3",
            "Freezing middle layers instead keeps more of it",
            gist="Frozen middle layers minus frozen low layers, mean over tasks",
            contrast="the detour with frozen layers above the first third − with the first third frozen; mean over tasks",
            needs=NEEDS + "detours with frozen low and with frozen middle layers",
            models=Compare((MID, LOW), ignoring=("freeze",)),
            figure="continued",
            paper="60.3 with layers 8 to 14 frozen, 58.4 with layers 0 to 7 (French, base, mean F1; thesis)",
            equal_data=False,
        ),
        claim(
            "D4",
            "The gain outlasts an MLM phase as long as the causal one",
            gist="Half CLM, then half MLM, minus MLM throughout, mean over tasks",
            contrast="CLM for 40 to 60% of the steps, then MLM − MLM throughout, from one encoder, equal steps; mean over tasks",
            needs=NEEDS + "MLM throughout, and CLM for about half of the steps and then MLM",
            models=Compare((EVEN, MASKED)),
            figure="continued",
            paper="no score known: the abstract says that the changed representations persist",
            source="beyond",
        ),
    ),
    published=Published(GAINS),
    # As the card of ModernBERT-bio-large lists them; retrieval is ours.
    tasks={"SC": ("gad", "hoc", "chemprot"), "TC": ("anatem", "bc5cdr", "jnlpba", "ncbi_disease"), "IR": ()},
    protocol="standard",
)
