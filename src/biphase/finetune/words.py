"""Only the words that occur in a task's training texts are trained; what happens to all others is one number.

Of a vocabulary of 128,000 words a task has some thousand. The others never get a gradient: AdamW keeps their moments at
zero and multiplies them by 1 − rate · decay at each step, like everything that decays. So the optimizer is given a small
table of the words that occur, and below them a row of ones that no text asks for: it shrinks as the other words would,
in the same kernel, at the same share of the rate, and stays as it is when a step is skipped.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from biphase.finetune.families import Family
from biphase.models.encoder import Encoder
from biphase.tasks.encoding import Ragged

PADDING = 0  # the word that batches are padded with


class Words:
    """The rows of an embedding that texts ask for, as a parameter of its own."""

    def __init__(self, whole: nn.Parameter, texts: Iterable[Ragged], still: int | None = None) -> None:
        """`still`: a word that gets no gradient, as transformers treats the one it pads with."""
        occurs = np.zeros(len(whole), bool)
        occurs[PADDING] = True
        for some in texts:
            occurs[some.flat] = True
        ids = np.flatnonzero(occurs)
        row_of = np.zeros(len(whole), np.int64)  # of a word that does not occur nobody asks
        row_of[ids] = np.arange(len(ids))
        self.whole = whole
        self.ids, self.row_of = (torch.from_numpy(one).to(whole.device) for one in (ids, row_of))
        self.still = int(row_of[still]) if still is not None and occurs[still] else None
        self.table = nn.Parameter(whole.detach().new_ones(len(ids) + 1, whole.shape[1]))

    def among(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """The same parameters in the same order, the table in place of the whole embedding."""
        return [self.table if one is self.whole else one for one in parameters]

    def look_up(self, ids: Tensor) -> Tensor:
        return F.embedding(self.row_of[ids], self.table, self.still)

    @contextmanager
    def trained(self, encoder: Encoder) -> Generator[None]:
        """Meanwhile the encoder reads the table, which begins as the embedding is; then the embedding is whole again."""
        fused = encoder.fused
        assert fused is not None, "only the fused trunk can read another table"
        self._take_out()
        fused.words = self.look_up
        try:
            yield
        finally:
            fused.words = None
        self._put_back()

    @torch.no_grad()
    def _take_out(self) -> None:
        # In the same memory each time: captured graphs read it there.
        self.table[:-1] = self.whole[self.ids]
        self.table[-1] = 1
        self.table.grad = None  # a fine-tuning that failed on its way may have left one

    @torch.no_grad()
    def _put_back(self) -> None:
        self.whole.mul_(self.table[-1])
        self.whole[self.ids] = self.table[:-1]


def words_of(family: Family, encoder: Encoder) -> Words | None:
    """The words to train for a task; None where the whole embedding is trained, or nothing of it.

    In 16 bits most steps of the decay are lost to rounding, word by word: no one number could tell which.
    """
    if encoder.fused is None or not family.inputs:
        return None
    own = encoder.fused.trunk.embed_tokens
    trained = own.weight.requires_grad and own.weight.dtype == torch.float32
    return Words(own.weight, family.inputs, own.padding_idx) if trained else None
