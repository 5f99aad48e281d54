"""The best split of a budget: found by recipe, chosen without test scores and confirmation seeds, priced by the plan."""

import json
from dataclasses import replace

import numpy as np
import pytest

from biphase import CLM, MLM, WSD, Stage, Study
from biphase.errors import SpecError
from biphase.keys import Identities
from biphase.records import encode
from biphase.report.headline import headline
from biphase.report.selectors import comparable_models
from biphase.report.splits import (
    MEAN,
    best_splits,
    render,
    split_curve,
    sweeps,
    to_json,
)
from biphase.study.plan import make_plan

OUTSIDE = Identities(data=str, hub=lambda hub: "", reads=lambda hub: "")
STEPS, DECAY = 200, 20
CAUSAL = (0, 50, 100, 150)
SHARES = np.array(CAUSAL) / STEPS


@pytest.fixture
def two(run):
    """Makes the run of one split: `two(50, seed=1)`."""

    def make(causal, steps=STEPS, seed=0, ratio=0.4, **fields):
        stages = (Stage(CLM(), causal),) if causal else ()
        stages += (Stage(MLM(ratio), steps - causal),) if causal < steps else ()
        name = f"clm{causal}-of{steps}-mlm{ratio}-seed{seed}"
        return run(name, *stages, seed=seed, schedule=WSD(1e-3, warmup=2, decay=DECAY), **fields)

    return make


@pytest.fixture
def study_of(two, grid):
    """The study of some splits and pretraining seeds; `confirm`: more seeds, kept for confirmation."""

    def make(seeds=(0, 1, 2), causal=CAUSAL, confirm=(), **fields):
        runs = [two(steps, seed=seed) for seed in (*seeds, *confirm) for steps in causal]
        return Study("s", tuple(runs), grid("sst2", "squad"), confirm=tuple(confirm), **fields)

    return make


@pytest.fixture
def evidence_for(evidence_of):
    """Evidence in which a split scores 80 − bend · (share − top)², with noise of its own for each result and part."""

    def make(study, top=0.3, bend=20.0, noise=0.3):
        plan = make_plan(study, OUTSIDE, "How much?")
        chance = np.random.default_rng(3)

        def score(model, task, shape):
            centre = 80 - bend * (model.recipe.causal_share - top) ** 2
            return centre + noise * chance.normal() + 0.1 * chance.normal(size=shape)

        return evidence_of(plan, score, score)

    return make


def changed(evidence, part, results, by):
    """The evidence with the scores of one part changed for some results."""
    grids = dict(evidence.grids)
    for (result, task), grid in evidence.grids.items():
        if result in results:
            scores = {name: by(values) for name, values in getattr(grid, part).items()}
            grids[result, task] = replace(grid, **{part: scores})
    return replace(evidence, grids=grids)


def without(evidence, task, results):
    """The evidence without the scores of some results on one task."""
    of_task = replace(evidence, grids={at: grid for at, grid in evidence.grids.items() if at[1] == task})
    for part in ("validation", "test"):
        of_task = changed(of_task, part, results, lambda values: values * np.nan)
    return replace(evidence, grids=evidence.grids | of_task.grids)


# ---------------------------------------------------------------- which models


def test_splits_are_found_by_recipe(planned, two, run, grid):
    base = run("base", Stage(CLM(), STEPS), seed=0, schedule=WSD(1e-3, warmup=2, decay=DECAY))
    others = (base, two(50, ratio=0.2), two(50, steps=400), run("on", Stage(MLM(0.4), STEPS), start=base))
    runs = (*(two(causal, seed=seed) for causal in (100, 0, 50) for seed in (0, 7)), *others)
    (sweep,) = sweeps(comparable_models(planned(Study("s", runs, grid("sst2")))))
    assert (sweep.shares, sweep.steps, sweep.masking) == ((0.0, 0.25, 0.5), STEPS, "MLM 40%")
    assert all(model.seeds == (0, 7) for model in sweep.models)


STUDY = '''
"""How much?"""
from biphase import CATALOG, CLM, MLM, SIZES, WSD, Finetune, Pretrain, Stage, Study

def run(causal, steps):
    stages = (Stage(CLM(), causal),) if causal else ()
    return Pretrain(f"clm{{causal}}-{{steps}}", start=SIZES["1m"], corpus="builtin",
                    stages=(*stages, Stage(MLM(0.4), steps - causal)), schedule=WSD(1e-3, 2, 20))

study = Study("typed", [run(*one) for one in {runs}], Finetune({tasks}) if {tasks} else None)
'''


@pytest.mark.parametrize(
    ("runs", "tasks", "fact"),
    [
        ([(0, 200)], True, "Stage(CLM()"),
        ([(0, 200), (50, 200)], True, "0% and 25% at 200 steps"),
        ([(0, 200), (50, 200), (50, 400), (0, 400)], True, "0% and 12% at 400 steps"),
        ([(0, 200), (50, 200), (100, 200)], False, "finetune=Finetune("),
    ],
)
def test_a_refusal_is_one_line_and_exit_code_2(verb, tmp_path, runs, tasks, fact):
    path = tmp_path / "typed.py"
    path.write_text(STUDY.format(runs=runs, tasks='[CATALOG["sst2"]]' if tasks else "None"))
    code, out, err = verb("split", path, "--store", tmp_path / "store")
    assert (code, out) == (2, "")
    assert fact in err
    assert err.count("\n") == 1


# ---------------------------------------------------------------- where the optimum is


def table_of(scores):
    """Rows of `split_curve` from (seeds, splits): one fine-tuning each."""
    return [{seed: np.array([value]) for seed, value in enumerate(column)} for column in np.asarray(scores).T]


def test_a_flat_curve_gives_the_whole_region_and_a_slope_gives_an_end():
    level, noise = np.array([[80.0], [81], [82]]), 0.2 * np.random.default_rng(1).normal(size=(3, 4))
    flat = split_curve("SC", SHARES, table_of(level + noise), 1.0)
    assert flat.where.pieces == ((0.0, 0.75),)
    assert flat.contenders == tuple(SHARES)
    assert flat.nearly == ((0.0, 0.75),)
    rising = split_curve("SC", SHARES, table_of(level + noise + 20 * SHARES), 1.0)
    assert rising.where.estimate == rising.chosen == 0.75
    assert rising.where.pieces[0][0] > 0.6
    assert rising.contenders == (0.75,)
    alike = split_curve("SC", SHARES, table_of(np.full((3, 4), 100 / 3)), 1.0)
    assert (alike.contenders, alike.where) == ((), None)
    assert "alike" in alike.lacks


def test_a_split_that_is_shown_worse_is_not_chosen():
    scores = np.array([82.0, 84, 80, 83]) + 0.15 * np.random.default_rng(1).normal(size=(3, 4))
    answer = split_curve(MEAN, SHARES, table_of(scores), 1.0)
    assert answer.where.estimate == 0.0, "the quadratic alone would choose it"
    assert (answer.contenders, answer.chosen) == ((0.25,), 0.25)


def test_an_incomplete_table_is_cut_to_its_largest_block():
    rows = table_of(80 - 20 * np.square(SHARES - 0.3) + np.array([[0.0], [1.1], [1.9]]))
    del rows[2][1], rows[2][2]
    answer = split_curve("SC", SHARES, rows, 1.0)
    assert (answer.shares, answer.seeds) == ((0.0, 0.25, 0.75), (0, 1, 2))
    del rows[1][2], rows[3][2]
    assert split_curve("SC", SHARES, rows, 1.0).seeds == (0, 1)
    assert split_curve("SC", SHARES, [{} for _ in rows], 1.0) is None


def test_too_few_values_have_no_interval():
    curve = split_curve("SC", SHARES[:3], table_of([[80.0, 82, 81]]), 1.0)
    assert (curve.where, curve.chosen) == (None, 0.25)
    assert "3 splits of one pretraining seed" in curve.lacks
    assert split_curve("SC", SHARES[:3], table_of([[80.0, 82, 81], [80.5, 82, 81]]), 1.0).where
    assert "2 splits" in split_curve("SC", SHARES[:2], table_of([[80.0, 82]] * 3), 1.0).lacks


@pytest.mark.parametrize(
    ("seeds", "covers"),
    [
        ((0,), "this pretraining seed, not other"),
        ((0, 1), "these two pretraining seeds, not other"),
        ((0, 1, 2), "pretraining seeds"),
    ],
)
def test_the_answer_says_what_it_is_about(study_of, evidence_for, seeds, covers):
    evidence = evidence_for(study_of(seeds))
    (answer,) = best_splits(evidence, OUTSIDE, 2.0)
    assert covers in render(answer, "s.py")
    assert all(covers in facts["covers"] for facts in to_json(answer)["on"].values())
    assert set(answer.curves) == {"SC", "QA", MEAN}
    assert answer.curves[MEAN].scores == pytest.approx(
        np.mean([answer.curves[family].scores for family in ("SC", "QA")], axis=0)
    )
    json.dumps(to_json(answer), allow_nan=False)


def test_each_curve_says_what_its_own_interval_covers(study_of, evidence_for):
    evidence = evidence_for(study_of())
    lost = [name for name in evidence.plan.results if name.endswith("seed2")]
    evidence = without(evidence, "squad", lost)
    (answer,) = best_splits(evidence, OUTSIDE)
    covers = {on: "not other" in facts["covers"] for on, facts in to_json(answer)["on"].items()}
    assert covers == {"SC": False, "QA": True, MEAN: True}


def test_a_family_without_scores_has_to_be_run(study_of, evidence_for):
    evidence = evidence_for(study_of())
    evidence = without(evidence, "squad", evidence.plan.results)
    (answer,) = best_splits(evidence, OUTSIDE)
    assert (answer.unscored, answer.chosen) == (("QA", MEAN), None)
    assert "Next: biphase run s.py" in render(answer, "s.py").splitlines()


# ---------------------------------------------------------------- the choice does not peek


def choice(evidence):
    (answer,) = best_splits(evidence, OUTSIDE)
    facts = to_json(answer)
    return {name: facts[name] for name in ("chosen", "on", "next")}, answer


def test_test_scores_play_no_part_in_the_choice(study_of, evidence_for):
    evidence = evidence_for(study_of())
    before, answer = choice(evidence)
    shuffled = np.random.default_rng(0)
    other = changed(evidence, "test", evidence.plan.results, shuffled.permuted)
    lowered = [name for name in evidence.plan.results if name.startswith("clm50")]
    after, worse = choice(changed(other, "test", lowered, lambda values: values - 0.2))
    assert after == before
    assert worse.searched.mean < answer.searched.mean - 10


def test_a_confirmation_seed_plays_no_part_in_the_choice(study_of, evidence_for):
    evidence = evidence_for(study_of(confirm=(9,)))
    before, answer = choice(evidence)
    assert before["chosen"] == 0.25
    assert (answer.searched.seeds, answer.confirmed.seeds) == ((0, 1, 2), (9,))
    fresh = [name for name in evidence.plan.results if name.endswith("seed9")]
    other = evidence
    for part in ("validation", "test"):
        other = changed(other, part, fresh, lambda values: values - 0.3 * (values > 0))
    after, lowered = choice(other)
    assert after == before
    assert lowered.searched == answer.searched
    assert lowered.confirmed.mean == pytest.approx(answer.confirmed.mean - 30)
    without, _ = choice(evidence_for(study_of()))
    assert set(without["on"]) == set(before["on"])
    assert all(one["seeds"] == [0, 1, 2] for one in before["on"].values())


def test_nor_in_the_answer_of_the_report(study_of, evidence_for):
    evidence = evidence_for(study_of(confirm=(9,)))
    fresh = [name for name in evidence.plan.results if name.startswith("clm50") and name.endswith("seed9")]
    lowered = changed(evidence, "validation", fresh, lambda values: values - 0.7)
    assert headline(lowered, []).subject == headline(evidence, []).subject
    counted = replace(lowered, plan=replace(lowered.plan, study=replace(lowered.plan.study, confirm=())))
    assert headline(counted, []).subject != headline(evidence, []).subject, "the test can fail"


def test_a_model_of_confirmation_seeds_alone_is_not_chosen(study_of, evidence_for, two):
    study = study_of(seeds=(0, 1), confirm=(9,))
    study = replace(study, runs=(two(60, seed=9), *study.runs))
    evidence = evidence_for(study, top=60 / STEPS, bend=200)
    assert "CLM for 60 steps" not in headline(evidence, []).subject
    (answer,) = best_splits(evidence, OUTSIDE)
    assert 60 / STEPS not in answer.curves[MEAN].shares
    searching = [name for name in evidence.plan.results if not name.endswith("seed9")]
    for part in ("validation", "test"):
        evidence = changed(evidence, part, searching, lambda values: values * np.nan)
    top = headline(evidence, [])
    assert ("confirmation" in top.answer, top.subject) == (True, "")


def test_a_confirmation_seed_is_one_of_the_study_and_in_no_key(study_of):
    with pytest.raises(SpecError, match=r"confirm.*\b5\b.*0, 1, 2"):
        replace(study_of(), confirm=(5,))
    with pytest.raises(SpecError, match=r"confirm.*every pretraining seed.*confirm=\(1, 2\)"):
        replace(study_of(), confirm=(2, 0, 1))
    assert "confirm" not in encode(study_of())


# ---------------------------------------------------------------- what to train next


def test_a_new_split_costs_its_branch_and_the_piece_of_the_trunk(study_of, evidence_for):
    evidence = evidence_for(study_of((0, 1)))
    (answer,) = best_splits(evidence, OUTSIDE)
    *splits, seed = answer.next
    assert seed.steps == 150 + 200 + 150 + 100 + 50  # the trunk, MLM alone and three branches
    for proposal in splits:
        causal = round(float(proposal.what.rstrip("%")) / 100 * STEPS)
        trunk = causal - max(step for step in CAUSAL if step < causal)
        assert proposal.steps == 2 * (trunk + STEPS - causal), "for each of two seeds"
        assert proposal.hours > 0
        assert causal <= STEPS - DECAY
    gains = [proposal.shrinks / proposal.hours for proposal in splits]
    assert gains == sorted(gains, reverse=True)
    assert (seed.shrinks, "recipe" in seed.effect) == (None, True), "three seeds cover what two do not"
    (three,) = best_splits(evidence_for(study_of((0, 1, 2))), OUTSIDE)
    gains = [proposal.shrinks / proposal.hours for proposal in three.next]
    assert gains == sorted(gains, reverse=True)
    assert {proposal.what: proposal.shrinks for proposal in three.next}[seed.what] == pytest.approx(
        13.4, abs=0.1
    )


def test_new_runs_take_fresh_seeds_and_the_confirmation_its_own(study_of, evidence_for, two):
    study = study_of((0, 1))
    study = replace(study, runs=(two(STEPS), two(STEPS, seed=1), *study.runs))  # CLM alone is nothing to copy
    (answer,) = best_splits(evidence_for(study), OUTSIDE)
    assert [proposal.seeds for proposal in answer.next] == [(0, 1)] * 3 + [(3,)]
    assert answer.confirm == 2
    assert "add 0% and 25% with seed 2, and confirm=(2,)" in render(answer, "s.py")


def test_a_confirmation_that_is_planned_has_to_be_run(study_of, evidence_for):
    evidence = evidence_for(study_of(confirm=(9,)))
    fresh = [name for name in evidence.plan.results if name.endswith("seed9")]
    for part in ("validation", "test"):
        evidence = changed(evidence, part, fresh, lambda values: values * np.nan)
    (answer,) = best_splits(evidence, OUTSIDE)
    assert answer.confirmed is None
    text = render(answer, "s.py")
    assert "biphase run s.py" in text.splitlines()[-1]
    assert answer.confirm is None


def test_the_example_study_shares_its_trunks(plan_of):
    plan = plan_of("split")
    (sweep,) = sweeps(comparable_models(plan))
    assert (len(sweep.models), sweep.shares[0]) == (4, 0.0)
    assert plan.steps_to_compute < plan.steps_written
    assert len(plan.roots) == 2
