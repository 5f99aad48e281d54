"""Workers run each job once, parents first; they share a store, survive failures, and prune nothing that is needed."""

import shutil
import threading
import time

import pytest
import torch

from biphase import BPE, CLM, MLM, Chunks, Corpus, Kept, Merge, Pretrain, Stage, Study, keys
from biphase.errors import DataError
from biphase.leases import Leases
from biphase.store import Store
from biphase.study import ledger
from biphase.study.plan import identities, make_plan, save_plan
from biphase.study.worker import Worker
from biphase.training import checkpoint
from biphase.training.checkpoint import Saver
from biphase.training.distributed import Ranks
from biphase.training.options import RuntimeOptions
from biphase.training.pretrain import Pretraining

ALONE = Ranks(0, 1, torch.device("cpu"))


@pytest.fixture
def plan(tiny_run, store):
    clm = tiny_run("clm", keep=(4,))
    runs = (
        clm,
        tiny_run("two", Stage(CLM(), 6), Stage(MLM(0.4), 6)),
        tiny_run("on", Stage(MLM(0.4), 4), start=clm),
    )
    made = make_plan(Study("study", runs), identities(store))
    save_plan(made, store)
    return made


def test_a_worker_runs_every_job_once_parents_first(plan, store, worker):
    printed = []
    outcome = worker(plan, store, printed).work()
    assert outcome.computed == plan.job_count
    assert ledger.done_keys(plan, store) == set(plan.jobs)
    lines = [line for line in printed if "→" in line]
    assert len(lines) == plan.job_count
    starts = [line.split("loss ")[1].split(" ")[0] for line in lines]
    assert len(set(starts)) > 1, "each training job tells its own losses, not those of the root"
    for name, steps in (("clm", 12), ("two", 12), ("on", 16), ("clm-4", 4)):
        lines = ledger.curve(plan, store, name)
        assert [line["step"] for line in lines if "loss" in line] == list(range(1, steps + 1)), name
        assert max(ledger.heldout(lines)) == steps
    again = worker(plan, store).work()
    assert again.computed == 0
    assert not Leases(store.leases).holders()


def test_a_failed_job_blocks_only_its_descendants(plan, store, monkeypatch, worker):
    plain = Pretraining.train

    def fails(self):
        if isinstance(self.run.stages[-1].objective, MLM) and self.run.name == "two":
            raise RuntimeError("device on fire")
        return plain(self)

    monkeypatch.setattr(Pretraining, "train", fails)
    outcome = worker(plan, store).work()
    failed = set(outcome.failed)
    assert failed == set(ledger.failures(plan, store))
    assert ledger.done_keys(plan, store) == set(plan.jobs) - {
        key for key in plan.jobs if {job.key for job in plan.path(key)} & failed
    }
    entries = ledger.survey_jobs(plan, store)
    assert {entry.standing for entry in entries.values()} == {"done", "failed", "waiting"}
    assert "device on fire" in next(entry.error for entry in entries.values() if entry.standing == "failed")
    monkeypatch.setattr(Pretraining, "train", plain)
    assert worker(plan, store).work().computed == 2  # the next run tries again
    assert not ledger.failures(plan, store)


def test_a_job_taken_over_during_a_checkpoint_is_no_failure(plan, store, monkeypatch, worker):
    """Whoever holds it now has swept away what was being written."""
    plain, robbed = Saver.settle, []

    def settle(self):
        if self.unpublished is not None and not robbed:
            (held,) = slow.leases._held
            (store.leases / f"{held.key}.lease").unlink()
            thief = Leases(store.leases).take(held.key)
            robbed.append(held.key)
            held.beat()
            if self.unpublished.thread:
                self.unpublished.thread.join()
            shutil.rmtree(self.unpublished.folder)
            threading.Timer(1.0, thief.release).start()
        plain(self)

    monkeypatch.setattr(Saver, "settle", settle)
    slow = worker(plan, store, checkpoint_steps=2)
    outcome = slow.work()
    assert robbed
    assert not outcome.failed
    assert not ledger.failures(plan, store)
    assert ledger.done_keys(plan, store) == set(plan.jobs)


def test_an_unreadable_plan_of_another_study_stops_pruning_only(plan, store, worker):
    other = store.studies / "other" / "plan.json"
    other.parent.mkdir(parents=True)
    other.write_text("{}")
    printed = []
    outcome = worker(plan, store, printed, checkpoint_steps=2).work()
    assert not outcome.failed
    assert ledger.done_keys(plan, store) == set(plan.jobs)
    assert sum("no checkpoint is removed" in line for line in printed) == 1
    assert len(list(store.checkpoints.iterdir())) > len(plan.jobs)


def test_a_worker_merges_fine_tunes_the_merge_and_does_both_once(tiny_run, grid, store, worker):
    base = tiny_run("base", Stage(CLM(), 6), keep=(3,))
    study = Study("s", (base, Pretrain("mean", Merge(Kept(base, 3), base))), grid)
    plan = make_plan(study, identities(store))
    save_plan(plan, store)
    printed = []
    outcome = worker(plan, store, printed).work()
    assert not outcome.failed
    assert ledger.done_keys(plan, store) == set(plan.jobs)
    assert any("merge of 2" in line for line in printed)
    assert {trial.model for trial in ledger.finetunings(plan, store)} == set(plan.results.values())
    assert all(ledger.finished(trial, store) for trial in ledger.finetunings(plan, store))
    assert worker(plan, store).work().computed == 0


def test_a_worker_waits_for_a_leased_job(plan, store, worker):
    first = next(iter(plan.jobs))
    held = Leases(store.leases).take(first)
    assert held
    waiting = worker(plan, store)
    thread = threading.Thread(target=waiting.work)
    thread.start()
    time.sleep(1.2)
    assert not ledger.done_keys(plan, store)
    assert ledger.survey_jobs(plan, store)[first].standing == "running"
    held.release()
    thread.join(60)
    assert ledger.done_keys(plan, store) == set(plan.jobs)


def test_a_corpus_changed_after_planning_is_refused(tiny_run, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one two three " * 400)
    run = tiny_run(
        corpus=Corpus("mine", str(text), BPE(300)), packing=Chunks(32, shortest=4), batch_tokens=64
    )
    fresh = Store(tmp_path / "fresh")
    known = identities(fresh)
    plan = make_plan(Study("s", (run,)), known)
    save_plan(plan, fresh)
    text.write_text("four five six " * 400)
    late = Worker(plan, fresh, known, ALONE, RuntimeOptions(quiet=True), wanted=set(plan.jobs), say=[].append)
    with pytest.raises(DataError, match="changed since"):
        late.work()
    assert not fresh.checkpoints.exists()


@pytest.mark.parametrize("questions", [0, 2], ids=["between jobs", "during tokenizing"])
def test_a_stop_ends_the_worker(questions, tiny_run, corpus, tmp_path, worker):
    fresh = Store(tmp_path / "fresh")
    plan = make_plan(Study("s", (tiny_run(),)), identities(fresh))
    save_plan(plan, fresh)
    asked = iter([False] * questions)
    outcome = worker(plan, fresh, stop=lambda: next(asked, True)).work()
    assert (outcome.stopped, outcome.computed) == (True, 0)
    assert not fresh.checkpoints.exists()


# ---------------------------------------------------------------- one plan never removes what another needs


def planned(store, name, *runs):
    made = make_plan(Study(name, runs), identities(store))
    save_plan(made, store)
    return made


def short_slot(worker, plan, store, steps):
    """Run a worker that is stopped after this many steps."""
    asked = iter([False] * (steps + 1))
    return worker(plan, store, stop=lambda: next(asked, True)).work()


def test_an_edited_study_keeps_the_branch_points_of_the_first(tiny_run, store, worker):
    first = planned(store, "s", tiny_run("a", keep=(4,)), tiny_run("b", Stage(CLM(), 6), Stage(MLM(0.4), 6)))
    running = worker(first, store, checkpoint_steps=1)  # it knows its plan; the file will be another's
    short_slot(worker, first, store, 7)
    edited = planned(store, "s", tiny_run("a"))
    worker(edited, store, checkpoint_steps=1).work()
    before = ledger.done_keys(first, store)
    assert len(before) >= 2
    running.work()
    assert ledger.done_keys(first, store) == set(first.jobs)
    worker(edited, store, checkpoint_steps=1).work()
    assert ledger.done_keys(first, store) == set(first.jobs)


def test_another_code_version_keeps_the_branch_points_of_the_first(tiny_run, store, monkeypatch, worker):
    """The same study, planned by a version whose keys are others, is the one that is saved last."""
    runs = tiny_run("a", keep=(4,)), tiny_run("b", Stage(CLM(), 6), Stage(MLM(0.4), 6))
    first = planned(store, "s", *runs)
    with monkeypatch.context() as newer:
        newer.setattr(keys, "GENERATION", keys.GENERATION + 1)
        assert not set(planned(store, "s", *runs).jobs) & set(first.jobs)
    worker(first, store, checkpoint_steps=1).work()
    assert ledger.done_keys(first, store) == set(first.jobs)


def test_two_studies_with_a_common_trunk_finish_in_short_slots(tiny_run, store, worker):
    """The longer one passes the end of the shorter one's first training job; what that begins from must stay."""
    short, long = planned(store, "short", tiny_run()), planned(store, "long", tiny_run("b", Stage(CLM(), 60)))
    short_slot(worker, long, store, 14)
    for _ in range(9):
        short_slot(worker, short, store, 2)
        short_slot(worker, long, store, 2)
    assert ledger.done_keys(short, store) == set(short.jobs)
    worker(long, store).work()
    assert {folder.name for folder in store.checkpoints.iterdir()} == set(short.jobs) | set(long.jobs)


def test_a_job_keeps_its_checkpoint_while_another_study_continues(tiny_run, store, worker):
    short, long = planned(store, "short", tiny_run()), planned(store, "long", tiny_run("b", Stage(CLM(), 30)))
    short_slot(worker, short, store, 5)  # the job of the short one was stopped at step 5
    worker(long, store, checkpoint_steps=4).work()
    kept = [folder for folder in store.checkpoints.iterdir() if folder.name not in long.jobs]
    assert len(kept) == 1
    assert checkpoint.progress_of(store, kept[0].name).step == 8, (
        "the newest below the missing checkpoint at step 9"
    )
    printed = []
    worker(short, store, printed).work()
    assert ledger.done_keys(short, store) == set(short.jobs)
    assert not kept[0].exists()


def test_a_checkpoint_that_a_killed_worker_did_not_prune_is_removed_by_the_next(
    tiny_run, store, tmp_path, worker
):
    """A kill between the publication of a job's end and the pruning leaves a checkpoint inside a finished job."""
    plan = planned(store, "s", tiny_run())
    short_slot(worker, plan, store, 3)
    (inside,) = (folder for folder in store.checkpoints.iterdir() if folder.name not in plan.jobs)
    shutil.copytree(inside, tmp_path / "inside")
    worker(plan, store).work()
    assert not inside.exists()
    shutil.copytree(tmp_path / "inside", inside)
    assert worker(plan, store).work().computed == 0
    assert {folder.name for folder in store.checkpoints.iterdir()} == set(plan.jobs)
