"""Looks at a growing number of seeds: the error rate over all of them is the declared one."""

import math

import numpy as np
import pytest
from scipy.special import stdtr

from biphase.report.statistics.moderated import Looks

PLANS = ((3, 5, 10), (2, 3, 5), (3, 4, 5, 6, 8, 10))


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
