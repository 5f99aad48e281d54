"""The learning rate as a pure function of the step."""

from __future__ import annotations

from biphase.keys import decay_start
from biphase.specs import Pretrain


def rate(run: Pretrain, step: int) -> float:
    """The rate of step `step` (from 0): up in a line, level, down in a line to 0 after the last step."""
    wsd = run.schedule
    if step < wsd.warmup:
        return wsd.peak * (step + 1) / wsd.warmup
    if step < decay_start(run):
        return wsd.peak
    return wsd.peak * (run.steps - step) / wsd.decay
