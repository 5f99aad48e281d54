"""Which models may be compared: found from recipes, whatever the runs are called and in whatever order they stand."""

import random
from dataclasses import replace

import pytest
from small_studies import K, claims_of, clm, mlm, names, two

from biphase import MLM, SIZES, WSD, Pretrain, Stage, Study
from biphase.papers.gisserot2025.claims import SharedRatios
from biphase.report.selectors import Recipes, Select, comparable_models

CLM_ONLY, MLM_40 = Recipes("clm"), Recipes("mlm", 0.4)


@pytest.fixture
def find(plan_of):
    """steps → names of the models that a selector finds among some runs."""

    def found(selector, *runs):
        study = comparable_models(plan_of(Study("s", runs)))
        ((line,),) = study.groups
        return {
            length[1] if length[0] == 0 else length: names(some) if isinstance(some, tuple) else some.name
            for length, some in selector.find(line, study).items()
        }

    return found


def test_a_split_is_found_within_five_percent_and_the_nearest_wins(find):
    def split(share, *causal, ratio=0.4):
        runs = [two(steps * K, 20 * K, ratio) for steps in causal]
        return find(Recipes("clm-mlm", 0.4, share=share), *runs).get(20 * K)

    some = 3, 4, 6, 7, 10, 15  # 15, 20, 30, 35, 50 and 75%
    assert split(0.25, *some) == "clm-4000-mlm40-20000"  # of equals the less causal one
    assert split(0.5, *some) == "clm-10000-mlm40-20000"
    assert split(0.75, *some) == "clm-15000-mlm40-20000"
    assert split(0.25, 4, 5, 6) == "clm-5000-mlm40-20000"
    assert split(0.25, 5, ratio=0.3) is None


def test_ratios_after_clm_are_shared_with_those_from_scratch(plan_of):
    late = [two(18 * K, 20 * K, ratio) for ratio in (0.2, 0.3, 0.5)]
    scratch = [mlm(20 * K, ratio) for ratio in (0.2, 0.3, 0.4, 0.5)]

    def cases(*runs):
        both = Select((SharedRatios(after_clm=False), SharedRatios(after_clm=True)))
        return both.cases(comparable_models(plan_of(Study("s", runs))))

    (case,) = cases(*late, two(19 * K, 20 * K, 0.4), *scratch)
    assert [names(some) for some in case.models] == [
        ["mlm20-20000", "mlm30-20000", "mlm50-20000"],
        ["clm-18000-mlm20-20000", "clm-18000-mlm30-20000", "clm-18000-mlm50-20000"],
    ]
    assert cases(*late[:2], *scratch) == []
    assert cases(*(two(17 * K, 20 * K, ratio) for ratio in (0.2, 0.3, 0.5)), *scratch) == []


def test_checkpoints_are_intermediate_only_before_the_decay(find):
    runs = clm(keep=(5 * K, 10 * K, 11 * K)), mlm(keep=(5 * K,))
    assert list(find(replace(CLM_ONLY, before_decay=True), *runs)) == [5 * K, 10 * K]  # it decays from 10,000
    assert find(replace(MLM_40, before_decay=True), *runs) == {5 * K: "mlm40-12000-5000"}
    never = clm(schedule=WSD(decay=0), keep=(11 * K,))
    assert find(CLM_ONLY, never) == {12 * K: "clm-12000"}
    assert list(find(replace(CLM_ONLY, before_decay=True), never)) == [11 * K]


@pytest.mark.parametrize(
    ("fields", "about"),
    [
        ({"schedule": WSD(peak=1e-3)}, ("as clm-12000", "as other")),
        ({"batch_tokens": 2_359_296 // 2}, ("as clm-12000", "as other")),
        ({"stages": Stage(MLM(0.4, (0.8, 0.1, 0.1)), 12 * K)}, ("masks 100/0/0", "masks 80/10/10")),
    ],
)
def test_another_setting_is_another_group_that_names_a_result(plan_of, fields, about):
    other = replace(mlm(name="other"), **fields)
    groups = comparable_models(plan_of(Study("s", (clm(), mlm(), other)))).groups
    assert tuple(line.about for group in groups for line in group) == about
    members = [names(line.models) for group in groups for line in group]
    both = ["clm-12000", "other"] if "stages" in fields else ["other"]  # CLM masks nothing
    assert members == [["clm-12000", "mlm40-12000"], both]


def test_sizes_of_one_name_and_different_shape_are_two_groups(plan_of):
    thin = replace(SIZES["610m"], layers=12)
    (group,) = comparable_models(plan_of(Study("s", (clm(), mlm(start=thin))))).groups
    assert [line.title for line in group] == ["610m of 508M", "610m of 756M"]


# ---------------------------------------------------------------- names and order play no part


def keys_compared(plan):
    """Every test of every claim as the keys of the checkpoints that it compares, with its title."""
    return {
        claim: sorted(
            (
                test.title,
                str(test.paper),
                *([plan.results[name] for name in one.results] for one in test.models),
            )
            for test in tests
        )
        for claim, tests in claims_of(plan).items()
    }


@pytest.mark.parametrize("study", ["paper", "two_stage"])
def test_other_names_in_another_order_give_the_same_tests(plan_of, study):
    plan, draw, renamed = plan_of(study), random.Random(7), {}

    def rename(one):
        if one.name not in renamed:
            start = rename(one.start) if isinstance(one.start, Pretrain) else one.start
            renamed[one.name] = replace(one, name=f"run-{draw.randrange(10**9)}", start=start)
        return renamed[one.name]

    runs = [rename(one) for one in plan.study.runs]
    draw.shuffle(runs)
    assert keys_compared(plan_of(replace(plan.study, runs=tuple(runs)))) == keys_compared(plan)
