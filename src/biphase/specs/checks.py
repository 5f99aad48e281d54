"""Checks that several records share."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from biphase.errors import SpecError

LONGEST_NAME = 200  # bytes; file systems allow 255, and names get suffixes


def positive(made: Any, name: str) -> None:
    if getattr(made, name) < 1:
        raise SpecError(f"{type(made).__name__}.{name} must be at least 1, it is {getattr(made, name)}")


def ratio_between_0_and_1(where: str, value: float) -> None:
    if not 0 < value < 1:
        hint = f"; did you mean {value / 100:g}?" if 1 <= value < 100 else ""
        raise SpecError(f"{where}: a masking ratio lies between 0 and 1, not {value:g}{hint}")


def one_name(where: str, name: str) -> None:
    """Raise SpecError unless `name` can be the name of a folder."""
    if not name or PurePath(name).name != name or name in (".", ".."):
        raise SpecError(f"{where}: a name is one word without slashes, not {name!r}")
    if not name.isprintable() or len(name.encode()) > LONGEST_NAME:
        raise SpecError(
            f"{where}: a name has at most {LONGEST_NAME} bytes, all of which can be printed, not {name[:40]!r}"
        )


def pinned(where: str, revision: str) -> None:
    """Raise SpecError if a revision is a branch: its content can change, so the study would not be reproducible."""
    if revision in ("main", "master") or revision.startswith("refs/"):
        raise SpecError(f"{where}: {revision!r} is a branch and moves; give the commit that its page shows")
