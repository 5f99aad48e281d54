"""Schemas of the metadata files of results, checked when a file is read and before an archive is merged.

    shards/<key>/card.json              a tokenized corpus
    checkpoints/<key>/checkpoint.json   a checkpoint: its run, step and cost
    checkpoints/<key>/metrics.jsonl     the losses up to it, one JSON object per line
    trials/<key>/trial.json             the scores of a trial

The schema is checked even if a file's hash is right, because the file may come from an archive or from another version
of biphase. `read_card`, `read_checkpoint_file`, `read_trial_file` and `read_lines` return a checked value or raise
StoreError, which callers treat as a missing result. Fields beyond the schema are allowed. This module does not import
torch.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from biphase.errors import BiphaseError, StoreError, one_line
from biphase.keys import data_key
from biphase.records import decode, is_key
from biphase.specs import Corpus, Pretrain
from biphase.specs.tasks import ARRAYS, FAMILIES, RANGES
from biphase.store import read_verified

CARD, CHECKPOINT, LINES, TRIAL = "card.json", "checkpoint.json", "metrics.jsonl", "trial.json"
VALUES = "values.safetensors"
PREDICTIONS = "predictions.safetensors"  # absent from trials of earlier versions
PARTS = ("validation", "test")
_FAMILIES = {family.__name__: family for family in FAMILIES.values()}
ROUNDING = 1e-6  # tolerance for scores outside their range
# The exceptions that untrusted JSON can cause when it is read as ours.
WRONG = (BiphaseError, KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)

# ---------------------------------------------------------------- the schema


Check = Callable[[Any], bool]
# A shape is a check of a value, or an object with a shape for each field: a name that ends in ? is optional, and *
# stands for every field. Fields beyond the shape are allowed.
Shape = Mapping[str, "Shape | Check"] | Check


def _whole(least: int) -> Check:
    return lambda value: type(value) is int and least <= value < 2**63


def _finite(least: float) -> Check:
    return lambda value: type(value) in (int, float) and least <= value <= sys.float_info.max


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def text(value: Any) -> bool:
    return isinstance(value, str)


whole, count, positive = _whole(1 - 2**63), _whole(0), _whole(1)
number, amount = _finite(-sys.float_info.max), _finite(0)
_CARD: Shape = {
    "corpus": {},
    "fingerprint": is_key,
    "tokenizer_fingerprint": is_key,
    **dict.fromkeys(("vocab", "eos_id", "mask_id", "train_tokens", "heldout_tokens"), count),
    "special_ids": lambda value: isinstance(value, list) and all(count(item) for item in value),
    "unigram_entropy": amount,
}
_CHECKPOINT: Shape = {
    "key": is_key,
    "run": {},
    "origin_step": count,
    "epochs": amount,  # of a blend, those of the corpus that was read most often
    "sources?": {"*": {"epochs": amount}},
    "times?": {"*": amount},
    "progress": {
        **dict.fromkeys(("step", "next_sample"), count),
        "seconds": amount,
        **dict.fromkeys(("tokens?", "skipped?", "nonfinite_in_a_row?", "micro_rows?", "threads?"), count),
        **dict.fromkeys(("flops?", "joules?"), _or_none(number)),
        "world?": positive,
        "shard?": text,
        "machine?": {"*": text},
        "segments?": lambda value: (
            isinstance(value, list)
            and all(_fit(each, {"first_step": count, "machine": {"*": text}}) for each in value)
        ),
    },
}
_LINE: Shape = {
    "step": count,
    "loss?": _or_none(number),
    "objective?": text,
    "tokens?": count,
    "seconds?": amount,
    "heldout?": {"*": number},
}
_TRIAL: Shape = {
    "key": is_key,
    "model": is_key,
    "task": {"name": text, "form": {"kind": text}},
    "trained_on": _or_none(lambda value: isinstance(value, dict)),
    "finetune": {"protocol": text},
    "lr": number,
    "seed": whole,
    "metric": text,
    "scores": {"validation": {"*": number}, "test?": {"*": number}},
    "examples": {"validation": positive, "test?": positive},
    "seconds": {"*": amount},
    "machine": {"*": text},
    "training?": is_key,
    "share?": lambda value: number(value) and 0 < value < 1,  # of the steps, if it screens learning rates
    "documents?": text,  # searched, if not those of `finetune`
    "steps?": count,
    "baselines?": {"*": {"*": {"what": text, **dict.fromkeys(PARTS, number)}}},
    "constant?": lambda value: (
        isinstance(value, dict) and set(value) <= set(PARTS) and all(map(text, value.values()))
    ),
}


def _fit(value: Any, shape: Shape, where: str = "it") -> Any:
    """Return `value` if it has the shape, else raise StoreError with the path of the wrong field."""
    if callable(shape):
        if not shape(value):
            raise StoreError(f"{where} is {str(value)[:40]!r}")
        return value
    if not isinstance(value, dict):
        raise StoreError(f"{where} is no object")
    for name, inner in shape.items():
        field = name.removesuffix("?")
        for each in value if field == "*" else (field,):
            if each in value:
                _fit(value[each], inner, f"{where}.{each[:40]}".removeprefix("it."))
            elif field == name:
                raise StoreError(f"{where}.{field} is missing".removeprefix("it."))
    return value


def check_card(card: Any, key: str) -> dict[str, Any]:
    """Check the card of a tokenized corpus, and that `key` is the key of what it describes."""
    _fit(card, _CARD)
    corpus = decode(card["corpus"])
    fingerprints = card["fingerprint"], card["tokenizer_fingerprint"]
    if not isinstance(corpus, Corpus) or data_key(corpus, *fingerprints) != key:
        raise StoreError(f"it is not the card of the corpus {key}")
    return card


def check_checkpoint(checkpoint: Any, key: str) -> dict[str, Any]:
    _fit(checkpoint, _CHECKPOINT)
    if checkpoint["key"] != key or checkpoint["run"].get("kind") != Pretrain.__name__:
        raise StoreError(f"it is not of the checkpoint {key}")
    return checkpoint


def check_line(line: Any) -> dict[str, Any]:
    return _fit(line, _LINE)


def check_trial(trial: Any, key: str) -> dict[str, Any]:
    """Check a trial: its metrics must be those of its task family, and every score must lie in its range.

    A trial that screens learning rates has validation scores only, every other has both.
    """
    _fit(trial, _TRIAL)
    if trial["key"] != key:
        raise StoreError(f"it is not of the trial {key}")
    family = _FAMILIES.get(trial["task"]["form"]["kind"])
    if family is None or trial["metric"] != family.selects.get(trial["finetune"]["protocol"]):
        raise StoreError(f"metric is {trial['metric'][:40]!r}")
    parts = PARTS[:1] if "share" in trial else PARTS
    if set(trial["scores"]) != set(parts) or set(trial["examples"]) != set(parts):
        raise StoreError(f"scores and examples are not of {' and '.join(parts)}")
    for part in parts:
        if trial["metric"] not in trial["scores"][part]:
            raise StoreError(f"scores.{part} lacks {trial['metric']}")
        for name, score in trial["scores"][part].items():
            low, high = RANGES.get(name, (0.0, 1.0))
            if name not in family.metrics or not low - ROUNDING <= score <= high + ROUNDING:
                raise StoreError(f"scores.{part}.{name[:40]} is {score}, and goes from {low:g} to {high:g}")
    return trial


# ---------------------------------------------------------------- per-example values of a trial


MEAN = 1e-4  # tolerance between a score and the mean of its per-example values, which are rounded
NUMBERS_OF = dict(ARRAYS.values())  # of arrays with several numbers for each example, how many


def check_values(file: str, content: bytes, about: dict[str, Any]) -> None:
    """Check the per-example values of the trial `about`.

    Each array must hold one finite number per example, within the metric's range, and its mean must equal the score; or
    several numbers, as the three counts of entities, which must not be negative.
    """
    import numpy as np

    for name, array in check_arrays(file, content).items():
        values = array.astype("f8")
        part, _, metric = name.partition("/")
        examples, score = about["examples"][part], about["scores"][part].get(metric)
        several = NUMBERS_OF.get(metric, 0)
        shape = (examples, several) if several else (examples,)
        beyond = 0.0 if metric.endswith("counts") else -np.inf, np.inf
        low, high = beyond if several else RANGES.get(metric, (0.0, 1.0))
        wrong = ""
        if values.shape != shape:
            wrong = f"is {list(values.shape)} and should be {list(shape)}"
        elif not np.isfinite(values).all():
            wrong = "has numbers that are not finite"
        elif several or score is not None:
            if values.min() < low - ROUNDING or values.max() > high + ROUNDING:
                wrong = f"goes beyond {low:g} to {high:g}"
            elif not several and abs(values.mean() - score) > MEAN:
                wrong = f"is {values.mean():.4f} on average, and the score is {score}"
        if wrong:
            raise StoreError(f"{file}: {name!r} {wrong}")


def check_arrays(file: str, content: bytes) -> dict[str, Any]:
    """Load a safetensors file; its arrays must be numbers whose names begin with a split."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(content)
    except (SafetensorError, *WRONG) as wrong:  # the latter for types that numpy does not have
        raise StoreError(f"{file} cannot be read: {one_line(wrong)}") from None
    for name, array in arrays.items():
        part, _, metric = name.partition("/")
        if part not in PARTS or not metric or array.dtype.kind not in "biuf":
            raise StoreError(f"{file} has {name[:60]!r} of the type {array.dtype}")
    return arrays


# ---------------------------------------------------------------- files of the store


def read_card(folder: Path) -> dict[str, Any]:
    return _read(folder, CARD, lambda content: check_card(json.loads(content), folder.name))


def read_checkpoint_file(folder: Path) -> dict[str, Any]:
    return _read(folder, CHECKPOINT, lambda content: check_checkpoint(json.loads(content), folder.name))


def read_trial_file(folder: Path) -> dict[str, Any]:
    return _read(folder, TRIAL, lambda content: check_trial(json.loads(content), folder.name))


def read_lines(folder: Path, holding: bytes = b"") -> list[dict[str, Any]]:
    """Read the metrics of a checkpoint; with `holding`, parse only the lines that contain those bytes.

    The filter saves parsing a long training curve for a few lines.
    """

    def parse(content: bytes) -> list[dict[str, Any]]:
        return [check_line(json.loads(line)) for line in io.BytesIO(content) if holding in line]

    return _read(folder, LINES, parse)


def _read(folder: Path, name: str, parse: Callable[[bytes], Any]) -> Any:
    content = read_verified(folder, name)
    try:
        return parse(content)
    except WRONG as error:
        why = one_line(error)[:200]
        raise StoreError(
            f"{folder / name} is not as biphase writes it ({why}); remove {folder} and run the study again"
        ) from None
