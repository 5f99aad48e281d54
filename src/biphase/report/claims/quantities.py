"""What is measured of models, seed by seed, in percent points: scores, spreads, the best of several, and sums of these.

Each quantity answers four questions: its value for every seed, its value for every resample of the test examples, how
noisy it will be for a given noise of scores, and what it was in the paper. So one definition serves the report, which
has scores, and the plan, which has none yet.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from biphase.report.claims.lines import Bench
from biphase.report.draws import Draws
from biphase.report.evidence import Evidence, Floats
from biphase.report.paper import family_mean
from biphase.report.recipes import Model, Recipe
from biphase.report.statistics.spread import rate_spread, spread
from biphase.specs import Family

Noise = Callable[[str], float]  # task → standard deviation of one score over seeds, in points


@dataclass(frozen=True)
class Reading:
    """The evidence, restricted to the pretraining seeds that all models of a contrast have."""

    evidence: Evidence
    draws: Draws | None
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
    def measure(self, reading: Reading) -> Floats:
        """(pretraining seeds, fine-tuning seeds), in points; NaN: missing."""

    def resample(self, reading: Reading) -> Floats | None:
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
class Score(Quantity):
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

    def measure(self, reading: Reading) -> Floats:
        return reading.scores(self.model, self.on, self.metric)

    def resample(self, reading: Reading) -> Floats | None:
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

    def measure(self, reading: Reading) -> Floats:
        return sum((weight * one.measure(reading) for weight, one in self.terms), np.zeros(()))

    def resample(self, reading: Reading) -> Floats | None:
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

    def measure(self, reading: Reading) -> Floats:
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

    def measure(self, reading: Reading) -> Floats:
        return spread(np.stack([one.measure(reading) for one in self.among]))

    def variance(self, noise: Noise) -> float:
        return 2 * max(one.variance(noise) for one in self.among)


class Largest(Several):
    """The largest of several, seed by seed: on average not below the one that is truly largest."""

    def measure(self, reading: Reading) -> Floats:
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

    def chosen(self, reading: Reading) -> Model | None:
        """Of equals the first."""
        validation = np.stack([reading.scores(one, self.on, "", "validation") for one in self.among])
        complete = np.isfinite(validation).all(axis=0)
        if not complete.any():
            return None
        return self.among[int(np.argmax(validation[:, complete].mean(axis=1)))]

    def measure(self, reading: Reading) -> Floats:
        best = self.chosen(reading)
        if best is None:
            return np.full_like(reading.scores(self.among[0], self.on, ""), np.nan)
        return reading.scores(best, self.on, "")

    def resample(self, reading: Reading) -> Floats | None:
        best = self.chosen(reading)
        return reading.resampled(best, self.on, "") if best else None

    def variance(self, noise: Noise) -> float:
        return sum(noise(task) ** 2 for task in self.on) / len(self.on) ** 2

    def in_paper(self) -> float | None:
        # Of each size the best ratio of a family is known, and some of the others.
        known = [paper_score(one.recipe, self.family) for one in self.among]
        found = [one for one in known if one is not None]
        return max(found) if len(self.among) >= 4 and len(found) >= 2 else None


def score(bench: Bench, model: Model, on: str, metric: str = "") -> Score:
    """Of one model on a family, or on a task."""
    families: dict[str, tuple[str, ...]] = dict(bench.families)
    family = next((one for one in bench.families if one == on), None)
    return Score(model, families.get(on, (on,)), family, metric)


def gap(bench: Bench, more: Model, less: Model, on: str, metric: str = "") -> Sum:
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
