"""One tiny study that does everything: tokenizes, trains a shared trunk, branches, goes on, fine-tunes, reports.

What its end looks like excludes times, which differ from run to run: hashes of every tensor and shard, scores
and values of every trial, and the report as it would be with all times set alike.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from common import republish, toys, write_lines

from biphase.store import verify

STUDY = '''
"""Does anything that breaks change a result?"""
from biphase import (
    BPE, CLM, MLM, WSD, Chunks, Classify, Corpus, Finetune, Pretrain, Size, Splits, Stage, Study, Task,
)

tiny = Size("tiny", layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, precision="fp32")
corpus = Corpus("tiny", {text!r}, BPE(320), heldout="heldout.jsonl")


def run(name, *stages):
    return Pretrain(name, start=tiny, corpus=corpus, stages=stages, packing=Chunks(32, shortest=4), batch_tokens=256,
                    schedule=WSD(peak=3e-3, warmup=2, decay=2), seed=7, heldout_every=4, heldout_tokens=512)


def task(name, labels):
    return Task(name, Classify("{{text}}", labels), {tasks!r} + name, Splits(validation="validation*"), steps={tuned}, batch=8)


clm = run("clm", Stage(CLM(), {steps}))
study = Study("faults", runs=(
    clm,
    run("two", Stage(CLM(), {half}), Stage(MLM(0.4), {half})),
    Pretrain("on", start=clm, stages=(Stage(MLM(0.4), {half}),), heldout_every=4, heldout_tokens=512),
), finetune=Finetune(
    (task("beasts", ("beast", "place")), task("numbers", ("even", "odd"))), lrs=(1e-3, 4e-3), seeds=(0, 1),
    protocol="standard", precision="fp32",
))
'''


def write_study(folder: Path, documents: list[str], *, steps: int = 6, tuned: int = 2) -> Path:
    """The study's file, with its text and its tasks beside it."""
    cut = len(documents) * 9 // 10
    for name, some in (("train", documents[:cut]), ("heldout", documents[cut:])):
        write_lines(folder / "text" / f"{name}.jsonl", [{"text": text} for text in some])
    for name in ("beasts", "numbers"):
        for part, first, count in (("train", 0, 24), ("validation", 24, 8), ("test", 32, 12)):
            write_lines(folder / "tasks" / name / f"{part}.jsonl", toys(count, first))
    text, tasks = str(folder / "text" / "train.jsonl"), f"{folder / 'tasks'}/"
    study = folder / "study.py"
    study.write_text(STUDY.format(text=text, tasks=tasks, steps=steps, half=steps // 2, tuned=tuned))
    return study


def ended(store: Path) -> dict[str, Any]:
    """Everything a finished study says, but for times. Every manifest is checked on the way."""
    found: dict[str, Any] = {}
    for kind in ("shards", "checkpoints", "trials"):
        for place in sorted((store / kind).glob("*")):
            entries = verify(place)
            heavy = {
                name: one["sha256"] for name, one in entries.items() if not name.endswith((".json", ".jsonl"))
            }
            found[f"{kind}/{place.name}"] = heavy | _facts(place)
    return found


def _facts(place: Path) -> dict[str, Any]:
    if place.parent.name == "checkpoints":
        data = json.loads((place / "checkpoint.json").read_text())
        lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        return {
            "progress": {
                name: data["progress"][name] for name in ("step", "next_sample", "tokens", "skipped")
            },
            "lines": [{name: one for name, one in line.items() if name != "seconds"} for line in lines],
        }
    if place.parent.name == "trials":
        return {n: one for n, one in json.loads((place / "trial.json").read_text()).items() if n != "seconds"}
    return {"card": json.loads((place / "card.json").read_text())}


def set_times_alike(store: Path) -> None:
    """Let every checkpoint and trial have taken the same time, so that two stores of one study report the same bytes."""
    for place in sorted((store / "checkpoints").iterdir()):
        about = json.loads((place / "checkpoint.json").read_text())
        about["progress"] |= {"seconds": 1.0}
        lines = [
            json.loads(line) | {"seconds": 1.0} for line in (place / "metrics.jsonl").read_text().splitlines()
        ]
        republish(place, {
            "checkpoint.json": json.dumps(about).encode(),
            "metrics.jsonl": b"".join(json.dumps(line).encode() + b"\n" for line in lines),
        })  # fmt: skip
    for place in sorted((store / "trials").iterdir()):
        about = json.loads((place / "trial.json").read_text())
        about["seconds"] = {"train": 1.0, "score": 1.0}
        republish(place, {"trial.json": json.dumps(about).encode()})


def report_bytes(folder: Path) -> dict[str, str]:
    """The hash of every file of a report."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest() for path in files}
