"""Labels as files write them → their numbers; and the labels of data that nobody has listed.

A label may stand there as its name, as its number (2, 2.0, "2"), or as true or false where there are two. A name
goes before a number: where labels are called "1" to "5", a 1 is the one called "1", and 0 is none of them, unless
metadata names the labels and the rows are known to hold numbers alone.

The names of numbers that nobody has listed stand beside the rows: in labels.json or label.json, in what the `datasets`
library notes in parquet and arrow files, in dataset_infos.json or dataset_info.json, or at the top of README.md.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from biphase.errors import SpecError, one_line
from biphase.tasks.files import INFOS, LISTS, kind_of, read, schema_of

MOST_LABELS = 1_000
CARDS = (*INFOS, "README.md")  # of a dataset, with its columns
_WHOLE = re.compile(r"-?\d+")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_TRUTH = {"false": 0, "true": 1}


class Numbering:
    """The number of each label of a list; with `numbered`, the files hold numbers alone."""

    def __init__(self, labels: Sequence[str], *, numbered: bool = False) -> None:
        self.labels = tuple(labels)
        self.names = {} if numbered else {name: number for number, name in enumerate(labels)}
        self.by_number = numbered or not any(_whole(name) is not None for name in labels)
        self.known: dict[tuple[type, Any], int | None] = {}

    def __call__(self, value: Any) -> int | None:
        """Its number; None if it is no label."""
        if isinstance(value, (list, dict)):
            return None
        seen = (type(value), value)  # True is not 1 here
        if seen not in self.known:
            self.known[seen] = self._find(value)
        return self.known[seen]

    def _find(self, value: Any) -> int | None:
        text = str(value)
        if isinstance(value, float) and value.is_integer():
            text = str(int(value))
        if text in self.names:
            return self.names[text]
        truth = _TRUTH.get(text.lower())
        if truth is not None:
            return self.names.get(text.lower(), truth if len(self.labels) == 2 else None)
        number = _whole(text) if self.by_number else None
        return number if number is not None and 0 <= number < len(self.labels) else None

    def by_place(self, value: Any) -> bool:
        """Is it a label by its place in the list, and not by its name?"""
        return str(value) not in self.names and self(value) is not None

    def refusal(self, value: Any) -> str:
        """What to say of a value that is no label."""
        if _whole(str(value)) == -1:
            return (
                "has the label -1: these rows are unlabelled, as GLUE's test is; "
                "score on a part that has labels, e.g. --test FILE, or Splits(test='validation*')"
            )
        shown = ", ".join(self.labels[:8]) + (", …" if len(self.labels) > 8 else "")
        return f"has the label {value!r}, which is none of {shown}; correct the row, or the task's labels"


def _whole(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


# ---------------------------------------------------------------- labels of data that nobody has listed


def values_of(whose: str, files: Sequence[Path], column: str, *, lists: bool = False) -> set[Any]:
    """The values of a column, or of the lists it holds. A blank, or a space around one, makes no label."""
    found: set[Any] = set()
    for rows in read(whose, files, (column,)):
        for row, value in enumerate(rows.columns[column]):
            wrong = "has no list of labels" if lists and not isinstance(value, list) else ""
            if isinstance(value, list) and not lists:
                wrong = "has a list, and one label a row is read,"
            for one in value if isinstance(value, list) and lists else (value,):
                wrong = wrong or _no_label(one)
            if wrong:
                raise SpecError(
                    f"{whose}: {rows.place(row)} {wrong} in {column!r}; correct or remove the row"
                )
            found.update(value) if lists else found.add(value)
        if len(found) > MOST_LABELS:
            raise SpecError(
                f"{whose}: column {column!r} has over {MOST_LABELS:,} values; name that of the labels: --label COLUMN"
            )
    return found


def in_order(whose: str, column: str, values: set[Any]) -> tuple[str, ...]:
    """Labels in order: numbers by size, everything else by name."""
    numbers = (one for one in values if is_number(one) and not isinstance(one, int))
    measure = next((one for one in numbers if not float(one).is_integer()), None)
    if measure is not None:
        raise SpecError(
            f"{whose}: column {column!r} holds measures, not labels, e.g. {measure}; "
            "name another: --label COLUMN, or say the labels: --labels NAMES"
        )
    names = {str(int(one)) if isinstance(one, float) else str(one) for one in values}
    return tuple(sorted(names, key=int) if all(map(_WHOLE.fullmatch, names)) else sorted(names))


def is_number(value: Any) -> bool:
    """Is it a number, or the text of one?"""
    return isinstance(value, (int, float)) or (isinstance(value, str) and bool(_NUMBER.fullmatch(value)))


def _no_label(value: Any) -> str:
    """What is wrong with a value that can be no label."""
    if value is None or isinstance(value, (list, dict)) or value != value:  # NaN is not itself
        return "has no label"
    if isinstance(value, str) and not value.strip():
        return "has no label"
    if isinstance(value, str) and value != value.strip():
        return f"has the label {value!r}, with a space before or after it,"
    return ""


# ---------------------------------------------------------------- the names of numbers


def named(whose: str, files: Sequence[Path], root: Path, column: str, values: set[Any]) -> tuple[str, ...]:
    """The names of labels that are numbers, in order, where they stand beside the files or in their metadata.

    `root`: the folder the user named. Nothing is found for labels that are names already.
    """
    numbers = {_whole(str(one)) for one in values}
    if not numbers or None in numbers:
        return ()
    path, names = _names_beside(whose, files[0], root, column)
    strange = sorted(one for one in numbers if one is not None and not 0 <= one < len(names))
    if names and strange and not {str(one) for one in values} <= set(names):
        raise SpecError(
            f"{whose}: {path} names {len(names)} labels, and column {column!r} holds the number {strange[0]}; correct it, "
            "or say the labels: --labels NAMES"
        )
    return names


def are_places(names: Sequence[str], values: set[Any]) -> bool:
    """Are all values numbers of names that metadata lists, some of which are written as numbers themselves?"""
    written = any(_whole(one) is not None for one in names)
    return written and all(_whole(str(one)) in range(len(names)) for one in values)


def _names_beside(whose: str, file: Path, root: Path, column: str) -> tuple[Path, tuple[str, ...]]:
    """The first names that are found for a column, and the file that says them.

    The card of a repository stands above the folder of a configuration; there only what it says of that one counts.
    """
    there, top = file.resolve(), root.resolve()
    inside = [one for one in there.parents if one.is_relative_to(top)] or [there.parent]
    beside = [folder / name for folder in inside for name in (*LISTS, *CARDS)]
    for path in (*beside[: len(LISTS)], there, *beside, *(top.parent / name for name in CARDS)):
        if path.name in LISTS and path.is_file():
            _refuse_damaged(whose, path)
        with contextlib.suppress(Exception):  # absent, or no metadata: then it says nothing
            found = dict(_said(path, column))  # by configuration
            own = {config: names for config, names in found.items() if config in there.parts}
            if path.parent == top.parent and top.name != "data":
                found = own
            if len(set((own or found).values())) == 1:
                return path, next(iter((own or found).values()))
    return file, ()


def _refuse_damaged(whose: str, path: Path) -> None:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as wrong:
        raise SpecError(
            f"{whose}: {path} cannot be read ({one_line(wrong)}); correct or remove it, or say the labels: --labels NAMES"
        ) from None


def _said(path: Path, column: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What a file says of the names of a column's labels, by configuration."""
    if kind_of(path.name)[0] in (".parquet", ".arrow"):
        infos = {"": json.loads(schema_of(path).metadata[b"huggingface"])["info"]}
    elif path.name == "README.md":
        from huggingface_hub import metadata_load

        said = (metadata_load(path) or {})["dataset_info"]
        infos = {one.get("config_name", ""): one for one in (said if isinstance(said, list) else [said])}
    else:
        said = json.loads(path.read_text(encoding="utf-8"))
        if path.name in LISTS:
            by_column = isinstance(said, dict) and any(isinstance(one, list) for one in said.values())
            infos = {"": {"features": {column: {"names": said.get(column) if by_column else said}}}}
        else:
            infos = {"": said} if "features" in said else said
    for config, info in infos.items():
        features = info["features"]
        if isinstance(features, list):  # so in a card: each with its name
            features = {one.get("name"): one for one in features}
        names = _listed(_names(features.get(column)))
        if names:
            yield config, names


def _names(feature: Any) -> Any:
    """The names in the description of a column, whose lists may be described one level deeper."""
    if not isinstance(feature, dict):
        return None
    if "names" in feature:
        return feature["names"]
    return next((found for one in feature.values() if (found := _names(one))), None)


def _listed(names: Any) -> tuple[str, ...]:
    """Names in the order of their numbers: a list, {"0": "bad"} or {"bad": 0}; nothing where they are no names."""
    if isinstance(names, dict):
        numbered = all(_WHOLE.fullmatch(str(one)) for one in names)
        pairs = names.items() if numbered else ((number, name) for name, number in names.items())
        by_number = {int(number): name for number, name in pairs}
        names = [by_number[number] for number in range(len(by_number))]
    labels = tuple(str(one) for one in names) if isinstance(names, list) else ()
    return labels if 1 < len(labels) == len(set(labels)) and all(map(str.strip, labels)) else ()
