"""`biphase bench job`: two training jobs of a small study, computed by a worker in a store of its own.

The worker is a `biphase run` on random text that was tokenized before. The first job takes half of the steps, its child
the other half, in which the learning rate decays. All times come from what the store holds afterwards: metrics.jsonl,
`times` in checkpoint.json, and when manifest.json was written.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from biphase.bench.cases import JobCase, Timing
from biphase.bench.measure import BATCHES, END, FIRST_TOKEN, MASK, PAD, numbers_tokenizer, objective_of
from biphase.errors import TrainingError
from biphase.metadata import read_checkpoint_file, read_lines
from biphase.specs import Chunks, Rows
from biphase.store import MANIFEST, Store

STUDY = """
from biphase import CLM, MLM, SIZES, WSD, Chunks, Corpus, Pretrain, Pretrained, Rows, Stage, Study

corpus = Corpus("random", "text.jsonl", Pretrained("./tokenizer"), heldout="heldout.jsonl")
run = Pretrain(
    "job", SIZES[{size!r}], corpus, Stage({objective}, {steps}), WSD(1e-4, warmup=0, decay={decay}),
    batch_tokens={tokens}, packing={packing}, precision={precision!r},
    heldout_every={every}, heldout_tokens={heldout},
)
study = Study("job", run)
"""
DOCUMENT = 700  # tokens
# Steps of tokens. They are measured in the middle of a job too, because kernels are loaded when they are first used.
HELDOUT = 4


def measure_job(case: JobCase) -> Timing:
    """Compute the two jobs; return the seconds of a step and, in `details`, of what a worker does besides."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_study(folder, case)
        _run(folder, "tokenize", "text.jsonl", "--tokenizer", "tokenizer", "--heldout", "heldout.jsonl")
        began = time.time()
        _run(folder, "run", "study.py", "--micro-batch", case.rows, "--quiet")
        return _timing(Store(folder / "store"), case, began)


def _run(folder: Path, *words: object) -> None:
    command = [sys.executable, "-m", "biphase", *map(str, words)]
    # site made sys.path absolute; a relative PYTHONPATH would mean nothing in that folder.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TrainingError(
            f"biphase {words[0]} failed in this case: {(done.stderr or '?').splitlines()[-1]}"
        )


def _write_study(folder: Path, case: JobCase) -> None:
    """Write random text in which each number is a token, its tokenizer, and the study."""
    step = case.rows * case.length
    generator = np.random.default_rng(0)
    for name, tokens in (("text.jsonl", min(case.steps, BATCHES) * step), ("heldout.jsonl", HELDOUT * step)):
        documents = generator.integers(FIRST_TOKEN, case.vocab, (tokens // DOCUMENT + 1, DOCUMENT)).tolist()
        lines = [json.dumps({"text": " ".join(map(str, document))}) for document in documents]
        (folder / name).write_text("\n".join(lines))
    (folder / "tokenizer").mkdir()
    numbers_tokenizer(case.vocab).save(str(folder / "tokenizer" / "tokenizer.json"))
    names = {"eos_token": str(END), "mask_token": str(MASK), "pad_token": str(PAD)}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names))
    packing = (
        Chunks(case.length)
        if case.packing == "chunks"
        else Rows(case.length, document_mask=case.packing == "documents")
    )
    study = STUDY.format(
        size=case.size, objective=objective_of(case), steps=case.steps, decay=case.steps // 2, tokens=step,
        packing=packing, precision=case.precision, every=max(1, case.steps // 4), heldout=HELDOUT * step,
    )  # fmt: skip
    (folder / "study.py").write_text(study)


def _timing(store: Store, case: JobCase, began: float) -> Timing:
    folders = [path.parent for path in store.checkpoints.glob(f"*/{MANIFEST}")]
    (first, parent), (last, child) = sorted(
        ((read_checkpoint_file(folder), folder) for folder in folders),
        key=lambda job: job[0]["progress"]["step"],
    )
    published = (child / MANIFEST).stat().st_mtime
    steps = [line for line in read_lines(child) if "loss" in line]
    middle = steps[len(steps) // 3 : 2 * len(steps) // 3 + 1]
    seconds = (middle[-1]["seconds"] - middle[0]["seconds"]) / (len(middle) - 1)
    tokens = case.rows * case.length
    about, after = first["times"], last["times"]
    details = {
        "tokens/s from the first step to the last checkpoint": (
            case.steps * tokens / (published - about["first_step"])
        ),
        "s from the command to the first step": about["first_step"] - began,
        "s from the last step of a job to its child's first": after["first_step"] - about["last_step"],
        "s of that for held-out losses": about["measured"] - about["last_step"],
        "s of that to save, after those": (parent / MANIFEST).stat().st_mtime - about["measured"],
    }
    path = first["progress"]["machine"].get("path", "")
    return Timing(seconds, seconds, tokens, path=path, details=details)
