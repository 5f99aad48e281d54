"""When one curve overtakes another: the last crossing from below, interpolated over the logarithm of the way.

Steps, tokens and FLOPs are three ways to measure how far a model has come. At equal steps two objectives have seen
equal tokens, but not spent equal FLOPs; so the crossing over FLOPs is found on its own axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from biphase.report.claims.lines import Bench, rows_in_common
from biphase.report.claims.quantities import Reading, score
from biphase.report.evidence import Floats
from biphase.report.recipes import Model
from biphase.report.repetition import Epochs
from biphase.report.statistics.intervals import across, kept
from biphase.specs import Family
from biphase.study.corpora import REPEATED
from biphase.study.costs import flops_of
from biphase.wording import short


@dataclass(frozen=True)
class Crossing:
    """Where MLM overtakes CLM on a family, over the checkpoints (MLM, CLM) of both."""

    bench: Bench
    checkpoints: tuple[tuple[Model, Model], ...]
    family: Family

    def words(self, reading: Reading) -> str:
        masked = self._curves(reading, 0)
        causal = self._curves(reading, 1)
        steps = np.array([float(one.recipe.steps) for one, _ in self.checkpoints])
        if len(steps) < 2:
            return ""
        rows, columns = kept(np.sum(masked + causal, axis=0))
        if not columns.size:
            return ""
        masked, causal = (one[:, rows][:, :, columns] for one in (masked, causal))
        gap = np.mean(masked - causal, axis=(1, 2))
        epochs = Epochs(reading.evidence.plan, reading.evidence.store)
        once = self._within_one_epoch(epochs, gap)
        if gap[-1] <= 0:
            return f"MLM 40% has not overtaken CLM by step {steps[-1]:,.0f}{once}"
        if (gap > 0).all():
            return f"MLM 40% is ahead from the first checkpoint (step {steps[0]:,.0f}) on{once}"
        at = [
            [
                crossing(steps, masked[:, row, seed], steps, causal[:, row, seed])
                for seed in range(len(columns))
            ]
            for row in range(len(rows))
        ]
        return f"MLM 40% overtakes CLM near {self._place(np.array(at), masked, causal, epochs)}{once}"

    def _within_one_epoch(self, epochs: Epochs, gap: Floats) -> str:
        """Who is ahead at the last checkpoint that read nothing twice, where later ones did."""
        known = [epochs.at(one.results[0]) for one, _ in self.checkpoints]
        read = [math.inf if one is None else one for one in known]
        once = [place for place, one in enumerate(read) if one <= REPEATED]
        if not once or not math.isfinite(read[-1]) or read[-1] <= REPEATED:
            return ""
        step, ahead = self.checkpoints[once[-1]][0].recipe.steps, gap[once[-1]]
        where = f"within one epoch (step {step:,}, {read[once[-1]]:.2f} epochs)"
        return f"; {where} it is {abs(ahead):.2f} points {'ahead' if ahead > 0 else 'behind'}"

    def _place(self, at: Floats, masked: Floats, causal: Floats, epochs: Epochs) -> str:
        """The mean over seeds, taken of logarithms, with its interval; seeds in which it never happens are told."""
        crossed = across(np.log(at))
        happens = int(np.isfinite(at).sum())
        some = f" in {happens} of {at.size} seeds" if happens < at.size else ""
        if not math.isfinite(crossed.mean):
            return "no step that every seed agrees on"
        steps = math.exp(crossed.mean)
        between = (
            f" (95%: {math.exp(crossed.low):,.0f} to {math.exp(crossed.high):,.0f})"
            if math.isfinite(crossed.low)
            else ""
        )
        recipe = self.checkpoints[-1][0].recipe
        said = f"step {steps:,.0f}{some}{between}, {short(steps * recipe.tokens / recipe.steps)} tokens"
        read = epochs.at(self.checkpoints[-1][0].results[0], round(steps))
        said = said if read is None else f"{said}, {read:.2f} epochs"
        flops = self._flops(masked, causal)
        return f"{said}; at equal FLOPs near {flops:.1e}" if flops is not None else said

    def _flops(self, masked: Floats, causal: Floats) -> float | None:
        ways = [[_flops_to(self.bench, one) for one in pair] for pair in self.checkpoints]
        if any(one is None for pair in ways for one in pair):
            return None
        x = np.array(ways, dtype=float)
        at = crossing(x[:, 0], masked.mean(axis=(1, 2)), x[:, 1], causal.mean(axis=(1, 2)))
        return at if math.isfinite(at) else None

    def _curves(self, reading: Reading, which: int) -> Floats:
        """(checkpoints, pretraining seeds, fine-tuning seeds)"""
        models = [pair[which] for pair in self.checkpoints]
        everyone = [one for pair in self.checkpoints for one in pair]
        within = Reading(reading.evidence, None, rows_in_common(everyone))
        return np.stack([score(self.bench, one, self.family).measure(within) for one in models])


def crossing(xs: Floats, rising: Floats, others: Floats, other: Floats) -> float:
    """The last x at which `rising` comes from below `other`; NaN if it never does. Linear in log x."""
    low, high = max(xs[0], others[0]), min(xs[-1], others[-1])
    grid = np.unique(np.log([low, *xs, *others, high]))
    grid = grid[(grid >= np.log(low) - 1e-12) & (grid <= np.log(high) + 1e-12)]
    ahead = np.interp(grid, np.log(xs), rising) - np.interp(grid, np.log(others), other)
    found = [place for place in range(1, len(grid)) if ahead[place - 1] <= 0 < ahead[place]]
    if not found:
        return math.nan
    place = found[-1]
    share = -ahead[place - 1] / (ahead[place] - ahead[place - 1])
    return float(np.exp(grid[place - 1] + share * (grid[place] - grid[place - 1])))


def _flops_to(bench: Bench, model: Model) -> float | None:
    """Model FLOPs from the root to a model."""
    path = bench.plan.path(bench.plan.results[model.results[0]])
    flops = [flops_of(state) for state in path]
    known = [one for one in flops if one is not None]
    return sum(known) if len(known) == len(flops) else None
