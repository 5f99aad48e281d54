"""A few sizes of batches in place of hundreds: what comes in one of them can be computed by a captured CUDA graph.

The sizes are chosen by the lengths of a task's texts, each a tenth above the one before, so that little is padded:
about 7% on average. They do not depend on a seed or a rate: a fine-tuning is computed alike in whatever company.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch.nn.functional as F

from biphase.batch import IGNORE
from biphase.finetune.families import Family
from biphase.finetune.model import Setting, TaskBatch

RATIO = 1.1  # of one size to the next smaller
ROUND = 16  # sizes are multiples of it, as the matrix units like them
DRAWN = 4_096  # batches that tell how many tokens a step has
RARE = 0.001, 0.02  # the share of batches that are too large for any size, and of those below all


@dataclass(frozen=True)
class Buckets:
    """The widths that batches of `texts` texts are padded to, none of them longer than `longest`."""

    widths: tuple[int, ...]  # ascending
    texts: int
    longest: int

    def spare(self, width: int) -> int:
        """How many texts the padding of a width is cut into: enough, were it all padding."""
        return -(-width // self.longest)

    def width_for(self, tokens: int) -> int:
        """The smallest width that so many tokens fit into, with a token at least for each text of padding; else 0."""
        return next((width for width in self.widths if tokens + self.spare(width) <= width), 0)

    def pad(self, batch: TaskBatch) -> TaskBatch:
        """The batch padded to one of the widths, or as it is where it has none.

        Padding takes no part: attention and pooling stay inside texts, and its tokens have no labels.
        """
        packed = batch.inputs[0]
        if len(batch.inputs) > 1 or len(packed) != self.texts or packed.longest > self.longest:
            return batch
        tokens = packed.ids.numel()
        width = self.width_for(tokens)
        if not width:
            return batch
        targets = (
            F.pad(batch.targets, (0, width - tokens), value=IGNORE) if batch.of_tokens else batch.targets
        )
        wide = packed.padded(width, spare=self.spare(width), longest=self.longest)
        return replace(batch, inputs=(wide,), targets=targets, width=width)


def buckets_of(family: Family, setting: Setting) -> Buckets:
    """The sizes for the training steps of a task."""
    lengths = np.sum([side.lengths for side in family.inputs], axis=0)
    rows = min(family.task.batch, family.size)
    draw = np.random.default_rng(0).integers(0, family.size, (DRAWN, rows))
    above, below = RARE
    least, most = np.quantile(lengths[draw].sum(1), (below, 1 - above)).tolist()
    longest = max(ROUND, *(int(side.lengths.max()) for side in family.inputs))
    return Buckets(
        _widths(int(least), min(int(most), setting.train_tokens), longest),
        rows * len(family.inputs),
        longest,
    )


def _widths(least: int, most: int, longest: int) -> tuple[int, ...]:
    """Widths such that `most` tokens fit into the largest, `least` into the smallest, and none is without use."""

    def room(width: int) -> int:
        return width - -(-width // longest)

    width = -(-most // ROUND) * ROUND
    while room(width) < most:
        width += ROUND
    widths = [width]
    while (width := int(width / RATIO) // ROUND * ROUND) and room(width) >= least:
        widths.append(width)
    return tuple(reversed(widths))
