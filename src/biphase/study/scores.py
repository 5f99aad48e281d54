"""Scores of a study as a table: the chosen learning rate, the mean over seeds, its interval, and baselines. No torch.

`rows` collects them from the store, `table` prints them, `as_json` is for programs. Trials of earlier versions have no
baselines and do not record whether their predictions are constant; these cells stay empty.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

from biphase.errors import StoreError
from biphase.store import Store
from biphase.study.ledger import finetunings, read_trial
from biphase.study.plan import Plan
from biphase.study.select import Cell, choose
from biphase.text import beside, counted, duration, no_interval

CONFIDENCE = 0.95
ROUNDING = 1e-12  # values that differ by less count as equal


KEPT = ("metric", "scores", "seconds", "baselines", "constant")


@dataclass(frozen=True)
class Row:
    """One model on one task; scores are None until every learning rate and seed is done."""

    result: str
    task: str
    metric: str
    done: int
    of: int
    seconds: float  # of training and scoring, over all trials
    by_mean: tuple[float, list[float]] | None = None  # the learning rate, and the test score of each seed
    by_seed: tuple[dict[int, float], list[float]] | None = None  # the rate of each seed, and test scores
    metrics: dict[str, list[float]] | None = None  # all test metrics at the rate chosen by the mean
    # Per seed, at the rate chosen by the mean and at the seed's own: the prediction, if all test examples got the same.
    constant: tuple[list[str], list[str]] | None = None
    baselines: dict[str, dict[str, Any]] | None = None  # by name and metric: a description, and scores

    @property
    def known_baselines(self) -> dict[str, tuple[str, float]]:
        """Baselines for the selection metric: name → description and test score."""
        found = {name: by_metric.get(self.metric) for name, by_metric in (self.baselines or {}).items()}
        return {name: (one["what"], one["test"]) for name, one in found.items() if one}


def rows(plan: Plan, store: Store, damaged: dict[str, str] | None = None) -> list[Row]:
    """Return a row for every result × task of a plan; reasons why trials cannot be read are added to `damaged`."""
    damaged = {} if damaged is None else damaged
    found: dict[tuple[str, str], dict[Cell, dict[str, Any] | None]] = defaultdict(dict)
    for training in finetunings(plan):
        for trial in training.trials:
            about = None
            if store.knows(store.trials / trial.key):
                try:
                    said = read_trial(store, trial.key, trial.metric)
                    # Only some fields, since there are thousands of trials.
                    about = {name: said[name] for name in KEPT if name in said}
                except StoreError as wrong:
                    damaged[trial.key] = str(wrong)
            found[training.model, trial.task.name][training.lr, training.seed] = about
    return [
        _row(name, task.name, found[model, task.name])
        for name, model in plan.results.items()
        if model in plan.tuned
        for task in plan.tuned[model].tasks
    ]


def _row(result: str, task: str, cells: dict[Cell, dict[str, Any] | None]) -> Row:
    done = {cell: trial for cell, trial in cells.items() if trial is not None}
    seconds = sum(sum(trial["seconds"].values()) for trial in done.values())
    metric = next((trial["metric"] for trial in done.values()), "")
    baselines = next((trial["baselines"] for trial in done.values() if "baselines" in trial), None)
    row = Row(result, task, metric, len(done), len(cells), seconds, baselines=baselines)
    if len(done) < len(cells):
        return row
    choice = choose({cell: trial["scores"]["validation"][metric] for cell, trial in done.items()})
    if choice is None:
        return row

    def test(lr: float, seed: int, name: str = metric) -> float:
        return done[lr, seed]["scores"]["test"][name]

    def constant(lr: float, seed: int) -> str:
        return done[lr, seed].get("constant", {}).get("test", "")

    seeds = sorted(choice.by_seed)
    several = [trial["scores"]["test"] for trial in done.values()]
    names = [name for name in several[0] if all(name in one for one in several)]  # old trials have fewer
    return replace(
        row,
        by_mean=(choice.by_mean, [test(choice.by_mean, seed) for seed in seeds]),
        by_seed=(choice.by_seed, [test(choice.by_seed[seed], seed) for seed in seeds]),
        metrics={name: [test(choice.by_mean, seed, name) for seed in seeds] for name in names},
        constant=(
            [constant(choice.by_mean, seed) for seed in seeds],
            [constant(choice.by_seed[seed], seed) for seed in seeds],
        ),
    )


def half_width(values: list[float]) -> float | None:
    """Return half of the 95% t-interval of a mean over seeds; None for one seed, or if all values are equal."""
    if len(values) < 2 or max(values) - min(values) <= ROUNDING:
        return None
    from scipy.stats import t

    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    quantile = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return quantile * math.sqrt(variance / len(values))


def with_interval(values: list[float]) -> str:
    """Format a mean in percent with its interval, such as 84.89 ± 0.18, clipped to valid scores, or why it has none."""
    mean, half = 100 * sum(values) / len(values), half_width(values)
    if half is None:
        return f"{mean:.2f} ({no_interval(len(values))})"
    return f"{mean:.2f} {beside(mean, mean - 100 * half, mean + 100 * half)}"


def _percent(values: list[float]) -> str:
    return f"{sum(values) / len(values) * 100:.2f}"


def table(plan: Plan, store: Store, damaged: dict[str, str] | None = None) -> list[str]:
    """Return the table as text, with notes below and a blank line; empty before any trial is done."""
    every = rows(plan, store, damaged)
    if not any(row.done for row in every):
        return []
    untrained = {task.name for spec in plan.tuned.values() for task in spec.tasks if task.zero_shot}
    bare = all(row.task in untrained for row in every)
    head = (
        "test score, %", "task", "metric", "score" if bare else "mean ± 95%", "baseline", "lr", "with an lr per seed",
        "time", "other metrics",
    )  # fmt: skip
    lines = [head, *(_cells(row, zero_shot=row.task in untrained) for row in every)]
    wide = [max(len(line[column]) for line in lines) for column in range(len(head))]
    shown = [column for column in range(len(head)) if any(line[column] for line in lines[1:])]
    body = ["  " + "  ".join(f"{line[at]:<{wide[at]}}" for at in shown).rstrip() for line in lines]
    seeds = len(plan.study.finetune.seeds) if plan.study.finetune else 0
    over = f"intervals are over {seeds} fine-tuning seeds" if seeds > 1 else "one seed has no interval"
    how = f"Learning rates are chosen on validation scores; {over}."
    notes = ["  Models are scored as they are, without training." if bare else f"  {how}"]
    return [*body, *notes, *filter(None, map(_collapse, every)), ""]


def _cells(row: Row, *, zero_shot: bool) -> tuple[str, ...]:
    about = (row.result, row.task, row.metric)
    known = row.known_baselines.values()
    baseline = ", ".join(f"{test * 100:.2f} {what}" for what, test in known)
    if row.by_mean is None or row.by_seed is None or row.constant is None:
        return (*about, f"{row.done}/{row.of} done", baseline, "", "", duration(row.seconds), "")
    (lr, scores), (_, own) = row.by_mean, row.by_seed
    mean, by_seed = (
        f"{(_percent if zero_shot else with_interval)(values)}{' !' if any(constant) else ''}"
        for values, constant in zip((scores, own), row.constant, strict=True)
    )
    others = ", ".join(
        f"{name} {_percent(values)}" for name, values in (row.metrics or {}).items() if name != row.metric
    )
    return (
        *about,
        mean,
        baseline,
        *(("", "") if zero_shot else (f"{lr:g}", by_seed)),
        duration(row.seconds),
        others,
    )


def _collapse(row: Row) -> str:
    """Return a note on seeds whose model predicts the same for every test example, or ""."""
    by_mean, by_seed = row.constant or ([], [])
    found = dict.fromkeys(filter(None, by_mean + by_seed))
    if not found:
        return ""
    seeds = max(sum(map(bool, by_mean)), sum(map(bool, by_seed)))
    return (
        f"  ! {row.result} on {row.task}: with {seeds} of {counted(len(by_mean), 'seed')} the model predicts the same "
        f"for every test example ({', '.join(found)})"
    )


def as_json(plan: Plan, store: Store, damaged: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Return the rows for programs."""
    return [
        {
            "result": row.result,
            "task": row.task,
            "metric": row.metric,
            "done": row.done,
            "of": row.of,
            "seconds": round(row.seconds, 3),
            "lr": row.by_mean and row.by_mean[0],
            "test": row.by_mean and row.by_mean[1],
            "half_width": half_width(row.by_mean[1]) if row.by_mean else None,
            "no_interval": _why_none(row.by_mean),
            "constant": row.constant and row.constant[0],
            "baselines": row.baselines,
            "lr_by_seed": row.by_seed and {str(seed): lr for seed, lr in row.by_seed[0].items()},
            "test_by_seed": row.by_seed and row.by_seed[1],
            "half_width_by_seed": half_width(row.by_seed[1]) if row.by_seed else None,
            "no_interval_by_seed": _why_none(row.by_seed),
            "constant_by_seed": row.constant and row.constant[1],
            "metrics": row.metrics,
        }
        for row in rows(plan, store, damaged)
    ]


def _why_none(scores: tuple[Any, list[float]] | None) -> str | None:
    """Say why there is no interval; None if there is one."""
    if scores is None:
        return "some learning rates or seeds are not done"
    return no_interval(len(scores[1])) if half_width(scores[1]) is None else None
