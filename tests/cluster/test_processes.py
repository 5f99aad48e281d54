"""Several processes that train together: errors are one line, a dead process is named, and the next start resumes."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from common import store_with
from small_study import apart, tensors

from biphase.leases import process_start
from biphase.specs import BPE, Corpus
from biphase.store import read_json, verify

pytestmark = pytest.mark.campaign

STUDY = """
from biphase import BPE, CLM, WSD, Chunks, Corpus, Pretrain, Size, Stage, Study

tiny = Size("tiny", layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, precision={precision!r})
study = Study("kills", runs=(Pretrain(
    "clm", start=tiny, corpus=Corpus("tiny", {source!r}, BPE(320), heldout="heldout.jsonl"), stages=(Stage(CLM(), {steps}),),
    packing=Chunks(32, shortest=4), batch_tokens=256, schedule=WSD(peak=3e-3, warmup=5, decay=10),
    heldout_every={steps}, heldout_tokens=512,
),))
"""


def start(study, store, *more, processes=2):
    words = ["run", study, "--store", store.root, "--processes", processes, "--quiet", *more]
    command = [sys.executable, "-m", "biphase", *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def resumes(study, store, *more):
    """The next start continues from the last checkpoint."""
    child = start(study, store, *more, "--for", "1s")
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    assert "nothing lost" in out


def written(path, corpus, precision="fp32", steps=4000):
    path.write_text(STUDY.format(source=corpus.source, precision=precision, steps=steps))
    return path


def ranks_below(parent):
    """The processes that torchrun has started for a launch, by their rank."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "environ").read_bytes().split(b"\0")
            above = {int((place / "stat").read_text().rpartition(")")[2].split()[1])}
        except OSError:
            continue
        named = dict(word.partition(b"=")[::2] for word in words)
        if b"RANK" in named and above & parent:
            found[int(named[b"RANK"])] = int(place.name)
    return found


def children(parent):
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return {int(word) for word in text.split()}


def begun(corpus, store, tmp_path, *more):
    """Two processes that have left a first checkpoint: their parent, and they by their ranks."""
    child = start(written(tmp_path / "study.py", corpus), store, "--checkpoint", "5", *more)
    deadline = time.monotonic() + 120
    while not list(store.checkpoints.glob("*/manifest.json")):
        assert time.monotonic() < deadline
        assert child.poll() is None, child.communicate()
        time.sleep(0.05)
    return child, ranks_below(children(child.pid))


def test_an_error_in_a_process_is_one_line(store, tmp_path):
    for name in ("train.jsonl", "heldout.jsonl"):
        (tmp_path / name).write_text('{"text": " "}\n')
    blank = Corpus("tiny", str(tmp_path / "train.jsonl"), BPE(320), heldout="heldout.jsonl")
    child = start(written(tmp_path / "study.py", blank), store)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 2
    lines = [line for line in err.splitlines() if not line.startswith("  ")]
    assert lines[0] == "kills"
    (line,) = lines[1:]
    assert line.startswith("error: ")
    assert str(tmp_path / "train.jsonl") in line
    assert out == ""


@pytest.mark.parametrize(("shard", "rank"), [("none", 0), ("full", 1)])
def test_a_killed_process_is_named_and_the_next_start_resumes(corpus, store, tmp_path, shard, rank):
    child, ranks = begun(corpus, store, tmp_path, "--shard", shard)
    os.kill(ranks[rank], signal.SIGKILL)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert "Traceback" not in err, err
    assert err.splitlines()[-1].startswith(f"error: process {rank} of 2 was ended by SIGKILL")
    assert not list(store.studies.glob("kills/failures/*")), "it is no fault of the training job"
    resumes(tmp_path / "study.py", store, "--shard", shard)


def test_a_process_that_dies_during_a_stop_is_reported(corpus, store, tmp_path):
    child, ranks = begun(corpus, store, tmp_path)
    victim = ranks[1]
    os.kill(victim, signal.SIGSTOP)  # it cannot stop before it is killed
    child.terminate()
    time.sleep(2)
    os.kill(victim, signal.SIGKILL)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert "processes died" in err.splitlines()[-1]
    assert "Traceback" not in err, err


def gone(pids, seconds):
    until = time.monotonic() + seconds
    while any(process_start(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.1)
    return not any(process_start(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_parent_stops_all_with_a_checkpoint(corpus, store, tmp_path, number):
    child, ranks = begun(corpus, store, tmp_path)
    before = newest_step(store)
    time.sleep(0.5)
    child.send_signal(number)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert "nothing lost" in out
    assert len([line for line in err.splitlines() if "after this step" not in line]) == 2, err
    assert newest_step(store) > before
    assert gone(ranks.values(), 0)
    assert not list(store.leases.glob("*.lease"))


def newest_step(store):
    paths = store.checkpoints.glob("*/checkpoint.json")
    return max(read_json(path)["progress"]["step"] for path in paths)


def test_a_second_interrupt_stops_at_once(corpus, store, tmp_path):
    child, ranks = begun(corpus, store, tmp_path)
    os.kill(ranks[1], signal.SIGSTOP)  # it cannot stop cleanly
    child.send_signal(signal.SIGINT)
    time.sleep(2)
    assert child.poll() is None
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=30)
    assert child.returncode == 130
    assert err.splitlines()[-1].startswith("stopped at once")
    assert gone(ranks.values(), 5)


def test_processes_stop_with_a_checkpoint_if_their_parent_is_killed(corpus, store, tmp_path):
    child, ranks = begun(corpus, store, tmp_path)
    child.kill()
    child.communicate()
    assert gone(ranks.values(), 30)
    resumes(tmp_path / "study.py", store)


def taken(store):
    found = set()
    for path in store.leases.glob("*.lease"):
        with contextlib.suppress(FileNotFoundError):  # let go of a moment ago
            found.add(path.stat().st_ino)
    return found


def kill_at_random(study, store, shard, chance):
    """Launch five times, and kill one process a moment after the job was taken; gives how many died."""
    killed = 0
    for _ in range(5):
        before = taken(store)  # whoever was killed has left its lease
        child = start(study, store, "--shard", shard, "--checkpoint", "3")
        while not taken(store) - before and child.poll() is None:
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 1))
        found = ranks_below(children(child.pid)) if child.poll() is None else {}
        if found:
            os.kill(chance.choice(list(found.values())), signal.SIGKILL)
        _, err = child.communicate(timeout=120)
        assert "Traceback" not in err, err
        killed += child.returncode == 1
        assert child.returncode == (1 if "was ended by SIGKILL" in err else 0), err
        for place in store.checkpoints.glob("*"):
            verify(place)
    return killed


def end(store, study, shard):
    done = start(study, store, "--shard", shard)
    out, err = done.communicate(timeout=240)
    assert done.returncode == 0, err
    assert "done; they are in" in out
    step_of = {
        place: read_json(place / "checkpoint.json")["progress"]["step"]
        for place in store.checkpoints.iterdir()
    }
    return tensors(max(step_of, key=step_of.__getitem__))


@pytest.fixture
def other(shards, tmp_path):
    return store_with(shards, tmp_path / "calm")


@pytest.mark.parametrize("shard", ["none", "full"])
def test_random_kills_of_processes_do_not_change_the_result(corpus, store, other, tmp_path, shard):
    study = written(tmp_path / "study.py", corpus, steps=1000 if shard == "none" else 100)
    calm = end(other, study, shard)
    assert kill_at_random(study, store, shard, random.Random(f"kills {shard}")) >= 3
    assert apart(calm, end(store, study, shard)) == 0


def test_a_killed_launcher_ends_all_with_exit_code_1(corpus, store, tmp_path):
    child, ranks = begun(corpus, store, tmp_path)
    (launcher,) = children(child.pid)
    os.kill(launcher, signal.SIGKILL)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert "Traceback" not in err, err
    assert "SIGKILL" in next(line for line in err.splitlines() if line.startswith("error: "))
    assert gone(ranks.values(), 60)
    resumes(tmp_path / "study.py", store)
