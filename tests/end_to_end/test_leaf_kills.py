"""A grid of fine-tunings killed at random moments ends in the same scores and values as one that was left alone."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from biphase.leases import Leases
from biphase.store import verify

DRIVER = Path(__file__).with_name("kill_driver.py")

STUDY = '''
"""Does killing change a score?"""
from dataclasses import replace

from biphase import (
    BPE, CATALOG, CLM, WSD, Chunks, Corpus, Finetune, Pretrain, Retrieve, Size, Stage, Study,
)

tiny = Size("tiny", layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, precision="fp32")
clm = Pretrain(
    "clm", start=tiny, corpus=Corpus("tiny", {source!r}, BPE(320), heldout="heldout.jsonl"), stages=(Stage(CLM(), 8),),
    packing=Chunks(32, shortest=4), batch_tokens=256, schedule=WSD(peak=3e-3, warmup=1, decay=2), keep=(4,),
    heldout_every=8, heldout_tokens=512,
)


def small(name, steps):
    task = CATALOG[name]
    return replace(task, steps=steps, batch=8, splits=replace(task.splits, rows=(64, 32, 32)))


facts = small("scifact-mini", 10)
lent = replace(
    facts, name="lent", form=Retrieve(), splits=replace(facts.splits, train=""), trained_on="scifact-mini"
)
study = Study("killed", runs=(clm,), finetune=Finetune(
    (small("sources-mini", 20), small("wikiann-mini", 20), small("squadshifts-mini", 10), facts, lent),
    lrs=(1e-3, 3e-3), seeds=(0, 1), protocol={protocol!r}, precision="fp32", documents="judged",
))
'''


def drive(study: Path, store: Path, kills: int, seed: int) -> dict:
    done = subprocess.run(
        [sys.executable, DRIVER, study, store, str(kills), str(seed)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def trials(store: Path) -> dict[str, tuple[dict, bytes, bytes]]:
    """Every trial after its manifest was checked: what it says, but for times, and the bytes of its arrays."""
    found = {}
    for place in sorted((store / "trials").iterdir()):
        verify(place)
        about = json.loads((place / "trial.json").read_text())
        del about["seconds"]
        arrays = ((place / f"{name}.safetensors").read_bytes() for name in ("values", "predictions"))
        found[place.name] = (about, *arrays)
    return found


@pytest.mark.campaign
@pytest.mark.parametrize(("protocol", "seed"), [("standard", 1), ("paper", 2)])
def test_kills_in_the_middle_of_a_grid_change_no_score(corpus, tmp_path, protocol, seed):
    study = tmp_path / "study.py"
    study.write_text(STUDY.format(source=corpus.source, protocol=protocol))
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    assert drive(study, calm, kills=0, seed=0)["code"] == 0
    for kind in ("checkpoints", "shards"):  # so that the kills fall into the grid
        shutil.copytree(calm / kind, killed / kind)
    report = drive(study, killed, kills=10, seed=seed)
    assert report["code"] == 0
    assert report["killed"] >= 10, report
    assert len(trials(calm)) == 2 * 5 * 4
    assert trials(killed) == trials(calm)
    # One killed between publishing its last trial and letting go leaves a lease behind, which is known to be a dead one's.
    alive = [one for one in Leases(killed / "leases").holders().values() if one.alive is not False]
    assert not alive, "a finished study holds no job"
    taken = (killed / "leases" / "takeovers.jsonl").read_text().splitlines()
    assert taken, "some of the killed held a fine-tuning"
    assert not list((killed / "unfinished").iterdir()), "what was saved on the way is swept"
