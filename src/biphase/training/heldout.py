"""Held-out losses: the same rows, cuts and masks for every run, so that curves compare.

The causal loss and the masked loss at 40% are always measured, whatever the run trains; its own objective too
where that is another. Each in its own direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from biphase.batch import Batch
from biphase.data.stream import Stream, passes_of, share
from biphase.keys import label
from biphase.objectives import ratio_at
from biphase.specs import CLM, MLM, MNTP, Objective
from biphase.training.devices import Ranks

ALWAYS: tuple[Objective, ...] = (CLM(), MLM(0.4))


def yardsticks(objective: Objective, step: int) -> tuple[Objective, ...]:
    """What to measure while `objective` trains, `step` steps into its stage."""
    if isinstance(objective, MLM):
        now = type(objective)(ratio_at(objective, step), objective.replace)
        return ALWAYS if now in ALWAYS else (*ALWAYS, now)
    return ALWAYS


@torch.no_grad()
def heldout_losses(
    loss_sum: Callable[[Batch], Tensor],
    stream: Stream,
    objectives: tuple[Objective, ...],
    *,
    rows: int,
    micro_rows: int,
    ranks: Ranks,
    autocast: Callable[[], AbstractContextManager[object]],
    fixed: bool,
    together: bool = False,  # every process must read as often as the others
) -> dict[str, float]:
    """Mean loss per label on the first `rows` held-out rows, by objective."""
    rows = min(rows, stream.rows)
    mine = share(0, rows, ranks.rank, ranks.world)
    losses = {}
    for objective in objectives:
        total = torch.zeros((), dtype=torch.float64)
        count = 0
        for draws in mine.split(micro_rows) if len(mine) else ():
            batch = stream.batch(objective, draws, step=0, fixed=fixed)
            with autocast():
                total += loss_sum(batch.to(ranks.device)).cpu()
            count += batch.count
        if together:
            passes = passes_of(rows, ranks.world, micro_rows)
            spare = stream.batch(objective, mine[:1] if len(mine) else torch.tensor([0]), step=0, fixed=fixed)
            for _ in range(passes - math.ceil(len(mine) / micro_rows)):
                with autocast():
                    loss_sum(spare.silent().to(ranks.device))
        labels = ranks.sum(count)[0]
        if labels:
            losses[_name(objective)] = ranks.sum_float(float(total)) / labels
    return losses


def _name(objective: Objective) -> str:
    """clm, mlm40, mntp40: short enough for a column."""
    if isinstance(objective, (MLM, MNTP)) and objective.replace == (1.0, 0.0, 0.0):
        return label(objective).replace(" ", "").replace("%", "")
    return label(objective)
