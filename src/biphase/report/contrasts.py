"""Contrasts: what is measured of the models that a claim compares, and with which result.

The file has four parts:

    quantities          `Quantity`: a number for every seed, in percentage points (score, spread, slope, sums of these)
    contrasts           `Contrast`: a quantity that is positive if a claim holds, and the margin it must exceed
    claims              `Statement`: a claim as data: which models are compared (`selectors.Select`), by which
                        `Pattern`s of contrasts; `Paper`: the claims and the published numbers of a paper
    measuring           `measure`: a contrast's estimate, intervals and p-value from the scores

Everything before `measure` needs recipes only, so `biphase plan` can list the tests of a study before any score exists.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from biphase.report.evidence import Evidence, Floats, Resamples, ScoreGrid, over_examples
from biphase.report.recipes import Model, Published
from biphase.report.selectors import Case, ComparableModels, percent, rows_in_common
from biphase.report.statistics.intervals import Estimate, across, kept, spread
from biphase.specs import Family, Finetune

# ---------------------------------------------------------------- quantities
# A quantity has four numbers: its value for every seed, its value for every resample of the test examples, its expected
# variance for a given noise of scores, and its published value. So one definition serves both the report, which has
# scores, and the plan, which has none yet.


Noise = Callable[[str], float]  # task → standard deviation of one score over seeds, in points


@dataclass(frozen=True)
class ScoreView:
    """Scores in percentage points, restricted to the pretraining seeds that all models of a contrast have."""

    evidence: Evidence
    draws: Resamples | None
    rows: dict[str, list[int]]  # model → its row indices, in the same seed order for all models

    @classmethod
    def of(cls, models: Iterable[Model], evidence: Evidence, draws: Resamples | None = None) -> ScoreView:
        return cls(evidence, draws, rows_in_common(models))

    def scores(self, model: Model, tasks: tuple[str, ...], metric: str = "", part: str = "test") -> Floats:
        return 100 * self.evidence.on(model, tasks, metric, part=part)[self.rows[model.name]]

    def rates(self, model: Model, task: str) -> Floats:
        """Test scores as (pretraining seeds, learning rates, fine-tuning seeds)."""
        return 100 * self.evidence.by_rate(model, task)[self.rows[model.name]]

    def resampled(self, model: Model, tasks: tuple[str, ...], metric: str = "") -> Floats | None:
        """Mean over tasks as (resamples, pretraining seeds, fine-tuning seeds); None if a task has no values."""
        table = self.draws.of(model, tasks, metric) if self.draws else None
        return None if table is None else 100 * table[:, self.rows[model.name]]


@dataclass(frozen=True)
class Quantity(ABC):
    """A number for every seed, in percentage points. Sums and multiples of quantities are quantities."""

    models: tuple[Model, ...]  # whose scores it needs
    tasks: tuple[str, ...]  # on which it needs them

    @abstractmethod
    def measure(self, view: ScoreView) -> Floats:
        """Its values as (pretraining seeds, fine-tuning seeds), in points. NaN: missing."""

    def resample(self, view: ScoreView) -> Floats | None:
        """Its values as (resamples, pretraining seeds, fine-tuning seeds); None where resampling does not apply."""
        return None

    @abstractmethod
    def variance(self, noise: Noise) -> float:
        """Its variance over fine-tuning seeds, if scores of different models and tasks vary independently."""

    def published(self, numbers: Published) -> float | None:
        """Its value computed from published scores; None if any of them is not known."""
        return None

    def note(self, view: ScoreView) -> str:
        """What to say beside its value."""
        return ""

    def __mul__(self, weight: float) -> Sum:
        return Sum((self,), (weight,))

    __rmul__ = __mul__

    def __add__(self, other: Quantity) -> Sum:
        return Sum((self, other), (1.0, 1.0))

    def __sub__(self, other: Quantity) -> Sum:
        return Sum((self, other), (1.0, -1.0))


class OfModels(Quantity):
    """Base class of quantities that are computed from scores."""

    def variance(self, noise: Noise) -> float:
        return sum(noise(task) ** 2 for task in self.tasks) / len(self.tasks) ** 2


@dataclass(frozen=True)
class MeanScore(OfModels):
    """The mean score of one model over tasks."""

    family: Family | None = None  # set where the tasks are all that the study has of a family
    metric: str = ""  # empty: the one that learning rates are chosen by

    def measure(self, view: ScoreView) -> Floats:
        return view.scores(self.models[0], self.tasks, self.metric)

    def resample(self, view: ScoreView) -> Floats | None:
        return view.resampled(self.models[0], self.tasks, self.metric)

    def published(self, numbers: Published) -> float | None:
        if self.metric or self.family is None:
            return None
        return numbers.family_mean(self.models[0].recipe, self.family)


class SpreadOfRates(OfModels):
    """The sensitivity to the learning rate: best minus worst test score of each seed, mean over tasks."""

    def measure(self, view: ScoreView) -> Floats:
        by_task = [np.moveaxis(view.rates(self.models[0], task), 1, 0) for task in self.tasks]
        return np.mean([spread(rates) for rates in by_task], axis=0)

    def variance(self, noise: Noise) -> float:
        # Best minus worst is a difference of two scores, so it has twice the variance of one.
        return 2 * super().variance(noise)


@dataclass(frozen=True)
class Best(OfModels):
    """The test score of the model with the best validation score, averaged over the seeds that all models have."""

    family: Family | None = None

    def chosen(self, view: ScoreView) -> Model | None:
        """The model that validation selects; the first of equals. None: no seed is complete for all models."""
        validation = np.stack([view.scores(model, self.tasks, part="validation") for model in self.models])
        complete = np.isfinite(validation).all(axis=0)
        if not complete.any():
            return None
        return self.models[int(np.argmax(validation[:, complete].mean(axis=1)))]

    def measure(self, view: ScoreView) -> Floats:
        best = self.chosen(view)
        scores = view.scores(best or self.models[0], self.tasks)
        return scores if best else np.full_like(scores, np.nan)

    def resample(self, view: ScoreView) -> Floats | None:
        best = self.chosen(view)
        return view.resampled(best, self.tasks) if best else None

    def published(self, numbers: Published) -> float | None:
        # Papers print the best of a sweep and some of the others, so a few known numbers of many include the best.
        known = [MeanScore((model,), self.tasks, self.family).published(numbers) for model in self.models]
        values = [value for value in known if value is not None]
        return max(values) if len(self.models) >= 4 and len(values) >= 2 else None

    def note(self, view: ScoreView) -> str:
        best = self.chosen(view)
        return f"best ratio on validation: {percent(best.recipe.ratio or 0)}" if best else ""


@dataclass(frozen=True)
class Combined(Quantity):
    """Base class of quantities that are computed from others."""

    models: tuple[Model, ...] = field(init=False)
    tasks: tuple[str, ...] = field(init=False)
    parts: tuple[Quantity, ...]

    def __post_init__(self) -> None:
        models = dict.fromkeys(model for part in self.parts for model in part.models)
        tasks = dict.fromkeys(task for part in self.parts for task in part.tasks)
        object.__setattr__(self, "models", tuple(models))
        object.__setattr__(self, "tasks", tuple(tasks))

    @abstractmethod
    def combine(self, values: Floats) -> Floats:
        """Its values from those of its parts, which are stacked along the first axis."""

    def measure(self, view: ScoreView) -> Floats:
        return self.combine(np.stack([part.measure(view) for part in self.parts]))

    def published(self, numbers: Published) -> float | None:
        known = [value for part in self.parts if (value := part.published(numbers)) is not None]
        return float(self.combine(np.array(known))) if len(known) == len(self.parts) else None

    def note(self, view: ScoreView) -> str:
        return "; ".join(filter(None, (part.note(view) for part in self.parts)))


@dataclass(frozen=True)
class Sum(Combined):
    """A weighted sum of quantities."""

    weights: tuple[float, ...]

    def combine(self, values: Floats) -> Floats:
        return np.tensordot(self.weights, values, axes=1)

    def resample(self, view: ScoreView) -> Floats | None:
        tables = [table for part in self.parts if (table := part.resample(view)) is not None]
        return self.combine(np.stack(tables)) if len(tables) == len(self.parts) else None

    def variance(self, noise: Noise) -> float:
        variances = [part.variance(noise) for part in self.parts]
        return sum(weight**2 * one for weight, one in zip(self.weights, variances, strict=True))


class Spread(Combined):
    """The range of several quantities: largest minus smallest for each seed."""

    def combine(self, values: Floats) -> Floats:
        return spread(values)

    def variance(self, noise: Noise) -> float:
        return 2 * max(part.variance(noise) for part in self.parts)

    def published(self, numbers: Published) -> float | None:
        return None  # the spread of published means has less noise in it than one for each seed


class Largest(Combined):
    """The maximum of several quantities for each seed. Its mean is biased upwards: at least that of the largest."""

    def combine(self, values: Floats) -> Floats:
        return np.max(values, axis=0)

    def variance(self, noise: Noise) -> float:
        return max(part.variance(noise) for part in self.parts)


def mean(parts: Iterable[Quantity]) -> Sum:
    every = tuple(parts)
    return Sum(every, (1 / len(every),) * len(every))


def slope(points: Iterable[tuple[float, Quantity]]) -> Sum:
    """The least-squares slope of a quantity over x."""
    xs, parts = zip(*points, strict=True)
    centre = math.fsum(xs) / len(xs)
    squares = math.fsum((x - centre) ** 2 for x in xs)
    return Sum(parts, tuple((x - centre) / squares for x in xs))


@dataclass(frozen=True)
class On:
    """Makes the quantities of models on one family or task of a study, or on all its tasks."""

    study: ComparableModels
    on: str = ""  # a family or a task; empty: all tasks
    metric: str = ""

    def score(self, model: Model, *tasks: str) -> MeanScore:
        """The score of a model; `tasks`: on these instead."""
        families = self.study.families
        family = self.on if self.on in families and not tasks else None
        return MeanScore((model,), tasks or families.get(self.on, (self.on,)), family, self.metric)

    def gap(self, more: Model, less: Model, *tasks: str) -> Sum:
        """The score of `more` minus that of `less`."""
        return self.score(more, *tasks) - self.score(less, *tasks)

    def mean(self, models: Iterable[Model]) -> Sum:
        return mean(self.score(model) for model in models)

    def best(self, models: tuple[Model, ...]) -> Best:
        some = self.score(models[0])
        return Best(models, some.tasks, some.family)

    def spread(self, models: Iterable[Model]) -> Spread:
        return Spread(tuple(self.score(model) for model in models))

    def spread_of_rates(self, model: Model) -> SpreadOfRates:
        return SpreadOfRates((model,), tuple(self.study.tasks))

    def families(self) -> list[On]:
        """The same for every family."""
        return [replace(self, on=family) for family in self.study.families]


# ---------------------------------------------------------------- contrasts


@dataclass(frozen=True)
class Contrast:
    """One test. `above` and `below` are sentences without a full stop; the first {} is the absolute value.

    A contrast with options holds if at least one of them holds: the one with the smallest p-value represents all, and
    its p-value is multiplied by their number (Bonferroni).
    """

    title: str  # "610m · SC"
    quantity: Quantity
    above: str = ""  # "MLM 40% scores {} points above CLM on SC at 610m"
    below: str = ""
    margin: float = 0.0
    paper: float | None = None  # the published value
    remark: Remark | None = None
    options: tuple[Contrast, ...] = ()

    @property
    def models(self) -> tuple[Model, ...]:
        return self.quantity.models

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.quantity.tasks


Remark = Callable[[ScoreView, Quantity], str]  # an additional sentence computed from the scores


def any_of(title: str, options: Iterable[Contrast], paper: float | None = None) -> Contrast:
    """A contrast that holds if at least one of these holds."""
    every = tuple(options)
    return Contrast(title, Largest(tuple(one.quantity for one in every)), paper=paper, options=every)


# ---------------------------------------------------------------- claims


Source = Literal["paper", "beyond", "study"]


class Cases(Protocol):
    """Finds the models that are compared: `Select`, `AcrossSizes`."""

    def cases(self, study: ComparableModels) -> list[Case]: ...


class Tests(Protocol):
    """Makes the tests of a claim in one case: `Pattern`."""

    def tests(self, case: Case, claim: Statement, numbers: Published) -> Iterable[Contrast]: ...


@dataclass(frozen=True)
class Pattern:
    """A contrast of the models of a case: `quantity(on, *models)`; None where they cannot be compared.

    `title` and `sentence` may name {line}, {on}, {when}, {names[0]} … (`Case.fields`). In a sentence, {points} is the
    absolute value, and of [above|below] the first is used for positive values and the second for negative ones.
    """

    quantity: Callable[..., Quantity | None]
    sentence: str
    title: str = "{line} · {on}"
    # One test for each of these families or tasks; empty: for each family of the claim; None: one test of all
    on: tuple[str, ...] | None = ()
    margin: float = 0.0
    metric: str = ""
    remark: Callable[[Case, On], Remark | None] | None = None

    def tests(self, case: Case, claim: Statement, numbers: Published) -> Iterable[Contrast]:
        study = case.study
        for name in [""] if self.on is None else self.on or claim.on:
            on = On(study, name, self.metric)
            known = name in study.families or name in study.tasks or (self.on is None and study.tasks)
            quantity = self.quantity(on, *(case.sizes or case.models)) if known else None
            if quantity is None:
                continue
            what = f"{name} ({self.metric})" if self.metric else name
            others = ", ".join(other for other in study.families if other != name)
            fields = case.fields() | {"on": what, "others": others, "points": "{}"}
            above, below = (_choose(self.sentence, which).format(**fields) for which in (1, 2))
            remark = self.remark(case, on) if self.remark else None
            paper = quantity.published(numbers)
            if paper is None:
                paper = numbers.contrast(claim.id, quantity.models[0].recipe)
            # Rounding removes floating-point noise from differences of published scores, which have few decimals.
            paper = None if paper is None else round(paper, 6)
            yield Contrast(self.title.format(**fields), quantity, above, below, self.margin, paper, remark)


def _choose(pattern: str, which: int) -> str:
    return re.sub(r"\[([^][|]*)\|([^][|]*)\]", lambda found: found[which], pattern)


def above(
    more: int = 0, less: int = 1, *, when: bool = False, place: str = " at {line}", **fields: Any
) -> Pattern:
    """The pattern "one model scores above another", by their positions in the case.

    `when`: title and sentence say after how many steps; `place`: where, as the sentence says it.
    """
    title, at = ("{line} · {when} · {on}", f"{place}, {{when}}") if when else ("{line} · {on}", place)
    sentence = f"{{names[{more}]}} scores {{points}} points [above|below] {{names[{less}]}} on {{on}}{at}"
    fields = {"title": title} | fields
    return Pattern(lambda on, *models: on.gap(models[more], models[less]), sentence, **fields)


@dataclass(frozen=True)
class Statement:
    """A claim and how it is tested. Every one of its tests must hold."""

    id: str
    says: str
    gist: str  # the claim as the start of a list of numbers: "MLM 40% minus CLM on SC"
    contrast: str  # how it is tested, in one line
    needs: str  # the runs it needs, as text
    on: tuple[Family, ...]  # the task families it is about
    models: Cases  # which models are compared
    contrasts: tuple[Tests, ...]  # and how
    figure: str
    paper: str = "no numbers known"  # the published numbers, as text
    source: Source = "paper"
    caveats: tuple[str, ...] = ()
    equal_data: bool = True  # whether it compares objectives on equal amounts of data
    only_if: Callable[[Finetune], bool] = lambda finetune: True  # what its fine-tuning must be like

    def tests(self, study: ComparableModels, numbers: Published) -> list[Contrast]:
        """The tests whose models are all planned to be fine-tuned on the tasks of the test."""
        if not study.finetune or not self.only_if(study.finetune):
            return []
        tests = [
            test
            for case in self.models.cases(study)
            for pattern in self.contrasts
            for test in pattern.tests(case, self, numbers)
        ]
        return [test for test in tests if study.plans(test.models, test.tasks)]


@dataclass(frozen=True)
class Paper:
    """A paper whose claims a study can test: its citation, its claims, its published numbers and how they were made."""

    authors: str
    title: str
    venue: str  # where and when it appeared
    address: str
    statements: tuple[Statement, ...]
    published: Published
    tasks: dict[Family, tuple[str, ...]]  # its datasets: names of tasks
    protocol: str  # its evaluation: a protocol of `Finetune`

    @property
    def claims(self) -> str:
        """Its own claims, first to last: "C1 to C21"."""
        own = [one.id for one in self.statements if one.source == "paper"]
        return f"{own[0]} to {own[-1]}"


# ---------------------------------------------------------------- measuring


LEVEL = 0.95
ALIKE = "every seed gives the same number, so there is no noise to judge it by"
Supports = Literal["yes", "direction", "against", "underpowered", "missing"]


@dataclass(frozen=True)
class ClaimPart:
    """A test of a claim and its result. The p-value of `estimate` is for exceeding the margin; NaN: not available."""

    title: str  # "610m · SC"
    models: tuple[str, ...]
    contrast: Contrast  # whose sentences describe the result
    estimate: Estimate  # positive: as claimed; in points
    margin: float  # the value that the estimate must exceed
    paper: float | None  # the published value
    tries: int  # number of tests it was selected from; its p-value and interval are corrected for them
    examples: tuple[float, float] | None  # 95% interval over test examples
    note: str
    shape: tuple[int, int]  # complete pretraining seeds, complete fine-tuning seeds
    lost: int  # trials that failed or cannot be read, so that their seeds are incomplete
    # Both depend on all claims of a report, so they are known once all parts are measured:
    detectable: float = (
        math.nan
    )  # smallest effect beyond the margin found with 80% power at the corrected level
    supports: Supports = "missing"  # what it says about its claim

    @property
    def alike(self) -> bool:
        """Whether every seed gives the same number, so that the noise cannot be estimated."""
        return math.isnan(self.estimate.p) and self.estimate.n > 1

    @property
    def missing(self) -> bool:
        return math.isnan(self.estimate.p) and not self.alike

    @property
    def p(self) -> float:
        """The p-value as a claim uses it: 1 if all seeds are alike, NaN if missing."""
        return 1.0 if self.alike else self.estimate.p

    @property
    def excess(self) -> float:
        """How far the estimate lies above the margin."""
        return self.estimate.mean - self.margin

    @property
    def half(self) -> float:
        """Half the width of the interval."""
        return (self.estimate.high - self.estimate.low) / 2

    @property
    def contrary(self) -> bool:
        """Whether the 95% interval lies below both 0 and the margin, although the corrected test is not significant."""
        return self.supports == "underpowered" and self.estimate.high < min(self.margin, 0.0)

    @property
    def says(self) -> str:
        """The result as a sentence without a full stop; empty if missing."""
        if self.missing:
            return ""
        sentence = self.contrast.above if self.estimate.mean >= 0 else self.contrast.below
        around = "" if math.isnan(self.half) else f" ± {self.half:.2f}"
        # Only the first {}: a run's name may contain braces.
        return sentence.replace("{}", f"{abs(self.estimate.mean):.2f}{around}", 1)


def measure(test: Contrast, evidence: Evidence, draws: Resamples | None) -> ClaimPart:
    """Measure one test. `draws`: resampled scores for the interval over test examples, or None for no interval."""
    return _clearest(test, evidence, draws) if test.options else _measure(test, evidence, draws)


def _measure(contrast: Contrast, evidence: Evidence, draws: Resamples | None, tries: int = 1) -> ClaimPart:
    view = ScoreView.of(contrast.models, evidence, draws)
    matrix = np.atleast_2d(contrast.quantity.measure(view))
    estimate = across(matrix, 1 - (1 - LEVEL) / tries)
    if contrast.margin:
        estimate = replace(estimate, p=across(matrix - contrast.margin).p)
    rows, columns = kept(matrix)
    cells = [(model, task) for model in contrast.models for task in contrast.tasks]
    grids = [evidence.grids[result, task] for model, task in cells for result in model.results]
    known = not math.isnan(estimate.p)
    examples = None
    if known and draws:
        sizes = [evidence.examples(model, task) for model, task in cells]
        examples = over_examples(contrast.quantity.resample(view), matrix, sizes)
    return ClaimPart(
        title=contrast.title,
        models=tuple(model.name for model in contrast.models),
        contrast=contrast,
        estimate=estimate,
        margin=contrast.margin,
        paper=contrast.paper,
        tries=tries,
        examples=None if isinstance(examples, str) else examples,
        note=_note(contrast, view) if known else _why_unknown(grids, estimate),
        shape=(len(rows), len(columns)),
        lost=sum(len(grid.missing) for grid in grids),
    )


def _clearest(test: Contrast, evidence: Evidence, draws: Resamples | None) -> ClaimPart:
    """Measure the option with the smallest one-sided p-value, corrected for having been selected."""
    tried = [_measure(option, evidence, None, len(test.options)) for option in test.options]
    known = [result for result in tried if not result.missing]
    judged = [result for result in known if not result.alike]
    if not judged:
        names = tuple(model.name for model in test.models)
        return replace((known or tried)[0], title=test.title, models=names, paper=test.paper)
    best = min(judged, key=lambda result: result.p if result.excess > 0 else 2 - result.p)
    result = _measure(best.contrast, evidence, draws, len(known))
    corrected = replace(result.estimate, p=min(1.0, result.estimate.p * len(known)))
    incomplete = f"; {len(tried) - len(known)} more are not complete" if len(known) < len(tried) else ""
    note = f"clearest of {len(known)} comparisons: {best.title}{incomplete}"
    return replace(result, title=test.title, paper=test.paper, estimate=corrected, note=note)


def _note(contrast: Contrast, view: ScoreView) -> str:
    paired = set.intersection(*(set(model.seeds) for model in contrast.models))
    notes = (
        contrast.remark(view, contrast.quantity) if contrast.remark else "",
        contrast.quantity.note(view),
        "" if paired else "no pretraining seed in common: models are paired in the order of their seeds",
    )
    return "; ".join(filter(None, notes))


def _why_unknown(grids: list[ScoreGrid], estimate: Estimate) -> str:
    if estimate.n > 1:
        return ALIKE
    done, of = sum(grid.done for grid in grids), sum(grid.of for grid in grids)
    lost = sum(len(grid.missing) for grid in grids)
    if done < of:
        failed = f", {lost:,} failed or cannot be read" if lost else ""
        return f"{'' if lost == of - done else 'not yet: '}{done:,} of {of:,} scores done{failed}"
    return "one seed: an interval needs two" if estimate.n else "the metric it asks for was not scored"
