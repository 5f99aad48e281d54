"""Looks at a growing number of seeds: the error rate over all of them is the declared one."""

import math

import numpy as np
import pytest
from page_tables import percent, show
from scipy.optimize import brentq
from scipy.special import ndtr, stdtr

from biphase.report.statistics.moderated import Looks

PLANS = ((3, 5, 10), (2, 3, 5), (3, 4, 5, 6, 8, 10))


def joint(looks):
    """The usual levels, from the joint normal distribution of the looks."""
    grid = np.linspace(-8, 8, 1601)
    step, density, before, levels = grid[1] - grid[0], None, 0.0, []
    for seeds in looks.seeds:
        share = seeds / looks.seeds[-1]
        lag = share - before
        mass = np.array([1.0]) if density is None else density * step
        at = np.array([0.0]) if density is None else grid
        level = looks.level(seeds)

        def missing(bound, mass=mass, at=at, lag=lag, level=level):
            return (mass * ndtr((at - bound) / math.sqrt(lag))).sum() - level

        bound = brentq(missing, -4, 8)
        levels.append(float(ndtr(-bound / math.sqrt(share))))
        moved = np.exp(-np.square(grid[:, None] - at) / (2 * lag)) / math.sqrt(2 * math.pi * lag)
        density, before = np.where(grid < bound, moved @ mass, 0.0), share
    return levels


def errors(looks, levels, studies, effect=0.0):
    """The share of studies in which a t-test of one sample is significant at any look."""
    values = np.random.default_rng(0).normal(effect, 1, (studies, looks.seeds[-1]))
    found = np.zeros(studies, dtype=bool)
    for seeds, level in zip(looks.seeds, levels, strict=True):
        some = values[:, :seeds]
        t = some.mean(axis=1) / (some.std(axis=1, ddof=1) / math.sqrt(seeds))
        found |= stdtr(seeds - 1, -t) <= level
    return found.mean()


@pytest.mark.parametrize("seeds", PLANS)
def test_everything_is_spent_and_no_more(seeds):
    looks = Looks(seeds)
    levels = [looks.level(one) for one in seeds]
    assert sum(levels) == pytest.approx(0.05)
    assert min(levels) > 0
    assert errors(looks, levels, 20_000) < 0.05 + 3 * math.sqrt(0.05 / 20_000)


def test_spending_is_that_of_the_literature():
    looks = Looks((1 * 2, 2 * 2, 3 * 2, 4 * 2, 5 * 2), alpha=0.025)
    spent = [looks.spent(one) for one in looks.seeds]
    # Lan and DeMets 1983: five equal looks, one-sided 0.025
    assert spent == pytest.approx([0.00000, 0.00039, 0.00381, 0.01221, 0.02500], abs=2e-5)


@pytest.mark.parametrize("seeds", [(), (1, 3), (5, 3), (3, 3)])
def test_looks_that_make_no_sense_are_refused(seeds):
    with pytest.raises(ValueError, match="increasing"):
        Looks(seeds)
    with pytest.raises(ValueError, match="3, 5"):
        Looks((3, 5)).level(4)


@pytest.mark.campaign
def test_boundaries():
    rows = []
    for seeds in PLANS:
        looks = Looks(seeds)
        levels = [looks.level(one) for one in seeds]
        usual, ours, never = (
            errors(looks, some, 400_000) for some in (joint(looks), levels, [0.05] * len(seeds))
        )
        assert ours <= 0.0505
        found = [errors(looks, some, 40_000, effect=1.0) for some in (joint(looks), levels)]
        rows.append((", ".join(map(str, seeds)), *map(percent, (never, usual, ours, *found))))
    header = ("looks", "5% each time", "joint normal", "used", "power, joint normal", "power, used")
    show(header, rows, error=0.8)
