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

import contextlib
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
from biphase.specs.tasks import FAMILIES, RANGES
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


def number(value: Any) -> bool:
    """Return whether a value is a finite number that fits a float."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def amount(value: Any) -> bool:
    return number(value) and value >= 0


def whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


def count(value: Any) -> bool:
    return whole(value) and value >= 0


def positive(value: Any) -> bool:
    return count(value) and value > 0


def text(value: Any) -> bool:
    return isinstance(value, str)


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _each(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a check for a JSON object all of whose values pass `check`."""
    return lambda value: isinstance(value, dict) and all(check(item) for item in value.values())


def _object(value: Any) -> bool:
    return isinstance(value, dict)


# A field name that ends in ? is optional.
Shape = Mapping[str, "Shape | Callable[[Any], bool]"]
_CARD: Shape = {
    "corpus": _object,
    "fingerprint": is_key,
    "tokenizer_fingerprint": is_key,
    **dict.fromkeys(("vocab", "eos_id", "mask_id", "train_tokens", "heldout_tokens"), count),
    "special_ids": lambda value: isinstance(value, list) and all(count(item) for item in value),
    "unigram_entropy": amount,
}
_CHECKPOINT: Shape = {
    "key": is_key,
    "run": _object,
    "origin_step": count,
    "epochs": amount,
    "progress": {
        **dict.fromkeys(("step", "next_sample"), count),
        "seconds": amount,
        **dict.fromkeys(("tokens?", "skipped?", "nonfinite_in_a_row?", "micro_rows?", "threads?"), count),
        **dict.fromkeys(("flops?", "joules?"), _or_none(number)),
        "world?": positive,
        "shard?": text,
        "machine?": _each(text),
    },
}
_LINE: Shape = {
    "step": count,
    "loss?": _or_none(number),
    "objective?": text,
    "tokens?": count,
    "seconds?": amount,
    "heldout?": _each(number),
}
_BASELINE: Shape = {"what": text, **dict.fromkeys(PARTS, number)}
_TRIAL: Shape = {
    "key": is_key,
    "model": is_key,
    "task": {"name": text, "form": {"kind": text}},
    "trained_on": _or_none(_object),
    "finetune": {"protocol": text},
    "lr": number,
    "seed": whole,
    "metric": text,
    "scores": dict.fromkeys(PARTS, _each(number)),
    "examples": dict.fromkeys(PARTS, positive),
    "seconds": _each(amount),
    "machine": _each(text),
    "training?": is_key,
    "steps?": count,
    "baselines?": _each(_each(lambda value: _fits(value, _BASELINE))),
    "constant?": lambda value: _each(text)(value) and set(value) <= set(PARTS),
}


def _fit(value: Any, shape: Shape | Callable[[Any], bool], where: str) -> None:
    if callable(shape):
        if not shape(value):
            raise StoreError(f"{where} is {str(value)[:40]!r}")
        return
    if not isinstance(value, dict):
        raise StoreError(f"{where or 'it'} is no object")
    for name, inner in shape.items():
        field = name.removesuffix("?")
        if field in value:
            _fit(value[field], inner, f"{where}.{field}" if where else field)
        elif field == name:
            raise StoreError(f"{where}.{field} is missing" if where else f"{field} is missing")


def _fits(value: Any, shape: Shape) -> bool:
    with contextlib.suppress(StoreError):
        _fit(value, shape, "")
        return True
    return False


def check_card(card: Any, key: str) -> dict[str, Any]:
    """Check the card of a tokenized corpus, and that `key` is the key of what it describes."""
    _fit(card, _CARD, "")
    corpus = decode(card["corpus"])
    fingerprints = card["fingerprint"], card["tokenizer_fingerprint"]
    if not isinstance(corpus, Corpus) or data_key(corpus, *fingerprints) != key:
        raise StoreError(f"it is not the card of the corpus {key}")
    return card


def check_checkpoint(checkpoint: Any, key: str) -> dict[str, Any]:
    _fit(checkpoint, _CHECKPOINT, "")
    if checkpoint["key"] != key or checkpoint["run"].get("kind") != Pretrain.__name__:
        raise StoreError(f"it is not of the checkpoint {key}")
    return checkpoint


def check_line(line: Any) -> dict[str, Any]:
    _fit(line, _LINE, "")
    return line


def check_trial(trial: Any, key: str) -> dict[str, Any]:
    """Check a trial: its metrics must be those of its task family, and every score must lie in its range."""
    _fit(trial, _TRIAL, "")
    if trial["key"] != key:
        raise StoreError(f"it is not of the trial {key}")
    family = _FAMILIES.get(trial["task"]["form"]["kind"])
    if family is None or trial["metric"] != family.selects.get(trial["finetune"]["protocol"]):
        raise StoreError(f"metric is {trial['metric'][:40]!r}")
    for part in PARTS:
        if trial["metric"] not in trial["scores"][part]:
            raise StoreError(f"scores.{part} lacks {trial['metric']}")
        for name, score in trial["scores"][part].items():
            low, high = RANGES.get(name, (0.0, 1.0))
            if name not in family.metrics or not low - ROUNDING <= score <= high + ROUNDING:
                raise StoreError(f"scores.{part}.{name[:40]} is {score}, and goes from {low:g} to {high:g}")
    return trial


# ---------------------------------------------------------------- per-example values of a trial


# Numeric types that are accepted: safetensors' name → numpy's.
NUMBERS = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip
MEAN = 1e-4  # tolerance between a score and the mean of its per-example values, which are rounded
COUNTS = "entity_counts"  # per example: correct, predicted and true entities


def check_values(file: str, content: bytes, about: dict[str, Any]) -> None:
    """Check the per-example values of the trial `about`.

    Each array must hold one finite number per example (three counts for entities), within the metric's range, and its
    mean must equal the score.
    """
    import numpy as np

    def need(condition: Any, why: str) -> None:
        if not condition:
            raise StoreError(f"{file}: {name!r} {why}")

    for name, array in check_arrays(file, content):
        part, _, metric = name.partition("/")
        examples = about["examples"][part]
        shape = [examples, 3] if metric == COUNTS else [examples]
        need(list(array["shape"]) == shape, f"is {array['shape']} and should be {shape}")
        values = np.frombuffer(array["data"], NUMBERS[array["dtype"]]).astype(np.float64)
        need(np.isfinite(values).all(), "has numbers that are not finite")
        score = about["scores"][part].get(metric)
        if metric == COUNTS:
            need((values >= 0).all(), "has counts below 0")
        elif score is not None:
            low, high = RANGES.get(metric, (0.0, 1.0))
            need(
                ((values >= low - ROUNDING) & (values <= high + ROUNDING)).all(),
                f"goes beyond {low:g} to {high:g}",
            )
            mean = values.mean()
            need(abs(mean - score) <= MEAN, f"is {mean:.4f} on average, and the score is {score}")


def check_arrays(file: str, content: bytes) -> list[tuple[str, Any]]:
    """Deserialize a safetensors file and check that array names begin with a split and that types are numeric."""
    from safetensors import SafetensorError, deserialize

    try:
        arrays = deserialize(content)
    except SafetensorError as wrong:
        raise StoreError(f"{file} cannot be read: {wrong}") from None
    for name, array in arrays:
        part, _, metric = name.partition("/")
        if part not in PARTS or not metric or array["dtype"] not in NUMBERS:
            raise StoreError(f"{file} has {name[:60]!r} of the type {array['dtype']}")
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
    return _read(
        folder,
        LINES,
        lambda content: [check_line(json.loads(line)) for line in io.BytesIO(content) if holding in line],
    )


def _read(folder: Path, name: str, parse: Callable[[bytes], Any]) -> Any:
    content = read_verified(folder, name)
    try:
        return parse(content)
    except WRONG as error:
        why = one_line(error)[:200]
        raise StoreError(
            f"{folder / name} is not as biphase writes it ({why}); remove {folder} and run the study again"
        ) from None
