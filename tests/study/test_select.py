"""The learning rate is chosen by validation scores alone; of equals the lowest; never from a grid with a hole."""

import inspect
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from biphase.study.ledger import Choice, choose

RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4)
# Few values, so that equals are common; and any at all.
SCORES = st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.5, 1.0]) | st.floats(0, 1)


@st.composite
def grids(draw):
    rates = draw(st.lists(st.sampled_from(RATES), min_size=1, unique=True))
    seeds = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
    return {(lr, seed): draw(SCORES) for lr in rates for seed in seeds}


def best(scored):
    """The plain way: the lowest rate that nothing beats."""
    highest = max(scored.values())
    return min(lr for lr, score in scored.items() if score == highest)


@given(grids())
def test_the_choice_is_what_looking_at_every_cell_gives(grid):
    rates, seeds = {lr for lr, _ in grid}, {seed for _, seed in grid}
    means = {lr: math.fsum(grid[lr, seed] for seed in seeds) / len(seeds) for lr in rates}
    by_seed = {seed: best({lr: grid[lr, seed] for lr in rates}) for seed in seeds}
    assert choose(grid) == Choice(best(means), by_seed)


@given(grids(), st.randoms(use_true_random=False))
def test_neither_the_order_of_cells_nor_that_of_seeds_matters(grid, chance):
    cells = list(grid.items())
    chance.shuffle(cells)
    assert choose(dict(cells)) == choose(grid)
    seeds = sorted({seed for _, seed in grid})
    moved = {}
    for lr in {lr for lr, _ in grid}:
        others = chance.sample(seeds, len(seeds))
        moved |= {(lr, other): grid[lr, seed] for seed, other in zip(seeds, others, strict=True)}
    assert choose(moved).by_mean == choose(grid).by_mean


def test_equal_means_are_equal_however_their_sums_are_rounded():
    assert sum((0.3, 0.2, 0.1)) != sum((0.1, 0.2, 0.3))  # so it is: the second is larger by a rounding
    scores = {1e-5: (0.3, 0.2, 0.1), 1e-4: (0.1, 0.2, 0.3)}
    grid = {(lr, seed): score for lr, some in scores.items() for seed, score in enumerate(some)}
    assert choose(grid).by_mean == 1e-5


@given(
    grids().filter(lambda grid: len({lr for lr, _ in grid}) > 1 and len({s for _, s in grid}) > 1), st.data()
)
def test_a_grid_with_a_hole_is_not_chosen_from(grid, data):
    del grid[data.draw(st.sampled_from(sorted(grid)))]
    assert choose(grid) is None


def test_nothing_is_chosen_from_nothing():
    assert choose({}) is None


def test_one_cell_is_its_own_choice():
    assert choose({(1e-4, 3): 0.0}) == Choice(1e-4, {3: 1e-4})


def test_each_seed_may_choose_another_rate_than_the_mean_does():
    grid = {(1e-5, 0): 0.6, (1e-4, 0): 0.5, (1e-5, 1): 0.2, (1e-4, 1): 0.9}
    assert choose(grid) == Choice(1e-4, {0: 1e-5, 1: 1e-4})


def test_whoever_chooses_is_shown_validation_scores_and_can_read_nothing_else():
    assert list(inspect.signature(choose).parameters) == ["validation"]
    names = set(choose.__code__.co_names)
    for inner in choose.__code__.co_consts:
        names |= set(getattr(inner, "co_names", ()))
    assert names <= {"sorted", "len", "max", "Choice", "math", "fsum"}, (
        "nothing that reads a file or another score"
    )


@pytest.mark.parametrize("score", [0.0, 0.5, 1.0])
def test_of_equals_the_lowest_rate_is_taken(score):
    grid = {(lr, seed): score for lr in reversed(RATES) for seed in range(5)}
    assert choose(grid) == Choice(min(RATES), dict.fromkeys(range(5), min(RATES)))
