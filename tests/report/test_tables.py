"""Tables hold what the ledger holds: every model, every trial, and a reason for what is not there."""

import csv
import io
import shutil
from dataclasses import replace

import pytest

from biphase.papers.gisserot2025 import PAPER
from biphase.report import tables
from biphase.report.estimates import estimate
from biphase.report.evidence import gather
from biphase.report.verdicts import judge
from biphase.study import ledger as state_ledger
from biphase.study.ledger import finetunings


@pytest.fixture
def evidence(ledger):
    return gather(*ledger)


def read(table):
    return list(csv.DictReader(io.StringIO(table.csv())))


def test_scores_say_mean_interval_seeds_and_rates(evidence):
    made = estimate(evidence)
    rows = read(tables.scores(evidence, made))
    assert [(row["model"], row["task"]) for row in rows] == [
        (m, t) for m in evidence.models for t in evidence.tasks
    ]
    row = next(one for one in rows if (one["model"], one["task"]) == ("both", "squad"))
    grid, score = evidence.grids["both", "squad"], made.tasks["both", "squad"]
    own = 100 * grid.at_chosen(grid.test)
    assert float(row["mean"]) == pytest.approx(own.mean(), abs=1e-4)
    assert float(row["low"]) < own.mean() < float(row["high"])
    assert (row["n"], row["done"], row["of"], row["metric"]) == ("3", "9", "9", "token_f1")
    assert [float(one) for one in row["rate_of_each_seed"].split()] == [
        grid.lrs[grid.chosen[s]] for s in grid.seeds
    ]
    assert (row["covers"], row["family"]) == (score.seeds.covers, "QA")
    assert [float(row[end]) for end in ("examples_low", "examples_high")] == pytest.approx(
        [100 * end for end in score.examples], abs=1e-4
    )


def test_a_model_without_a_complete_seed_has_empty_cells(ledger):
    plan, store = ledger
    for training in finetunings(plan):
        if training.model == plan.results["mlm"] and training.lr == 2e-5:
            for trial in training.trials:
                shutil.rmtree(store.trials / trial.key)
    evidence = gather(plan, store)
    made = estimate(evidence)
    row = next(r for r in read(tables.families(evidence, made)) if (r["model"], r["family"]) == ("mlm", "SC"))
    assert (row["mean"], row["low"], row["covers"], row["n"]) == ("", "", "", "0")
    assert (row["done"], row["of"]) == ("6", "9")
    families, _ = tables.boards(evidence, made)
    line = next(one for one in families.lines if one.model.name == "mlm")
    assert not any(cell.best or cell.score.known for cell in line.cells)


def test_the_best_of_each_column_is_marked_once_and_ties_are_all_marked(evidence):
    made = estimate(evidence)
    families, tasks = tables.boards(evidence, made)
    assert families.columns == ("SC", "TC", "QA", "IR")
    assert tasks.columns == tuple(evidence.tasks)
    for board, scores in ((families, made.families), (tasks, made.tasks)):
        for place, on in enumerate(board.columns):
            highest = max(scores[name, on].seeds.mean for name in evidence.models)
            marked = {line.model.name for line in board.lines if line.cells[place].best}
            assert marked == {name for name in evidence.models if scores[name, on].seeds.mean == highest}
    twin = {(m, on): made.families["clm", on] for m in evidence.models for on in families.columns}
    tied, _ = tables.boards(evidence, type(made)(made.tasks, twin))
    assert all(cell.best for line in tied.lines for cell in line.cells)


def test_every_leaf_is_listed_with_its_scores_or_why_it_is_missing(ledger):
    plan, store = ledger
    every = list(finetunings(plan))
    gone, failed = every[0], every[-1]
    shutil.rmtree(store.trials / gone.trials[0].key)
    for trial in failed.trials:
        shutil.rmtree(store.trials / trial.key)
    state_ledger.note_failure(plan, store, failed.key, ValueError("the loss was not finite"))
    evidence = gather(plan, store)
    rows = read(tables.trial_table(evidence))
    assert len(rows) == sum(len(one.trials) for one in every) == len({row["key"] for row in rows})
    by_key = {row["key"]: row for row in rows}
    assert by_key[gone.trials[0].key]["missing"] == "not computed"
    assert "the loss was not finite" in by_key[failed.trials[0].key]["missing"]
    for row in rows:
        assert bool(row["missing"]) == (row["test"] == "") == (row["seconds"] == "")
    grid = evidence.grids["both", "squad"]
    row = by_key[grid.keys[2][1]]
    assert (row["rate"], row["seed"], row["metric"]) == ("2e-4", "1", grid.metric)
    assert float(row["test"]) == pytest.approx(100 * grid.test[grid.metric][2, 1], abs=1e-4)
    assert float(row["validation"]) == pytest.approx(100 * grid.validation[grid.metric][2, 1], abs=1e-4)


def test_noise_is_told_by_source_as_far_as_seeds_can_tell_it(evidence):
    made = estimate(evidence)
    rows = read(tables.noise(evidence, made))
    assert [(row["model"], row["family"]) for row in rows] == [
        (m, f) for m in evidence.models for f in evidence.families
    ]
    row = next(one for one in rows if (one["model"], one["family"]) == ("both", "QA"))
    found = made.families["both", "QA"].noise
    by_source = {one.source: one.single for one in found.components}
    assert (row["pretraining_seeds"], row["finetuning_seeds"]) == ("1", "3")
    assert row["test_examples"] == str(evidence.grids["both", "squad"].examples)
    assert row["sd_pretraining_seed"] == "", "one seed says nothing of its noise"
    assert float(row["sd_test_example"]) == pytest.approx(100 * by_source["test example"] ** 0.5, abs=1e-4)
    assert float(row["sd_finetuning_seed"]) == pytest.approx(
        100 * by_source["fine-tuning seed"] ** 0.5, abs=1e-4
    )


def test_claims_have_a_row_for_each_part_and_one_where_there_is_none(evidence):
    findings = judge(evidence, (PAPER,))
    rows = read(tables.claims(findings))
    assert len(rows) == sum(max(1, len(one.parts)) for one in findings)
    assert rows[0]["claim"] == "C1"
    part = next(one for one in findings if one.id == "C1").parts[0]
    row = next(one for one in rows if one["claim"] == "C1")
    assert (row["part"], row["supports"], row["models"]) == (part.title, part.supports, " ".join(part.models))
    assert float(row["estimate"]) == pytest.approx(part.estimate.mean, abs=1e-4)
    assert float(row["part_p"]) == pytest.approx(part.above, rel=1e-4)
    assert [float(row[end]) for end in ("examples_low", "examples_high")] == pytest.approx(
        part.examples, abs=1e-4
    )
    told = replace(findings[0], parts=(replace(part, paper=-1.25, margin=-0.5),))
    row = read(tables.claims([told]))[0]
    assert (row["paper"], row["margin"]) == ("-1.25", "-0.50")
    without = next(one for one in findings if not one.parts)
    row = next(one for one in rows if one["claim"] == without.id)
    assert (row["verdict"], row["estimate"], row["p"]) == ("not tested", "", "")


def test_runs_tell_what_it_took_and_invent_nothing(ledger):
    plan, store = ledger
    shutil.rmtree(store.checkpoints / plan.results["mlm"])
    rows = {row["run"]: row for row in read(tables.runs(gather(plan, store).runs))}
    assert list(rows) == list(plan.results)
    row = rows["both"]
    assert (row["steps"], row["tokens"], row["standing"]) == ("20", str(20 * 128), "done")
    assert row["recipe"] == "1m · CLM for 10 steps, then MLM 40% for 10"
    assert float(row["flops"]) > 0
    assert float(row["heldout_clm"]) > 0
    assert row["key"] == plan.results["both"]
    assert (row["trials_done"], row["trials_of"]) == ("45", "45")
    row = rows["mlm"]
    assert (row["standing"], row["seconds"], row["epochs"], row["device"]) == ("ready", "", "", "")


def test_files_quote_what_would_break_a_row_and_hold_no_formula_of_a_spreadsheet():
    odd = ("a,b", 'say "x"', "two\nlines", "−", "")
    harmful = ("=HYPERLINK(1)", "+cmd|' /C calc'!A0", "-2+3", "@SUM(1)", "\t=1")
    harmless = ("-2.5", "-1e-05", "+3", "2+3", "")
    table = tables.Table("odd", tuple("abcde"), (odd, harmful, harmless)).csv()
    escaped = [f"'{cell}" for cell in harmful]
    assert list(csv.reader(io.StringIO(table))) == [list("abcde"), list(odd), escaped, list(harmless)]
