"""What processes that train together leave for their parent, in files.

One line for all: who refuses first writes it, the parent prints it. And how each of them ended: after a signal,
torchrun tells only that there was one.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

PLACE = "BIPHASE_REFUSAL"  # the file of this launch
LOST = 3  # exit code of a process whose neighbour has gone


def leave_to_parent(line: str) -> bool:
    """Leave a line for the parent to print. False: there is none."""
    place = os.environ.get(PLACE)
    if not place:
        return False
    draft = Path(f"{place}.{os.getpid()}")
    with contextlib.suppress(OSError):
        draft.write_text(line, encoding="utf-8")
        try:
            os.link(draft, place)  # fails for all but the first
        finally:
            draft.unlink()
    return Path(place).is_file()


def note_beginning() -> None:
    """From now on a signal stops this process cleanly."""
    _note("begun", "")


def note_ending(code: int) -> None:
    """This process has come to its end, with this exit code."""
    _note("ended", str(code))


def _note(what: str, text: str) -> None:
    place, rank = os.environ.get(PLACE), os.environ.get("RANK")
    if place and rank:
        Path(f"{place}.{what}.{rank}").write_text(text, encoding="utf-8")


def endings(place: Path) -> dict[int, int | None]:
    """By rank of those that had begun: the exit code; None of one that did not come to its end."""
    found: dict[int, int | None] = {}
    for begun in place.parent.glob(f"{place.name}.begun.*"):
        ended = place.with_name(f"{place.name}.ended{begun.suffix}")
        found[int(begun.suffix[1:])] = int(ended.read_text(encoding="utf-8")) if ended.is_file() else None
    return found


def has_lost(error: BaseException) -> bool:
    """Did this process fail because another one has gone? Then it need not say so: the parent says what happened."""
    place, text = os.environ.get(PLACE), str(error)
    return bool(place) and (Path(str(place)).is_file() or ("gloo" in text and "peer" in text))
