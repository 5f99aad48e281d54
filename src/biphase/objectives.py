"""What travels from the data to the model: one micro-batch, complete.

B rows, T tokens a row, P labelled positions. `label_at` and `labels` list the labelled positions only
(the head never sees the others); both may be padded, with `IGNORE`, to a fixed length so that a compiled
graph keeps its shapes. `count` is the number of real labels and is known on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from biphase.randomness import below, hash32, threshold
from biphase.specs import CLM, MLM, MNTP, Cosine, Linear, Objective

IGNORE = -100


@dataclass(frozen=True)
class Batch:
    ids: Tensor  # (B, T) what the model reads
    positions: Tensor  # (B, T) counted from the start of the chunk
    segments: Tensor | None  # (B, T) number of the chunk or document inside its row; None: whole rows
    boundaries: Tensor | None  # cumulative lengths of all segments of the batch, int32; None: whole rows
    label_at: Tensor  # (P,) index into the B·T positions
    labels: Tensor  # (P,) the token asked for there
    count: int  # labels that are not IGNORE
    causal: bool
    draws: Tensor  # (B,) which samples these are, for messages
    steady: bool = False  # every batch of its shape has as many segments

    def ready_for(self, device: torch.device) -> Batch:
        """The same where `device` can fetch it without waiting: work for a loader's thread."""
        return self if device.type == "cpu" else self._each(lambda one: one.pin_memory())

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`, without waiting for the copy."""
        if self.ids.device.type == device.type:
            return self
        return self._each(
            lambda one: (one if one.is_pinned() else one.pin_memory()).to(device, non_blocking=True)
        )

    def silent(self) -> Batch:
        """The same text with nothing asked: its loss and its gradients are zero."""
        return replace(self, labels=torch.full_like(self.labels, IGNORE), count=0)

    def _each(self, moved: Callable[[Tensor], Tensor]) -> Batch:
        """All that the model reads, `moved`."""
        values = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: moved(value) for name, value in values.items() if name != "draws"})


# ---------------------------------------------------------------- objectives
# Objectives: what of a row is shown and what is asked for.
#
# Each takes the true tokens of some rows and gives what the model reads, the labels (IGNORE where nothing is
# asked) and whether it may look ahead. Labels never cross a segment. Chance comes from counters (`randomness`),
# so a mask is a function of seed, sample and position; a lower ratio hides a subset of what a higher one hides.


@dataclass(frozen=True)
class Vocabulary:
    """What masking must know of a tokenizer."""

    size: int
    mask_id: int
    special: Tensor  # (size,) bool: never hidden, never drawn as a replacement
    ordinary: Tensor  # ids that may replace a hidden token

    @classmethod
    def of(cls, size: int, mask_id: int, special_ids: tuple[int, ...]) -> Vocabulary:
        special = torch.zeros(size, dtype=torch.bool)
        special[torch.tensor([*special_ids, mask_id])] = True
        return cls(size, mask_id, special, (~special).nonzero().flatten())


@dataclass(frozen=True)
class ModelInputs:
    """Rows as an objective puts them to the model."""

    ids: Tensor  # (B, T)
    labels: Tensor  # (B, T), IGNORE where nothing is asked
    causal: bool


def ratio_at(objective: MLM, step: int) -> float:
    """The masking ratio `step` steps after the objective's stage began."""
    match objective.ratio:
        case Linear(first, last, steps):
            return first + (last - first) * min(step / steps, 1.0)
        case Cosine(first, last, steps):
            return last + (first - last) * (1 + math.cos(math.pi * min(step / steps, 1.0))) / 2
        case constant:
            return constant


def apply(
    objective: Objective,
    ids: Tensor,
    segments: Tensor | None,
    draws: Tensor,
    *,
    seed: int,
    step: int,
    words: Vocabulary,
) -> ModelInputs:
    """Put `ids` (B, T) to the model as `objective` does, `step` steps into its stage."""
    match objective:
        case CLM():
            return clm(ids, segments)
        case MNTP():  # before MLM, whose special case it is
            return mntp(objective, ids, segments, draws, seed=seed, step=step, words=words)
        case MLM():
            return mlm(objective, ids, draws, seed=seed, step=step, words=words)


def clm(ids: Tensor, segments: Tensor | None) -> ModelInputs:
    """Ask each position for the next token of its segment. Sees the past only."""
    return ModelInputs(ids, _next_inside(ids, segments), causal=True)


def mlm(
    objective: MLM, ids: Tensor, draws: Tensor, *, seed: int, step: int, words: Vocabulary
) -> ModelInputs:
    """Hide a share of the ordinary tokens and ask for each where it stands. Sees both sides.

    Labels are sparser than CLM's by the ratio: compare losses within an objective, never across.
    """
    hidden = _masked_positions(objective, ids, draws, seed, step, words)
    shown = _replaced(objective, ids, hidden, draws, seed, words)
    return ModelInputs(shown, ids.masked_fill(~hidden, IGNORE), causal=False)


def mntp(
    objective: MNTP,
    ids: Tensor,
    segments: Tensor | None,
    draws: Tensor,
    *,
    seed: int,
    step: int,
    words: Vocabulary,
) -> ModelInputs:
    """MLM asked one position earlier, where a decoder's head already looks for the next token.

    The first token of a segment has no position before it, so it is never hidden.
    """
    hidden = _masked_positions(objective, ids, draws, seed, step, words)
    hidden[:, 0] = False
    if segments is not None:
        hidden[:, 1:] &= segments[:, 1:] == segments[:, :-1]
    shown = _replaced(objective, ids, hidden, draws, seed, words)
    labels = torch.full_like(ids, IGNORE)
    labels[:, :-1] = ids.masked_fill(~hidden, IGNORE)[:, 1:]
    return ModelInputs(shown, labels, causal=False)


def _next_inside(ids: Tensor, segments: Tensor | None) -> Tensor:
    labels = torch.full_like(ids, IGNORE)
    labels[:, :-1] = ids[:, 1:]
    if segments is not None:
        labels[:, :-1].masked_fill_(segments[:, 1:] != segments[:, :-1], IGNORE)
    return labels


def _masked_positions(
    objective: MLM, ids: Tensor, draws: Tensor, seed: int, step: int, words: Vocabulary
) -> Tensor:
    bits = hash32(seed, "mask", draws, ids.shape[1])
    return (bits < threshold(ratio_at(objective, step))) & ~words.special.to(ids.device)[ids]


def _replaced(
    objective: MLM, ids: Tensor, hidden: Tensor, draws: Tensor, seed: int, words: Vocabulary
) -> Tensor:
    """`ids` with the hidden ones turned into the mask token, a random token or left, by the shares of `replace`."""
    to_mask, to_random, _ = objective.replace
    if to_mask == 1:
        return ids.masked_fill(hidden, words.mask_id)
    bits = hash32(seed, "replace", draws, ids.shape[1])
    shown = ids.masked_fill(hidden & (bits < threshold(to_mask)), words.mask_id)
    if to_random:
        ordinary = words.ordinary.to(ids.device)
        random = ordinary[below(hash32(seed, "token", draws, ids.shape[1]), len(ordinary))]
        at_random = hidden & (bits >= threshold(to_mask)) & (bits < threshold(to_mask + to_random))
        shown = torch.where(at_random, random, shown)
    return shown


def label_bound(objective: Objective, tokens: int) -> int:
    """A length that the labels of `tokens` tokens fit in, but for one case in 10¹⁵: mean + 8σ, rounded up.

    Fixed over a stage, so that a compiled step keeps its shapes while a ratio schedule moves.
    """
    if isinstance(objective, CLM):
        return tokens
    ratio = objective.ratio
    highest = max(ratio.first, ratio.last) if isinstance(ratio, (Linear, Cosine)) else ratio
    spread = 8 * math.sqrt(tokens * highest * (1 - highest))
    return min(tokens, math.ceil((tokens * highest + spread) / 128) * 128)
