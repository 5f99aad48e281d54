"""Which models of a study may be compared: lines of one size and one setting. From recipes alone, before any score.

    line    models that differ in nothing but their objectives, their steps, and the seeds of one recipe
    group   lines that differ in size alone
    bench   everything a claim looks through: the groups of a study and the tasks it is scored on

Models that began from a published one belong to no line: what they saw before is not known. A study's own claims may
name them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from biphase.keys import decay_start
from biphase.papers.gisserot2025.published import family_mean
from biphase.presets import corpus_of
from biphase.report.evidence import Evidence, Floats, Resamples, ScoreGrid
from biphase.report.recipes import SETTING, Kind, Model, Recipe, models
from biphase.report.statistics.intervals import Estimate, across, interval, kept, rate_spread, spread
from biphase.specs import MLM, Family, Fewer, Finetune, Hub, Pretrain, Task
from biphase.specs.tasks import FAMILIES
from biphase.study.plan import Plan
from biphase.text import short

USUAL = 0.4  # the masking ratio of the paper's comparisons
WINDOW = 0.05  # a split of 25% is any between 20% and 30%


@dataclass(frozen=True)
class ModelGroup:
    """Models of one size and setting. Lookups answer by the steps at which there is one."""

    size: str
    parameters: int | None
    about: str  # what sets it apart where a study has several settings: "peak 0.001"
    models: tuple[Model, ...]
    plateau: frozenset[str]  # models whose learning rate has not begun to come down

    @property
    def title(self) -> str:
        return " · ".join(one for one in (self.size, self.about) if one)

    def clm(self) -> dict[int, Model]:
        """From scratch, causal from the first step to the last of the decay."""
        return {one.recipe.steps: one for one in self._finals("clm")}

    def mlm(self, ratio: float = USUAL) -> dict[int, Model]:
        """From scratch, masked at one ratio."""
        return {one.recipe.steps: one for one in self._finals("mlm") if _is(one.recipe.ratio, ratio)}

    def ratios(self, steps: int) -> dict[float, Model]:
        """From scratch, masked, of so many steps: by their ratio, lowest first."""
        found = {
            one.recipe.ratio: one
            for one in self._finals("mlm")
            if one.recipe.steps == steps and one.recipe.ratio is not None
        }
        return dict(sorted(found.items()))

    def split(self, share: float) -> dict[int, Model]:
        """Causal for about this share of the steps, then masked at the usual ratio."""
        near = [
            one
            for one in self._finals("clm-mlm")
            if _is(one.recipe.ratio, USUAL) and abs(one.recipe.causal_share - share) <= WINDOW + 1e-9
        ]
        near.sort(key=lambda one: (-round(abs(one.recipe.causal_share - share), 6), -one.recipe.causal_share))
        # The nearest comes last and stays; of equals the less causal.
        return {one.recipe.steps: one for one in near}

    def mostly_causal(self, steps: int) -> dict[int, dict[float, Model]]:
        """Masked only for the last tenth or less: by the step of the switch, then by ratio."""
        found: dict[int, dict[float, Model]] = {}
        for one in self._finals("clm-mlm"):
            recipe = one.recipe
            if recipe.steps == steps and recipe.causal_share >= 0.9 and recipe.ratio is not None:
                found.setdefault(recipe.spans[0].until, {})[recipe.ratio] = one
        return found

    def on_the_way(self, kind: Kind) -> dict[int, Model]:
        """Checkpoints at a learning rate that has not come down: causal, or masked at the usual ratio."""
        return {
            one.recipe.steps: one
            for one in sorted(self.models, key=lambda one: one.recipe.steps)
            if one.name in self.plateau
            and one.recipe.kind == kind
            and one.recipe.base is None
            and (kind == "clm" or _is(one.recipe.ratio, USUAL))
        }

    def continued(self, kind: Kind) -> dict[tuple[int, int], Model]:
        """Decayed bases of a kind, gone on with at the usual ratio: by (steps of the base, steps since)."""
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
    """What the claims of a study can be tested with."""

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
        """What steps on the way are fine-tuned on, if not on everything."""
        return self.finetune.on_the_way if self.finetune else None

    def plans(self, models: Iterable[Model], tasks: Iterable[str]) -> bool:
        """Will all of these models be scored on all of these tasks?"""
        return self.fewer is None or all(
            task in self.fewer.tasks for one in models if not one.recipe.final for task in tasks
        )

    def seeds(self, models: Iterable[Model]) -> int:
        """Fine-tuning seeds that all of these models have."""
        if self.finetune is None:
            return 0
        whole = self.fewer is None or all(one.recipe.final for one in models)
        return len(self.finetune.seeds if whole or self.fewer is None else self.fewer.seeds)


def comparable_models(plan: Plan, known: dict[str, Model] | None = None) -> ComparableModels:
    """The bench of a plan; `known` are its models, where they were already worked out."""
    known = models(plan) if known is None else known
    finetune = plan.study.finetune
    tasks = {task.name: task for task in finetune.tasks} if finetune else {}
    scratch = [one for one in known.values() if not isinstance(_origin(_run(plan, one)), Hub)]
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
    """The steps at which all of them have a model, in order."""
    return sorted(set.intersection(*(set(one) for one in found))) if found else []


def rows_in_common(models: list[Model]) -> dict[str, list[int]]:
    """For each model its rows of the pretraining seeds that all have; in order, where they share none."""
    shared = [seed for seed in models[0].seeds if all(seed in one.seeds for one in models)]
    if shared:
        return {one.name: [one.seeds.index(seed) for seed in shared] for one in models}
    fewest = min(len(one.seeds) for one in models)
    return {one.name: list(range(fewest)) for one in models}


def _group(plan: Plan, *members: Model, about: str) -> Group:
    by_size: dict[tuple[str, str], list[Model]] = {}
    for one in members:
        by_size.setdefault((one.recipe.size, one.recipe.shape), []).append(one)
    plateau = frozenset(one.name for one in members if _on_plateau(plan, one))
    names = [name for name, _ in by_size]
    lines = [
        ModelGroup(
            # Two shapes under one name are told apart by their parameters.
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
    return job is not None and not model.recipe.final and job.step <= decay_start(job.run)


def _run(plan: Plan, model: Model) -> Pretrain:
    """The run that its first result is an end or a step of."""
    name = model.results[0]
    return next(
        run
        for run in plan.study.runs
        if name == run.name or name in [f"{run.name}-{step}" for step in run.keep]
    )


def _origin(run: Pretrain) -> object:
    return _origin(run.start) if isinstance(run.start, Pretrain) else run.start


def _rules(model: Model) -> set[str]:
    """How its hidden tokens were replaced: mask, random, kept."""
    masked = [span.objective for span in model.recipe.spans if type(span.objective) is MLM]
    return {"/".join(f"{share * 100:g}" for share in one.replace) for one in masked}


def _settings(plan: Plan, members: Iterable[Model]) -> dict[str, str]:
    """Settings in words: only what they differ in, so nothing where there is one."""
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
    if len(set(words.values())) < len(words):  # warmed up a second time, say
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
# What is measured of models, seed by seed, in percent points: scores, spreads, the best of several, and sums of these.
#
# Each quantity answers four questions: its value for every seed, its value for every resample of the test examples, how
# noisy it will be for a given noise of scores, and what it was in the paper. So one definition serves the report, which
# has scores, and the plan, which has none yet.


Noise = Callable[[str], float]  # task → standard deviation of one score over seeds, in points


@dataclass(frozen=True)
class ScoreView:
    """The evidence, restricted to the pretraining seeds that all models of a contrast have."""

    evidence: Evidence
    draws: Resamples | None
    rows: dict[str, list[int]]  # model → its rows, in the same order for all

    def scores(self, model: Model, tasks: tuple[str, ...], metric: str, part: str = "test") -> Floats:
        return 100 * self.evidence.on(model, tasks, metric, part=part)[self.rows[model.name]]

    def rates(self, model: Model, task: str) -> Floats:
        """(pretraining seeds, learning rates, fine-tuning seeds)"""
        return 100 * self.evidence.by_rate(model, task)[self.rows[model.name]]

    def resampled(self, model: Model, tasks: tuple[str, ...], metric: str) -> Floats | None:
        """(resamples, pretraining seeds, fine-tuning seeds)"""
        found = [self.draws.of(model, task, metric) if self.draws else None for task in tasks]
        known = [one for one in found if one is not None]
        if len(known) < len(tasks):
            return None
        return 100 * np.mean(known, axis=0)[:, self.rows[model.name]]


class Quantity(ABC):
    """Something that has a value for every seed. Sums of quantities are quantities."""

    @property
    @abstractmethod
    def models(self) -> tuple[Model, ...]:
        """Whose scores it needs."""

    @property
    @abstractmethod
    def tasks(self) -> tuple[str, ...]:
        """On which tasks."""

    @abstractmethod
    def measure(self, reading: ScoreView) -> Floats:
        """(pretraining seeds, fine-tuning seeds), in points; NaN: missing."""

    def resample(self, reading: ScoreView) -> Floats | None:
        """(resamples, pretraining seeds, fine-tuning seeds); None where the examples say nothing of it."""
        return None

    @abstractmethod
    def variance(self, noise: Noise) -> float:
        """Over fine-tuning seeds, if scores of different models and tasks vary independently."""

    def in_paper(self) -> float | None:
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
    """The mean over some tasks of one model."""

    model: Model
    on: tuple[str, ...]
    family: Family | None = None  # where the tasks are all that the study has of a family
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
    """Quantities, each times a weight."""

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
    """How far the test score moves over the learning rates: best minus worst of each seed, mean over tasks."""

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
        # Best minus worst: two scores, so twice the variance of one.
        return 2 * sum(noise(task) ** 2 for task in self.on) / len(self.on) ** 2


@dataclass(frozen=True)
class Several(Quantity):
    """What is made of several quantities."""

    among: tuple[Quantity, ...]

    @property
    def models(self) -> tuple[Model, ...]:
        return _together(one.models for one in self.among)

    @property
    def tasks(self) -> tuple[str, ...]:
        return _together(one.tasks for one in self.among)


class Spread(Several):
    """How far a quantity moves over several models: largest minus smallest of each seed."""

    def measure(self, reading: ScoreView) -> Floats:
        return spread(np.stack([one.measure(reading) for one in self.among]))

    def variance(self, noise: Noise) -> float:
        return 2 * max(one.variance(noise) for one in self.among)


class Largest(Several):
    """The largest of several, seed by seed: on average not below the one that is truly largest."""

    def measure(self, reading: ScoreView) -> Floats:
        return np.max([one.measure(reading) for one in self.among], axis=0)

    def variance(self, noise: Noise) -> float:
        return max(one.variance(noise) for one in self.among)

    def in_paper(self) -> float | None:
        known = [value for one in self.among if (value := one.in_paper()) is not None]
        return max(known) if len(known) == len(self.among) else None


@dataclass(frozen=True)
class Best(Quantity):
    """The model with the best validation score, mean over the seeds that all have; its test score is what counts."""

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
        """Of equals the first."""
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
        # Of each size the best ratio of a family is known, and some of the others.
        known = [paper_score(one.recipe, self.family) for one in self.among]
        found = [one for one in known if one is not None]
        return max(found) if len(self.among) >= 4 and len(found) >= 2 else None


def score(bench: ComparableModels, model: Model, on: str, metric: str = "") -> ScoreQuantity:
    """Of one model on a family, or on a task."""
    families: dict[str, tuple[str, ...]] = dict(bench.families)
    family = next((one for one in bench.families if one == on), None)
    return ScoreQuantity(model, families.get(on, (on,)), family, metric)


def gap(bench: ComparableModels, more: Model, less: Model, on: str, metric: str = "") -> Sum:
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
    """What the paper's model of this recipe scored, in percent; of some tasks of a family nothing is known."""
    return None if family is None else family_mean(recipe, family)


def _together(several: Iterable[tuple]) -> tuple:
    return tuple(dict.fromkeys(one for some in several for one in some))


# ---------------------------------------------------------------- contrasts
# A test as a record: a quantity that is positive if a claim holds, the margin it must exceed, and how to say it.
#
# Contrasts are found from recipes, so they exist before any score does: the plan lists them, the report measures them.


Source = Literal["paper", "beyond", "study"]
Remark = Callable[[ScoreView], str]  # what else the scores say, once they are there


@dataclass(frozen=True)
class Contrast:
    """One test. `above` and `below` are sentences without a full stop; the first {} is a number without its sign."""

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
    """At least one of several contrasts holds: the clearest stands for all, its p-value times their number."""

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
    """What is claimed, and how it is found out. Every test of it must hold."""

    id: str
    says: str
    gist: str  # the same as the beginning of a list of numbers: "MLM 40% minus CLM on SC"
    contrast: str  # in one line, for docs/claims.md
    needs: str  # the runs, in words
    find: Callable[[ComparableModels], list[Test]]
    on: tuple[Family, ...]  # the families it speaks of
    figure: str
    paper: str = "no numbers known"
    source: Source = "paper"
    caveats: tuple[str, ...] = ()
    equal_data: bool = False  # objectives are compared by what they make of the same data

    def tests(self, bench: ComparableModels) -> list[Test]:
        """Those whose models are all fine-tuned on what they ask about."""
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
    """`more` scores above `less`, both as (how it is called, model)."""
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
    """A contrast of any quantity; the paper's number is the same quantity of the paper's scores, where all are known."""
    known = _rounded(quantity.in_paper()) if paper is None else paper
    return Contrast(title, quantity, above, below, margin, known, remark)


def _rounded(points: float | None) -> float | None:
    """The paper prints two decimals; differences of them need no more."""
    return None if points is None else round(points, 6)


# ---------------------------------------------------------------- measuring
# Contrasts with their numbers: the estimate over seeds, the interval over test examples, the effect they could find.


Places = NDArray[np.intp]
LEVEL = 0.95
ALIKE = "every seed gives the same number, so there is no noise to judge it by"


@dataclass(frozen=True)
class MeasuredContrast:
    """A test and what came out. `p` of the estimate is that of the margin; NaN: it cannot be told."""

    title: str
    models: tuple[str, ...]
    said: Contrast  # whose words say it
    estimate: Estimate
    margin: float
    paper: float | None
    tries: int  # how many tests it is the clearest of; its p-value and interval are corrected for them
    examples: tuple[float, float] | None
    note: str
    shape: tuple[int, int]  # pretraining seeds, fine-tuning seeds that are complete
    lost: int  # leaves that failed or cannot be read: their seeds are not complete

    @property
    def alike(self) -> bool:
        """Every seed gives the same number, so nothing tells how far chance could move it."""
        return math.isnan(self.estimate.p) and self.estimate.n > 1

    @property
    def missing(self) -> bool:
        return math.isnan(self.estimate.p) and not self.alike

    @property
    def p(self) -> float:
        """As a claim counts it: what is there and cannot be judged is no evidence. NaN: missing."""
        return 1.0 if self.alike else self.estimate.p

    @property
    def excess(self) -> float:
        return self.estimate.mean - self.margin


def measure(test: Test, evidence: Evidence, draws: Resamples | None) -> MeasuredContrast:
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
    """The option that is furthest from chance in the claimed direction, corrected for having been chosen."""
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
    """The smallest true effect beyond the margin that this test would find with 80% power; none, where seeds are alike."""
    from biphase.report.statistics.power import detectable_in

    if measured.alike:
        return math.inf
    return math.nan if measured.missing else detectable_in(measured.estimate, level / measured.tries)


def _over_examples(
    contrast: Contrast, reading: ScoreView, point: float, rows: Places, columns: Places
) -> tuple[float, float] | None:
    """Of the mean over the same seeds, over resampled examples; of several test sets, the smallest decides on t."""
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
