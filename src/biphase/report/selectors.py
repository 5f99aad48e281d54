"""Selectors: which models of a study may be compared, found by recipe and never by name.

`comparable_models` sorts the models of a plan into `ModelGroup`s (one size, one set of other hyperparameters), and
these into `Group`s (the same hyperparameters at several sizes). A `Selector` finds models of one kind in a
`ModelGroup`: CLM from scratch, MLM at a ratio, a split, a continued base. A `Select` combines selectors into `Case`s:
the models that one test compares, at equal steps. `Compare` finds models by any description of their recipe and run, and
may let them differ in hyperparameters that a claim is about. A paper may have selectors of its own: those of
gisserot2025 are in its measures.py.

All of it needs recipes only, so `biphase plan` can list the tests of a study before any score exists. Models that
start from a published checkpoint belong to no group, because their earlier training data is not known. `Compare` and a
study's own claims find them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from biphase.presets import corpus_of
from biphase.report.evidence import by_family
from biphase.report.recipes import Kind, Model, Recipe, models, run_of, setting_of
from biphase.specs import Family, Fewer, Finetune, Hub, Pretrain, Task
from biphase.study.plan import Plan
from biphase.text import short


@dataclass(frozen=True)
class ModelGroup:
    """Models of one size and one set of other hyperparameters."""

    size: str
    parameters: int | None
    about: str  # what distinguishes it where a study has several settings: "as hot-mlm", a result of it
    models: tuple[Model, ...]
    plateau: frozenset[str]  # names of models whose learning rate has not begun to decay

    @property
    def title(self) -> str:
        return " · ".join(filter(None, (self.size, self.about)))

    def finals(self, kind: Kind) -> list[Model]:
        """Models at the end of a run from scratch."""
        ends = (model for model in self.models if model.recipe.final and model.recipe.base is None)
        return [model for model in ends if model.recipe.kind == kind]


Group = tuple[ModelGroup, ...]  # smallest size first


@dataclass(frozen=True)
class ComparableModels:
    """The models and tasks that the claims of a study can be tested with."""

    plan: Plan
    models: dict[str, Model]
    groups: tuple[Group, ...]
    tasks: dict[str, Task]

    @property
    def families(self) -> dict[Family, tuple[str, ...]]:
        return by_family(self.tasks)

    @property
    def finetune(self) -> Finetune | None:
        return self.plan.study.finetune

    @property
    def fewer(self) -> Fewer | None:
        """The reduced fine-tuning of intermediate checkpoints, if the study has one."""
        return self.finetune.on_the_way if self.finetune else None

    def plans(self, models: Iterable[Model], tasks: Iterable[str]) -> bool:
        """Whether all of these models are planned to be scored on all of these tasks."""
        intermediate = any(not model.recipe.final for model in models)
        return self.fewer is None or not intermediate or set(tasks) <= set(self.fewer.tasks)

    def seeds(self, models: Iterable[Model]) -> int:
        """The number of fine-tuning seeds that all of these models have."""
        intermediate = any(not model.recipe.final for model in models)
        grid = self.fewer if self.fewer and intermediate else self.finetune
        return len(grid.seeds) if grid else 0

    def of_result(self, result: str) -> Model:
        """The model that a result belongs to. Two names of one checkpoint are one model."""
        keys = self.plan.results
        return next(
            model for model in self.models.values() if keys[result] in [keys[name] for name in model.results]
        )


def comparable_models(plan: Plan, known: dict[str, Model] | None = None) -> ComparableModels:
    """Sort the models of a plan into comparable groups; `known` avoids recomputing its models."""
    known = models(plan) if known is None else known
    finetune = plan.study.finetune
    tasks = {task.name: task for task in finetune.tasks} if finetune else {}
    runs = {model.name: run_of(plan, model.results[0])[0] for model in known.values()}
    scratch = [model for model in known.values() if not isinstance(runs[model.name].root.start, Hub)]
    groups: list[Group] = []
    for setting, about in _settings(scratch).items():
        members = [model for model in scratch if model.recipe.setting == setting]
        rules = sorted({rule for model in members for rule in _masking_rules(model)})
        for rule in rules or [""]:
            title = " · ".join(filter(None, (about, f"masks {rule}" if len(rules) > 1 else "")))
            alike = [model for model in members if _masking_rules(model) <= {rule}]
            groups.append(_group(plan, alike, title))
    return ComparableModels(plan, known, tuple(groups), tasks)


def _group(plan: Plan, members: list[Model], about: str) -> Group:
    """Sort models of one setting by size and shape into `ModelGroup`s."""
    by_size: dict[tuple[str, str], list[Model]] = {}
    for model in members:
        by_size.setdefault((model.recipe.size, model.recipe.shape), []).append(model)
    plateau = frozenset(model.name for model in members if _on_plateau(plan, model))
    names = [name for name, _ in by_size]
    lines = []
    for (name, _), some in by_size.items():
        parameters = some[0].recipe.parameters
        # Two shapes under one name are distinguished by their parameters.
        size = f"{name} of {short(parameters or math.nan)}" if names.count(name) > 1 else name
        lines.append(ModelGroup(size, parameters, about, tuple(some), plateau))
    return tuple(sorted(lines, key=lambda line: (line.parameters or math.inf, line.size)))


def _on_plateau(plan: Plan, model: Model) -> bool:
    job = plan.jobs.get(plan.results[model.results[0]])
    return job is not None and not model.recipe.final and job.step <= job.run.decay_start


def _masking_rules(model: Model) -> set[str]:
    """The replacement shares of its MLM phases, as "mask/random/kept" in percent."""
    return {span.objective.rule for span in model.recipe.spans if span.objective.name == "mlm"}


def _settings(members: Iterable[Model]) -> dict[str, str]:
    """What titles say of each setting: nothing of a single one, "continued" where that tells them apart, or a result."""
    of: dict[str, list[Model]] = {}
    for model in members:
        of.setdefault(model.recipe.setting, []).append(model)
    trained = {setting: some for setting, some in of.items() if any(model.recipe.spans for model in some)}
    about = dict.fromkeys(of, "")
    if len(trained) < 2:
        return about
    continued = {
        setting: "continued" if all(model.recipe.base for model in some if model.recipe.spans) else ""
        for setting, some in trained.items()
    }
    if len(set(continued.values())) == len(trained):
        return about | continued
    return about | {setting: f"as {some[0].name}" for setting, some in trained.items()}


# ---------------------------------------------------------------- selectors


Length = tuple[int, int]  # (steps of the decayed base, steps since); from scratch: (0, steps)
Chosen = Any  # a model, several models in order (`Ratios`), or None if the study does not have it (`BaseOf`)


class Selector(ABC):
    """Finds models of one kind in a group."""

    @abstractmethod
    def find(self, line: ModelGroup, study: ComparableModels) -> dict[Length, Chosen]:
        """The models by their number of steps."""


@dataclass(frozen=True)
class Recipes(Selector):
    """Models of one kind of recipe at the end of their run: CLM, MLM at a ratio, CLM then MLM, a continued base."""

    kind: Literal["clm", "mlm", "clm-mlm"]  # since the base, if there is one
    ratio: float | None = None  # of MLM, also of an MLM base
    share: float | None = None  # of steps trained with CLM first, within `window`; the nearest wins
    base: Literal["clm", "mlm"] | None = None  # continued from such a decayed base; None: from scratch
    window: float = 0.05
    before_decay: bool = False  # intermediate checkpoints instead

    def find(self, line: ModelGroup, study: ComparableModels) -> dict[Length, Chosen]:
        # Later entries replace earlier ones: the nearest share wins; of two equally near, the lower one.
        models = sorted(
            (model for model in line.models if self._fits(model, line)),
            key=lambda model: (-round(self._distance(model), 6), -model.recipe.causal_share),
        )
        recipes = [model.recipe for model in models]
        lengths = [(recipe.steps - recipe.own_steps, recipe.own_steps) for recipe in recipes]
        return dict(zip(lengths, models, strict=True))

    def _fits(self, model: Model, line: ModelGroup) -> bool:
        recipe, base = model.recipe, model.recipe.base
        ended = model.name in line.plateau if self.before_decay else recipe.final
        if not ended or recipe.kind != self.kind or self._distance(model) > self.window + 1e-9:
            return False
        if self.kind != "clm" and not _same(recipe.ratio, self.ratio):
            return False
        if base is None or self.base is None:
            return base is None and self.base is None
        usual = base.base is None and base.decayed and base.kind == self.base
        return usual and (self.base == "clm" or _same(base.ratio, self.ratio))

    def _distance(self, model: Model) -> float:
        return 0.0 if self.share is None else abs(model.recipe.causal_share - self.share)


def _same(ratio: float | None, other: float | None) -> bool:
    return ratio is not None and other is not None and math.isclose(ratio, other)


def percent(ratio: float) -> str:
    return f"{ratio * 100:g}%"


def shares(model: Model) -> str:
    """The shares of CLM and MLM in a two-stage recipe: "24-76"."""
    causal = round(model.recipe.causal_share * 100)
    return f"{causal}-{100 - causal}"


# ---------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """The models that one test compares, and what its title says of them."""

    study: ComparableModels
    line: ModelGroup = ModelGroup("", None, "", (), frozenset())
    models: tuple[Chosen, ...] = ()
    steps: tuple[int, ...] = ()
    when: str = ""
    curve: tuple[tuple[Chosen, ...], ...] = ()  # the same models at every length that all of them have
    sizes: tuple[Case, ...] = ()  # of a case of several sizes: that of each

    def fields(self) -> dict[str, Any]:
        """What patterns of titles may name."""
        small, large = [case.line.size for case in ends(self.sizes)] or ["", ""]
        several = self.sizes or (self.models[0] if isinstance(self.models[0], tuple) else self.models)
        return {
            "line": self.line.title,
            "about": f" · {self.line.about}" if self.line.about else "",
            "shares": tuple(shares(model) if isinstance(model, Model) else "" for model in self.models),
            "when": self.when,
            "count": len(several),
            "rates": len(self.study.finetune.lrs) if self.study.finetune else 0,
            "small": small,
            "large": large,
        }


def ends(sizes: tuple[Case, ...]) -> tuple[Case, ...]:
    """The smallest and the largest of several sizes, of those as long as the largest; empty if there is one."""
    equal = [case for case in sizes if case.line.parameters and case.steps == sizes[-1].steps]
    return (equal[0], equal[-1]) if len(equal) > 1 else ()


Slice = tuple[int | None, int | None]
LONGEST: Slice = (-1, None)
SECOND_LONGEST: Slice = (-2, -1)
EACH_SHORTER: Slice = (None, -1)


@dataclass(frozen=True)
class Select:
    """The models that a test compares: one for each selector, at a number of steps that all of them have.

    Of the steps that all have, `within` keeps those that lie between two shares of the longest run (the upper one
    included), and `steps` selects from these, in ascending order. There is one case for each of them.
    """

    models: tuple[Selector, ...]
    steps: Slice = LONGEST
    within: tuple[float, float] = (0.0, math.inf)
    before: bool = False  # one case only, of the models at the last of these steps, then at the one before
    sizes: Literal["each", "smallest", "larger", "all but the smallest"] = "each"
    then: tuple[Selector, ...] = ()  # further models, at the next number of steps that all of these have
    seeds: int = 1  # pretraining seeds that they share, at least
    when: str = ""  # a pattern: "after {0:,} steps"

    def cases(self, study: ComparableModels) -> list[Case]:
        lines = [line for group in study.groups for line in self._lines(group, study)]
        return [case for line in lines for case in self.at(line, study)]

    def at(self, line: ModelGroup, study: ComparableModels, only: int | None = None) -> list[Case]:
        """The cases of one size; `only`: at this number of steps."""
        models = together(self.models, line, study)
        later = together(self.then, line, study) if self.then else {}
        cases = []
        for steps in self._steps(models, line, study) if only is None else [(only,)]:
            compared = tuple(model for length in steps for model in models[length])
            end = [length for length in later if length > steps[-1]][:1]
            if None in compared or (self.then and not end):
                continue
            compared += tuple(model for length in end for model in later[length])
            when, curve = self.when.format(*steps), tuple(models.values())
            cases.append(Case(study, line, compared, (*steps, *end), when, curve))
        return cases

    def _steps(
        self, models: dict[int, tuple[Chosen, ...]], line: ModelGroup, study: ComparableModels
    ) -> list[tuple[int, ...]]:
        """The steps of every case."""
        low, high = (share * self._longest_run(line, study) for share in self.within)
        lengths = [
            steps
            for steps, some in models.items()
            if low < steps <= high and (self.seeds == 1 or _shared_seeds(some) >= self.seeds)
        ]
        if self.before:
            return [(lengths[-1], lengths[-2])] if len(lengths) > 1 else []
        return [(steps,) for steps in lengths[slice(*self.steps)]]

    def _lines(self, group: Group, study: ComparableModels) -> Group:
        if self.sizes == "each" or (self.sizes == "all but the smallest" and len(group) == 1):
            return group
        if self.sizes == "all but the smallest":
            return group[1:]
        having = tuple(line for line in group if together(self.models, line, study))
        return having[:1] if self.sizes == "smallest" else having[1:]

    def _longest_run(self, line: ModelGroup, study: ComparableModels) -> int:
        """The steps of the longest run with one of the recipes; if none has ended, of the longest planned."""
        recipes = [selector for selector in self.models if isinstance(selector, Recipes)]
        finals = [replace(selector, before_decay=False) for selector in recipes]
        ends = [steps for selector in finals for _, steps in selector.find(line, study)]
        planned = [model.recipe.of for selector in recipes for model in selector.find(line, study).values()]
        return max(ends or planned, default=1)


def together(
    selectors: tuple[Selector, ...], line: ModelGroup, study: ComparableModels
) -> dict[int, tuple[Chosen, ...]]:
    """The models of all selectors by the steps that all of them have; of continued models, after the longest base."""
    models = [selector.find(line, study) for selector in selectors]
    shared = sorted(set.intersection(*map(set, models)))
    base = max((length[0] for length in shared), default=0)
    return {
        length[1]: tuple(by_length[length] for by_length in models) for length in shared if length[0] == base
    }


def _shared_seeds(models: tuple[Chosen, ...]) -> int:
    return len(set.intersection(*(set(model.seeds) for model in models)))


# ---------------------------------------------------------------- models by description


@dataclass(frozen=True)
class Which:
    """Models that fit a description: one, or `at_least` so many in ascending order of `order`."""

    fits: Callable[[Recipe, Pretrain], bool]
    at_least: int = 0  # 0: exactly one, the first of several
    order: Callable[[Recipe, Pretrain], float] = lambda recipe, run: 0.0

    def choose(self, models: list[Model], study: ComparableModels) -> Chosen:
        """The models of these that fit; None if there are too few."""
        runs = {model.name: run_of(study.plan, model.results[0])[0] for model in models}
        found = [model for model in models if self.fits(model.recipe, runs[model.name])]
        found.sort(key=lambda model: self.order(model.recipe, runs[model.name]))
        if self.at_least:
            return tuple(found) if len(found) >= self.at_least else None
        return found[0] if found else None


@dataclass(frozen=True)
class Compare:
    """One case for each set of models that fit these descriptions and are alike in everything else.

    Alike are their size, what they start from, the steps since then, and every hyperparameter that `ignoring` does not
    name: fields of a run ("corpus", "optimizer", …), "peak", "warmup", "decay", "freeze" and others of its schedule, and
    "merge". The ends of runs are compared, also of those that start from one published checkpoint.
    """

    models: tuple[Which, ...]
    ignoring: tuple[str, ...] = ()

    def cases(self, study: ComparableModels) -> list[Case]:
        sets: dict[Any, list[Model]] = {}
        for model in study.models.values():
            if model.recipe.final and model.recipe.spans:
                sets.setdefault(self._key(model.recipe, model, study), []).append(model)
        cases = []
        for members in sets.values():
            chosen = tuple(which.choose(members, study) for which in self.models)
            if None not in chosen:
                cases.append((members[0], chosen))
        about = self._about([model for model, _ in cases], study)
        return [
            Case(
                study,
                ModelGroup(model.recipe.size, None, text, (), frozenset()),
                chosen,
                (model.recipe.own_steps,),
            )
            for (model, chosen), text in zip(cases, about, strict=True)
        ]

    def _key(self, recipe: Recipe, model: Model, study: ComparableModels) -> Any:
        setting = setting_of(study.plan, model.results[0], self.ignoring)
        base = (recipe.base.spans, recipe.bases) if recipe.base else ()
        return recipe.size, recipe.shape, base, recipe.own_steps, setting

    def _about(self, models: list[Model], study: ComparableModels) -> list[str]:
        """For each case the corpus and steps, where cases differ in them; a part of its setting where that is not enough."""
        runs = [run_of(study.plan, model.results[0])[0] for model in models]
        columns = [
            [corpus_of(run).name if run.corpus and "corpus" not in self.ignoring else "" for run in runs],
            [f"{model.recipe.own_steps:,} steps" for model in models],
        ]
        shown = [column for column in columns if len(set(column)) > 1]
        texts = [", ".join(parts) for parts in zip(*shown, strict=True)] if shown else [""] * len(models)
        titles = [(model.recipe.size, text) for model, text in zip(models, texts, strict=True)]
        return [
            text if titles.count(title) == 1 else f"{text} (setting {model.recipe.setting[:6]})".strip()
            for model, text, title in zip(models, texts, titles, strict=True)
        ]
