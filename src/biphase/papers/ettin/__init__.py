"""Weller et al. (2025): "Seq vs Seq: An Open Suite of Paired Encoders and Decoders" (Ettin, ICLR 2026).

`PAPER` holds its claims E1 to E3; study.py has the runs. The paper scores encoders and decoders on MNLI, on retrieval (MS
MARCO) and on generative tasks; here a claim is about the mean of all tasks of the study, none of which is generative.

E2 contradicts gisserot2025, which finds that a causal model that goes on with MLM is the better encoder (C17). The two
compare different things: E2 a converted decoder with the encoder as it was before, C17 with an encoder that went on for
as many steps.

Sources of the numbers: Table 9 (arXiv:2507.11412), which is the table of Figure 1, as two published summaries of the
paper give it alike; the figure itself, in the paper's repository, agrees. The recipe is that of the repository's
configurations (JHU-CLSP/ettin-encoder-vs-decoder).
"""

from collections.abc import Callable
from dataclasses import dataclass

from biphase.papers.claims import claim
from biphase.report.contrasts import Paper
from biphase.report.recipes import Model, Published, Recipe
from biphase.report.selectors import Case, ComparableModels, Compare, ModelGroup, Which

# Table 9: (nDCG@10 on MS MARCO dev, accuracy on MNLI) of an encoder, a decoder, the decoder as an encoder, the reverse.
TABLE = {
    "ettin-150m": ((39.97, 89.2), (37.71, 85.6), (39.49, 85.8), (37.55, 86.8)),
    "ettin-400m": ((42.24, 91.3), (39.93, 88.2), (41.44, 87.6), (39.69, 89.4)),
    "ettin-1b": ((43.35, 91.8), (41.70, 89.9), (43.24, 89.0), (40.77, 90.5)),
}


def _lead(size: str, other: int) -> float:
    """How far the encoder is ahead, mean over the two tasks."""
    scores = [sum(pair) / 2 for pair in TABLE[size]]
    return scores[0] - scores[other]


GAINS = {
    (claim, size): _lead(size, other) for size in TABLE for claim, other in (("E1", 1), ("E2", 2), ("E3", 3))
}


def _only(objectives: tuple[str, ...], names: set[str]) -> bool:
    return bool(objectives) and {*objectives} <= names


def _encoder(recipe: Recipe) -> bool:
    return recipe.base is None and not recipe.merged and _only(recipe.objectives, {"mlm", "mntp"})


def _decoder(recipe: Recipe) -> bool:
    return recipe.base is None and recipe.kind == "clm"


def _encoder_of_decoder(recipe: Recipe) -> bool:
    return recipe.base is not None and _decoder(recipe.base) and _only(recipe.objectives, {"mlm", "mntp"})


def _decoder_of_encoder(recipe: Recipe) -> bool:
    return recipe.base is not None and _encoder(recipe.base) and recipe.kind == "clm"


@dataclass(frozen=True)
class Conversions:
    """One case for each converted model: the encoder as it was when the conversion began, and the converted model."""

    converted: Callable[[Recipe], bool]

    def cases(self, study: ComparableModels) -> list[Case]:
        every = [model for model in study.models.values() if model.recipe.final]
        encoders = {_twin(model.recipe): model for model in every if _encoder(model.recipe)}
        cases = []
        for model in every:
            base = model.recipe.base
            if base and self.converted(model.recipe) and (encoder := encoders.get(_twin(base))):
                cases.append(self._case(study, encoder, model))
        return cases

    def _case(self, study: ComparableModels, encoder: Model, model: Model) -> Case:
        about = ", then ".join(f"{phase.label} for {phase.steps:,} steps" for phase in model.recipe.own)
        line = ModelGroup(encoder.recipe.size, None, about, (), frozenset())
        return Case(study, line, (encoder, model), (model.recipe.own_steps,))


def _twin(recipe: Recipe) -> tuple[object, ...]:
    """What an encoder and a decoder of a pair have in common."""
    return recipe.size, recipe.shape, recipe.steps, recipe.setting


NEEDS = "needs an encoder and a decoder that were trained alike, "


PAPER = Paper(
    authors="Weller, Ricci, Marone, Chaffin, Lawrie, Van Durme",
    title="Seq vs Seq: An Open Suite of Paired Encoders and Decoders",
    venue="arXiv:2507.11412, ICLR 2026",
    address="https://arxiv.org/abs/2507.11412",
    statements=(
        claim(
            "E1",
            "An encoder scores above the decoder of its pair on encoder tasks",
            gist="The encoder minus the decoder, mean over tasks",
            contrast="masked objectives throughout − CLM throughout, one shape, text and schedule, equal steps; mean over tasks",
            needs=NEEDS + "from scratch",
            models=Compare(
                (
                    Which(lambda recipe, run: _encoder(recipe)),
                    Which(lambda recipe, run: _decoder(recipe)),
                )
            ),
            paper="150M: 89.2 and 85.6 on MNLI, 39.97 and 37.71 on MS MARCO; 400M: 91.3 and 88.2, 42.24 and 39.93 (Table 9)",
        ),
        claim(
            "E2",
            "A decoder that goes on with a masked objective stays behind the encoder of its pair",
            gist="The encoder minus the converted decoder, mean over tasks",
            contrast="the encoder as it is − the decoder of its pair after masked training on top; mean over tasks; each conversion",
            needs=NEEDS + "and a run that continues the decoder with MLM or MNTP",
            models=Conversions(_encoder_of_decoder),
            figure="continued",
            paper="150M: 89.2 and 85.8 on MNLI, 39.97 and 39.49 on MS MARCO; 400M: 91.3 and 87.6, 42.24 and 41.44 (Table 9)",
            caveats=("The converted decoder was trained for more steps than the encoder.",),
            equal_data=False,
        ),
        claim(
            "E3",
            "An encoder that goes on with CLM loses on encoder tasks",
            gist="The encoder minus the same after CLM, mean over tasks",
            contrast="the encoder as it is − the encoder after CLM on top; mean over tasks; each conversion",
            needs="needs an encoder from scratch, and a run that continues it with CLM",
            models=Conversions(_decoder_of_encoder),
            figure="continued",
            paper="150M: 89.2 and 86.8 on MNLI, 39.97 and 37.55 on MS MARCO; 400M: 91.3 and 89.4, 42.24 and 39.69 (Table 9)",
            caveats=("The paper's own point is that it stays behind decoders on generative tasks.",),
            equal_data=False,
        ),
    ),
    published=Published(GAINS),
    tasks={"SC": ("mnli",), "TC": (), "QA": (), "IR": ()},
    protocol="standard",
)
