"""A study of seven training jobs and some fine-tunings, one for machines that train together, and what they must leave."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from biphase.store import read_json, verify

STUDY = '''
"""Does it matter who computes it?"""
from dataclasses import replace

from biphase import BPE, CATALOG, CLM, MLM, WSD, Chunks, Corpus, Finetune, Pretrain, Size, Stage, Study

tiny = Size("tiny", layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, precision="fp32")
corpus = Corpus("tiny", {source!r}, BPE(320), heldout="heldout.jsonl")


def run(name, *stages):
    return Pretrain(name, start=tiny, corpus=corpus, stages=stages, packing=Chunks(32, shortest=4), batch_tokens=256,
                    schedule=WSD(peak=3e-3, warmup=5, decay=10), seed=7, heldout_every=100, heldout_tokens=512)


def small(name, steps):
    task = CATALOG[name]
    return replace(task, steps=steps, batch=8, splits=replace(task.splits, rows=(64, 32, 32)))


grid = Finetune((small("sources-mini", {tuning}),), lrs=(1e-3, 3e-3), seeds={seeds}, protocol="standard", precision="fp32")
study = Study("fleet", runs=(
    run("clm", Stage(CLM(), {steps})),
    run("two", Stage(CLM(), {half}), Stage(MLM(0.4), {half})),
    run("mlm", Stage(MLM(0.4), {steps})),
), finetune=grid)
'''
MACHINES_STUDY = """
from biphase import BPE, CLM, MLM, WSD, Chunks, Corpus, Pretrain, Size, Stage, Study

tiny = Size("tiny", layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, precision="fp32")
study = Study("machines", runs=(Pretrain(
    "two", start=tiny, corpus=Corpus("tiny", {source!r}, BPE(320), heldout="heldout.jsonl"),
    stages=(Stage(CLM(), {half}), Stage(MLM(0.4), {half})), packing=Chunks(32, shortest=4), batch_tokens=256,
    schedule=WSD(peak=3e-3, warmup=5, decay=10), heldout_every=25, heldout_tokens=512,
),))
"""
JOBS = 7
TRAININGS = 3 * 2  # for each seed
SHORT = {"steps": 800, "tuning": 10, "seeds": (0,)}


def write_study(folder: Path, source: str, *, steps: int, tuning: int, seeds: tuple[int, ...]) -> Path:
    path = folder / "fleet.py"
    path.write_text(STUDY.format(source=source, steps=steps, half=steps // 2, tuning=tuning, seeds=seeds))
    return path


def biphase(*words: object, code: int = 0, **environment: str) -> str:
    """Run a verb in a process; return its output."""
    command = [sys.executable, "-m", "biphase", *map(str, words)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env=os.environ | environment, check=False
    )
    assert ended.returncode == code, ended.stderr[-2000:]
    return ended.stdout


def contents(store: Path) -> dict[str, object]:
    """Return hashes of the tensors of every checkpoint, and the scores, losses and values of every trial."""
    found: dict[str, object] = {}
    for place in sorted((store / "checkpoints").iterdir()):
        entries = verify(place)
        found[place.name] = [
            entries[name]["sha256"] for name in ("model.safetensors", "optimizer.safetensors")
        ]
    for place in sorted((store / "trials").iterdir()):
        entries = verify(place)
        about = json.loads((place / "trial.json").read_text())
        found[place.name] = about["scores"], about["losses"], entries["values.safetensors"]["sha256"]
    return found


def published_twice(logs: list[str]) -> list[str]:
    """Return the fine-tunings that two workers report as published."""
    titles = re.findall(r"\d+/\d+ fine-tunings  (.+? · seed \d+) ", "\n".join(logs))
    return [title for title, count in Counter(titles).items() if count > 1]


def done(store: Path) -> tuple[int, int]:
    """Return the numbers of training jobs and fine-tunings that are published."""
    shown = json.loads(
        biphase("status", store / "studies" / "fleet" / "plan.json", "--store", store, "--json")
    )
    return sum(job["standing"] == "done" for job in shown["jobs"]), shown["finetunings"]["done"]


def wait_until(claim: Callable[[], object], seconds: float, what: str, poll: float = 0.2) -> object:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        value = claim()
        if value:
            return value
        time.sleep(poll)
    raise AssertionError(f"after {seconds:g} s still not: {what}")


def typed(*words: object) -> str:
    """One of Slurm's commands, which must succeed."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout


def last(store: Path) -> tuple[dict[str, Tensor], dict[int, tuple[int, int]]]:
    """Return the tensors of the latest checkpoint, and the labels and tokens of each of its steps."""
    places = {
        read_json(place / "checkpoint.json")["progress"]["step"]: place
        for place in Path(store).glob("checkpoints/*")
    }
    place = places[max(places)]
    verify(place)
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    labels = {line["step"]: (line["labels"], line["tokens"]) for line in lines if "labels" in line}
    return tensors(place), labels


def tensors(place: Path) -> dict[str, Tensor]:
    """Return weights and optimizer state of a checkpoint."""
    return {**load_file(place / "model.safetensors"), **load_file(place / "optimizer.safetensors")}


def apart(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    assert one.keys() == two.keys()
    return max((one[name] - two[name]).abs().max().item() for name in one)
