"""Several processes and their parent: a refusal is one line, a dead process is named, and the next start goes on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STUDY = """
from biphase import BPE, CLM, WSD, Chunks, Corpus, Pretrain, Size, Stage, Study

tiny = Size("tiny", layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, precision={precision!r})
study = Study("kills", runs=(Pretrain(
    "clm", start=tiny, corpus=Corpus("tiny", {source!r}, BPE(320), heldout="heldout.jsonl"), stages=(Stage(CLM(), 4_000),),
    packing=Chunks(32, shortest=4), batch_tokens=256, schedule=WSD(peak=3e-3, warmup=5, decay=10),
    heldout_every=4_000, heldout_tokens=512,
),))
"""


def start(study, store, *more):
    words = ["run", study, "--store", store.root, "--processes", "2", "--quiet", *more]
    return subprocess.Popen(
        [sys.executable, "-m", "biphase", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def written(path, corpus, precision):
    path.write_text(STUDY.format(source=corpus.source, precision=precision))
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
    study = written(tmp_path / "study.py", corpus, "fp32")
    child = start(study, store, "--shard", shard, "--checkpoint", "5")
    deadline = time.monotonic() + 120
    while not list(store.states.glob("*/manifest.json")):
        assert time.monotonic() < deadline
        assert child.poll() is None, child.communicate()
        time.sleep(0.05)
    os.kill(ranks_below(children(child.pid))[rank], signal.SIGKILL)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith(f"error: process {rank} of 2 was ended by SIGKILL")
    again = start(study, store, "--shard", shard, "--for", "1s")
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert "nothing lost" in out
