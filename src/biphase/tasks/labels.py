"""Labels as files write them → their numbers; and the labels of data that nobody has listed.

A label may stand there as its name, as its number (2, 2.0, "2"), or as true or false where there are two. A name
goes before a number: where labels are called "1" to "5", a 1 is the one called "1", and 0 is none of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from biphase.errors import SpecError
from biphase.tasks.tables import read

MOST_LABELS = 1_000
_WHOLE = re.compile(r"-?\d+")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_TRUTH = {"false": 0, "true": 1}


class Numbering:
    """The number of each label of a list."""

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = tuple(labels)
        self.names = {name: number for number, name in enumerate(labels)}
        self.by_number = not any(_whole(name) is not None for name in labels)
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

    def refusal(self, value: Any) -> str:
        """What to say of a value that is no label."""
        if _whole(str(value)) == -1:
            return (
                "has the label -1: these rows are unlabelled, as GLUE's test is; "
                "score on a part that has labels, e.g. Splits(test='validation*')"
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
