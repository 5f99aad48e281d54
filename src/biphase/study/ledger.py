"""The ledger: what the store knows of a plan. Read from files alone, without torch.

Each state is done, running, failed, ready (its parent is done) or waiting. One is done too if only its receipt is here:
everything is known of it but its weights, which stayed on another machine.
"""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from biphase.errors import StoreError, one_line
from biphase.files import Store, read_file, read_json, write_json
from biphase.holders import Holder
from biphase.leases import Leases
from biphase.metadata import read_lines, read_state
from biphase.study.plan import Plan, State
from biphase.wording import si

TAIL_BYTES = 8192  # of a live file: some dozens of steps
Standing = Literal["done", "running", "failed", "ready", "waiting"]


@dataclass(frozen=True)
class Entry:
    """One state of a plan, as it stands."""

    state: State
    standing: Standing
    progress: dict[str, Any] | None = None  # of a done state: step, seconds, flops, …
    holder: Holder | None = None
    error: str = ""
    weights: bool = True  # False: of a done state, only its receipt is here


def done_keys(plan: Plan, store: Store) -> set[str]:
    """The states that were computed, here or elsewhere."""
    return {key for key in plan.states if store.knows(store.states / key)}


def keys_with_weights(plan: Plan, store: Store) -> set[str]:
    """The states that are here whole: what can be gone on from, fine-tuned and exported."""
    return {key for key in plan.states if store.has(store.states / key)}


def survey(plan: Plan, store: Store) -> dict[str, Entry]:
    """Every state of the plan, as it stands now."""
    done, whole = done_keys(plan, store), keys_with_weights(plan, store)
    holders = {key: one for key, one in Leases(store.leases).holders().items() if one.alive is not False}
    failed = failures(plan, store)
    entries = {}
    for key, state in plan.states.items():
        if key in done:
            entry = _done(state, store)
            entries[key] = entry if key in whole else replace(entry, weights=False, holder=holders.get(key))
        elif key in holders:
            entries[key] = Entry(state, "running", holder=holders[key])
        elif error := store.fault(store.states / key) or failed.get(key, {}).get("error", ""):
            entries[key] = Entry(state, "failed", error=error)
        else:
            entries[key] = Entry(
                state, "ready" if state.parent is None or state.parent in done else "waiting"
            )
    return entries


def _done(state: State, store: Store) -> Entry:
    """A state that is there: done, unless it cannot say what it is."""
    try:
        return Entry(state, "done", progress=read_state(store.told(store.states / state.key))["progress"])
    except StoreError as wrong:
        return Entry(state, "failed", error=str(wrong))


# ---------------------------------------------------------------- failures


def _failures_folder(plan: Plan, store: Store) -> Path:
    return store.studies / plan.study.name / "failures"


def note_failure(plan: Plan, store: Store, key: str, error: BaseException) -> None:
    """Keep why a job failed. It is tried again by the next `biphase run`."""
    folder = _failures_folder(plan, store)
    folder.mkdir(parents=True, exist_ok=True)
    lines = traceback.format_exception(error)
    record = {
        "key": key,
        "error": one_line(error),
        "traceback": "".join(lines),
        "at": time.strftime("%FT%TZ", time.gmtime()),
    }
    write_json(folder / f"{key}.json", record)


def forget_failure(plan: Plan, store: Store, key: str) -> None:
    (_failures_folder(plan, store) / f"{key}.json").unlink(missing_ok=True)


def failures(plan: Plan, store: Store) -> dict[str, dict[str, Any]]:
    found = {}
    for path in _failures_folder(plan, store).glob("*.json"):
        with contextlib.suppress(StoreError):
            noted = read_json(path)
            if isinstance(noted, dict) and isinstance(
                noted.get("error"), str
            ):  # else it is damaged, and says nothing
                found[path.stem] = noted
    return found


# ---------------------------------------------------------------- curves and speed


def curve(plan: Plan, store: Store, result: str, holding: bytes = b"") -> list[dict[str, Any]]:
    """The lines of metrics on the way to a result, in order of steps, as far as it is computed.

    `holding`: only those with these bytes in them. Curves are long, and of most verbs' concern is little of them.
    """
    for state in reversed(plan.path(plan.results[result])):
        place = store.told(store.states / state.key)
        if store.has(place):  # a state holds the lines of its whole path
            return read_lines(place, holding)
    return []


def live_file(plan: Plan, store: Store, key: str) -> Path:
    """Where a worker leaves the lines of the piece it computes, for whoever watches."""
    return store.studies / plan.study.name / "live" / f"{key}.jsonl"


def latest(plan: Plan, store: Store, state: State) -> str:
    """How far a training job is, by the last lines of its live file: step, loss, tokens a second. Empty: not known."""
    try:
        content = read_file(live_file(plan, store, state.key), tail=TAIL_BYTES)
        texts = content.decode(errors="replace").splitlines()[1:]  # the first may be cut
        # The last line may be on its way to the disk.
        lines = [json.loads(text) for text in texts if text.endswith("}") and '"loss"' in text]
        first, last = lines[0], lines[-1]
        seconds = last["seconds"] - first["seconds"]
        speed = f", {si((last['tokens'] - first['tokens']) / seconds)}tok/s" if seconds > 0 else ""
        loss = "not finite" if last["loss"] is None else f"{last['loss']:.3f}"
        return f"step {last['step']:,} of {state.span[1]:,}, loss {loss}{speed}"
    except (OSError, ValueError, KeyError, TypeError, IndexError):  # only looked at
        return ""


def heldout(lines: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """The held-out losses of a curve, by step."""
    return {line["step"]: line["heldout"] for line in lines if "heldout" in line}


def measured(plan: Plan, store: Store, result: str) -> dict[int, dict[str, float]]:
    """The held-out losses on the way to a result, by step."""
    return heldout(curve(plan, store, result, b'"heldout"'))


def seconds_left(entries: dict[str, Entry], cost_of: Callable[[State], float | None]) -> float | None:
    """Time to go at the speed measured so far, on as many workers as compute now; None before any."""
    spent = work = 0.0
    for entry in entries.values():
        if entry.progress:
            parent = entries.get(entry.state.parent or "")
            before = parent.progress["seconds"] if parent and parent.progress else 0.0
            spent += entry.progress["seconds"] - before
            work += cost_of(entry.state) or 0.0
    left = sum(cost_of(entry.state) or 0.0 for entry in entries.values() if entry.standing != "done")
    workers = max(1, sum(entry.standing == "running" for entry in entries.values()))
    return left * spent / work / workers if work and spent > 0 else None
