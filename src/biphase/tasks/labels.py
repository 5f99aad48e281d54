"""Labels that a task does not list: inferred from the values of a column.

`values_of` and `in_order` collect the labels of a column; `named` finds names for numeric labels beside the rows:
in labels.json or label.json, in the `datasets` metadata of parquet and arrow files, in dataset_infos.json or
dataset_info.json, or in the header of README.md.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from biphase.errors import SpecError, one_line
from biphase.specs.tasks import whole
from biphase.tasks.files import INFOS, LISTS, kind_of, read_rows, schema_of

MOST_LABELS = 1_000
CARDS = (*INFOS, "README.md")  # files that describe a dataset's columns
_WHOLE = re.compile(r"-?\d+")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


# ---------------------------------------------------------------- inferred labels


def values_of(whose: str, files: Sequence[Path], column: str, *, lists: bool = False) -> set[Any]:
    """Return the values of a column, or of the lists it holds; refuse missing labels and labels with spaces around."""
    labels: set[Any] = set()
    for place, (value,) in read_rows(whose, files, (column,)):
        wrong = "has no list of labels" if lists and not isinstance(value, list) else ""
        if isinstance(value, list) and not lists:
            wrong = "has a list, and one label a row is read unless you type --family ML,"
        for label in value if isinstance(value, list) and lists else (value,):
            wrong = wrong or _no_label(label)
        if wrong:
            raise SpecError(f"{whose}: {place} {wrong} in {column!r}; correct or remove the row")
        labels.update(value) if lists else labels.add(value)
        if len(labels) > MOST_LABELS:
            raise SpecError(
                f"{whose}: column {column!r} has over {MOST_LABELS:,} values; name that of the labels: --label COLUMN"
            )
    return labels


def in_order(whose: str, column: str, values: set[Any]) -> tuple[str, ...]:
    """Return labels in order: numbers by size, everything else by name."""
    numbers = (value for value in values if is_number(value) and not isinstance(value, int))
    measure = next((number for number in numbers if not float(number).is_integer()), None)
    if measure is not None:
        raise SpecError(
            f"{whose}: column {column!r} holds measures, not labels, e.g. {measure}; "
            "name another: --label COLUMN, say the labels: --labels NAMES, or predict the numbers: --family SR"
        )
    names = {str(int(value)) if isinstance(value, float) else str(value) for value in values}
    return tuple(sorted(names, key=int) if all(map(_WHOLE.fullmatch, names)) else sorted(names))


def is_number(value: Any) -> bool:
    """Whether a value is a number, or the text of one."""
    return isinstance(value, (int, float)) or (isinstance(value, str) and bool(_NUMBER.fullmatch(value)))


def _no_label(value: Any) -> str:
    """Return why a value cannot be a label, or ""."""
    if value is None or isinstance(value, (list, dict)) or value != value:  # NaN differs from itself
        return "has no label"
    if isinstance(value, str) and not value.strip():
        return "has no label"
    if isinstance(value, str) and value != value.strip():
        return f"has the label {value!r}, with a space before or after it,"
    return ""


# ---------------------------------------------------------------- names of numeric labels


def named(whose: str, files: Sequence[Path], root: Path, column: str, values: set[Any]) -> tuple[str, ...]:
    """Return the names of numeric labels in order, from files beside the data or its metadata; () if none.

    `root`: the folder that the user named. Labels that are names already return ().
    """
    numbers = {whole(str(value)) for value in values}
    if not numbers or None in numbers:
        return ()
    path, names = _names_beside(whose, files[0], root, column)
    strange = sorted(number for number in numbers if number is not None and not 0 <= number < len(names))
    if names and strange and not {str(value) for value in values} <= set(names):
        raise SpecError(
            f"{whose}: {path} names {len(names)} labels, and column {column!r} holds the number {strange[0]}; correct it, "
            "or say the labels: --labels NAMES"
        )
    return names


def are_places(names: Sequence[str], values: set[Any]) -> bool:
    """Whether all values are indices into `names`, some of which look like numbers themselves."""
    numeric = any(whole(name) is not None for name in names)
    return numeric and all(whole(str(value)) in range(len(names)) for value in values)


def _names_beside(whose: str, file: Path, root: Path, column: str) -> tuple[Path, tuple[str, ...]]:
    """Return the first names found for a column, and the file they are from.

    A repository's card is above the folder of a configuration; from there only the names of that configuration count.
    """
    file, top = file.resolve(), root.resolve()
    inside = [folder for folder in file.parents if folder.is_relative_to(top)] or [file.parent]
    beside = [folder / name for folder in inside for name in (*LISTS, *CARDS)]
    for path in (*beside[: len(LISTS)], file, *beside, *(top.parent / name for name in CARDS)):
        if path.name in LISTS and path.is_file():
            _refuse_damaged(whose, path)
        with contextlib.suppress(Exception):  # a file that is absent or has no metadata is skipped
            by_config = dict(_label_names(path, column))
            own = {config: names for config, names in by_config.items() if config in file.parts}
            if path.parent == top.parent and top.name != "data":
                by_config = own
            if len(set((own or by_config).values())) == 1:
                return path, next(iter((own or by_config).values()))
    return file, ()


def _refuse_damaged(whose: str, path: Path) -> None:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as wrong:
        raise SpecError(
            f"{whose}: {path} cannot be read ({one_line(wrong)}); correct or remove it, or say the labels: --labels NAMES"
        ) from None


def _label_names(path: Path, column: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the label names that a file gives for a column, by configuration."""
    if kind_of(path.name)[0] in (".parquet", ".arrow"):
        infos = {"": json.loads(schema_of(path).metadata[b"huggingface"])["info"]}
    elif path.name == "README.md":
        from huggingface_hub import metadata_load

        card = (metadata_load(path) or {})["dataset_info"]
        infos = {info.get("config_name", ""): info for info in (card if isinstance(card, list) else [card])}
    else:
        content = json.loads(path.read_text(encoding="utf-8"))
        if path.name in LISTS:
            by_column = isinstance(content, dict) and any(isinstance(v, list) for v in content.values())
            infos = {"": {"features": {column: {"names": content.get(column) if by_column else content}}}}
        else:
            infos = {"": content} if "features" in content else content
    for config, info in infos.items():
        features = info["features"]
        if isinstance(features, list):  # in a card, features are a list of named entries
            features = {feature.get("name"): feature for feature in features}
        names = _listed(_names(features.get(column)))
        if names:
            yield config, names


def _names(feature: Any) -> Any:
    """Return the label names in a column's description, which may be nested for lists."""
    if not isinstance(feature, dict):
        return None
    if "names" in feature:
        return feature["names"]
    return next((names for inner in feature.values() if (names := _names(inner))), None)


def _listed(names: Any) -> tuple[str, ...]:
    """Return names in the order of their numbers from a list, {"0": "bad"} or {"bad": 0}; () if they are not valid."""
    if isinstance(names, dict):
        numbered = all(_WHOLE.fullmatch(str(name)) for name in names)
        pairs = names.items() if numbered else ((number, name) for name, number in names.items())
        by_number = {int(number): name for number, name in pairs}
        names = [by_number[number] for number in range(len(by_number))]
    labels = tuple(str(name) for name in names) if isinstance(names, list) else ()
    return labels if 1 < len(labels) == len(set(labels)) and all(map(str.strip, labels)) else ()
