"""Metrics of a training job: JSON lines, TensorBoard if it is installed, and a progress line on the terminal.

Losses stay on the device for several steps and are read together, so that the device does not wait for the host.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from biphase.progress import MINUTE
from biphase.text import duration, si


class Meter:
    """Collects and displays the metrics of one training job."""

    def __init__(
        self,
        *,
        title: str,
        origin: int,  # steps taken by the runs before this one
        first: int,
        until: int,
        tokens_per_step: int,
        flops_per_token: float | None = None,
        every: int = 1,  # steps between reads of the device
        lines: list[dict[str, Any]] | None = None,
        nonfinite_in_a_row: int = 0,
        board: Path | None = None,
        live: Path | None = None,  # a copy of the lines for live reports, written whenever the device is read
        out: TextIO | None = None,  # default: the current stderr
        quiet: bool = False,
    ) -> None:
        self.lines = list(lines or [])
        self.title, self.origin, self.first, self.until = title, origin, first, until
        self.tokens_per_step, self.flops_per_token, self.every = tokens_per_step, flops_per_token, every
        self.behind = 1 if every > 1 else 0  # steps left queued on the device while the host reads
        self.waiting: list[tuple[int, dict[str, Any], Tensor, Tensor, Tensor]] = []
        self.nonfinite_in_a_row = nonfinite_in_a_row
        self.longest_nonfinite = nonfinite_in_a_row  # including series that a finite step has ended
        self.last_skipped: dict[str, Any] = {}
        self.skipped = 0
        self.last_shown = time.monotonic()
        self.board = _board(board)
        self.live_place = live
        self.live_lines: TextIO | None = None
        self.out = out or sys.stderr
        self.quiet, self.live = quiet, self.out.isatty() and not quiet
        self.rate = math.nan
        self._mark = (time.monotonic(), first)  # time and step from which the rate is measured

    def step(self, step: int, facts: dict[str, Any], loss: Tensor, norm: Tensor, nonfinite: Tensor) -> None:
        """Record one step; the device is read every `every` steps."""
        self.waiting.append((step, facts, loss.detach(), norm.detach(), nonfinite))
        if step + 1 == self.until or len(self.waiting) >= self.every + self.behind:
            self.flush(but=0 if step + 1 == self.until else self.behind)

    def flush(self, *, but: int = 0) -> None:
        """Read the recorded steps from the device, except the last `but`, which it may still be computing."""
        ready = self.waiting[: len(self.waiting) - but]
        read = torch.stack([torch.stack(found) for _, _, *found in ready]).tolist() if ready else []
        for (step, facts, *_), (loss, norm, nonfinite) in zip(ready, read, strict=True):
            line: dict[str, Any] = {
                "step": self.origin + step + 1,
                "loss": _number(loss),
                "norm": _number(norm),
                **facts,
            }
            if nonfinite:
                self.nonfinite_in_a_row += 1
                self.longest_nonfinite = max(self.longest_nonfinite, self.nonfinite_in_a_row)
                self.last_skipped = line
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
        if self.live_lines:
            self.live_lines.flush()
        if ready:
            now, done = time.monotonic(), ready[-1][0] + 1
            elapsed = now - self._mark[0]
            if elapsed > 1 or math.isnan(self.rate):
                self.rate = (done - self._mark[1]) * self.tokens_per_step / max(elapsed, 1e-9)
                self._mark = (now, done)
            self._show(self.lines[-1], done)
        self.waiting = self.waiting[len(ready) :]

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
        if self.board:
            self.board.close()
        if self.live_lines:
            self.live_lines.close()
            self.live_lines = None

    def _show(self, line: dict[str, Any], done: int) -> None:
        now = time.monotonic()
        if self.quiet or (now - self.last_shown < (0.2 if self.live else MINUTE) and done != self.until):
            return
        self.last_shown = now
        left = (self.until - done) * self.tokens_per_step / self.rate
        flops = f"  {si(self.rate * self.flops_per_token)}FLOP/s" if self.flops_per_token else ""
        text = (
            f"{self.title}  step {self.origin + done:,}/{self.origin + self.until:,}  loss {line['loss'] or math.nan:.3f}  "
            f"lr {line['rate']:.2e}  {si(self.rate)}tok/s{flops}  {duration(left)} left"
        )
        self.out.write(f"\r\x1b[K{text}" if self.live else f"  {text}\n")
        self.out.flush()

    def _keep(self, line: dict[str, Any]) -> None:
        if (
            self.live_place
        ):  # opened lazily, so that a training job that fails before its first line leaves no file open
            self.live_lines, self.live_place = _live(self.live_place, self.lines), None
        self.lines.append(line)
        self._to_board(line)
        if self.live_lines:
            self.live_lines.write(json.dumps(line) + "\n")

    def _to_board(self, line: dict[str, Any]) -> None:
        if self.board:
            for name, value in _scalars(line):
                self.board.add_scalar(name, value, line["step"])


def _board(folder: Path | None) -> Any:
    """Return a TensorBoard writer if a folder is given and TensorBoard is installed."""
    if folder is None:
        return None
    with contextlib.suppress(ImportError):
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(folder))
    return None


def _live(path: Path, lines: list[dict[str, Any]]) -> TextIO | None:
    """Open the live file and write the lines so far. It is for display only, so a disk error is ignored."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w", encoding="utf-8")
        file.writelines(json.dumps(line) + "\n" for line in lines)
        file.flush()
        return file
    return None


def _scalars(line: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found = []
    for name, value in line.items():
        if isinstance(value, dict):
            found += _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and name != "step":
            found.append((f"{prefix}{name}", float(value)))
    return found


def _number(value: float) -> float | None:
    """Return a float that JSON can represent; None if it is nonfinite."""
    return value if math.isfinite(value) else None
