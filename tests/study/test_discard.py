"""Early discarding of learning rates: a tiny study run to its end, by one worker or two, stopped, packed, reported."""

import json
import random
import shutil
from dataclasses import replace
from itertools import product

import pytest
from common import republish_json, store_with

from biphase import Discard, Fewer, Stage, Study
from biphase.errors import SpecError
from biphase.keys import finetuning_key
from biphase.metadata import TRIAL
from biphase.report.build import collect
from biphase.report.evidence import gather
from biphase.specs import CLM, MLM
from biphase.study import ledger
from biphase.study.describe import status_json
from biphase.study.ledger import best_rates, count, extension, screened_in, tuning_grids
from biphase.study.plan import identities, make_plan, save_plan
from biphase.study.time_left import TimeLeft

RATES, SEEDS, SCREENING = (5e-4, 1e-3, 2e-3), (0, 1), (7, 8)
DISCARD = Discard(keep=1, seeds=SCREENING, share=0.4)


# ---------------------------------------------------------------- rules


def test_the_best_rates_are_kept():
    scores = {(1e-4, 0): 0.1, (1e-4, 1): 0.2, (2e-4, 0): 0.5, (2e-4, 1): 0.4, (4e-4, 0): 0.3, (4e-4, 1): 0.4}
    assert best_rates(scores, 1) == (2e-4,)
    assert best_rates(scores, 2) == (2e-4, 4e-4)
    assert best_rates(dict.fromkeys(scores, 0.5), 2) == (1e-4, 2e-4), "ties go to the lowest rates"
    beyond = {(5e-5, 0): 0.5, (5e-5, 1): 0.5}
    assert best_rates(dict.fromkeys(scores, 0.5) | beyond, 2) == (1e-4, 2e-4), "an extension must be better"
    assert best_rates(scores | {(1e-4, 1): None}, 2) == (), "no choice while a score is missing"


def test_a_kept_end_extends_the_grid():
    rates = (1e-5, 2e-5, 5e-5)
    assert extension(rates, (2e-5,)) == ()
    assert extension(rates, (1e-5, 5e-5)) == (5e-6, 1.25e-4)
    assert extension((0.2, 0.6), (0.6,)) == (), "no learning rate of 1 or more"
    assert extension((1e-5,), (1e-5,)) == ()


def test_what_cannot_be_is_refused(grid):
    with pytest.raises(SpecError, match=r"seed 1 .*Discard\(seeds"):
        replace(grid, discard=Discard(keep=1, seeds=(1, 2)))
    with pytest.raises(SpecError, match="2 of 2"):
        replace(grid, discard=Discard(keep=2))
    with pytest.raises(SpecError, match="on_the_way"):
        replace(grid, lrs=RATES, on_the_way=Fewer(("toys",), (1e-3,), (0,)), discard=Discard(keep=2))
    for wrong in ({"keep": 0}, {"share": 1.0}, {"share": 0.0}, {"seeds": (3, 3)}, {"seeds": (-1,)}):
        with pytest.raises(SpecError, match="Discard"):
            Discard(**wrong)
    part = replace(grid, lrs=RATES, on_the_way=Fewer(("toys",), (1e-3, 2e-3), (0,)), discard=Discard(keep=2))
    assert part.part(on_the_way=True).discard is None, "all rates of the part are kept"


def test_keys_without_discarding_are_as_before(grid, tiny_run, store):
    runs = (tiny_run("clm"),)
    plain = make_plan(Study("s", runs, replace(grid, lrs=RATES)), identities(store))
    discarding = make_plan(Study("s", runs, replace(grid, lrs=RATES, discard=DISCARD)), identities(store))
    assert "discard" not in json.dumps(plain.to_json())
    full = {tuning.key for tuning in ledger.finetunings(plain)}
    short = [tuning for each in tuning_grids(discarding, lambda trial: None) for tuning in each.screening]
    assert not full & {tuning.key for tuning in short}
    reported = {
        tuning.key
        for each in tuning_grids(discarding, lambda trial: 0.5)
        for tuning in each.reported
        if tuning.lr in RATES
    }
    assert reported < full, "what remains is shared with a study that keeps every rate"
    one = short[0]
    spec = discarding.tuned[one.model]
    values = {"lr": one.lr, "seed": one.seed}
    whole = finetuning_key(one.model, discarding.tasks[one.task.name], spec, **values)
    assert one.key != whole


# ---------------------------------------------------------------- a study, run


@pytest.fixture
def plan(tiny_run, grid, store):
    """Two models on two tasks of three: a grid for each of the two that are trained on."""
    runs = tiny_run("clm", Stage(CLM(), 6)), tiny_run("mlm", Stage(MLM(0.4), 6))
    study = Study(
        "tuned", runs, replace(grid, lrs=RATES, seeds=SEEDS, discard=DISCARD), papers="gisserot2025"
    )
    made = make_plan(study, identities(store))
    save_plan(made, store)
    return made


@pytest.fixture(scope="session")
def _discarded_store(shards, tmp_path_factory):
    return store_with(shards, tmp_path_factory.mktemp("discarded"))


@pytest.fixture
def finished(plan, store, worker, _discarded_store):
    """The store after all work, which is done once and copied for each test."""
    if not _discarded_store.checkpoints.exists():
        save_plan(plan, _discarded_store)
        outcome = worker(plan, _discarded_store).work()
        assert not outcome.failed
    for kind in ("checkpoints", "trials"):
        shutil.copytree(getattr(_discarded_store, kind), getattr(store, kind), dirs_exist_ok=True)
    return store


def grids(plan, store):
    return list(tuning_grids(plan, screened_in(store)))


def trials(store):
    """What every trial says, without times."""
    return {
        place.name: {k: v for k, v in json.loads((place / TRIAL).read_text()).items() if k != "seconds"}
        for place in store.trials.iterdir()
    }


def rewrite(store, key, change):
    """Publish a trial again after `change` of its metadata."""
    republish_json(store.trials / key, TRIAL, change)


def prefer(store, plan, rate):
    """Screening trials whose validation prefers one rate; nothing else is in the store."""
    for grid in tuning_grids(plan, lambda trial: None):
        for tuning in grid.screening:
            score = 0.9 if tuning.lr == rate else 0.5
            rewrite(store, tuning.trials[0].key, lambda about, score=score: _scored(about, score))


def _scored(about, score):
    about["scores"]["validation"][about["metric"]] = score


def test_a_study_is_screened_then_fine_tuned_at_the_kept_rates(plan, finished):
    stored = trials(finished)
    assert set(stored) == {
        trial.key for grid in grids(plan, finished) for tuning in grid.tunings for trial in tuning.trials
    }, "nothing else was computed"
    for grid in grids(plan, finished):
        assert {(tuning.lr, tuning.seed) for tuning in grid.screening} == {
            *product((*RATES, *grid.extended), SCREENING)
        }
        for tuning in grid.screening:
            (trial,) = tuning.trials
            about = stored[trial.key]
            assert about["steps"] == 2, "40% of three steps, rounded up"
            assert set(about["scores"]) == {"validation"}, "no test score exists that could be looked at"
        assert {tuning.seed for tuning in grid.reported} == {*SEEDS}
        assert len({tuning.lr for tuning in grid.reported}) == DISCARD.keep
        for tuning in grid.reported:
            assert {stored[trial.key]["steps"] for trial in tuning.trials} == {3}
            assert all("discard" not in stored[trial.key]["finetune"] for trial in tuning.trials)
    assert [grid.task.name for grid in grids(plan, finished)] == ["toys", "facts"] * 2
    assert count(plan, finished).done == count(plan, finished).of


def test_a_stage_two_trial_is_that_of_a_study_without_discarding(plan, finished, worker):
    whole = make_plan(
        replace(plan.study, name="all", finetune=replace(plan.study.finetune, discard=None)),
        identities(finished),
    )
    before = trials(finished)
    worker(whole, finished).work()
    assert before.items() <= trials(finished).items()
    every = {trial.key for tuning in ledger.finetunings(whole) for trial in tuning.trials}
    assert every & set(before), "some were there already"


def test_test_scores_change_no_choice(plan, finished):
    before = grids(plan, finished)
    reported = [trial for grid in before for tuning in grid.reported for trial in tuning.trials]
    rates = [grid.chosen for grid in gather(plan, finished).grids.values()]
    chance = random.Random(0)
    for trial in reported:

        def change(about):
            about["scores"]["test"] = dict.fromkeys(about["scores"]["test"], chance.random())

        rewrite(finished, trial.key, change)
    assert grids(plan, finished) == before
    assert [grid.chosen for grid in gather(plan, finished).grids.values()] == rates


@pytest.mark.parametrize(("rate", "beyond"), [(RATES[0], 2.5e-4), (RATES[1], None), (RATES[2], 4e-3)])
def test_a_kept_end_is_extended_once_in_both_stages(rate, beyond, plan, finished, worker):
    prefer(finished, plan, rate)
    for grid in tuning_grids(plan, screened_in(finished)):
        assert grid.extended == (() if beyond is None else (beyond,))
    if beyond is None:
        return
    worker(plan, finished).work()
    (first, *_) = grids(plan, finished)
    extended = [tuning for tuning in first.screening if tuning.lr == beyond]
    for tuning in extended:
        rewrite(finished, tuning.trials[0].key, lambda about: _scored(about, 0.95))
    (first, *_) = grids(plan, finished)
    assert {tuning.lr for tuning in first.reported} == {beyond}
    assert first.extended == (beyond,), "the new end is not extended again"
    worker(plan, finished).work()
    evidence = gather(plan, finished)
    assert beyond in evidence.grids["clm", "toys"].lrs
    assert evidence.grids["clm", "toys"].done == len(SEEDS)


def test_a_missing_screening_trial_is_computed_again_and_nothing_is_chosen_before(plan, finished, worker):
    (first, *others) = grids(plan, finished)
    shutil.rmtree(finished.trials / first.screening[-1].trials[0].key)
    (pending, *same) = grids(plan, finished)
    assert (pending.reported, pending.pending) == ((), DISCARD.keep * len(SEEDS))
    assert same == others
    assert gather(plan, finished).grids["clm", "toys"].done == 0
    assert ledger.survey_trials(plan, finished).of == count(plan, finished).of
    worker(plan, finished).work()
    assert grids(plan, finished) == [first, *others]


def timed(store, trial, folder, **seconds):
    """Publish a trial again with other seconds, in `folder` instead of where it was."""
    republish_json(store.trials / trial.key, TRIAL, lambda about: about.update(seconds=seconds), folder)


def test_the_time_left_counts_scoring_whole_and_the_speed_of_other_machines_last(plan, finished):
    """Training takes 10 s in full, scoring 3 s, or 1 s where rates are screened; elsewhere a hundred times that."""
    every = [tuning for grid in grids(plan, finished) for tuning in grid.tunings]
    for tuning in every:
        for trial in tuning.trials:
            elsewhere = tuning is every[0]
            folder = finished.trials / trial.key
            timed(
                finished,
                trial,
                finished.metadata_of(folder) if elsewhere else folder,
                train=10 * tuning.share * 100**elsewhere if trial is tuning.trials[0] else 0.0,
                score=(1.0 if tuning.share < 1 else 3 / len(tuning.trials)) * 100**elsewhere,
            )
    assert TimeLeft(plan, finished).estimate().seconds == 0
    screening, full = every[1], next(tuning for tuning in every[::-1] if tuning.share == 1)
    for tuning, seconds in ((full, 13.0), (screening, 13.0 + 10 * DISCARD.share + 1)):
        finished.discard(finished.trials / tuning.trials[0].key)
        left = TimeLeft(plan, finished).estimate()
        assert left.seconds == pytest.approx(
            seconds + 13.0 * len(SEEDS) * DISCARD.keep * (tuning is screening)
        )
        assert left.complete
    timed(finished, every[2].trials[0], finished.trials / every[2].trials[0].key, other=1.0)
    assert TimeLeft(plan, finished).estimate().seconds > 0, "other machines may have timed other parts"


def test_status_and_report_say_what_was_discarded(plan, finished):
    told = status_json(plan, finished)["finetunings"]
    assert told["done"] == told["of"] == count(plan, finished).of
    assert [grid["kept"] for grid in told["grids"]] == [
        sorted({tuning.lr for tuning in grid.reported}) for grid in grids(plan, finished)
    ]
    content = collect(plan, finished)
    facts = dict(content.provenance.protocol)
    assert all(fact in facts["Discarded learning rates"] for fact in ("40%", "7, 8", "best 1 of 3"))
    assert "Extended grids" in facts
    trials = next(table for table in content.tables if table.name == "trials")
    seeds = trials.columns.index("seed")
    assert {row[seeds] for row in trials.rows} == {str(seed) for seed in SEEDS}, "screening is not reported"
