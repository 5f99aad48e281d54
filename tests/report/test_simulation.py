"""Verdicts on invented ledgers whose truth is known: what is there is found, and what is not there is not.

The structure is that of the paper's study, all 50 models, with a task or two of each family.
"""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from biphase import CATALOG, Finetune
from biphase.papers.gisserot2025 import PAPER
from biphase.report.verdicts import judge

TASKS = ("sst2", "mnli", "conll2003", "squad", "msmarco")
RATES, SEEDS = (1e-5, 5e-5, 2e-4), (0, 1, 2, 3, 4)
# Over seeds, in points: the paper's own intervals suggest 0.12 for SC; the others are noisier.
NOISE = {"SC": 0.2, "TC": 0.12, "QA": 0.5, "IR": 0.25}
MEANS = Path(__file__).parents[2] / "benchmarks" / "paper_means.csv"
LEVEL = {"SC": 85.0, "TC": 92.0, "QA": 60.0, "IR": 78.0}
NO_WORSE = ("C4", "C19")  # that nothing is worse is true where everything is equal
OTHERS = [one for one in (*(f"C{n}" for n in range(1, 21)), "B1", "B2", "B3", "B4") if one not in NO_WORSE]


@pytest.fixture(scope="module")
def plan(plan_of):
    finetune = Finetune(tuple(CATALOG[one] for one in TASKS), lrs=RATES, seeds=SEEDS)
    return plan_of(replace(plan_of("paper").study, finetune=finetune))


@pytest.fixture(scope="module")
def simulated(plan, evidence_of):
    """A ledger of `truth(model name, family)`; validation scores lean on the test scores, as they do."""

    def ledger(seed, truth, lost=lambda model: 0.0, quiet=1.0):
        draw = np.random.default_rng(seed)
        rates = np.array([[-1.0], [0.0], [-0.7]])  # what a rate loses, in parts of what the model loses
        test, validation = {}, {}

        def score(model, task, shape):
            mean = truth(model.name, task.family) + lost(model) * rates
            test[model.name, task.name] = mean + draw.normal(0, NOISE[task.family] * quiet, shape)
            validation[model.name, task.name] = test[model.name, task.name] + draw.normal(0, 0.1, shape)
            return test[model.name, task.name]

        return evidence_of(
            plan,
            score,
            lambda model, task, shape: validation[model.name, task.name],
            metrics=("f1", "entity_f1"),
        )

    return ledger


def verdicts(evidence):
    return {one.id: one.verdict for one in judge(evidence, (PAPER,))}


MANY = pytest.mark.parametrize("studies", [20, pytest.param(250, marks=pytest.mark.campaign)])


@MANY
def test_where_nothing_differs_hardly_a_study_finds_anything(simulated, studies):
    """The chance of any false finding in a study stays below 5%."""
    wrong = refuted = 0
    for seed in range(studies):
        found = verdicts(simulated(seed, lambda model, family: LEVEL[family]))
        assert found["C21"] == "not tested"
        wrong += any(found[one] in ("reproduced", "holds in part") for one in OTHERS)
        refuted += any(found[one] == "not reproduced" for one in OTHERS)
    assert wrong <= 0.05 * studies
    assert refuted <= 0.05 * studies


def edge(model, family):
    """Every claim of no difference at its margin, in one part; everything else of it clearly true."""
    if family == "TC" and model == "210m-clm-42k":
        return LEVEL[family] - 0.5  # C4 asks for more
    if family == "TC" and model in ("610m-clm-42k", "1b-clm-42k"):
        return LEVEL[family] + 4
    if model == "610m-clm-dec42k-mlm40-54k":
        return LEVEL[family] + (4 if family != "SC" else -0.5)  # C19
    if family == "SC" and model == "610m-clm-32k-mlm40-42k":
        return LEVEL[family] - 0.5  # C14
    if family == "SC" and model in ("610m-clm-10k-mlm40-42k", "610m-clm-21k-mlm40-42k"):
        return LEVEL[family] + 4
    if family == "SC" and model == "610m-clm-42k":
        return LEVEL[family] - 4
    return LEVEL[family]


@MANY
def test_what_is_worse_by_the_margin_is_hardly_ever_called_no_worse(simulated, studies):
    wrong = 0
    for seed in range(studies):
        found = verdicts(simulated(1_000 + seed, edge, quiet=0.3))
        wrong += any(found[one] == "reproduced" for one in (*NO_WORSE, "C14"))
    assert wrong <= 0.05 * studies


def test_what_is_no_worse_is_found_to_be(simulated):
    def truth(model, family):
        """As at the edge, but for nought where it is half a point below."""
        return max(edge(model, family), LEVEL[family] - (4 if model == "610m-clm-42k" else 0))

    found = verdicts(simulated(3, truth, quiet=0.3))
    assert [found[one] for one in (*NO_WORSE, "C14")] == ["reproduced"] * 3


@pytest.fixture(scope="module")
def paper_means():
    with MEANS.open() as file:
        return {
            (row["model"], family): float(row[family].lstrip("~"))
            for row in csv.DictReader(file)
            for family in LEVEL
        }


LARGE = ("C1", "C2", "C5", "C8", "C10", "C12", "C16")


def test_the_papers_large_effects_are_found(simulated, paper_means):
    for seed in range(3):
        evidence = simulated(
            seed,
            lambda model, family: paper_means[model, family],
            lambda model: 8 if model.recipe.kind == "clm" else 14,
        )
        found = verdicts(evidence)
        assert {one: found[one] for one in LARGE} == dict.fromkeys(LARGE, "reproduced")
        # Effects of 0.3 points in IR or SC are beyond five seeds with this noise, and said to be.
        assert {found[one] for one in ("C13", "C17", "B1")} <= {"underpowered", "reproduced"}
        # As large as what is found four times in five: 1.27 points of IR at 1b, 0.63 of TC on the way.
        assert {found[one] for one in ("C3", "C7", "C9", "C11", "C15")} <= {"reproduced", "underpowered"}


def test_effects_that_are_turned_round_are_refused(simulated, paper_means):
    """The truth with CLM and MLM 40% exchanged."""
    swapped = {"clm": "mlm40", "mlm40": "clm"}

    def truth(model, family):
        words = model.split("-")
        if len(words) < 5:  # one objective
            words[1] = swapped.get(words[1], words[1])
        return paper_means["-".join(words), family]

    found = verdicts(simulated(5, truth))
    assert {found[one] for one in ("C1", "C2", "C3", "C10", "C11")} == {"not reproduced"}
    assert found["C5"] == "not applicable", "MLM has no advantage that could grow"


def test_an_effect_that_was_taken_away_is_not_found(simulated, paper_means):
    def truth(model, family):
        first = model.startswith("610m-clm-") and "-mlm40-" in model and "dec" not in model
        return paper_means[f"610m-mlm40-{model.rsplit('-', 1)[1]}" if first else model, family]

    found = [verdicts(simulated(seed, truth)) for seed in range(4)]
    assert all(one["C1"] == "reproduced" for one in found)
    assert not any(one[name] == "reproduced" for one in found for name in ("C13", "C14", "C15", "B1"))
