"""`biphase evaluate MODEL` as a study: one result that is there already, and what it is fine-tuned on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from biphase.errors import SpecError
from biphase.files import Store
from biphase.records import encode, key
from biphase.specs import Finetune, Study, Task
from biphase.study.model_names import run_named


def evaluation(model: str, finetune: Finetune, store: Store) -> Study:
    """The study of one model: a local folder, owner/name@revision, or the key of a state of this store."""
    run = run_named(model, store)
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
    if precision or not has_gpu():  # bf16 on a CPU without units for it takes 50 times as long
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
    placed = tuple(replace(task, source=absolute(task.source)) for task in tasks)
    return Finetune(placed, lrs=tuple(rates), seeds=tuple(numbers), **said)


def absolute(source: str) -> str:
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


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
