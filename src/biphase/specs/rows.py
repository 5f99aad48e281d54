"""How the rows of a task are read: templates over their columns, and the numbers of their labels."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from biphase.errors import SpecError

# ---------------------------------------------------------------- templates


def columns_of(where: str, template: str) -> tuple[str, ...]:
    """Return the columns that a template names; raise SpecError if it is not a valid template."""
    try:
        parts = _parsed(template)
    except ValueError as wrong:
        raise SpecError(f"{where}: {template!r} is no template ({wrong}); write {{column}}") from None
    names = tuple(dict.fromkeys(name for _, name, _, _ in parts if name is not None))
    plain = all(
        not re.search(r"[\w{}]", spec or "") and not conversion
        for _, name, spec, conversion in parts
        if name is not None
    )
    if not names or not plain or not all(name.isidentifier() for name in names):
        raise SpecError(f"{where}: {template!r} must name columns and nothing else, e.g. '{{sentence}}'")
    return names


@lru_cache
def _parsed(template: str) -> tuple[tuple[str, str | None, str | None, str | None], ...]:
    return tuple(string.Formatter().parse(template))


def filled(template: str, values: Mapping[str, Any]) -> str:
    """Fill in a template's columns; `{title:. }` inserts the title and ". ", or nothing if it is empty."""
    texts = []
    for literal, name, after, _ in _parsed(template):
        value = "" if name is None or values[name] is None else str(values[name])
        texts += [literal, value, after or "" if value and not value.isspace() else ""]
    return "".join(texts)


def filled_row(template: str, values: Mapping[str, Any]) -> str:
    """Fill in a template from a row; raise ValueError if a column, or all of them, have no text.

    A row may leave the columns empty that are written with a suffix, as `{title:. }`.
    """
    for _, name, after, _ in _parsed(template):
        value = values[name] if name else ""
        if not isinstance(value, (str, int, float)) and (value is not None or not after):
            raise ValueError(f"has no text in {name!r}; correct the row")
    text = filled(template, values)
    if not text or text.isspace():
        raise ValueError("has no text; correct or remove the row")
    return text


# ---------------------------------------------------------------- labels


def check_distinct(where: str, labels: tuple[str, ...]) -> None:
    """Raise SpecError unless these are at least two different labels."""
    if len(labels) < 2 or len(set(labels)) != len(labels):
        raise SpecError(f"{where} must be at least two, all different, not {labels}")


TRUTH = {"false": 0, "true": 1}


class Numbering:
    """Maps labels to their numbers.

    A label may be written as its name, as its number (2, 2.0, "2"), or as true or false if there are two. Names take
    precedence over numbers: where labels are called "1" to "5", a 1 is the label called "1", and 0 is no label. With
    `numbered` the files hold numbers only.
    """

    def __init__(self, labels: Sequence[str], *, numbered: bool = False) -> None:
        self.labels = tuple(labels)
        self.names = {} if numbered else {name: number for number, name in enumerate(labels)}
        self.by_number = numbered or not any(whole(name) is not None for name in labels)
        self.cache: dict[tuple[type, Any], int | None] = {}

    def __call__(self, value: Any) -> int | None:
        """Return the number of a label, or None if it is not one."""
        if isinstance(value, (list, dict)):
            return None
        key = (type(value), value)  # distinguishes True from 1
        if key not in self.cache:
            self.cache[key] = self._find(value)
        return self.cache[key]

    def _find(self, value: Any) -> int | None:
        text = str(value)
        if isinstance(value, float) and value.is_integer():
            text = str(int(value))
        if text in self.names:
            return self.names[text]
        truth = TRUTH.get(text.lower())
        if truth is not None:
            return self.names.get(text.lower(), truth if len(self.labels) == 2 else None)
        number = whole(text) if self.by_number else None
        return number if number is not None and 0 <= number < len(self.labels) else None

    def of(self, value: Any) -> int:
        """Return the number of a label; raise ValueError if it is not one."""
        number = self(value)
        if number is not None:
            return number
        if whole(str(value)) == -1:
            raise ValueError(
                "has the label -1: these rows are unlabelled, as GLUE's test is; "
                "score on a part that has labels, e.g. --test FILE, or Splits(test='validation*')"
            )
        shown = ", ".join(self.labels[:8]) + (", …" if len(self.labels) > 8 else "")
        raise ValueError(
            f"has the label {value!r}, which is none of {shown}; correct the row, or the task's labels"
        )

    def by_place(self, value: Any) -> bool:
        """Whether a value is a label by its number and not by its name."""
        return str(value) not in self.names and self(value) is not None


def whole(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
