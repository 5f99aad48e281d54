"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

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


def linear_rate(step: int, steps: int, *, peak: float, warmup: float) -> float:
    """The rate of a fine-tuning: up in a line over the share `warmup` of the steps, then down in a line to 0.

    As transformers' linear schedule, whose first step has rate 0.
    """
    rising = math.ceil(warmup * steps)
    if step < rising:
        return peak * step / rising
    return peak * (steps - step) / max(1, steps - rising)
