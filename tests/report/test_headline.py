"""The answer of a report: chosen by validation scores, given in test scores, and no stronger than the evidence."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from biphase import CLM, MLM, Hub, Pretrain, Stage, Study
from biphase.report.contrasts import Contrast, Measure
from biphase.report.evidence import gather
from biphase.report.headline import headline, noise, over_families
from biphase.study.ledger import finetunings


def with_scores(evidence, part, change):
    """The evidence with the scores of one part changed: `change(result, array)`."""
    grids = {}
    for (result, task), grid in evidence.grids.items():
        changed = {name: change(result, scores.copy()) for name, scores in getattr(grid, part).items()}
        grids[result, task] = replace(grid, **{part: changed})
    return replace(evidence, grids=grids)


@pytest.fixture
def evidence(ledger):
    return gather(*ledger)


def test_the_best_recipe_is_named_with_its_score_and_its_leads(evidence):
    top = headline(evidence, [])
    assert top.subject == "CLM for 10 steps, then MLM 40% for 10"
    facts = (top.subject, "best of 3", "(1m, 20 steps, 2.56k tokens)", "(SC)", "(QA) and retrieval (IR)")
    assert all(fact in top.answer for fact in facts)
    model = evidence.models["both"]
    mean = np.mean([evidence.on(model, tasks).mean() for tasks in evidence.families.values()])
    assert f"{100 * mean:.2f}%" in top.answer
    assert [lead.rival for lead in top.against] == ["masked only (mlm)", "causal only (clm)"], (
        "the nearest first"
    )
    assert all(lead.average.low > 0 for lead in top.against)
    assert "points ahead [" in top.against[0].told


def test_checkpoints_on_the_way_are_no_rivals(invent, run, grid, tmp_path):
    runs = (
        run("long", Stage(CLM(), 20), keep=(10,)),
        run("clm", Stage(CLM(), 10)),
        run("mlm", Stage(MLM(0.4), 10)),
    )
    means = {"long-10": 90.0, "long": 70.0, "clm": 75.0, "mlm": 80.0}
    top = headline(gather(*invent(Study("s", runs, grid("squad")), tmp_path / "store", means=means)), [])
    assert top.subject == "MLM 40% for 10 steps"
    assert "of 2 recipes" in top.answer


def test_validation_chooses_and_test_scores_play_no_part(evidence):
    swapped = with_scores(evidence, "test", lambda name, array: array - 0.2 * (name == "both"))
    top = headline(swapped, [])
    assert top.subject == "CLM for 10 steps, then MLM 40% for 10", (
        "chosen by validation, whatever the test says"
    )
    assert "points behind [" in top.against[0].told
    assert not any(lead.average.low > 0 for lead in top.against)
    assert top.answer.startswith("All of 3 recipes but mlm are shown worse")
    chosen = with_scores(evidence, "validation", lambda name, array: array - 0.2 * (name == "both"))
    assert headline(chosen, []).subject == "MLM 40% for 20 steps"


RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("change", "clear", "answer", "told"),
    [
        (
            lambda name, array: array * 0 + 0.5 + 0.1 * RNG.random(array.shape),
            [False, False],
            "None of 3 recipes is shown worse than the best.",
            "points",
        ),
        (
            lambda name, array: array * 0 + 0.5,
            [False, False],
            "None of 3 recipes is shown worse",
            "0.00 points ahead (all seeds alike",
        ),
        (
            lambda name, array: array - 0.03 * (name == "both"),
            [False, True],
            "2 of 3 recipes are not shown worse than the best: mlm and both.",
            "points",
        ),
    ],
    ids=["noise", "equal seeds", "ahead of some"],
)
def test_a_lead_is_called_one_only_where_it_is_clear(evidence, change, clear, answer, told):
    top = headline(with_scores(evidence, "test", change), [])
    assert [lead.average.low > 0 for lead in top.against] == clear
    assert top.answer.startswith(answer)
    assert told in top.against[0].told


def test_leads_are_measured_as_claims_are(evidence):
    both, mlm = evidence.models["both"], evidence.models["mlm"]
    quantity = over_families(evidence, both) - over_families(evidence, mlm)
    found = Measure(evidence)(Contrast("", quantity)).estimate
    (lead,) = (one for one in headline(evidence, []).against if one.name == "mlm")
    assert lead.average == found
    tasks = evidence.families.values()
    gaps = [np.mean(evidence.on(both, some)) - np.mean(evidence.on(mlm, some)) for some in tasks]
    assert found.mean == pytest.approx(100 * np.mean(gaps))
    assert [one.mean for _, one in lead.families] == pytest.approx([100 * gap for gap in gaps])


def test_half_a_study_speaks_of_what_is_complete_and_nothing_complete_is_no_answer(ledger):
    plan, store = ledger

    def remove(gone):
        for training in filter(gone, finetunings(plan)):
            for trial in training.trials:
                shutil.rmtree(store.trials / trial.key, ignore_errors=True)
        return headline(gather(plan, store), [])

    half = remove(lambda one: one.model == plan.results["both"] and one.lr == 2e-5)
    assert "of 2 recipes" in half.answer
    assert "165 of 180" in half.scale
    nothing = remove(lambda one: one.seed or one.lr == 2e-5)
    assert nothing.answer.startswith("Not answered")
    assert "40 of 180" in nothing.answer
    assert nothing.against == ()


def test_one_seed_has_no_interval_and_one_model_no_rival(invent, run, grid, tmp_path):
    runs = (run("clm", Stage(CLM(), 20)), run("mlm", Stage(MLM(0.4), 20)))
    top = headline(gather(*invent(Study("one", runs, grid("squad", seeds=(0,))), tmp_path / "seed")), [])
    assert all("no interval" in text for text in (top.answer, top.against[0].told, top.noise))
    top = headline(gather(*invent(Study("one", runs[:1], grid("squad")), tmp_path / "model")), [])
    assert top.answer.startswith("CLM for 20 steps (1m) scores ")
    assert top.against == ()


def test_models_that_were_not_trained_here_are_compared_as_they_are(invent, grid, tmp_path):
    models = [Pretrain(name, start=Hub(f"x/{name}", revision="a" * 40)) for name in ("one", "two", "three")]
    means = {"one": 70.0, "two": 80.0, "three": 60.0}
    study = Study("as they are", tuple(models), grid("squad", "sst2"))
    top = headline(gather(*invent(study, tmp_path / "store", means=means)), [])
    assert top.answer.startswith("two scores best")
    assert [lead.rival for lead in top.against] == ["one, the next"]


def test_models_are_chosen_on_the_seeds_that_all_have(evidence):
    """A model whose worst seed is not there yet is not the better for it."""
    bad = np.array([0.0, 0.0, -0.3])

    def change(name, array):
        scores = array * 0 + {"both": 0.80, "mlm": 0.81, "clm": 0.5, "clm-10": 0.5}[name] + bad
        scores[:, 2] = np.nan if name == "both" else scores[:, 2]
        return scores

    partly = with_scores(with_scores(evidence, "validation", change), "test", change)
    for grid in partly.grids.values():
        vars(grid).pop("chosen", None)
    assert headline(partly, []).subject == "MLM 40% for 20 steps"


def test_rows_without_a_seed_in_common_are_no_score(invent, run, grid, tmp_path):
    runs = tuple(run(f"clm{seed}", Stage(CLM(), 20), seed=seed) for seed in (1, 2))
    evidence = gather(*invent(Study("s", runs, grid("squad")), tmp_path / "store"))
    assert "cover pretraining seeds and fine-tuning seeds" in noise(evidence)

    def change(name, array):
        array[:, [0, 1] if name == "clm1" else [1, 2]] = np.nan
        return array

    apart = with_scores(with_scores(evidence, "validation", change), "test", change)
    assert headline(apart, []).answer.startswith("Not answered yet: no model has a complete seed")
