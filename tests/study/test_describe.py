"""What `plan`, `run` and `status` print: an aligned tree, sums, progress, and what to type next."""

import json
import sys

import pytest
from common import Terminal, write_lines

from biphase import (
    BPE,
    CLM,
    LLAMA3,
    MLM,
    SIZES,
    TASKS,
    WSD,
    Corpus,
    Finetune,
    Hub,
    Pretrain,
    Rows,
    Stage,
    Study,
)
from biphase.cluster.workers import WorkerHeartbeat
from biphase.keys import Identities
from biphase.leases import Leases
from biphase.store import publish
from biphase.study import ledger
from biphase.study.describe import (
    closing,
    plan_json,
    render,
    status_json,
    status_text,
)
from biphase.study.plan import identities, make_plan
from biphase.study.prices import price_by_flops
from biphase.study.time_left import TimeLeft

OUTSIDE = Identities(data=lambda corpus: corpus.name, hub=lambda hub: hub.source)
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


def test_a_program_gets_the_same_numbers():
    plan = family()
    done = list(plan.jobs)[:2]
    data = plan_json(plan, done=done, tuned=count(plan, 0), bill=price_by_flops(plan, "h200", 0.4))
    assert json.loads(json.dumps(data)) == data
    assert data["done"] == done
    assert data["costs"]["tokens"] == 21_000 * 128
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
    write_lines(built / "metrics.jsonl", lines)
    publish(built, store.checkpoints / key)


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


def test_workers_share_the_time_left_but_not_a_chain_and_steps_taken_count(tiny_run, store, monkeypatch):
    runs = [tiny_run(f"{'a' * 60}-{seed}", seed=seed) for seed in (0, 1)]
    plan = make_plan(Study("two", tuple(runs)), identities(store))
    first, _, other, _ = plan.jobs
    finish(store, first, step=9, seconds=90.0)  # left: 3 steps, and 12 steps in two jobs
    assert TimeLeft(plan, store).estimate().seconds == pytest.approx(150)
    live = ledger.live_file(plan, store, other)
    lines = [
        {"step": at, "seconds": 10.0 * at, "tokens": at, "loss": 9.0 - at, "rate": 1.0} for at in range(1, 5)
    ]
    write_lines(live, lines)
    workers = [WorkerHeartbeat(store, "two") for _ in range(2)]
    lease = Leases(store.leases).take(other)
    left = TimeLeft(plan, store).estimate()
    assert (left.workers, left.seconds) == (2, pytest.approx(80)), "12 steps in a chain, 4 of them taken"
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    text = status_text(plan, store, command_path="s.py")
    assert max(map(len, text.splitlines())) <= 80
    assert all(fact in text for fact in ("80 s left for all, with 2 workers", "step 4 of 9", "█▆▃▁"))
    lease.release()
    for worker in workers:
        worker.leave()
