"""What the choice of the learning rate on validation does to models of unequal noise: how large, and when it matters."""

import math

import numpy as np
import pytest
from page_tables import percent, show

from biphase.report.statistics.moderated import cells_of, contrast_of

SEEDS, MODELS = 5, 7
LEVELS = (0.05, 0.05 / 12)  # of one claim, and of Holm's first step for twelve
RULES = ("its own seed", "all seeds", "the other seeds")
CASES = (  # sd of the first model in those of the others, correlation, rates, lead of the best rate
    (1, 1.0, 3, 0), (2, 1.0, 3, 0), (5, 0.0, 3, 0), (5, 0.2, 3, 0), (5, 0.5, 3, 0), (5, 1.0, 3, 0),
    (5, 1.0, 3, 5), (5, 1.0, 3, 10), (5, 0.2, 6, 0), (5, 1.0, 6, 0),
)  # fmt: skip


def scores_at(validation, test, rule):
    """Test scores (…, seeds) at the rate that is best on the validation scores of these seeds."""
    total = validation.sum(axis=-1, keepdims=True)
    by = {"its own seed": validation, "all seeds": total, "the other seeds": total - validation}[rule]
    best = np.broadcast_to(by.argmax(axis=-2), (*test.shape[:-2], test.shape[-1]))
    return np.take_along_axis(test, best[..., None, :], axis=-2)[..., 0, :]


def compared(noise, correlation, rates, lead, studies):
    """By rule: the lead of the first of equal models over the second in points, and how often each level finds it.

    All models have the same mean at every rate. `correlation`: of validation and test scores over seeds.
    """
    chance = np.random.default_rng([noise, round(10 * correlation), rates, lead])
    shape = studies, MODELS, rates, SEEDS
    sd = np.where(np.arange(MODELS) == 0, float(noise), 1.0)[:, None, None]
    mean = np.where(np.arange(rates) == 0, 0.0, -float(lead))[:, None]
    luck = chance.normal(size=shape)
    seen = correlation * luck + math.sqrt(1 - correlation**2) * chance.normal(size=shape)
    found = {}
    for rule in RULES:
        scores = scores_at(mean + sd * seen, mean + sd * luck, rule)
        cells = cells_of(scores, (mean + sd * luck).reshape(studies, -1, SEEDS))
        gap = cells.mean[:, 0] - cells.mean[:, 1]
        test = contrast_of(gap, cells.variance[:, :2] / SEEDS, cells.df[:, :2])
        found[rule] = gap.mean(), *((test.above < level).mean() for level in LEVELS)
    return found


def test_the_noisier_of_equal_models_leads_only_where_validation_follows_its_luck():
    usual, lucky, ahead = (compared(*case, 400)["its own seed"] for case in (CASES[2], CASES[5], CASES[7]))
    assert abs(usual[0]) < 0.3
    assert usual[1] < 0.09
    assert lucky[0] == pytest.approx((5 - 1) * 0.846, abs=0.4)  # the largest of three normal values
    assert lucky[1] > 0.3
    assert ahead[1] < 0.1


@pytest.mark.campaign
def test_choice_of_the_rate():
    rows = []
    for noise, correlation, rates, lead in CASES:
        found = compared(noise, correlation, rates, lead, 4000)
        if not lead:
            expected = (
                {3: 0.846, 6: 1.267}[rates] * correlation * (noise - 1)
            )  # the mean of the largest normal value
            assert found["its own seed"][0] == pytest.approx(expected, abs=0.15)
            assert found["all seeds"][0] == pytest.approx(expected / math.sqrt(SEEDS), abs=0.15)
            assert found["the other seeds"][0] == pytest.approx(0, abs=0.15)
        cells = (
            " / ".join((f"{round(gap, 1) + 0.0:.1f}", *map(percent, shares)))
            for gap, *shares in (found[rule] for rule in RULES)
        )
        rows.append((f"{noise}", f"{correlation:.1f}", f"{rates}", f"{lead}", *cells))
    header = ("noise of the first model", "correlation", "rates", "lead of the best rate", *RULES)
    show(header, rows, error=2.5)
