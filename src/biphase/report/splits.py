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

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from biphase.errors import SpecError
from biphase.keys import Identities
from biphase.report.contrasts import Contrast, Measure
from biphase.report.evidence import Evidence, Floats
from biphase.report.headline import over_families
from biphase.report.recipes import Model, named, run_of
from biphase.report.selectors import ComparableModels, comparable_models
from biphase.report.statistics.curves import (
    FittedCurve,
    Located,
    fit_seeds,
    nearly_best,
    next_point,
    optimum,
)
from biphase.report.statistics.intervals import Estimate
from biphase.report.statistics.moderated import cells_of, contenders, padded
from biphase.specs import CLM, Objective, Pretrain, Stage
from biphase.study.plan import Plan, make_plan
from biphase.study.prices import Bill, bill
from biphase.text import MISSING, aligned, counted, duration, finite, fixed, interval, listed, signed

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


def percent(share: float) -> str:
    return f"{share:.0%}"


Budget = tuple[str, int, Objective]  # size and setting, steps, the objective of the last stage


def _by_budget(study: ComparableModels) -> dict[Budget, dict[float, Model]]:
    """Models by their share of CLM, for the budgets at which some model was trained with CLM, then MLM."""
    budgets: dict[Budget, dict[float, Model]] = {}
    for line in (line for group in study.groups for line in group):
        for model in (*line.finals("mlm"), *line.finals("clm-mlm")):
            recipe = model.recipe
            budget = line.title, recipe.steps, recipe.spans[-1].objective
            budgets.setdefault(budget, {})[recipe.causal_share] = model
    return {budget: models for budget, models in budgets.items() if any(models)}


def sweeps(study: ComparableModels) -> list[Sweep]:
    """The sweeps of a study with enough splits for a quadratic."""
    return [
        Sweep(title, steps, named(masked.label), tuple(models[share] for share in sorted(models)))
        for (title, steps, masked), models in _by_budget(study).items()
        if len(models) >= FEWEST
    ]


def asked_sweeps(study: ComparableModels) -> list[Sweep]:
    """As `sweeps`, for a user who asks for the best split: a study that cannot answer is refused."""
    comparable, where = sweeps(study), f"study {study.plan.study.name!r}"
    if not study.finetune:
        raise SpecError(f"{where} fine-tunes nothing, so no split has a score; add finetune=Finetune(…)")
    have = [
        f"{listed([*map(percent, sorted(models))])} at {steps:,} steps ({title}, {named(masked.label)})"
        for (title, steps, masked), models in _by_budget(study).items()
    ]
    if not comparable:
        raise SpecError(
            f"{where} has {'; '.join(have) or 'no run of CLM, then MLM'}; a comparison needs {FEWEST} or more shares of "
            "CLM at equal steps (0% is MLM alone): add runs such as "
            "Pretrain(…, stages=(Stage(CLM(), 60), Stage(MLM(0.4), 180)))"
        )
    return comparable


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
    left_out: tuple[tuple[float, int], ...] = ()  # splits and seeds with a score that is not used

    @property
    def covers(self) -> str:
        """What the interval covers; empty: there is none."""
        return self.curve.covers if self.curve else ""

    @property
    def chosen(self) -> float:
        """Of the splits not shown worse than the best, the one at which the curve (without one: the score) is highest."""
        heights = np.array(self.scores)
        if self.curve:
            heights, _ = self.curve.at(np.array(self.shares), 1 - LEVEL)
        by_share = dict(zip(self.shares, heights, strict=True))
        return max(self.contenders or self.shares, key=lambda share: by_share[share])

    def to_json(self) -> dict[str, Any]:
        """The curve for programs."""
        known = {item.name: getattr(self, item.name) for item in fields(self)}
        del known["curve"], known["where"]
        optimum = {
            "optimum": self.where and self.where.estimate,
            "interval": self.where and self.where.pieces,
        }
        return known | optimum | {"covers": self.covers}


def split_curve(on: str, shares: Sequence[float], rows: Sequence[Row], loss: float) -> SplitCurve | None:
    """The answer from scores of several splits; None if no split has a score.

    With several pretraining seeds, a value is the mean of a seed's fine-tunings. Of an incomplete table a complete
    block is used (`_block`). `loss`: points that a nearly best split may lose.
    """
    seeds = sorted({seed for row in rows for seed in row})
    if not seeds:
        return None
    known = np.array([[seed in row for row in rows] for seed in seeds])
    kept, columns = _block(known)
    used, scored = [seeds[row] for row in kept], [shares[column] for column in columns]
    cells = [[rows[column][seed] for column in columns] for seed in used]
    table = np.array([[values.mean() for values in row] for row in cells])
    left_out = [
        (share, seed)
        for share, row in zip(shares, rows, strict=True)
        for seed in row
        if share not in scored or seed not in used
    ]
    means = tuple(table.mean(axis=0))
    answer = SplitCurve(on, tuple(scored), tuple(used), means, left_out=tuple(left_out))
    answer = replace(answer, contenders=_contenders(answer, table, cells[0]))
    points, count = len(scored), len(used)
    if points < FEWEST:
        return replace(answer, lacks=f"{counted(points, 'split')} scored: a quadratic needs {FEWEST}")
    if count * (points - 1) <= FEWEST - 1:
        why = f"{points} splits of one pretraining seed cannot show noise: add a split, or a pretraining seed"
        return replace(answer, lacks=why)
    if np.ptp(table - table.mean(axis=1, keepdims=True)) < ALIKE:
        return replace(answer, lacks="all splits score alike, so there is no noise to judge by")
    curve, region = fit_seeds(scored, table, 2), (scored[0], scored[-1])
    return replace(
        answer,
        curve=curve,
        where=optimum(curve, region, LEVEL),
        nearly=nearly_best(curve, region, loss, LEVEL),
    )


def _block(known: Floats) -> tuple[list[int], list[int]]:
    """The seeds and splits of a complete block of the table, at best one that a quadratic can be fitted to.

    Seeds are added in the order of how many splits they have, and the splits that all of them have are kept; of these
    blocks the one with the most scores is taken. A larger one may exist where seeds have different splits.
    """
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
    return tuple(answer.shares[index] for index in contenders(cells, LEVEL))


@dataclass(frozen=True)
class ScoreOnTest:
    """The test score of the chosen split over some pretraining seeds: mean of families, in percent."""

    seeds: tuple[int, ...]
    mean: float
    gain: Estimate | None  # over MLM alone, in points; None: it is MLM alone, or no seed has that


def _test_rows(evidence: Evidence, model: Model) -> dict[int, Floats]:
    """Pretraining seed → the test scores of its fine-tunings as the mean of families; NaN where a family lacks one."""
    rows = np.mean([evidence.on(model, tasks) for tasks in evidence.families.values()], axis=0)
    return dict(zip(model.seeds, rows, strict=True))


def score_on_test(evidence: Evidence, sweep: Sweep, share: float, seeds: Sequence[int]) -> ScoreOnTest | None:
    """The test score of a split over those of the seeds that have scores on every family; None if none has.

    Measured as the report measures, from the scores of these pretraining seeds alone. Against MLM alone it is compared
    only if that has scores for the same seeds.
    """
    by_share = {model.recipe.causal_share: model for model in sweep.models}
    scored = {
        at: [seed for seed, row in _test_rows(evidence, model).items() if np.isfinite(row).any()]
        for at, model in by_share.items()
        if at in (0.0, share)
    }
    seeds = [seed for seed in scored[share] if seed in seeds]
    known = [_with_seeds(model, seeds) for model in evidence.models.values()]
    subset = replace(evidence, models={model.name: model for model in known if model.seeds})
    if not seeds:
        return None
    chosen, measure = subset.models[by_share[share].name], Measure(subset)
    score = measure.means([chosen], lambda model: over_families(subset, model)).get(chosen.name)
    if score is None:
        return None
    gain = None
    if share and set(seeds) <= set(scored.get(0.0, ())):
        alone = subset.models[by_share[0.0].name]
        gain = measure(Contrast("", over_families(subset, chosen) - over_families(subset, alone))).estimate
    return ScoreOnTest(chosen.seeds, score.mean, gain if gain and math.isfinite(gain.mean) else None)


def _with_seeds(model: Model, seeds: Sequence[int]) -> Model:
    """The same model, pretrained with these seeds only."""
    kept = [(seed, name) for seed, name in zip(model.seeds, model.results, strict=True) if seed in seeds]
    return replace(model, seeds=tuple(seed for seed, _ in kept), results=tuple(name for _, name in kept))


# ---------------------------------------------------------------- what to train next


@dataclass(frozen=True)
class Proposal:
    """Runs that would shrink the interval of the optimum, and what they cost beyond the plan."""

    what: str
    seeds: tuple[int, ...]  # of pretraining
    steps: int
    hours: float | None  # of one device; None: not priced
    shrinks: float | None = None  # of the optimum's standard error, in percent; None: see `effect`
    effect: str = ""  # what the runs change, if the interval would then cover something else

    @property
    def worth(self) -> float:
        """The shrinkage per hour; per step, if hours are not known."""
        return (self.shrinks or 0.0) / (self.steps if self.hours is None else self.hours)


Templates = dict[tuple[float, int], Pretrain]  # by share of CLM and pretraining seed


def _templates(sweep: Sweep, plan: Plan) -> Templates:
    """The runs of a sweep that new runs may copy: those that do not continue another."""
    runs = {
        (model.recipe.causal_share, seed): run_of(plan, result)[0]
        for model in sweep.models
        for seed, result in zip(model.seeds, model.results, strict=True)
    }
    return {key: run for key, run in runs.items() if run.parent is None and len(run.stages) <= 2}


def _new_run(templates: Templates, share: float, seed: int) -> Pretrain:
    """A run with this split and seed: a copy of one with the same split, else of one with the same seed."""
    key = max(templates, key=lambda known: (known[0] == share, known[1] == seed))
    template = templates[key]
    causal, stages = round(share * template.steps), template.stages
    if key[0] != share:
        masked = replace(template.stages[-1], steps=template.steps - causal)
        stages = (Stage(CLM(), causal), masked) if causal else (masked,)
    return replace(template, name=f"{template.name}.{causal}.{seed}", stages=stages, seed=seed, keep=())


def _fresh_seed(plan: Plan) -> int:
    """The first pretraining seed that no run of the study has."""
    return max(run.root.seed for run in plan.study.runs) + 1


def proposals(
    sweep: Sweep, answer: SplitCurve, evidence: Evidence, identities: Identities, device: str
) -> tuple[tuple[Proposal, ...], Bill | None]:
    """The next splits, and one more pretraining seed, by how much they shrink the optimum's standard error per hour.

    Shrinkage is modelled from the scatter about the curve. Below three pretraining seeds one more seed changes what the
    interval covers: it comes last, with words instead of a shrinkage. Its seed is not that of the confirmation. A new
    split of every seed is trained from the nearest checkpoint of its trunk that the plan keeps, so its cost is its
    branch and the piece of the trunk up to it. Where hours are not known, steps are the costs.
    """
    count, templates = len(answer.seeds), _templates(sweep, evidence.plan)
    if answer.where is None or not {seed for _, seed in templates}.issuperset(answer.seeds):
        return (), None
    longest = min(run.decay_start for run in templates.values()) / sweep.steps
    shares = [step / GRID for step in range(1, GRID) if step / GRID <= longest]
    shares = [share for share in shares if min(abs(share - planned) for planned in sweep.shares) >= APART]
    candidates = [[_new_run(templates, share, seed) for seed in answer.seeds] for share in shares]
    another = _fresh_seed(evidence.plan) + 1
    seed_runs = [_new_run(templates, share, another) for share in answer.shares]
    costs, prices = _costs([*candidates, seed_runs], sweep, evidence, identities, device)
    shrinkage = next_point(answer.shares, shares, answer.where)
    splits = [
        Proposal(percent(share), answer.seeds, *cost, shrinks=shrinkage[share])
        for share, cost in zip(shares, costs[:-1], strict=True)
    ]
    ranked = sorted(splits, key=lambda proposal: -proposal.worth)[:SHOWN]
    seed = Proposal("one more pretraining seed", (another,), *costs[-1])
    if count > 2:
        seed = replace(seed, shrinks=100 * (1 - math.sqrt(count / (count + 1))))
        return tuple(sorted([*ranked, seed], key=lambda proposal: -proposal.worth)), prices
    about = "the recipe, not about these two seeds" if count == 2 else "two pretraining seeds, not about one"
    return (*ranked, replace(seed, effect=f"makes the interval one about {about},")), prices


def _costs(
    candidates: list[list[Pretrain]], sweep: Sweep, evidence: Evidence, identities: Identities, device: str
) -> tuple[list[tuple[int, float | None]], Bill]:
    """Steps and hours of each candidate's runs beyond the plan, their fine-tunings included where those have a price.

    The prices of the plan come with them.
    """
    plan, prices = evidence.plan, bill(evidence.plan, evidence.store, device, None, tuned=0)
    runs = (*plan.study.runs, *itertools.chain(*candidates))
    wider = make_plan(replace(plan.study, runs=runs, finetune=None, claims=(), confirm=()), identities)
    wider_prices = bill(wider, evidence.store, device, None, tuned=0)
    tuned = plan.results[sweep.models[-1].results[0]]
    tuning = prices.finetuning({grid: count for grid, count in prices.grids.items() if grid[0] == tuned})
    costs = []
    for candidate in candidates:
        paths = [reversed(wider.path(wider.results[run.name])) for run in candidate]
        # The plan keeps its checkpoints: only the jobs after the last of them are to be paid.
        jobs = {
            job.key: job
            for path in paths
            for job in itertools.takewhile(lambda job: job.key not in plan.jobs, path)
        }
        hours = wider_prices.hours(jobs)
        steps = sum(job.steps for job in jobs.values())
        costs.append((steps, None if hours is None else hours + tuning * len(candidate)))
    return costs, prices


# ---------------------------------------------------------------- the whole answer


@dataclass(frozen=True)
class BestSplit:
    """What a study says about the best split of one sweep."""

    sweep: Sweep
    loss: float  # points that a nearly best split may lose
    curves: dict[str, SplitCurve]  # by family, then the mean; those with scores
    unscored: tuple[str, ...]  # families without scores, and the mean
    searched: ScoreOnTest | None = None
    confirmed: ScoreOnTest | None = None
    awaited: tuple[int, ...] = ()  # pretraining seeds of the confirmation that lack scores
    next: tuple[Proposal, ...] = ()
    confirm: int | None = None  # a fresh pretraining seed for the confirmation, if none is planned
    prices: Bill | None = None  # of the plan, on the device of the proposals

    @property
    def chosen(self) -> float | None:
        """The chosen split: by validation scores only, and by the mean of families, of which every one must have scores."""
        return self.curves[MEAN].chosen if MEAN in self.curves else None


def best_splits(
    evidence: Evidence, identities: Identities, loss: float | None = None, device: str = ""
) -> list[BestSplit]:
    """The answer for each sweep of a study, from its scores. `loss`: by default the study's `effect`."""
    loss = evidence.plan.study.effect if loss is None else loss
    answers = []
    for sweep in asked_sweeps(comparable_models(evidence.plan, evidence.models)):
        tables = validation_scores(evidence, sweep)
        curves = {on: split_curve(on, sweep.shares, rows, loss) for on, rows in tables.items()}
        known = {on: curve for on, curve in curves.items() if curve is not None}
        answer = BestSplit(sweep, loss, known, tuple(on for on in curves if on not in known))
        answers.append(_with_test_scores(answer, evidence, identities, device))
    return answers


def _with_test_scores(
    answer: BestSplit, evidence: Evidence, identities: Identities, device: str
) -> BestSplit:
    """Add what follows from the choice: its test scores, and what to train next."""
    sweep, plan, share = answer.sweep, evidence.plan, answer.chosen
    if share is None:
        return answer
    mean = answer.curves[MEAN]
    compared = [model for model in sweep.models if model.recipe.causal_share in (0.0, share)]
    awaited = {
        seed
        for model in compared
        for seed, row in _test_rows(evidence, model).items()
        if seed in plan.study.confirm and not np.isfinite(row).all()
    }
    confirming = [seed for seed in compared[-1].seeds if seed in plan.study.confirm]  # the chosen split's
    proposed, prices = proposals(sweep, mean, evidence, identities, device)
    return replace(
        answer,
        searched=score_on_test(evidence, sweep, share, mean.seeds),
        confirmed=score_on_test(evidence, sweep, share, confirming),
        awaited=tuple(sorted(awaited)) if confirming else (),
        next=proposed,
        confirm=None if confirming else _fresh_seed(plan),
        prices=prices,
    )


def to_json(answer: BestSplit) -> dict[str, Any]:
    """The answer for programs. Shares are between 0 and 1, scores in percent; numbers that are not known are null."""
    sweep, device = answer.sweep, answer.prices.device if answer.prices else ""
    return finite(
        {
            "size": sweep.title,
            "steps": sweep.steps,
            "masking": sweep.masking,
            "planned": sweep.shares,
            "loss": answer.loss,
            "chosen": answer.chosen,
            "on": {on: curve.to_json() for on, curve in answer.curves.items()},
            "unscored": answer.unscored,
            "test": {
                "searched": answer.searched and asdict(answer.searched),
                "confirmation": answer.confirmed and asdict(answer.confirmed),
            },
            "awaited": answer.awaited,
            "next": [asdict(proposal) | {"device": device} for proposal in answer.next],
            "confirm": answer.confirm,
        }
    )


# ---------------------------------------------------------------- as text


def render(answer: BestSplit, command_path: str) -> str:
    """The answer as text for a terminal. `command_path`: the study as typed after a verb."""
    sweep, share, curves = answer.sweep, answer.chosen, answer.curves
    lines = [f"{sweep.title} · {sweep.steps:,} steps · CLM, then {sweep.masking}", ""]
    compute = f"Next: biphase run {command_path}"
    if not curves:
        planned = listed([*map(percent, sweep.shares)])
        return "\n".join([*lines, f"no split has validation scores yet ({planned} are planned)", compute])
    incomplete = _by_text({on: _left_out(curve) for on, curve in curves.items()})
    if answer.unscored:
        incomplete.append(f"{listed([*answer.unscored])}: no split has validation scores")
    lines += [*_tables(answer), *incomplete, *([compute] * bool(incomplete))]
    covers = {on: curve.covers and f"the interval covers {curve.covers}." for on, curve in curves.items()}
    lines += ["", *_in_words(answer), *_by_text(covers), "CLM alone is not a split and is left out."]
    if share is not None:
        lines += [
            "",
            f"Chosen by validation: {percent(share)}, CLM for {round(share * sweep.steps):,} of {sweep.steps:,} steps.",
            *_test_lines(answer),
            *_next_lines(answer),
        ]
        if answer.confirm is not None:
            runs = listed([*map(percent, sorted({0.0, share}))])
            lines += [
                "",
                f"To confirm it: add {runs} with seed {answer.confirm}, and confirm=({answer.confirm},)",
            ]
        if answer.awaited:
            lines += ["", f"The confirmation lacks scores of {_seeds(answer.awaited)}. {compute}"]
    return "\n".join(lines)


def _seeds(seeds: Sequence[int]) -> str:
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {listed([*map(str, seeds)])}"


def _tables(answer: BestSplit) -> list[str]:
    """The scores; then a line for each family and the mean: the optimum, its interval, the flat region, the contenders."""
    scores = [["validation, %", *map(percent, answer.sweep.shares)]]
    rows = [["", "best split", "95% interval", f"loses < {answer.loss:g}", "not shown worse than the best"]]
    for on, curve in answer.curves.items():
        known = dict(zip(curve.shares, curve.scores, strict=True))
        scores.append([on, *(fixed(known.get(share, math.nan)) for share in answer.sweep.shares)])
        row = [on, MISSING, MISSING, MISSING]
        if curve.where:
            flat = _pieces(curve.nearly) or "none shown"
            row = [on, percent(curve.where.estimate), _pieces(curve.where.pieces), flat]
        rows.append([*row, ", ".join(map(percent, curve.contenders)) or MISSING])
    lacks = _by_text({on: curve.lacks for on, curve in answer.curves.items()})
    return [*aligned(scores), "", *aligned(rows, left=len(rows[0])), *lacks]


def _by_text(texts: dict[str, str]) -> list[str]:
    """A line for each distinct text, with the names of the curves that have it."""
    return [
        f"{listed([on for on in texts if texts[on] == value])}: {value}"
        for value in dict.fromkeys(texts.values())
        if value
    ]


def _left_out(curve: SplitCurve) -> str:
    scores = ", ".join(f"{percent(share)} of seed {seed}" for share, seed in curve.left_out)
    return f"left out, because not every seed has every split: {scores}" if scores else ""


def _pieces(pieces: Iterable[tuple[float, float]]) -> str:
    return " or ".join(" to ".join(dict.fromkeys(map(percent, ends))) for ends in pieces)


def _in_words(answer: BestSplit) -> list[str]:
    """The answer on the mean of families."""
    mean = answer.curves.get(MEAN)
    if mean is None or mean.where is None:
        return []
    where, lost = mean.where, f"{answer.loss:g} {'point' if answer.loss == 1 else 'points'}"
    lines = [
        f"By a quadratic, the mean of families is best at {percent(where.estimate)} CLM; 95% interval: "
        f"{_pieces(where.pieces)}."
    ]
    flat = [f"between {percent(low)} and {percent(high)}" for low, high in mean.nearly]
    lines.append(f"Shown to lose less than {lost}: {f'any split {listed(flat)}' if flat else 'no split'}.")
    for reached, end, other in (
        (where.open_below, where.region[0], "shorter"),
        (where.open_above, where.region[1], "longer"),
    ):
        if reached:
            better = f"a {other} CLM stage than was scored may be better" if end else "MLM alone may be best"
            lines.append(f"The interval reaches {percent(end)}: {better}.")
    return lines


def _test_lines(answer: BestSplit) -> list[str]:
    """The test scores, which played no part in the choice."""
    lines = ["Its test scores, which played no part in the choice, as the mean of families:"]
    both = (
        (answer.searched, "the seeds that chose it: biased upwards"),
        (answer.confirmed, "confirmation"),
    )
    for score, role in both:
        if score is None:
            continue
        against, gain = "", score.gain
        if gain:
            around = interval(gain.low, gain.high, sign=True)
            over = f"{around} over {gain.covers}" if around else "no interval"
            against = f", {signed(gain.mean)} points against MLM alone ({over})"
        lines.append(f"  {_seeds(score.seeds)} ({role}): {fixed(score.mean)}%{against}")
    return lines


def _next_lines(answer: BestSplit) -> list[str]:
    """The proposals with their costs."""
    if not answer.next:
        return []
    prices = answer.prices if answer.next[0].hours is not None else None
    per = f"hour on {prices.device}" if prices else "step"
    if len(answer.curves[MEAN].seeds) > 2:
        per += ", if seeds differ in level only"
    lines = ["", f"What to train next, by how much the optimum's standard error shrinks per {per}:"]
    for proposal in answer.next:
        hours = "" if proposal.hours is None else f", {duration(3600 * proposal.hours)}"
        effect = proposal.effect if proposal.shrinks is None else f"{proposal.shrinks:.0f}% smaller"
        what = f"{proposal.what} ({_seeds(proposal.seeds)})"
        lines.append(f"  {what}: {effect} for {counted(proposal.steps, 'step')}{hours}")
    if prices and prices.efficiency:
        lines.append(f"  (times are FLOPs at {prices.efficiency:.0%} of the peak, without fine-tunings)")
    return lines
