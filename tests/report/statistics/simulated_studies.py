"""Simulated studies with known truth: how often a rule for verdicts is wrong, and how much it finds.

A study has models × tasks × learning rates × seeds, as the replica has, and twelve claims of one to four parts, each
part a difference of two models on one task. The rate of each seed is chosen on validation scores. All studies of a
scenario are computed at once, as arrays (studies, tasks, models, rates, seeds).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from scipy.special import digamma, polygamma, stdtr, stdtrit

from biphase.report.statistics.intervals import detectable_by
from biphase.report.statistics.moderated import cells_of, contrast_of, trigamma_inverse

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
# The replica's scores at the best rate, in points: sst2, conll2003, squad, nq_boolq
REPLICA = np.array([
    [81.8, 85.1, 84.7, 85.3, 84.9, 84.8, 84.3],
    [83.6, 85.1, 85.3, 85.4, 83.7, 85.7, 84.2],
    [32.5, 68.1, 66.0, 61.9, 56.5, 67.9, 60.5],
    [39.3, 50.9, 52.8, 54.6, 53.0, 57.9, 47.4],
])  # fmt: skip
REPLICA_SD = np.array([
    [0.7, 0.5, 0.7, 0.6, 0.7, 0.7, 0.6],
    [0.6, 0.5, 0.3, 0.4, 0.3, 0.2, 0.4],
    [5.6, 0.5, 1.4, 3.8, 1.7, 0.8, 10.0],
    [0.6, 0.8, 0.6, 0.5, 0.7, 0.9, 0.4],
])  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    """How scores come about: `noise(chance, shape)` is added to the truth (tasks, models) in points."""

    name: str
    noise: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
    truth: np.ndarray = field(default_factory=lambda: np.zeros((TASKS, 7)))
    claims: tuple = CLAIMS
    rates: int = 3
    seeds: int = 3
    tuned: bool = False  # it, or a close relative, was used to choose the rule
    finish: Callable[[np.ndarray], np.ndarray] = lambda scores: scores  # rounding, limits, missing seeds

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
    width: float  # median half width of those, in points


def chosen(scores: np.ndarray, chance: np.random.Generator) -> np.ndarray:
    """The scores (…, seeds) at the rate with the best validation score, chosen for each seed.

    Validation scores of equally good rates are noise of their own here. If they followed the test scores, the best of
    several rates would truly be better for a noisier model, and equal models would not be equal.
    """
    validation = np.where(np.isnan(scores), -np.inf, chance.normal(size=scores.shape))
    best = np.argmax(validation, axis=-2)
    return np.take_along_axis(scores, best[..., None, :], axis=-2)[..., 0, :]


# ---------------------------------------------------------------- rules


def paired(scores, rates, more, less, task, margin):
    """Student's t over the differences of each seed: one-sided p-values, low, high, estimate, sd."""
    gaps = scores[:, task, more] - scores[:, task, less]
    n = np.isfinite(gaps).sum(axis=-1)
    mean, sd = np.nanmean(gaps, axis=-1), np.nanstd(gaps, axis=-1, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = (mean - margin) / (sd / np.sqrt(n))
    above = np.where(sd > 0, stdtr(n - 1, -t), 1.0)
    half = stdtrit(n - 1, 0.975) * sd / np.sqrt(n)
    return above, np.where(sd > 0, 1 - above, 1.0), mean - half, mean + half, mean, sd


def limma(variance, free):
    """limma's plug-in prior: degrees of freedom (at most 20) and variance."""
    floor = 1e-5 * np.median(variance, axis=-1, keepdims=True) + 1e-300
    e = np.log(np.maximum(variance, floor)) - digamma(free / 2) + np.log(free / 2)
    excess = e.var(axis=-1, ddof=1) - polygamma(1, free / 2)
    d0 = np.where(excess > 0.05, 2 * trigamma_inverse(np.maximum(excess, 0.05)), 20.0)
    d0 = np.minimum(d0, 20.0)[..., None]
    return d0, np.exp(e.mean(axis=-1, keepdims=True) + digamma(d0 / 2) - np.log(d0 / 2))


def guarded(scores, rates, guard=True):
    """limma's variances (tasks' cells, df), with the guard: below d0 = 6 never under the cell's own."""
    n = scores.shape[-1]
    cells = rates.reshape(*rates.shape[:2], -1, n)
    d0, s0 = limma(cells.var(axis=-1, ddof=1), n - 1)
    own = scores.var(axis=-1, ddof=1)
    pooled = (d0 * s0 + (n - 1) * own) / (d0 + n - 1)
    safe = (d0 < 6) & guard
    return np.where(safe, np.maximum(own, pooled), pooled), np.where(safe, n - 1.0, d0 + n - 1)


def satterthwaite(value, variances, dfs, margin):
    total = variances.sum(axis=-1)
    df = total**2 / (variances**2 / dfs).sum(axis=-1)
    above = stdtr(df, -(value - margin) / np.sqrt(total))
    half = stdtrit(df, 0.975) * np.sqrt(total)
    return above, 1 - above, value - half, value + half, value, total


def unpaired(method):
    """A rule that tests unpaired differences with its own variances."""

    def rule(scores, rates, more, less, task, margin):
        variance, df = method(scores, rates)
        pair = [more, less]
        value = scores[:, task, more].mean(axis=-1) - scores[:, task, less].mean(axis=-1)
        v = variance[:, task][:, pair] / scores.shape[-1]
        f = np.broadcast_to(df, variance.shape)[:, task][:, pair]
        return satterthwaite(value, v, f, margin)

    return rule


class Moderated:
    """The rule of `moderated.py`; the cells of a batch of studies are computed once."""

    def __init__(self):
        self.of, self.cells = None, None

    def __call__(self, scores, rates, more, less, task, margin):
        if self.of is not scores:
            others = rates.reshape(*rates.shape[:2], -1, rates.shape[-1])
            self.of, self.cells = scores, cells_of(scores, others)
        cells, pair = self.cells, [more, less]
        value = cells.mean[:, task, more] - cells.mean[:, task, less]
        variance = cells.variance[:, task][:, pair] / cells.n[:, task][:, pair]
        test = contrast_of(value, variance, cells.df[:, task][:, pair], margin)
        above, below = (np.where(np.isnan(one), 1.0, one) for one in (test.above, test.below))
        return above, below, test.low, test.high, value, test.se


RULES = {
    "paired": paired,
    "limma": unpaired(lambda scores, rates: guarded(scores, rates, guard=False)),
    "limma, guarded": unpaired(guarded),
    "used": Moderated(),
}


# ---------------------------------------------------------------- verdicts


def holm(p):
    """Holm's adjusted p-values over the last axis."""
    order = np.argsort(p, axis=-1)
    steps = np.arange(p.shape[-1], 0, -1)
    adjusted = np.minimum(1.0, np.maximum.accumulate(np.take_along_axis(p, order, -1) * steps, axis=-1))
    return np.take_along_axis(adjusted, np.argsort(order, axis=-1), -1)


def verdicts(scenario: Scenario, rule: str, scores, rates, alpha=ALPHA):
    """Reproduced and refuted (studies, claims), and for each part whether its interval covers, and its half width."""
    reproduced, refuted, against, covers, halves = [], [], [], [], []
    for more, less, tasks, margin in scenario.claims:
        parts = [RULES[rule](scores, rates, more, less, task, margin) for task in tasks]
        above, below, low, high, value, sd = (np.stack(one, axis=-1) for one in zip(*parts, strict=True))
        true = np.array([scenario.truth[task, more] - scenario.truth[task, less] for task in tasks])
        covers.append((low <= true) & (true <= high))
        halves.append((high - low) / 2)
        if rule == "paired":  # two-sided, and the wrong sign counts as 1
            reproduced.append(np.where(value > margin, 2 * above, 1.0).max(axis=-1))
            against.append((value, 2 * np.minimum(above, below), sd, margin))
        else:
            reproduced.append(above.max(axis=-1))
            refuted.append(np.minimum(1.0, len(tasks) * below.min(axis=-1)))
    adjusted = holm(np.stack(reproduced, axis=-1))
    found = adjusted <= alpha
    if rule == "paired":
        level = ALPHA / np.maximum(1, (~found).sum(axis=-1))
        seeds = scenario.seeds
        unit = detectable_by(1 / math.sqrt(seeds), seeds - 1, ALPHA / len(scenario.claims))
        contrary = [_contrary(*one, level, unit) for one in against]
        lost = np.stack(contrary, axis=-1) & ~found
    else:
        lost = holm(np.stack(refuted, axis=-1)) <= alpha
    return found, lost, np.concatenate(covers, axis=-1), np.concatenate(halves, axis=-1)


def _contrary(value, p, sd, margin, level, unit):
    """Whether a part speaks against a claim: clearly below the margin, or below it where 0.5 points would be found."""
    below = value <= margin
    clear = p <= level[:, None]
    return (below & (clear | (unit * sd <= 0.5))).any(axis=-1)


def true_verdicts(scenario: Scenario) -> tuple[np.ndarray, np.ndarray]:
    """Which claims hold, and which have a reversed part; a part at its margin is neither."""
    truth = scenario.truth
    gaps = [[truth[task, a] - truth[task, b] - m for task in on] for a, b, on, m in scenario.claims]
    return np.array([min(one) > 1e-9 for one in gaps]), np.array([min(one) < -1e-9 for one in gaps])


def look_repeatedly(scenario: Scenario, levels: dict[int, float], studies: int) -> Rates:
    """The rates of the used rule, if verdicts are given at each number of seeds at its level, and stand."""
    holds, reversed_ = true_verdicts(scenario)
    chance = np.random.default_rng([studies, *scenario.name.encode()])
    rates = scenario.draw(chance, studies)
    scores = chosen(rates, chance)
    found = lost = np.zeros((studies, len(scenario.claims)), dtype=bool)
    for seeds, level in levels.items():
        now = verdicts(scenario, "used", scores[..., :seeds].copy(), rates[..., :seeds], level)
        found, lost = found | (now[0] & ~lost), lost | (now[1] & ~found)
    return Rates(
        (found & ~holds).any(axis=-1).mean(),
        (lost & ~reversed_).any(axis=-1).mean(),
        ((found & holds) | (lost & reversed_)).sum(axis=-1).mean(),
        now[2].mean(),
        np.nanmedian(now[3]),
    )


def simulate(scenario: Scenario, rules=tuple(RULES), studies=1000, batch=500, seed=0) -> dict[str, Rates]:
    """The error rates of each rule."""
    holds, reversed_ = true_verdicts(scenario)
    tallies = {rule: [] for rule in rules}
    chance = np.random.default_rng([seed, *scenario.name.encode()])
    for _ in range(math.ceil(studies / batch)):
        rates = scenario.draw(chance, batch)
        scores = chosen(rates, chance)
        for rule in rules:
            found, lost, covers, halves = verdicts(scenario, rule, scores, rates)
            tallies[rule].append(
                (
                    (found & ~holds).any(axis=-1).mean(),
                    (lost & ~reversed_).any(axis=-1).mean(),
                    ((found & holds) | (lost & reversed_)).sum(axis=-1).mean(),
                    covers.mean(),
                    np.nanmedian(halves),
                )
            )
    return {rule: Rates(*np.mean(tally, axis=0)) for rule, tally in tallies.items()}


# ---------------------------------------------------------------- scenarios


def normal(sd=1.0):
    """Independent normal noise; `sd` is a number or an array that broadcasts to (tasks, models, rates, seeds)."""
    return lambda chance, shape: sd * chance.normal(size=shape)


def by_model(spread):
    """Each study draws the sd of each model anew, lognormal, the same for all its rates; noise is shared by rates."""

    def noise(chance, shape):
        sd = np.exp(spread * chance.normal(size=(*shape[:3], 1, 1)))
        shared = chance.normal(size=(*shape[:3], 1, shape[4]))
        return sd * (0.9 * shared + math.sqrt(1 - 0.81) * chance.normal(size=shape))

    return noise


def shared_by_seed(share):
    """A seed moves all models of a task alike, by this share of the variance."""

    def noise(chance, shape):
        common = chance.normal(size=(*shape[:2], 1, 1, shape[4]))
        return math.sqrt(share) * common + math.sqrt(1 - share) * chance.normal(size=shape)

    return noise


def either_or(high, gap=40.0):
    """On the third task a fine-tuning either learns, with probability `high`, or stays `gap` points lower."""

    def noise(chance, shape):
        values = chance.normal(size=shape)
        learnt = chance.random(size=(*shape[:3], 1, shape[4])) < high
        values[:, 2] += gap * np.broadcast_to(learnt, shape)[:, 2]
        return values

    return noise


def loud(model, times):
    sd = np.ones((TASKS, 7, 1, 1))
    sd[:, model] = times
    return normal(sd)


def skewed(chance, shape):
    """Exponential noise, to the right for models of even number, to the left for the others."""
    sign = np.where(np.arange(shape[2]) % 2, -1.0, 1.0)[:, None, None]
    return sign * (chance.exponential(size=shape) - 1)


def heavy(chance, shape):
    return chance.standard_t(2.5, size=shape)


def failing(share):
    """At the highest rate a fine-tuning diverges with this probability, 20 points down."""

    def noise(chance, shape):
        values = chance.normal(size=shape)
        values[..., -1, :] -= 20.0 * (chance.random(size=(*shape[:3], shape[4])) < share)
        return values

    return noise


def pretrained(finetunings=3):
    """A seed is a pretraining seed with as much noise as a fine-tuning, shared by tasks and rates; means of three."""

    def noise(chance, shape):
        return chance.normal(size=(shape[0], 1, shape[2], 1, shape[4])) + chance.normal(
            size=shape
        ) / math.sqrt(finetunings)

    return noise


def missing(scores):
    """Models of odd number have three seeds of five."""
    scores[:, :, 1::2, :, 3:] = np.nan
    return scores


def rounded(examples):
    """Accuracies on so few test examples that many seeds agree exactly."""
    return lambda scores: np.round(scores * examples / 100) * 100 / examples


def one_null_part():
    """Effects of three sds on every part of every claim but one, which is at its margin."""
    claims = ((0, 1, ALL, 0.0), (2, 3, ALL, 0.0), (4, 5, ALL, 0.0), (6, 7, (0, 1), 0.0), (8, 9, (0, 3), -0.5))
    truth = np.zeros((TASKS, 10))
    truth[:, ::2] = 6.0
    for more, less, tasks, margin in claims:
        truth[tasks[more % len(tasks)], more] = truth[tasks[more % len(tasks)], less] + margin
    return {"truth": truth, "claims": claims}


def in_tasks(chance, shape):
    """A seed moves all tasks of a model alike, by half of the variance."""
    common = chance.normal(size=(shape[0], 1, *shape[2:]))
    return math.sqrt(0.5) * (common + chance.normal(size=shape))


def three_modes(chance, shape):
    """Scores at one of three levels, 5 points apart; which is drawn for every seed, on every task."""
    return 5.0 * chance.integers(0, 3, size=shape) + 0.5 * chance.normal(size=shape)


def laplace(chance, shape):
    """Laplace noise; the variance of each cell is drawn anew, from a gamma distribution of shape 1."""
    return np.sqrt(chance.gamma(1.0, size=(*shape[:4], 1))) * chance.laplace(size=shape)


def pairs(models):
    """Ten claims of one part each on disjoint pairs of models, so that many tests are independent."""
    claims = tuple((2 * i, 2 * i + 1, (task,), 0.0) for i in range(models // 2) for task in (0, 1))
    return {"truth": np.zeros((TASKS, models)), "claims": claims}


FEW = {"truth": np.zeros((TASKS, 2)), "claims": ((0, 1, (0,), 0.0), (0, 1, (1,), 0.0), (0, 1, (2, 3), 0.0))}
TWO_SD = np.zeros((TASKS, 7)) + 2.0 * np.array([0, 2, 2, 1, 1, 3, 1.5])

SCENARIOS = (
    Scenario("all equal", normal(), tuned=True),
    Scenario("noise shared by seed", shared_by_seed(0.5), tuned=True),
    Scenario("either-or on one task, 50%", either_or(0.5), tuned=True),
    Scenario("either-or on one task, 80%", either_or(0.8), tuned=True),
    Scenario("unequal variances over models", by_model(0.7), tuned=True),
    Scenario("one null part in each claim", normal(), **one_null_part(), tuned=True),
    Scenario("two models, one rate", normal(), **FEW, rates=1, tuned=True),
    Scenario("unequal variances, two models, one rate", by_model(1.0), **FEW, rates=1, tuned=True),
    Scenario("one model five times as noisy", loud(MLM, 5.0), tuned=True),
    Scenario("skewed to either side", skewed, tuned=True),
    Scenario("two seeds, unequal variances", by_model(0.7), seeds=2, tuned=True),
    Scenario("the replica's scores and noise", normal(REPLICA_SD[..., None, None]), truth=REPLICA, tuned=True),
    Scenario("effects of 2 to 6 sd", normal(), truth=TWO_SD, tuned=True),
    Scenario("effects of 2 to 6 sd, unequal variances", by_model(0.7), truth=TWO_SD, tuned=True),
    Scenario("one in ten diverges at the highest rate", failing(0.1), tuned=True),
    Scenario("heavy tails (t, 2.5 df)", heavy, tuned=True),
    Scenario("two seeds", normal(), seeds=2, tuned=True),
    Scenario("noisier at higher rates", normal(np.array([0.3, 1.0, 3.0])[:, None])),
    Scenario("scores rounded to 1 point", normal(), finish=rounded(100)),
    Scenario("three or five seeds", normal(), seeds=5, finish=missing),
    Scenario("pretraining seeds, each tuned three times", pretrained()),
    Scenario("ten seeds, unequal variances", by_model(0.7), seeds=10),
    Scenario("noise shared by the tasks of a model", in_tasks),
    Scenario("three modes on every task", three_modes),
    Scenario("Laplace noise, variances from a gamma", laplace),
    Scenario("twenty models in pairs, one rate", by_model(0.5), **pairs(20), rates=1),
    Scenario("four models in pairs, two rates, four seeds", by_model(0.5), **pairs(4), rates=2, seeds=4),
    Scenario("effects of 2 to 6 sd, five seeds", normal(), truth=TWO_SD, seeds=5),
)  # fmt: skip
