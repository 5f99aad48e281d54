"""The usual form of a claim of a paper that scores the mean of all tasks of a study."""

from __future__ import annotations

from typing import Any

from biphase.report.contrasts import Statement, above


def claim(id: str, says: str, **fields: Any) -> Statement:
    """The claim that the first model scores above the second, on the mean over tasks; `fields` say more, or otherwise."""
    usual: dict[str, Any] = {"on": (), "contrasts": (above(on=None),), "figure": "objectives"}
    return Statement(id, says, **(usual | fields))
