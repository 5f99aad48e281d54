"""`biphase stop`, and the warning, as workers on this machine hear them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small_study import biphase, wait_until

from biphase.cluster.launch import WORK_LEFT
from biphase.leases import Leases, process_start

STUDY = """
from biphase import BPE, CLM, MLM, WSD, Chunks, Corpus, Pretrain, Size, Stage, Study

tiny = Size("tiny", layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, precision="fp32")
corpus = Corpus("tiny", {source!r}, BPE(320), heldout="heldout.jsonl")
study = Study("long", tuple(
    Pretrain(name, tiny, corpus, (Stage(objective, 1_000_000),), packing=Chunks(32, 4), batch_tokens=256,
             schedule=WSD(1e-3, 5, 5))
    for name, objective in (("clm", CLM()), ("mlm", MLM(0.4)))
))
"""


@pytest.fixture
def study(corpus, tmp_path) -> Path:
    path = tmp_path / "long.py"
    path.write_text(STUDY.format(source=corpus.source))
    return path


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
    """Of the states that are saved."""
    paths = store.checkpoints.glob("*/checkpoint.json")
    return sorted(json.loads(path.read_text())["progress"]["step"] for path in paths)


def test_a_warned_worker_says_that_work_is_left_and_stop_ends_the_others(study, store, worker):
    one, two = worker(), worker()
    wait_until(lambda: len(Leases(store.leases).holders()) == 2, 60, "both compute a training job")
    wait_until(
        lambda: len(list((store.studies / "long" / "live").glob("*.jsonl"))) == 2, 60, "both take steps"
    )
    one.send_signal(signal.SIGUSR1)
    said, _ = one.communicate(timeout=30)
    assert one.returncode == WORK_LEFT, said
    assert "nothing lost" in said
    assert len(steps(store)) == 1, "with a checkpoint"
    assert "checkpoints are kept" in biphase("stop", study, "--store", store.root)
    said, _ = two.communicate(timeout=30)
    assert two.returncode == 0, said
    assert len(steps(store)) == 2
    assert not Leases(store.leases).holders()
    assert "no worker of long runs" in biphase("stop", study, "--store", store.root)


@pytest.mark.campaign
def test_of_several_processes_none_outlives_a_stop(study, store, worker):
    launched = worker("--processes", "2", "--checkpoint", "20")
    wait_until(lambda: steps(store), 120, "a first checkpoint")
    family = descendants(launched.pid)
    assert len(family) >= 3, "torchrun and two that train"
    assert "checkpoints are kept" in biphase("stop", study, "--store", store.root)
    assert launched.wait(30) == 0
    assert not [pid for pid in family if process_start(pid)]

    launched = worker("--processes", "2", "--checkpoint", "20")
    wait_until(lambda: Leases(store.leases).holders(), 120, "they work again")
    family = descendants(launched.pid)
    biphase("stop", study, "--store", store.root, "--now")
    assert launched.wait(30) == -signal.SIGKILL
    wait_until(lambda: not [pid for pid in family if process_start(pid)], 10, "nobody is left")


def descendants(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(child): int(parent) for child, parent in map(str.split, listed.splitlines())}
    found = [child for child, parent in parents.items() if parent == pid]
    return found + [grandchild for child in found for grandchild in descendants(child)]


def test_a_length_of_time_is_asked_for_in_one_line(study, store):
    ended = subprocess.run(
        [sys.executable, "-m", "biphase", "stop", study, "--store", store.root, "--wait", "long"],
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
