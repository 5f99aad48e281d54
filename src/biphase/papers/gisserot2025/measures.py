"""Quantities and selectors that only the claims of this paper need: spreads, masking ratios, bases, several sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from biphase.report.contrasts import Combined, On, Quantity, ScoreView, Terms, added
from biphase.report.recipes import Model, alike
from biphase.report.selectors import (
    Case,
    Chosen,
    ComparableModels,
    Group,
    Length,
    ModelGroup,
    Recipes,
    Select,
    Selector,
    together,
)
from biphase.specs import Classify
from biphase.specs.rows import columns_of

# ---------------------------------------------------------------- quantities


LEARNT = 0.1  # of the way from a trivial baseline to a perfect score: less is not learnt


def learnt(view: ScoreView, model: Model, task: str) -> bool:
    """Whether a model clearly exceeds the trivial baselines of a task on validation, at its best rate."""
    grid = view.evidence.grids[model.results[0], task]
    trivial = grid.baselines.get("trivial", {}).get(grid.metric)
    floor = 100 * trivial.validation if trivial else 0.0
    return view.on_validation({model.name: {(task, "", None): 1.0}}) > floor + LEARNT * (100 - floor)


class Sensitivity(Quantity):
    """How much more one model depends on the learning rate than another: the difference of their spreads.

    A spread is the score at the best rate minus that at the worst, both chosen on validation; mean over the tasks that
    both models have learnt. A model that has not learnt a task scores alike at every rate.
    """

    def terms(self, view: ScoreView | None) -> Terms:
        tasks = [task for task in self.tasks if view is None or self._learnt(view, task)]
        if not tasks:
            return {}
        terms: Terms = {}
        for model, sign in zip(self.models, (1.0, -1.0), strict=True):
            cells = terms[model.name] = {}
            for task in tasks:
                for rate, share in zip(self._ends(view, model, task), (1.0, -1.0), strict=True):
                    cell = (task, "", rate)
                    cells[cell] = cells.get(cell, 0.0) + sign * share / len(tasks)
        return terms

    def _learnt(self, view: ScoreView, task: str) -> bool:
        return len(view.rates[task]) > 1 and all(learnt(view, model, task) for model in self.models)

    def _ends(self, view: ScoreView | None, model: Model, task: str) -> tuple[int, int]:
        if view is None:
            return 0, 1
        scores = {
            rate: view.on_validation({model.name: {(task, "", rate): 1.0}})
            for rate in sorted(view.rates[task])
        }
        return max(scores, key=lambda rate: scores[rate]), min(scores, key=lambda rate: scores[rate])

    def note(self, view: ScoreView) -> str:
        left_out = [task for task in self.tasks if not self._learnt(view, task)]
        return f"left out, not learnt by both: {', '.join(left_out)}" if left_out else ""


class Spread(Combined):
    """The range of several quantities: the one that is largest on validation minus the one that is smallest."""

    def terms(self, view: ScoreView | None) -> Terms:
        parts = [part.terms(view) for part in self.parts]
        if view is None:
            return added([parts[0], parts[-1]], (1.0, -1.0))
        scores = [view.on_validation(part) for part in parts]
        if any(map(math.isnan, scores)):
            return {}
        ends = parts[scores.index(max(scores))], parts[scores.index(min(scores))]
        return added(list(ends), (1.0, -1.0))


def spread(on: On, models: Iterable[Model]) -> Spread:
    """The range of the scores of these models."""
    return Spread(tuple(on.score(model) for model in models))


def by_texts(study: ComparableModels) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The classification tasks with one text column, and those with several."""
    texts = {name: task.form.text for name, task in study.tasks.items() if isinstance(task.form, Classify)}
    several = tuple(name for name, text in texts.items() if len(columns_of(name, text)) > 1)
    return tuple(name for name in texts if name not in several), several


# ---------------------------------------------------------------- selectors


@dataclass(frozen=True)
class BaseOf(Selector):
    """The decayed bases of continued models. A base may have other hyperparameters than its continuation."""

    continued: Recipes

    def find(self, line: ModelGroup, study: ComparableModels) -> dict[Length, Chosen]:
        by_recipe = {alike(model.recipe): model for model in reversed(study.models.values())}
        models = self.continued.find(line, study)
        return {length: by_recipe.get(alike(model.recipe.base)) for length, model in models.items()}


@dataclass(frozen=True)
class Ratios(Selector):
    """All models of one length trained with MLM from scratch, by masking ratio in ascending order."""

    at_least: int = 1

    def find(self, line: ModelGroup, study: ComparableModels) -> dict[Length, Chosen]:
        by_steps: dict[int, dict[float, Model]] = {}
        for model in line.finals("mlm"):
            if model.recipe.ratio is not None:
                by_steps.setdefault(model.recipe.steps, {})[model.recipe.ratio] = model
        return {
            (0, steps): tuple(model for _, model in sorted(models.items()))
            for steps, models in by_steps.items()
            if len(models) >= self.at_least
        }


@dataclass(frozen=True)
class AcrossSizes:
    """One case for each group of sizes, made of the cases of a `Select` at each size."""

    select: Select
    at_least: int = 1  # sizes
    equal_steps: bool = False  # at the length that most sizes have; of several such, the longest

    def cases(self, study: ComparableModels) -> list[Case]:
        cases = []
        for group in study.groups:
            lines, only = self._at_equal_steps(group, study) if self.equal_steps else (group, None)
            sizes = [case for line in lines for case in self.select.at(line, study, only)]
            if len(sizes) >= self.at_least:
                models = tuple(model for case in sizes for model in case.models)
                cases.append(replace(sizes[0], models=models, sizes=tuple(sizes)))
        return cases

    def _at_equal_steps(self, group: Group, study: ComparableModels) -> tuple[Sequence[ModelGroup], int]:
        by_steps: dict[int, list[ModelGroup]] = {}
        for line in group:
            for steps in together(self.select.models, line, study) if line.parameters else ():
                by_steps.setdefault(steps, []).append(line)
        steps = max(by_steps, key=lambda steps: (len(by_steps[steps]), steps), default=0)
        return by_steps.get(steps, []), steps
