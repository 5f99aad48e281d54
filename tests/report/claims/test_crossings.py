"""Where one curve overtakes another: interpolated over the logarithm, the last time it happens, over each axis."""

import math

import numpy as np
import pytest

from biphase import CATALOG, CLM, MLM, SIZES, Finetune, Pretrain, Stage, Study
from biphase.papers.gisserot2025.claims import Crossing, checkpoints, crossing
from biphase.report.contrasts import ScoreView, comparable_models, rows_in_common

K = 1_000
STEPS = (1 * K, 2 * K, 4 * K, 8 * K)
X = np.array(STEPS, dtype=float)


def test_it_is_found_between_the_checkpoints_over_the_logarithm():
    rising, flat = np.array([0.0, 1.0, 2.0, 3.0]), np.full(4, 1.5)
    assert crossing(X, rising, X, flat) == pytest.approx(math.sqrt(2 * K * 4 * K))
    assert crossing(X, rising, X, np.full(4, 1.25)) == pytest.approx(2 * K * 2**0.25)


def test_the_last_crossing_counts():
    assert crossing(X, np.array([0.0, 2.0, 0.0, 2.0]), X, np.full(4, 1.0)) == pytest.approx(math.sqrt(32) * K)


def test_coming_from_above_is_no_overtaking():
    assert math.isnan(crossing(X, np.array([3.0, 2.0, 1.0, 0.0]), X, np.full(4, 1.5)))
    assert math.isnan(crossing(X, np.array([3.0, 3.0, 3.0, 3.0]), X, np.full(4, 1.5)))


def test_each_curve_may_have_its_own_axis():
    # The other one has come twice as far for each of its checkpoints: what costs more is overtaken later.
    rising, other = np.array([0.0, 1.0, 2.0, 3.0]), np.array([1.0, 1.0, 1.0, 1.0])
    assert crossing(X, rising, 2 * X, other) == pytest.approx(2 * K)
    tilted = np.array([1.0, 2.0, 3.0, 4.0])
    assert math.isnan(crossing(X, tilted - 0.5, 2 * X, tilted - 2))  # ahead from where both are known
    assert crossing(2 * X, tilted, X, np.array([1.5, 1.75, 2.0, 2.25])) == pytest.approx(4 * K)


@pytest.fixture
def words(plan_of, evidence_of):
    """What is said of MLM and CLM scores at the four steps, (steps, seeds) each."""

    def said(masked, causal):
        fields = {"start": SIZES["610m"], "corpus": "fineweb-edu", "keep": STEPS}
        runs = (
            Pretrain("clm", stages=Stage(CLM(), 12 * K), **fields),
            Pretrain("mlm", stages=Stage(MLM(0.4), 12 * K), **fields),
        )
        plan = plan_of(Study("s", runs, Finetune((CATALOG["sst2"],), lrs=(1e-5,), seeds=(0, 1))))

        def score(model, task, shape):
            recipe = model.recipe
            if recipe.steps not in STEPS:
                return np.zeros(shape)
            curve = masked if recipe.kind == "mlm" else causal
            return [curve[STEPS.index(recipe.steps)]]

        evidence = evidence_of(plan, score)
        over = comparable_models(plan, evidence.models)
        found = Crossing(over, tuple(checkpoints(over.lines[0]).values()), "SC")
        everyone = [one for pair in found.checkpoints for one in pair]
        return found.words(ScoreView(evidence, None, rows_in_common(everyone)))

    return said


FLAT = [[50.0, 50.0]] * 4


def test_the_crossing_is_told_in_steps_tokens_and_flops(words):
    said = words([[48.0, 48.0], [49.0, 49.2], [51.0, 51.2], [52.0, 52.0]], FLAT)
    seeds = [2 * K * math.sqrt(2), 2 * K * 2**0.4]
    steps = math.exp(np.mean(np.log(seeds)))
    assert f"MLM 40% overtakes CLM near step {steps:,.0f} (95%: " in said
    assert f", {steps * 2_359_296 / 1e9:.3g}B tokens; at equal FLOPs near " in said
    flops = float(said.rsplit(" ", 1)[1])
    # A step of CLM costs more: its head answers for every token.
    assert steps * 2_359_296 * 2.5e9 < flops < steps * 2_359_296 * 4e9


def test_never_and_always_are_told(words):
    assert words([[48.0, 49.0]] * 4, FLAT) == "MLM 40% has not overtaken CLM by step 8,000"
    assert words([[51.0, 52.0]] * 4, FLAT) == "MLM 40% is ahead from the first checkpoint (step 1,000) on"


def test_seeds_that_are_not_complete_are_left_out(words):
    half = words([[48.0, math.nan], [49.0, 49.0], [51.0, 51.0], [52.0, 52.0]], FLAT)
    assert "near step 2,828, 6.67B tokens" in half  # one seed has no interval
    assert words([[math.nan] * 2] * 4, FLAT) == ""


def test_seeds_in_which_it_never_happens_are_told(words):
    said = words([[48.0, 51.0], [49.0, 51.0], [51.0, 51.0], [52.0, 52.0]], FLAT)
    assert "near step 2,828 in 1 of 2 seeds, 6.67B tokens" in said


def test_pretraining_seeds_are_no_more_fine_tuning_seeds(plan_of, evidence_of):
    """Two pretrainings that agree within and differ between: five cells each are not ten draws."""
    fields = {"start": SIZES["610m"], "corpus": "fineweb-edu", "keep": STEPS}
    runs = [
        Pretrain(f"{name}{seed}", stages=Stage(objective, 12 * K), seed=seed, **fields)
        for name, objective in (("clm", CLM()), ("mlm", MLM(0.4)))
        for seed in (1, 2)
    ]
    plan = plan_of(Study("s", tuple(runs), Finetune((CATALOG["sst2"],), lrs=(1e-5,), seeds=range(5))))
    rising = dict(zip(STEPS, (48.0, 49.0, 51.0, 52.0), strict=True))
    noise = np.linspace(0, 0.1, 5)

    def score(model, task, shape):
        recipe = model.recipe
        return [rising.get(recipe.steps, 0.0) + noise] if recipe.kind == "mlm" else np.full(shape, 50.0)

    evidence = evidence_of(plan, score)
    for step in STEPS:
        evidence.grids[f"mlm2-{step}", "sst2"].test["accuracy"][:] -= 0.005
    over = comparable_models(plan, evidence.models)
    found = Crossing(over, tuple(checkpoints(over.lines[0]).values()), "SC")
    everyone = [one for pair in found.checkpoints for one in pair]
    said = found.words(ScoreView(evidence, None, rows_in_common(everyone)))
    low, high = (float(one.replace(",", "")) for one in said.split("95%: ")[1].split(")")[0].split(" to "))
    assert high > 5 * low, "two pretrainings know little"
