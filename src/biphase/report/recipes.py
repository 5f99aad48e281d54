"""How each result was pretrained: size, objectives and their steps, and a hash of everything else. From specs alone.

`models` groups the results of a plan into `Model`s: results of one recipe that differ in the pretraining seed only.
Names of runs play no part. Claims compare models that differ only in what is compared, so all other hyperparameters
are reduced to one hash, `Recipe.setting`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from biphase.presets import corpus_of
from biphase.records import content_key, encode
from biphase.specs import Config, Hub, Merge, Objective, Pretrain
from biphase.study.costs import shape_of
from biphase.study.plan import Plan, TrainingJob
from biphase.text import MASKED

Kind = Literal["start", "clm", "mlm", "clm-mlm", "mix", "other"]
KIND_OF: dict[tuple[str, ...], Kind] = {  # objectives in their order
    (): "start",
    ("clm",): "clm",
    ("mlm",): "mlm",
    ("clm", "mlm"): "clm-mlm",
    ("mix",): "mix",
}
# ("warmup" or "decay", whether of continued runs) → its shares of the run, where it scales with the run's length
Shares = dict[tuple[str, bool], list[float]]
SETTING = ("packing", "batch_tokens", "optimizer", "precision", "optimizer_state", "data")
SHAPE = ("layers", "hidden", "heads", "kv_heads", "ffn")  # the fields that define a model's shape


@dataclass(frozen=True)
class RecipePhase:
    """One objective and its steps, counted from the root: the first run of the chain."""

    objective: Objective
    first: int
    until: int

    @property
    def steps(self) -> int:
        return self.until - self.first

    @property
    def label(self) -> str:
        return self.objective.label


@dataclass(frozen=True)
class Recipe:
    """How a result was pretrained."""

    size: str
    parameters: int | None  # with embedding and head; None: not known without a download
    spans: tuple[RecipePhase, ...]  # phases from the root to this result
    tokens: int
    decayed: bool  # the end of a run whose learning rate has decayed
    of: int  # steps from the root to the end of the run that this is a checkpoint of
    base: Recipe | None  # the decayed result it was continued from
    setting: str  # equal: only size, objectives, steps and seed may differ
    seed: int  # of the root run
    shape: str = ""  # equal: the same layers and widths, whatever the size is named
    merged: str = ""  # how it, or what it continues, was averaged of others; "": it was trained alone

    @property
    def steps(self) -> int:
        return self.spans[-1].until if self.spans else 0

    @property
    def final(self) -> bool:
        """Whether this is the end of a run, not an intermediate checkpoint."""
        return self.steps == self.of

    @property
    def own(self) -> tuple[RecipePhase, ...]:
        """The phases since the base, or all phases if there is no base."""
        before = self.base.steps if self.base else 0
        spans = (span for span in self.spans if span.until > before)
        return tuple(RecipePhase(span.objective, max(span.first, before), span.until) for span in spans)

    @property
    def objectives(self) -> tuple[str, ...]:
        """The names of the objectives since the base, in their order."""
        return tuple(span.objective.name for span in self.own)

    @property
    def kind(self) -> Kind:
        return "other" if self.merged else KIND_OF.get(self.objectives, "other")

    @property
    def causal_share(self) -> float:
        """The share of the steps since the base that were trained with CLM."""
        total = sum(span.steps for span in self.own)
        return sum(span.steps for span in self.own if span.objective.causal) / total if total else 0.0

    @property
    def causal_rows(self) -> float:
        """The share of the rows since the base that are causal, also those of mixtures."""
        rows = sum(span.steps * span.objective.causal_share(0, span.steps) for span in self.own)
        return rows / self.own_steps if self.own else 0.0

    @property
    def ratio(self) -> float | None:
        """The masking ratio of the last MLM phase; None if it varies, of a variant of MLM, and of a merged model."""
        if self.merged:
            return None
        last = next((span.objective for span in reversed(self.own) if not span.objective.causal), None)
        return last.constant_ratio if last and last.name == "mlm" else None

    @property
    def continued(self) -> int:
        """Steps since the base; 0 if there is no base."""
        return self.steps - self.base.steps if self.base else 0

    @property
    def own_steps(self) -> int:
        """Steps since the base, or all steps if there is no base."""
        return self.continued or self.steps

    @property
    def bases(self) -> tuple[int, ...]:
        """The steps of its bases: the same phases with a decay between them are another recipe."""
        return (self.base.steps, *self.base.bases) if self.base else ()

    def words(self) -> str:
        """The recipe as text: "610m · CLM for 10,000 steps, then MLM 40% for 32,000"."""
        if self.merged and not self.base:
            return f"{self.size} · mean of {self.merged}"
        if not self.spans:
            return f"{self.size} · as it is"
        first, *others = (f"{named(span.label)} for {span.steps:,}" for span in self.own)
        path = ", then ".join([f"{first} steps", *others])
        path = f"{path}, continued after {self.base.words().split(' · ', 1)[1]}" if self.base else path
        toward = f"on the way to {self.of:,}, " if self.steps < self.of else ""
        return f"{self.size} · {path}{'' if self.decayed else f' ({toward}not decayed)'}"


@dataclass(frozen=True)
class Model:
    """Results that differ only in the seed of their pretraining: several samples of one recipe."""

    name: str  # the name of the first result
    recipe: Recipe
    results: tuple[str, ...]  # ordered by seed
    seeds: tuple[int, ...]


class Published:
    """Numbers that papers print for their models, looked up by recipe.

    `contrasts` are printed values of a claim's contrast by claim and name of the size, where they do not follow from
    means over families; a paper with more than that overrides the lookups.
    """

    def __init__(self, contrasts: Mapping[tuple[str, str], float] | None = None):
        self.contrasts = contrasts or {}

    def family_mean(self, recipe: Recipe, family: str) -> float | None:
        """The printed mean of this recipe over the datasets of a family, in percent; None if there is none."""
        return None

    def at_rates(self, recipe: Recipe, task: str) -> dict[float, float]:
        """The printed scores of this recipe on one dataset by learning rate, in percent."""
        return {}

    def gaps(self) -> dict[str, list[tuple[tuple[float, ...], float]]]:
        """Family → MLM − CLM of a model at several budgets: (tokens per parameter of its blocks, tokens, steps), points."""
        return {}

    def contrast(self, claim: str, recipe: Recipe) -> float | None:
        """The printed value of a claim's contrast at this recipe, where it does not follow from family means."""
        return self.contrasts.get((claim, recipe.size))


def named(objective: str) -> str:
    """Format an objective's label for reports: both "mlm 40%" and "mlm40" become "MLM 40%"."""
    if objective.startswith("mix "):  # the names of what is mixed, too
        return re.sub(r"\b(mix|clm|mlm|mntp)\b", lambda name: name[0].upper(), objective)
    if objective.startswith("contrastive"):
        return objective
    word, *ratio = re.split(r"(?<=[a-z]) ?(?=\d)", objective, maxsplit=1)
    sign = "%" if word in MASKED and ratio and re.fullmatch(r"[\d.]+", ratio[0]) else ""
    return " ".join([word.upper(), *ratio]) + sign


def models(plan: Plan) -> dict[str, Model]:
    """The models of a plan by name, in the order of its results.

    Two result names of one checkpoint are one model, under the first name.
    """
    shares = _shares(plan)
    names: dict[str, list[str]] = {}
    for name, key in plan.results.items():
        names.setdefault(key, []).append(name)
    groups: dict[tuple[object, ...], dict[int, tuple[str, Recipe]]] = {}
    for several in names.values():
        # A checkpoint that several runs share is an intermediate checkpoint of the longest of them.
        recipes = [_recipe(*run_of(plan, name), shares) for name in several]
        recipe = max(recipes, key=lambda recipe: recipe.of)
        # One recipe and seed should give one checkpoint. A second one differs in something that `Recipe` does not
        # hold, so it starts another group.
        keys = ((number, *alike(recipe)) for number in itertools.count())
        key = next(key for key in keys if recipe.seed not in groups.get(key, {}))
        groups.setdefault(key, {})[recipe.seed] = several[0], recipe
    found = {}
    for by_seed in groups.values():
        seeds = tuple(sorted(by_seed))
        name, recipe = by_seed[seeds[0]]
        found[name] = Model(name, recipe, tuple(by_seed[seed][0] for seed in seeds), seeds)
    return found


def recipe_of(plan: Plan, result: str) -> Recipe:
    """The recipe of a result, by name."""
    return _recipe(*run_of(plan, result), _shares(plan))


def recipe_at(plan: Plan, job: TrainingJob, *, to_end: bool) -> Recipe:
    """The recipe of a training job: up to the job's checkpoint, or to the end of its run."""
    return _recipe(job.run, job.run.steps if to_end else job.step, _shares(plan))


def run_of(plan: Plan, result: str) -> tuple[Pretrain, int]:
    """The run that has this result, and its step. Another run may reach the same checkpoint by another name."""
    for run in plan.study.runs:
        if result in run.results:
            return run, run.results[result]
    raise KeyError(result)


def alike(recipe: Recipe) -> tuple[object, ...]:
    """Everything that the results of one model have in common."""
    return recipe.size, recipe.shape, recipe.spans, recipe.of, recipe.setting, recipe.bases, recipe.merged


def _recipe(run: Pretrain, step: int, shares: Shares) -> Recipe:
    """The recipe of a run at one of its steps."""
    before, root = run.origin_step, run.root
    parts = [_recipe(part.run, part.step, shares) for part in run.sources]
    start = parts[0] if parts else None
    if start and isinstance(run.start, Merge):  # what it has learned is told as by its longest part
        start = replace(start, base=None, decayed=True, of=start.steps, merged=_mean(run.start, parts))
    phases = [phase for phase in run.phases if phase.first < step]
    own = [
        RecipePhase(phase.objective, before + phase.first, before + min(phase.until, step))
        for phase in phases
    ]
    shape = shape_of(run) if run.corpus or isinstance(run.start, Hub) else None
    address = root.start.source.rstrip("/") if isinstance(root.start, Hub) else ""
    return Recipe(
        size=address.rsplit("/", 1)[-1] or getattr(root.start, "name", ""),
        parameters=shape.parameters if shape and shape.vocab else None,
        spans=_merged((*(start.spans if start else ()), *own)),
        tokens=(start.tokens if start else 0)
        + sum((min(one.until, step) - one.first) * run.reads_at(one.first)[1] for one in phases),
        decayed=step == run.steps and (run.decay_start < run.steps or not run.stages),
        of=before + run.steps,
        # Continuing from a checkpoint that was not decayed is the same as one longer run.
        base=start if start is None or (start.decayed and (step or run.parent)) else start.base,
        setting=_setting(run, shares),
        seed=root.seed,
        shape=shape_key(root.start),
        merged=start.merged if start else "",
    )


def _mean(start: Merge, parts: list[Recipe]) -> str:
    """What is averaged, as text: "0.5 × CLM for 200 steps + 0.5 × MLM 40% for 200 steps"; steps alone, of one run."""
    weights = [f"{dict(zip(start.parts, start.weights, strict=True))[part]:.4g}" for part in start.by_steps]
    if len({part.run for part in start.parts}) == 1:
        steps = [f"{weight} × {part.step:,}" for part, weight in zip(start.by_steps, weights, strict=True)]
        if len({*weights}) == 1:
            steps = [f"{part.step:,}" for part in start.by_steps]
        path = ", then ".join(f"{named(span.label)} for {span.steps:,}" for span in parts[0].own)
        return f"steps {', '.join(steps)} of {path} steps"
    texts = (recipe.words().split(" · ", 1)[1] for recipe in parts)
    return " + ".join(f"{weight} × {text}" for weight, text in zip(weights, texts, strict=True))


def _merged(spans: tuple[RecipePhase, ...]) -> tuple[RecipePhase, ...]:
    """Merge adjacent phases of one objective, unless its masking ratio is a schedule that restarts with each phase."""
    merged: list[RecipePhase] = []
    for span in spans:
        if merged and merged[-1].objective == span.objective and not span.objective.restarts:
            merged[-1] = RecipePhase(span.objective, merged[-1].first, span.until)
        else:
            merged.append(span)
    return tuple(merged)


def shape_key(start: object) -> str:
    """A hash of a model's layers and widths."""
    names = ("config",) if isinstance(start, Config) else SHAPE
    return content_key([getattr(start, name, "") for name in names])


def _shares(plan: Plan) -> Shares:
    """Find whether warmup and decay are shares of a run's length in this study, rather than numbers of steps.

    They are where fewer shares than counts, rounded to whole steps, give the counts of all runs. Continued runs are
    looked at by themselves: by default they inherit a number of steps.
    """
    found: Shares = {}
    for name, continued in itertools.product(("warmup", "decay"), (False, True)):
        runs = [run for run in plan.study.runs if run.stages and bool(run.sources) == continued]
        counts = {(int(getattr(run.schedule, name)), run.steps) for run in runs}
        counts = {(count, of) for count, of in counts if count}
        fewest: list[float] = []
        for most, least in sorted(((count + 0.5) / of, (count - 0.5) / of) for count, of in counts):
            if not fewest or fewest[-1] <= least:
                fewest.append(most)
        if len(fewest) < len({count for count, _ in counts}):
            found[name, continued] = fewest
    return found


def setting_of(plan: Plan, result: str, ignoring: Collection[str]) -> str:
    """The setting of a result's run as in `Recipe.setting`, without the hyperparameters that `ignoring` names.

    "merge" ignores that a run was averaged of others: it is then told as by its longest part.
    """
    return _setting(run_of(plan, result)[0], _shares(plan), ignoring)


def _setting(run: Pretrain, shares: Shares, ignoring: Collection[str] = ()) -> str:
    """Hash everything that shapes a model except its size, objectives, steps and seed.

    A run that continues another with unchanged hyperparameters has the same hash as that run.
    """
    own, start = _hyperparameters(run, shares, ignoring), run.start
    warmup = 0 if "warmup" in ignoring else _part(run, "warmup", shares)
    if isinstance(start, Merge) and "merge" in ignoring:
        return _setting(run.sources[0].run, shares, ignoring)
    if isinstance(start, Pretrain):
        before = _setting(start, shares, ignoring)
        goes_on = not warmup and own == _hyperparameters(start, shares, ignoring)
        return before if goes_on else content_key([before, own, warmup])
    if isinstance(start, Merge):
        parts = [_setting(part.run, shares, ignoring) for part in run.sources]
        return content_key([parts, sorted(start.weights), own, warmup])
    # A published model is identified by its whole record; of a size, the shape and name are left out here
    # because `Recipe` has them in its own fields.
    named = () if isinstance(start, Hub) else (*SHAPE, "config", "kind", "name", "precision")
    about = {name: value for name, value in encode(start).items() if name not in named}
    if isinstance(start, Config):
        about["model_type"] = start.fields["model_type"]
    return content_key([own, warmup, about])


def _hyperparameters(run: Pretrain, shares: Shares, ignoring: Collection[str]) -> dict[str, object]:
    """The hyperparameters of a run except its warmup. A precision equal to the size's default is left empty."""
    usual = run.precision == getattr(run.root.start, "precision", "")
    every = {
        **{name: encode(getattr(run, name)) for name in SETTING},
        "precision": "" if usual else run.precision,
        "corpus": encode(corpus_of(run)) if run.corpus else "",
        "peak": run.first_peak,
        "decay": _part(run, "decay", shares),
        **run.unusual,
    }
    return {name: value for name, value in every.items() if name not in ignoring}


def _part(run: Pretrain, name: str, shares: Shares) -> float:
    """One part of the schedule: a share of the run where the study uses shares, otherwise steps."""
    count = getattr(run.schedule, name)
    known = shares.get((name, bool(run.sources)))
    if known is None or not count:
        return count
    least, most = (count - 0.5) / run.steps, (count + 0.5) / run.steps
    return next((one for one in known if least < one <= most), count / run.steps)
