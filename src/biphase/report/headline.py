"""The answer of a study in a few sentences: the best recipe, and its lead over the best of every other kind.

The best recipe is chosen by validation scores and reported by test scores, because choosing and reporting with the
same numbers would favour a lucky model. It is compared with the best recipe of every other kind, chosen in the same
way, at the same size and the same number of steps. Differences are paired by seed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from biphase.report.evidence import Evidence, Floats
from biphase.report.recipes import Model
from biphase.report.statistics.intervals import Estimate, across, kept, of_scores
from biphase.report.verdicts import READS, Finding
from biphase.specs.tasks import family_name
from biphase.text import collapse, counted, fixed, interval, listed, no_interval, percent, short

KINDS = {
    "clm": "causal only",
    "mlm": "masked only",
    "clm-mlm": "causal, then masked",
    "start": "no training",
    "other": "another order",
}


@dataclass(frozen=True)
class Lead:
    """The difference between the best recipe and the best of another kind: paired, in points."""

    kind: str
    name: str  # of the other model
    note: str
    average: Estimate
    families: tuple[tuple[str, Estimate], ...]

    @property
    def clear(self) -> bool:
        """Whether the interval of the average lies above 0."""
        return self.average.low > 0

    @property
    def rival(self) -> str:
        about = f"{self.name}, {self.note}" if self.note else self.name
        return f"{self.kind} ({about})" if self.kind else about

    @property
    def told(self) -> str:
        """The lead as text, with its interval or why there is none."""
        lead = self.average
        if not math.isfinite(lead.mean):
            return "no seed in common yet"
        points = f"{fixed(abs(lead.mean))} points {'ahead' if lead.mean >= 0 else 'behind'}"
        low, high = (lead.low, lead.high) if lead.mean >= 0 else (-lead.high, -lead.low)
        if not math.isfinite(low):
            return f"{points} ({no_interval(lead.n)})"
        return f"{points} {interval(low, high)}{'' if low > 0 else '; no significant difference'}"


@dataclass(frozen=True)
class Headline:
    """The top of a report: the answer, the leads, the scale, and the count of verdicts."""

    answer: str
    subject: str  # the part of the answer that names the best recipe
    against: tuple[Lead, ...]
    scale: str
    noise: str
    verdicts: dict[str, int]  # by verdict as reports show it


def headline(evidence: Evidence, findings: Iterable[Finding]) -> Headline:
    """The top of a report, from the scores and the verdicts."""
    verdicts = Counter(one.reads for one in findings)
    answer, subject, against = _answer(evidence)
    return Headline(
        answer=answer,
        subject=subject,
        against=against,
        scale=_scale(evidence),
        noise=noise(evidence),
        verdicts={reading: verdicts[reading] for reading in READS},
    )


# ---------------------------------------------------------------- the answer


def _answer(evidence: Evidence) -> tuple[str, str, tuple[Lead, ...]]:
    """The answer, the part of it that names the best recipe, and the leads it rests on."""
    if not evidence.tasks:
        return "This study fine-tunes nothing, so no recipe is judged; its losses are shown below.", "", ()
    group = _comparable([model for model in evidence.models.values() if _known(evidence, model)])
    if not group:
        done, of = evidence.count
        return (
            f"Not answered yet: no model has a complete seed ({done:,} of {counted(of, 'score')} done).",
            "",
            (),
        )
    best = _best(evidence, group)
    score = of_scores(across(_average(evidence, best)))
    value = f"{percent(score.mean)}%{_spread(score)}, averaged over {listed([family_name(one) for one in evidence.families])}"
    constant = (
        evidence.grids[result, task].constant_seeds for result in best.results for task in evidence.tasks
    )
    if warning := collapse(sum(constant)):
        value += f"; {warning}"
    what = _what(best)
    if len(group) == 1:
        return f"{what} ({best.recipe.size}) scores {value}.", what, ()
    leads = tuple(
        sorted(_against(evidence, best, group), key=lambda lead: lead.average.mean)
    )  # the nearest first
    if all(lead.clear for lead in leads) and _highest(evidence, best, group):
        return f"{_setting(group)}{what} scores best of {_number(group)}: {value}.", what, leads
    told = f"{_setting(group)}{what}, the best of {_number(group)} on validation, scores {value}."
    all_others = " of all others" if any(lead.clear for lead in leads) else ""
    return f"No {_word(group)} is clearly ahead{all_others}. {told}", what, leads


def _known(evidence: Evidence, model: Model) -> bool:
    """Whether the model has at least one seed that is complete on every family."""
    return kept(_average(evidence, model))[1].size > 0


def _average(evidence: Evidence, model: Model, part: str = "test") -> Floats:
    """The mean over families, equally weighted, for each seed."""
    return np.mean([evidence.on(model, tasks, part=part) for tasks in evidence.families.values()], axis=0)


def _comparable(models: list[Model]) -> list[Model]:
    """The models of one size and number of steps with the most kinds of recipes, then the most models.

    Intermediate checkpoints are left out, because their learning rate has not decayed. Models without any training
    here (`biphase evaluate`) form one group.
    """
    groups: dict[tuple[object, ...], list[Model]] = {}
    for model in models:
        recipe = model.recipe
        if recipe.kind == "start":
            groups.setdefault(("start",), []).append(model)
        elif recipe.final:
            groups.setdefault((recipe.size, recipe.steps, recipe.setting), []).append(model)

    def worth(group: list[Model]) -> tuple[int, int, int, int]:
        recipe = group[0].recipe
        return len({one.recipe.kind for one in group}), len(group), recipe.parameters or 0, recipe.steps

    return max(groups.values(), key=worth, default=[]) or models[:1]


def _best(evidence: Evidence, models: list[Model]) -> Model:
    """The model with the best validation score on the seeds that all models have; the first of equals.

    If no seed is complete for all models, each model is averaged over its own seeds.
    """
    tables = [_average(evidence, one, "validation") for one in models]
    shared = np.all([np.isin(np.arange(len(evidence.seeds)), kept(one)[1]) for one in tables], axis=0)
    means = [across(one[:, shared] if shared.any() else one).mean for one in tables]
    return models[means.index(max(means))]


def _highest(evidence: Evidence, best: Model, group: list[Model]) -> bool:
    """Whether no test score exceeds that of the model chosen on validation. Affects the wording only."""
    others = [one for one in group if one is not best]
    leads = [across(difference(evidence, best, one, evidence.families.values())).mean for one in others]
    return all(lead >= 0 for lead in leads)


def _against(evidence: Evidence, best: Model, group: list[Model]) -> Iterable[Lead]:
    """The leads over the best of each other kind; if there is one kind only, over the next best."""
    kinds = dict.fromkeys(one.recipe.kind for one in group)
    if len(kinds) == 1:
        rival = _best(evidence, [one for one in group if one is not best])
        yield _lead(evidence, best, rival, "", "the next")
        return
    for kind in kinds:
        if kind != best.recipe.kind:
            of_kind = [one for one in group if one.recipe.kind == kind]
            note = "the best of its kind" if len(of_kind) > 1 else ""
            yield _lead(evidence, best, _best(evidence, of_kind), KINDS[kind], note)


def _lead(evidence: Evidence, best: Model, rival: Model, kind: str, note: str) -> Lead:
    families = evidence.families
    several = f"{len(rival.results)} pretraining seeds" if len(rival.results) > 1 else ""
    return Lead(
        kind=kind,
        name=rival.name,
        note=", ".join(filter(None, (note, several))),
        average=across(difference(evidence, best, rival, families.values())),
        families=tuple(
            (family, across(difference(evidence, best, rival, [tasks]))) for family, tasks in families.items()
        ),
    )


def difference(evidence: Evidence, one: Model, other: Model, families: Iterable[tuple[str, ...]]) -> Floats:
    """Test scores of `one` minus those of `other`, in points, paired by pretraining and fine-tuning seed.

    If they have no pretraining seed in common, their first ones are compared.
    """
    common = [seed for seed in one.seeds if seed in other.seeds]
    places = [(one.seeds.index(seed), other.seeds.index(seed)) for seed in common] or [(0, 0)]
    groups = list(families)
    mine, theirs = (
        np.mean([evidence.on(model, tasks) for tasks in groups], axis=0) for model in (one, other)
    )
    return 100 * np.stack([mine[i] - theirs[j] for i, j in places])


def _spread(score: Estimate) -> str:
    if not math.isfinite(score.low):
        return f" ({no_interval(score.n)})"
    return f" {interval(100 * score.low, 100 * score.high)}"


def _setting(group: list[Model]) -> str:
    recipe = group[0].recipe
    if recipe.kind == "start":
        return ""
    return f"At equal steps ({recipe.size}, {recipe.steps:,} steps, {short(recipe.tokens)} tokens), "


def _what(model: Model) -> str:
    """The recipe without its size, which precedes it; the name for a model that was not trained here."""
    return model.name if model.recipe.kind == "start" else model.recipe.words().split(" · ", 1)[1]


def _number(group: list[Model]) -> str:
    return counted(len(group), _word(group))


def _word(group: list[Model]) -> str:
    return "model" if group[0].recipe.kind == "start" else "recipe"


# ---------------------------------------------------------------- scale and noise


def _scale(evidence: Evidence) -> str:
    sizes = list(dict.fromkeys(model.recipe.size for model in evidence.models.values()))
    parts = [
        counted(len(evidence.models), "model"),
        f"{listed(sizes)}" if len(sizes) <= 4 else f"{len(sizes)} sizes",
    ]
    finetune = evidence.plan.study.finetune
    if finetune:
        done, of = evidence.count
        parts += [
            counted(len(evidence.tasks), "task"),
            counted(len(finetune.lrs), "learning rate"),
            counted(len(finetune.seeds), "fine-tuning seed"),
            f"{done:,} scores" if done == of else f"{done:,} of {of:,} scores",
        ]
    return " · ".join(parts)


def noise(evidence: Evidence) -> str:
    """Which sources of noise the intervals cover, and which they do not."""
    if not evidence.tasks:
        return ""
    several = [model for model in evidence.models.values() if len(model.results) > 1]
    alone = len(evidence.models) - len(several)
    seeds = len(evidence.seeds)
    if seeds < 2 and not several:
        return "One seed only: no intervals."
    if not several:
        return (
            f"Intervals cover {seeds} fine-tuning seeds. There is one pretraining seed: "
            "they do not cover the noise of pretraining."
        )
    if not alone:
        return "Intervals cover pretraining seeds and fine-tuning seeds."
    have = "model has" if len(several) == 1 else "models have"
    return (
        f"{len(several)} {have} several pretraining seeds, and intervals that cover them; "
        f"the other {alone} have one, and their intervals cover fine-tuning seeds only."
    )
