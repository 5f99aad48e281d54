"""A key changes exactly where something that determines the checkpoint differs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from biphase.catalog import TASKS
from biphase.keys import Identities, Keyring, checkpoint_key, data_key, finetuning_key, trial_key
from biphase.presets import SIZES
from biphase.records import decode, encode
from biphase.specs import (
    BPE,
    CLM,
    MLM,
    MNTP,
    WSD,
    AdamW,
    Chunks,
    Corpus,
    Finetune,
    Hub,
    Kept,
    Linear,
    LoRA,
    Merge,
    Mix,
    Muon,
    Pretrain,
    Rows,
    Stage,
    Uniform,
)

OUTSIDE = Identities(data=lambda corpus: f"data of {corpus.name}", hub=lambda hub: f"hub {hub.source}")
TINY = SIZES["1m"]
RUN = Pretrain(
    "run",
    TINY,
    "builtin",
    (Stage(CLM(), 10), Stage(MLM(0.4), 10)),
    WSD(1e-3, warmup=2, decay=5),
    batch_tokens=128,
    packing=Rows(64),
)
THEN = Pretrain("then", RUN, stages=(Stage(MLM(0.4), 8),), schedule=WSD(1e-3, decay=3))


def keys(run):
    return [checkpoint_key(run, step, OUTSIDE) for step in range(run.steps + 1)]


MIX = Mix({CLM(): 3, MLM(0.4): 1})
NEVER = 10**9


def second(stage):
    return {"stages": (Stage(CLM(), 10), stage)}


# What is changed in RUN, and the last step whose checkpoint is still the same (−1: not even the start).
CHANGES = {
    "name": ({"name": "other"}, NEVER),
    "held-out interval": ({"heldout_every": 7}, NEVER),
    "kept steps": ({"keep": (3, 12)}, NEVER),
    "a stage written as two": ({"stages": (Stage(CLM(), 4), Stage(CLM(), 6), Stage(MLM(0.4), 10))}, NEVER),
    "the size's name": ({"start": replace(TINY, name="mine", precision="bf16"), "precision": "fp32"}, NEVER),
    "decay length": ({"schedule": WSD(1e-3, 2, 4)}, 15),
    "end of the decay": (
        {"stages": (Stage(CLM(), 10), Stage(MLM(0.4), 12)), "schedule": WSD(1e-3, 2, 7)},
        15,
    ),
    "held-out tokens": ({"heldout_tokens": 5_000}, NEVER),
    "no decay": ({"schedule": WSD(1e-3, 2, 0)}, 15),
    "longer decay": ({"schedule": WSD(1e-3, 2, 14)}, 6),
    "longer last stage": (second(Stage(MLM(0.4), 12)), 15),
    "ratio of the second stage": (second(Stage(MLM(0.5), 10)), 10),
    "rule of the second stage": (second(Stage(MLM(0.4, (0.8, 0.1, 0.1)), 10)), 10),
    "kind of the second stage": (second(Stage(MNTP(0.4), 10)), 10),
    "switch": ({"stages": (Stage(CLM(), 7), Stage(MLM(0.4), 13))}, 7),
    "first objective": ({"stages": (Stage(MLM(0.4), 20),)}, 0),
    "a mixture": (second(Stage(MIX, 10)), 10),
    "seed": ({"seed": 1}, -1),
    "packing": ({"packing": Rows(64, document_mask=True)}, -1),
    "chunks": ({"packing": Chunks(64)}, -1),
    "optimizer": ({"optimizer": AdamW(eps=1e-8)}, -1),
    "batch": ({"batch_tokens": 256}, -1),
    "precision": ({"precision": "bf16"}, -1),
    "corpus": ({"corpus": "fineweb-edu"}, -1),
    "peak": ({"schedule": WSD(2e-3, 2, 5)}, -1),
    "warmup": ({"schedule": WSD(1e-3, 3, 5)}, -1),
    "shape": ({"start": replace(TINY, layers=5)}, -1),
    "initial spread": ({"start": replace(TINY, init_std=0.01)}, -1),
    "a hub model": ({"start": Hub("./m"), "precision": "fp32"}, -1),
    "layer decay": ({"optimizer": AdamW(layer_decay=0.9)}, -1),
    "what is frozen": ({"freeze": "embeddings"}, -1),
    "shape of the decay": ({"schedule": WSD(1e-3, 2, 5, shape="1-sqrt")}, 15),
    "floor of the decay": ({"schedule": WSD(1e-3, 2, 5, floor=0.1)}, 15),
    "start of the warmup": ({"schedule": WSD(1e-3, 2, 5, warmup_from=0.1)}, -1),
    "peak of the second stage": (second(Stage(MLM(0.4), 10, peak=1e-4)), 10),
    "peak of a part of a stage": (
        {"stages": (Stage(CLM(), 4), Stage(CLM(), 6, peak=1e-4), Stage(MLM(0.4), 10))},
        4,
    ),
    "Muon": ({"optimizer": Muon()}, -1),
    "z-loss": ({"z_loss": 1e-4}, -1),
    "frozen layers of the second stage": (second(Stage(MLM(0.4), 10, freeze="layers[:2]")), 10),
    "layer decay of the second stage": (second(Stage(MLM(0.4), 10, layer_decay=0.9)), 10),
    "a layer decay of 1 said by a stage": (
        {"stages": (Stage(CLM(), 10, layer_decay=1.0), Stage(MLM(0.4), 10))},
        NEVER,
    ),
    "peaks said by stages": (
        {
            "schedule": WSD(2e-3, 2, 5),
            "stages": (Stage(CLM(), 10, peak=1e-3), Stage(MLM(0.4), 10, peak=1e-3)),
        },
        NEVER,
    ),
    "rotary base": (second(Stage(MLM(0.4), 10, rope_base=50_000.0)), 10),
    "rotary base from the start": (
        {"stages": (Stage(CLM(), 10, rope_base=50_000.0), Stage(MLM(0.4), 10))},
        0,
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_exactly_downstream_of_where_it_acts(change):
    fields, same_until = CHANGES[change]
    before, after = keys(RUN), keys(replace(RUN, **fields))
    common = min(len(before), len(after))
    for step in range(common):
        assert (before[step] == after[step]) == (step <= same_until), f"at step {step}"


DRAWN = MLM(Uniform(0, 1))
OTHER_OBJECTIVES = [
    MIX,
    Mix({CLM(): 2, MLM(0.4): 1}),
    Mix({CLM(): 3, MLM(0.3): 1}),
    Mix({CLM(): Linear(1, 0.5, 5), MLM(0.4): 1}),
    Mix({CLM(): Linear(1, 0.5, 6), MLM(0.4): 1}),
    Mix({CLM(): 3, MLM(0.4): 1}, weights={CLM(): 2}),
    Mix({CLM(): 3, MLM(0.4): 1}, weights={MLM(0.4): 2}),
    Mix({CLM(): 3, MLM(0.4): 1}, mean_over="labels"),
    DRAWN,
    MLM(Uniform(0, 0.9)),
    MLM(Uniform(0.1, 1)),
    MNTP(Uniform(0, 1)),
    MLM(Uniform(0, 1), weight="1/ratio"),
    MLM(0.4),
    MLM(0.4, weight="1/ratio"),
    MLM(0.4, unit="word"),
    MLM(0.4, unit="span"),
    MLM(0.4, unit="span", mean_span=4),
    MLM(0.4, masks="static"),
]


def test_every_field_of_an_objective_is_in_the_key():
    made = [replace(RUN, stages=(Stage(objective, 10),)) for objective in OTHER_OBJECTIVES]
    assert len({keys(run)[5] for run in made}) == len(made)
    assert len({keys(run)[0] for run in made}) == 1
    twice = replace(RUN, stages=(Stage(MIX, 4), Stage(Mix({MLM(0.4): 2, CLM(): 6}), 6)))
    assert keys(twice) == keys(made[0])


FROM_HUB = replace(RUN, start=Hub("./m"), precision="fp32")


def test_how_a_hub_model_is_adapted_is_in_the_key():
    ways = LoRA(), LoRA(rank=8), LoRA(alpha=8), LoRA(targets=("q_proj",))
    runs = [FROM_HUB, replace(FROM_HUB, start=Hub("./m", windows="full"))]
    runs += [replace(FROM_HUB, adapter=lora) for lora in ways]
    assert len({keys(run)[5] for run in runs}) == len(runs)


def test_beside_an_adapter_everything_is_frozen_anyway():
    lora = replace(FROM_HUB, adapter=LoRA())
    assert keys(lora) == keys(replace(lora, freeze="embeddings"))
    assert keys(FROM_HUB)[5] != keys(replace(FROM_HUB, freeze="embeddings"))[5]


def test_the_form_of_a_decay_or_warmup_that_never_happens_is_in_no_key():
    without = replace(RUN, schedule=WSD(1e-3, 0, 0))
    assert keys(without) == keys(
        replace(RUN, schedule=WSD(1e-3, 0, 0, shape="cosine", floor=0.1, warmup_from=0.1))
    )


def test_a_rotary_base_goes_on_until_another_is_said():
    said = replace(RUN, stages=(Stage(CLM(), 10, rope_base=5e4), Stage(MLM(0.4), 10)))
    again = replace(RUN, stages=(Stage(CLM(), 10, rope_base=5e4), Stage(MLM(0.4), 10, rope_base=5e4)))
    assert keys(said) == keys(again)
    assert said.rope_base_after(said.steps) == 5e4
    on = Pretrain("on", said, stages=(Stage(MLM(0.4), 8),), schedule=WSD(1e-3, decay=3))
    assert keys(on) == keys(replace(on, stages=(Stage(MLM(0.4), 8, rope_base=5e4),)))
    assert keys(on)[1] != keys(replace(on, stages=(Stage(MLM(0.4), 8, rope_base=6e4),)))[1]
    assert [phase.rope_base for phase in on.phases] == [5e4]


def test_the_key_of_a_merge_is_of_its_parts_and_weights_alone():
    def key(*parts, **fields):
        return checkpoint_key(Pretrain("merged", Merge(*parts), **fields), 0, OUTSIDE)

    two = replace(RUN, name="two", stages=(Stage(CLM(), 20),))
    plain = key((RUN, 0.25), (two, 0.75))
    assert plain == key((two, 0.75), (replace(RUN, name="other"), 0.25), heldout_every=7)
    others = {
        key((RUN, 0.75), (two, 0.25)),
        key((Kept(RUN, 19), 0.25), (two, 0.75)),
        key((RUN, 0.25), (replace(two, seed=3), 0.75)),
        key(RUN, two, THEN),
    }
    assert len(others | {plain}) == 5
    on = Pretrain("on", Merge((RUN, 0.25), (two, 0.75)), stages=Stage(CLM(), 5), schedule=WSD(1e-3, 1, 1))
    assert keys(on)[0] == plain
    assert keys(on)[1:] != keys(replace(on, start=Merge(RUN, two)))[1:]
    assert decode(encode(on)) == on


CHANGES_OF_THEN = {
    "optimizer_state": ({"optimizer_state": "reset"}, 0),
    "data": ({"data": "restart"}, 0),
    "optimizer": ({"optimizer": AdamW(eps=1e-8)}, 0),
    "batch": ({"batch_tokens": 256}, 0),
    "peak": ({"schedule": WSD(5e-4, decay=3)}, 0),
    "seed": ({"data": "restart", "seed": 1}, 0),
    "decay": ({"schedule": WSD(1e-3, decay=2)}, 5),
    "parent's name": ({"start": replace(RUN, name="other")}, NEVER),
    "parent's decay": ({"start": replace(RUN, schedule=WSD(1e-3, 2, 4))}, -1),
    "parent's seed": ({"start": replace(RUN, seed=1), "seed": 1}, -1),
}


@pytest.mark.parametrize("change", CHANGES_OF_THEN)
def test_a_run_that_goes_on_feels_its_own_fields_after_its_start_and_its_parents_at_once(change):
    fields, same_until = CHANGES_OF_THEN[change]
    for step, (before, after) in enumerate(zip(keys(THEN), keys(replace(THEN, **fields)), strict=True)):
        assert (before == after) == (step <= same_until), f"at step {step}"


def test_a_run_that_goes_on_begins_at_its_parents_end_and_every_step_has_its_own_key():
    assert keys(THEN)[0] == keys(RUN)[-1]
    assert len(set(keys(RUN) + keys(THEN)[1:])) == 21 + 8


def test_what_lies_outside_the_study_is_in_the_key():
    other = Identities(data=lambda corpus: "other", hub=OUTSIDE.hub)
    assert checkpoint_key(RUN, 5, other) != checkpoint_key(RUN, 5, OUTSIDE)
    from_hub = replace(RUN, start=Hub("./m"), precision="fp32")
    again = Identities(data=OUTSIDE.data, hub=lambda hub: "retrained")
    assert checkpoint_key(from_hub, 5, again) != checkpoint_key(from_hub, 5, OUTSIDE)


@given(st.lists(st.tuples(st.sampled_from([0, 1]), st.integers(0, 20)), max_size=30))
def test_a_keyring_gives_the_same_keys_in_any_order_of_asking(questions):
    ring, runs = Keyring(OUTSIDE), (RUN, THEN)
    for which, step in questions:
        step = min(step, runs[which].steps)
        assert ring.at(runs[which], step) == checkpoint_key(runs[which], step, OUTSIDE)


FALLING = replace(
    RUN,
    stages=(Stage(MLM(Linear(0.4, 0.2, 5)), 10), Stage(MNTP(0.3), 10)),
    optimizer=AdamW(eps=1e-8),
    packing=Chunks(64),
)
PAPER = Pretrain("paper", SIZES["610m"], "fineweb-edu", (Stage(CLM(), 10_000), Stage(MLM(0.4), 32_000)))


@pytest.mark.parametrize(
    ("run", "step", "key"),
    [
        (RUN, 12, "33a3a4b564ed002abf2bbf7d1e2a546b"),
        (THEN, 8, "33464c4b2e98b71902ed4567f91cdf3c"),
        (FALLING, 20, "a0c5b4d6b2c3fbd3db99af7742c52efe"),
        (PAPER, 10_000, "cc85f119f3863a61b49bdb5687cbbc29"),
        (PAPER, 42_000, "c45779b249b1a8c55222bdc47a9c15f7"),
        (Pretrain("as-is", Hub("./m"), "builtin"), 0, "1fed463d44989c9612a506176be4fbeb"),
    ],
    ids=["from scratch", "continued", "falling", "paper at the switch", "paper at the end", "as it is"],
)
def test_keys_stay_what_they_were(run, step, key):
    # If this changed unintentionally, every checkpoint of every store would be lost: raise GENERATION instead.
    assert checkpoint_key(run, step, OUTSIDE) == key


def test_shards_are_named_by_content_tokenizer_and_rules_not_by_place():
    corpus = Corpus("c", "./here", BPE(300))
    one = data_key(corpus, "content", "tokenizer")
    assert data_key(replace(corpus, name="d", source="./there"), "content", "tokenizer") == one
    for other in (
        data_key(corpus, "other", "tokenizer"),
        data_key(corpus, "content", "other"),
        data_key(replace(corpus, text="body"), "content", "tokenizer"),
        data_key(replace(corpus, bos=True), "content", "tokenizer"),
        data_key(replace(corpus, tokens=5), "content", "tokenizer"),
    ):
        assert other != one


def test_a_hub_model_as_it_is_has_one_key_whatever_its_run_says():
    as_is = Pretrain("as-is", Hub("./m"), "builtin")
    for other in (
        replace(as_is, name="other", seed=3),
        replace(as_is, corpus="fineweb-edu"),
        Pretrain("no-corpus", Hub("./m")),
    ):
        assert keys(other) == keys(as_is)
    for other in (Hub("./n"), Hub("./m", windows="full")):
        assert keys(Pretrain("other", other)) != keys(as_is)
    assert keys(replace(RUN, start=Hub("./m"), precision="fp32"))[0] != keys(as_is)[0]


# ---------------------------------------------------------------- trials

GRID = Finetune(TASKS[:1])


def tuned(spec=GRID, *, model="model", task="task", lr=1e-4, seed=0):
    return finetuning_key(model, task, spec, lr=lr, seed=seed)


def test_whatever_determines_a_fine_tuned_model_is_in_its_key():
    adam = [
        {"weight_decay": 0.0},
        {"eps": 1e-8},
        {"betas": (0.9, 0.999)},
        {"clip": 0.5},
        {"layer_decay": 0.9},
    ]
    grids = [
        {"protocol": "standard"},
        {"precision": "fp32"},
        {"length": 128},
        {"warmup": 0.2},
        {"causal": True},
    ]
    grids += [{"best_epoch": True}, *({"optimizer": AdamW(**fields)} for fields in adam)]
    changes = [{}, {"lr": 2e-4}, {"seed": 1}, {"model": "other"}, {"task": "other"}]
    changes += [{"spec": replace(GRID, **fields)} for fields in grids]
    assert len({tuned(**change) for change in changes}) == len(changes)
    assert "best_epoch" not in encode(GRID)


def test_the_rest_of_a_grid_is_not_in_the_key_of_one_of_its_models():
    others = {"tasks": TASKS}, {"lrs": (1e-4,)}, {"seeds": (0, 9)}, {"documents": "all"}
    said = {"precision": "pure-bf16", "documents": "judged"}  # what the protocol says anyway
    assert {tuned(replace(GRID, **fields)) for fields in (*others, said)} == {tuned()}


def test_scores_are_named_by_the_model_the_task_and_what_is_searched():
    own = trial_key(tuned(), "task", "judged")
    others = {trial_key(tuned(seed=1), "task", "judged"), trial_key(tuned(), "other", "judged")}
    others |= {trial_key(tuned(), "task", "all"), trial_key(tuned(), "task", ""), tuned()}
    assert len(others | {own}) == 6


def test_the_key_of_a_trial_is_the_same_on_every_machine():
    # If this changed unintentionally, every score of every store would be lost: raise TRIAL_GENERATION instead.
    assert tuned() == "d4daa5bd79f74e149887bb353dad42f2"
    other = Finetune(TASKS[:1], protocol="standard", optimizer=AdamW(weight_decay=0.01))
    assert tuned(other, seed=3) == "ad28431b10a321c6f79d898833b36bbf"
    assert trial_key("training", "task", "judged") == "82297c7a2f493366422daf8f1c5428a7"
