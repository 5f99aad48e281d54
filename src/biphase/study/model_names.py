"""A model as the command line names it: a folder, owner/name, owner/name@commit, or the first digits of a key."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from biphase.errors import SpecError
from biphase.files import Store
from biphase.keys import decay_start
from biphase.metadata import read_state
from biphase.records import decode
from biphase.specs import WSD, Hub, Pretrain, Stage
from biphase.study.pins import commit_of

SHORTEST_PREFIX = 6


def run_named(
    model: str, store: Store, *, gguf: str = "", windows: str = "symmetric", note: bool = True
) -> Pretrain:
    """The run that ends in a model: one without stages for a folder or a hub model, as it is.

    Without `note`, nothing is written to the store.
    """
    how: dict[str, Any] = {"gguf": gguf, "windows": windows}
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not gguf and not (folder / "config.json").is_file():
            raise SpecError(
                f"{model} has no config.json; give the folder of a transformers model, or the key of a state"
                f"{_gguf_hint(folder)}"
            )
        start = Hub(str(folder.resolve()), **how)  # the plan that is saved is read from other folders too
        if gguf and not (folder / gguf).is_file():
            raise SpecError(
                f"{model} has no file {gguf}{_gguf_hint(folder) or '; give the folder that has it'}"
            )
        return Pretrain(_name(folder.resolve().name), start=start)
    if re.fullmatch(rf"[0-9a-f]{{{SHORTEST_PREFIX},}}", model):
        found = store.named(store.states, model)
        if len(found) == 1:
            if gguf or windows != "symmetric":
                raise SpecError(f"{model} is a model trained here: --gguf and --windows are for others")
            return _run_up_to(found[0], store)
        if not found:
            refuse_receipt(model, store)
        said = f"{len(found)} states begin with it; type more digits" if found else "there is no such state"
        raise SpecError(f"{model} names no one state of {store.states}: {said}")
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(@[\w.-]+)?", model):
        source, _, revision = model.partition("@")
        pinned = revision or commit_of(source, store, note=note)
        return Pretrain(_name(source.split("/")[1]), start=Hub(source, revision=pinned, **how))
    raise SpecError(
        f"there is no model {model!r}: type a local folder, owner/name@commit, or the first digits of a key "
        "that biphase plan shows"
    )


def refuse_receipt(digits: str, store: Store) -> None:
    """Say so where the state that is meant came here without its weights."""
    receipts = store.receipts / store.states.name
    for key in sorted(path.name for path in receipts.glob(f"{digits}*") if store.has(path)):
        raise SpecError(refusal_of_receipt(key, store))


def refusal_of_receipt(key: str, store: Store) -> str:
    again = shlex.join(["rm", "-r", str(store.receipt(store.states / key))])
    return (
        f"{key[:SHORTEST_PREFIX]} came here without its weights, which stayed on the machine that trained it; ask there, or copy "
        f"states/{key} of its store into {store.states}, or train it again here: {again}, then biphase run STUDY"
    )


def _run_up_to(state: str, store: Store) -> Pretrain:
    """The run that ends in a state of the store."""
    about = read_state(store.states / state)
    run, step = decode(about["run"]), int(about["progress"]["step"])
    if step == run.steps:
        return replace(run, keep=())  # what else the run kept was not asked for
    if step > decay_start(run):
        raise SpecError(
            f"{state[:SHORTEST_PREFIX]} was saved in the middle of a decay; give the key of its beginning or its end"
        )
    stages: list[Stage] = []
    left = step
    for stage in run.stages:
        if left:
            stages.append(replace(stage, steps=min(stage.steps, left)))
            left -= stages[-1].steps
    warmup = min(int(run.schedule.warmup), step)
    schedule = WSD(run.schedule.peak, warmup, 0)
    if warmup != run.schedule.warmup:
        raise SpecError(f"{state[:SHORTEST_PREFIX]} was saved in the middle of a warmup; give a later key")
    return replace(run, name=f"{run.name}-{step}", stages=tuple(stages), schedule=schedule, keep=())


def _gguf_hint(folder: Path) -> str:
    files = sorted(path.name for path in folder.glob("*.gguf"))
    return f"; of the GGUF there: --gguf {files[0]}" if files else ""


def _name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip(".-") or "model"
