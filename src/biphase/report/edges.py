"""Was the grid of learning rates wide enough? Where its last rate wins, a better one may lie beyond it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from biphase.report.evidence import Evidence, Grid
from biphase.report.numerals import listed, rate


def edges(evidence: Evidence) -> str:
    """Tasks on which an end of the grid wins more often than all other rates together; empty where there are none."""
    told = [words for task in evidence.tasks for words in _of(evidence, task)]
    if not told:
        return ""
    return f"A better learning rate may lie beyond the grid: {listed(told)}."


def _of(evidence: Evidence, task: str) -> Iterator[str]:
    won: Counter[str] = Counter()
    for (_, name), grid in evidence.grids.items():
        if name == task and len(grid.lrs) > 2 and all(all(row) for row in grid.keys):  # the whole grid
            won.update(_end(grid, seed, at) for seed, at in grid.chosen.items())
    for end, times in won.items():
        if end and 2 * times > won.total():
            yield f"on {task} the {end}, won {times:,} of {won.total():,} times"


def _end(grid: Grid, seed: int, at: int) -> str:
    """Which end of the grid won for a seed; none where another rate did as well: ties go to the lowest."""
    scores = grid.validation[grid.metric][:, grid.seeds.index(seed)]
    alone = (scores == scores[at]).sum() == 1
    for which, end in (("lowest", min(grid.lrs)), ("highest", max(grid.lrs))):
        if alone and grid.lrs[at] == end:
            return f"{which}, {rate(end)}"
    return ""
