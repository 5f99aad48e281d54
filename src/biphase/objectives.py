"""Training objectives (CLM, MLM, MNTP): how rows of tokens become model inputs and labels.

`apply` turns true tokens into `ModelInputs`: the input ids, the labels (IGNORE where nothing is predicted) and whether
attention is causal. Labels never cross a segment boundary. Randomness comes from counters (`randomness`), so a mask is
a function of seed, sample index and position, and a lower masking ratio masks a subset of what a higher one masks.

`Batch` is one complete micro-batch as the model reads it. Shapes: B rows, T tokens per row, P labelled positions.
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
    """One micro-batch with its labels.

    `label_at` and `labels` list the labelled positions only, so that the head computes no others. Both may be padded
    (labels with IGNORE) to a fixed length, so that a compiled graph keeps its shapes. `count`, the number of real
    labels, is known on the host without a device sync.
    """

    ids: Tensor  # (B, T) input ids
    positions: Tensor  # (B, T) counted from the start of the chunk
    segments: Tensor | None  # (B, T) number of the chunk or document inside its row; None: whole rows
    boundaries: Tensor | None  # cumulative lengths of all segments of the batch, int32; None: whole rows
    label_at: Tensor  # (P,) index into the B·T positions
    labels: Tensor  # (P,) the token to predict there
    count: int  # labels that are not IGNORE
    causal: bool
    draws: Tensor  # (B,) sample indices, for messages
    steady: bool = False  # every batch of this shape has the same number of segments

    def ready_for(self, device: torch.device) -> Batch:
        """Return the batch in pinned memory if `device` is a GPU, so that the copy can be asynchronous.

        Pinning is slow, so a loader thread does it.
        """
        return self if device.type == "cpu" else self._each(lambda one: one.pin_memory())

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`, without waiting for the copy."""
        if self.ids.device.type == device.type:
            return self
        return self._each(
            lambda one: (one if one.is_pinned() else one.pin_memory()).to(device, non_blocking=True)
        )

    def silent(self) -> Batch:
        """Return the batch with all labels set to IGNORE: its loss and its gradients are zero."""
        return replace(self, labels=torch.full_like(self.labels, IGNORE), count=0)

    def _each(self, moved: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with `moved` applied to every tensor that the model reads."""
        values = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: moved(value) for name, value in values.items() if name != "draws"})


# ---------------------------------------------------------------- objectives


@dataclass(frozen=True)
class Vocabulary:
    """The properties of a tokenizer that masking needs."""

    size: int
    mask_id: int
    special: Tensor  # (size,) bool: never masked, never used as a random replacement
    ordinary: Tensor  # ids that may replace a masked token

    @classmethod
    def of(cls, size: int, mask_id: int, special_ids: tuple[int, ...]) -> Vocabulary:
        special = torch.zeros(size, dtype=torch.bool)
        special[torch.tensor([*special_ids, mask_id])] = True
        return cls(size, mask_id, special, (~special).nonzero().flatten())


@dataclass(frozen=True)
class ModelInputs:
    """Input ids, labels and attention direction of some rows under an objective."""

    ids: Tensor  # (B, T)
    labels: Tensor  # (B, T), IGNORE where nothing is predicted
    causal: bool


def ratio_at(objective: MLM, step: int) -> float:
    """Return the masking ratio `step` steps after the start of the objective's phase."""
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
    """Make the model inputs of `ids` (B, T) under `objective`, `step` steps into its phase.

    `draws` (B,) are the rows' sample indices, which determine the masks.
    """
    match objective:
        case CLM():
            return clm(ids, segments)
        case MNTP():  # before MLM, of which it is a subclass
            return mntp(objective, ids, segments, draws, seed=seed, step=step, words=words)
        case MLM():
            return mlm(objective, ids, draws, seed=seed, step=step, words=words)


def clm(ids: Tensor, segments: Tensor | None) -> ModelInputs:
    """Causal language modeling: predict the next token of the segment at each position, with causal attention."""
    return ModelInputs(ids, _next_inside(ids, segments), causal=True)


def mlm(
    objective: MLM, ids: Tensor, draws: Tensor, *, seed: int, step: int, words: Vocabulary
) -> ModelInputs:
    """Masked language modeling: mask a share of the non-special tokens and predict them in place, bidirectionally.

    CLM and MLM losses are not comparable: compare losses within one objective only.
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
    """Masked next token prediction: MLM whose token is predicted one position earlier, as a decoder's head does.

    The first token of a segment has no position before it, so it is never masked.
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
    """Return `ids` with masked tokens turned into the mask token, a random token or themselves, as `replace` says."""
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
    """Return an upper bound on the number of labels in `tokens` tokens, exceeded with probability below 10⁻¹⁵.

    It is mean + 8σ at the highest ratio, rounded up to 128. It is constant over a phase, so that a compiled step keeps
    its shapes while the masking ratio changes.
    """
    if isinstance(objective, CLM):
        return tokens
    ratio = objective.ratio
    highest = max(ratio.first, ratio.last) if isinstance(ratio, (Linear, Cosine)) else ratio
    spread = 8 * math.sqrt(tokens * highest * (1 - highest))
    return min(tokens, math.ceil((tokens * highest + spread) / 128) * 128)
