"""The answer of a study in a few sentences: the recipes that may be best, the leader, and its lead over other kinds.

The recipes not shown worse than the best are found by multiple comparisons with the best (Hsu), among recipes of the
same size and the same number of steps. The leader is chosen by validation scores and reported by test scores, because
choosing and reporting with the same numbers would favour a lucky model. It is compared with the best recipe of every
other kind, chosen in the same way. Intervals and comparisons use the moderated variances of the claims.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from biphase.report.contrasts import Contrast, MeanScore, Measure, Sum, mean
from biphase.report.evidence import Evidence, Floats
from biphase.report.recipes import Model
from biphase.report.statistics.intervals import Estimate, across, kept, of_scores
from biphase.report.statistics.moderated import Cells, contenders
from biphase.report.verdicts import VERDICTS, Finding
from biphase.specs.tasks import Family, family_name
from biphase.text import collapse, counted, fixed, interval, listed, no_interval, percent, short

KINDS = {
    "clm": "causal only",
    "mlm": "masked only",
    "clm-mlm": "causal, then masked",
    "start": "no training",
    "mix": "mixed in every step",
    "other": "another order",
}


@dataclass(frozen=True)
class Lead:
    """The difference between the leader and the best recipe of another kind, in points."""

    kind: str
    name: str  # of the other model
    note: str
    average: Estimate
    families: tuple[tuple[str, Estimate], ...]

    @property
    def open(self) -> bool:
        """Whether the interval of the average contains 0: no significant difference."""
        return self.average.low <= 0 <= self.average.high

    @property
    def rival(self) -> str:
        about = f"{self.name}, {self.note}" if self.note else self.name
        return f"{self.kind} ({about})" if self.kind else about

    @property
    def told(self) -> str:
        """The lead as text, with its interval or why there is none."""
        lead = self.average
        if not math.isfinite(lead.mean):
            return "no complete seed yet"
        points = f"{fixed(abs(lead.mean))} points {'ahead' if lead.mean >= 0 else 'behind'}"
        low, high = (lead.low, lead.high) if lead.mean >= 0 else (-lead.high, -lead.low)
        if not math.isfinite(low):
            return f"{points} ({no_interval(lead.n)})"
        return f"{points} {interval(low, high)}{'; no significant difference' if self.open else ''}"


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
    verdicts = Counter(one.verdict for one in findings)
    return Headline(
        *_answer(evidence),
        scale=_scale(evidence),
        noise=noise(evidence),
        verdicts={verdict: verdicts[verdict] for verdict in VERDICTS},
    )


# ---------------------------------------------------------------- the answer


def _answer(evidence: Evidence) -> tuple[str, str, tuple[Lead, ...]]:
    """The answer, the part of it that names the best recipe, and the leads it rests on."""
    if not evidence.tasks:
        return "This study fine-tunes nothing, so no recipe is judged; its losses are shown below.", "", ()
    complete = [one for one in evidence.models.values() if kept(_average(evidence, one))[1].size]
    group = _comparable(complete)
    if not group:
        done, of = evidence.count
        answer = f"Not answered yet: no model has a complete seed ({done:,} of {counted(of, 'score')} done)."
        return answer, "", ()
    best = _best(evidence, group)
    if best is None:
        return "Not answered yet: only pretraining seeds kept for confirmation have scores.", "", ()
    recipe, trained = best.recipe, best.recipe.kind != "start"
    # The recipe without its size, which precedes it; the name of a model that was not trained here.
    what = recipe.words().split(" · ", 1)[1] if trained else best.name
    value = _value(evidence, best)
    if len(group) == 1:
        return f"{what} ({recipe.size}) scores {value}.", what, ()
    measure = Measure(evidence)
    leads = sorted(_against(measure, best, group), key=lambda lead: lead.average.mean)  # the nearest first
    word = "recipe" if trained else "model"
    subject, several = what, counted(len(group), word)
    if trained:
        tokens = short(recipe.tokens)
        subject = f"At equal steps ({recipe.size}, {recipe.steps:,} steps, {tokens} tokens), {what}"
    may_be_best = _contenders(measure, group)
    if may_be_best == [best]:
        return f"{subject} scores best of {several}: {value}.", what, tuple(leads)
    names = listed([one.name for one in may_be_best])
    answer = f"{len(may_be_best)} of {several} are not shown worse than the best: {names}."
    if len(may_be_best) == len(group):
        answer = f"None of {several} is shown worse than the best."
    elif len(may_be_best) == 1:
        answer = f"All of {several} but {names} are shown worse than the best."
    return f"{answer} {subject}, the best on validation, scores {value}.", what, tuple(leads)


def _contenders(measure: Measure, group: list[Model]) -> list[Model]:
    """The models not shown worse than the best; all of them where there is no noise to judge by."""
    found = measure.means(group, lambda model: over_families(measure.evidence, model))
    table = np.array([(one.mean, one.variance, one.df) for one in found.values()]).reshape(-1, 3)
    known = np.isfinite(table).all(axis=1) & (table[:, 1] > 0)
    if known.sum() < 2 or len(found) < len(group):
        return group
    # One-sided, so 97.5% agrees with the two-sided 95% intervals of the leads.
    best = contenders(Cells(*table.T, n=np.ones(len(table))), level=0.975)
    names = {name for at, name in enumerate(found) if at in best}
    return [model for model in group if model.name in names]


def over_families(evidence: Evidence, model: Model, families: Iterable[Family] = ()) -> Sum:
    """The mean score of a model over families, equally weighted; all, if none is named."""
    tasks = [evidence.families[family] for family in families or evidence.families]
    return mean(MeanScore((model,), some) for some in tasks)


def _value(evidence: Evidence, model: Model) -> str:
    """A model's score with its interval, and a warning about constant predictions."""
    score = of_scores(across(_average(evidence, model)))
    around = f"({no_interval(score.n)})"
    if math.isfinite(score.low):
        around = interval(100 * score.low, 100 * score.high)
    families = listed([family_name(one) for one in evidence.families])
    grids = [evidence.grids[result, task] for result in model.results for task in evidence.tasks]
    warning = collapse(sum(grid.constant_seeds for grid in grids))
    return f"{percent(score.mean)}% {around}, averaged over {families}{f'; {warning}' if warning else ''}"


def _average(evidence: Evidence, model: Model, part: str = "test") -> Floats:
    """The mean over families, equally weighted, for each seed."""
    return np.mean([evidence.on(model, some, part=part) for some in evidence.families.values()], axis=0)


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


def _best(evidence: Evidence, models: list[Model]) -> Model | None:
    """The model with the best validation score on the seeds that all models have; the first of equals.

    If no seed is complete for all models, each model is averaged over its own seeds. A model that has only seeds kept for
    confirmation has no score to be chosen by. None: no model has one.
    """
    tables = [_average(evidence, one, "validation") for one in models]
    shared = np.all([np.isin(np.arange(len(evidence.seeds)), kept(one)[1]) for one in tables], axis=0)
    means = [across(one[:, shared] if shared.any() else one).mean for one in tables]
    return models[int(np.nanargmax(means))] if np.isfinite(means).any() else None


def _against(measure: Measure, best: Model, group: list[Model]) -> Iterable[Lead]:
    """The leads over the best of each other kind; if there is one kind only, over the next best."""
    kinds = dict.fromkeys(one.recipe.kind for one in group)
    if len(kinds) == 1:
        rival = _best(measure.evidence, [one for one in group if one is not best])
        if rival:
            yield _lead(measure, best, rival, "", "the next")
        return
    for kind in kinds:
        if kind != best.recipe.kind:
            of_kind = [one for one in group if one.recipe.kind == kind]
            note = "the best of its kind" if len(of_kind) > 1 else ""
            if rival := _best(measure.evidence, of_kind):
                yield _lead(measure, best, rival, KINDS[kind], note)


def _lead(measure: Measure, best: Model, rival: Model, kind: str, note: str) -> Lead:
    evidence = measure.evidence
    several = f"{len(rival.results)} pretraining seeds" if len(rival.results) > 1 else ""

    def gap(*families: Family) -> Estimate:
        one, other = (over_families(evidence, model, families) for model in (best, rival))
        return measure(Contrast("", one - other)).estimate

    return Lead(
        kind=kind,
        name=rival.name,
        note=", ".join(filter(None, (note, several))),
        average=gap(),
        families=tuple((family, gap(family)) for family in evidence.families),
    )


# ---------------------------------------------------------------- scale and noise


def _scale(evidence: Evidence) -> str:
    sizes = list(dict.fromkeys(model.recipe.size for model in evidence.models.values()))
    parts = [
        counted(len(evidence.models), "model"),
        listed(sizes) if len(sizes) <= 4 else f"{len(sizes)} sizes",
    ]
    if finetune := evidence.plan.study.finetune:
        done, of = evidence.count
        parts += [
            counted(len(evidence.tasks), "task"),
            f"{f'{finetune.rates} of ' if finetune.discard else ''}{counted(len(finetune.lrs), 'learning rate')}",
            counted(len(finetune.seeds), "fine-tuning seed"),
            f"{done:,} scores" if done == of else f"{done:,} of {of:,} scores",
        ]
    return " · ".join(parts)


def noise(evidence: Evidence) -> str:
    """Which sources of noise the intervals cover, and which they do not."""
    several = sum(len(model.results) > 1 for model in evidence.models.values())
    alone, seeds = len(evidence.models) - several, len(evidence.seeds)
    if not evidence.tasks:
        return ""
    if not several and seeds < 2:
        return "One seed only: no intervals."
    if not several:
        return (
            f"Intervals cover {seeds} fine-tuning seeds. There is one pretraining seed: "
            "they do not cover the noise of pretraining."
        )
    if not alone:
        return "Intervals cover pretraining seeds and fine-tuning seeds."
    return (
        f"{several} {'model has' if several == 1 else 'models have'} several pretraining seeds, and intervals that "
        f"cover them; the other {alone} have one, and their intervals cover fine-tuning seeds only."
    )
