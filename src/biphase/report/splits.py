"""The best split of a budget between CLM and MLM: which share of the steps to train with CLM first.

A `Sweep` is the models of one size and budget that differ in their share of CLM, from MLM alone (0) to the longest CLM
trunk. CLM alone is not a split: it never sees both sides of a token, and its score may lie far below that of a short
MLM stage, so a quadratic through it would describe that fall. `answer` says, for each family of tasks and for their
mean: which splits are not shown worse than the best (Hsu), where the optimum of a quadratic in the share may be, and
which splits are shown to lose less than a stated number of points (docs/statistics.md).

Only validation scores of the pretraining seeds that are not kept for confirmation (`Study.confirm`) choose. Test scores
are reported of the chosen split, and separately for the seeds of confirmation. `proposals` prices what to train next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from biphase.errors import SpecError
from biphase.keys import Identities
from biphase.papers import papers_of
from biphase.report.contrasts import Contrast, Measure
from biphase.report.evidence import Evidence, Floats
from biphase.report.headline import over_families
from biphase.report.recipes import Model, Published, named, run_of
from biphase.report.selectors import ComparableModels, comparable_models
from biphase.report.statistics.best import best
from biphase.report.statistics.curves import (
    FittedCurve,
    Located,
    fit_seeds,
    nearly_best,
    next_point,
    optimum,
)
from biphase.report.statistics.intervals import Estimate
from biphase.report.statistics.moderated import cells_of, padded
from biphase.specs import CLM, Objective, Pretrain, Stage, Study
from biphase.store import Store
from biphase.study.plan import Plan, make_plan
from biphase.study.prices import Bill, bill
from biphase.text import MISSING, counted, duration, fixed, interval, listed, signed

FEWEST = 3  # splits that determine a quadratic
LEVEL = 0.95
MEAN = "mean"  # of families, equally weighted
GRID = 20  # candidates for the next split are multiples of one twentieth
APART = 0.02  # a candidate is at least this far from every split there is
SHOWN = 3  # proposals
ALIKE = 1e-9  # points: what rounding can make of equal scores

Row = dict[int, Floats]  # pretraining seed → scores of one split in percent, one for each fine-tuning seed


@dataclass(frozen=True)
class Sweep:
    """Models of one size and budget that differ in their share of CLM only; shares ascend."""

    title: str  # size, and what distinguishes it from other models of the study
    steps: int
    masking: str  # "MLM 40%"
    models: tuple[Model, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        return tuple(model.recipe.causal_share for model in self.models)

    def seeds(self, confirm: Sequence[int]) -> tuple[list[int], list[int]]:
        """The pretraining seeds that choose, and those kept for confirmation."""
        every = sorted({seed for model in self.models for seed in model.seeds})
        return [seed for seed in every if seed not in confirm], [seed for seed in every if seed in confirm]

    def percent(self, share: float) -> str:
        """A share as text, with a decimal if two splits would be called the same without."""
        distinct = len({round(100 * one) for one in self.shares}) == len(self.shares)
        return f"{100 * share:.{0 if distinct else 1}f}%"


Budget = tuple[str, int, Objective]  # size and setting, steps, the objective of the last stage


def _by_budget(study: ComparableModels) -> dict[Budget, dict[float, Model]]:
    """Models by their share of CLM, for the budgets at which some model was trained with CLM, then MLM."""
    found: dict[Budget, dict[float, Model]] = {}
    for line in (line for group in study.groups for line in group):
        for model in (*line.finals("mlm"), *line.finals("clm-mlm")):
            recipe = model.recipe
            budget = line.title, recipe.steps, recipe.spans[-1].objective
            found.setdefault(budget, {})[recipe.causal_share] = model
    return {budget: models for budget, models in found.items() if any(models)}


def sweeps(study: ComparableModels) -> list[Sweep]:
    """The sweeps of a study with enough splits for a quadratic."""
    return [
        Sweep(title, steps, named(masked.label), tuple(models[share] for share in sorted(models)))
        for (title, steps, masked), models in _by_budget(study).items()
        if len(models) >= FEWEST
    ]


def asked_sweeps(study: ComparableModels) -> list[Sweep]:
    """As `sweeps`, for a user who asks for the best split: a study that cannot answer is refused."""
    found, where = sweeps(study), f"study {study.plan.study.name!r}"
    if not study.finetune:
        raise SpecError(f"{where} fine-tunes nothing, so no split has a score; add finetune=Finetune(…)")
    if found:
        return found
    budgets = _by_budget(study)
    if not budgets:
        raise SpecError(
            f"{where} has no run of CLM, then MLM, so there is no split to choose; add runs such as "
            "Pretrain(…, stages=(Stage(CLM(), 60), Stage(MLM(0.4), 180)))"
        )
    have = [
        f"{listed([f'{share:.0%}' for share in sorted(models)])} at {steps:,} steps ({title}, {named(masked.label)})"
        for (title, steps, masked), models in budgets.items()
    ]
    problem = (
        "splits of different budgets" if len({steps for _, steps, _ in budgets}) > 1 else "too few splits"
    )
    raise SpecError(
        f"{where} has {problem}: {'; '.join(have)}; a comparison needs {FEWEST} or more shares of CLM at equal steps "
        "(0% is MLM alone): add runs with other stages of the same total"
    )


# ---------------------------------------------------------------- scores


def validation_scores(evidence: Evidence, sweep: Sweep) -> dict[str, list[Row]]:
    """Scores in percent by family, and their mean over families: a row for each split.

    They are taken at the learning rates that validation chose, as everywhere. `Evidence` has none of the pretraining
    seeds that are kept for confirmation.
    """
    tables = {
        family: [evidence.on(model, tasks, part="validation") for model in sweep.models]
        for family, tasks in evidence.families.items()
    }
    means = [np.mean(of_split, axis=0) for of_split in zip(*tables.values(), strict=True)]
    return {
        on: [
            {
                seed: 100 * row[np.isfinite(row)]
                for seed, row in zip(model.seeds, table, strict=True)
                if np.isfinite(row).any()
            }
            for model, table in zip(sweep.models, of_splits, strict=True)
        ]
        for on, of_splits in (*tables.items(), (MEAN, means))
    }


def published_scores(numbers: Published, sweep: Sweep, families: Iterable[str]) -> dict[str, list[Row]]:
    """What a paper prints for the same recipes: test means of one pretraining seed each."""
    found: dict[str, list[Row]] = {}
    for family in families:
        values = [numbers.family_mean(model.recipe, family) for model in sweep.models]
        found[family] = [{} if value is None else {0: np.array([value])} for value in values]
    means = [
        {0: np.mean([row[0] for row in rows], axis=0)} if all(rows) else {}
        for rows in zip(*found.values(), strict=True)
    ]
    return found | {MEAN: means}


# ---------------------------------------------------------------- the answer


@dataclass(frozen=True)
class SplitCurve:
    """The answer on one family, or on the mean of families, from a complete table of seeds and splits."""

    on: str
    shares: tuple[float, ...]
    seeds: tuple[int, ...]
    scores: tuple[float, ...]  # means over seeds, in percent, by share
    contenders: tuple[float, ...] = ()  # splits not shown worse than the best
    curve: FittedCurve | None = None
    where: Located | None = None  # the optimum
    nearly: tuple[tuple[float, float], ...] = ()  # splits shown to lose less than the stated loss
    lacks: str = ""  # why there is no curve

    @property
    def chosen(self) -> float:
        """Of the splits not shown worse than the best, the one at which the curve (without one: the score) is highest."""
        return self._highest(self.contenders or self.shares)

    @property
    def misfit(self) -> float | None:
        """The scored split at which the curve is highest, if that is shown worse than the best."""
        top = self._highest(self.shares)
        return top if self.contenders and top not in self.contenders else None

    def _highest(self, among: Sequence[float]) -> float:
        heights = np.array(self.scores)
        if self.curve:
            heights, _ = self.curve.at(np.array(self.shares), 1 - LEVEL)
        by_share = dict(zip(self.shares, heights, strict=True))
        return max(among, key=lambda share: by_share[share])


def split_curve(on: str, shares: Sequence[float], rows: Sequence[Row], loss: float) -> SplitCurve | None:
    """The answer from scores of several splits; None if no split has a score.

    With several pretraining seeds, a value is the mean of a seed's fine-tunings. Of an incomplete table the block of
    seeds and splits with the most values is used. `loss`: points that a nearly best split may lose.
    """
    seeds = sorted({seed for row in rows for seed in row})
    if not seeds:
        return None
    known = np.array([[seed in row for row in rows] for seed in seeds])
    kept, columns = _block(known)
    used, at = [seeds[row] for row in kept], [shares[column] for column in columns]
    cells = [[rows[column][seed] for column in columns] for seed in used]
    table = np.array([[values.mean() for values in row] for row in cells])
    answer = SplitCurve(on, tuple(at), tuple(used), tuple(table.mean(axis=0)))
    answer = replace(answer, contenders=_contenders(answer, table, cells[0]))
    points, count = len(at), len(used)
    if points < FEWEST:
        return replace(answer, lacks=f"{counted(points, 'split')} scored: a quadratic needs {FEWEST}")
    if count * (points - 1) <= FEWEST - 1:
        return replace(answer, lacks=f"{points} splits of one trunk leave no scatter: 4 splits, or 2 seeds")
    if np.ptp(table - table.mean(axis=1, keepdims=True)) < ALIKE:
        return replace(answer, lacks="all splits score alike, so there is no noise to judge by")
    curve, region = fit_seeds(at, table, 2), (at[0], at[-1])
    return replace(
        answer,
        curve=curve,
        where=optimum(curve, region, LEVEL),
        nearly=nearly_best(curve, region, loss, LEVEL),
    )


def _block(known: Floats) -> tuple[list[int], list[int]]:
    """The seeds and splits of the largest complete block; of several, one that a quadratic can be fitted to."""
    order = sorted(range(len(known)), key=lambda seed: -known[seed].sum())
    blocks = [
        (sorted(order[:count]), np.flatnonzero(known[order[:count]].all(axis=0)).tolist())
        for count in range(1, len(order) + 1)
    ]
    return max(blocks, key=lambda block: (len(block[1]) >= FEWEST, len(block[0]) * len(block[1])))


def _contenders(answer: SplitCurve, table: Floats, tunings: list[Floats]) -> tuple[float, ...]:
    """The splits not shown worse than the best (Hsu); empty if there is no noise to judge by.

    The splits of one seed share a trunk, so the level of each seed is removed. With one pretraining seed the noise is
    that of its fine-tunings.
    """
    count, points = table.shape
    if points < 2:
        return ()
    values = padded(tunings)
    if count > 1:
        # Removing a level from `points` values leaves a smaller spread, which the root corrects.
        level = table.mean(axis=1, keepdims=True)
        values = ((table - level) * math.sqrt(points / (points - 1))).T
    cells = cells_of(values)
    if not (cells.variance > 0).all():
        return ()
    cells = replace(cells, mean=table.mean(axis=0))
    return tuple(answer.shares[place] for place in best(cells, LEVEL).contenders)


@dataclass(frozen=True)
class ScoreOnTest:
    """The test score of the chosen split over some pretraining seeds: mean of families, in percent."""

    seeds: tuple[int, ...]
    mean: float
    gain: Estimate | None  # over MLM alone, in points; None: it is MLM alone, or no seed has that


def score_on_test(evidence: Evidence, sweep: Sweep, share: float, seeds: Sequence[int]) -> ScoreOnTest | None:
    """The test score of a split over those of the seeds that have it; None if none has.

    Measured as the report measures, from the scores of these pretraining seeds alone.
    """
    known = {name: _with_seeds(model, seeds) for name, model in evidence.models.items()}
    some = replace(evidence, models={name: model for name, model in known.items() if model.seeds})
    by_share = {model.recipe.causal_share: model.name for model in sweep.models if model.name in some.models}
    if share not in by_share:
        return None
    chosen, measure = some.models[by_share[share]], Measure(some)
    found = measure.means([chosen], lambda model: over_families(some, model)).get(chosen.name)
    if found is None:
        return None
    gain = None
    if share and 0.0 in by_share:
        alone = over_families(some, some.models[by_share[0.0]])
        gain = measure(Contrast("", over_families(some, chosen) - alone)).estimate
    return ScoreOnTest(chosen.seeds, found.mean, gain if gain and math.isfinite(gain.mean) else None)


def _with_seeds(model: Model, seeds: Sequence[int]) -> Model:
    """The same model, pretrained with these seeds only."""
    kept = [(seed, name) for seed, name in zip(model.seeds, model.results, strict=True) if seed in seeds]
    return replace(model, seeds=tuple(seed for seed, _ in kept), results=tuple(name for _, name in kept))


# ---------------------------------------------------------------- what to train next


@dataclass(frozen=True)
class Proposal:
    """Runs that would shrink the interval of the optimum, and what they cost beyond the plan."""

    what: str
    runs: tuple[Pretrain, ...]
    shrinks: float  # of the optimum's standard error, in percent
    steps: int
    hours: float | None  # of one device; None: not priced


def proposals(
    sweep: Sweep, answer: SplitCurve, plan: Plan, store: Store, identities: Identities, device: str = ""
) -> tuple[tuple[Proposal, ...], Bill | None]:
    """The next splits by how much they shrink the optimum's standard error per hour, then one more pretraining seed.

    A new split of every seed is trained from the nearest checkpoint of its trunk that the plan keeps, so its cost is
    its branch and the piece of the trunk up to it. Where hours are not known, steps are the costs.
    """
    templates = _templates(sweep, plan)
    if answer.where is None or any(seed not in templates for seed in answer.seeds):
        return (), None
    longest = min(run.decay_start for run in templates.values()) / sweep.steps
    shares = [step / GRID for step in range(1, GRID) if step / GRID <= longest]
    far = [share for share in shares if min(abs(share - one) for one in sweep.shares) >= APART]
    added = [tuple(_split_run(templates[seed], share, seed) for seed in answer.seeds) for share in far]
    template, fresh = next(iter(templates.values())), fresh_seed(plan.study)
    seed_runs = tuple(_split_run(template, share, fresh) for share in answer.shares)
    priced = bill(plan, store, device, None, tuned=0)
    costs = [_cost(runs, sweep, plan, identities, store, priced, device) for runs in (*added, seed_runs)]
    paid = [hours if hours is not None else float(steps) for steps, hours in costs]
    ranked = next_point(answer.shares, far, paid[:-1], answer.where)
    by_share = dict(zip(far, zip(added, costs, paid, strict=False), strict=True))
    splits = []
    for share, gain in ranked[:SHOWN]:
        runs, (steps, hours), cost = by_share[share]
        splits.append(Proposal(sweep.percent(share), runs, gain * cost, steps, hours))
    count = len(answer.seeds)
    more = 100 * (1 - math.sqrt(count / (count + 1)))
    return (*splits, Proposal("one more pretraining seed", seed_runs, more, *costs[-1])), priced


def _templates(sweep: Sweep, plan: Plan) -> dict[int, Pretrain]:
    """A run of each pretraining seed that does not continue another, to copy its fields from."""
    runs = {
        seed: run_of(plan, result)[0]
        for model in sweep.models
        for seed, result in zip(model.seeds, model.results, strict=True)
    }
    return {seed: run for seed, run in runs.items() if run.parent is None and len(run.stages) <= 2}


def _split_run(template: Pretrain, share: float, seed: int) -> Pretrain:
    """The same run with another split and seed."""
    masked, causal = template.stages[-1], round(share * template.steps)
    name = f"clm{causal}-{masked.objective.column}-{template.steps}-seed{seed}"
    stages = (Stage(CLM(), causal),) if causal else ()
    stages = (*stages, replace(masked, steps=template.steps - causal))
    return replace(template, name=name, stages=stages, seed=seed, keep=())


def fresh_seed(study: Study) -> int:
    return max(run.root.seed for run in study.runs) + 1


def _cost(
    runs: tuple[Pretrain, ...], sweep: Sweep, plan: Plan, identities: Identities, store: Store, priced: Bill,
    device: str,
) -> tuple[int, float | None]:  # fmt: skip
    """Steps and hours of runs beyond those of the plan, their fine-tunings included where those have a price."""
    study = replace(plan.study, runs=(*plan.study.runs, *runs), finetune=None, claims=(), confirm=())
    wider = make_plan(study, identities)
    left = wider.left(plan.jobs)
    steps = sum(wider.jobs[key].steps for key in left)
    hours = bill(wider, store, device, None, tuned=0).hours(left)
    like = plan.results[sweep.models[-1].results[0]]
    tuning = priced.finetuning({grid: count for grid, count in priced.grids.items() if grid[0] == like})
    return steps, None if hours is None else hours + tuning * len(runs)


# ---------------------------------------------------------------- the whole answer, as text and as JSON


@dataclass(frozen=True)
class BestSplit:
    """What a study says about the best split of one sweep."""

    sweep: Sweep
    loss: float  # points that a nearly best split may lose
    curves: dict[str, SplitCurve]  # by family, then the mean; those with scores
    of: str  # which scores: "validation", or "published"
    searched: ScoreOnTest | None = None
    confirmed: ScoreOnTest | None = None
    next: tuple[Proposal, ...] = ()
    prices: Bill | None = None  # of the plan, on the device of the proposals

    @property
    def chosen(self) -> float | None:
        """The chosen split: by the mean of families, of which every one must have scores."""
        return self.curves[MEAN].chosen if MEAN in self.curves else None


def chosen_splits(evidence: Evidence, found: Iterable[Sweep], loss: float) -> list[BestSplit]:
    """What the validation scores of each sweep say; seeds of confirmation take no part."""
    return [_best_split(sweep, validation_scores(evidence, sweep), loss, "validation") for sweep in found]


def best_splits(
    evidence: Evidence, identities: Identities, loss: float | None = None, device: str = ""
) -> list[BestSplit]:
    """The answer for each sweep of a study, from its scores. `loss`: by default the study's `effect`."""
    plan = evidence.plan
    found = asked_sweeps(comparable_models(plan, evidence.models))
    answers = chosen_splits(evidence, found, plan.study.effect if loss is None else loss)
    return [_with_test_scores(answer, evidence, identities, device) for answer in answers]


def published_splits(plan: Plan, loss: float | None = None) -> list[BestSplit]:
    """The same from the numbers that the study's paper prints for these recipes."""
    papers = papers_of(plan.study)
    if not papers:
        raise SpecError(f"study {plan.study.name!r} names no paper with numbers to use; add papers=(…)")
    compared, loss = comparable_models(plan), plan.study.effect if loss is None else loss
    return [
        _best_split(sweep, published_scores(papers[0].published, sweep, compared.families), loss, "published")
        for sweep in asked_sweeps(compared)
    ]


def _with_test_scores(
    answer: BestSplit, evidence: Evidence, identities: Identities, device: str
) -> BestSplit:
    """Add what follows from the choice: its test scores, and what to train next."""
    sweep, plan, share = answer.sweep, evidence.plan, answer.chosen
    if share is None:
        return answer
    searched, confirming = sweep.seeds(plan.study.confirm)
    proposed, prices = proposals(sweep, answer.curves[MEAN], plan, evidence.store, identities, device)
    return replace(
        answer,
        searched=score_on_test(evidence, sweep, share, searched),
        confirmed=score_on_test(evidence, sweep, share, confirming),
        next=proposed,
        prices=prices,
    )


def _best_split(sweep: Sweep, scores: dict[str, list[Row]], loss: float, of: str) -> BestSplit:
    curves = {on: split_curve(on, sweep.shares, rows, loss) for on, rows in scores.items()}
    return BestSplit(sweep, loss, {on: curve for on, curve in curves.items() if curve is not None}, of)


def render(answer: BestSplit, plan: Plan, command_path: str) -> str:
    """The answer as text for a terminal. `command_path`: the study as typed after a verb."""
    return "\n".join(_lines(answer, plan, command_path))


def _lines(answer: BestSplit, plan: Plan, command_path: str) -> list[str]:
    sweep = answer.sweep
    lines = [f"{sweep.title} · {sweep.steps:,} steps · CLM, then {sweep.masking}", ""]
    if not answer.curves:
        missing = f"no split has {answer.of} scores yet"
        if answer.of != "validation":
            return [*lines, f"{missing}: too few are printed"]
        return [*lines, f"{missing} ({listed([*map(sweep.percent, sweep.shares)])} are planned)",
                f"Next: biphase run {command_path}"]  # fmt: skip
    lines += [*_score_table(answer), "", *_split_table(answer), "", *in_words(answer)]
    share = answer.chosen
    if answer.of != "validation" or share is None:
        return lines
    causal = round(share * sweep.steps)
    lines += [
        "",
        f"Chosen by validation: {sweep.percent(share)}, CLM for {causal:,} of {sweep.steps:,} steps.",
    ]
    return [*lines, *_test_lines(answer), *_next_lines(answer), *_confirm_lines(answer, plan, command_path)]


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _score_table(answer: BestSplit) -> list[str]:
    sweep = answer.sweep
    rows = [[f"{answer.of}, %", *map(sweep.percent, sweep.shares)]]
    for curve in answer.curves.values():
        scores = dict(zip(curve.shares, curve.scores, strict=True))
        rows.append([curve.on, *(fixed(scores.get(share, math.nan)) for share in sweep.shares)])
    return _aligned(rows)


def _split_table(answer: BestSplit) -> list[str]:
    """One line for each family and for the mean: the optimum, its interval, the flat region, the contenders."""
    percent = answer.sweep.percent
    rows = [["", "best split", "95% interval", f"loses < {answer.loss:g}", "not shown worse than the best"]]
    for curve in answer.curves.values():
        among = MISSING
        if curve.contenders:
            every = len(curve.contenders) == len(curve.shares)
            among = f"all {len(curve.shares)}" if every else ", ".join(map(percent, curve.contenders))
        found = [MISSING] * 3
        if curve.where:
            flat = _pieces(curve.nearly, percent) or "none shown"
            found = [percent(curve.where.estimate), _pieces(curve.where.pieces, percent), flat]
        rows.append([curve.on, *found, among])
    reasons = dict.fromkeys(curve.lacks for curve in answer.curves.values() if curve.lacks)
    lacking = {why: [curve.on for curve in answer.curves.values() if curve.lacks == why] for why in reasons}
    return [*_aligned(rows), *(f"{listed(names)}: {why}" for why, names in lacking.items())]


def _pieces(pieces: Iterable[tuple[float, float]], percent: Callable[[float], str]) -> str:
    ends = ([percent(low), percent(high)] for low, high in pieces)
    return " or ".join(" to ".join(dict.fromkeys(pair)) for pair in ends)


def in_words(answer: BestSplit) -> list[str]:
    """The answer on the mean of families, and what its intervals cover."""
    percent, mean = answer.sweep.percent, answer.curves.get(MEAN)
    points = f"{answer.loss:g} {'point' if answer.loss == 1 else 'points'}"
    lines = []
    if mean and mean.where:
        lines.append(
            f"{_scope(answer)}, the mean of families is best at {percent(mean.where.estimate)} CLM by a quadratic; 95% "
            f"interval: {_pieces(mean.where.pieces, percent)}."
        )
        if mean.misfit is not None:
            lines.append(
                f"The quadratic does not fit: {percent(mean.misfit)}, where it is highest, is shown worse than the best, so "
                f"{percent(mean.chosen)} is chosen."
            )
        lines += [
            f"Any split between {percent(low)} and {percent(high)} loses less than {points}."
            for low, high in mean.nearly
        ] or [f"No split is shown to lose less than {points}."]
        if mean.where.open_above:
            lines.append(
                f"The interval reaches {percent(mean.where.region[1])}, the longest CLM stage that was scored: a longer one "
                "may be better."
            )
    return [*lines, covers(answer), "CLM alone is not a split and is left out."]


def _scope(answer: BestSplit) -> str:
    if answer.of != "validation":
        return "For these published models"
    seeds = len(answer.curves[MEAN].seeds)
    return {1: "For this trunk", 2: "For these two pretraining seeds"}.get(
        seeds, f"Over {seeds} pretraining seeds"
    )


def covers(answer: BestSplit) -> str:
    """What the intervals are about: the recipe only from three pretraining seeds on."""
    seeds = max((len(curve.seeds) for curve in answer.curves.values()), default=0)
    if answer.of == "validation" and seeds > 2:
        return "Intervals cover other pretraining seeds."
    means = "printed means" if answer.of != "validation" else "scores"
    return f"Intervals cover the scatter of these {means} about their curve, not other pretraining seeds."


def _test_lines(answer: BestSplit) -> list[str]:
    """The test scores, which played no part in the choice."""
    lines = ["Its test scores, which played no part in the choice, as the mean of families:"]
    both = ((answer.searched, "the seeds that chose it"), (answer.confirmed, "confirmation"))
    for score, role in both:
        if score is None:
            continue
        against, gain = "", score.gain
        if gain:
            around = interval(gain.low, gain.high, sign=True)
            over = f"{around} over {gain.covers}" if around else "no interval"
            against = f", {signed(gain.mean)} points against MLM alone ({over})"
        seeds = f"{'seed' if len(score.seeds) == 1 else 'seeds'} {listed([*map(str, score.seeds)])}"
        lines.append(f"  {seeds} ({role}): {fixed(score.mean)}%{against}")
    return lines


def _next_lines(answer: BestSplit) -> list[str]:
    """The proposals with their costs."""
    if not answer.next:
        return []
    prices = answer.prices if answer.next[0].hours is not None else None
    per = f"hour on {prices.device}" if prices else "step"
    lines = ["", f"What to train next, by how much the optimum's standard error shrinks per {per}:"]
    for proposal in answer.next:
        hours = "" if proposal.hours is None else f", {duration(3600 * proposal.hours)}"
        lines.append(
            f"  {proposal.what}: {proposal.shrinks:.0f}% smaller for {counted(proposal.steps, 'step')}{hours}"
        )
    if prices and prices.efficiency:
        lines.append(f"  (times are FLOPs at {prices.efficiency:.0%} of the peak, without fine-tunings)")
    return lines


def _confirm_lines(answer: BestSplit, plan: Plan, command_path: str) -> list[str]:
    """The next split and the confirmation, as Python to append to the study file."""
    share, templates = answer.chosen, _templates(answer.sweep, plan)
    code, after = [], []
    if answer.next:
        code += [f"# the next split, {answer.next[0].what}", *_append(plan, answer.next[0].runs)]
    chosen = next(model for model in answer.sweep.models if model.recipe.causal_share == share)
    if answer.confirmed is None and set(chosen.seeds) & set(plan.study.confirm):
        after = ["", f"The confirmation is not computed yet. Next: biphase run {command_path}"]
    elif answer.confirmed is None and templates:
        template, seed = next(iter(templates.values())), fresh_seed(plan.study)
        runs = [_split_run(template, one, seed) for one in sorted({0.0, chosen.recipe.causal_share})]
        code += ["# the confirmation on a fresh pretraining seed", *_append(plan, runs, confirm=seed)]
    if not code:
        return after
    head = ["from dataclasses import replace", "from biphase import CLM, Stage"]
    return [
        "", "To add them, append to the study file what you want of this:", "",
        *(f"    {line}" for line in (*head, *code)),
        "", f"Then: biphase run {command_path}", *after,
    ]  # fmt: skip


def _append(plan: Plan, runs: Iterable[Pretrain], confirm: int | None = None) -> list[str]:
    """Python that adds runs to `study`, each as a copy of the run of the study that it differs least from."""
    records = []
    for run in runs:
        alike = [
            one
            for one in plan.study.runs
            if replace(one, name=run.name, stages=run.stages, seed=run.seed, keep=run.keep) == run
            and replace(one.stages[-1], steps=run.stages[-1].steps) == run.stages[-1]
        ]
        like = max(
            alike, key=lambda one: (one.stages == run.stages, one.seed == run.seed, one.keep == run.keep)
        )
        copied = f"study.runs[{plan.study.runs.index(like)}]"
        fields = [f"name={run.name!r}"]
        if like.stages != run.stages:
            causal = f"Stage(CLM(), {run.stages[0].steps}), " if len(run.stages) > 1 else ""
            fields.append(f"stages=({causal}replace({copied}.stages[-1], steps={run.stages[-1].steps}),)")
        fields += [f"seed={run.seed}"] if like.seed != run.seed else []
        fields += ["keep=()"] if like.keep else []
        records.append(f"    replace({copied}, {', '.join(fields)}),")
    kept = f"confirm=(*study.confirm, {confirm}), " if confirm is not None else ""
    return [f"study = replace(study, {kept}runs=(*study.runs,", *records, "))"]


def to_json(answer: BestSplit) -> dict[str, Any]:
    """The answer for programs. Shares are between 0 and 1, scores in percent."""
    sweep = answer.sweep

    def on_test(score: ScoreOnTest | None) -> dict[str, Any] | None:
        if score is None:
            return None
        known = score.gain and {
            "mean": score.gain.mean,
            "interval": [score.gain.low, score.gain.high] if math.isfinite(score.gain.low) else None,
            "covers": score.gain.covers,
        }
        return {"seeds": score.seeds, "mean": score.mean, "gain": known}

    return {
        "size": sweep.title,
        "steps": sweep.steps,
        "masking": sweep.masking,
        "scores": answer.of,
        "planned": sweep.shares,
        "loss": answer.loss,
        "covers": covers(answer),
        "chosen": answer.chosen,
        "on": {
            curve.on: {
                "shares": curve.shares,
                "seeds": curve.seeds,
                "scores": curve.scores,
                "not_shown_worse": curve.contenders,
                "optimum": curve.where and curve.where.estimate,
                "interval": curve.where and curve.where.pieces,
                "loses_less": curve.nearly,
                "lacks": curve.lacks,
            }
            for curve in answer.curves.values()
        },
        "test": {"searched": on_test(answer.searched), "confirmation": on_test(answer.confirmed)},
        "next": [
            {
                "what": proposal.what,
                "shrinks_percent": proposal.shrinks,
                "steps": proposal.steps,
                "hours": proposal.hours,
                "device": answer.prices.device if answer.prices else "",
            }
            for proposal in answer.next
        ],
    }
