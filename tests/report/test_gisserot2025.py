"""Gisserot-Boukhlef et al. (2025): what each claim tests in the real study files, and the published numbers."""

from dataclasses import replace
from pathlib import Path

import pytest
from small_studies import K, claims_of, clm, mlm, names, run, study, two

from biphase import MLM, SIZES, WSD, Claim, Fewer, Stage
from biphase.papers.gisserot2025 import FAMILY_MEANS
from biphase.papers.gisserot2025 import PAPER as GISSEROT
from biphase.papers.gisserot2025.measures import by_texts
from biphase.report.recipes import models, recipe_of
from biphase.report.selectors import comparable_models

DOCS = Path(__file__).parents[2] / "docs" / "claims.md"
FIGURES = {"objectives", "ratio", "efficiency", "rates", "splits", "robustness", "continued"}
STATEMENTS = GISSEROT.statements


def found(plan, name):
    return claims_of(plan)[name]


def test_all_claims_are_there_in_order():
    assert [one.id for one in STATEMENTS] == [
        *(f"C{number}" for number in range(1, 22)),
        *(f"B{number}" for number in range(1, 7)),
    ]
    assert {one.figure for one in STATEMENTS} == FIGURES
    assert all(one.source == ("paper" if one.id[0] == "C" else "beyond") for one in STATEMENTS)
    assert all(one.needs.startswith("needs ") and not one.needs.endswith(".") for one in STATEMENTS)


def at(size, *names):
    return [f"{size}-{name}-42k" for name in names]


SIZES_OF_PAPER = ("210m", "610m", "1b")
RATIOS = ("mlm20", "mlm30", "mlm40", "mlm50")
QUARTER, HALF = at("610m", "clm-10k-mlm40", "clm-21k-mlm40")
MASKED, CAUSAL = at("610m", "mlm40", "clm")
PAIR, PAIRS = (
    at("210m", "mlm40", "clm"),
    [name for size in SIZES_OF_PAPER for name in at(size, "mlm40", "clm")],
)
CLM_BASE, MLM_BASE = "610m-clm-dec42k-mlm40", "610m-mlm40-dec42k-mlm40"

PAPER = {  # claim → the models of its first test, and the published numbers of all its tests
    "C1": (PAIR, [2.09, 3.42, 5.55]),
    "C2": (PAIR, [10.17, 8.08, 10.22, 7.22, 20.68, 17.26, 21.16, 17.33, 25.80, 20.25, 25.75, 24.53]),
    "C3": (PAIR, [2.95, 3.35, 1.27]),
    "C4": (PAIR[::-1], [0.05, 0.48, -0.05]),
    "C5": (PAIRS, [1.55]),
    "C6": (PAIRS, [0.7]),
    "C8": ([name for size in SIZES_OF_PAPER for name in at(size, *RATIOS)], [None, None]),
    "C9": (at("610m", "mlm20", "mlm30", "mlm40"), [None] * 8),
    "C10": ([f"{CAUSAL}-5000", f"{MASKED}-5000"], [6.07, 1.81, 6.41, 10.72]),
    "C11": ([f"{MASKED}-40000", f"{CAUSAL}-40000"], [2.92, 0.63, 15.91, 3.21, 6.07, 6.41, 10.72]),
    "C12": (PAIR, [None, 6.1, None]),
    "C13": ([QUARTER, MASKED], [0.85, 0.86, 5.0, 0.33]),
    "C14": ([QUARTER, HALF, *at("610m", "clm-32k-mlm40")], [0.65, 0.71, 4.13, 0.06, -0.06]),
    "C15": (["610m-clm-3k-mlm40-12k", "610m-mlm40-12k"], [None] * 8),
    "C16": ([*at("610m", *RATIOS), *at("610m", *(f"clm-40k-{ratio}" for ratio in RATIOS))], [None]),
    "C17": ([f"{CLM_BASE}-64k", f"{MLM_BASE}-64k"], [0.93, 0.59, 0.25]),
    "C18": ([MASKED, CAUSAL, f"{MLM_BASE}-64k", f"{CLM_BASE}-64k"], [1.03]),
    "C19": ([f"{CLM_BASE}-54k", f"{MLM_BASE}-54k"], [0.23, 0.5, 0.35]),
    "C20": ([f"{CLM_BASE}-64k", f"{CLM_BASE}-54k"], [0.56, 0.70, 0.14]),
    "C21": ([], []),
    "B1": ([QUARTER, *at("610m", *RATIOS)], [0.29, 0.28, 2.77, 0.26]),
    "B2": ([MASKED, f"{MASKED}-40000", CAUSAL, f"{CAUSAL}-40000"], [4.77, 0.50]),
    "B3": (PAIR, [None, 6.02, None]),
    "B4": (PAIR, [None] * 6),
    "B5": ([], []),
    "B6": ([], []),
}
MARGINS = {"C4": {-0.5}, "C14": {0.0, -0.5}, "C19": {-0.5}, "C20": {0.0, -0.5}, "B4": {0.0, -0.5}}


@pytest.mark.parametrize("name", PAPER)
def test_the_tests_of_the_papers_study(plan_of, name):
    tests = found(plan_of("paper"), name)
    first, published = PAPER[name]
    assert (names(tests[0].models) if tests else []) == first
    assert [one.paper if one.paper is None else round(one.paper, 2) for one in tests] == published
    assert len({one.title for one in tests}) == len(tests)
    assert {one.margin for one in tests} == (MARGINS.get(name, {0.0}) if tests else set())
    for size in SIZES_OF_PAPER:  # a test of one size compares models of that size
        own = [
            model.recipe.size for one in tests if one.title.startswith(f"{size} · ") for model in one.models
        ]
        assert set(own) <= {size}


def test_for_each_ratio_some_other_is_sought_that_beats_it(plan_of):
    tests = found(plan_of("paper"), "C7")
    assert [(one.title, one.paper and round(one.paper, 2)) for one in tests] == [
        ("20%", None),
        ("30%", None),
        ("40%", 2.23),
        ("50%", None),
    ]
    for test in tests:
        assert len(test.options) == 3 * 3 * 4  # other ratios, sizes, families
        sides = {(one.models[0].recipe.ratio, one.models[1].recipe.ratio) for one in test.options}
        ratio = float(test.title.rstrip("%")) / 100
        assert sides == {(other, ratio) for other in (0.2, 0.3, 0.4, 0.5) if other != ratio}


# ---------------------------------------------------------------- studies made for one claim


def both(size="610m", steps=12 * K, **fields):
    more = {"start": SIZES[size]} | fields
    return clm(steps, f"{size}-clm-{steps}", **more), mlm(steps, name=f"{size}-mlm-{steps}", **more)


def quarter(size="610m", steps=12 * K, **fields):
    return two(steps // 4, steps, name=f"{size}-two-{steps}", **({"start": SIZES[size]} | fields))


def test_runs_of_another_setting_are_not_compared_and_make_their_own_parts(plan_of):
    causal, masked = both()
    for field in ({"schedule": WSD(peak=1e-3)}, {"corpus": "fineweb-edu-10b"}, {"precision": "fp32"}):
        assert found(plan_of(study(causal, replace(masked, **field))), "C1") == []
    hot = tuple(replace(one, name=f"hot-{one.name}", schedule=WSD(peak=1e-3)) for one in both())
    plan = plan_of(study(*both(), *hot))
    assert {one.title: names(one.models) for one in found(plan, "C1")} == {
        "610m · as 610m-clm-12000 · SC": ["610m-mlm-12000", "610m-clm-12000"],
        "610m · as hot-610m-clm-12000 · SC": ["hot-610m-mlm-12000", "hot-610m-clm-12000"],
    }


def test_sizes_are_compared_at_one_length(plan_of):
    plan = plan_of(study(*both("210m"), *both("210m", 22 * K), *both("610m"), *both("1b", 22 * K)))
    (slope,) = found(plan, "C5")
    assert names(slope.models) == [
        "210m-mlm-22000",
        "210m-clm-22000",
        "1b-mlm-22000",
        "1b-clm-22000",
    ]
    assert found(plan_of(study(*both("210m"), *both("610m", 22 * K))), "C5") == []


def test_checkpoints_too_late_are_not_early_and_too_early_not_late(plan_of):
    def kept(*steps):
        return [replace(one, keep=steps) for one in both(steps=16 * K)]

    early = [found(plan_of(study(*kept(step))), "C10") for step in (2 * K, 2 * K + 1)]
    assert [len(tests) for tests in early] == [4, 0]  # an eighth of 16,000
    late = [found(plan_of(study(*kept(step))), "C11") for step in (8 * K, 8 * K + 1)]
    assert [len(tests) for tests in late] == [0, 4]


def test_checkpoints_are_compared_on_what_they_are_fine_tuned_on(plan_of):
    runs = [replace(one, keep=(2 * K, 9 * K)) for one in both(steps=16 * K)]
    fewer = Fewer(("sst2", "squad"), lrs=(1e-4,), seeds=(0, 1))
    plan = plan_of(study(*runs, on_the_way=fewer))
    assert [test.tasks for test in found(plan, "C10")] == [("sst2",), ("squad",)]
    assert [test.tasks for test in found(plan, "C11")] == [("sst2",), ("squad",)] * 2, "late, and before"
    assert len(found(plan, "C1")) == 1  # ends are fine-tuned on everything
    over = comparable_models(plan)
    assert [over.seeds(found(plan, name)[0].models) for name in ("C10", "C1")] == [2, 5]


def test_what_a_claim_needs_of_the_fine_tuning(plan_of):
    plan = plan_of(study(*both(), quarter(), tasks=("sst2",)))
    tested = {one.id: len(found(plan, one.id)) for one in STATEMENTS if found(plan, one.id)}
    assert tested == {"C1": 1, "C12": 1, "C13": 1}, "its families"

    def count(claim, **fields):
        return len(found(plan_of(study(*both(), **fields)), claim))

    assert [count("B5", documents=one) for one in ("judged", "all")] == [0, 1], "all documents"
    rates = (1e-5, 1e-4), (1e-5, 1e-4, 1e-3)
    assert [count("C12", lrs=one) for one in rates] == [0, 1], "three rates, for their spread"
    assert count("B3", tasks=("mnli", "qqp")) == 0, "single texts and pairs"
    plan = plan_of(study(*both(), tasks=("sst2", "mnli", "cola", "qqp", "conll2003")))
    assert by_texts(comparable_models(plan)) == (("sst2", "cola"), ("mnli", "qqp"))
    assert len(found(plan, "B3")) == 1


def test_continued_claims_take_the_longest_bases_and_lengths_of_both(plan_of):
    bases = (*both(steps=12 * K), *both(steps=22 * K))
    more = [
        run(f"{base.name}+{steps}", Stage(MLM(0.4), steps), start=base)
        for base in bases
        for steps in (2 * K, 4 * K, 6 * K)
    ]
    more = [one for one in more if one.name != "610m-mlm-22000+6000"]
    plan = plan_of(study(*bases, *more))
    assert names(found(plan, "C17")[0].models) == [
        "610m-clm-22000+4000",
        "610m-mlm-22000+4000",
    ]
    assert names(found(plan, "C19")[0].models) == [
        "610m-clm-22000+2000",
        "610m-mlm-22000+2000",
    ]
    assert names(found(plan, "C18")[0].models)[:2] == ["610m-mlm-22000", "610m-clm-22000"]


# ---------------------------------------------------------------- the study's own


def test_own_claims_are_tested_on_what_they_name(plan_of):
    pair = "610m-two-12000", "610m-mlm-12000"
    claims = (
        Claim("tags", "two stages help to tag", *pair, on=("TC", "squad")),
        Claim("all", "no worse anywhere", *pair, margin=-1),
        Claim("f1", "by F1", *pair, on="QA", metric="f1"),
    )
    plan, asked = plan_of(study(*both(), quarter(), claims=claims)), {}
    for claim in claims:
        tests = found(plan, claim.name)
        asked[claim.name] = [(test.title, test.margin) for test in tests]
        assert all(names(test.models) == [*pair] for test in tests)
    assert asked == {
        "tags": [("TC", 0), ("squad", 0)],
        "all": [(family, -1) for family in ("SC", "TC", "QA", "IR")],
        "f1": [("QA (f1)", 0)],
    }


def test_a_claim_may_name_any_draw_of_a_recipe_but_not_compare_two(plan_of):
    runs = [replace(one, name=f"{one.name}-{seed}", seed=seed) for one in both() for seed in (1, 2)]
    claims = (
        Claim("x", "masks help", "610m-mlm-12000-2", "610m-clm-12000-2", on="SC"),
        Claim("luck", "one seed is luckier", "610m-clm-12000-2", "610m-clm-12000-1"),
    )
    plan = plan_of(study(*runs, claims=claims))
    (test,) = found(plan, "x")
    assert [model.results for model in test.models] == [
        ("610m-mlm-12000-1", "610m-mlm-12000-2"),
        ("610m-clm-12000-1", "610m-clm-12000-2"),
    ]
    assert found(plan, "luck") == []


# ---------------------------------------------------------------- the guide


def test_the_guide_says_what_the_code_does():
    rows = [line.strip("|").split("|") for line in DOCS.read_text().splitlines() if line.startswith("| ")]
    told = {name.strip(): [cell.strip() for cell in cells] for name, *cells in rows}
    for one in STATEMENTS:
        assert told[one.id] == [one.says, one.contrast, one.needs.removeprefix("needs "), one.paper]


# ---------------------------------------------------------------- published numbers


NUMBERS = GISSEROT.published
FOUR = ("SC", "TC", "QA", "IR")


@pytest.fixture
def plan(plan_of):
    return plan_of("paper")


def test_every_printed_model_is_one_of_the_study(plan):
    every = {
        name: [NUMBERS.family_mean(model.recipe, one) for one in FOUR] for name, model in models(plan).items()
    }
    known = {name: means for name, means in every.items() if any(means)}
    assert len(known) == len(FAMILY_MEANS)
    assert known["1b-mlm50-42k"] == [None, 92.88, None, 81.97]
    assert known["610m-clm-42k-5000"] == [78.56, 91.17, 34.30, 65.22]
    assert known["610m-clm-17k-mlm40-22k"] == [None, None, None, 77.81]
    assert known["610m-clm-dec42k-mlm40-64k"] == [88.40, 92.70, 66.62, 80.70]


def test_a_model_that_differs_in_one_fact_is_not_in_the_paper(plan):
    recipe = recipe_of(plan, "610m-clm-10k-mlm40-42k")
    clm, mlm = recipe.spans
    assert NUMBERS.family_mean(recipe, "SC") == 87.85
    for changed in (
        {"size": "60m"},
        {"shape": "another"},
        {"decayed": False},
        {"tokens": recipe.tokens // 2},
        {"base": replace(recipe, spans=recipe.spans[:1])},
        {"spans": (replace(clm, until=11_000), replace(mlm, first=11_000))},
        {"spans": (clm, replace(mlm, until=43_000))},
        {"spans": (clm, replace(mlm, objective=replace(mlm.objective, ratio=0.3)))},
        {"spans": (clm, replace(mlm, objective=replace(mlm.objective, replace=(0.8, 0.1, 0.1))))},
    ):
        assert NUMBERS.family_mean(replace(recipe, **changed), "SC") is None, changed
    masked = recipe_of(plan, "610m-mlm40-42k")
    assert NUMBERS.at_rates(replace(masked, shape="another"), "sst2") == {}
    assert NUMBERS.family_mean(replace(masked, tokens=42_000 * 2_373_120), "SC") == 87.00, "its other figure"
