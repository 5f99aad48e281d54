"""How long a plan takes on several workers, each on one device with one job at a time.

A training job waits for the one that it continues, a fine-tuning for its model. Jobs are chosen as `worker.Worker` does:
fine-tunings whose model is there first, then training jobs in the order of the plan. Whatever the number of workers, a
plan takes at least as long as its longest chain of jobs that wait for each other.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from biphase.study.plan import Plan
from biphase.study.prices import Grid


@dataclass(frozen=True)
class Elapsed:
    workers: int
    seconds: float
    chain: float  # seconds of the longest chain
    ends: str  # the result it leads to


def elapsed(
    plan: Plan,
    pieces: Mapping[str, float],
    tunings: Mapping[Grid, float],
    counts: Mapping[Grid, int],
    workers: int,
) -> Elapsed:
    """`pieces`: seconds of the training jobs to run; `tunings`, `counts`: of each fine-tuning, and how many."""
    grids: dict[str, deque[tuple[float, int]]] = {}
    for grid, seconds in tunings.items():
        if counts.get(grid):
            grids.setdefault(grid[0], deque()).append((seconds, counts[grid]))
    chain, ends = _longest(plan, pieces, grids)
    return Elapsed(workers, _simulated(plan, pieces, grids, workers), chain, ends)


def _longest(
    plan: Plan, pieces: Mapping[str, float], grids: Mapping[str, deque[tuple[float, int]]]
) -> tuple[float, str]:
    until: dict[str, float] = {}
    for key in pieces:  # parents come first
        until[key] = until.get(plan.states[key].parent or "", 0.0) + pieces[key]
    every = {
        model: until.get(model, 0.0) + max((seconds for seconds, _ in grids.get(model, ())), default=0.0)
        for model in (*until, *grids)
    }
    last = max(every, key=lambda model: every[model], default="")
    names = [name for name, key in plan.results.items() if key == last]
    return every.get(last, 0.0), ", ".join(names)


def _simulated(
    plan: Plan, pieces: Mapping[str, float], grids: Mapping[str, deque[tuple[float, int]]], workers: int
) -> float:
    order = {key: number for number, key in enumerate(plan.states)}
    below: dict[str | None, list[str]] = {}
    for key in pieces:
        below.setdefault(plan.states[key].parent, []).append(key)
    first = [key for key in pieces if plan.states[key].parent not in pieces]
    trainable = [(order[key], key) for key in first]
    heapq.heapify(trainable)
    # Fine-tunings of one grid are alike: seconds, and how many are left to start.
    tunable = deque(one for model, some in grids.items() if model not in pieces for one in some)
    running: list[tuple[float, str]] = []  # when a worker is free again, and what it has trained
    now = 0.0
    while trainable or tunable or running:
        while len(running) < workers and (tunable or trainable):
            if tunable:
                seconds, left = tunable.popleft()
                heapq.heappush(running, (now + seconds, ""))
                if left > 1:
                    tunable.appendleft((seconds, left - 1))
            else:
                _, key = heapq.heappop(trainable)
                heapq.heappush(running, (now + pieces[key], key))
        now, done = heapq.heappop(running)
        if done:
            tunable.extend(grids.get(done, ()))
            for child in below.get(done, ()):
                heapq.heappush(trainable, (order[child], child))
    return now
