"""Who works on a study is known, and a request to stop reaches those it names and nobody else."""

import json
import os
import subprocess
import sys
import time

import pytest

from biphase.cluster import workers
from biphase.cluster.workers import StopRequest, WorkerHeartbeat, WorkerRegistry, WorkerStopper, control
from biphase.errors import StoreError
from biphase.leases import Leases, process_start
from biphase.store import Store


@pytest.fixture
def here(store, monkeypatch):
    for name in ("RANK", workers.WORKER, workers.SUBMISSION):
        monkeypatch.delenv(name, raising=False)
    return WorkerRegistry(store, "study")


def test_a_worker_signs_in_and_out(store, here):
    one, two = WorkerHeartbeat(store, "study"), WorkerHeartbeat(store, "study")
    assert set(here.workers()) == {one.worker, two.worker}
    one.leave()
    assert set(here.workers()) == {two.worker}
    two.leave()
    assert not here.workers()


def test_a_request_is_for_those_it_names_and_a_later_worker_obeys_no_old_one(store, here):
    old = WorkerHeartbeat(store, "study")
    here.ask(StopRequest(frozenset(here.workers()), frozenset(["s1"])))
    late = WorkerHeartbeat(store, "study")
    assert old.asked()
    assert not late.asked()
    here.withdraw()
    assert old.asked(), "what was asked once stays asked"
    for one in (old, late):
        one.leave()


def test_a_job_obeys_a_request_to_its_submission_also_when_it_starts_after_it(store, here, monkeypatch):
    here.ask(StopRequest(submissions=frozenset(["s1"])))
    monkeypatch.setenv(workers.SUBMISSION, "s1")
    job = WorkerHeartbeat(store, "study")
    monkeypatch.setenv(workers.SUBMISSION, "s2")
    other = WorkerHeartbeat(store, "study")
    assert job.asked()
    assert not other.asked()
    for one in (job, other):
        one.leave()


def test_the_request_is_looked_at_once_a_second_unless_it_matters_now(store, here, monkeypatch):
    one = WorkerHeartbeat(store, "study")
    assert not one.asked()
    here.ask(StopRequest(frozenset([one.worker])))
    assert not one.asked(), "it looked a moment ago"
    assert one.asked(now=True)
    one.leave()


def test_a_request_that_cannot_be_read_asks_nobody(store, here):
    one = WorkerHeartbeat(store, "study")
    for text in ("", "[]", '{"workers": 3}', '{"workers": []}'):
        (here.folder / "stop.json").write_text(text)
        assert not one.asked(now=True)
    one.leave()


def test_processes_of_one_worker_go_by_one_name(store, here, monkeypatch):
    parent = WorkerHeartbeat(store, "study")
    monkeypatch.setenv(workers.WORKER, parent.worker)
    monkeypatch.setenv("RANK", "0")
    child = WorkerHeartbeat(store, "study")
    assert child.worker == parent.worker
    child.leave()
    assert set(here.workers()) == {parent.worker}
    monkeypatch.delenv(workers.WORKER)
    monkeypatch.setenv("RANK", "1")  # started by somebody else's torchrun: the first one signs in for all
    assert WorkerHeartbeat(store, "study").worker == ""
    parent.leave()


def test_one_at_a_time_submits_or_stops(store):
    with (
        control(store, "study"),
        pytest.raises(StoreError, match=f"process {os.getpid()} on .* is submitting or stopping"),
    ):
        control(store, "study", seconds=0.3)
    control(store, "study", seconds=0.3).release()


SLEEPER = """
import signal, sys, time
from biphase.store import Store
from biphase.cluster.workers import WorkerHeartbeat
from biphase.cluster.launch import Stop
presence = WorkerHeartbeat(Store(sys.argv[1]), "study")
stop = Stop(None, lambda text: None, presence.asked)
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stop.requested = lambda: False
elif sys.argv[2] == "request":  # it hears no signal, as one on another machine
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("in", flush=True)
while not stop():
    time.sleep(0.05)
presence.leave()
"""


@pytest.fixture
def sleeper(store, here):
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


def stop(store, wait: float = 20.0, *, now: bool = False):
    said: list[str] = []
    return WorkerStopper(store, "study", now=now, say=said.append).stop(wait), said


def test_stop_ends_workers_by_signal_and_by_request_and_takes_its_request_back(store, here, sleeper):
    children = [sleeper("plain"), sleeper("request")]
    ended, said = stop(store)
    assert (ended.asked, ended.left, ended.problem) == (2, (), "")
    assert said[0] == "asked 2 workers to stop after the current step"
    assert [child.wait(5) for child in children] == [0, 0]
    assert not (here.folder / "stop.json").exists()
    assert stop(store)[0].asked == 0


def test_who_does_not_stop_in_time_is_named_and_can_be_ended_at_once(store, here, sleeper, monkeypatch):
    monkeypatch.setattr(workers, "TOLD_EVERY", 0.2)
    child = sleeper("deaf")
    ended, said = stop(store, 1.5)
    assert [one.endswith(f"process {child.pid}") for one in ended.left] == [True]
    assert any("waiting for" in line for line in said)
    assert here.request().workers, "it stands until it is obeyed"
    ended, _ = stop(store, 10, now=True)
    assert ended.left == ()
    assert child.wait(5) == -9


def test_a_dead_worker_is_struck_off(store, here, sleeper):
    child = sleeper("plain")
    child.kill()
    child.wait()
    assert stop(store)[0].asked == 0
    assert not list(here.leases.folder.glob("*.lease"))


def test_a_silent_worker_of_another_machine_counts_as_gone_and_its_request_stays(store, here, monkeypatch):
    one = WorkerHeartbeat(store, "study")
    path = next(here.leases.folder.glob("*.lease"))
    raw = path.read_text()
    one.leave()
    host = f'"{os.uname().nodename}"'
    assert host in raw
    path.write_text(raw.replace(host, '"elsewhere"'))
    stopping_it = WorkerStopper(store, "study", now=False, say=lambda text: None)
    stopping_it.registry.leases = Leases(here.leases.folder, beat_seconds=0.1, stale_seconds=1.0)
    began = time.monotonic()
    ended = stopping_it.stop(20)
    assert time.monotonic() - began < 5
    assert (ended.asked, ended.left, ended.silent) == (1, (), 1)
    assert here.request().workers == {one.worker}, "if it wakes up, it shall obey"


def test_a_stop_makes_no_store(tmp_path):
    assert stop(Store(tmp_path / "none"))[0].asked == 0
    assert not (tmp_path / "none").exists()


def test_with_slurm_out_of_reach_the_request_stands(store, here, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    (store.studies / "study" / "slurm").mkdir(parents=True)
    (store.studies / "study" / "slurm" / "s1.sh").touch()
    ended, _ = stop(store, 1)
    assert "squeue is not on this machine" in ended.problem
    assert here.request().submissions == {"s1"}


@pytest.fixture
def cluster(store, here, monkeypatch, tmp_path):
    """A Slurm with a submission s1, whose squeue gives these lines, one at each question and the last for ever."""
    folder = store.studies / "study" / "slurm"
    folder.mkdir(parents=True)
    (folder / "s1.sh").touch()
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(workers, "SLURM_EVERY", 0.1)

    def says(*states: str) -> None:
        queue = programs / "queue"
        queue.write_text("".join(f"12_0|{one}|None|node1|1|0:10|0:00|\n" if one else "\n" for one in states))
        squeue = f"head -n 1 {queue}; [ $(wc -l < {queue}) = 1 ] || sed -i 1d {queue}"
        for name, text in (("squeue", squeue), ("scancel", f"echo $* >> {programs}/cancelled")):
            (programs / name).write_text(f"#!/bin/sh\n{text}\n")
            (programs / name).chmod(0o755)

    return says, programs / "cancelled"


def test_a_job_on_its_way_back_into_the_queue_is_asked_too(store, here, cluster):
    says, cancelled = cluster
    says("COMPLETING", "COMPLETING", "PENDING", "")
    ended, _ = stop(store)
    assert (ended.asked, ended.left) == (1, ())
    assert "--state=PENDING 12_0" in cancelled.read_text()
    assert not (here.folder / "stop.json").exists()
    says("COMPLETING")
    ended, _ = stop(store, 0.5)
    assert ended.left == ("Slurm job 12_0 (completing)",)
    assert here.request().submissions == {"s1"}, "if it starts again, it shall stop"


def test_what_an_earlier_stop_left_is_taken_back_when_nobody_it_names_is_there(store, here, sleeper):
    here.ask(StopRequest(frozenset(["here.gone"])))
    sleeper("plain")
    assert stop(store)[0].left == ()
    assert not (here.folder / "stop.json").exists()


def test_a_request_stays_for_whom_another_stop_named_meanwhile(store, here, sleeper, monkeypatch):
    sleeper("plain")
    late: list[WorkerHeartbeat] = []

    def another(text: str) -> None:
        if not late:
            late.append(WorkerHeartbeat(store, "study"))
            here.ask(here.request() | StopRequest(frozenset([late[0].worker])))

    ended = WorkerStopper(store, "study", now=False, say=another).stop(20)
    assert ended.left == ()
    assert late[0].worker in here.request().workers
    late[0].leave()


# ---------------------------------------------------------------- nobody else is ended


@pytest.mark.parametrize("now", [False, True])
def test_a_process_that_is_no_worker_is_never_signalled(store, here, now):
    """Whoever can write into a store could name any process of the user in a worker's file."""
    innocent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        worker = WorkerHeartbeat(store, "study")
        path = here.leases.folder / f"{worker.worker}.lease"
        forged = json.loads(path.read_text()) | {
            "pid": innocent.pid,
            "started": process_start(innocent.pid),
            "owner": "f" * 32,
        }
        worker.leave()
        (here.leases.folder / "here.forged.lease").write_text(json.dumps(forged))
        ended, _ = stop(store, 2, now=now)
        assert innocent.poll() is None
        assert (ended.asked, ended.left) == (0, ())
        assert not here.workers()
    finally:
        innocent.kill()
        innocent.wait()


@pytest.mark.parametrize("pid", [-1, 0, -7, 1.5, "1", None, [1], 10**30, True])
@pytest.mark.parametrize("started", ["1", None])
def test_a_lease_that_names_no_single_process_is_no_lease(store, here, monkeypatch, pid, started):
    """kill(-1) reaches every process of the user, kill(0) the whole group."""
    worker = WorkerHeartbeat(store, "study")
    forged = json.loads(here.file(worker.worker).read_text()) | {"pid": pid, "started": started}
    worker.leave()
    (here.leases.folder / "here.forged.lease").write_text(json.dumps(forged))
    signalled = []
    monkeypatch.setattr(os, "kill", lambda *words: signalled.append(words))
    ended, _ = stop(store, 0.1, now=True)
    assert (ended.asked, signalled) == (0, [])


def test_a_process_that_may_not_be_looked_at_is_not_signalled(store, here, monkeypatch, sleeper):
    sleeper("plain")
    signalled = []
    monkeypatch.setattr(workers, "has_open", lambda *_: None)
    monkeypatch.setattr(os, "kill", lambda pid, sign: signalled.append(sign) if sign else None)
    stop(store, 0.1, now=True)
    assert signalled == []
