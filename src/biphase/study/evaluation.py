"""`biphase evaluate MODEL` as a study: one result that is there already, and what it is fine-tuned on."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from biphase.errors import SpecError
from biphase.files import Store, read_json
from biphase.keys import decay_start
from biphase.records import decode, encode, key
from biphase.specs import WSD, Finetune, Hub, Pretrain, Stage, Study, Task

SHORTEST_PREFIX = 6


def evaluation(model: str, finetune: Finetune, store: Store) -> Study:
    """The study of one model: a local folder, owner/name@revision, or the key of a state of this store."""
    run = _run_of(model, store)
    digest = key({"model": model, "finetune": encode(finetune)})[:8]
    return Study(f"evaluate-{run.name}-{digest}", runs=(run,), finetune=finetune)


def finetuning(
    tasks: tuple[Task, ...],
    lrs: str,
    seeds: str,
    protocol: str,
    precision: str,
    documents: str,
    length: int,
) -> Finetune:
    """The grid as the command line says it."""
    said: dict[str, Any] = {"protocol": protocol, "length": length}
    if precision or not _has_gpu():  # bf16 on a CPU without units for it takes 50 times as long
        said["precision"] = precision or "fp32"
    if documents:
        said["documents"] = documents
    rates = [_number(one, float, "--lrs", "1e-5,3e-5") for one in lrs.split(",")]
    if len(set(rates)) < len(rates) or not all(0 < rate < 1 for rate in rates):
        raise SpecError(
            f"--lrs {lrs}: rates lie between 0 and 1, each once; type for example --lrs 1e-5,3e-5"
        )
    numbers = _seeds(seeds)
    if not numbers or len(set(numbers)) < len(numbers):
        raise SpecError(f"--seeds {seeds}: at least one, each once; type for example --seeds 0-4 or 0,1,2")
    placed = tuple(replace(task, source=_absolute(task.source)) for task in tasks)
    return Finetune(placed, lrs=tuple(rates), seeds=tuple(numbers), **said)


def _absolute(source: str) -> str:
    """The plan that is saved is read from other folders too."""
    return source if source.startswith(("hf://", "builtin:")) else str(Path(source).expanduser().resolve())


def _seeds(text: str) -> list[int]:
    """0,1,2 or 0-4, or both: 0-2,7."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first, last) if dash else (first,)
        numbers = [_number(one, int, "--seeds", "0-4 or 0,1,2") for one in ends]
        found += range(numbers[0], numbers[-1] + 1)
    return found


def _number(text: str, kind: type, option: str, example: str) -> Any:
    try:
        return kind(text.strip())
    except ValueError:
        raise SpecError(f"{option}: {text!r} is no number; type for example {option} {example}") from None


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _run_of(model: str, store: Store) -> Pretrain:
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise SpecError(
                f"{model} has no config.json; give the folder of a transformers model, or the key of a state"
            )
        place = str(folder.resolve())  # the plan that is saved is read from other folders too
        return Pretrain(_name(folder.resolve().name), start=Hub(place))
    if re.fullmatch(rf"[0-9a-f]{{{SHORTEST_PREFIX},}}", model):
        found = sorted(path.name for path in store.states.glob(f"{model}*") if store.has(path))
        if len(found) == 1:
            return _run_up_to(found[0], store)
        said = f"{len(found)} states begin with it; type more digits" if found else "there is no such state"
        raise SpecError(f"{model} names no one state of {store.states}: {said}")
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(@[\w.-]+)?", model):
        source, _, revision = model.partition("@")
        if not revision:
            raise SpecError(
                f"{model} needs the commit that its page shows, so that the scores are of one model: "
                f"type {model}@<commit>"
            )
        return Pretrain(_name(source.split("/")[1]), start=Hub(source, revision=revision))
    raise SpecError(
        f"there is no model {model!r}: type a local folder, owner/name@commit, or the first digits of a key "
        "that biphase plan shows"
    )


def _run_up_to(state: str, store: Store) -> Pretrain:
    """The run that ends in a state of the store."""
    about = read_json(store.states / state / "state.json")
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


def _name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip(".-") or "model"
