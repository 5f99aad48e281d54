"""What `run` and `status` say, for every way a study may stand."""

import json
from dataclasses import replace

import pytest

from biphase import CLM, TASKS, Finetune, Stage, Study
from biphase.data.shards import Shards
from biphase.leases import Leases
from biphase.store import publish
from biphase.study import ledger
from biphase.study.names import shards_text
from biphase.study.plan import identities, make_plan
from biphase.study.status import (
    closing,
    opening,
    results_table,
    sparkline,
    status_json,
    status_text,
    work_left,
)


@pytest.fixture
def plan(tiny_run, store):
    return make_plan(
        Study("study", (tiny_run("clm"),), finetune=Finetune(TASKS[:1])), identities(store), "Is it said?"
    )


def finish(store, key, *, step, seconds=1.0, lines=()):
    """A published state, as far as the ledger reads it."""
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
