"""Labels as files write them → their numbers.

A label may stand there as its name, as its number (2, 2.0, "2"), or as true or false where there are two. A name
goes before a number: where labels are called "1" to "5", a 1 is the one called "1", and 0 is none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
