"""Texts of different lengths as one input: end to end for the varlen kernel, else side by side in full rows.

A batch of 32 short sentences padded to the longest is more than half padding. Here there is none on a GPU, and on
a CPU only what is left at the ends of rows when texts have been fitted into them, longest first: 1 to 2% of a batch
of 32 sentences of 13 tokens on average, where padding to the longest would be 68%.
"""

from __future__ import annotations

import contextlib
import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from biphase import fast
from biphase.attention import CURRENT_PATTERN, AttentionPattern, CurrentPattern, segment_mask
from biphase.errors import ModelError, one_line
from biphase.fast.trunk import FusedTrunk, fp8_refusal, refusal
from biphase.models import hub as hub_models
from biphase.models.probe import probe_attention, probe_own
from biphase.specs import Hub

ROW = (
    96  # a row is at most as long as the longest text, or this: short texts share rows, attention stays cheap
)
ALIGNED = 16  # bytes: where a tensor may begin inside a buffer


@dataclass(frozen=True)
class PackedTexts:
    """n texts with N tokens together, in B rows of T places.

    Where it was `padded`, N counts the padding too, whose owner is n: no text.
    """

    ids: Tensor  # (B, T)
    positions: Tensor  # (B, T) counted from the start of each text
    segments: Tensor  # (B, T) number of the text in its row; places left over have one of their own
    boundaries: (
        Tensor | None
    )  # (n+1,) int32: cumulative lengths, where there is one row for the varlen kernel
    longest: int
    at: Tensor  # (N,) where each token stands in the B·T places, text after text
    owner: Tensor  # (N,) which text it belongs to
    lengths: Tensor  # (n,)
    causal: bool = False

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def pattern(self) -> AttentionPattern:
        """Every text sees all of itself, or what came before, and nothing else."""
        if self.boundaries is not None:
            return AttentionPattern(self.causal, self.boundaries, self.longest)
        return AttentionPattern(self.causal, mask=segment_mask(self.segments, causal=self.causal))

    def tokens(self, hidden: Tensor) -> Tensor:
        """Of (B, T, …) places those with a token, text after text. → (N, …)"""
        every = hidden.flatten(0, 1)
        return every if self.boundaries is not None else every[self.at]  # end to end they stand so already

    def padded(self, width: int, *, spare: int, longest: int) -> PackedTexts:
        """The same texts end to end, then `spare` texts of nothing that fill the row up to `width` places.

        Each of those has a token at least, so that their number, like every shape, is the same for any n texts that
        fit; `longest` says how long texts of that kind may be at most. They are no texts for pooling: `lengths` has
        only the real ones.
        """
        more = width - self.ids.numel()
        assert self.boundaries is not None, "only texts that stand end to end can be padded behind the last"
        assert 0 < spare <= more <= spare * longest
        assert self.longest <= longest
        lengths = np.full(spare, more // spare)
        lengths[: more % spare] += 1
        number = np.repeat(np.arange(spare), lengths)
        position = np.arange(more) - (np.cumsum(lengths) - lengths)[number]
        ends = torch.from_numpy(np.cumsum(lengths).astype(np.int32)) + self.boundaries[-1]
        return replace(
            self,
            ids=F.pad(self.ids, (0, more)),
            positions=torch.cat([self.positions, torch.from_numpy(position)[None]], 1),
            segments=torch.cat([self.segments, torch.from_numpy(number)[None] + len(self)], 1),
            boundaries=torch.cat([self.boundaries, ends]),
            longest=longest,
            at=torch.arange(width),
            owner=F.pad(self.owner, (0, more), value=len(self)),
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if isinstance(value, Tensor)}

    def to(self, device: torch.device) -> PackedTexts:
        """The same on `device`, without waiting for the copy."""
        if device.type == "cpu":
            return self
        own = self.tensors
        buffer = in_one_piece(list(own.values()), pinned=True).to(device, non_blocking=True)
        return replace(self, **dict(zip(own, jobs(buffer, list(own.values())), strict=True)))


def in_one_piece(tensors: Sequence[Tensor], *, pinned: bool) -> Tensor:
    """Tensors of the host copied into one buffer of bytes: one transfer instead of many."""
    places, size = _places(tensors)
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    for one, job in zip(tensors, _cut(buffer, tensors, places), strict=True):
        job.copy_(one)
    return buffer


def jobs(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """What `in_one_piece` put into a buffer: views of it, each of the shape and type of its tensor in `like`."""
    return _cut(buffer, like, _places(like)[0])


def _places(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each tensor begins, in bytes, and where the last ends."""
    places, end = [], 0
    for one in tensors:
        places.append(end)
        end += -(-one.nbytes // ALIGNED) * ALIGNED
    return places, end


def _cut(buffer: Tensor, like: Sequence[Tensor], places: list[int]) -> list[Tensor]:
    return [
        buffer[place : place + one.nbytes].view(one.dtype).view(one.shape)
        for one, place in zip(like, places, strict=True)
    ]


def pack(texts: Sequence[np.ndarray], *, varlen: bool, pad: int = 0, causal: bool = False) -> PackedTexts:
    """Put texts (their ids) into one input. `varlen`: one row, without padding."""
    lengths = np.fromiter((len(text) for text in texts), np.int64, len(texts))
    longest = int(lengths.max())
    if varlen:
        rows, starts, width = 1, np.cumsum(lengths) - lengths, int(lengths.sum())
        row_of, number = np.zeros(len(texts), np.int64), np.arange(len(texts))
    else:
        row_of, starts, number = _fit(lengths, max(longest, ROW))
        rows, width = int(row_of.max()) + 1, int((starts + lengths).max())
    owner = np.repeat(np.arange(len(texts)), lengths)
    position = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    at = (row_of * width + starts)[owner] + position
    ids = np.full(rows * width, pad, np.int64)
    positions, segments = np.zeros(rows * width, np.int64), np.full(rows * width, -1, np.int64)
    ids[at], positions[at], segments[at] = np.concatenate(texts), position, number[owner]
    boundaries = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32) if varlen else None
    return PackedTexts(
        ids=torch.from_numpy(ids).view(rows, width),
        positions=torch.from_numpy(positions).view(rows, width),
        segments=torch.from_numpy(segments).view(rows, width),
        boundaries=None if boundaries is None else torch.from_numpy(boundaries),
        longest=longest,
        at=torch.from_numpy(at),
        owner=torch.from_numpy(owner),
        lengths=torch.from_numpy(lengths),
        causal=causal,
    )


# Of each text: its row, its place there, its number in the row.
Fitted = tuple[np.ndarray, np.ndarray, np.ndarray]


def _fit(lengths: np.ndarray, width: int) -> Fitted:
    """Texts in rows of at most `width`: spread evenly, or row after row filled up, whichever leaves less empty.

    Of a mixture of lengths the last row filled up would often stay half empty; but where few texts make a row, filling
    needs fewer rows.
    """
    counts = range(-(-int(lengths.sum()) // width), len(lengths))
    enough = bisect_left(counts, True, key=lambda rows: _width(_spread(lengths, rows), lengths) <= width)
    fitted = _spread(lengths, counts.start + enough), _fill(lengths, width)
    return min(fitted, key=lambda one: (int(one[0].max()) + 1) * _width(one, lengths))


def _width(fitted: Fitted, lengths: np.ndarray) -> int:
    return int((fitted[1] + lengths).max())


def _spread(lengths: np.ndarray, rows: int) -> Fitted:
    """Longest first, each into the row with the most room."""
    row_of, starts, number = (np.zeros(len(lengths), np.int64) for _ in range(3))
    used = [(0, row) for row in range(rows)]
    count = [0] * rows
    for text in np.argsort(-lengths, kind="stable"):
        start, row = used[0]
        heapq.heapreplace(used, (start + int(lengths[text]), row))
        row_of[text], starts[text], number[text] = row, start, count[row]
        count[row] += 1
    return row_of, starts, number


def _fill(lengths: np.ndarray, width: int) -> Fitted:
    """Longest first, each into the first row with room."""
    row_of, starts, number = (np.zeros(len(lengths), np.int64) for _ in range(3))
    used: list[int] = []
    count: list[int] = []
    for text in np.argsort(-lengths, kind="stable"):
        length = int(lengths[text])
        row = next((row for row, full in enumerate(used) if full + length <= width), len(used))
        if row == len(used):
            used.append(0)
            count.append(0)
        row_of[text], starts[text], number[text] = row, used[row], count[row]
        used[row] += length
        count[row] += 1
    return row_of, starts, number


# ---------------------------------------------------------------- encoder
# Any model as an encoder: a trunk that reads packed text in both directions, whatever it was trained for.
#
# Differences between families are read from the model itself: an offset of its positions, a second kind of
# embedding, the longest text it can read.


class Encoder(nn.Module):
    """(B, T) ids → (B, T, width) hidden states."""

    def __init__(self, trunk: nn.Module, *, context: int, windows: bool = True) -> None:
        super().__init__()
        self.trunk = trunk
        self.fused: FusedTrunk | None = None
        self.call = [trunk]  # or its compiled form; in a list: not a second module
        self.context = context  # the most tokens it can read
        self.windows = windows  # sliding windows hold in both directions; else there they see everything
        config: Any = trunk.config
        self.width: int = config.hidden_size
        self.layers: int = getattr(config, "num_hidden_layers", None) or 12
        self.init_std: float = getattr(config, "initializer_range", None) or 0.02
        self.first_position = _first_position(trunk)
        self.said = CurrentPattern()
        for module in trunk.modules():
            setattr(
                module, CURRENT_PATTERN, self.said
            )  # a few families do not hand extra arguments on to their layers
        # GPT-2's forward takes types too, but looks them up among its words: zeros would add its first word to each.
        self.typed = any(name.endswith("token_type_embeddings") for name, _ in trunk.named_modules())

    def prepare(self, device: torch.device, precision: str) -> str:
        """Choose how to compute on `device`, once the weights are there: "fused", or "plain" as transformers does it."""
        why = refusal(self.trunk, in_fp8=precision == "fp8") or fast.lacking(device)
        if precision == "fp8":
            why = why or fp8_refusal(device)
            if why:
                raise ModelError(f"precision='fp8' cannot be had ({why}); say precision='bf16'")
        suits = not why and precision in ("bf16", "pure-bf16", "fp8")
        self.fused = FusedTrunk(self.trunk, in_fp8=precision == "fp8") if suits else None
        return "fused" if suits else "plain"

    @property
    def graphable(self) -> bool:
        """A step through it may be captured as a CUDA graph: nothing waits for the host, nothing is left to chance."""
        return self.fused is not None

    def copies(self) -> dict[int, Tensor]:
        """Copies of its weights in 16 bits, by the address of the weight."""
        return {} if self.fused is None else self.fused.copies()

    def refresh(self, copied: bool = False) -> None:
        """The weights have changed: make anew what was made of them; their 16-bit copies unless `copied` already."""
        if self.fused is not None:
            self.fused.refresh(copied)

    def _apply(self, *args: Any, **kwargs: Any) -> Encoder:
        """Moved or cast: copies of the weights are no longer theirs."""
        self.fused = None
        return super()._apply(*args, **kwargs)

    def forward(self, ids: Tensor, positions: Tensor, pattern: AttentionPattern) -> Tensor:
        if self.fused is not None:
            return self.fused(ids, positions, pattern)
        more = {"token_type_ids": torch.zeros_like(ids)} if self.typed else {}
        if not self.windows:
            pattern = replace(pattern, windows=False)
        self.said.pattern = pattern
        try:
            return self.call[0](
                input_ids=ids,
                position_ids=positions + self.first_position,
                use_cache=False,
                pattern=pattern,
                **more,
            ).last_hidden_state
        finally:
            self.said.pattern = None


def encoder_from_hub(hub: Hub) -> Encoder:
    """The trunk of an existing model, in fp32, with our attention; refused if it cannot read in both directions."""
    trunk = hub_models.trunk(hub)
    refuse_own_attention(trunk, hub.source)
    if getattr(trunk, "pooler", None) is not None:
        trunk.pooler = None  # a head for another purpose: not evaluated, and it would never get a gradient
    try:
        encoder = Encoder(trunk, context=context_of(trunk), windows=hub.windows == "symmetric")
        probe_encoder(encoder)
    except ModelError:
        raise
    except Exception as wrong:  # a forward made for other inputs fails in its own way
        raise ModelError(
            f"{hub.source} ({type(trunk).__name__}) cannot read packed text ({one_line(wrong)}); give another model"
        ) from None
    return encoder


@torch.no_grad()
def refuse_own_attention(trunk: Any, source: str) -> None:
    """Refuse a model whose layers compute their attention, or whatever they have instead, without asking."""
    asked: list[str] = []
    was_training = trunk.training
    trunk.eval()
    ids = torch.zeros(1, 4, dtype=torch.long, device=next(trunk.parameters()).device)
    # What fails before it has asked was made for another attention; what fails later, the probes find and say.
    with contextlib.suppress(Exception):
        Encoder(trunk, context=4)(
            ids, torch.arange(4, device=ids.device)[None], AttentionPattern(False, asked=asked)
        )
    if not asked:
        _refuse_broken(trunk, ids, source)
    trunk.train(was_training)
    if not asked:
        raise ModelError(
            f"{source} ({type(trunk).__name__}) computes by itself what its tokens see: its attention cannot be replaced, "
            "so it cannot be made to read in both directions; give another model"
        )


def _refuse_broken(trunk: Any, ids: Tensor, source: str) -> None:
    """Refuse a model that fails in transformers' own forward too, with what that says."""
    trunk.config._attn_implementation = "eager"
    try:
        trunk(input_ids=ids, use_cache=False)
    except Exception as wrong:  # in its own way
        raise ModelError(
            f"{source} ({type(trunk).__name__}) fails in transformers itself ({one_line(wrong)}); look at its config.json, "
            "or give another model"
        ) from None


def probe_encoder(encoder: Encoder) -> None:
    """Refuse a model that does not look ahead, or looks into its neighbour in a packed row."""
    was_training = encoder.training
    encoder.eval()
    trunk: Any = encoder.trunk
    about = {
        "vocab": int(trunk.config.vocab_size),
        "name": type(trunk).__name__,
        "device": next(trunk.parameters()).device,
    }
    try:
        # A few models make narrower what they read than they are inside.
        encoder.width = probe_attention(encoder, **about, causal=False)
        probe_own(trunk, encoder, **about)
    finally:
        encoder.train(was_training)


def context_of(trunk: nn.Module) -> int:
    """The most tokens a model can read."""
    config: Any = trunk.config
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    within = int(longest if longest and longest > 0 else 2048)
    return min([within, *_turned_alike(config)]) - _first_position(trunk)


def _turned_alike(config: Any) -> list[int]:
    """Lengths beyond which positions would be turned by the longest text of a batch: texts would feel each other."""
    said = getattr(config, "rope_parameters", None) or {}
    every = [one for one in (said, *said.values()) if isinstance(one, dict)]
    longest = [
        one.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        for one in every
        if one.get("rope_type") == "longrope"
    ]
    return [int(one) for one in longest if one]


def _first_position(trunk: nn.Module) -> int:
    """Some families (RoBERTa's) count positions from behind their padding index."""
    for name, module in trunk.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return int(module.padding_idx) + 1
    return 0
