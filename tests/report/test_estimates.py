"""Scores with their intervals, baselines and warnings; grids of learning rates that were too narrow."""

import math
from dataclasses import replace

import numpy as np
import pytest

from biphase import CLM, MLM, Stage, Study
from biphase.metadata import TRIAL
from biphase.report.build import collect, latex, markdown, render
from biphase.report.estimates import edges, estimate
from biphase.report.evidence import gather
from biphase.study.ledger import finetunings


def test_one_seed_has_test_examples_and_what_is_missing_has_its_reason(invent, run, grid, tmp_path):
    study = Study("s", (run("clm", Stage(CLM(), 20)),), grid("squad", "conll2003", seeds=(0,)))
    evidence = gather(*invent(study, tmp_path))
    found = estimate(evidence)
    for score in (found.tasks["clm", "squad"], found.families["clm", "QA"]):
        assert math.isnan(score.seeds.low)
        low, high = score.examples
        assert low < score.seeds.mean < high
        assert ("one seed" in score.no_interval, score.no_examples) == (True, "")
    noise = found.families["clm", "QA"].noise
    assert (noise.pretraining_seeds, noise.finetuning_seeds) == (1, 1)
    every = frozenset(key for row in evidence.grids["clm", "squad"].keys for key in row)
    score = estimate(replace(evidence, bare=every)).tasks["clm", "squad"]
    assert score.examples is None
    assert "in this store" in score.no_examples


TRIVIAL = {"trivial": {"token_f1": {"what": "no answer", "validation": 0.1, "test": 0.125}}}


@pytest.fixture
def collapsed(ledger, rewrite):
    """A ledger in which one model predicts nothing on SQuAD, and all other tasks are of an earlier version."""
    plan, store = ledger
    for training in finetunings(plan):
        for trial in training.trials:
            same = "no answer" if training.model == plan.results["both"] else ""
            more = {"baselines": TRIVIAL, "constant": {"validation": "", "test": same}}

            def change(about, more=more):
                about.update(more) if about["task"]["name"] == "squad" else [about.pop(name) for name in more]

            rewrite(store.trials / trial.key, TRIAL, change)
    return collect(plan, store)


def test_other_metrics_are_told_where_every_seed_has_them(ledger, rewrite):
    plan, store = ledger
    found = estimate(gather(plan, store)).tasks["both", "squad"]
    assert set(found.others) == {"f1", "exact_match"}
    shown = collect(plan, store)
    for text in (markdown(shown), render(shown)):
        assert f"f1 {100 * found.others['f1']:.2f}" in text
    grid = gather(plan, store).grids["both", "squad"]
    assert found.others["f1"] == pytest.approx(grid.at_chosen(grid.test, "f1").mean())
    for key in {key for row in grid.keys for key in row[:1]}:  # of one seed
        rewrite(store.trials / key, TRIAL, lambda about: about["scores"]["test"].pop("f1"))
    assert set(estimate(gather(plan, store)).tasks["both", "squad"].others) == {"exact_match"}


def test_a_board_has_the_baselines_of_its_columns_below_its_models(collapsed):
    families, tasks = collapsed.boards
    for board, column in ((families, "QA"), (tasks, "squad")):
        ((name, cells),) = board.baselines
        assert name == "trivial"
        known = dict(zip(board.columns, cells, strict=True))
        assert (known.pop(column).what, set(known.values())) == ("no answer", {None})
    for text in (markdown(collapsed), latex(collapsed)["tasks.tex"], render(collapsed)):
        assert "trivial baseline" in text
        assert "12.50" in text
    row = next(one for one in collapsed.tables[0].rows if one[0] == "clm" and one[2] == "squad")
    assert any("trivial 12.5000 (no answer)" in cell for cell in row)


def test_a_model_that_is_not_above_a_baseline_is_marked_and_so_are_claims_about_it(ledger, rewrite):
    plan, store = ledger
    known = {"lexical": {"token_f1": {"what": "counted words", "validation": 0.1, "test": 0.81}}}
    for training in finetunings(plan):
        for trial in training.trials:
            if trial.task.name == "squad":
                rewrite(store.trials / trial.key, TRIAL, lambda about: about.update(baselines=known))
    shown = collect(plan, store)  # CLM has 80 there, MLM 82
    warned = {name: score.not_above for (name, on), score in shown.estimates.tasks.items() if on == "squad"}
    assert warned["clm"] == "not above counted words"
    assert (warned["mlm"], warned["both"]) == ("", "")
    for text in (markdown(shown), latex(shown)["tasks.tex"], render(shown)):
        assert "not above counted words" in text
    caveats = {one.id: " ".join(one.caveats) for one in shown.findings}
    assert "clm on squad (" in caveats["C2"]
    assert "counted words 81.00" in caveats["C2"]
    assert "baseline" not in caveats["C1"]


def test_scores_of_constant_predictions_are_flagged_and_never_the_best(collapsed):
    tasks = collapsed.boards[1]
    cells = {line.model.name: line.cells[tasks.columns.index("squad")] for line in tasks.lines}
    assert cells["both"].score.constant == 3
    assert collapsed.headline.subject.startswith("CLM")
    assert "constant predictions in 3 fine-tunings" in collapsed.headline.answer
    assert cells["both"].score.seeds.mean == max(one.score.seeds.mean for one in cells.values())
    assert [name for name, one in cells.items() if one.best] == ["mlm"]
    for text in (markdown(collapsed), latex(collapsed)["tasks.tex"], render(collapsed)):
        assert "constant predictions in 3 fine-tunings" in text
    assert not any(one.score.constant for name, one in cells.items() if name != "both")


def test_a_pretraining_that_is_not_there_yet_takes_nothing_from_the_other(invent, run, grid, tmp_path):
    runs = tuple(run(f"mlm{seed}", Stage(MLM(0.4), 20), seed=seed) for seed in (1, 2))
    evidence = gather(*invent(Study("s", runs, grid("squad")), tmp_path, results=("mlm2",)))
    score = estimate(evidence).tasks["mlm1", "squad"]
    assert evidence.grids["mlm1", "squad"].examples == 0
    assert score.seeds.n == 3
    assert score.examples[0] < score.seeds.mean < score.examples[1]


# ---------------------------------------------------------------- edges of the grid


HIGHEST, LOWEST = "the highest, 2e-4, won", "the lowest, 2e-5, won"


@pytest.mark.parametrize(
    ("places", "rates", "fact"),
    [  # which rate wins for each seed; how many rates are planned
        ((2, 2, 2), 3, f"on squad {HIGHEST} 12 of 12 times"),
        ((2, 1, 2), 3, f"on squad {HIGHEST} 8 of 12 times"),
        ((0, 0, 1), 3, f"on squad {LOWEST} 8 of 12 times"),
        ((1, 1, 2), 3, ""),
        ((0, 1, 2), 3, ""),
        ((), 3, ""),  # all rates do alike
        ((1, 1, 1), 2, ""),  # intermediate checkpoints have fewer rates
    ],
)
def test_an_end_of_the_grid_that_wins_most_often_is_named(ledger, places, rates, fact):
    evidence = gather(*ledger)
    grids = {}
    for key, grid in evidence.grids.items():
        scores = np.full((3, 3), 0.5)
        for column, at in enumerate(places):
            scores[at, column] = 0.9
        scores[rates:] = np.nan
        keys = (*grid.keys[:rates], *[("",) * 3] * (3 - rates))
        if key[1] == "squad":
            grids[key] = replace(grid, keys=keys, validation={grid.metric: scores})
            assert tuple(grids[key].chosen.values()) == (places or (0, 0, 0))
    found = edges(replace(evidence, grids=grids, tasks={"squad": evidence.tasks["squad"]}))
    assert fact in found
    assert bool(fact) == bool(found)
