"""A grid whose last rate wins is told; one that was wide enough is not."""

from dataclasses import replace

import numpy as np
import pytest

from biphase.report.edges import edges
from biphase.report.evidence import gather


def told(evidence, task, places):
    """`edges` where on `task` these places of the grid win, seed by seed, for every model."""

    def won(grid):
        scores = np.full((len(grid.lrs), len(grid.seeds)), 0.5)
        for column, at in enumerate(places):
            scores[at, column] = 0.9
        return replace(grid, validation=grid.validation | {grid.metric: scores})

    middle = {key: replace(grid, keys=grid.keys[:1]) for key, grid in evidence.grids.items()}
    there = {key: won(grid) if key[1] == task else middle[key] for key, grid in evidence.grids.items()}
    return edges(replace(evidence, grids=there))


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ((2, 2, 2), "on squad the highest, 2e-4, won 12 of 12 times"),
        ((2, 1, 2), "on squad the highest, 2e-4, won 8 of 12 times"),
        ((0, 0, 1), "on squad the lowest, 2e-5, won 8 of 12 times"),
        ((1, 1, 2), ""),
        ((0, 1, 2), ""),
    ],
)
def test_an_end_of_the_grid_that_wins_most_often_is_told(ledger, places, expected):
    said = told(gather(*ledger), "squad", places)
    assert said == (f"A better learning rate may lie beyond the grid: {expected}." if expected else "")
