"""The states of an invented ledger: what is left of pretraining, but for the weights. See `synthetic_ledger.py`.

Losses fall as a power of the steps; a step under the other objective counts half, so a switch shows as a jump. What is
read again is learnt by heart: with every epoch after the first, training losses fall a little below held-out ones.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from biphase.records import encode
from biphase.specs import CLM, MLM, Objective, Pretrain
from biphase.store import MANIFEST, Store
from biphase.study.costs import flops_of
from biphase.study.plan import Plan, TrainingJob

MACHINE = {"device": "synthetic", **dict.fromkeys(("torch", "transformers", "biphase", "python"), "none")}
DEVICES, SPEED = 192, 20e12  # the paper's, and FLOP/s of each as its GPU-hours imply
WATTS = 280.0  # of each: half of what its maker allows
BY_HEART = {True: 0.08, False: 0.02}  # nats for each epoch after the first: causal, masked


def write_states(plan: Plan, store: Store, *, lines: int, rows: int = 0) -> None:
    """Every state of a plan; a run of its own leaves about so many `lines` of losses. `rows`: of the corpus; 0: no end."""
    known: dict[str | None, tuple[dict[str, Any], list[dict[str, Any]]]] = {None: ({}, [])}
    for job in plan.jobs.values():
        before, so_far = known[job.parent]
        progress = _progress(job, before)
        known[job.key] = progress, [*so_far, *_lines(job, before, progress, lines, rows)]
        about = {
            "key": job.key,
            "run": encode(job.run),
            "origin_step": job.run.origin_step,
            "epochs": progress["next_sample"] / rows if rows else 0.0,
            "tokens_left_out": 0,
            "times": dict.fromkeys(("first_step", "last_step", "measured"), progress["seconds"]),
            "progress": progress,
        }
        text = "".join(json.dumps(line) + "\n" for line in known[job.key][1])
        put(store.checkpoints / job.key, {"metrics.jsonl": text.encode(), "checkpoint.json": as_json(about)})


def _progress(job: TrainingJob, before: dict[str, Any]) -> dict[str, Any]:
    run, flops, known = job.run, flops_of(job), before.get("flops", 0.0)
    seconds = before.get("seconds", 0.0) + (flops or 1e15 * job.steps) / (DEVICES * SPEED)
    how = {
        "micro_rows": 1,
        "world": DEVICES,
        "shard": "none",
        "threads": 0,
        "machine": MACHINE | {"path": "fused"},
    }
    return {
        "step": job.step,
        "next_sample": run.origin_sample + job.step * run.rows_per_step,
        "seconds": seconds,
        "flops": None if flops is None or known is None else known + flops,
        "tokens": before.get("tokens", 0) + job.tokens,
        "joules": seconds * DEVICES * WATTS,
        "skipped": 0,
        "nonfinite_in_a_row": 0,
        **how,
        "segments": [{"first_step": 0, **how}],
    }


def _lines(
    job: TrainingJob, before: dict[str, Any], after: dict[str, Any], lines: int, rows: int
) -> list[dict[str, Any]]:
    """What the steps of a training job logged, every so many of them, and the held-out losses as often as the run asks."""
    run, objective, made = job.run, job.objective, []
    origin, every = run.origin_step, max(1, run.steps // lines)
    began, tokens = before.get("seconds", 0.0), before.get("tokens", 0)
    for step in range(job.first + 1, job.step + 1):
        last = step == job.step
        if step % every == 0 or last:
            wiggle = 0.02 * math.sin((origin + step) * 12.9898)
            taken = step - job.first
            epochs = (run.origin_sample + step * run.rows_per_step) / rows if rows else 0.0
            known = BY_HEART[objective.causal] * max(0.0, epochs - 1)
            line = {
                "step": origin + step,
                "loss": _loss(run, objective, step, decaying=job.decaying) + wiggle - known,
                "norm": 0.5 + wiggle,
                "rate": run.schedule.peak,
                "labels": run.batch_tokens // 2,
                "objective": objective.label,
                "tokens": tokens + taken * run.batch_tokens,
                "seconds": round(began + (after["seconds"] - began) * taken / job.steps, 3),
            }
            made.append(line)
        if step % run.heldout_every == 0 or last:
            asked: dict[str, Objective] = {"clm": CLM(), "mlm40": MLM(0.4)}
            losses = {
                name: _loss(run, one, step, decaying=job.decaying) + 0.02 for name, one in asked.items()
            }
            made.append({"step": origin + step, "heldout": losses})
    return made


def _loss(run: Pretrain, asked: Objective, step: int, *, decaying: bool) -> float:
    """Of an objective at a step of a run, which may have trained another one so far."""
    causal, learned = asked.causal, run.origin_step / 2
    for phase in run.phases:
        steps = max(0, min(phase.until, step) - phase.first)
        learned += steps if phase.objective.causal == causal else steps / 2
    share = learned / (run.origin_step + run.steps)
    return (2.3 if causal else 1.9) + 7.0 * (1 + 400 * share) ** -0.5 - (0.05 if decaying else 0.0)


def put(place: Path, files: dict[str, bytes]) -> None:
    """A folder as `files.publish` leaves it, without its waits for the disk."""
    place.mkdir(parents=True)
    entries = {}
    for name, content in sorted(files.items()):
        (place / name).write_bytes(content)
        entries[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (place / MANIFEST).write_bytes(as_json({"key": place.name, "files": entries}))


def as_json(value: Any) -> bytes:
    """As `files.write_json` writes it."""
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
