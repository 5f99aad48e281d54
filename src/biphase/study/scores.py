"""Scores of a study as a table: the chosen learning rate, the mean over seeds and its interval. No torch."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

from biphase.errors import StoreError
from biphase.files import Store
from biphase.study.leaves import read_leaf, trainings
from biphase.study.plan import Plan
from biphase.study.select import Cell, choose
from biphase.wording import duration

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Row:
    """One model on one task. Scores are None until every learning rate of every seed is there."""

    result: str
    task: str
    metric: str
    done: int
    of: int
    seconds: float  # of training and scoring, all leaves together
    by_mean: tuple[float, list[float]] | None = None  # the rate, and the test score of each seed
    by_seed: tuple[dict[int, float], list[float]] | None = None  # the rate of each seed, and its test score
    metrics: dict[str, list[float]] | None = None  # all test metrics at the rate chosen by the mean


def rows(plan: Plan, store: Store, damaged: dict[str, str] | None = None) -> list[Row]:
    """Every result × task of a plan, as far as it is computed. Why a trial cannot be read is added to `damaged`."""
    damaged = {} if damaged is None else damaged
    found: dict[tuple[str, str], dict[Cell, dict[str, Any] | None]] = defaultdict(dict)
    for training in trainings(plan):
        for leaf in training.leaves:
            about = None
            if store.knows(store.leaves / leaf.key):
                try:
                    said = read_leaf(store, leaf.key)
                    about = {name: said[name] for name in ("metric", "scores", "seconds")}  # of thousands
                except StoreError as wrong:
                    damaged[leaf.key] = str(wrong)
            found[training.model, leaf.task.name][training.lr, training.seed] = about
    return [
        _row(name, task.name, found[model, task.name])
        for name, model in plan.results.items()
        if model in plan.tuned
        for task in plan.tuned[model].tasks
    ]


def _row(result: str, task: str, cells: dict[Cell, dict[str, Any] | None]) -> Row:
    done = {cell: leaf for cell, leaf in cells.items() if leaf is not None}
    seconds = sum(sum(leaf["seconds"].values()) for leaf in done.values())
    metric = next((leaf["metric"] for leaf in done.values()), "")
    row = Row(result, task, metric, len(done), len(cells), seconds)
    if len(done) < len(cells):
        return row
    choice = choose({cell: leaf["scores"]["validation"][metric] for cell, leaf in done.items()})
    if choice is None:
        return row

    def test(lr: float, seed: int, name: str = metric) -> float:
        return done[lr, seed]["scores"]["test"][name]

    seeds = sorted(choice.by_seed)
    several = [leaf["scores"]["test"] for leaf in done.values()]
    names = [name for name in several[0] if all(name in one for one in several)]  # an older version has fewer
    return replace(
        row,
        by_mean=(choice.by_mean, [test(choice.by_mean, seed) for seed in seeds]),
        by_seed=(choice.by_seed, [test(choice.by_seed[seed], seed) for seed in seeds]),
        metrics={name: [test(choice.by_mean, seed, name) for seed in seeds] for name in names},
    )


def half_width(values: list[float]) -> float | None:
    """Half of the 95% t-interval of a mean over seeds; None for a single one."""
    if len(values) < 2:
        return None
    from scipy.stats import t

    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    quantile = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return quantile * math.sqrt(variance / len(values))


def with_interval(values: list[float]) -> str:
    """Percent, as papers print them: 84.89 ± 0.18."""
    mean, half = sum(values) / len(values), half_width(values)
    return f"{mean * 100:.2f}" + ("" if half is None else f" ± {half * 100:.2f}")


def table(plan: Plan, store: Store, damaged: dict[str, str] | None = None) -> list[str]:
    """The rows as text, and a blank line. Empty before any leaf is there."""
    every = rows(plan, store, damaged)
    if not any(row.done for row in every):
        return []
    head = ("test score, %", "task", "metric", "mean ± 95%", "lr", "with an lr per seed", "time")
    lines = [head]
    for row in every:
        if row.by_mean is None or row.by_seed is None:
            left = f"{row.done}/{row.of} done"
            lines.append((row.result, row.task, row.metric, left, "", "", duration(row.seconds)))
            continue
        (lr, scores), (_, own) = row.by_mean, row.by_seed
        lines.append(
            (
                row.result,
                row.task,
                row.metric,
                with_interval(scores),
                f"{lr:g}",
                with_interval(own),
                duration(row.seconds),
            )
        )
    wide = [max(len(line[column]) for line in lines) for column in range(len(head))]
    seeds = len(plan.study.finetune.seeds) if plan.study.finetune else 0
    note = f"  Learning rates are chosen on validation scores; intervals are over {seeds} fine-tuning seeds."
    body = ["  " + "  ".join(f"{cell:<{wide[i]}}" for i, cell in enumerate(line)).rstrip() for line in lines]
    return [*body, *([note] if seeds > 1 else []), ""]


def as_json(plan: Plan, store: Store, damaged: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """The rows for a program."""
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
            "lr_by_seed": row.by_seed and {str(seed): lr for seed, lr in row.by_seed[0].items()},
            "test_by_seed": row.by_seed and row.by_seed[1],
            "half_width_by_seed": half_width(row.by_seed[1]) if row.by_seed else None,
            "metrics": row.metrics,
        }
        for row in rows(plan, store, damaged)
    ]
