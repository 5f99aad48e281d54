"""What a result is, from its spec: the paper's fifty against their names, and everything the paper does not have."""

from dataclasses import replace

import pytest

from biphase import (
    BPE,
    CLM,
    MLM,
    MNTP,
    SIZES,
    WSD,
    AdamW,
    Corpus,
    Hub,
    Linear,
    Merge,
    Mix,
    Pretrain,
    Rows,
    Stage,
    Uniform,
)
from biphase.report.figures.description import role_of
from biphase.report.recipes import models, named, recipe_at, recipe_of


@pytest.fixture
def of(planned):
    """The recipe of the last result of some runs."""

    def recipe(*runs):
        plan = planned(*runs)
        return recipe_of(plan, list(plan.results)[-1])

    return recipe


def test_a_merged_model_is_of_no_kind_that_claims_are_about(of, planned):
    fields = {"corpus": "builtin", "packing": Rows(64), "batch_tokens": 128}
    clm = Pretrain("clm", SIZES["1m"], stages=Stage(CLM(), 20), schedule=WSD(1e-3, 2, 5), **fields)
    mlm = Pretrain("mlm", SIZES["1m"], stages=Stage(MLM(0.4), 20), schedule=WSD(1e-3, 2, 5), **fields)
    merged = Pretrain("merged", Merge((clm, 0.25), (mlm, 0.75)))
    on = Pretrain("on", merged.start, stages=Stage(MLM(0.4), 8), schedule=WSD(1e-3, 1, 2))
    after = Pretrain("after", on, stages=Stage(MLM(0.4), 8), schedule=WSD(1e-3, 0, 2))
    recipes = [of(*runs) for runs in ((merged,), (on,), (after,))]
    assert [recipe.kind for recipe in recipes] == [role_of(recipe) for recipe in recipes] == ["other"] * 3
    assert {recipe.ratio for recipe in recipes} == {None}
    assert [recipe.steps for recipe in recipes] == [20, 28, 36]
    assert [recipe.continued for recipe in recipes] == [0, 8, 8]
    assert "0.25 × CLM for 20 steps" in recipes[0].words()
    assert "0.75 × MLM 40% for 20 steps" in recipes[0].words()
    assert all(recipes[0].words().split(" · ")[1] in recipe.words() for recipe in recipes[1:])
    even = of(Pretrain("even", Merge(clm, mlm)))
    assert len({recipe.setting for recipe in (of(clm), even, *recipes[:2])}) == 4
    assert of(clm).kind == "clm"
    plan = planned(clm, after)
    texts = [recipe_at(plan, job, to_end=end).words() for job in plan.jobs.values() for end in (True, False)]
    assert sum("mean of" in text for text in texts) == 2 * (
        1 + 2 + 2
    )  # the merge, and two jobs of each run after it


# ---------------------------------------------------------------- the paper's fifty


PAPER = {  # result → kind, steps, steps of its run, ratio, steps of CLM, base
    "210m-mlm20-42k": ("mlm", 42_000, 42_000, 0.2, 0, None),
    "1b-clm-42k": ("clm", 42_000, 42_000, None, 42_000, None),
    "610m-clm-42k-5000": ("clm", 5_000, 42_000, None, 5_000, None),
    "610m-clm-40k-mlm50-42k": ("clm-mlm", 42_000, 42_000, 0.5, 40_000, None),
    "610m-clm-dec42k-mlm40-54k": ("mlm", 54_000, 54_000, 0.4, 0, "610m-clm-42k"),
}


def test_every_model_of_the_paper_is_what_its_name_says(plan_of):
    plan = plan_of("paper")
    known = models(plan)
    assert list(known) == list(plan.results)
    assert len(known) == 50
    assert len({model.recipe.setting for model in known.values()}) == 1
    assert {model.seeds for model in known.values()} == {(42,)}
    parameters = {model.recipe.size: model.recipe.parameters for model in known.values()}
    assert parameters == {"210m": 310_266_624, "610m": 755_625_600, "1b": 1_409_482_944}
    for name, (kind, steps, of, ratio, causal, base) in PAPER.items():
        recipe = known[name].recipe
        assert (recipe.size, recipe.kind, recipe.ratio) == (name.split("-")[0], kind, ratio)
        assert (recipe.steps, recipe.of, recipe.tokens) == (steps, of, steps * 2_359_296)
        assert recipe.decayed == (steps == of)
        assert recipe.base == (known[base].recipe if base else None)
        assert recipe.causal_share == causal / recipe.own_steps
        assert recipe.continued == (steps - 42_000 if base else 0)


# ---------------------------------------------------------------- objectives the paper does not have


@pytest.mark.parametrize(
    ("stages", "kind", "share", "ratio"),
    [
        ((Stage(MLM(0.3), 8), Stage(CLM(), 12)), "other", 0.6, 0.3),
        ((Stage(CLM(), 5), Stage(MLM(0.4), 10), Stage(CLM(), 5)), "other", 0.5, 0.4),
        ((Stage(MLM(0.4), 10), Stage(MLM(0.2), 10)), "other", 0.0, 0.2),
        ((Stage(MLM(0.4), 10), Stage(MLM(0.4), 10)), "mlm", 0.0, 0.4),
        ((Stage(CLM(), 6), Stage(CLM(), 4), Stage(MLM(0.4), 10)), "clm-mlm", 0.5, 0.4),
        ((Stage(MLM(Linear(0.4, 0.2, 20)), 20),), "mlm", 0.0, None),
        ((Stage(MNTP(0.4), 20),), "other", 0.0, None),
        ((Stage(CLM(), 10), Stage(MNTP(0.4), 10)), "other", 0.5, None),
        ((Stage(Mix({CLM(): 3, MLM(0.4): 1}), 20),), "mix", 0.0, None),
        ((Stage(CLM(), 10), Stage(Mix({CLM(): 3, MLM(0.4): 1}), 10)), "other", 0.5, None),
        ((Stage(MLM(Uniform(0, 1), weight="1/ratio"), 20),), "mlm", 0.0, None),
        ((Stage(MLM(0.4, weight="1/ratio"), 20),), "mlm", 0.0, None),
        ((Stage(MLM(0.4, unit="word"), 20),), "mlm", 0.0, None),
    ],
)
def test_what_was_asked_in_which_order(of, run, stages, kind, share, ratio):
    recipe = of(run("x", *stages))
    assert (recipe.kind, recipe.causal_share, recipe.ratio) == (kind, share, ratio)
    assert recipe.steps == recipe.of == 20


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        (MLM(0.4).label, "MLM 40%"),
        (MLM(0.4).column, "MLM 40%"),
        (Mix({CLM(): 3, MNTP(0.3): 1}).label, "MIX 75% CLM + 25% MNTP 30%"),
        (MLM(0.3, unit="word").label, "MLM 30% words"),
    ],
)
def test_labels_are_shown_with_objectives_in_capitals(label, shown):
    assert named(label) == shown


# ---------------------------------------------------------------- starts


def test_what_is_not_trained_is_a_start_whatever_else_starts_there(of, planned, run):
    recipe = of(Pretrain("as-is", Hub("someone/Some-Model", revision="a" * 40)))
    assert (recipe.kind, recipe.spans, recipe.steps, recipe.tokens) == ("start", (), 0, 0)
    assert (recipe.parameters, recipe.causal_share, recipe.ratio) == (None, 0.0, None)
    assert recipe.words() == "Some-Model · as it is"
    flat = WSD(1e-3, warmup=0, decay=4)
    plan = planned(run("trained", Stage(CLM(), 20), schedule=flat), run("untrained", schedule=flat))
    recipe = recipe_of(plan, "untrained")
    assert (recipe.kind, recipe.steps, recipe.of, recipe.decayed) == ("start", 0, 0, True)


def test_published_models_of_one_last_name_are_not_one_model(planned):
    one = Pretrain("one", Hub("a/model", revision="a" * 40))
    runs = one, replace(one, name="two", start=Hub("b/model", revision="a" * 40))
    runs += (replace(one, name="three", start=Hub("a/model", revision="b" * 40)),)
    known = models(planned(*runs))
    assert list(known) == ["one", "two", "three"]
    assert len({model.recipe.setting for model in known.values()}) == 3


# ---------------------------------------------------------------- going on


def test_what_goes_on_from_a_decayed_end_has_a_base_and_is_judged_by_what_came_since(of, run):
    base = run("base", Stage(CLM(), 20))
    recipe = of(run("more", Stage(MLM(0.4), 10), start=base))
    assert recipe.base == of(base)
    assert (recipe.kind, recipe.continued, recipe.steps, recipe.of) == ("mlm", 10, 30, 30)
    assert [(one.label, one.first, one.until) for one in recipe.own] == [("mlm 40%", 20, 30)]
    assert recipe.tokens == 30 * 128
    again = of(run("again", Stage(MLM(0.4), 6), start=run("more", Stage(MLM(0.4), 10), start=base)))
    assert again.base == recipe
    assert (again.kind, again.continued, again.steps) == ("mlm", 6, 36)
    assert [(one.first, one.until) for one in again.spans] == [(0, 20), (20, 36)]


def test_what_goes_on_from_an_end_that_never_decayed_went_on_all_the_time(of, run):
    trunk = run("trunk", Stage(CLM(), 10), schedule=WSD(1e-3, warmup=2, decay=0))
    assert of(trunk).words() == "1m · CLM for 10 steps (not decayed)"
    recipe = of(run("more", Stage(MLM(0.4), 30), start=trunk, schedule=WSD(1e-3, decay=4)))
    assert (recipe.base, recipe.kind, recipe.causal_share) == (None, "clm-mlm", 0.25)
    assert (recipe.continued, recipe.of, recipe.decayed) == (0, 40, True)
    decayed = run("decayed", Stage(CLM(), 10))
    trunk = run("trunk", Stage(MLM(0.4), 10), start=decayed, schedule=WSD(1e-3, decay=0))
    recipe = of(run("more", Stage(MLM(0.2), 10), start=trunk, schedule=WSD(1e-3, decay=4)))
    assert recipe.base == of(decayed), "the last decay on the way is the base"
    assert recipe.continued == 20


def test_the_same_steps_with_a_decay_between_them_are_another_recipe_and_no_sample(planned, run):
    mlm = MLM(0.4)
    whole = run("whole", Stage(mlm, 30), seed=1)
    parts = run("parts", Stage(mlm, 10), start=run("base", Stage(mlm, 20), seed=2))
    other = run("other", Stage(mlm, 15), start=run("early", Stage(mlm, 15), seed=3))
    known = models(planned(whole, parts, other))
    assert list(known) == ["whole", "parts", "other"]
    assert len({model.recipe.spans for model in known.values()}) == 1, "the case at hand"
    long = run("long", Stage(mlm, 40), seed=2, keep=(10,))  # nor is a checkpoint on a longer way
    short = run("short", Stage(mlm, 20), seed=1, keep=(10,))
    assert list(models(planned(short, long))) == ["short-10", "short", "long-10", "long"]


# ---------------------------------------------------------------- one checkpoint, several names


def test_a_checkpoint_that_several_runs_pass_through_speaks_for_the_longest(planned, run):
    short, long = run("short", Stage(CLM(), 12), keep=(5,)), run("long", Stage(CLM(), 40), keep=(5, 10))
    for runs in ((short, long), (long, short)):
        plan = planned(*runs)
        assert plan.results["short-5"] == plan.results["long-5"], "the case at hand"
        known = models(plan)
        first = f"{runs[0].name}-5"
        assert list(known) == [name for name in plan.results if name not in {"short-5", "long-5"} - {first}]
        assert (known[first].recipe.of, known[first].recipe.steps) == (40, 5)


def test_a_checkpoint_belongs_to_the_run_that_keeps_it_whoever_else_passes_there(planned, run):
    passing = run("passing", Stage(CLM(), 6), Stage(MLM(0.4), 6))
    plan = planned(passing, run("keeping", Stage(CLM(), 40), keep=(6,)))
    assert plan.jobs[plan.results["keeping-6"]].run.name == "passing", "the case at hand"
    assert recipe_of(plan, "keeping-6").of == 40
    assert models(plan)["keeping-6"].recipe.of == 40


# ---------------------------------------------------------------- several seeds


def test_results_that_differ_only_in_the_seed_are_samples_of_one_model(planned, run):
    runs = [run(f"{word}-{seed}", Stage(one, 20), seed=seed, keep=(10,)) for seed in (7, 3) for word, one in (("clm", CLM()), ("mlm", MLM(0.4)))]  # fmt: skip
    known = models(planned(*runs))
    assert {name: (model.results, model.seeds) for name, model in known.items()} == {
        "clm-3-10": (("clm-3-10", "clm-7-10"), (3, 7)),
        "clm-3": (("clm-3", "clm-7"), (3, 7)),
        "mlm-3-10": (("mlm-3-10", "mlm-7-10"), (3, 7)),
        "mlm-3": (("mlm-3", "mlm-7"), (3, 7)),
    }
    assert all(model.recipe.seed == 3 for model in known.values())


def test_continued_samples_stay_samples_and_two_ways_on_from_one_base_are_none(planned, run):
    mlm, base = Stage(MLM(0.4), 10), run("base", Stage(CLM(), 20), seed=1)
    more = [run(f"more-{seed}", mlm, start=replace(base, name=f"base-{seed}", seed=seed)) for seed in (1, 2)]
    (model,) = models(planned(*more)).values()
    assert (model.results, model.seeds) == (("more-1", "more-2"), (1, 2))
    ways = [run(f"way-{seed}", mlm, start=base, seed=seed, data="restart") for seed in (1, 2)]
    assert [model.results for model in models(planned(*ways)).values()] == [("way-1",), ("way-2",)]


# ---------------------------------------------------------------- what else may differ


@pytest.mark.parametrize(
    "fields",
    [
        {"schedule": WSD(2e-3, warmup=2, decay=4)},
        {"schedule": WSD(1e-3, warmup=3, decay=4)},
        {"schedule": WSD(1e-3, warmup=2, decay=5)},
        {"optimizer": AdamW(eps=1e-8)},
        {"batch_tokens": 256},
        {"packing": Rows(64, document_mask=True)},
        {"precision": "bf16"},
        {"corpus": Corpus("other", "./text", BPE(2048))},
        {"start": replace(SIZES["1m"], rope_base=5e4)},
        {"start": replace(SIZES["1m"], tied=True)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_anything_else_that_differs_is_another_setting_and_no_sample(planned, run, fields):
    plan = planned(run("one", Stage(CLM(), 20), seed=1), run("two", Stage(CLM(), 20), seed=2, **fields))
    known = models(plan)
    assert list(known) == ["one", "two"]
    assert known["one"].recipe.setting != known["two"].recipe.setting


def test_what_stages_say_of_rates_and_frozen_layers_is_a_setting_in_one_form(planned, run):
    def setting(*stages, peak=1e-3):
        """The setting of a run with these stages."""
        one = run("one", *stages, schedule=WSD(peak, warmup=2, decay=4))
        return models(planned(one))["one"].recipe.setting

    clm, mlm, low = Stage(CLM(), 10), Stage(MLM(0.4), 10), {"peak": 5e-4}
    high = setting(clm, replace(mlm, **low))
    assert high == setting(replace(clm, peak=1e-3), mlm, peak=5e-4)
    assert setting(replace(mlm, **low)) == setting(mlm, peak=5e-4)
    assert high != setting(clm, replace(mlm, **low), peak=2e-3)
    assert high != setting(clm, mlm) != setting(clm, mlm, peak=5e-4)
    frozen = setting(replace(mlm, freeze="layers[:2]"))
    assert frozen == setting(*(replace(stage, freeze="layers[:2]") for stage in (clm, mlm)))
    assert len({frozen, setting(clm, mlm), setting(clm, replace(mlm, freeze="layers[:2]"))}) == 3


def test_the_decay_of_runs_from_a_merge_is_not_one_of_runs_from_scratch(planned, run):
    scratch = [run(f"s{n}", Stage(CLM(), n), schedule=WSD(1e-3, 2, 0.2)) for n in (100, 200, 400)]
    merge, fields = Merge(scratch[0], scratch[1]), {"schedule": WSD(1e-3, 1, 7)}
    merged = [Pretrain(f"m{n}", merge, stages=Stage(CLM(), n), **fields) for n in (20, 40)]
    settings = {name: model.recipe.setting for name, model in models(planned(*scratch, *merged)).items()}
    assert len({settings[one.name] for one in scratch}) == 1
    assert settings["m20"] == settings["m40"]


def test_size_objective_steps_and_seed_are_no_setting(planned, run):
    runs = (
        run("one", Stage(CLM(), 20)),
        run("large", Stage(CLM(), 20), start=SIZES["60m"]),  # trained in another precision by default
        run("long", Stage(MLM(0.4), 40)),
        run("seed", Stage(CLM(), 20), seed=2),
        run("more", Stage(MLM(0.4), 10), start=run("one", Stage(CLM(), 20))),
    )
    assert len({model.recipe.setting for model in models(planned(*runs)).values()}) == 1


@pytest.mark.parametrize(
    "fields", [{"optimizer_state": "reset"}, {"data": "restart"}, {"schedule": WSD(1e-3, warmup=1, decay=4)}]
)
def test_how_a_run_goes_on_is_a_setting(planned, run, fields):
    base = run("base", Stage(CLM(), 20))
    plan = planned(
        base,
        run("on", Stage(MLM(0.4), 10), start=base),
        run("odd", Stage(MLM(0.4), 10), start=base, **fields),
    )
    settings = {name: model.recipe.setting for name, model in models(plan).items()}
    assert settings["base"] == settings["on"] != settings["odd"]


@pytest.mark.parametrize(
    ("schedule", "lengths"),
    [
        (WSD(1e-3, warmup=0.1, decay=0.2), (100, 200, 400)),
        (WSD(1e-3, warmup=2, decay=0.2), (20, 40)),  # each in its own way
        (WSD(1e-3, warmup=0.1, decay=4), (20, 40)),
        (WSD(1e-3, warmup=0.05, decay=0.1), (250, 400)),  # 12.5 steps are 12: a share of 0.048
        (WSD(1e-3, warmup=2, decay=4), (20, 30, 50)),
    ],
)
def test_shares_and_steps_are_told_apart_for_warmup_and_decay_alone(planned, run, schedule, lengths):
    runs = [run(f"b{steps}", Stage(CLM(), steps), schedule=schedule) for steps in lengths]
    assert len({model.recipe.setting for model in models(planned(*runs)).values()}) == 1
    odd = run("odd", Stage(CLM(), lengths[-1]), schedule=replace(schedule, decay=2 * schedule.decay))
    settings = {name: model.recipe.setting for name, model in models(planned(*runs, odd)).items()}
    assert settings[runs[0].name] == settings[runs[-1].name] != settings["odd"]
