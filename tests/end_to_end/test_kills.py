"""A study killed at random moments ends in the same bits as one that was left alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from biphase.leases import Leases
from biphase.store import verify

DRIVER = Path(__file__).with_name("kill_driver.py")

STUDY = '''
"""Does killing change anything?"""
from biphase import BPE, CLM, MLM, WSD, Chunks, Corpus, Pretrain, Size, Stage, Study

tiny = Size("tiny", layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, precision="fp32")
corpus = Corpus("tiny", {source!r}, BPE(320), heldout="heldout.jsonl")


def run(name, *stages, **fields):
    defaults = dict(start=tiny, corpus=corpus, packing=Chunks(32, shortest=4), batch_tokens=256,
                    schedule=WSD(peak=3e-3, warmup=5, decay=10), seed=7)
    return Pretrain(name, stages=stages, heldout_every=20, heldout_tokens=512, **(defaults | fields))


clm = run("clm", Stage(CLM(), {steps}))
study = Study("killed", runs=(
    clm,
    run("two", Stage(CLM(), {half}), Stage(MLM(0.4), {half})),
    run("mlm", Stage(MLM(0.4, replace=(0.8, 0.1, 0.1)), {steps})),
    Pretrain("on", start=clm, stages=(Stage(MLM(0.4), {half}),), heldout_every=20, heldout_tokens=512),
))
'''


def contents(store: Path) -> dict[str, dict[str, str]]:
    """The hashes of every tensor file and shard of a store, after checking all manifests."""
    found = {}
    for kind in ("checkpoints", "shards"):
        for place in sorted((store / kind).iterdir()):
            entries = verify(place)
            found[place.name] = {
                name: entry["sha256"]
                for name, entry in entries.items()
                if name.endswith(("safetensors", "bin"))
            }
    return found


def positions(store: Path) -> dict[str, list[int]]:
    states = {
        place.name: json.loads((place / "checkpoint.json").read_text())["progress"]
        for place in (store / "checkpoints").iterdir()
    }
    return {name: [state["step"], state["next_sample"], state["tokens"]] for name, state in states.items()}


def drive(study: Path, store: Path, kills: int, seed: int = 0) -> dict:
    done = subprocess.run(
        [sys.executable, DRIVER, study, store, str(kills), str(seed)],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def compare(corpus, tmp_path: Path, *, kills: int, steps: int, seed: int = 0) -> None:
    study = tmp_path / "study.py"
    study.write_text(STUDY.format(source=corpus.source, steps=steps, half=steps // 2))
    assert drive(study, tmp_path / "calm", kills=0)["code"] == 0
    report = drive(study, tmp_path / "killed", kills=kills, seed=seed)
    assert report["code"] == 0
    assert report["killed"] >= kills, report
    assert contents(tmp_path / "killed") == contents(tmp_path / "calm")
    assert positions(tmp_path / "killed") == positions(tmp_path / "calm")
    holders = Leases(tmp_path / "killed" / "leases").holders().values()
    assert not [one for one in holders if one.alive], "a finished study holds no job"


def test_a_few_kills_change_no_bit(corpus, tmp_path):
    compare(corpus, tmp_path, kills=4, steps=40)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", [1, 2])
def test_many_kills_change_no_bit(corpus, tmp_path, seed):
    compare(corpus, tmp_path, kills=25, steps=400, seed=seed)
