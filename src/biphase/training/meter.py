"""The metrics of a training job: JSON lines, trackers, and a line on the terminal."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor

from biphase.errors import TrainingError
from biphase.progress import MINUTE, columns
from biphase.text import duration, fit, si, sparkline
from biphase.training.loop import StepReading
from biphase.training.options import RuntimeOptions

# Steps. A read waits until all but the last BEHIND are computed; those keep the device busy meanwhile.
READ_EVERY, BEHIND = 10, 8
NONFINITE_LIMIT = 20  # consecutive skipped steps after which training fails
CURVE = 8  # width of the loss curve in characters


class Meter:
    """Collects the metrics of one training job: JSON lines, trackers, and a line on the terminal."""

    def __init__(
        self,
        *,
        title: str,
        origin: int,  # steps taken by the runs before this one
        first: int,
        until: int,
        tokens_per_step: float,
        every: int = 1,  # steps between reads
        behind: int = 0,  # steps left queued on the device while the host reads
        lines: list[dict[str, Any]] | None = None,
        nonfinite_in_a_row: int = 0,
        options: RuntimeOptions,  # trackers, the copy of the lines for live reports, what the progress line shows
        out: TextIO | None = None,  # default: the current stderr
    ) -> None:
        self.lines = list(lines or [])
        self.title, self.origin, self.first, self.until = title, origin, first, until
        self.tokens_per_step, self.every, self.behind = tokens_per_step, every, behind
        self.waiting: list[tuple[int, dict[str, Any], StepReading]] = []
        self.nonfinite_in_a_row = nonfinite_in_a_row
        self.skipped = 0
        self.last_shown = time.monotonic()
        self.tracked = options.tracked
        if self.tracked:
            self.tracked.lines = list(self.lines)
        self.live_path = options.live
        self.live_lines: TextIO | None = None
        self.out = out or sys.stderr
        self.quiet, self.live = options.quiet, self.out.isatty() and not options.quiet
        self.study_left = options.study_left
        self.rate = math.nan
        self._mark = (time.monotonic(), first)  # time and step from which the rate is measured

    def step(self, step: int, facts: dict[str, Any], outcome: Tensor) -> None:
        """Record one step with its loss, gradient norm and nonfinite flag; they are read every `every` steps."""
        self.waiting.append((step, facts, StepReading(outcome.detach())))
        if step + 1 == self.until or len(self.waiting) >= self.every + self.behind:
            self.flush(but=0 if step + 1 == self.until else self.behind)

    def flush(self, *, but: int = 0) -> None:
        """Read the recorded steps, except the last `but`, which the device may still be computing."""
        read = len(self.waiting) - but
        ready, self.waiting = self.waiting[:read], self.waiting[read:]
        for step, facts, reading in ready:
            loss, norm, nonfinite = reading.read()
            line: dict[str, Any] = {
                "step": self.origin + step + 1,
                "loss": _number(loss),
                "norm": _number(norm),
                **facts,
            }
            if nonfinite:
                self.nonfinite_in_a_row += 1
                self.skipped += 1
                line["skipped"] = True
                self.say(
                    f"step {line['step']:,} skipped: loss {line['loss']}, gradient norm {line['norm']}, "
                    f"samples {line['samples'][0]} to {line['samples'][1]}"
                )
            else:
                self.nonfinite_in_a_row = 0
                line.pop("samples", None)
            self._keep(line)
            if self.nonfinite_in_a_row >= NONFINITE_LIMIT:
                self.waiting.clear()  # training ends here
                raise TrainingError(
                    f"{NONFINITE_LIMIT} steps in a row had no finite loss or gradient, the last at step "
                    f"{line['step']:,} with samples {line['samples'][0]} to {line['samples'][1]}; "
                    "lower schedule=WSD(peak=…) or look at the text there"
                )
        if self.live_lines:
            self.live_lines.flush()
        if ready:
            now, done = time.monotonic(), ready[-1][0] + 1
            elapsed = now - self._mark[0]
            if elapsed > 1 or math.isnan(self.rate):
                self.rate = (done - self._mark[1]) * self.tokens_per_step / max(elapsed, 1e-9)
                self._mark = (now, done)
            self._show(self.lines[-1], done)

    def event(self, step: int, **facts: Any) -> None:
        """Record something that is not a step, e.g. held-out losses."""
        self.flush()
        self._keep({"step": self.origin + step, **facts})
        if self.live_lines:
            self.live_lines.flush()

    def leave_out(self, seconds: float) -> None:
        """Exclude `seconds` without steps from the measured rate."""
        at, step = self._mark
        self._mark = (at + seconds, step)

    def say(self, text: str) -> None:
        """Print a line above the progress line."""
        if not self.quiet:
            self.out.write(f"\r\x1b[K{text}\n" if self.live else f"{text}\n")
            self.out.flush()

    def close(self) -> None:
        self.flush()
        if self.live:
            self.out.write("\r\x1b[K")
        if self.live_lines:
            self.live_lines.close()
            self.live_lines = None

    def _show(self, line: dict[str, Any], done: int) -> None:
        now = time.monotonic()
        if self.quiet or (now - self.last_shown < (0.2 if self.live else MINUTE) and done != self.until):
            return
        self.last_shown = now
        left = duration((self.until - done) * self.tokens_per_step / self.rate)
        study = self.study_left()
        thinned = self.lines[:: len(self.lines) // 1000 + 1]  # a long run has many, and this is called often
        losses = [each["loss"] for each in thinned if each.get("loss") is not None]
        text = fit(
            (
                self.title,
                f"step {self.origin + done:,}/{self.origin + self.until:,}",
                f"loss {line['loss'] or math.nan:.3f} {sparkline(losses, CURVE)}",
                f"lr {line['rate']:.2e}",
                f"{si(self.rate)}tok/s",
                f"{left}, study {study} left" if study else f"{left} left",
            ),
            columns(self.out) - 3,
            spare=(3, 4),
        )
        self.out.write(f"\r\x1b[K  {text}" if self.live else f"  {text}\n")
        self.out.flush()

    def _keep(self, line: dict[str, Any]) -> None:
        # Opened lazily, so that a training job that fails before its first line leaves no file open.
        if self.live_path:
            self.live_lines, self.live_path = _live(self.live_path, self.text()), None
        self.lines.append(line)
        if self.tracked:
            self.tracked.log(line)
        if self.live_lines:
            self.live_lines.write(_text(line))

    def text(self) -> str:
        """Return all lines as JSON."""
        return "".join(map(_text, self.lines))


def _text(line: dict[str, Any]) -> str:
    return json.dumps(line) + "\n"


def _live(path: Path, text: str) -> TextIO | None:
    """Open the live file and write the lines so far. It is for display only, so a disk error is ignored."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w", encoding="utf-8")
        file.write(text)
        file.flush()
        return file
    return None


def _number(value: float) -> float | None:
    """Return a float that JSON can represent; None if it is nonfinite."""
    return value if math.isfinite(value) else None
