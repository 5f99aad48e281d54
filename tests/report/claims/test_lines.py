"""Which models may be compared: found from recipes, whatever the runs are called and in whatever order they stand."""

import random
from dataclasses import replace

import pytest

from biphase import CLM, MLM, SIZES, WSD, Hub, Pretrain, Stage, Study
from biphase.papers.gisserot2025.claims import STATEMENTS
from biphase.report.contrasts import common, comparable_models, rows_in_common
from biphase.report.recipes import models

K = 1_000
FIELDS = {"start": SIZES["610m"], "corpus": "fineweb-edu"}


def run(name, *stages, **fields):
    return Pretrain(name, stages=stages, **(FIELDS | fields))


def clm(steps, name="", **fields):
    return run(name or f"clm-{steps}", Stage(CLM(), steps), **fields)


def mlm(steps, ratio=0.4, name="", **fields):
    return run(name or f"mlm{ratio * 100:g}-{steps}", Stage(MLM(ratio), steps), **fields)


def two(causal, steps, ratio=0.4, name="", **fields):
    stages = Stage(CLM(), causal), Stage(MLM(ratio), steps - causal)
    return run(name or f"clm-{causal}-mlm{ratio * 100:g}-{steps}", *stages, **fields)


@pytest.fixture
def line_of(plan_of):
    def line(*runs):
        (found,) = comparable_models(plan_of(Study("s", runs))).lines
        return found

    return line


def names(found):
    return {key: model.name for key, model in found.items()}


def test_the_papers_study_is_three_lines_smallest_first(plan_of):
    (group,) = comparable_models(plan_of("paper")).groups
    assert [(line.title, len(line.models)) for line in group] == [("210m", 5), ("610m", 40), ("1b", 5)]


def test_ends_are_found_by_what_they_were_asked_and_by_their_steps(line_of):
    line = line_of(clm(12 * K), clm(22 * K), mlm(22 * K), mlm(22 * K, 0.2), two(6 * K, 22 * K))
    assert names(line.clm()) == {12 * K: "clm-12000", 22 * K: "clm-22000"}
    assert names(line.mlm()) == {22 * K: "mlm40-22000"}
    assert names(line.mlm(0.2)) == {22 * K: "mlm20-22000"}
    assert list(line.ratios(22 * K)) == [0.2, 0.4]
    assert line.ratios(12 * K) == {}


def test_a_split_is_found_within_five_percent_and_the_nearest_is_taken(line_of):
    line = line_of(*(two(causal * K, 20 * K) for causal in (3, 4, 6, 7, 10, 15)))  # 15, 20, 30, 35, 50, 75%
    assert names(line.split(0.25)) == {20 * K: "clm-4000-mlm40-20000"}  # of equals the less causal one
    assert names(line.split(0.5)) == {20 * K: "clm-10000-mlm40-20000"}
    assert names(line.split(0.75)) == {20 * K: "clm-15000-mlm40-20000"}
    nearer = line_of(two(4 * K, 20 * K), two(5 * K, 20 * K), two(6 * K, 20 * K))
    assert names(nearer.split(0.25)) == {20 * K: "clm-5000-mlm40-20000"}


def test_a_split_is_masked_at_the_usual_ratio(line_of):
    assert line_of(two(5 * K, 20 * K, 0.3)).split(0.25) == {}


def test_masked_only_at_the_very_end(line_of):
    line = line_of(two(18 * K, 20 * K, 0.2), two(18 * K, 20 * K, 0.5), two(17 * K, 20 * K, 0.3))
    found = line.mostly_causal(20 * K)
    assert {switch: names(some) for switch, some in found.items()} == {
        18 * K: {0.2: "clm-18000-mlm20-20000", 0.5: "clm-18000-mlm50-20000"}
    }


def test_checkpoints_are_on_the_way_only_before_the_decay(line_of):
    line = line_of(clm(12 * K, keep=(5 * K, 10 * K, 11 * K)), mlm(12 * K, keep=(5 * K,)))
    assert list(line.on_the_way("clm")) == [5 * K, 10 * K]  # the decay begins at 10,000
    assert names(line.on_the_way("mlm")) == {5 * K: "mlm40-12000-5000"}


def test_a_run_that_never_decays_ends_too(line_of):
    line = line_of(clm(12 * K, schedule=WSD(decay=0), keep=(11 * K,)))
    assert names(line.clm()) == {12 * K: "clm-12000"}
    assert list(line.on_the_way("clm")) == [11 * K]


def test_continued_models_are_found_by_their_base(line_of):
    bases = clm(12 * K), mlm(12 * K), mlm(12 * K, 0.2)
    more = [
        run(f"{one.name}+{steps}", Stage(MLM(0.4), steps), start=one)
        for one in bases
        for steps in (3 * K, 5 * K)
    ]
    line = line_of(*bases, *more)
    assert names(line.continued("clm")) == {
        (12 * K, 3 * K): "clm-12000+3000",
        (12 * K, 5 * K): "clm-12000+5000",
    }
    assert names(line.continued("mlm")) == {
        (12 * K, 3 * K): "mlm40-12000+3000",
        (12 * K, 5 * K): "mlm40-12000+5000",
    }
    assert 15 * K not in line.mlm()  # gone on with is not from scratch


def test_a_base_that_was_itself_gone_on_with_is_another_story(line_of):
    first = clm(12 * K)
    second = run("second", Stage(MLM(0.4), 4 * K), start=first)
    third = run("third", Stage(MLM(0.4), 4 * K), start=second)
    line = line_of(first, second, third)
    assert names(line.continued("clm")) == {(12 * K, 4 * K): "second"}
    assert line.continued("mlm") == {}


@pytest.mark.parametrize(
    ("fields", "about"),
    [
        ({"schedule": WSD(peak=1e-3)}, ("peak 0.0005", "peak 0.001")),
        ({"corpus": "fineweb-edu-10b"}, ("fineweb-edu", "fineweb-edu-10b")),
        ({"batch_tokens": 2_359_296 // 2}, ("2,359,296 tokens a step", "1,179,648 tokens a step")),
        ({"schedule": WSD(decay=3_000)}, ("decay 2000", "decay 3000")),
    ],
)
def test_another_setting_is_another_line_that_says_what_differs(plan_of, fields, about):
    found = comparable_models(
        plan_of(Study("s", (clm(12 * K), mlm(12 * K), mlm(12 * K, name="other", **fields))))
    )
    assert [[one.name for one in line.models] for line in found.lines] == [
        ["clm-12000", "mlm40-12000"],
        ["other"],
    ]
    assert tuple(line.about for line in found.lines) == about


def test_another_rule_of_masking_is_another_line_and_clm_belongs_to_both(plan_of):
    bert = run("bert", Stage(MLM(0.4, (0.8, 0.1, 0.1)), 12 * K))
    found = comparable_models(plan_of(Study("s", (clm(12 * K), mlm(12 * K), bert))))
    assert {line.about: [one.name for one in line.models] for line in found.lines} == {
        "masks 100/0/0": ["clm-12000", "mlm40-12000"],
        "masks 80/10/10": ["clm-12000", "bert"],
    }


def test_sizes_of_one_name_and_different_shape_are_two_lines(plan_of):
    thin = replace(SIZES["610m"], layers=12)
    found = comparable_models(plan_of(Study("s", (clm(12 * K), mlm(12 * K, start=thin)))))
    assert [line.title for line in found.lines] == ["610m of 508M", "610m of 756M"]


def test_published_models_belong_to_no_line(plan_of, tmp_path):
    published = Pretrain("hub", start=Hub("some/model", revision="1" * 40))
    found = comparable_models(plan_of(Study("s", (published, clm(12 * K)))))
    assert [one.name for line in found.lines for one in line.models] == ["clm-12000"]
    assert "hub" in found.models


def test_pretraining_seeds_are_draws_of_one_model(line_of):
    line = line_of(*(clm(12 * K, f"clm-{seed}", seed=seed) for seed in (3, 1, 2)))
    (model,) = line.clm().values()
    assert model.results == ("clm-1", "clm-2", "clm-3")


def test_common_steps_are_those_of_all(line_of):
    line = line_of(clm(12 * K), clm(22 * K), mlm(22 * K), mlm(30 * K))
    assert common(line.clm(), line.mlm()) == [22 * K]
    assert common() == []


def test_rows_in_common_are_the_seeds_that_all_have(plan_of):
    runs = [clm(12 * K, f"c{seed}", seed=seed) for seed in (1, 2, 4)]
    runs += [mlm(12 * K, name=f"m{seed}", seed=seed) for seed in (4, 3, 2)]
    runs += [mlm(12 * K, 0.2, name=f"n{seed}", seed=seed) for seed in (8, 9)]
    causal, masked, apart = models(plan_of(Study("s", tuple(runs)))).values()
    assert rows_in_common([causal, masked]) == {causal.name: [1, 2], masked.name: [0, 2]}
    assert rows_in_common([causal, apart]) == {causal.name: [0, 1], apart.name: [0, 1]}


# ---------------------------------------------------------------- names and order play no part


def asked_of(plan):
    """Every test of every claim as the keys of the states that it compares, with its title."""
    over = comparable_models(plan)
    keys = {model.name: tuple(plan.results[one] for one in model.results) for model in over.models.values()}
    return {
        one.id: sorted(
            (test.title, tuple(keys[model.name] for model in test.models)) for test in one.find(over)
        )
        for one in STATEMENTS
    }


def renamed(study, names):
    made = {}

    def again(one):
        if one.name not in made:
            start = again(one.start) if isinstance(one.start, Pretrain) else one.start
            made[one.name] = replace(one, name=names[one.name], start=start)
        return made[one.name]

    return [again(one) for one in study.runs]


@pytest.mark.parametrize("study", ["paper", "two_stage", "quickstart"])
def test_other_names_in_another_order_give_the_same_tests(plan_of, study):
    plan = plan_of(study)
    draw = random.Random(7)
    old = [one.name for one in plan.study.runs]
    new = [f"run-{number}" for number in draw.sample(range(1000), len(old))]
    runs = renamed(plan.study, dict(zip(old, new, strict=True)))
    draw.shuffle(runs)
    shuffled = plan_of(replace(plan.study, runs=tuple(runs), claims=()))
    assert asked_of(shuffled) == asked_of(plan)
