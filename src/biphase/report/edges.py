"""Was the grid of learning rates wide enough? Where its last rate wins, a better one may lie beyond it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from biphase.report.evidence import Evidence
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
        planned = [place for place, row in enumerate(grid.keys) if any(row)]
        if name == task and len(planned) > 1:
            ends = {min(planned, key=lambda at: grid.lrs[at]): "lowest"}
            ends |= {max(planned, key=lambda at: grid.lrs[at]): "highest"}
            for at in grid.chosen.values():
                won[f"{ends[at]}, {rate(grid.lrs[at])}" if at in ends else ""] += 1
    for end, times in won.items():
        if end and 2 * times > won.total():
            yield f"on {task} the {end}, won {times:,} of {won.total():,} times"
