"""Which models of a study may be compared: lines of one size and one setting. From recipes alone, before any score.

    line    models that differ in nothing but their objectives, their steps, and the seeds of one recipe
    group   lines that differ in size alone
    bench   everything a claim looks through: the groups of a study and the tasks it is scored on

Models that began from a published one belong to no line: what they saw before is not known. A study's own claims may
name them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from biphase.keys import decay_start
from biphase.presets import corpus_of
from biphase.report.recipes import SETTING, Kind, Model, models
from biphase.specs import MLM, Family, Fewer, Finetune, Hub, Pretrain, Task
from biphase.specs.tasks import FAMILIES
from biphase.study.plan import Plan
from biphase.wording import short

USUAL = 0.4  # the masking ratio of the paper's comparisons
WINDOW = 0.05  # a split of 25% is any between 20% and 30%


@dataclass(frozen=True)
class Line:
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


Group = tuple[Line, ...]  # smallest size first


@dataclass(frozen=True)
class Bench:
    """What the claims of a study can be tested with."""

    plan: Plan
    models: dict[str, Model]
    groups: tuple[Group, ...]
    tasks: dict[str, Task]

    @property
    def lines(self) -> list[Line]:
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


def bench(plan: Plan, known: dict[str, Model] | None = None) -> Bench:
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
    return Bench(plan, known, tuple(_group(plan, *groups[key], about=key[0]) for key in groups), tasks)


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
        Line(
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
    state = plan.states.get(plan.results[model.results[0]])
    return state is not None and not model.recipe.final and state.step <= decay_start(state.run)


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
        "moments": f"moments {run.moments}",
        "data": f"data {run.data}",
    }
    return {name: str(value) for name, value in said.items()}


def _is(ratio: float | None, wanted: float) -> bool:
    return ratio is not None and math.isclose(ratio, wanted)
