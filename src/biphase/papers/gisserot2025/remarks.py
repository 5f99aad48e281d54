"""What the notes of some claims say: when a decay begins, sources of noise, and where a learning curve overtakes another.

A function of a case and `On` gives a `Remark`, or None where there is nothing to say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from biphase.report.contrasts import Measure, On, Quantity, Remark, ScoreView
from biphase.report.evidence import Floats
from biphase.report.pretraining import Epochs
from biphase.report.selectors import Case
from biphase.report.statistics.curves import Located, crossing, fit_cells
from biphase.report.statistics.intervals import complete, mean_squares
from biphase.study.costs import REPEATED, flops_of
from biphase.text import short

CURVED = 5  # checkpoints from which a gap is fitted by a curve and not by a line


def decay_begins_later(case: Case, on: On) -> Remark | None:
    """A remark if the checkpoint lies before the decay, so that part of the gain comes from training at full rate."""
    plan, model = case.study.plan, case.models[len(case.models) // 2]
    run = plan.jobs[plan.results[model.results[0]]].run
    early = run.origin_step + run.decay_start - case.steps[0]
    if early <= 0:
        return None
    return lambda view, quantity: (
        f"the checkpoint is {early:,} steps before the decay: what they bring is in this gain"
    )


def noise_by_source(case: Case, on: On) -> Remark:
    """A remark with the sd over pretraining seeds and over fine-tuning seeds."""

    def remark(view: ScoreView, quantity: Quantity) -> str:
        terms = quantity.terms(view).items()
        tables = [view.table(view.evidence.models[name], cells) for name, cells in terms]
        if len({table.shape for table in tables}) != 1:
            return ""
        table = complete(np.sum(tables, axis=0))
        if min(table.shape) < 2:
            return ""
        rows, columns, rest = mean_squares(table)
        pretraining = math.sqrt(max(0.0, rows - rest) / table.shape[1])
        tuning = math.sqrt(max(0.0, columns - rest) / table.shape[0] + rest)
        return f"sd over pretraining seeds {pretraining:.2f} points, over fine-tuning seeds {tuning:.2f}"

    return remark


@dataclass(frozen=True)
class Overtaking:
    """A remark on where the learning curve of one model overtakes that of another: the last crossing from below.

    The gap between them is fitted over the logarithm of steps, over all checkpoints that both have, and its crossing
    with 0 has Fieller's limits: where the checkpoints do not determine it, they are open. At equal steps two
    objectives have seen equal tokens but spent different FLOPs, so the crossing over FLOPs has its own axis.
    """

    case: Case
    on: On

    def __call__(self, view: ScoreView, quantity: Quantity) -> str:
        measure = Measure(view.evidence)
        pairs = [models[:2] for models in self.case.curve]
        leader, other = "MLM 40%", "CLM"
        found = measure.means([model for pair in pairs for model in pair], self.on.score)
        if len(pairs) < 2 or any(model.name not in found for pair in pairs for model in pair):
            return ""
        steps = np.array([float(rising.recipe.steps) for rising, _ in pairs])
        means = [[found[model.name] for model in pair] for pair in pairs]
        gap = np.array([rising.mean - passed.mean for rising, passed in means])
        epochs = Epochs(view.evidence.plan, view.evidence.store)
        once = self._within_one_epoch(epochs, gap)
        if gap[-1] <= 0:
            return f"{leader} has not overtaken {other} by step {steps[-1]:,.0f}{once}"
        if (gap > 0).all():
            return f"{leader} is ahead from the first checkpoint (step {steps[0]:,.0f}) on{once}"
        variances = np.array([sum(one.variance for one in pair) for pair in means])
        dfs = [one.df for pair in means for one in pair]
        located = None
        if np.isfinite(variances).all():
            degree = 2 if len(steps) >= CURVED else 1
            curve = fit_cells(np.log(steps), gap, variances, min(dfs), degree, "seeds")
            located = crossing(curve, (math.log(steps[0]), math.log(steps[-1])))
        levels = np.array([[one.mean for one in pair] for pair in means])
        return f"{leader} overtakes {other} near {self._place(located, steps, levels, epochs)}{once}"

    def _within_one_epoch(self, epochs: Epochs, gap: Floats) -> str:
        """Which model leads at the last checkpoint of the first epoch, if later ones repeated data."""
        rising = [models[0] for models in self.case.curve]
        read = np.array([epochs.at(one.results[0]) for one in rising], dtype=float)  # NaN: not known
        once = np.flatnonzero(read <= REPEATED)
        if not once.size or not read[-1] > REPEATED:
            return ""
        last = once[-1]
        where = f"within one epoch (step {rising[last].recipe.steps:,}, {read[last]:.2f} epochs)"
        return f"; {where} it is {abs(gap[last]):.2f} points {'ahead' if gap[last] > 0 else 'behind'}"

    def _place(self, located: Located | None, steps: Floats, levels: Floats, epochs: Epochs) -> str:
        """The crossing in steps with its limits, in tokens and epochs, and at equal FLOPs."""
        at = math.nan if located is None else math.exp(located.estimate)
        if not math.isfinite(at):
            at = interpolated(steps, levels[:, 0], steps, levels[:, 1])
        last = self.case.curve[-1][0]
        read, flops = epochs.at(last.results[0], round(at)), self._flops(levels)
        text = (
            f"step {at:,.0f}{_limits(located)}, {short(at * last.recipe.tokens / last.recipe.steps)} tokens"
        )
        if read is not None:
            text += f", {read:.2f} epochs"
        return text + (f"; at equal FLOPs near {flops:.1e}" if math.isfinite(flops) else "")

    def _flops(self, levels: Floats) -> float:
        """The crossing over model FLOPs from the root; NaN if there is none or FLOPs are not known."""
        plan = self.case.study.plan
        paths = [[plan.path(plan.results[one.results[0]]) for one in pair[:2]] for pair in self.case.curve]
        # dtype=float turns an unknown number (None) into NaN, and so its sum.
        spent = np.array(
            [
                [np.array([flops_of(job) for job in path], dtype=float).sum() for path in pair]
                for pair in paths
            ]
        )
        if not np.isfinite(spent).all():
            return math.nan
        return interpolated(spent[:, 0], levels[:, 0], spent[:, 1], levels[:, 1])


def _limits(located: Located | None) -> str:
    """The 95% limits of a crossing as text."""
    if located is None or not located.pieces:
        return ""
    low, high = (math.exp(end) for end in (located.pieces[0][0], located.pieces[-1][1]))
    if located.open_below and located.open_above:
        return " (95%: not located between these checkpoints)"
    if located.open_below:
        return f" (95%: before {high:,.0f})"
    return f" (95%: after {low:,.0f})" if located.open_above else f" (95%: {low:,.0f} to {high:,.0f})"


def interpolated(xs: Floats, rising: Floats, others: Floats, other: Floats) -> float:
    """The last x at which `rising` crosses `other` from below, linear in log x; NaN if it never does."""
    low, high = max(xs[0], others[0]), min(xs[-1], others[-1])
    grid = np.unique(np.log([low, *xs, *others, high]))
    grid = grid[(grid >= np.log(low) - 1e-12) & (grid <= np.log(high) + 1e-12)]
    ahead = np.interp(grid, np.log(xs), rising) - np.interp(grid, np.log(others), other)
    crossed = np.flatnonzero((ahead[:-1] <= 0) & (ahead[1:] > 0))
    if not crossed.size:
        return math.nan
    last = crossed[-1]
    share = -ahead[last] / (ahead[last + 1] - ahead[last])
    return float(np.exp(grid[last] + share * (grid[last + 1] - grid[last])))
