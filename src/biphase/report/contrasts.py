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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from biphase.report.evidence import Evidence, Floats, Resamples, ScoreGrid
from biphase.report.recipes import Model, Published
from biphase.report.selectors import Case, ComparableModels, percent
from biphase.report.statistics import moderated
from biphase.report.statistics.intervals import Estimate, interval
from biphase.specs import Family, Finetune

# ---------------------------------------------------------------- quantities
# A quantity is a weighted sum of scores. Its weights serve both the report, which has scores, and the plan, which has
# none yet. What depends on scores in another way (the best of several models, the spread over learning rates) chooses
# its models and rates on validation scores, and is a weighted sum of test scores from there on.


Cell = tuple[
    str, str, int | None
]  # task; metric (empty: that of the study); index of the rate (None: the chosen one)
Terms = dict[str, dict[Cell, float]]  # name of a model → the weights of its scores
Noise = Callable[[str], float]  # task → standard deviation of one score over seeds, in points


@dataclass(frozen=True)
class ScoreView:
    """The scores of the models of a contrast in percentage points, at the learning rates that all of them have.

    Where learning rates were discarded early, every model has equally many, chosen in the same way, and is scored at
    its own.
    """

    evidence: Evidence
    rates: dict[str, frozenset[int]]  # by task

    @classmethod
    def of(cls, models: Iterable[Model], tasks: Iterable[str], evidence: Evidence) -> ScoreView:
        results = [result for model in models for result in model.results]
        finetune = evidence.plan.study.finetune
        if finetune and finetune.discard:
            return cls(evidence, {task: evidence.rates(task) for task in tasks})
        rates = {
            task: frozenset.intersection(*(evidence.grids[result, task].rates for result in results))
            for task in tasks
        }
        return cls(evidence, rates)

    def table(self, model: Model, cells: dict[Cell, float], part: str = "test") -> Floats:
        """A weighted sum of scores as (pretraining seeds, fine-tuning seeds). NaN: missing."""
        return np.tensordot(
            list(cells.values()), np.stack([self._scores(model, cell, part) for cell in cells]), axes=1
        )

    def _scores(self, model: Model, cell: Cell, part: str) -> Floats:
        task, metric, rate = cell
        rows = []
        for grid in (self.evidence.grids[result, task] for result in model.results):
            values = grid.test if part == "test" else grid.validation
            if rate is None:
                rows.append(grid.at_chosen(values, metric, self.rates[task]))
            else:
                rows.append(
                    values[metric or grid.metric][rate] if values else np.full(len(grid.seeds), np.nan)
                )
        scores = 100 * np.stack(rows)
        return scores if part == "test" else self.evidence.choosing(model, scores)

    def on_validation(self, terms: Terms) -> float:
        """A quantity by its validation scores, the mean over seeds; NaN where a model has no complete seed."""
        total = 0.0
        for name, cells in terms.items():
            scores = self.table(self.evidence.models[name], cells, "validation")
            total += float(scores[np.isfinite(scores)].mean()) if np.isfinite(scores).any() else math.nan
        return total


@dataclass(frozen=True)
class Quantity(ABC):
    """A number made of scores, in percentage points. Sums and multiples of quantities are quantities."""

    models: tuple[Model, ...]  # whose scores it needs
    tasks: tuple[str, ...]  # on which it needs them

    @abstractmethod
    def terms(self, view: ScoreView | None) -> Terms:
        """The weights of its scores; empty if it cannot be computed from these. Without a view: those expected."""

    def published(self, numbers: Published) -> float | None:
        """Its value computed from published scores; None if any of them is not known."""
        return None

    def note(self, view: ScoreView) -> str:
        """What to say beside its value."""
        return ""

    def variance(self, noise: Noise, seeds: Callable[[Model], int]) -> float:
        """Its expected variance, if scores of different models, tasks and seeds vary independently."""
        models = {model.name: model for model in self.models}
        return sum(
            sum(weight**2 * noise(task) ** 2 for (task, _, _), weight in cells.items()) / seeds(models[name])
            for name, cells in self.terms(None).items()
        )

    def __mul__(self, weight: float) -> Sum:
        return Sum((self,), (weight,))

    __rmul__ = __mul__

    def __add__(self, other: Quantity) -> Sum:
        return Sum((self, other), (1.0, 1.0))

    def __sub__(self, other: Quantity) -> Sum:
        return Sum((self, other), (1.0, -1.0))


@dataclass(frozen=True)
class MeanScore(Quantity):
    """The mean score of one model over tasks."""

    family: Family | None = None  # set where the tasks are all that the study has of a family
    metric: str = ""  # empty: the one that learning rates are chosen by

    def terms(self, view: ScoreView | None) -> Terms:
        cells: dict[Cell, float] = {(task, self.metric, None): 1 / len(self.tasks) for task in self.tasks}
        return {self.models[0].name: cells}

    def published(self, numbers: Published) -> float | None:
        if self.metric or self.family is None:
            return None
        return numbers.family_mean(self.models[0].recipe, self.family)


@dataclass(frozen=True)
class Best(Quantity):
    """The score of the model with the best validation score; the first of equals."""

    family: Family | None = None

    def terms(self, view: ScoreView | None) -> Terms:
        best = self._chosen(view) if view else self.models[0]
        return MeanScore((best,), self.tasks).terms(view) if best else {}

    def _chosen(self, view: ScoreView) -> Model | None:
        scores = [view.on_validation(MeanScore((model,), self.tasks).terms(view)) for model in self.models]
        return None if any(map(math.isnan, scores)) else self.models[scores.index(max(scores))]

    def published(self, numbers: Published) -> float | None:
        # Papers print the best of a sweep and some of the others, so a few known numbers of many include the best.
        known = [MeanScore((model,), self.tasks, self.family).published(numbers) for model in self.models]
        values = [value for value in known if value is not None]
        return max(values) if len(self.models) >= 4 and len(values) >= 2 else None

    def note(self, view: ScoreView) -> str:
        best = self._chosen(view)
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

    def note(self, view: ScoreView) -> str:
        return "; ".join(filter(None, (part.note(view) for part in self.parts)))


@dataclass(frozen=True)
class Sum(Combined):
    """A weighted sum of quantities."""

    weights: tuple[float, ...]

    def terms(self, view: ScoreView | None) -> Terms:
        return added([part.terms(view) for part in self.parts], self.weights)

    def published(self, numbers: Published) -> float | None:
        known = [value for part in self.parts if (value := part.published(numbers)) is not None]
        return float(np.dot(self.weights, known)) if len(known) == len(self.parts) else None


def added(parts: list[Terms], weights: Iterable[float]) -> Terms:
    """The terms of a weighted sum; empty if those of a part are."""
    total: Terms = {}
    for part, weight in zip(parts, weights, strict=True):
        if not part:
            return {}
        for name, cells in part.items():
            own = total.setdefault(name, {})
            for cell, value in cells.items():
                own[cell] = own.get(cell, 0.0) + weight * value
    return total


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
        own = families.get(self.on, (self.on,)) if self.on else tuple(self.study.tasks)
        return MeanScore((model,), tasks or own, family, self.metric)

    def gap(self, more: Model, less: Model, *tasks: str) -> Sum:
        """The score of `more` minus that of `less`."""
        return self.score(more, *tasks) - self.score(less, *tasks)

    def mean(self, models: Iterable[Model]) -> Sum:
        return mean(self.score(model) for model in models)

    def best(self, models: tuple[Model, ...]) -> Best:
        some = self.score(models[0])
        return Best(models, some.tasks, some.family)

    def families(self) -> list[On]:
        """The same for every family."""
        return [replace(self, on=family) for family in self.study.families]


# ---------------------------------------------------------------- contrasts


@dataclass(frozen=True)
class Contrast:
    """One test.

    A contrast with options holds if at least one of them holds: the one with the smallest p-value represents all, and
    its p-value is multiplied by their number (Bonferroni).
    """

    title: str  # "610m · SC"
    quantity: Quantity
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
    return Contrast(title, mean(one.quantity for one in every), paper=paper, options=every)


# ---------------------------------------------------------------- claims


Source = Literal["paper", "beyond", "study"]


class Cases(Protocol):
    """Finds the models that are compared: `Select`, `Compare`, or a paper's own."""

    def cases(self, study: ComparableModels) -> list[Case]: ...


class Tests(Protocol):
    """Makes the tests of a claim in one case: `Pattern`."""

    @property
    def needs(self) -> str:
        """What it compares and which models that needs, said where a study has none; empty: nothing is said."""
        ...

    def tests(self, case: Case, claim: Statement, numbers: Published) -> Iterable[Contrast]: ...


@dataclass(frozen=True)
class Pattern:
    """A contrast of the models of a case: `quantity(on, *models)`; None where they cannot be compared.

    `title` may name {line}, {on}, {when} … (`Case.fields`).
    """

    quantity: Callable[..., Quantity | None]
    title: str = "{line} · {on}"
    # One test for each of these families or tasks; empty: for each family of the claim; None: one test of all
    on: tuple[str, ...] | None = ()
    margin: float = 0.0
    metric: str = ""
    remark: Callable[[Case, On], Remark | None] | None = None
    needs: str = ""  # what it compares and which models that needs, said where a study does not have them

    def tests(self, case: Case, claim: Statement, numbers: Published) -> Iterable[Contrast]:
        study = case.study
        for name in [""] if self.on is None else self.on or claim.on:
            on = On(study, name, self.metric)
            known = name in study.families or name in study.tasks or (self.on is None and study.tasks)
            quantity = self.quantity(on, *(case.sizes or case.models)) if known else None
            if quantity is None:
                continue
            what = f"{name} ({self.metric})" if self.metric else name or "all tasks"
            title = self.title.format(**case.fields(), on=what)
            remark = self.remark(case, on) if self.remark else None
            paper = quantity.published(numbers)
            if paper is None:
                paper = numbers.contrast(claim.id, quantity.models[0].recipe)
            # Rounding removes floating-point noise from differences of published scores, which have few decimals.
            paper = None if paper is None else round(paper, 6)
            yield Contrast(title, quantity, self.margin, paper, remark)


def above(more: int = 0, less: int = 1, *, when: bool = False, **fields: Any) -> Pattern:
    """The pattern "one model scores above another", by their positions in the case.

    `when`: the title says after how many steps.
    """
    fields = {"title": "{line} · {when} · {on}" if when else "{line} · {on}"} | fields
    return Pattern(lambda on, *models: on.gap(models[more], models[less]), **fields)


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
    every_rate: bool = False  # whether it needs scores at the rates that `Finetune.discard` leaves out
    premise: tuple[Tests, ...] = ()  # what must hold for the claim to say anything: "MLM was ahead before"
    effect: float = 0.0  # points: the effect worth finding where none is published; 0: the study's

    def tests(self, study: ComparableModels, numbers: Published) -> list[Contrast]:
        """The tests whose models are all planned to be fine-tuned on the tasks of the test."""
        return self._tests(self.contrasts, study, numbers)

    def premises(self, study: ComparableModels, numbers: Published) -> list[Contrast]:
        """The tests of the premise, one for each case."""
        return self._tests(self.premise, study, numbers)

    def lacks(self, study: ComparableModels, numbers: Published) -> list[str]:
        """What is not compared for want of models, although other contrasts of the claim may be."""
        return [one.needs for one in self.contrasts if one.needs and not self._tests((one,), study, numbers)]

    def _tests(
        self, patterns: tuple[Tests, ...], study: ComparableModels, numbers: Published
    ) -> list[Contrast]:
        if not study.finetune or not self.only_if(study.finetune):
            return []
        if self.every_rate and study.finetune.discard:
            return []
        cases = self.models.cases(study)
        tests = [test for case in cases for one in patterns for test in one.tests(case, self, numbers)]
        # What a study claims itself is never left out: a part without fine-tunings is missing.
        return [test for test in tests if self.source == "study" or study.plans(test.models, test.tasks)]


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
Supports = Literal["yes", "unclear", "against", "underpowered", "missing"]
Key = frozenset[tuple[str, str, str, int | None, float]]  # what a test measures, whichever claim makes it


@dataclass(frozen=True)
class ClaimPart:
    """A test of a claim and its result. NaN: not available."""

    title: str  # "610m · SC"
    models: tuple[str, ...]
    estimate: Estimate  # positive: as claimed; in points
    above: float  # one-sided p-value for exceeding the margin
    below: float  # one-sided p-value for falling below it
    margin: float  # the value that the estimate must exceed
    paper: float | None  # the published value
    tries: int  # number of tests it was selected from; its p-values and interval are corrected for them
    examples: tuple[float, float] | None  # 95% interval over test examples
    note: str
    shape: tuple[int, int]  # pretraining seeds and fine-tuning seeds of the model that has the fewest
    lost: int  # trials that failed or cannot be read, so that their seeds are incomplete
    key: Key = frozenset()
    # Both depend on all claims of a report, so they are known once all parts are measured:
    detectable: float = (
        math.nan
    )  # smallest effect beyond the margin found with 80% power at the corrected level
    supports: Supports = "missing"  # what it says about its claim

    @property
    def missing(self) -> bool:
        return math.isnan(self.above)

    @property
    def excess(self) -> float:
        """How far the estimate lies above the margin."""
        return self.estimate.mean - self.margin

    @property
    def half(self) -> float:
        """Half the width of the interval."""
        return (self.estimate.high - self.estimate.low) / 2


@dataclass(frozen=True)
class ModelMean:
    """A weighted sum of the scores of one model: its mean over seeds, with the moderated variance of that mean."""

    mean: float
    variance: float
    df: float
    shape: tuple[int, int]  # pretraining seeds, fine-tuning seeds
    several: bool  # the values are means of pretraining seeds; otherwise single fine-tunings


class Measure:
    """Measures the tests of a report. Variances are moderated over all models of the study (docs/statistics.md)."""

    def __init__(self, evidence: Evidence, draws: Resamples | None = None) -> None:
        self.evidence, self.draws = evidence, draws
        self._known: dict[tuple[object, ...], dict[str, ModelMean]] = {}

    def __call__(self, test: Contrast) -> ClaimPart:
        return self._clearest(test) if test.options else self._contrast(test)

    def _contrast(self, contrast: Contrast, tries: int = 1) -> ClaimPart:
        view = ScoreView.of(contrast.models, contrast.tasks, self.evidence)
        terms = contrast.quantity.terms(view)
        parts = {name: self._mean(view, name, cells) for name, cells in terms.items()}
        known = [part for part in parts.values() if part is not None]
        result = None
        if terms and len(known) == len(parts):
            result = moderated.contrast_of(
                np.asarray(math.fsum(part.mean for part in known)),
                np.array([part.variance for part in known]),
                np.array([part.df for part in known]),
                contrast.margin,
                1 - (1 - LEVEL) / tries,
            )
        shapes = [part.shape for part in known] or [(0, 0)]
        shape = min(one for one, _ in shapes), min(one for _, one in shapes)
        several = any(part.several for part in known)
        covers = "pretraining seeds" if several else "fine-tuning seeds"
        grids = [
            self.evidence.grids[result, task]
            for model in contrast.models
            for result in model.results
            for task in contrast.tasks
        ]
        judged = result is not None and bool(np.isfinite(result.se))
        n = shape[0] if several else shape[1]
        nothing = Estimate(math.nan, math.nan, n, math.nan, math.nan, math.nan, covers)
        return ClaimPart(
            title=contrast.title,
            models=tuple(model.name for model in contrast.models),
            estimate=nothing if result is None else moderated.as_estimate(result, max(n, 1), covers, LEVEL),
            above=float(result.above) if result is not None and judged else math.nan,
            below=float(result.below) if result is not None and judged else math.nan,
            margin=contrast.margin,
            paper=contrast.paper,
            tries=tries,
            examples=self._over_examples(view, terms, result.value)
            if result is not None and judged
            else None,
            note=_note(contrast, view) if judged else _why_unknown(grids, bool(terms), n),
            shape=shape,
            lost=sum(len(grid.missing) for grid in grids),
            key=self._key(terms, contrast.margin),
        )

    def _clearest(self, test: Contrast) -> ClaimPart:
        """Measure the option that is clearest above its margin, with p-values for "at least one option holds"."""
        tried = [self._contrast(option, len(test.options)) for option in test.options]
        known = [result for result in tried if not result.missing]
        if not known:
            names = tuple(model.name for model in test.models)
            return replace(tried[0], title=test.title, models=names, paper=test.paper)
        best = min(known, key=lambda result: result.above)
        incomplete = f"; {len(tried) - len(known)} more are not complete" if len(known) < len(tried) else ""
        return replace(
            best,
            title=test.title,
            paper=test.paper,
            above=min(1.0, best.above * len(known)),
            # An option that is not known may hold.
            below=max(result.below for result in known) if len(known) == len(tried) else 1.0,
            note=f"clearest of {len(known)} comparisons: {best.title}{incomplete}",
            key=frozenset[Any]().union(*(result.key for result in tried)),
        )

    def means(self, models: Iterable[Model], quantity: Callable[[Model], Quantity]) -> dict[str, ModelMean]:
        """A quantity of each of these models, at the learning rates that all of them have; without incomplete ones."""
        quantities = [quantity(model) for model in models]
        every = mean(quantities)
        view = ScoreView.of(every.models, every.tasks, self.evidence)
        found = {}
        for one in quantities:
            ((name, cells),) = one.terms(view).items()
            if (known := self._mean(view, name, cells)) is not None:
                found[name] = known
        return found

    def _mean(self, view: ScoreView, name: str, cells: dict[Cell, float]) -> ModelMean | None:
        """The weighted sum for one model; None if it has no complete seed."""
        scale = max(map(abs, cells.values())) * math.copysign(1.0, next(iter(cells.values())))
        alike = {cell: weight / scale for cell, weight in cells.items()}
        rates = tuple((task, view.rates[task]) for task, _, _ in alike)
        key = (rates, *((cell, round(weight, 9)) for cell, weight in alike.items()))
        if key not in self._known:
            self._known[key] = self._moderated(view, alike)
        found = self._known[key].get(name)
        return found and replace(found, mean=found.mean * scale, variance=found.variance * scale**2)

    def _moderated(self, view: ScoreView, cells: dict[Cell, float]) -> dict[str, ModelMean]:
        """The same sum for every model of the study, by name.

        Where any model has several pretraining seeds, these are the units of all: a model with one has a single value,
        whose variance is that of the others. Its fine-tunings say nothing about the noise of pretraining.
        """
        tables = {name: view.table(model, cells) for name, model in self.evidence.models.items()}
        rows = {name: table[np.isfinite(table).any(axis=1)] for name, table in tables.items()}
        rows = {name: table for name, table in rows.items() if len(table)}
        if not rows:
            return {}
        several = any(len(table) > 1 for table in rows.values())
        own = {name: moderated.seed_values(table, several=several) for name, table in rows.items()}
        shapes = {
            name: (len(table), int(np.isfinite(table).sum(axis=1).min())) for name, table in rows.items()
        }
        shared = frozenset.intersection(*(view.rates[task] for task, _, _ in cells))
        others: list[Floats] = []
        for rate in sorted(shared) if all(rate is None for _, _, rate in cells) else ():
            at_rate = {(task, metric, rate): weight for (task, metric, _), weight in cells.items()}
            tables = [view.table(self.evidence.models[name], at_rate) for name in rows]
            others += [moderated.seed_values(table, several=several) for table in tables]
        found = moderated.cells_of(
            moderated.padded(list(own.values())), moderated.padded(others) if others else None
        )
        return {
            name: ModelMean(float(mean), float(variance / n), float(df), shapes[name], several)
            for name, mean, variance, df, n in zip(
                own, found.mean, found.variance, found.df, found.n, strict=True
            )
        }

    def _over_examples(self, view: ScoreView, terms: Terms, value: Floats) -> tuple[float, float] | None:
        """The 95% interval of a quantity over test examples; None where it is not known."""
        total: Floats = np.zeros(())
        fewest = math.inf
        for name, cells in terms.items():
            model = self.evidence.models[name]
            for (task, metric, rate), weight in cells.items():
                whole = all(
                    self.evidence.grids[result, task].rates <= view.rates[task] for result in model.results
                )
                table = (
                    self.draws.of(model, (task,), metric) if self.draws and whole and rate is None else None
                )
                if table is None or not np.isfinite(table).any():
                    return None
                total = total + 100 * weight * np.nanmean(table, axis=(1, 2))
                fewest = min(fewest, self.evidence.examples(model, task))
        if not fewest > 1 or not np.isfinite(total).all():
            return None
        low, high = interval(total, value, examples=int(fewest))
        return (float(low), float(high)) if np.isfinite(low) else None

    def _key(self, terms: Terms, margin: float) -> Key:
        """What a test measures: two claims that compare the same scores make the same test."""
        weights = {
            (
                name,
                task,
                metric or self.evidence.grids[self.evidence.models[name].results[0], task].metric,
                rate,
            ): one
            for name, cells in terms.items()
            for (task, metric, rate), one in cells.items()
        }
        every = frozenset((*cell, round(weight, 9)) for cell, weight in weights.items())
        return every | {("margin", "", "", None, margin)} if every else every


def _note(contrast: Contrast, view: ScoreView) -> str:
    fewer = [
        task
        for task, rates in view.rates.items()
        if any(
            not view.evidence.grids[result, task].rates <= rates
            for model in contrast.models
            for result in model.results
        )
    ]
    notes = (
        contrast.remark(view, contrast.quantity) if contrast.remark else "",
        contrast.quantity.note(view),
        f"at the learning rates that all of them have ({', '.join(fewer)})" if fewer else "",
    )
    return "; ".join(filter(None, notes))


def _why_unknown(grids: list[ScoreGrid], found: bool, seeds: int) -> str:
    done, of = sum(grid.done for grid in grids), sum(grid.of for grid in grids)
    lost = sum(len(grid.missing) for grid in grids)
    if done < of:
        failed = f", {lost:,} failed or cannot be read" if lost else ""
        return f"{'' if lost == of - done else 'not yet: '}{done:,} of {of:,} scores done{failed}"
    if not of:
        return "no fine-tunings of it are planned"
    if not found:
        return "no task that both have learnt"
    if seeds:
        return "no model has two seeds that differ, so there is no noise to judge it by"
    return "the metric it asks for was not scored"
