"""Batches with labels: how an objective (CLM, MLM, MNTP) turns rows of tokens into model inputs and labels.

`apply` turns true tokens into `ModelInputs`: the input ids, the labels (IGNORE where nothing is predicted) and whether
attention is causal. Labels never cross a segment boundary. Randomness comes from counters (`randomness`), so a mask is
a function of seed, sample index and position, and a lower masking ratio masks a subset of what a higher one masks.

`assign` says which objective each row of a step has. The rows of a micro-batch have one objective, so that all of them
attend in one direction and any attention kernel can be used.

`Batch` is one complete micro-batch as the model reads it. Shapes: B rows, T tokens per row, P labelled positions.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

import torch
from torch import Tensor

from biphase.randomness import below, hash32, hash_samples, permute, salt, threshold
from biphase.specs import CLM, MLM, MNTP, Mix, RowObjective, Uniform

IGNORE = -100


@dataclass(frozen=True)
class LossTerm:
    """How the summed loss of a micro-batch enters the loss of its step.

    The loss of a step is a sum of terms. Each is `weight` times the summed losses of its micro-batches, over the sum of
    their `mass`: the number of labels, or of tokens if losses are weighted by 1/ratio.
    """

    mass: int
    number: int = 0  # of the term
    terms: int = 1  # of the step
    weight: float = 1.0


WHOLE = LossTerm(0)  # the loss of a step of one objective, before the mass is known


@dataclass(frozen=True)
class Batch:
    """One micro-batch with its labels.

    `label_at` and `labels` list the labelled positions, so that the head computes no others. With `fixed`, unlabelled
    positions (label IGNORE) fill them up to a length that rarely changes, so that compiled and captured graphs keep
    their shapes; for CLM, which labels nearly all positions, they list all in order. `count`, the number of real
    labels, is known on the host without a device sync.
    """

    ids: Tensor  # (B, T) input ids
    positions: Tensor  # (B, T) counted from the start of the chunk
    segments: Tensor | None  # (B, T) number of the chunk or document inside its row; None: whole rows
    boundaries: Tensor | None  # cumulative lengths of all segments of the batch, int32; None: whole rows
    label_at: Tensor  # (P,) index into the B·T positions, none twice
    labels: Tensor  # (P,) the token to predict there
    count: int  # labels that are not IGNORE
    causal: bool
    samples: Tensor  # (B,) sample indices, for messages
    steady: bool = False  # every batch of this shape has the same number of segments
    fixed: bool = False  # the lists of labels and boundaries are filled up
    buffer: Tensor | None = None  # the buffer that the tensors are views of
    weights: Tensor | None = None  # (P,) weights of the losses; None: all 1
    loss_term: LossTerm | None = None  # None: the loss of the step is the mean over all labels

    @property
    def term(self) -> LossTerm:
        """How its loss enters the loss of the step."""
        return self.loss_term or LossTerm(self.count)

    @property
    def graph_key(self) -> Hashable | None:
        """What a captured step depends on besides the tensors' contents; None: the shape varies too much."""
        if not self.fixed or not (self.steady or self.boundaries is None):
            return None
        return self.causal, tuple((name, tuple(tensor.shape)) for name, tensor in self.tensors.items())

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that the model reads, by name."""
        names = ("ids", "positions", "segments", "boundaries", "label_at", "labels", "weights")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def ready_for(self, device: torch.device) -> Batch:
        """Return the batch in one pinned buffer if `device` is a GPU, so that one asynchronous copy suffices.

        Pinning is slow, so a loader thread does it.
        """
        return (
            self
            if device.type == "cpu"
            else self._within(in_one_buffer([*self.tensors.values()], pinned=True))
        )

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`, without waiting for the copy."""
        if self.ids.device.type == device.type:
            return self
        ready = self if self.buffer is not None else self.ready_for(device)
        assert ready.buffer is not None
        return ready._within(ready.buffer.to(device, non_blocking=True))

    def without_labels(self) -> Batch:
        """Return the batch with all labels set to IGNORE: its loss and its gradients are zero."""
        labels, term = torch.full_like(self.labels, IGNORE), replace(self.term, mass=0)
        return replace(self, labels=labels, count=0, loss_term=term, buffer=None)

    def _within(self, buffer: Tensor) -> Batch:
        """Return the batch with its tensors as views of `buffer`, or of a copy of it on another device."""
        own = self.tensors
        return replace(self, **dict(zip(own, views_of(buffer, [*own.values()]), strict=True)), buffer=buffer)


ALIGNED = 16  # bytes: where a tensor may begin in a buffer


def in_one_buffer(tensors: Sequence[Tensor], *, pinned: bool) -> Tensor:
    """Copy host tensors into one byte buffer, so that one transfer to the device suffices."""
    size = sum(_aligned(tensor) for tensor in tensors)
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    for tensor, view in zip(tensors, views_of(buffer, tensors), strict=True):
        view.copy_(tensor)
    return buffer


def views_of(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a buffer made by `in_one_buffer`, each with the shape and dtype of its tensor in `like`."""
    views, start = [], 0
    for tensor in like:
        views.append(buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += _aligned(tensor)
    return views


def _aligned(tensor: Tensor) -> int:
    """Return the bytes of a tensor, rounded up."""
    return -(-tensor.nbytes // ALIGNED) * ALIGNED


# ---------------------------------------------------------------- objectives


@dataclass(frozen=True)
class Vocabulary:
    """The properties of a tokenizer that masking needs."""

    size: int
    mask_id: int
    special: Tensor  # (size,) bool: never masked, never used as a random replacement
    ordinary: Tensor  # ids that may replace a masked token
    continues: Tensor | None = (
        None  # (size,) bool: continues a word; None: not known, so no words can be masked
    )

    @classmethod
    def of(
        cls, size: int, mask_id: int, special_ids: tuple[int, ...], continues: Sequence[bool] | None = None
    ) -> Vocabulary:
        special = torch.zeros(size, dtype=torch.bool)
        special[torch.tensor([*special_ids, mask_id])] = True
        table = None if continues is None else torch.tensor(continues) & ~special
        return cls(size, mask_id, special, (~special).nonzero().flatten(), table)


@dataclass(frozen=True)
class ModelInputs:
    """Input ids, labels and attention direction of some rows under an objective."""

    ids: Tensor  # (B, T)
    labels: Tensor  # (B, T), IGNORE where nothing is predicted
    causal: bool
    weights: Tensor | None = None  # (B,) weights of the rows' losses; None: all 1
    mass: int | None = None  # expected sum of the weights of all labels; None: the number of labels


def apply(
    objective: RowObjective,
    ids: Tensor,
    segments: Tensor | None,
    samples: Tensor,
    *,
    seed: int,
    step: int,
    vocabulary: Vocabulary,
) -> ModelInputs:
    """Make the model inputs of `ids` (B, T) under `objective`, `step` steps into its phase.

    `samples` (B,) are the rows' sample indices, which determine the masks; for static masks the rows of the corpus. CLM predicts the next token of the segment
    at each position. MLM masks a share of the non-special tokens and predicts them in place; MNTP predicts them one
    position earlier, so it never masks the first token of a segment. CLM and MLM losses are not comparable: compare
    losses within one objective only.
    """
    match objective:
        case CLM():
            return ModelInputs(ids, _shifted(ids, segments), causal=True)
        case MLM() | MNTP():
            bits = hash32(seed, "mask", samples, ids.shape[1])
            if objective.unit != "token":
                bits = bits.gather(1, _unit_starts(objective, ids, segments, samples, seed, vocabulary))
            open_to_masks = ~vocabulary.special.to(ids.device)[ids]
            if objective.shifted:
                open_to_masks[:, 0] = False
                if segments is not None:
                    open_to_masks[:, 1:] &= segments[:, 1:] == segments[:, :-1]
            bounds = _mask_bounds(objective, samples, seed, step)
            masked = open_to_masks & (bits < bounds[:, None])
            labels = ids.masked_fill(~masked, IGNORE)
            if objective.shifted:
                labels = _shifted(labels, segments)
            inputs = _replaced(objective, ids, masked, samples, seed, vocabulary)
            if objective.weight == "1":
                return ModelInputs(inputs, labels, causal=False)
            # A row with a bound of 0 has no label, so its weight does not matter.
            weights = 2**32 / bounds.clamp(min=1).double()
            return ModelInputs(inputs, labels, False, weights.float(), int(open_to_masks.sum()))
        case unknown:
            assert_never(unknown)


def _mask_bounds(objective: MLM, samples: Tensor, seed: int, step: int) -> Tensor:
    """Return the bounds of the rows below which hashes select masked tokens. (B,)"""
    ratio = objective.ratio
    if isinstance(ratio, Uniform):
        drawn = hash_samples(seed, "ratio", samples).double() / 2**32
        return ((ratio.low + (ratio.high - ratio.low) * drawn) * 2**32).long()
    constant = objective.ratio_at(step)
    assert constant is not None
    return torch.full_like(samples, threshold(constant))


def _unit_starts(
    objective: MLM,
    ids: Tensor,
    segments: Tensor | None,
    samples: Tensor,
    seed: int,
    vocabulary: Vocabulary,
) -> Tensor:
    """Return the position at which the word or span of each token begins; none reaches over a segment's end. (B, T)

    The hash at that position decides for the whole unit, so that each token is masked with the probability of one.
    """
    if objective.unit == "word":
        assert vocabulary.continues is not None, "made with the table of words"
        starts = ~vocabulary.continues[ids]
        starts[:, 1:] |= vocabulary.special[ids[:, :-1]]
    else:  # geometric lengths: a new span begins at each token with the same probability
        starts = hash32(seed, "span", samples, ids.shape[1]) < threshold(1 / objective.mean_span)
    starts[:, 0] = True
    if segments is not None:
        starts[:, 1:] |= segments[:, 1:] != segments[:, :-1]
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return positions.masked_fill(~starts, 0).cummax(1).values


def _shifted(labels: Tensor, segments: Tensor | None) -> Tensor:
    """Move each label to the position before it; none crosses a segment boundary."""
    shifted = torch.full_like(labels, IGNORE)
    shifted[:, :-1] = labels[:, 1:]
    if segments is not None:
        shifted[:, :-1].masked_fill_(segments[:, 1:] != segments[:, :-1], IGNORE)
    return shifted


def _replaced(
    objective: MLM, ids: Tensor, masked: Tensor, samples: Tensor, seed: int, vocabulary: Vocabulary
) -> Tensor:
    """Return `ids` with masked tokens turned into the mask token, a random token or themselves, as `replace` says."""
    to_mask, to_random, _ = objective.replace
    if to_mask == 1:
        return ids.masked_fill(masked, vocabulary.mask_id)
    bits = hash32(seed, "replace", samples, ids.shape[1])
    inputs = ids.masked_fill(masked & (bits < threshold(to_mask)), vocabulary.mask_id)
    if to_random:
        ordinary = vocabulary.ordinary.to(ids.device)
        random = ordinary[below(hash32(seed, "token", samples, ids.shape[1]), len(ordinary))]
        at_random = masked & (bits >= threshold(to_mask)) & (bits < threshold(to_mask + to_random))
        inputs = torch.where(at_random, random, inputs)
    return inputs


SIGMAS = 5  # a batch in 3.5 million has more labels than `label_bound`


def label_bound(objective: RowObjective, rows: int, length: int) -> int:
    """Return a number of labels that a batch of `rows` rows of `length` tokens hardly ever exceeds.

    It is mean + 5σ at the highest ratio, rounded up to 128. It is constant over a phase, so that a compiled step keeps
    its shapes while the masking ratio changes.
    """
    tokens = rows * length
    spread = SIGMAS * math.sqrt(rows * objective.label_variance(length))
    return min(tokens, math.ceil((tokens * objective.highest_ratio + spread) / 128) * 128)


# ---------------------------------------------------------------- rows of a step


@dataclass(frozen=True)
class Assigned:
    """Samples of a step that have one objective, and how their loss enters that of the step, before its mass."""

    objective: RowObjective
    samples: Tensor
    term: LossTerm = WHOLE


def assign(objective: RowObjective | Mix, first: int, rows: int, *, seed: int, step: int) -> list[Assigned]:
    """Return the objectives of the samples [first, first + rows), which are `step` steps into their phase.

    For a mixture, a permutation of the rows is cut at the cumulative shares. Where a cut falls between two rows, a
    counter decides, so that numbers of rows vary by one around shares that hold exactly in expectation. All of it is a
    function of seed, `first`, `rows` and the step, whatever process asks.
    """
    samples = torch.arange(first, first + rows)
    if not isinstance(objective, Mix):
        return [Assigned(objective, samples)]
    parts = objective.parts_at(step)
    order = samples[permute(torch.arange(rows), rows, salt(seed, "mix", first))]
    offset = (int(hash_samples(seed, "mix/offset", samples[:1])) + 0.5) / 2**32
    assigned, begin, until = [], 0, 0.0
    for number, part in enumerate(parts):
        until += part.share
        last = number == len(parts) - 1
        end = rows if last else min(rows, max(begin, math.ceil(until * rows - offset)))
        count, own = end - begin, objective.mean_over == "objective"
        term = LossTerm(
            mass=0,
            number=number if own else 0,
            terms=len(parts) if own else 1,
            weight=part.weight * count / rows if own else part.weight,
        )
        assigned.append(Assigned(part.objective, order[begin:end], term))
        begin = end
    return assigned
