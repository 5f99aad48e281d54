"""Contrasts: which models of a study can be compared, what is measured of them, and with which result.

The file has four parts:

    comparable models   `comparable_models` sorts the models of a plan into `ModelGroup`s (one size, one set of other
                        hyperparameters) and `Group`s (the same hyperparameters at several sizes)
    quantities          `Quantity`: a number for every seed, in percentage points (score, spread, slope, sums of these)
    contrasts           `Contrast`: a quantity that is positive if a claim holds, and the margin it must exceed;
                        `Statement`: a claim with the function that finds its contrasts
    measuring           `measure`: a contrast's estimate, intervals and p-value from the scores

Everything before `measure` needs recipes only, so `biphase plan` can list the tests of a study before any score exists.

Models that start from a published checkpoint belong to no group, because their earlier training data is not known. A
study's own claims may still name them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from biphase.papers.gisserot2025.published import family_mean
from biphase.presets import corpus_of
from biphase.report.evidence import Evidence, Floats, Resamples, ScoreGrid
from biphase.report.recipes import SETTING, Kind, Model, Recipe, models
from biphase.report.statistics.intervals import Estimate, across, interval, kept, rate_spread, spread
from biphase.specs import Family, Fewer, Finetune, Hub, Pretrain, Task
from biphase.specs.tasks import FAMILIES
from biphase.study.plan import Plan
from biphase.text import short

USUAL = 0.4  # the masking ratio of the paper's comparisons
WINDOW = 0.05  # a split of 25% is any between 20% and 30%


@dataclass(frozen=True)
class ModelGroup:
    """Models of one size and one set of other hyperparameters. Most lookups return models by their number of steps."""

    size: str
    parameters: int | None
    about: str  # what distinguishes it where a study has several settings: "peak 0.001"
    models: tuple[Model, ...]
    plateau: frozenset[str]  # names of models whose learning rate has not begun to decay

    @property
    def title(self) -> str:
        return " · ".join(one for one in (self.size, self.about) if one)

    def clm(self) -> dict[int, Model]:
        """Models trained from scratch with CLM only."""
        return {one.recipe.steps: one for one in self._finals("clm")}

    def mlm(self, ratio: float = USUAL) -> dict[int, Model]:
        """Models trained from scratch with MLM only, at one ratio."""
        return {one.recipe.steps: one for one in self._finals("mlm") if _is(one.recipe.ratio, ratio)}

    def ratios(self, steps: int) -> dict[float, Model]:
        """Models trained from scratch with MLM for this many steps, by masking ratio in ascending order."""
        found = {
            one.recipe.ratio: one
            for one in self._finals("mlm")
            if one.recipe.steps == steps and one.recipe.ratio is not None
        }
        return dict(sorted(found.items()))

    def split(self, share: float) -> dict[int, Model]:
        """Models trained with CLM for about this share of their steps, then with MLM at the usual ratio."""
        near = [
            one
            for one in self._finals("clm-mlm")
            if _is(one.recipe.ratio, USUAL) and abs(one.recipe.causal_share - share) <= WINDOW + 1e-9
        ]
        near.sort(key=lambda one: (-round(abs(one.recipe.causal_share - share), 6), -one.recipe.causal_share))
        # Later entries replace earlier ones: the nearest share wins; of two equally near, the lower one.
        return {one.recipe.steps: one for one in near}

    def mostly_causal(self, steps: int) -> dict[int, dict[float, Model]]:
        """Models with MLM for at most the last tenth of their steps: by the step of the switch, then by ratio."""
        found: dict[int, dict[float, Model]] = {}
        for one in self._finals("clm-mlm"):
            recipe = one.recipe
            if recipe.steps == steps and recipe.causal_share >= 0.9 and recipe.ratio is not None:
                found.setdefault(recipe.spans[0].until, {})[recipe.ratio] = one
        return found

    def on_the_way(self, kind: Kind) -> dict[int, Model]:
        """Intermediate checkpoints before the decay, trained with CLM or with MLM at the usual ratio."""
        return {
            one.recipe.steps: one
            for one in sorted(self.models, key=lambda one: one.recipe.steps)
            if one.name in self.plateau
            and one.recipe.kind == kind
            and one.recipe.base is None
            and (kind == "clm" or _is(one.recipe.ratio, USUAL))
        }

    def continued(self, kind: Kind) -> dict[tuple[int, int], Model]:
        """Decayed bases of a kind, continued with MLM at the usual ratio: by (steps of the base, steps since)."""
        found = {}
        for one in self.models:
            recipe, base = one.recipe, one.recipe.base
            if not recipe.final or base is None or base.base is not None or not base.decayed:
                continue
            asked = recipe.kind == "mlm" and _is(recipe.ratio, USUAL)
            if asked and base.kind == kind and (kind == "clm" or _is(base.ratio, USUAL)):
                found[base.steps, recipe.continued] = one
        return found

    def _finals(self, kind: Kind) -> list[Model]:
        return [
            one
            for one in self.models
            if one.recipe.final and one.recipe.base is None and one.recipe.kind == kind
        ]


Group = tuple[ModelGroup, ...]  # smallest size first


@dataclass(frozen=True)
class ComparableModels:
    """The models and tasks that the claims of a study can be tested with."""

    plan: Plan
    models: dict[str, Model]
    groups: tuple[Group, ...]
    tasks: dict[str, Task]

    @property
    def lines(self) -> list[ModelGroup]:
        return [line for group in self.groups for line in group]

    @property
    def families(self) -> dict[Family, tuple[str, ...]]:
        found = {f: tuple(name for name, task in self.tasks.items() if task.family == f) for f in FAMILIES}
        return {family: names for family, names in found.items() if names}

    @property
    def finetune(self) -> Finetune | None:
        return self.plan.study.finetune

    @property
    def fewer(self) -> Fewer | None:
        """The reduced fine-tuning of intermediate checkpoints, if the study has one."""
        return self.finetune.on_the_way if self.finetune else None

    def plans(self, models: Iterable[Model], tasks: Iterable[str]) -> bool:
        """Whether all of these models are planned to be scored on all of these tasks."""
        return self.fewer is None or all(
            task in self.fewer.tasks for one in models if not one.recipe.final for task in tasks
        )

    def seeds(self, models: Iterable[Model]) -> int:
        """The number of fine-tuning seeds that all of these models have."""
        if self.finetune is None:
            return 0
        whole = self.fewer is None or all(one.recipe.final for one in models)
        return len(self.finetune.seeds if whole or self.fewer is None else self.fewer.seeds)


def comparable_models(plan: Plan, known: dict[str, Model] | None = None) -> ComparableModels:
    """Sort the models of a plan into comparable groups; `known` avoids recomputing its models."""
    known = models(plan) if known is None else known
    finetune = plan.study.finetune
    tasks = {task.name: task for task in finetune.tasks} if finetune else {}
    scratch = [one for one in known.values() if not isinstance(_run(plan, one).root.start, Hub)]
    about = _settings(plan, scratch)
    groups: dict[tuple[str, str], list[Model]] = {}
    for setting in dict.fromkeys(one.recipe.setting for one in scratch):
        alike = [one for one in scratch if one.recipe.setting == setting]
        rules = sorted({rule for one in alike for rule in _rules(one)})
        for rule in rules or [""]:
            title = " · ".join(
                one for one in (about[setting], f"masks {rule}" if len(rules) > 1 else "") if one
            )
            groups[title, setting + rule] = [one for one in alike if _rules(one) <= {rule}]
    return ComparableModels(
        plan, known, tuple(_group(plan, *groups[key], about=key[0]) for key in groups), tasks
    )


def common(*found: dict[int, Model]) -> list[int]:
    """The steps at which every dictionary has a model, in ascending order."""
    return sorted(set.intersection(*(set(one) for one in found))) if found else []


def rows_in_common(models: list[Model]) -> dict[str, list[int]]:
    """For each model, the row indices of the pretraining seeds that all models share.

    If they share none, rows are paired in the order of the seeds.
    """
    shared = [seed for seed in models[0].seeds if all(seed in one.seeds for one in models)]
    if shared:
        return {one.name: [one.seeds.index(seed) for seed in shared] for one in models}
    fewest = min(len(one.seeds) for one in models)
    return {one.name: list(range(fewest)) for one in models}


def _group(plan: Plan, *members: Model, about: str) -> Group:
    """Sort models of one setting by size and shape into `ModelGroup`s."""
    by_size: dict[tuple[str, str], list[Model]] = {}
    for one in members:
        by_size.setdefault((one.recipe.size, one.recipe.shape), []).append(one)
    plateau = frozenset(one.name for one in members if _on_plateau(plan, one))
    names = [name for name, _ in by_size]
    lines = [
        ModelGroup(
            # Two shapes under one name are distinguished by their parameters.
            name if names.count(name) == 1 else f"{name} of {short(some[0].recipe.parameters or math.nan)}",
            some[0].recipe.parameters,
            about,
            tuple(some),
            plateau,
        )
        for (name, _), some in by_size.items()
    ]
    return tuple(sorted(lines, key=lambda line: (line.parameters or math.inf, line.size)))


def _on_plateau(plan: Plan, model: Model) -> bool:
    job = plan.jobs.get(plan.results[model.results[0]])
    return job is not None and not model.recipe.final and job.step <= job.run.decay_start


def _run(plan: Plan, model: Model) -> Pretrain:
    """The run whose end or intermediate checkpoint is the model's first result."""
    name = model.results[0]
    return next(
        run
        for run in plan.study.runs
        if name == run.name or name in [f"{run.name}-{step}" for step in run.keep]
    )


def _rules(model: Model) -> set[str]:
    """The replacement shares of its MLM phases, as "mask/random/kept" in percent."""
    return {span.objective.rule for span in model.recipe.spans if span.objective.name == "mlm"}


def _settings(plan: Plan, members: Iterable[Model]) -> dict[str, str]:
    """A description of each setting that lists only the fields in which the settings differ."""
    fields: dict[str, dict[str, str]] = {}
    for one in members:
        way = {"way": "continued" if one.recipe.base else "from scratch"}
        fields.setdefault(one.recipe.setting, _fields(_run(plan, one)) | way)
    differing = [
        name
        for name in ("corpus", "peak", "warmup", "decay", *SETTING)
        if len({fields[setting].get(name) for setting in fields}) > 1
    ]
    words = {setting: ", ".join(one[name] for name in differing) for setting, one in fields.items()}
    if len(set(words.values())) < len(words):  # a second warmup, for example, shows in no field
        words = {
            setting: ", ".join(filter(None, (said, fields[setting]["way"])))
            for setting, said in words.items()
        }
    twice = {one for one in words.values() if list(words.values()).count(one) > 1}
    return {
        setting: f"{said} (setting {setting[:6]})".strip() if said in twice and len(words) > 1 else said
        for setting, said in words.items()
    }


def _fields(run: Pretrain) -> dict[str, str]:
    packing = run.packing
    said = {
        "corpus": corpus_of(run).name if run.corpus else "no corpus",
        "peak": f"peak {run.schedule.peak:g}",
        "warmup": f"warmup {run.schedule.warmup:g}",
        "decay": f"decay {run.schedule.decay:g}",
        "packing": f"{type(packing).__name__.lower()} of {packing.length:,}",
        "batch_tokens": f"{run.batch_tokens:,} tokens a step",
        "optimizer": f"eps {run.optimizer.eps:g}, decay {run.optimizer.weight_decay:g}",
        "precision": run.precision,
        "optimizer_state": f"moments {run.optimizer_state}",
        "data": f"data {run.data}",
    }
    return {name: str(value) for name, value in said.items()}


def _is(ratio: float | None, wanted: float) -> bool:
    return ratio is not None and math.isclose(ratio, wanted)


# ---------------------------------------------------------------- quantities
# A quantity has four numbers: its value for every seed, its value for every resample of the test examples, its expected
# variance for a given noise of scores, and its value in the paper. So one definition serves both the report, which has
# scores, and the plan, which has none yet.


Noise = Callable[[str], float]  # task → standard deviation of one score over seeds, in points


@dataclass(frozen=True)
class ScoreView:
    """Scores in percentage points, restricted to the pretraining seeds that all models of a contrast have."""

    evidence: Evidence
    draws: Resamples | None
    rows: dict[str, list[int]]  # model → its row indices, in the same seed order for all models

    def scores(self, model: Model, tasks: tuple[str, ...], metric: str, part: str = "test") -> Floats:
        return 100 * self.evidence.on(model, tasks, metric, part=part)[self.rows[model.name]]

    def rates(self, model: Model, task: str) -> Floats:
        """Test scores as (pretraining seeds, learning rates, fine-tuning seeds)."""
        return 100 * self.evidence.by_rate(model, task)[self.rows[model.name]]

    def resampled(self, model: Model, tasks: tuple[str, ...], metric: str) -> Floats | None:
        """Mean over tasks as (resamples, pretraining seeds, fine-tuning seeds); None if a task has no values."""
        found = [self.draws.of(model, task, metric) if self.draws else None for task in tasks]
        known = [one for one in found if one is not None]
        if len(known) < len(tasks):
            return None
        return 100 * np.mean(known, axis=0)[:, self.rows[model.name]]


class Quantity(ABC):
    """A number for every seed, in percentage points. Sums and multiples of quantities are quantities."""

    @property
    @abstractmethod
    def models(self) -> tuple[Model, ...]:
        """The models whose scores it needs."""

    @property
    @abstractmethod
    def tasks(self) -> tuple[str, ...]:
        """The tasks it needs scores on."""

    @abstractmethod
    def measure(self, reading: ScoreView) -> Floats:
        """Its values as (pretraining seeds, fine-tuning seeds), in points. NaN: missing."""

    def resample(self, reading: ScoreView) -> Floats | None:
        """Its values as (resamples, pretraining seeds, fine-tuning seeds); None where resampling does not apply."""
        return None

    @abstractmethod
    def variance(self, noise: Noise) -> float:
        """Its variance over fine-tuning seeds, if scores of different models and tasks vary independently."""

    def in_paper(self) -> float | None:
        """Its value computed from the paper's scores; None if any of them is not known."""
        return None

    def __mul__(self, weight: float) -> Sum:
        return Sum(((weight, self),))

    __rmul__ = __mul__

    def __add__(self, other: Quantity) -> Sum:
        return Sum(((1.0, self), (1.0, other)))

    def __sub__(self, other: Quantity) -> Sum:
        return Sum(((1.0, self), (-1.0, other)))


@dataclass(frozen=True)
class ScoreQuantity(Quantity):
    """The mean score of one model over some tasks."""

    model: Model
    on: tuple[str, ...]
    family: Family | None = None  # set where `on` is every task that the study has of a family
    metric: str = ""  # empty: the one that learning rates are chosen by

    @property
    def models(self) -> tuple[Model, ...]:
        return (self.model,)

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.on

    def measure(self, reading: ScoreView) -> Floats:
        return reading.scores(self.model, self.on, self.metric)

    def resample(self, reading: ScoreView) -> Floats | None:
        return reading.resampled(self.model, self.on, self.metric)

    def variance(self, noise: Noise) -> float:
        return sum(noise(task) ** 2 for task in self.on) / len(self.on) ** 2

    def in_paper(self) -> float | None:
        return None if self.metric else paper_score(self.model.recipe, self.family)


@dataclass(frozen=True)
class Sum(Quantity):
    """A weighted sum of quantities."""

    terms: tuple[tuple[float, Quantity], ...]

    @property
    def models(self) -> tuple[Model, ...]:
        return _together(one.models for _, one in self.terms)

    @property
    def tasks(self) -> tuple[str, ...]:
        return _together(one.tasks for _, one in self.terms)

    def measure(self, reading: ScoreView) -> Floats:
        return sum((weight * one.measure(reading) for weight, one in self.terms), np.zeros(()))

    def resample(self, reading: ScoreView) -> Floats | None:
        found = [(weight, one.resample(reading)) for weight, one in self.terms]
        known = [weight * one for weight, one in found if one is not None]
        return sum(known, np.zeros(())) if len(known) == len(found) else None

    def variance(self, noise: Noise) -> float:
        return sum(weight**2 * one.variance(noise) for weight, one in self.terms)

    def in_paper(self) -> float | None:
        found = [(weight, one.in_paper()) for weight, one in self.terms]
        known = [weight * one for weight, one in found if one is not None]
        return math.fsum(known) if len(known) == len(found) else None


@dataclass(frozen=True)
class SpreadOfRates(Quantity):
    """The sensitivity to the learning rate: best minus worst test score of each seed, mean over tasks."""

    model: Model
    on: tuple[str, ...]

    @property
    def models(self) -> tuple[Model, ...]:
        return (self.model,)

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.on

    def measure(self, reading: ScoreView) -> Floats:
        return np.mean([rate_spread(reading.rates(self.model, task)) for task in self.on], axis=0)

    def variance(self, noise: Noise) -> float:
        # Best minus worst is a difference of two scores, so it has twice the variance of one.
        return 2 * sum(noise(task) ** 2 for task in self.on) / len(self.on) ** 2


@dataclass(frozen=True)
class Several(Quantity):
    """Base class of quantities that are computed from several others."""

    among: tuple[Quantity, ...]

    @property
    def models(self) -> tuple[Model, ...]:
        return _together(one.models for one in self.among)

    @property
    def tasks(self) -> tuple[str, ...]:
        return _together(one.tasks for one in self.among)


class Spread(Several):
    """The range of several quantities: largest minus smallest for each seed."""

    def measure(self, reading: ScoreView) -> Floats:
        return spread(np.stack([one.measure(reading) for one in self.among]))

    def variance(self, noise: Noise) -> float:
        return 2 * max(one.variance(noise) for one in self.among)


class Largest(Several):
    """The maximum of several quantities for each seed. Its mean is biased upwards: at least that of the largest."""

    def measure(self, reading: ScoreView) -> Floats:
        return np.max([one.measure(reading) for one in self.among], axis=0)

    def variance(self, noise: Noise) -> float:
        return max(one.variance(noise) for one in self.among)

    def in_paper(self) -> float | None:
        known = [value for one in self.among if (value := one.in_paper()) is not None]
        return max(known) if len(known) == len(self.among) else None


@dataclass(frozen=True)
class Best(Quantity):
    """The test score of the model with the best validation score, averaged over the seeds that all models have."""

    among: tuple[Model, ...]
    on: tuple[str, ...]
    family: Family | None = None

    @property
    def models(self) -> tuple[Model, ...]:
        return self.among

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.on

    def chosen(self, reading: ScoreView) -> Model | None:
        """The model that validation selects; the first of equals. None: no seed is complete for all models."""
        validation = np.stack([reading.scores(one, self.on, "", "validation") for one in self.among])
        complete = np.isfinite(validation).all(axis=0)
        if not complete.any():
            return None
        return self.among[int(np.argmax(validation[:, complete].mean(axis=1)))]

    def measure(self, reading: ScoreView) -> Floats:
        best = self.chosen(reading)
        if best is None:
            return np.full_like(reading.scores(self.among[0], self.on, ""), np.nan)
        return reading.scores(best, self.on, "")

    def resample(self, reading: ScoreView) -> Floats | None:
        best = self.chosen(reading)
        return reading.resampled(best, self.on, "") if best else None

    def variance(self, noise: Noise) -> float:
        return sum(noise(task) ** 2 for task in self.on) / len(self.on) ** 2

    def in_paper(self) -> float | None:
        # The paper gives the best ratio of each family and size, and some of the others.
        known = [paper_score(one.recipe, self.family) for one in self.among]
        found = [one for one in known if one is not None]
        return max(found) if len(self.among) >= 4 and len(found) >= 2 else None


def score(bench: ComparableModels, model: Model, on: str, metric: str = "") -> ScoreQuantity:
    """The score of one model on a family or on a task."""
    families: dict[str, tuple[str, ...]] = dict(bench.families)
    family = next((one for one in bench.families if one == on), None)
    return ScoreQuantity(model, families.get(on, (on,)), family, metric)


def gap(bench: ComparableModels, more: Model, less: Model, on: str, metric: str = "") -> Sum:
    """The score of `more` minus that of `less`."""
    return score(bench, more, on, metric) - score(bench, less, on, metric)


def mean(among: Iterable[Quantity]) -> Sum:
    every = tuple(among)
    return Sum(tuple((1 / len(every), one) for one in every))


def slope(points: Iterable[tuple[float, Quantity]]) -> Sum:
    """The least-squares slope of a quantity over x."""
    every = tuple(points)
    centre = math.fsum(x for x, _ in every) / len(every)
    squares = math.fsum((x - centre) ** 2 for x, _ in every)
    return Sum(tuple(((x - centre) / squares, one) for x, one in every))


def paper_score(recipe: Recipe, family: Family | None) -> float | None:
    """The paper's score of this recipe on a family, in percent; None if not published or not a whole family."""
    return None if family is None else family_mean(recipe, family)


def _together(several: Iterable[tuple]) -> tuple:
    return tuple(dict.fromkeys(one for some in several for one in some))


# ---------------------------------------------------------------- contrasts


Source = Literal["paper", "beyond", "study"]
Remark = Callable[[ScoreView], str]  # an additional sentence computed from the scores


@dataclass(frozen=True)
class Contrast:
    """One test. `above` and `below` are sentences without a full stop; the first {} is the absolute value."""

    title: str  # "610m · SC"
    quantity: Quantity
    above: str  # "MLM 40% scores {} points above CLM on SC at 610m"
    below: str
    margin: float = 0.0
    paper: float | None = None
    remark: Remark | None = None

    @property
    def models(self) -> tuple[Model, ...]:
        return self.quantity.models

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.quantity.tasks


@dataclass(frozen=True)
class AnyOf:
    """Holds if at least one of several contrasts holds.

    The contrast with the smallest p-value represents all, and its p-value is multiplied by their number (Bonferroni).
    """

    title: str
    options: tuple[Contrast, ...]
    paper: float | None = None
    margin: float = 0.0

    @property
    def models(self) -> tuple[Model, ...]:
        return tuple(dict.fromkeys(model for one in self.options for model in one.models))

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(task for one in self.options for task in one.tasks))


Test = Contrast | AnyOf


@dataclass(frozen=True)
class Statement:
    """A claim and how it is tested. Every one of its tests must hold."""

    id: str
    says: str
    gist: str  # the claim as the start of a list of numbers: "MLM 40% minus CLM on SC"
    contrast: str  # one line for docs/claims.md
    needs: str  # the runs it needs, as text
    find: Callable[[ComparableModels], list[Test]]
    on: tuple[Family, ...]  # the task families it is about
    figure: str
    paper: str = "no numbers known"
    source: Source = "paper"
    caveats: tuple[str, ...] = ()
    equal_data: bool = False  # it compares objectives on equal amounts of data

    def tests(self, bench: ComparableModels) -> list[Test]:
        """The tests whose models are all planned to be fine-tuned on the tasks of the test."""
        return [one for one in self.find(bench) if bench.plans(one.models, one.tasks)]


def ahead(
    bench: ComparableModels,
    line: ModelGroup,
    on: str,
    more: tuple[str, Model],
    less: tuple[str, Model],
    *,
    when: str = "",
    title: str = "",
    metric: str = "",
    margin: float = 0.0,
    remark: Remark | None = None,
) -> Contrast:
    """The contrast "`more` scores above `less`"; both are (display name, model)."""
    difference = gap(bench, more[1], less[1], on, metric)
    what = f"{on} ({metric})" if metric else on
    where = f"on {what} at {line.title}{f', {when}' if when else ''}"
    return Contrast(
        title or " · ".join(one for one in (line.title, when, what) if one),
        difference,
        f"{more[0]} scores {{}} points above {less[0]} {where}",
        f"{more[0]} scores {{}} points below {less[0]} {where}",
        margin,
        _rounded(difference.in_paper()),
        remark,
    )


def measured_contrasts(
    title: str,
    quantity: Quantity,
    above: str,
    below: str,
    *,
    margin: float = 0.0,
    paper: float | None = None,
    remark: Remark | None = None,
) -> Contrast:
    """A contrast of any quantity. `paper` defaults to the same quantity of the paper's scores, where all are known."""
    known = _rounded(quantity.in_paper()) if paper is None else paper
    return Contrast(title, quantity, above, below, margin, known, remark)


def _rounded(points: float | None) -> float | None:
    """Remove floating-point noise from differences of the paper's scores, which have two decimals."""
    return None if points is None else round(points, 6)


# ---------------------------------------------------------------- measuring


Places = NDArray[np.intp]
LEVEL = 0.95
ALIKE = "every seed gives the same number, so there is no noise to judge it by"


@dataclass(frozen=True)
class MeasuredContrast:
    """A test and its result. The p-value of `estimate` is for exceeding the margin; NaN: not available."""

    title: str
    models: tuple[str, ...]
    said: Contrast  # the contrast whose sentences describe the result
    estimate: Estimate
    margin: float
    paper: float | None
    tries: int  # number of tests it was selected from; its p-value and interval are corrected for them
    examples: tuple[float, float] | None
    note: str
    shape: tuple[int, int]  # complete pretraining seeds, complete fine-tuning seeds
    lost: int  # trials that failed or cannot be read, so that their seeds are incomplete

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


def measure(test: Test, evidence: Evidence, draws: Resamples | None) -> MeasuredContrast:
    """Measure one test. `draws`: resampled scores for the interval over test examples, or None for no interval."""
    return _clearest(test, evidence, draws) if isinstance(test, AnyOf) else _measure(test, evidence, draws)


def _measure(
    contrast: Contrast, evidence: Evidence, draws: Resamples | None, tries: int = 1
) -> MeasuredContrast:
    reading = ScoreView(evidence, draws, rows_in_common(list(contrast.models)))
    matrix = np.atleast_2d(contrast.quantity.measure(reading))
    estimate = across(matrix, 1 - (1 - LEVEL) / tries)
    if contrast.margin:
        estimate = replace(estimate, p=across(matrix - contrast.margin).p)
    rows, columns = kept(matrix)
    known = not math.isnan(estimate.p)
    return MeasuredContrast(
        title=contrast.title,
        models=tuple(one.name for one in contrast.models),
        said=contrast,
        estimate=estimate,
        margin=contrast.margin,
        paper=contrast.paper,
        tries=tries,
        examples=_over_examples(contrast, reading, estimate.mean, rows, columns) if known and draws else None,
        note=_note(contrast, reading) if known else _why_unknown(contrast, evidence, estimate),
        shape=(len(rows), len(columns)),
        lost=sum(len(grid.missing) for grid in _grids(contrast, evidence)),
    )


def _clearest(test: AnyOf, evidence: Evidence, draws: Resamples | None) -> MeasuredContrast:
    """Measure the option with the smallest one-sided p-value, corrected for having been selected."""
    tried = [_measure(one, evidence, None, len(test.options)) for one in test.options]
    known = [one for one in tried if not one.missing]
    judged = [one for one in known if not one.alike]
    if not judged:
        stands = known[0] if known else tried[0]
        every = tuple(one.name for one in test.models)
        return replace(stands, title=test.title, models=every, paper=test.paper)
    best = min(judged, key=lambda one: one.p if one.excess > 0 else 2 - one.p)
    again = _measure(best.said, evidence, draws, len(known))
    corrected = replace(again.estimate, p=min(1.0, again.estimate.p * len(known)))
    holes = f"; {len(tried) - len(known)} more are not complete" if len(known) < len(tried) else ""
    note = f"clearest of {len(known)} comparisons: {best.title}{holes}"
    return replace(again, title=test.title, paper=test.paper, estimate=corrected, note=note)


def detectable(measured: MeasuredContrast, level: float) -> float:
    """The smallest true effect beyond the margin that this test finds with 80% power; infinite if seeds are alike."""
    from biphase.report.statistics.power import detectable_in

    if measured.alike:
        return math.inf
    return math.nan if measured.missing else detectable_in(measured.estimate, level / measured.tries)


def _over_examples(
    contrast: Contrast, reading: ScoreView, point: float, rows: Places, columns: Places
) -> tuple[float, float] | None:
    """The interval of the mean over resampled test examples, with the degrees of freedom of the smallest test set."""
    resampled = contrast.quantity.resample(reading)
    if resampled is None:
        return None
    means = resampled[:, rows][:, :, columns].mean(axis=(1, 2))
    fewest = min(reading.evidence.examples(one, task) for one in contrast.models for task in contrast.tasks)
    if fewest < 2 or not np.isfinite(means).all():
        return None
    low, high = interval(means, np.array(point), examples=fewest, level=LEVEL)
    return (float(low), float(high)) if low < high else None


def _note(contrast: Contrast, reading: ScoreView) -> str:
    said = [contrast.remark(reading)] if contrast.remark else []
    if len(reading.rows) > 1 and not _paired(contrast):
        said.append("no pretraining seed in common: models are paired in the order of their seeds")
    return "; ".join(one for one in said if one)


def _paired(contrast: Contrast) -> bool:
    return bool(set.intersection(*(set(one.seeds) for one in contrast.models)))


def _grids(contrast: Contrast, evidence: Evidence) -> list[ScoreGrid]:
    return [
        evidence.grids[result, task]
        for model in contrast.models
        for result in model.results
        for task in contrast.tasks
    ]


def _why_unknown(contrast: Contrast, evidence: Evidence, estimate: Estimate) -> str:
    if estimate.n > 1:
        return ALIKE
    grids = _grids(contrast, evidence)
    done, of = sum(grid.done for grid in grids), sum(grid.of for grid in grids)
    lost = sum(len(grid.missing) for grid in grids)
    if done < of:
        failed = f", {lost:,} failed or cannot be read" if lost else ""
        return f"{'' if lost == of - done else 'not yet: '}{done:,} of {of:,} leaves done{failed}"
    return "one seed: an interval needs two" if estimate.n else "the metric it asks for was not scored"
