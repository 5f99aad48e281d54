"""What `biphase plan` prints: a tree that stays aligned, sums, and what to type next."""

import json
from dataclasses import replace

import pytest

from biphase.catalog import TASKS
from biphase.errors import SpecError
from biphase.keys import Identities
from biphase.presets import LLAMA3, SIZES
from biphase.specs import (
    BPE,
    CLM,
    MLM,
    WSD,
    AdamW,
    Chunks,
    Corpus,
    Finetune,
    Hub,
    LoRA,
    Pretrain,
    Rows,
    Stage,
    Study,
)
from biphase.study.describe import PAGE, Bill, key_length, plan_json, render
from biphase.study.plan import make_plan

OUTSIDE = Identities(data=lambda run: run.corpus.name, hub=lambda hub: hub.source)
CORPUS = Corpus("mine", "./texts", BPE(1_000))


def run(name, *stages, start=SIZES["1m"], decay=2_000, **fields):
    said = {
        "corpus": Corpus("mine", "./texts", LLAMA3) if isinstance(start, Hub) else CORPUS,
        "batch_tokens": 128,
        "packing": Rows(64),
        "schedule": WSD(warmup=0, decay=decay),
    }
    return Pretrain(name, start, stages=tuple(Stage(*stage) for stage in stages), **(said | fields))


def plan_of(*runs, question="Why?", finetune=None):
    return make_plan(Study("s", runs, finetune), OUTSIDE, question)


def shown(plan, done=(), tuned=0, device="cpu", efficiency=0.5):
    bill = Bill(device, efficiency)
    return render(plan, done=done, tuned=tuned, bill=bill, command_path="s.py", claims=[])


def family():
    clm = run("clm", (CLM(), 10_000), keep=(1_000,))
    both = run("both", (CLM(), 4_000), (MLM(0.4), 6_000))
    return plan_of(clm, both, run("more", (MLM(0.4), 5_000), start=clm))


def without_keys(text, plan):
    for key in (*plan.roots, *plan.jobs):
        text = text.replace(key[:6], "######")
    return text


def test_the_tree_is_drawn_as_written_here():
    plan = family()
    assert without_keys(shown(plan), plan).splitlines() == [
        "s: Why?",
        "",
        "1m on mine                              ######",
        "└─ clm                        0k →  1k  ######   clm-1000",
        "   └─ clm                     1k →  4k  ######",
        "      ├─ clm                  4k →  8k  ######",
        "      │  └─ clm ↘             8k → 10k  ######   clm",
        "      │     └─ mlm 40%       10k → 13k  ######",
        "      │        └─ mlm 40% ↘  13k → 15k  ######   more",
        "      └─ mlm 40%              4k →  8k  ######",
        "         └─ mlm 40% ↘         8k → 10k  ######   both",
        "",
        "3 runs · 8 training jobs · 21,000 steps to compute (25,000 as written, 4,000 shared) · 2.69M tokens",
        "1.91e+13 FLOPs · 13 min on cpu at 50% · 125 MB of disk",
        "elapsed: 13 min on one cpu; the longest chain of jobs takes 9 min (more)",
        "nothing computed yet. Next: biphase run s.py",
    ]


def columns(text):
    return {line.index("→") for line in text.splitlines() if " → " in line}


def test_the_arrows_stand_in_one_column():
    assert len(columns(shown(family()))) == 1


def ladder(rungs):
    """A trunk that another run leaves at every step: the deepest tree there is."""
    trunk = run("the-trunk-with-a-long-name", (CLM(), 1_000 * (rungs + 2)))
    return plan_of(
        trunk, *(run(f"left-at-{n}k-of-it", (CLM(), n * 1_000), (MLM(0.4), 5_000)) for n in range(1, rungs))
    )


@pytest.mark.parametrize("rungs", [5, 18, 30, 60])
def test_a_deep_tree_stays_on_the_page_and_aligned(rungs):
    text = shown(ladder(rungs))
    assert max(map(len, text.splitlines())) <= PAGE
    assert len(columns(text)) == 1


@pytest.mark.parametrize("stages", [12, 40, 150])
def test_a_long_chain_stays_on_the_page(stages):
    text = shown(plan_of(run("chain", *[(CLM(), 1_000), (MLM(0.4), 1_000)] * (stages // 2), decay=0)))
    assert max(map(len, text.splitlines())) <= PAGE
    assert len(columns(text)) == 1
    assert text.count(" → ") == stages


def test_in_an_upright_trunk_branches_hang_from_where_they_leave():
    plan = ladder(60)
    lines = without_keys(shown(plan), plan).splitlines()[2:10]
    assert [line.split("  ")[0].rstrip() for line in lines] == [
        "1m on mine", "clm", "├ mlm 40%", "│ mlm 40% ↘", "clm", "├ mlm 40%", "│ mlm 40% ↘", "clm",
    ]  # fmt: skip


def test_steps_that_are_not_round_are_written_out():
    text = shown(plan_of(run("a", (CLM(), 1_500), decay=250)))
    assert "    0 → 1,250" in text
    assert "1,250 → 1,500" in text


def test_finished_states_are_marked():
    plan = family()
    done = list(plan.jobs)[:2]
    lines = [line for line in shown(plan, done).splitlines() if "✓" in line]
    assert [line.split(" ✓")[0][-6:] for line in lines] == [key[:6] for key in done]


def test_what_is_left_is_counted():
    plan = family()
    text = shown(plan, list(plan.jobs)[:2]).splitlines()[-1]
    assert text.startswith("2 of 8 training jobs done, 17,000 steps left, ")
    assert text.endswith("Next: biphase run s.py")


def test_what_leads_only_to_finished_states_is_not_left():
    plan = family()
    done = [key for key, job in plan.jobs.items() if job.results]
    assert shown(plan, done).splitlines()[-1] == "all 8 training jobs computed. See: biphase report s.py"


def test_a_state_that_an_unfinished_one_begins_from_is_left_even_without_a_name():
    plan = family()
    unfinished = {job.key for job in plan.path(plan.results["both"])[-2:]}
    done = set(plan.jobs) - unfinished
    assert shown(plan, done).splitlines()[-1].startswith("6 of 8 training jobs done, 6,000 steps left")


def test_the_sums_name_device_efficiency_disk_and_the_evaluation():
    plan = plan_of(
        run("clm", (CLM(), 42_000), start=SIZES["610m"], corpus="fineweb-edu"), finetune=Finetune(TASKS)
    )
    text = " · ".join(shown(plan, device="a100", efficiency=0.4).splitlines())
    assert "min on a100 at 40% · 18.1 GB of disk · 300 fine-tunings · 360 scores" in text
    assert " GPU-hours on a100 at 1%" in shown(plan, device="a100", efficiency=0.01)


def test_two_names_of_one_state_share_their_evaluation():
    plan = plan_of(run("a", (CLM(), 9_000)), run("b", (CLM(), 9_000)), finetune=Finetune(TASKS))
    assert "300 fine-tunings · 360 scores" in shown(plan)
    assert "a, b" in shown(plan)


def test_one_of_a_thing_is_said_in_the_singular():
    text = shown(plan_of(run("a", (CLM(), 1), decay=0), question=""))
    assert text.splitlines()[0] == "s"
    assert "1 run · 1 training job · 1 step to compute · 128 tokens" in text


@pytest.mark.parametrize(
    ("steps", "batch", "said"),
    [
        (1, 128, "0 s on cpu"),
        (9_000, 128, "6 min on cpu"),
        (900_000, 128, "9.3 hours on cpu at 50%"),
        (1_000_000, 12_800, "1,030 hours on cpu at 50%"),
    ],
)
def test_time_is_said_in_fitting_units(steps, batch, said):
    assert said in shown(plan_of(run("a", (CLM(), steps), decay=0, batch_tokens=batch)))


def test_disk_is_said_in_fitting_units():
    nano = replace(SIZES["1m"], layers=1, hidden=4, heads=1, kv_heads=1, ffn=4)
    tiny = Corpus("mine", "./texts", BPE(300))
    assert "kB of disk" in shown(plan_of(run("a", (CLM(), 1), decay=0, start=nano, corpus=tiny)))
    assert "MB of disk" in shown(plan_of(run("a", (CLM(), 1), decay=0)))
    many = [
        run(f"a{n}", (CLM(), 1), decay=0, start=SIZES["2b"], seed=n, corpus="fineweb-edu") for n in range(40)
    ]
    assert "1.15 TB of disk" in shown(plan_of(*many))


def test_what_is_not_known_is_said_and_not_summed():
    text = shown(plan_of(run("a", (CLM(), 9_000), start=Hub("org/m", revision="1"))))
    assert "the shape of org/m is not known here" in text
    assert "FLOPs ·" not in text
    assert text.splitlines()[2].startswith("org/m on mine")
    plan = plan_of(run("a", (CLM(), 9_000), start=Hub("org/m", revision="1"), keep=(1_000,)))
    assert "1 of 3 training jobs done, 8,000 steps left. Next:" in shown(plan, [next(iter(plan.jobs))])


def test_a_study_that_trains_nothing_says_so():
    text = shown(plan_of(run("as-is", start=Hub("org/m", revision="1"), decay=0)))
    assert "org/m, as it is" in text
    assert text.splitlines()[2].endswith("as-is")
    assert text.splitlines()[-1] == "nothing to train."


def test_roots_that_read_alike_say_in_what_they_differ():
    kinds = {
        "seed": run("a", (CLM(), 9_000), seed=1),
        "warmup": run("b", (CLM(), 9_000), schedule=WSD(warmup=100, decay=0)),
        "chunks": run("c", (CLM(), 9_000), packing=Chunks(64)),
        "apart": run("d", (CLM(), 9_000), packing=Rows(64, document_mask=True)),
        "bf16": run("e", (CLM(), 9_000), precision="bf16"),
        "adam": run("f", (CLM(), 9_000), optimizer=AdamW(eps=1e-8)),
    }
    text = shown(plan_of(run("z", (CLM(), 9_000)), kinds["seed"]))
    assert [line.split("  ")[0] for line in text.splitlines() if " on mine" in line] == [
        "1m on mine, seed 42",
        "1m on mine, seed 1",
    ]
    for word, kind in {
        "warmup 100": "warmup",
        "documents apart": "apart",
        "bf16": "bf16",
        "eps 1e-08": "adam",
    }.items():
        assert word in shown(plan_of(run("z", (CLM(), 9_000)), kinds[kind]))
    assert "chunks of 64" in shown(plan_of(run("z", (CLM(), 9_000)), kinds["chunks"]))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"optimizer": AdamW(clip=0.5)}, ("clip 1", "clip 0.5")),
        ({"optimizer": AdamW(betas=(0.9, 0.98))}, ("betas (0.9, 0.95)", "betas (0.9, 0.98)")),
        ({"corpus": replace(CORPUS, source="./others")}, ("from ./texts", "from ./others")),
        ({"corpus": replace(CORPUS, tokens=5_000_000)}, ("all tokens", "5M tokens at most")),
        ({"corpus": replace(CORPUS, bos=True)}, ("no bos", "bos")),
        ({"corpus": replace(CORPUS, text="body")}, ("text text", "text body")),
        ({"corpus": replace(CORPUS, heldout="h.txt")}, ("1 in 1,000 held out", "heldout h.txt")),
        ({"corpus": replace(CORPUS, tokenizer=BPE(2_000))}, ("BPE vocab 1000", "BPE vocab 2000")),
        ({"start": replace(SIZES["1m"], layers=5)}, ("layers 4", "layers 5")),
        ({"start": replace(SIZES["1m"], rope_base=1e6)}, ("rope_base 10000", "rope_base 1e+06")),
        ({"start": replace(SIZES["1m"], tied=True)}, ("tied False", "tied True")),
        ({"packing": Rows(64, document_mask=True)}, ("documents together", "documents apart")),
    ],
)
def test_whatever_tells_two_roots_apart_is_in_their_titles(fields, words):
    outside = replace(OUTSIDE, data=lambda run: str(run.corpus))
    runs = run("a", (CLM(), 9_000)), run("b", (CLM(), 9_000), **fields)
    text = shown(make_plan(Study("s", runs), outside, ""))
    titles = [line.split("  ")[0] for line in text.splitlines() if " on mine" in line]
    assert titles == [f"1m on mine, {word}" for word in words]


def test_packings_and_hub_models_that_differ_are_told_apart():
    chunks = [run(f"c{n}", (CLM(), 9_000), packing=Chunks(64, shortest=n)) for n in (4, 8)]
    assert "1m on mine, shortest 8" in shown(plan_of(*chunks))
    hubs = [run(f"h{n}", (CLM(), 9_000), start=Hub("org/m", revision=n)) for n in ("one", "two")]
    outside = replace(OUTSIDE, hub=lambda hub: hub.revision)
    assert "org/m on mine, revision two" in shown(make_plan(Study("s", tuple(hubs)), outside, ""))


def test_a_model_as_it_is_stands_apart_from_what_is_trained_from_it_and_is_one_root():
    hub, still = Hub("org/m", revision="1"), {"decay": 0}
    as_is = run("as-is", start=hub, **still)
    other = run("other-data", start=hub, corpus=replace(CORPUS, name="others"), seed=3, **still)
    plan = plan_of(as_is, run("more", (CLM(), 1_000), start=hub, **still), other)
    assert [line.split("  ")[0] for line in shown(plan).splitlines()[2:5]] == [
        "org/m, as it is",
        "org/m on mine",
        "└─ clm",
    ]
    assert shown(plan).splitlines()[2].endswith("as-is, other-data")


def test_fine_tunings_that_are_done_are_counted_and_what_is_left_is_not_all_of_it():
    plan = plan_of(run("a", (CLM(), 9_000)), finetune=Finetune(TASKS[:1], lrs=(1e-4,)))
    assert shown(plan).endswith("nothing computed yet. Next: biphase run s.py")
    done = list(plan.jobs)
    assert shown(plan, done, tuned=2).endswith(
        "2 of 2 training jobs and 2 of 5 fine-tunings done. Next: biphase run s.py"
    )
    assert "0 of 2 training jobs and 2 of 5 fine-tunings done, 9,000 steps left" in shown(plan, tuned=2)
    assert shown(plan, done, tuned=5).endswith(
        "all 2 training jobs and 5 fine-tunings computed. See: biphase report s.py"
    )


def test_a_model_as_it_is_may_be_all_that_is_fine_tuned():
    hub = run("as-is", start=Hub("org/m", revision="1"), decay=0)
    plan = plan_of(hub, finetune=Finetune(TASKS[:1], lrs=(1e-4,), seeds=(0,)))
    assert "1 run · 1 fine-tuning · 1 score" in shown(plan)
    assert shown(plan).endswith("nothing computed yet. Next: biphase run s.py")
    assert shown(plan, tuned=1).endswith("all 1 fine-tuning computed. See: biphase report s.py")
    data = plan_json(plan, done=(), tuned=1, bill=Bill("h200", 0.4))
    assert (data["finetunings"], data["finetunings_done"], data["scores"]) == (1, 1, 1)


def test_a_long_question_is_wrapped():
    text = shown(plan_of(run("a", (CLM(), 9_000)), question="why " * 60))
    assert max(map(len, text.splitlines())) <= PAGE


def test_keys_are_shown_as_short_as_they_differ():
    assert key_length(["aaaaaaaa", "bbbbbbbb"]) == 6
    assert key_length(["aaaaaaax", "aaaaaaay", "aaaaaaay"]) == 8
    assert key_length([]) == 6


def test_a_program_gets_the_same_numbers():
    plan = family()
    done = list(plan.jobs)[:2]
    data = plan_json(plan, done=done, tuned=0, bill=Bill("h200", 0.4))
    assert json.loads(json.dumps(data)) == data
    assert data["done"] == done
    assert data["costs"]["tokens"] == 21_000 * 128
    assert data["costs_left"]["tokens"] == 17_000 * 128
    assert data["costs"]["device_hours"] == pytest.approx(data["costs"]["flops"] / (989e12 * 0.4) / 3600)
    assert (data["finetunings"], data["scores"], data["notes"]) == (0, 0, [])
    assert data["counts"]["jobs"] == 8


def test_an_unknown_device_is_refused():
    with pytest.raises(SpecError, match="there is no device 'tpu'"):
        shown(family(), device="tpu")


def test_what_adapting_changes_is_shown():
    hub = Hub("./decoder")
    plain = run("plain", (MLM(0.4), 100), start=hub, decay=0)
    lora = run("lora", (MLM(0.4), 100), start=hub, decay=0, adapter=LoRA(rank=4))
    frozen = run("frozen", (MLM(0.4), 100), start=hub, decay=0, freeze="embeddings")
    turned = replace(
        plain, name="turned", stages=(Stage(MLM(0.4), 60), Stage(MLM(0.4), 40, rope_base=160_000.0))
    )
    text = shown(plan_of(plain, lora, frozen, turned))
    assert "LoRA of rank 4" in text
    assert "embeddings frozen" in text
    assert "mlm 40%, rope 160000" in text
