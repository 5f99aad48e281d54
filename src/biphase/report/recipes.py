"""What a result is, as a claim asks for it: its size, what it was asked in which order, for how long. From specs alone.

Names play no part. Two results are comparable if they differ in nothing but what the comparison is about, so
everything else that shapes a model is summed up in one word, its `setting`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from biphase.keys import decay_start, label, origin_step, phases
from biphase.presets import corpus_of
from biphase.records import content_key, encode
from biphase.specs import CLM, MLM, Hub, Objective, Pretrain
from biphase.study.costs import shape_of
from biphase.study.plan import Plan, TrainingJob

Kind = Literal["start", "clm", "mlm", "clm-mlm", "other"]
Shares = dict[str, list[float]]  # warmup, decay → the shares it takes, where these are its rule and not steps
SETTING = ("packing", "batch_tokens", "optimizer", "precision", "optimizer_state", "data")
SHAPE = ("layers", "hidden", "heads", "kv_heads", "ffn")  # what makes a size a size


@dataclass(frozen=True)
class RecipePhase:
    """An objective over steps, counted from the root."""

    objective: Objective
    first: int
    until: int

    @property
    def steps(self) -> int:
        return self.until - self.first

    @property
    def label(self) -> str:
        return label(self.objective)


@dataclass(frozen=True)
class Recipe:
    """How a result was made."""

    size: str
    parameters: int | None  # embedding and head included; None: not known without a download
    spans: tuple[RecipePhase, ...]  # from the root to here
    tokens: int
    decayed: bool  # the end of a run: its learning rate has come down
    of: int  # steps from the root to the end of the run this is a step of
    base: Recipe | None  # the decayed end it was continued from
    setting: str  # equal: nothing else differs but size, objectives, steps, and the seed
    seed: int  # of the first run on the way: another one is another draw of all of it
    shape: str = ""  # equal: the same layers and widths, whatever the size is called

    @property
    def steps(self) -> int:
        return self.spans[-1].until if self.spans else 0

    @property
    def final(self) -> bool:
        """The end of a run, and no checkpoint on the way to one."""
        return self.steps == self.of

    @property
    def own(self) -> tuple[RecipePhase, ...]:
        """The spans since the base, or all."""
        before = self.base.steps if self.base else 0
        return tuple(
            RecipePhase(one.objective, max(one.first, before), one.until)
            for one in self.spans
            if one.until > before
        )

    @property
    def kind(self) -> Kind:
        return kind_of(self.own)

    @property
    def causal_share(self) -> float:
        """The share of its own steps that were causal."""
        total = sum(one.steps for one in self.own)
        return sum(one.steps for one in self.own if isinstance(one.objective, CLM)) / total if total else 0.0

    @property
    def ratio(self) -> float | None:
        """The masking ratio of its last masked span, if it is one number and plainly MLM."""
        last = next((one.objective for one in reversed(self.own) if isinstance(one.objective, MLM)), None)
        return last.ratio if type(last) is MLM and isinstance(last.ratio, float) else None

    @property
    def continued(self) -> int:
        """Steps since the base; 0 if it was made in one go."""
        return self.steps - self.base.steps if self.base else 0

    def words(self) -> str:
        """As a person says it: 610m · CLM for 10,000 steps, then MLM 40% for 32,000."""
        if not self.spans:
            return f"{self.size} · as it is"
        first, *others = (f"{named(one.label)} for {one.steps:,}" for one in self.own)
        path = ", then ".join([f"{first} steps", *others])
        path = f"{path}, continued after {self.base.words().split(' · ', 1)[1]}" if self.base else path
        way = f"on the way to {self.of:,}, " if self.steps < self.of else ""
        return f"{self.size} · {path}{'' if self.decayed else f' ({way}not decayed)'}"


@dataclass(frozen=True)
class Model:
    """Results that differ in nothing but the seed of their pretraining: several draws of one recipe."""

    name: str  # of the first
    recipe: Recipe
    results: tuple[str, ...]  # in order of their seeds
    seeds: tuple[int, ...]


def named(objective: str) -> str:
    """A label of an objective as reports write it: mlm 40% as MLM 40%, and mlm40 alike."""
    word, *ratio = re.split(r"(?<=[a-z]) ?(?=\d)", objective, maxsplit=1)
    sign = "%" if ratio and re.fullmatch(r"[\d.]+", ratio[0]) else ""
    return " ".join([word.upper(), *ratio]) + sign


def kind_of(spans: tuple[RecipePhase, ...]) -> Kind:
    masked = [type(one.objective) is MLM for one in spans]
    causal = [isinstance(one.objective, CLM) for one in spans]
    if not spans:
        return "start"
    if causal == [True]:
        return "clm"
    if masked == [True]:
        return "mlm"
    return "clm-mlm" if len(spans) == 2 and causal[0] and masked[1] else "other"


def models(plan: Plan) -> dict[str, Model]:
    """The models of a plan by name, in the order of its results. Two names of one state are one model, the first."""
    groups: dict[tuple[object, ...], dict[int, str]] = {}
    recipes: dict[str, Recipe] = {}
    shares = _shares(plan)
    names: dict[str, list[str]] = {}
    for name, at in plan.results.items():
        names.setdefault(at, []).append(name)
    for first, *others in names.values():
        # A checkpoint that several runs pass through speaks for the longest: it lies on the way to all of them.
        known = [_recipe(*_made_by(plan, name), shares=shares) for name in (first, *others)]
        recipe = recipes[first] = max(known, key=lambda one: one.of)
        same = alike(recipe)
        # Of one recipe and one seed there is one state; if not, something differs that a recipe does not tell.
        number = next(n for n in range(len(names)) if recipe.seed not in groups.get((n, *same), {}))
        groups.setdefault((number, *same), {})[recipe.seed] = first
    made = {}
    for by_seed in groups.values():
        results = tuple(by_seed[seed] for seed in sorted(by_seed))
        made[results[0]] = Model(results[0], recipes[results[0]], results, tuple(sorted(by_seed)))
    order = {name: place for place, name in enumerate(plan.results)}
    return dict(sorted(made.items(), key=lambda one: min(order[name] for name in one[1].results)))


def recipe_of(plan: Plan, result: str) -> Recipe:
    return _recipe(*_made_by(plan, result), shares=_shares(plan))


def recipe_at(plan: Plan, job: TrainingJob, *, to_end: bool) -> Recipe:
    """The recipe that a state is on the way of: up to it, or to the end of its run."""
    return _recipe(job.run, job.run.steps if to_end else job.step, shares=_shares(plan))


def _made_by(plan: Plan, result: str) -> tuple[Pretrain, int]:
    """The run that has this result, and its step: other runs may pass through the same state on other ways."""
    for run in plan.study.runs:
        steps = {f"{run.name}-{step}": step for step in run.keep} | {run.name: run.steps}
        if result in steps:
            return run, steps[result]
    raise KeyError(result)


def alike(recipe: Recipe) -> tuple[object, ...]:
    """What all draws of one recipe share."""
    bases, at = [], recipe.base
    while at:  # the same spans with a decay between them are another recipe
        bases.append(at.steps)
        at = at.base
    return recipe.size, recipe.shape, recipe.spans, recipe.of, recipe.setting, tuple(bases)


def _recipe(run: Pretrain, step: int, *, shares: Shares) -> Recipe:
    before = origin_step(run)
    start = _recipe(run.start, run.start.steps, shares=shares) if isinstance(run.start, Pretrain) else None
    own = [
        RecipePhase(phase.objective, before + phase.first, before + min(phase.until, step))
        for phase in phases(run)
        if phase.first < step
    ]
    shape = shape_of(run) if run.corpus or isinstance(run.start, Hub) else None
    root = _root(run)
    return Recipe(
        size=_size(root),
        parameters=shape.parameters if shape and shape.vocab else None,
        spans=_merged((*(start.spans if start else ()), *own)),
        tokens=(start.tokens if start else 0) + step * run.batch_tokens,
        decayed=step == run.steps and (decay_start(run) < run.steps or not run.stages),
        of=before + run.steps,
        # To go on from a rate that never came down is to have gone on all the time.
        base=start if start is None or start.decayed else start.base,
        setting=_setting(run, shares=shares),
        seed=root.seed,
        shape=shape_key(root.start),
    )


def _merged(spans: tuple[RecipePhase, ...]) -> tuple[RecipePhase, ...]:
    """Equal neighbours as one, unless their masking ratio counts steps from where each began."""
    made: list[RecipePhase] = []
    for one in spans:
        moves = isinstance(one.objective, MLM) and not isinstance(one.objective.ratio, float)
        if made and made[-1].objective == one.objective and not moves:
            made[-1] = RecipePhase(one.objective, made[-1].first, one.until)
        else:
            made.append(one)
    return tuple(made)


def shape_key(start: object) -> str:
    """Equal for sizes with the same layers and widths."""
    return content_key([getattr(start, name, "") for name in SHAPE])


def _root(run: Pretrain) -> Pretrain:
    return _root(run.start) if isinstance(run.start, Pretrain) else run


def _size(root: Pretrain) -> str:
    start = root.start
    return (
        start.source.rstrip("/").rsplit("/", 1)[-1] if isinstance(start, Hub) else getattr(start, "name", "")
    )


def _shares(plan: Plan) -> Shares:
    """Is a warmup or a decay the same share of runs that differ in length, rather than the same number of steps?"""
    found: Shares = {}
    for name in ("warmup", "decay"):
        counts = {(int(getattr(run.schedule, name)), run.steps) for run in plan.study.runs if run.stages}
        counts = {(count, of) for count, of in counts if count}
        fewest = _fewest_shares(counts)
        if len(fewest) < len({count for count, _ in counts}):
            found[name] = fewest
    return found


def _fewest_shares(counts: set[tuple[int, int]]) -> list[float]:
    """The fewest shares that, rounded to whole steps, are these counts of these lengths."""
    found: list[float] = []
    for most, least in sorted(((count + 0.5) / of, (count - 0.5) / of) for count, of in counts):
        if not found or found[-1] <= least:
            found.append(most)
    return found


def _setting(run: Pretrain, *, shares: Shares) -> str:
    """Everything that shapes a model apart from its size, its objectives and their steps, and its seed.

    A run that goes on as the one before it went has that one's setting.
    """
    own, warmup = _ways(run, shares=shares), _part(run, "warmup", shares=shares)
    start = run.start
    if isinstance(start, Pretrain):
        before = _setting(start, shares=shares)
        goes_on = not warmup and own == _ways(start, shares=shares)
        return before if goes_on else content_key([before, own, warmup])
    named = (*SHAPE, "kind", "name", "precision")
    # A published model is what it is; of a size there is more to say than how large it is.
    about = (
        encode(start)
        if isinstance(start, Hub)
        else {k: v for k, v in encode(start).items() if k not in named}
    )
    return content_key([own, warmup, about])


def _ways(run: Pretrain, *, shares: Shares) -> dict[str, object]:
    """How a run trains, its warmup apart. The precision is the size's own where nothing else was said."""
    fields = {name: encode(getattr(run, name)) for name in SETTING}
    usual = run.precision == getattr(_root(run).start, "precision", "")
    return {
        **fields,
        "precision": "" if usual else run.precision,
        "corpus": encode(corpus_of(run)) if run.corpus else "",
        "peak": run.schedule.peak,
        "decay": _part(run, "decay", shares=shares),
    }


def _part(run: Pretrain, name: str, *, shares: Shares) -> float:
    """Of the schedule: a share, where that is its rule, else steps."""
    count = getattr(run.schedule, name)
    if name not in shares or not count:
        return count
    least, most = (count - 0.5) / run.steps, (count + 0.5) / run.steps
    return next((one for one in shares[name] if least < one <= most), count / run.steps)
