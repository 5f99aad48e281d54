"""The worker registry, and stop requests, which reach the workers they name and no other process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_study import biphase, wait_until

from biphase import CLM, MLM, Stage, Study
from biphase.cluster import workers
from biphase.cluster.launch import WORK_LEFT
from biphase.cluster.workers import StopRequest, WorkerHeartbeat, WorkerRegistry, WorkerStopper, control
from biphase.errors import StoreError
from biphase.leases import Leases, descendants, process_start


@pytest.fixture
def registry(store, monkeypatch):
    for name in ("RANK", workers.WORKER, workers.SUBMISSION):
        monkeypatch.delenv(name, raising=False)
    return WorkerRegistry(store, "study")


def test_a_request_is_for_the_workers_it_names_only(store, registry):
    old = WorkerHeartbeat(store, "study")
    registry.ask(StopRequest(frozenset(registry.workers()), frozenset(["s1"])))
    late = WorkerHeartbeat(store, "study")
    assert set(registry.workers()) == {old.worker, late.worker}
    assert old.asked()
    assert not late.asked()
    registry.ask(StopRequest(frozenset([late.worker])))
    assert not late.asked(), "it looked a moment ago"
    assert late.asked(now=True)
    for one in (old, late):
        one.leave()
    assert not registry.workers()


def test_a_job_that_starts_later_obeys_a_request_for_its_submission(store, registry, monkeypatch):
    registry.ask(StopRequest(submissions=frozenset(["s1"])))
    monkeypatch.setenv(workers.SUBMISSION, "s1")
    job = WorkerHeartbeat(store, "study")
    monkeypatch.setenv(workers.SUBMISSION, "s2")
    other = WorkerHeartbeat(store, "study")
    assert job.asked()
    assert not other.asked()
    for one in (job, other):
        one.leave()


def test_processes_of_one_worker_share_its_name(store, registry, monkeypatch):
    parent = WorkerHeartbeat(store, "study")
    monkeypatch.setenv(workers.WORKER, parent.worker)
    monkeypatch.setenv("RANK", "0")
    child = WorkerHeartbeat(store, "study")
    assert child.worker == parent.worker
    child.leave()
    assert set(registry.workers()) == {parent.worker}
    monkeypatch.delenv(workers.WORKER)
    monkeypatch.setenv("RANK", "1")  # started by somebody else's torchrun: the first one signs in for all
    assert WorkerHeartbeat(store, "study").worker == ""
    parent.leave()


def test_one_process_at_a_time_submits_or_stops(store):
    with (
        control(store, "study"),
        pytest.raises(StoreError, match=f"process {os.getpid()} on "),
    ):
        control(store, "study", seconds=0.3)
    control(store, "study", seconds=0.3).release()


SLEEPER = """
import signal, sys, time
from biphase.store import Store
from biphase.cluster.workers import WorkerHeartbeat
from biphase.cluster.launch import Stop
heartbeat = WorkerHeartbeat(Store(sys.argv[1]), "study")
stop = Stop(None, lambda text: None, heartbeat.asked)
if sys.argv[2] == "deaf":
    stop.requested = lambda: False
print("in", flush=True)
while not stop():
    time.sleep(0.05)
heartbeat.leave()
"""


@pytest.fixture
def sleeper(store, registry):
    started = []

    def start(kind: str) -> subprocess.Popen:
        child = subprocess.Popen(
            [sys.executable, "-c", SLEEPER, store.root, kind], stdout=subprocess.PIPE, text=True
        )
        started.append(child)
        assert child.stdout.readline() == "in\n"
        return child

    yield start
    for child in started:
        child.kill()
        child.wait()
        child.stdout.close()


def stop(store, wait: float = 20.0):
    printed: list[str] = []
    return WorkerStopper(store, "study", say=printed.append).stop(wait), printed


def test_stop_ends_workers(store, registry, sleeper):
    children = [sleeper("plain"), sleeper("plain")]
    ended, printed = stop(store)
    assert (ended.asked, ended.left, ended.problem) == (2, (), "")
    assert "2 workers" in printed[0]
    assert [child.wait(5) for child in children] == [0, 0]
    assert stop(store)[0].asked == 0


def test_a_worker_that_does_not_stop_is_named(store, registry, sleeper, monkeypatch):
    monkeypatch.setattr(workers, "PROGRESS_EVERY", 0.2)
    child = sleeper("deaf")
    ended, printed = stop(store, 1.5)
    assert [one.endswith(f"process {child.pid}") for one in ended.left] == [True]
    assert any("waiting for" in line for line in printed)
    assert registry.request().workers, "it stands until it is obeyed"


def test_a_dead_worker_is_removed(store, registry, sleeper):
    child = sleeper("plain")
    child.kill()
    child.wait()
    assert stop(store)[0].asked == 0
    assert not list(registry.leases.folder.glob("*.lease"))


def test_a_silent_worker_on_another_machine_counts_as_gone(store, registry, monkeypatch):
    one = WorkerHeartbeat(store, "study")
    path = next(registry.leases.folder.glob("*.lease"))
    raw = path.read_text()
    one.leave()
    host = f'"{os.uname().nodename}"'
    assert host in raw
    path.write_text(raw.replace(host, '"elsewhere"'))
    stopping_it = WorkerStopper(store, "study", say=lambda text: None)
    stopping_it.registry.leases = Leases(registry.leases.folder, beat_seconds=0.1, stale_seconds=1.0)
    began = time.monotonic()
    ended = stopping_it.stop(20)
    assert time.monotonic() - began < 5
    assert (ended.asked, ended.left, ended.silent) == (1, (), 1)
    assert registry.request().workers == {one.worker}, "if it wakes up, it shall obey"


def test_a_file_that_names_another_process_ends_nothing(store, registry):
    """Whoever can write into a store could name any process of the user in a worker's file."""
    worker = WorkerHeartbeat(store, "study")
    forged = json.loads(registry.file(worker.worker).read_text())
    worker.leave()
    innocent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        forged |= {"pid": innocent.pid, "started": process_start(innocent.pid), "owner": "f" * 32}
        registry.file("here.forged").write_text(json.dumps(forged))
        ended, _ = stop(store, 1.0)
        assert [one.endswith(f"process {innocent.pid}") for one in ended.left] == [True]
        assert innocent.poll() is None
    finally:
        innocent.kill()
        innocent.wait()


def test_without_slurm_the_request_stays(store, registry, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    (store.studies / "study" / "slurm").mkdir(parents=True)
    (store.studies / "study" / "slurm" / "s1.sh").touch()
    ended, _ = stop(store, 1)
    assert "squeue" in ended.problem
    assert registry.request().submissions == {"s1"}


def test_pending_jobs_leave_the_queue_and_a_completing_one_is_waited_for(
    store, registry, monkeypatch, tmp_path
):
    """A completing job may go back into the queue, so it is asked for again and again."""
    programs, queue = tmp_path / "programs", tmp_path / "queue"
    for folder in (programs, store.studies / "study" / "slurm"):
        folder.mkdir(parents=True)
    (store.studies / "study" / "slurm" / "s1.sh").touch()
    one_line_each_time = f"head -n 1 {queue}; [ $(wc -l < {queue}) = 1 ] || sed -i 1d {queue}"
    cancelled = programs / "cancelled"
    for name, text in (("squeue", one_line_each_time), ("scancel", f"echo $* >> {cancelled}")):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(workers, "SLURM_SECONDS", 0.1)
    job = "12_0|{}|None|1|\n"
    queue.write_text("".join(map(job.format, ("COMPLETING", "COMPLETING", "PENDING"))) + "\n")
    ended, _ = stop(store)
    assert (ended.asked, ended.left) == (1, ())
    assert "--state=PENDING 12_0" in cancelled.read_text()
    queue.write_text(job.format("COMPLETING"))
    ended, _ = stop(store, 0.5)
    assert ended.left == ("Slurm job 12_0 (completing)",)
    assert registry.request().submissions == {"s1"}, "if it starts again, it shall stop"


# ---------------------------------------------------------------- `biphase stop`


@pytest.fixture
def study(tiny_run, study_file) -> Path:
    long = [
        tiny_run(name, Stage(objective, 1_000_000), heldout_every=1_000_000)
        for name, objective in (("clm", CLM()), ("mlm", MLM(0.4)))
    ]
    return study_file(Study("long", tuple(long)))


@pytest.fixture
def worker(study, store):
    started = []

    def start(*words: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "biphase", "run", study, "--store", store.root, "--quiet", *words]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append(child)
        return child

    yield start
    for child in started:
        if child.poll() is None:
            child.kill()
        child.communicate()


def steps(store) -> list[int]:
    """Return the steps of the saved checkpoints."""
    paths = store.checkpoints.glob("*/checkpoint.json")
    return sorted(json.loads(path.read_text())["progress"]["step"] for path in paths)


def test_a_warned_worker_exits_with_work_left_and_stop_ends_the_others(study, store, worker):
    one, two = worker(), worker()
    wait_until(lambda: len(Leases(store.leases).holders()) == 2, 60, "both compute a training job")
    wait_until(
        lambda: len(list((store.studies / "long" / "live").glob("*.jsonl"))) == 2, 60, "both take steps"
    )
    one.send_signal(signal.SIGUSR1)
    printed, _ = one.communicate(timeout=30)
    assert one.returncode == WORK_LEFT, printed
    assert "nothing lost" in printed
    assert len(steps(store)) == 1, "with a checkpoint"
    assert "checkpoints are kept" in biphase("stop", study, "--store", store.root)
    printed, _ = two.communicate(timeout=30)
    assert two.returncode == 0, printed
    assert len(steps(store)) == 2
    assert not Leases(store.leases).holders()
    assert "no worker of long runs" in biphase("stop", study, "--store", store.root)


@pytest.mark.campaign
def test_a_stop_ends_all_processes_of_a_worker(study, store, worker):
    launched = worker("--processes", "2", "--checkpoint", "20")
    wait_until(lambda: steps(store), 120, "a first checkpoint")
    family = descendants(launched.pid)
    assert len(family) >= 3, "torchrun and two that train"
    assert "checkpoints are kept" in biphase("stop", study, "--store", store.root)
    assert launched.wait(30) == 0
    assert not [pid for pid in family if process_start(pid)]
