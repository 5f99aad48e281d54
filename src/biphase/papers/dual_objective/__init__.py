"""Samuel and Charpentier (2025): "Dual-objective Language Models: Training Efficiency Without Overfitting" (ICLR 2026).

`PAPER` holds its claims O1 to O3; study.py has the runs. The text of the abstract and the card and the branches of the
published models (ltg/dual-lm-470m) could be looked up, and the authors' code for the recipe; the tables could not, so no
claim carries a number. "Remark 1" is what the card names so; O3 is in the words of a review of the paper.
"""

from biphase.papers.claims import claim
from biphase.presets import sources_of
from biphase.report.contrasts import On, Paper, Pattern, Quantity, slope
from biphase.report.recipes import Model, Published, Recipe, run_of
from biphase.report.selectors import Compare, Which
from biphase.specs import Pretrain

NEARLY = 0.9  # from this share of causal rows a mixture is nearly autoregressive: 63/64 in the paper
CLOSE = 0.5  # points: the margin of "no worse"


def mixed(recipe: Recipe, run: Pretrain) -> bool:
    return recipe.base is None and recipe.objectives == ("mix",)


def any_share(recipe: Recipe, run: Pretrain) -> bool:
    return recipe.base is None and recipe.objectives in (("mix",), ("clm",), ("mntp",))


def share(recipe: Recipe) -> float:
    return recipe.causal_rows


MIXED = Which(mixed, at_least=1, order=lambda recipe, run: share(recipe))
NEARLY_CAUSAL = Which(lambda recipe, run: mixed(recipe, run) and share(recipe) >= NEARLY)
CAUSAL = Which(lambda recipe, run: any_share(recipe, run) and share(recipe) == 1)
MASKED = Which(lambda recipe, run: any_share(recipe, run) and share(recipe) == 0)
EVERY = Which(any_share, at_least=4, order=lambda recipe, run: share(recipe))
NEEDS = "needs runs of equal steps on one corpus: "


def times(on: On, model: Model) -> float:
    """How often the text was read: tokens of the run over those of its corpora; at most once if that is not limited."""
    limits = [corpus.tokens for corpus in sources_of(run_of(on.study.plan, model.results[0])[0])]
    return max(1.0, model.recipe.tokens / sum(limits)) if all(limits) else 1.0


def preference(on: On, models: list[Model]) -> Quantity:
    """The points gained for ten percent more causal rows."""
    return slope((share(model.recipe) * 10, on.score(model)) for model in models)


def falls(on: On, every: tuple[Model, ...]) -> Quantity | None:
    """The preference for causal rows where text repeats least, minus that where it repeats most."""
    by_times: dict[float, list[Model]] = {}
    for model in every:
        by_times.setdefault(round(times(on, model), 3), []).append(model)
    least, most = by_times[min(by_times)], by_times[max(by_times)]
    if len(by_times) < 2 or min(len(least), len(most)) < 2:
        return None
    return preference(on, least) - preference(on, most)


def best_over(which: int, name: str) -> Pattern:
    """The mixture that is best on validation scores above one of the single objectives."""
    return Pattern(
        lambda on, *models: on.best(models[0]) - on.score(models[which]),
        f"{{line}} · over {name}",
        on=None,
    )


def on_fresh_text(on: On, mixture: Model, causal: Model) -> Quantity | None:
    return on.gap(mixture, causal) if times(on, causal) == 1 else None


PAPER = Paper(
    authors="Samuel, Charpentier",
    title="Dual-objective Language Models: Training Efficiency Without Overfitting",
    venue="arXiv:2512.14549, ICLR 2026",
    address="https://arxiv.org/abs/2512.14549",
    statements=(
        claim(
            "O1",
            "At every level of repetition some mixture of both objectives scores above either alone",
            gist="The best mixture minus CLM and minus masked diffusion, mean over tasks",
            contrast="the mixture that is best on validation − CLM, and − masked diffusion; mean over tasks; each corpus",
            needs=NEEDS + "a mixture of CLM and masked rows, CLM alone, and masked rows alone",
            models=Compare((MIXED, CAUSAL, MASKED)),
            contrasts=(best_over(1, "CLM"), best_over(2, "masked diffusion")),
            paper="no numbers seen: stated in the abstract, of 50 models",
            caveats=("The paper scores zero-shot predictions, this study fine-tuned encoders.",),
        ),
        claim(
            "O2",
            "On text that is not repeated a few masked rows cost nothing: 63/64 causal is no worse than CLM",
            gist="The nearly causal mixture minus CLM, which must exceed −0.5, mean over tasks",
            contrast="at least 90% of the rows causal − CLM > −0.5 points; mean over tasks; text that is read once",
            needs=NEEDS + "a mixture with at least 90% causal rows, and CLM alone",
            models=Compare((NEARLY_CAUSAL, CAUSAL)),
            contrasts=(
                Pattern(
                    on_fresh_text,
                    on=None,
                    margin=-CLOSE,
                ),
            ),
            paper="no numbers seen: the recommended share of the model card, after the paper's Remark 1",
            caveats=("No worse means: less than 0.5 points below.",),
        ),
        claim(
            "O3",
            "The more often text repeats, the fewer rows should be causal",
            gist="The preference for causal rows on fresh text minus that on repeated text",
            contrast="slope of the score over the causal share where text repeats least − where it repeats most > 0; mean over tasks",
            needs=NEEDS + "two shares or more, at two numbers of repetitions (Corpus(tokens=…))",
            models=Compare((EVERY,), ignoring=("corpus",)),
            contrasts=(
                Pattern(
                    falls,
                    "{line} · fresh against repeated",
                    on=None,
                ),
            ),
            paper="no numbers seen: up to 16 repetitions high shares, beyond that lower ones",
            equal_data=False,
        ),
    ),
    published=Published(),
    tasks={"SC": (), "TC": (), "QA": (), "IR": ()},
    protocol="standard",
)
