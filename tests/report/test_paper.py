"""The paper's numbers: found by how a model was made, whatever it is called, and by nothing less."""

from dataclasses import replace
from pathlib import Path

import pytest

from biphase.keys import Identities
from biphase.papers.gisserot2025.published import FAMILY_MEANS, RATES, at_rates, family_mean, made
from biphase.presets import corpus_of
from biphase.report.recipes import models, recipe_of
from biphase.study.load import load
from biphase.study.plan import make_plan

OUTSIDE = Identities(data=lambda run: corpus_of(run).name, hub=lambda hub: hub.source)
FAMILIES = ("SC", "TC", "QA", "IR")

# As printed: Tables 2 to 17, Figures 1 and 3. None: not known.
PRINTED = {
    "210m-mlm40-42k": (84.89, 92.13, 49.43, 75.78),
    "210m-clm-42k": (82.80, 92.18, 39.26, 72.83),
    "610m-mlm40-42k": (87.00, 92.21, 62.77, 79.55),
    "610m-clm-42k": (83.58, 92.69, 42.09, 76.20),
    "1b-mlm40-42k": (88.23, 92.51, 70.28, 79.95),
    "1b-clm-42k": (82.68, 92.46, 44.48, 78.68),
    "610m-mlm20-42k": (87.56, 92.79, 65.00, None),
    "610m-mlm50-42k": (None, None, None, 79.62),
    "1b-mlm50-42k": (None, 92.88, None, 81.97),
    "610m-mlm40-42k-5000": (72.49, 89.36, 27.89, 54.50),
    "610m-clm-42k-5000": (78.56, 91.17, 34.30, 65.22),
    "610m-mlm40-42k-40000": (86.40, 92.02, 57.90, 79.26),
    "610m-clm-42k-40000": (83.48, 92.65, 41.99, 76.05),
    "610m-clm-10k-mlm40-42k": (87.85, 93.07, 67.77, 79.88),
    "610m-clm-21k-mlm40-42k": (87.57, None, None, None),
    "610m-clm-32k-mlm40-42k": (87.06, None, None, None),
    "610m-clm-11k-mlm40-22k": (None, None, 55.97, None),
    "610m-clm-17k-mlm40-22k": (None, None, None, 77.81),
    "610m-mlm40-dec42k-mlm40-54k": (87.61, 92.27, 66.57, 79.92),
    "610m-clm-dec42k-mlm40-54k": (87.84, 92.77, 63.21, 80.27),
    "610m-mlm40-dec42k-mlm40-64k": (87.47, 92.11, 67.66, 80.45),
    "610m-clm-dec42k-mlm40-64k": (88.40, 92.70, 66.62, 80.70),
}
NOWHERE = (None, None, None, None)


@pytest.fixture(scope="module")
def plan():
    return make_plan(load(Path(__file__).parents[2] / "studies/paper.py").study, OUTSIDE)


def test_every_model_of_the_paper_has_the_numbers_the_paper_prints_and_no_other(plan):
    found = {
        name: tuple(family_mean(model.recipe, family) for family in FAMILIES)
        for name, model in models(plan).items()
    }
    assert found == {name: PRINTED.get(name, NOWHERE) for name in plan.results}
    assert len(FAMILY_MEANS) == len(PRINTED)


def test_names_play_no_part(plan):
    renamed = tuple(replace(run, name=f"r{number}") for number, run in enumerate(plan.study.runs))
    # Runs that go on name the run before them; its name must not matter either.
    other = make_plan(replace(plan.study, runs=renamed), OUTSIDE)
    for run, twin in zip(plan.study.runs, renamed, strict=True):
        for family in FAMILIES:
            assert family_mean(recipe_of(other, twin.name), family) == family_mean(
                recipe_of(plan, run.name), family
            )


@pytest.mark.parametrize(
    "change",
    [
        {"size": "60m"},
        {"decayed": False},
        {"base": "itself"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_model_that_differs_in_one_fact_is_not_in_the_paper(plan, change):
    recipe = recipe_of(plan, "610m-clm-10k-mlm40-42k")
    changed = {"base": replace(recipe, spans=recipe.spans[:1])} if "base" in change else change
    assert family_mean(recipe, "SC") == 87.85
    assert family_mean(replace(recipe, **changed), "SC") is None


def test_another_split_ratio_or_budget_is_another_model(plan):
    recipe = recipe_of(plan, "610m-clm-10k-mlm40-42k")
    clm, mlm = recipe.spans
    for spans in (
        (replace(clm, until=11_000), replace(mlm, first=11_000)),
        (clm, replace(mlm, until=43_000)),
        (clm, replace(mlm, objective=replace(mlm.objective, ratio=0.3))),
    ):
        assert family_mean(replace(recipe, spans=spans), "SC") is None


def test_raw_runs_are_known_for_sst2_alone(plan):
    masked, causal = (recipe_of(plan, f"610m-{word}-42k") for word in ("mlm40", "clm"))
    assert at_rates(masked, "sst2") == {1e-5: 76.15, 5e-5: 90.25, 2e-4: 82.34, 5e-4: 81.77}
    assert at_rates(causal, "sst2") == {1e-5: 83.14, 5e-5: 90.94, 2e-4: 87.27, 5e-4: 82.91}
    assert at_rates(masked, "mnli") == {}
    assert at_rates(recipe_of(plan, "610m-mlm50-42k"), "sst2") == {}
    spreads = [max(rates.values()) - min(rates.values()) for rates in RATES.values()]
    assert [round(spread, 1) for spread in spreads] == [14.1, 8.0]


def test_a_continued_model_is_listed_by_the_steps_since_its_base(plan):
    listed = made(recipe_of(plan, "610m-clm-dec42k-mlm40-54k"))
    assert (listed.kind, listed.steps, listed.causal, listed.ratio) == ("mlm", 12_000, 0, 0.4)
    assert listed.base is not None
    assert (listed.base.kind, listed.base.steps, listed.base.causal) == ("clm", 42_000, 42_000)


def test_another_shape_rule_of_masking_or_batch_is_not_the_papers(plan):
    recipe = recipe_of(plan, "610m-mlm40-42k")
    (span,) = recipe.spans
    bert = replace(span, objective=replace(span.objective, replace=(0.8, 0.1, 0.1)))
    for changed in (
        replace(recipe, shape="another"),
        replace(recipe, spans=(bert,)),
        replace(recipe, tokens=recipe.tokens // 2),
    ):
        assert family_mean(changed, "SC") is None
        assert at_rates(changed, "sst2") == {}
    assert family_mean(replace(recipe, tokens=42_000 * 2_373_120), "SC") == 87.00, "its other figure"
