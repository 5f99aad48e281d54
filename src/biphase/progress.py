"""Progress display on stderr: on a terminal one line that is overwritten, in a log file one line per minute."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import TextIO

from biphase.text import fit, printable

MINUTE = 60.0  # seconds between two lines of a log


def seconds_between(on_terminal: float) -> float:
    """Return the seconds between two progress updates: `on_terminal` on a terminal, 60 in a log file."""
    return on_terminal if sys.stderr.isatty() else MINUTE


def columns(stream: TextIO) -> int:
    """Return how many characters fit a line of a terminal; 0: any, for a file or a pipe.

    COLUMNS counts for a terminal only: some programs export it to others whose output is a file.
    """
    if not stream.isatty():
        return 0
    with contextlib.suppress(ValueError):
        if wide := int(os.environ.get("COLUMNS", "0")):
            return wide
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(stream.fileno()).columns
    return 0


class Live:
    """Displays the current activity; call it with a text to update, with "" to end.

    In a log file, activity that lasts longer than a minute is printed once per minute.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled, self.terminal = enabled, sys.stderr.isatty()
        self.text, self.began = "", 0.0
        self._beats: threading.Thread | None = None

    def __call__(self, text: str) -> None:
        if not self.text:
            self.began = time.monotonic()
        self.text = printable(text)
        if self.enabled and self.terminal:
            # A line that is wrapped could not be overwritten. What is done has a name and, after three spaces, a state.
            line = fit(self.text.split("   "), columns(sys.stderr) - 3, gap="   ")
            sys.stderr.write(f"\r\x1b[K{'  ' if text else ''}{line}")
            sys.stderr.flush()
        elif self.enabled and text and self._beats is None:
            self._beats = threading.Thread(target=self._beat, name="progress", daemon=True)
            self._beats.start()

    def _beat(self) -> None:
        while not threading.Event().wait(MINUTE):
            if self.text and time.monotonic() - self.began >= MINUTE:
                print(f"  {self.text}", file=sys.stderr, flush=True)
