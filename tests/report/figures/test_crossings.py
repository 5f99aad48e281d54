"""Where MLM overtakes CLM: the gaps are those that were put in, and a crossing lies where the lines of the seeds cross."""

import math

import numpy as np
import pytest

from biphase import CATALOG, CLM, CORPORA, MLM, SIZES, WSD, Chunks, Finetune, Pretrain, Stage, Study
from biphase.report import tables
from biphase.report.estimates import estimate
from biphase.report.figures.crossings import crossings_figure, gaps
from biphase.report.statistics.curves import crossing, fit_each
from biphase.store import Store

BUDGETS = (100, 200, 400, 800)
TASK = CATALOG["squadshifts-mini"]
OFF = {1: -0.5, 2: 0.0, 3: 0.5}  # of a pretraining seed, in points


def study(seeds, budgets=BUDGETS):
    text = CORPORA["builtin"]
    runs = [
        Pretrain(
            f"{objective.name}-{steps}-s{seed}",
            SIZES["2m"],
            text,
            Stage(objective, steps),
            WSD(1e-3, warmup=10, decay=0.1),
            batch_tokens=256,
            packing=Chunks(64),
            seed=seed,
        )
        for seed in seeds
        for objective in (CLM(), MLM(0.4))
        for steps in budgets
    ]
    return Study("two", tuple(runs), Finetune((TASK,), lrs=(1e-3,), seeds=(0, 1)), papers=("gisserot2025",))


@pytest.fixture
def gap_of(evidence_of, plan_of, tmp_path):
    """The gap of a study in which MLM gains `slope` points on CLM with each doubling, from `first` on."""

    def made(first, slope, seeds=(1, 2, 3), lost=None, budgets=BUDGETS):
        def mean(model, task):
            if (model.recipe.kind, model.recipe.steps) == lost:
                return None
            gained = first + slope * math.log2(model.recipe.steps / BUDGETS[0])
            return 50.0 + gained * (model.recipe.kind == "mlm")

        evidence = evidence_of(plan_of(study(seeds, budgets)), Store(tmp_path), mean)
        for (result, _), grid in evidence.grids.items():
            if result.startswith("mlm"):
                grid.test[grid.metric] += OFF[int(result[-1])] / 100
        return evidence, gaps(evidence, estimate(evidence))

    return made


def test_gaps_are_those_that_were_put_in(gap_of):
    evidence, (gap,) = gap_of(-2.0, 1.0)
    assert (gap.size, gap.family, gap.covers) == ("2m", "QA", "pretraining seeds")
    assert gap.table.mean(axis=0) == pytest.approx([-2, -1, 0, 1])
    assert math.exp(gap.located.estimate) == pytest.approx(400 * 256)
    figure = crossings_figure(evidence, [gap])
    line = next(series for series in figure.panels[0].series if series.name == "2m")
    assert line.y == pytest.approx((-2, -1, 0, 1))
    assert line.views == (
        pytest.approx([steps * 256 / SIZES["2m"].block_parameters for steps in BUDGETS]),
        pytest.approx([steps * 256 for steps in BUDGETS]),
        BUDGETS,
    )
    paper = next(series for series in figure.panels[0].series if series.name == "paper")
    assert paper.y == pytest.approx((-6.41, 15.91, 20.68))
    table = tables.crossings([gap])
    assert table.rows[0][table.columns.index("steps")] == "400"


@pytest.mark.parametrize(
    ("first", "slope", "says"),
    [(-20.0, 1.0, "MLM is behind"), (20.0, 1.0, "MLM is ahead"), (-3.0, 1.0, "not below")],
)
def test_what_lies_outside_the_budgets_is_a_bound(gap_of, first, slope, says):
    _, (gap,) = gap_of(first, slope)
    assert says in str(gap)


def test_one_pretraining_seed_is_judged_over_its_fine_tunings(gap_of):
    _, (gap,) = gap_of(-2.0, 1.0, seeds=(1,))
    assert gap.covers == "fine-tuning seeds"
    assert gap.table.shape == (2, 4)


def test_a_missing_model_leaves_its_budget_out_and_two_budgets_are_too_few(gap_of):
    _, (gap,) = gap_of(-2.0, 1.0, lost=("mlm", 400))
    assert [masked.recipe.steps for masked, _ in gap.pairs] == [100, 200, 800]
    assert gap_of(-2.0, 0.5, budgets=BUDGETS[:2])[1] == []


def test_the_set_holds_the_crossing_however_budgets_of_a_seed_depend_on_each_other():
    random, x = np.random.default_rng(0), np.log(np.array(BUDGETS, float))
    true, hits, runs = x.mean() + 0.3, 0, 1_000
    for _ in range(runs):
        level, slope = random.normal(0, 1.0, (3, 1)), random.normal(2.0, 0.3, (3, 1))
        walk = np.cumsum(random.normal(0, 0.3, (3, 4)), axis=1)
        found = crossing(fit_each(x, level + slope * (x - true) + walk, 1, "seeds"), (x[0] - 3, x[-1] + 3))
        hits += any(low <= true <= high for low, high in found.pieces)
    assert 0.93 < hits / runs < 0.97
