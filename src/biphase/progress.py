"""Progress display on stderr: on a terminal one line that is overwritten, in a log file one line per minute."""

from __future__ import annotations

import sys
import threading
import time

from biphase.text import printable

MINUTE = 60.0  # seconds between two lines of a log


def seconds_between(on_terminal: float) -> float:
    """Return the seconds between two progress updates: `on_terminal` on a terminal, 60 in a log file."""
    return on_terminal if sys.stderr.isatty() else MINUTE


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
            sys.stderr.write(f"\r\x1b[K{'  ' if text else ''}{self.text}")
            sys.stderr.flush()
        elif self.enabled and text and self._beats is None:
            self._beats = threading.Thread(target=self._beat, name="progress", daemon=True)
            self._beats.start()

    def _beat(self) -> None:
        while not threading.Event().wait(MINUTE):
            if self.text and time.monotonic() - self.began >= MINUTE:
                print(f"  {self.text}", file=sys.stderr, flush=True)
