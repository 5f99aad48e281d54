"""One line for all processes that train together: who refuses first writes it, their parent prints it."""

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


def has_lost(error: BaseException) -> bool:
    """Did this process fail because another one has gone? Then it need not say so: the parent says what happened."""
    place, text = os.environ.get(PLACE), str(error)
    return bool(place) and (Path(str(place)).is_file() or ("gloo" in text and "peer" in text))
