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
    Pretrain,
    Rows,
    Stage,
    Study,
)
from biphase.keys import Identities
from biphase.leases import Leases
from biphase.store import publish
from biphase.study import ledger
from biphase.study.describe import (
    PAGE,
    closing,
    plan_json,
    render,
    status_json,
    status_text,
    work_left,
)
from biphase.study.plan import identities, make_plan
from biphase.study.prices import price_by_flops

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


def count(plan, done):
    return ledger.Count(done, len(list(ledger.finetunings(plan))))


def shown(plan, done=(), tuned=0, device="cpu", efficiency=0.5):
    bill = price_by_flops(plan, device, efficiency)
    return render(plan, done=done, tuned=count(plan, tuned), bill=bill, command_path="s.py", claims=[])


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


def ladder(rungs):
    """A trunk that another run leaves at every step: the deepest tree there is."""
    trunk = run("the-trunk-with-a-long-name", (CLM(), 1_000 * (rungs + 2)))
    return plan_of(
        trunk, *(run(f"left-at-{n}k-of-it", (CLM(), n * 1_000), (MLM(0.4), 5_000)) for n in range(1, rungs))
    )


@pytest.mark.parametrize("rungs", [5, 30, 60])
def test_a_deep_tree_stays_on_the_page_and_aligned(rungs):
    chain = plan_of(run("chain", *[(CLM(), 1_000), (MLM(0.4), 1_000)] * rungs, decay=0))
    for text in (shown(ladder(rungs)), shown(chain)):
        assert max(map(len, text.splitlines())) <= PAGE
        assert len({line.index("→") for line in text.splitlines() if " → " in line}) == 1
    assert text.count(" → ") == 2 * rungs


def test_what_is_left_is_counted():
    plan = family()
    begun, results = list(plan.jobs)[:2], [key for key, job in plan.jobs.items() if job.results]
    text = shown(plan, begun)
    marked = [line.split(" ✓")[0][-6:] for line in text.splitlines() if "✓" in line]
    assert marked == [key[:6] for key in begun]
    assert all(fact in text.splitlines()[-1] for fact in ("2 of 8", "17,000 steps", "biphase run s.py"))
    last = shown(plan, results).splitlines()[-1]
    assert "all 8" in last, "what leads only to finished checkpoints is not left"
    assert "biphase report s.py" in last
    unfinished = {job.key for job in plan.path(plan.results["both"])[-2:]}
    last = shown(plan, set(plan.jobs) - unfinished).splitlines()[-1]
    assert all(fact in last for fact in ("6 of 8", "6,000 steps")), (
        "a job continues a checkpoint without a name"
    )


def test_the_sums_name_device_efficiency_disk_and_the_evaluation_which_two_names_share():
    large = run("clm", (CLM(), 42_000), start=SIZES["610m"], corpus="fineweb-edu")
    plan = plan_of(large, replace(large, name="twin"), finetune=Finetune(TASKS))
    text = shown(plan, device="a100", efficiency=0.4)
    facts = ("a100 at 40%", "18.1 GB", "300 fine-tunings", "360 scores", "clm, twin")
    assert all(fact in text for fact in facts)


def test_what_is_not_known_is_said_and_not_summed():
    plan = plan_of(run("a", (CLM(), 9_000), start=Hub("org/m", revision="1"), keep=(1_000,)))
    text = shown(plan, [next(iter(plan.jobs))])
    assert "of org/m is not known" in text
    assert "FLOPs ·" not in text
    assert text.splitlines()[2].startswith("org/m on mine")
    assert all(fact in text.splitlines()[-1] for fact in ("1 of 3", "8,000 steps"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"optimizer": AdamW(clip=0.5)}, ("clip 1", "clip 0.5")),
        ({"corpus": replace(CORPUS, source="./others")}, ("source ./texts", "source ./others")),
        ({"corpus": replace(CORPUS, tokens=5_000_000)}, ("tokens 0", "tokens 5000000")),
        ({"corpus": replace(CORPUS, bos=True)}, ("bos False", "bos True")),
        ({"corpus": replace(CORPUS, tokenizer=BPE(2_000))}, ("vocab 1000", "vocab 2000")),
        ({"start": replace(SIZES["1m"], layers=5)}, ("layers 4", "layers 5")),
        ({"packing": Rows(64, document_mask=True)}, ("document_mask False", "document_mask True")),
        ({"packing": Chunks(64)}, ("packing Rows, document_mask False", "packing Chunks, shortest 12")),
        ({"schedule": WSD(warmup=100, decay=2_000)}, ("warmup 0", "warmup 100")),
        ({"precision": "bf16"}, ("precision fp32", "precision bf16")),
    ],
)
def test_whatever_tells_two_roots_apart_is_in_their_titles(fields, words):
    outside = replace(OUTSIDE, data=lambda run: str(run.corpus))
    runs = run("a", (CLM(), 9_000)), run("b", (CLM(), 9_000), **fields)
    text = shown(make_plan(Study("s", runs), outside, ""))
    titles = [line.split("  ")[0] for line in text.splitlines() if " on mine" in line]
    assert titles == [f"1m on mine, {word}" for word in words]


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


def test_a_program_gets_the_same_numbers():
    plan = family()
    done = list(plan.jobs)[:2]
    data = plan_json(plan, done=done, tuned=count(plan, 0), bill=price_by_flops(plan, "h200", 0.4))
    assert json.loads(json.dumps(data)) == data
    assert data["done"] == done
    assert data["costs"]["tokens"] == 21_000 * 128
    assert data["costs_left"]["tokens"] == 17_000 * 128
    assert data["costs"]["device_hours"] == pytest.approx(data["costs"]["flops"] / (989e12 * 0.4) / 3600)
    assert (data["finetunings"], data["scores"], data["notes"]) == (0, 0, [])
    assert data["counts"]["jobs"] == 8


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
    assert "30 s left" in status_text(plan, store, command_path="s.py")
    assert status_json(plan, store)["seconds_left"] == pytest.approx(30)
    assert [job["standing"] for job in status_json(plan, store)["jobs"]] == ["done", "ready"]
    for failed, stopped, facts in (
        ({}, False, ("1 of 2", "0 of 30", "biphase run s.py")),
        ({}, True, ("stopped", "1 of 2", "nothing lost")),
        ({second: "out of memory"}, False, (second[:6], "out of memory", "1 failed")),
    ):
        told = closing(plan, store, failed, stopped=stopped, command="run s.py", study="s.py")
        assert all(fact in told for fact in facts)


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


def test_a_stage_that_is_shared_appears_in_both_curves(tiny_run, store):
    both = make_plan(Study("s", (tiny_run("a"), tiny_run("b", Stage(CLM(), 20)))), identities(store))
    trunk = both.path(both.results["a"])[0].key
    finish(store, trunk, step=9, lines=[{"step": 1, "loss": 2.0}])
    assert ledger.curve(both, store, "a") == ledger.curve(both, store, "b") == [{"step": 1, "loss": 2.0}]
