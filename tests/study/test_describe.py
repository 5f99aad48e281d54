"""What `plan`, `run` and `status` print: an aligned tree, sums, progress, and what to type next."""

import json
from dataclasses import replace

import pytest

from biphase import (
    BPE,
    CLM,
    LLAMA3,
    MLM,
    SIZES,
    TASKS,
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
from biphase.data.shards import Shards
from biphase.keys import Identities
from biphase.leases import Leases
from biphase.store import publish
from biphase.study import ledger
from biphase.study.describe import (
    PAGE,
    Bill,
    closing,
    key_length,
    opening,
    plan_json,
    render,
    results_table,
    shards_text,
    sparkline,
    status_json,
    status_text,
    work_left,
)
from biphase.study.plan import identities, make_plan

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


def test_finished_checkpoints_are_marked():
    plan = family()
    done = list(plan.jobs)[:2]
    lines = [line for line in shown(plan, done).splitlines() if "✓" in line]
    assert [line.split(" ✓")[0][-6:] for line in lines] == [key[:6] for key in done]


def test_what_is_left_is_counted():
    plan = family()
    text = shown(plan, list(plan.jobs)[:2]).splitlines()[-1]
    assert text.startswith("2 of 8 training jobs done, 17,000 steps left, ")
    assert text.endswith("Next: biphase run s.py")


def test_what_leads_only_to_finished_checkpoints_is_not_left():
    plan = family()
    done = [key for key, job in plan.jobs.items() if job.results]
    assert shown(plan, done).splitlines()[-1] == "all 8 training jobs computed. See: biphase report s.py"


def test_a_checkpoint_that_an_unfinished_job_continues_is_left_even_without_a_name():
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


def test_two_names_of_one_checkpoint_share_their_evaluation():
    plan = plan_of(run("a", (CLM(), 9_000)), run("b", (CLM(), 9_000)), finetune=Finetune(TASKS))
    assert "300 fine-tunings · 360 scores" in shown(plan)
    assert "a, b" in shown(plan)


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
        ({"packing": Chunks(64)}, ("rows of 64", "chunks of 64, shortest 12")),
        ({"seed": 1}, ("seed 42", "seed 1")),
        ({"schedule": WSD(warmup=100, decay=2_000)}, ("warmup 0", "warmup 100")),
        ({"precision": "bf16"}, ("fp32", "bf16")),
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


# ---------------------------------------------------------------- runs and status


@pytest.fixture
def plan(tiny_run, store):
    return make_plan(
        Study("study", (tiny_run("clm"),), finetune=Finetune(TASKS[:1])), identities(store), "Is it said?"
    )


def finish(store, key, *, step, seconds=1.0, lines=()):
    """A published checkpoint, as far as the ledger reads it."""
    built = store.attempts / key
    built.mkdir(parents=True)
    progress = {"step": step, "next_sample": 8 * step, "seconds": seconds}
    job = {"key": key, "run": {"kind": "Pretrain"}, "origin_step": 0, "epochs": 0.5, "progress": progress}
    (built / "checkpoint.json").write_text(json.dumps(job))
    (built / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    publish(built, store.checkpoints / key)


def test_a_study_not_begun(plan, store):
    assert opening(plan, store) == "study: Is it said?\n  2 training jobs, 0 done; 30 fine-tunings, 0 done"
    text = status_text(plan, store, command_path="s.py")
    assert "0/2 training jobs" in text
    assert "0/30 fine-tunings" in text
    assert "left" not in text
    assert text.endswith("next: biphase run s.py")
    assert results_table(plan, store, {}) == []


def test_what_is_left_can_be_asked_of_some_results_alone(tiny_run, store):
    runs = (tiny_run("one"), replace(tiny_run("two"), seed=8))
    plan = make_plan(Study("study", runs, finetune=Finetune(TASKS[:1])), identities(store))
    one, two = plan.results["one"], plan.results["two"]
    for job in plan.path(one):
        finish(store, job.key, step=12)
    assert work_left(plan, store, {one}), "its fine-tunings"
    plan = make_plan(Study("study", runs), identities(store))
    assert work_left(plan, store)
    assert not work_left(plan, store, {one})
    assert work_left(plan, store, {one, two})


def test_half_a_study_tells_the_time_to_go(plan, store):
    first, second = plan.jobs
    finish(store, first, step=9, seconds=90.0)
    text = status_text(plan, store, command_path="s.py")
    assert "1/2 training jobs   about 30 s left" in text
    assert status_json(plan, store)["seconds_left"] == pytest.approx(30)
    assert [job["standing"] for job in status_json(plan, store)["jobs"]] == ["done", "ready"]
    assert "1 of 2 training jobs and 0 of 30 fine-tunings done. To go on: biphase run s.py" in closing(
        plan, store, {}, stopped=False, command="run s.py", study="s.py"
    )
    assert "stopped. 1 of 2 training jobs and 0 of 30 fine-tunings done, nothing lost." in closing(
        plan, store, {}, stopped=True, command="run s.py", study="s.py"
    )
    said = closing(plan, store, {second: "out of memory"}, stopped=False, command="run s.py", study="s.py")
    assert f"failed  {second[:6]}  out of memory" in said
    assert "1 failed" in said


def test_what_is_trained_shows_its_losses_before_it_is_fine_tuned(plan, store):
    first, second = plan.jobs
    lines = [
        {"step": 5, "heldout": {"clm": 6.0, "mlm40": 6.5}},
        {"step": 12, "heldout": {"clm": 5.25, "mlm40": 6.4}},
    ]
    finish(store, first, step=9, lines=lines[:1])
    finish(store, second, step=12, lines=lines)
    said = closing(plan, store, {}, stopped=False, command="run s.py", study="s.py")
    assert "2 of 2 training jobs and 0 of 30 fine-tunings done. To go on: biphase run s.py" in said
    assert "5.250 █▁" in said
    assert "0.50" in said
    bare = make_plan(replace(plan.study, finetune=None), identities(store))
    said = closing(bare, store, {}, stopped=False, command="run s.py", study="s.py")
    assert f"all 2 training jobs are done; they are in {store.root}" in said


def test_who_is_running_and_what_failed_is_said(plan, store):
    first = next(iter(plan.jobs))
    held = Leases(store.leases).take(first)
    assert held
    with held:
        assert "running" in status_text(plan, store, command_path="s.py")
        assert ":" in status_json(plan, store)["jobs"][0]["worker"]
    ledger.note_failure(plan, store, first, RuntimeError("no\nluck"))
    assert "failed" in status_text(plan, store, command_path="s.py")
    assert status_json(plan, store)["jobs"][0]["error"] == "RuntimeError: no luck"
    (store.leases / "takeovers.jsonl").write_text('{"key": "x"}\n')
    assert "1 jobs of this store were taken over" in status_text(plan, store, command_path="s.py")


def test_a_curve_fits_its_columns():
    assert sparkline([3.0, 2.0, 1.0]) == "█▄▁"
    assert sparkline([1.0, 1.0]) == "██"
    assert len(sparkline([float(i) for i in range(500)])) == 20


def test_shards_say_what_was_skipped(shards, tmp_path):
    opened = Shards.open(shards)
    opened.card = opened.card | {
        "left_out_documents": 3, "skipped": {"empty": 2}, "first_skipped": {"empty": "a.jsonl line 7"},
    }  # fmt: skip
    text = shards_text(opened, shards)
    assert "left out, beyond the held-out million: 3 documents" in text
    assert "skipped 2 records, empty; the first: a.jsonl line 7" in text
    assert "its own" in text


def test_a_stage_that_is_shared_appears_in_both_curves(tiny_run, store):
    both = make_plan(Study("s", (tiny_run("a"), tiny_run("b", Stage(CLM(), 20)))), identities(store))
    trunk = both.path(both.results["a"])[0].key
    finish(store, trunk, step=9, lines=[{"step": 1, "loss": 2.0}])
    assert ledger.curve(both, store, "a") == ledger.curve(both, store, "b") == [{"step": 1, "loss": 2.0}]
