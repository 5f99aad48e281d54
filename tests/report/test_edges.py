"""A grid whose last rate wins is told; one that was wide enough is not."""

from dataclasses import replace

import numpy as np
import pytest

from biphase.report.estimates import edges
from biphase.report.evidence import gather


def told(evidence, change, task="squad"):
    """`edges` where only `task` was asked of the models, with grids changed."""
    grids = {key: change(grid) for key, grid in evidence.grids.items() if key[1] == task}
    return edges(replace(evidence, grids=grids, tasks={task: evidence.tasks[task]}))


def winning(places):
    """These places of the grid win, seed by seed."""

    def change(grid):
        scores = np.full((len(grid.lrs), len(grid.seeds)), 0.5)
        for column, at in enumerate(places):
            scores[at, column] = 0.9
        return replace(grid, validation=grid.validation | {grid.metric: scores})

    return change


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
    said = told(gather(*ledger), winning(places))
    assert said == (f"A better learning rate may lie beyond the grid: {expected}." if expected else "")


def test_where_all_rates_do_alike_none_has_won(ledger):
    def alike(grid):
        return replace(grid, validation={grid.metric: np.zeros((len(grid.lrs), len(grid.seeds)))})

    evidence = gather(*ledger)
    assert all(set(alike(grid).chosen.values()) == {0} for grid in evidence.grids.values())
    assert told(evidence, alike) == ""


def test_a_part_of_the_grid_has_no_ends_of_its_own(ledger):
    """As checkpoints on the way have it: two rates, of which one always wins."""

    def part(grid):
        won = winning((1, 1, 1))(grid)
        scores = won.validation[grid.metric].copy()
        scores[2] = np.nan
        keys = (*grid.keys[:2], tuple("" for _ in grid.seeds))
        return replace(won, keys=keys, validation={grid.metric: scores})

    evidence = gather(*ledger)
    assert all(set(part(grid).chosen.values()) == {1} for grid in evidence.grids.values())
    assert told(evidence, part) == ""
