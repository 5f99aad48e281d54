"""Several processes and their parent: a refusal is one line, a dead process is named, and the next start goes on."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from biphase.leases import process_start
from biphase.store import Store, read_json, verify

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
    return subprocess.Popen(
        [sys.executable, "-m", "biphase", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


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


@pytest.mark.campaign
def test_a_refusal_in_a_process_is_one_line(corpus, store, tmp_path):
    child = start(written(tmp_path / "study.py", corpus, "fp8"), store)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 2
    lines = [line for line in err.splitlines() if not line.startswith("  ")]
    assert lines[0] == "kills"
    (line,) = lines[1:]
    assert line.startswith("error: precision='fp8' cannot be had")
    assert line.endswith("say precision='bf16'")
    assert out == ""


@pytest.mark.campaign
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("shard", ["none", "full"])
def test_a_killed_process_ends_all_is_named_and_nothing_is_lost(corpus, store, tmp_path, shard, rank):
    child, ranks = begun(corpus, store, tmp_path, "--shard", shard)
    os.kill(ranks[rank], signal.SIGKILL)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert "Traceback" not in err, err
    assert err.splitlines()[-1].startswith(f"error: process {rank} of 2 was ended by SIGKILL")
    assert not list(store.studies.glob("kills/failures/*")), "it is no fault of the training job"
    again = start(tmp_path / "study.py", store, "--shard", shard, "--for", "1s")
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert "nothing lost" in out


@pytest.mark.campaign
def test_a_process_that_dies_while_all_stop_is_told_and_the_stop_is_not_clean(corpus, store, tmp_path):
    child, ranks = begun(corpus, store, tmp_path)
    victim = ranks[1]
    os.kill(victim, signal.SIGSTOP)  # it cannot stop before it is killed
    child.terminate()
    time.sleep(2)
    os.kill(victim, signal.SIGKILL)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert "died before they had stopped" in err.splitlines()[-1]
    assert "Traceback" not in err, err


def gone(pids, seconds):
    until = time.monotonic() + seconds
    while any(process_start(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.1)
    return not any(process_start(pid) for pid in pids)


@pytest.mark.campaign
def test_an_interrupt_stops_cleanly(corpus, store, tmp_path):
    child, ranks = begun(corpus, store, tmp_path)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert "nothing lost" in out
    assert [line for line in err.splitlines() if "stopping after this step" not in line][1:] == [
        "  2 training jobs, 0 done"
    ]
    assert gone(ranks.values(), 0)


@pytest.mark.campaign
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


@pytest.mark.campaign
def test_processes_whose_parent_was_killed_stop_with_a_checkpoint(corpus, store, tmp_path):
    child, ranks = begun(corpus, store, tmp_path)
    child.kill()
    child.communicate()
    assert gone(ranks.values(), 30)
    again = start(tmp_path / "study.py", store, "--for", "1s")
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert "nothing lost" in out


def taken(store):
    found = set()
    for path in store.leases.glob("*.lease"):
        with contextlib.suppress(FileNotFoundError):  # let go of a moment ago
            found.add(path.stat().st_ino)
    return found


def kill_at_random(study, store, ways, chance, within):
    """Launch in each of these ways, and kill one process of it a moment after the job was taken; gives how many died."""
    killed = 0
    for processes, shard in ways:
        before = taken(store)  # whoever was killed has left its lease
        child = start(study, store, "--shard", shard, "--checkpoint", "3", processes=processes)
        while not taken(store) - before and child.poll() is None:
            time.sleep(0.02)
        time.sleep(chance.uniform(0, within))
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


def end(store, study, **how):
    done = start(study, store, "--shard", how.get("shard", "none"), processes=how["processes"])
    out, err = done.communicate(timeout=240)
    assert done.returncode == 0, err
    assert "done; they are in" in out
    last = max(
        store.checkpoints.iterdir(),
        key=lambda place: read_json(place / "checkpoint.json")["progress"]["step"],
    )
    return {**load_file(last / "model.safetensors"), **load_file(last / "optimizer.safetensors")}


def apart(one, two):
    assert one.keys() == two.keys()
    return max((one[name] - two[name]).abs().max().item() for name in one)


@pytest.fixture
def other(shards, tmp_path):
    made = Store(tmp_path / "calm")
    made.shards.mkdir(parents=True)
    (made.shards / shards.name).symlink_to(shards)
    return made


@pytest.mark.campaign
@pytest.mark.parametrize("shard", ["none", "full"])
def test_a_run_whose_processes_are_killed_at_random_ends_in_the_same_bits(
    corpus, store, other, tmp_path, shard
):
    study = written(tmp_path / "study.py", corpus, steps=1000 if shard == "none" else 100)
    calm = end(other, study, processes=2, shard=shard)
    chance = random.Random(f"kills {shard}")
    assert kill_at_random(study, store, [(2, shard)] * 5, chance, within=1.0) >= 3
    assert apart(calm, end(store, study, processes=2, shard=shard)) == 0


@pytest.mark.campaign
def test_killed_at_random_and_started_otherwise_each_time_it_ends_within_rounding(
    corpus, store, other, tmp_path
):
    study = written(tmp_path / "study.py", corpus, steps=50)
    calm = end(other, study, processes=1)
    ways = [(4, "hybrid:2"), (2, "full"), (3, "none"), (4, "full"), (2, "none"), (3, "full")]
    assert kill_at_random(study, store, ways, random.Random("other ways"), within=0.4) >= 2
    assert apart(calm, end(store, study, processes=2, shard="full")) <= 1e-5


@pytest.mark.campaign
def test_a_killed_launcher_ends_all_cleanly_and_the_exit_code_is_1(corpus, store, tmp_path):
    child, ranks = begun(corpus, store, tmp_path)
    (launcher,) = children(child.pid)
    os.kill(launcher, signal.SIGKILL)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert "Traceback" not in err, err
    assert "SIGKILL" in next(line for line in err.splitlines() if line.startswith("error: "))
    deadline = time.monotonic() + 60
    while any(process_start(pid) for pid in ranks.values()):
        assert time.monotonic() < deadline, "its processes hear of it"
        time.sleep(0.1)
    again = start(tmp_path / "study.py", store, "--for", "1s")
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert "nothing lost" in out
