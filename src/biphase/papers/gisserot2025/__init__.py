"""Gisserot-Boukhlef et al. (2025): "Should We Still Pretrain Encoders with Masked Language Modeling?"

`PAPER` is what a study tests with `papers="gisserot2025"`: the claims (claims.py), the published numbers, the datasets
and the evaluation protocol. Its runs are in study.py.

The published numbers are in percent: means over the datasets of a family, single runs, and two contrasts. A model is
looked up by its recipe, never by its name in a study. Numbers that the paper shows only in a plot are not included. Its
means are over three datasets and five seeds, with its own protocol and metrics; for a study with other tasks or another
protocol they are a reference point, not a target.
"""

from __future__ import annotations

from dataclasses import dataclass

from biphase.catalog import TASKS
from biphase.papers.gisserot2025.claims import STATEMENTS
from biphase.presets import SIZES
from biphase.report.contrasts import Paper
from biphase.report.evidence import by_family
from biphase.report.recipes import Kind, Published, Recipe, shape_key
from biphase.specs.tasks import FAMILIES

TOKENS = 2_359_296  # tokens a step; the paper also gives a second figure, 0.6% higher


@dataclass(frozen=True)
class PrintedModel:
    """The properties by which the paper's tables distinguish models."""

    size: str
    kind: Kind
    steps: int  # since the base, if there is one
    ratio: float | None = None
    causal: int = 0  # steps of these trained with CLM
    decayed: bool = True
    base: PrintedModel | None = None


def printed(recipe: Recipe) -> PrintedModel:
    """Reduce a recipe to the properties that the paper's tables list."""
    steps = recipe.own_steps
    return PrintedModel(
        size=recipe.size,
        kind=recipe.kind,
        steps=steps,
        ratio=recipe.ratio,
        causal=round(recipe.causal_share * steps),
        decayed=recipe.decayed,
        base=printed(recipe.base) if recipe.base else None,
    )


def _theirs(recipe: Recipe) -> bool:
    """Whether the shape, the masking rule and the tokens a step are the paper's, which `PrintedModel` does not hold."""
    size = SIZES.get(recipe.size)
    if size is None or recipe.shape != shape_key(size) or not recipe.steps:
        return False
    return (
        all(span.objective.plain for span in recipe.spans)
        and abs(recipe.tokens / (recipe.steps * TOKENS) - 1) <= 0.05
    )


def _clm(size: str, steps: int = 42_000, *, decayed: bool = True) -> PrintedModel:
    return PrintedModel(size, "clm", steps, causal=steps, decayed=decayed)


def _mlm(size: str, ratio: float = 0.4, steps: int = 42_000, *, decayed: bool = True) -> PrintedModel:
    return PrintedModel(size, "mlm", steps, ratio, decayed=decayed)


def _both(causal: int, steps: int = 42_000) -> PrintedModel:
    return PrintedModel("610m", "clm-mlm", steps, 0.4, causal)


def _continued(base: PrintedModel, steps: int) -> PrintedModel:
    return PrintedModel("610m", "mlm", steps, 0.4, base=base)


def _row(sc: float, tc: float, qa: float, ir: float) -> dict[str, float]:
    return {"SC": sc, "TC": tc, "QA": qa, "IR": ir}


FAMILY_MEANS: dict[PrintedModel, dict[str, float]] = {
    # One objective, three sizes, 42,000 steps: Figure 2, Tables 2 to 5.
    _mlm("210m"): _row(84.89, 92.13, 49.43, 75.78),
    _clm("210m"): _row(82.80, 92.18, 39.26, 72.83),
    _mlm("610m"): _row(87.00, 92.21, 62.77, 79.55),
    _clm("610m"): _row(83.58, 92.69, 42.09, 76.20),
    _mlm("1b"): _row(88.23, 92.51, 70.28, 79.95),
    _clm("1b"): _row(82.68, 92.46, 44.48, 78.68),
    # Other masking ratios, if one of them is the best of its size: Figure 3.
    _mlm("610m", 0.2): {"SC": 87.56, "TC": 92.79, "QA": 65.00},
    _mlm("610m", 0.5): {"IR": 79.62},
    _mlm("1b", 0.5): {"TC": 92.88, "IR": 81.97},
    # Intermediate checkpoints, not decayed: Figure 4, Tables 6 to 9.
    _mlm("610m", steps=5_000, decayed=False): _row(72.49, 89.36, 27.89, 54.50),
    _clm("610m", 5_000, decayed=False): _row(78.56, 91.17, 34.30, 65.22),
    _mlm("610m", steps=40_000, decayed=False): _row(86.40, 92.02, 57.90, 79.26),
    _clm("610m", 40_000, decayed=False): _row(83.48, 92.65, 41.99, 76.05),
    # CLM, then MLM: Figures 1 and 6, Tables 10 to 13.
    _both(10_000): _row(87.85, 93.07, 67.77, 79.88),
    _both(21_000): {"SC": 87.57},
    _both(32_000): {"SC": 87.06},
    _both(11_000, 22_000): {"QA": 55.97},
    _both(17_000, 22_000): {"IR": 77.81},
    # Continued MLM on decayed bases: Figures 1, 8 and 9, Tables 14 to 17.
    _continued(_mlm("610m"), 12_000): _row(87.61, 92.27, 66.57, 79.92),
    _continued(_clm("610m"), 12_000): _row(87.84, 92.77, 63.21, 80.27),
    _continued(_mlm("610m"), 22_000): _row(87.47, 92.11, 67.66, 80.45),
    _continued(_clm("610m"), 22_000): _row(88.40, 92.70, 66.62, 80.70),
}

# Single runs behind Figure 5: SST-2, seed 0.
RATES: dict[tuple[PrintedModel, str], dict[float, float]] = {
    (_mlm("610m"), "sst2"): {1e-5: 76.15, 5e-5: 90.25, 2e-4: 82.34, 5e-4: 81.77},
    (_clm("610m"), "sst2"): {1e-5: 83.14, 5e-5: 90.94, 2e-4: 87.27, 5e-4: 82.91},
}

# Contrasts that do not follow from family means: C12 of SST-2 alone, B3 of MNLI against SST-2; one run each.
CONTRASTS: dict[tuple[str, PrintedModel], float] = {("C12", _mlm("610m")): 6.1, ("B3", _mlm("610m")): 6.02}


class Numbers(Published):
    """The lookup that reports use."""

    def family_mean(self, recipe: Recipe, family: str) -> float | None:
        return FAMILY_MEANS.get(printed(recipe), {}).get(family) if _theirs(recipe) else None

    def at_rates(self, recipe: Recipe, task: str) -> dict[float, float]:
        return RATES.get((printed(recipe), task), {}) if _theirs(recipe) else {}

    def gaps(self) -> dict[str, list[tuple[tuple[float, ...], float]]]:
        pairs = {
            steps: (_mlm("610m", steps=steps, decayed=end), _clm("610m", steps, decayed=end))
            for steps, end in ((5_000, False), (40_000, False), (42_000, True))
        }
        return {
            family: [
                (
                    (steps * TOKENS / SIZES["610m"].block_parameters, float(steps * TOKENS), float(steps)),
                    round(FAMILY_MEANS[masked][family] - FAMILY_MEANS[causal][family], 2),
                )
                for steps, (masked, causal) in pairs.items()
            ]
            for family in FAMILIES
            if family in FAMILY_MEANS[pairs[42_000][0]]
        }

    def contrast(self, claim: str, recipe: Recipe) -> float | None:
        return CONTRASTS.get((claim, printed(recipe))) if _theirs(recipe) else None


PAPER = Paper(
    authors="Gisserot-Boukhlef, Boizard, Faysse, Alves, Malherbe, Martins, Hudelot, Colombo",
    title="Should We Still Pretrain Encoders with Masked Language Modeling?",
    venue="arXiv:2507.00994, 2025",
    address="https://arxiv.org/abs/2507.00994",
    statements=STATEMENTS,
    published=Numbers(),
    tasks=by_family({task.name: task for task in TASKS}),
    protocol="paper",
)
