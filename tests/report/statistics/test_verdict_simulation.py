"""Simulated studies with known truth: false verdicts are rarer than 5%, true ones are found, and intervals cover.

A study has models × tasks × learning rates × seeds, as the replica has, and twelve claims of one to four parts, each
part a difference of two models on one task. The rate of each seed is chosen on validation scores. All studies of a
scenario are computed at once, as arrays (studies, tasks, models, rates, seeds).
"""

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, field

import numpy as np
import pytest

from biphase.report.statistics.intervals import holm
from biphase.report.statistics.moderated import Looks, cells_of, contrast_of

ALPHA = 0.05
TASKS = 4
MLM, C25, C50, C75, CLM, CLM_MORE, MLM_MORE = range(7)
ALL = tuple(range(TASKS))
CLAIMS = (  # better model, worse model, tasks, margin
    (MLM, CLM, (0,), 0.0),
    (MLM, CLM, (2,), 0.0),
    (MLM, CLM, (3,), 0.0),
    (CLM, MLM, (1,), -0.5),
    (C25, MLM, ALL, 0.0),
    (C50, MLM, ALL, 0.0),
    (C25, C75, (0, 2), 0.0),
    (C50, CLM, (0, 1), 0.0),
    (CLM_MORE, MLM_MORE, (0, 2, 3), 0.0),
    (CLM_MORE, MLM_MORE, ALL, -0.5),
    (CLM_MORE, CLM, (1, 3), 0.0),
    (MLM_MORE, MLM, (0, 2), 0.0),
)


@dataclass(frozen=True)
class Scenario:
    """How scores come about: `noise(chance, shape)` is added to the truth (tasks, models) in points."""

    name: str
    noise: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
    truth: np.ndarray = field(default_factory=lambda: np.zeros((TASKS, 7)))
    claims: tuple = CLAIMS
    rates: int = 3
    seeds: int = 3
    finish: Callable[[np.ndarray], np.ndarray] = lambda scores: scores  # rounding, missing seeds

    def draw(self, chance: np.random.Generator, studies: int) -> np.ndarray:
        shape = (studies, *self.truth.shape, self.rates, self.seeds)
        return self.finish(self.truth[..., None, None] + self.noise(chance, shape))


@dataclass(frozen=True)
class Rates:
    """Shares of studies, and verdicts in a study."""

    false_reproduced: float  # studies with any
    false_refuted: float
    right: float  # clear and true verdicts in a study
    covered: float  # of the 95% intervals of parts


def chosen(scores: np.ndarray, chance: np.random.Generator) -> np.ndarray:
    """The scores (…, seeds) at the rate with the best validation score, chosen for each seed.

    Validation scores of equally good rates are noise of their own here. If they followed the test scores, the best of
    several rates would truly be better for a noisier model, and equal models would not be equal.
    """
    validation = np.where(np.isnan(scores), -np.inf, chance.normal(size=scores.shape))
    best = np.argmax(validation, axis=-2)
    return np.take_along_axis(scores, best[..., None, :], axis=-2)[..., 0, :]


def verdicts(scenario: Scenario, scores, rates, alpha=ALPHA):
    """Reproduced and refuted (studies, claims), and for each part whether its interval covers."""
    cells = cells_of(scores, rates.reshape(*rates.shape[:2], -1, rates.shape[-1]))
    reproduced, refuted, covers = [], [], []
    for more, less, tasks, margin in scenario.claims:
        above, below = [], []
        for task in tasks:
            pair = [more, less]
            value = cells.mean[:, task, more] - cells.mean[:, task, less]
            variance = cells.variance[:, task][:, pair] / cells.n[:, task][:, pair]
            test = contrast_of(value, variance, cells.df[:, task][:, pair], margin)
            above.append(np.where(np.isnan(test.above), 1.0, test.above))
            below.append(np.where(np.isnan(test.below), 1.0, test.below))
            true = scenario.truth[task, more] - scenario.truth[task, less]
            covers.append((test.low <= true) & (true <= test.high))
        reproduced.append(np.max(above, axis=0))
        refuted.append(np.minimum(1.0, len(tasks) * np.min(below, axis=0)))
    found, lost = (np.array([holm(study) for study in np.transpose(p)]) for p in (reproduced, refuted))
    return found <= alpha, lost <= alpha, np.mean(covers)


BATCH = 200  # studies that are computed at once


def look_repeatedly(scenario: Scenario, levels: dict[int, float], batch: int = 0) -> Rates:
    """The error rates in a batch, if verdicts are given at each number of seeds at its level, and stand."""
    holds, reversed_ = true_verdicts(scenario)
    chance = np.random.default_rng([batch, *scenario.name.encode()])
    rates = scenario.draw(chance, BATCH)
    scores = chosen(rates, chance)
    found = lost = np.zeros((BATCH, len(scenario.claims)), dtype=bool)
    covered = math.nan
    for seeds, level in levels.items():
        now, against, covered = verdicts(scenario, scores[..., :seeds].copy(), rates[..., :seeds], level)
        found, lost = found | (now & ~lost), lost | (against & ~found)
    return Rates(
        float((found & ~holds).any(axis=-1).mean()),
        float((lost & ~reversed_).any(axis=-1).mean()),
        float(((found & holds) | (lost & reversed_)).sum(axis=-1).mean()),
        float(covered),
    )


def simulate(scenario: Scenario, studies: int) -> Rates:
    """The error rates of verdicts that are given once, on all seeds."""
    batches = [look_repeatedly(scenario, {scenario.seeds: ALPHA}, batch) for batch in range(studies // BATCH)]
    return Rates(*np.mean([astuple(batch) for batch in batches], axis=0))


def true_verdicts(scenario: Scenario) -> tuple[np.ndarray, np.ndarray]:
    """Which claims hold, and which have a reversed part; a part at its margin is neither."""
    truth = scenario.truth
    gaps = [[truth[task, a] - truth[task, b] - m for task in on] for a, b, on, m in scenario.claims]
    return np.array([min(one) > 1e-9 for one in gaps]), np.array([min(one) < -1e-9 for one in gaps])


# ---------------------------------------------------------------- scenarios


def normal(chance, shape):
    return chance.normal(size=shape)


def by_model(spread):
    """Each study draws the sd of each model anew, lognormal, the same for all its rates; noise is shared by rates."""

    def noise(chance, shape):
        sd = np.exp(spread * chance.normal(size=(*shape[:3], 1, 1)))
        shared = chance.normal(size=(*shape[:3], 1, shape[4]))
        return sd * (0.9 * shared + math.sqrt(1 - 0.81) * chance.normal(size=shape))

    return noise


def shared_by_seed(chance, shape):
    """A seed moves all models of a task alike, by half of the variance."""
    common = chance.normal(size=(*shape[:2], 1, 1, shape[4]))
    return math.sqrt(0.5) * (common + chance.normal(size=shape))


def either_or(chance, shape):
    """On the third task a fine-tuning either learns, in half of the cases, or stays 40 points lower."""
    values = chance.normal(size=shape)
    learnt = chance.random(size=(*shape[:3], 1, shape[4])) < 0.5
    values[:, 2] += 40.0 * np.broadcast_to(learnt, shape)[:, 2]
    return values


def missing(scores):
    """Models of odd number have three seeds of five."""
    scores[:, :, 1::2, :, 3:] = np.nan
    return scores


def rounded(scores):
    """Accuracies on so few test examples, 100, that many seeds agree exactly."""
    return np.round(scores)


def one_null_part():
    """Effects of three sds on every part of every claim but one, which is at its margin."""
    claims = ((0, 1, ALL, 0.0), (2, 3, ALL, 0.0), (4, 5, ALL, 0.0), (6, 7, (0, 1), 0.0), (8, 9, (0, 3), -0.5))
    truth = np.zeros((TASKS, 10))
    truth[:, ::2] = 6.0
    for more, less, tasks, margin in claims:
        truth[tasks[more % len(tasks)], more] = truth[tasks[more % len(tasks)], less] + margin
    return {"truth": truth, "claims": claims}


FEW = {"truth": np.zeros((TASKS, 2)), "claims": ((0, 1, (0,), 0.0), (0, 1, (1,), 0.0), (0, 1, (2, 3), 0.0))}
TWO_SD = np.zeros((TASKS, 7)) + 2.0 * np.array([0, 2, 2, 1, 1, 3, 1.5])
NULLS = (
    Scenario("all equal", normal),
    Scenario("noise shared by seed", shared_by_seed),
    Scenario("either-or on one task, 50%", either_or),
    Scenario("unequal variances over models", by_model(0.7)),
    Scenario("one null part in each claim", normal, **one_null_part()),
    Scenario("two models, one rate", normal, **FEW, rates=1),
    Scenario("scores rounded to 1 point", normal, finish=rounded),
    Scenario("three or five seeds", normal, seeds=5, finish=missing),
)


def allowed(studies, sds=3):
    return 0.05 + sds * math.sqrt(0.05 * 0.95 / studies)


@pytest.mark.parametrize("studies", [200, pytest.param(2000, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("scenario", NULLS, ids=[scenario.name for scenario in NULLS])
def test_false_verdicts_are_rare(scenario, studies):
    rates = simulate(scenario, studies)
    assert max(rates.false_reproduced, rates.false_refuted) < allowed(studies)
    assert rates.covered > 0.945


def test_true_effects_are_found():
    """docs/statistics.md: 9.04 of twelve."""
    rates = simulate(Scenario("effects of 2 to 6 sd, five seeds", normal, truth=TWO_SD, seeds=5), studies=200)
    assert rates.right == pytest.approx(9.04, abs=0.4)
    assert max(rates.false_reproduced, rates.false_refuted) < allowed(200)


def test_looks_add_no_errors():
    looks = Looks((3, 5, 10))
    levels = {seeds: looks.level(seeds) for seeds in looks.seeds}
    rates = look_repeatedly(Scenario("unequal variances over models", by_model(0.7), seeds=10), levels)
    assert max(rates.false_reproduced, rates.false_refuted) < allowed(200)
