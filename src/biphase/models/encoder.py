"""Encoders: any transformers backbone over packed texts, the packing of texts, probes of attention, and task heads.

`Encoder` wraps a backbone. Differences between families are read from the model itself: an offset of its positions,
token type embeddings, its context length. `encoder_from_hub` loads and checks one. The heads of the four task families
pool or project its hidden states.

`pack` puts texts of different lengths into one input (`PackedTexts`): concatenated for the varlen kernel on a GPU,
which needs no padding, else packed into rows, longest first. For 32 sentences of 13 tokens on average the rows contain
1 to 2% padding; padding each sentence to the longest would give 68%.

`probe_attention` and `probe_own` check, before training, that a model follows the attention pattern it is given. They
change one token and compare outputs exactly, so they work for any architecture. A model is rejected if it attends where
it must not, ignores later tokens under bidirectional attention, continues positions into the next text of a packed row,
or computes something else with our attention than with its own.
"""

from __future__ import annotations

import contextlib
import heapq
from bisect import bisect_left
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from biphase import fast
from biphase.attention import CURRENT_PATTERN, NAME, AttentionPattern, CurrentPattern, segment_mask
from biphase.errors import ModelError, one_line
from biphase.fast.trunk import FusedTrunk, refusal
from biphase.models import hub as hub_models
from biphase.objectives import in_one_buffer, views_of
from biphase.specs import Hub

# Rows are at most as long as the longest text, or this: short texts share rows, but attention stays cheap.
ROW = 96


@dataclass(frozen=True)
class PackedTexts:
    """n texts with N tokens in total, in B rows of T positions.

    After `padded`, N includes the padding, whose owner is n (no text).
    """

    ids: Tensor  # (B, T)
    positions: Tensor  # (B, T) counted from the start of each text
    segments: Tensor  # (B, T) index of the text in its row; −1 in unused positions
    boundaries: Tensor | None  # (n+1,) int32: cumulative lengths, if it is one row for the varlen kernel
    longest: int
    at: Tensor  # (N,) index of each token among the B·T positions, text after text
    owner: Tensor  # (N,) index of the token's text
    lengths: Tensor  # (n,)
    causal: bool = False

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def pattern(self) -> AttentionPattern:
        """The attention pattern: each text attends to itself only, causally if `causal`."""
        if self.boundaries is not None:
            return AttentionPattern(self.causal, self.boundaries, self.longest)
        return AttentionPattern(self.causal, mask=segment_mask(self.segments, causal=self.causal))

    def tokens(self, hidden: Tensor) -> Tensor:
        """Select the positions that hold a token, text after text. (B, T, …) → (N, …)"""
        every = hidden.flatten(0, 1)
        return every if self.boundaries is not None else every[self.at]  # concatenated texts are in order

    def padded(self, width: int, *, spare: int, longest: int) -> PackedTexts:
        """Return the concatenated texts followed by `spare` dummy texts that fill the row up to `width` tokens.

        Each dummy text has at least one token, so their number and all shapes are the same for any n texts that fit;
        `longest` is the maximum length of such texts. `lengths` has only the real texts, so that pooling ignores the
        others.
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
        """The tensor fields by name."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if isinstance(value, Tensor)}

    def to(self, device: torch.device) -> PackedTexts:
        """Return the texts on `device`, without waiting for the copy."""
        if device.type == "cpu":
            return self
        own = self.tensors
        buffer = in_one_buffer(list(own.values()), pinned=True).to(device, non_blocking=True)
        return replace(self, **dict(zip(own, views_of(buffer, list(own.values())), strict=True)))


def pack(texts: Sequence[np.ndarray], *, varlen: bool, pad: int = 0, causal: bool = False) -> PackedTexts:
    """Pack texts, given as ids, into one input; with `varlen`, into one row without padding."""
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


# For each text: its row, its start in the row, its index in the row.
Fitted = tuple[np.ndarray, np.ndarray, np.ndarray]


def _fit(lengths: np.ndarray, width: int) -> Fitted:
    """Fit texts into rows of at most `width`, by `_spread` or `_fill`, whichever leaves less padding.

    With mixed lengths, filling often leaves the last row half empty; with few texts per row, filling needs fewer rows.
    """
    counts = range(-(-int(lengths.sum()) // width), len(lengths))
    enough = bisect_left(counts, True, key=lambda rows: _width(_spread(lengths, rows), lengths) <= width)
    fitted = _spread(lengths, counts.start + enough), _fill(lengths, width)
    return min(fitted, key=lambda rows: (int(rows[0].max()) + 1) * _width(rows, lengths))


def _width(fitted: Fitted, lengths: np.ndarray) -> int:
    return int((fitted[1] + lengths).max())


def _spread(lengths: np.ndarray, rows: int) -> Fitted:
    """Assign each text to the one of `rows` rows that has the most room."""
    emptiest = [(0, row) for row in range(rows)]  # a heap: there may be thousands of texts

    def take(used: list[int], length: int) -> int:
        start, row = emptiest[0]
        heapq.heapreplace(emptiest, (start + length, row))
        return row

    return _assign(lengths, take, rows)


def _fill(lengths: np.ndarray, width: int) -> Fitted:
    """Assign each text to the first row of `width` with room, or to a new one."""

    def first_with_room(used: list[int], length: int) -> int:
        return next((row for row, full in enumerate(used) if full + length <= width), len(used))

    return _assign(lengths, first_with_room, 0)


def _assign(lengths: np.ndarray, choose: Callable[[list[int], int], int], rows: int) -> Fitted:
    """Assign texts, longest first, to rows by `choose(tokens of each row, length of the text)`."""
    row_of, starts, number = (np.zeros(len(lengths), np.int64) for _ in range(3))
    used, count = [0] * rows, [0] * rows
    for text in np.argsort(-lengths, kind="stable"):
        length = int(lengths[text])
        row = choose(used, length)
        if row == len(used):
            used.append(0)
            count.append(0)
        row_of[text], starts[text], number[text] = row, used[row], count[row]
        used[row] += length
        count[row] += 1
    return row_of, starts, number


# ---------------------------------------------------------------- encoder


class Encoder(nn.Module):
    """A transformers backbone with our attention: (B, T) ids → (B, T, width) hidden states."""

    def __init__(self, trunk: nn.Module, *, context: int, windows: bool = True) -> None:
        super().__init__()
        self.trunk = trunk
        self.fused: FusedTrunk | None = None
        self.call = [trunk]  # or its compiled form; in a list, so that it is not registered as a submodule
        self.context = context  # maximum number of tokens
        self.windows = windows  # bidirectional attention keeps sliding windows; False: it is unrestricted
        config: Any = trunk.config
        self.width: int = config.hidden_size
        self.layers: int = getattr(config, "num_hidden_layers", None) or 12
        self.init_std: float = getattr(config, "initializer_range", None) or 0.02
        self.first_position = _first_position(trunk)
        self.current = CurrentPattern()  # a few families do not pass extra arguments on to their layers
        for module in trunk.modules():
            setattr(module, CURRENT_PATTERN, self.current)
        # GPT-2's forward takes token types too, but embeds them as tokens: zeros would add token 0's embedding.
        self.typed = any(name.endswith("token_type_embeddings") for name, _ in trunk.named_modules())

    def prepare(self, device: torch.device, precision: str) -> str:
        """Choose the compute path after the weights were moved to `device`: "fused", or "plain" (transformers')."""
        why = refusal(self.trunk) or fast.lacking(device)
        suits = not why and precision in ("bf16", "pure-bf16")
        self.fused = FusedTrunk(self.trunk) if suits else None
        return "fused" if suits else "plain"

    @property
    def graphable(self) -> bool:
        """Whether a training step can be captured as a CUDA graph: it needs neither the host nor random numbers."""
        return self.fused is not None

    def copies(self) -> dict[int, Tensor]:
        """Return the 16-bit copies of the weights, by the address of the weight."""
        return {} if self.fused is None else self.fused.copies()

    def refresh(self, copied: bool = False) -> None:
        """Update what is derived from the weights after they changed; `copied`: the 16-bit copies are up to date."""
        if self.fused is not None:
            self.fused.refresh(copied)

    def _apply(self, *args: Any, **kwargs: Any) -> Encoder:
        """Drop the copies when the model is moved or cast, since they belong to the old weights."""
        self.fused = None
        return super()._apply(*args, **kwargs)

    def forward(self, ids: Tensor, positions: Tensor, pattern: AttentionPattern) -> Tensor:
        if self.fused is not None:
            return self.fused(ids, positions, pattern)
        more = {"token_type_ids": torch.zeros_like(ids)} if self.typed else {}
        if not self.windows:
            pattern = replace(pattern, windows=False)
        self.current.pattern = pattern
        try:
            return self.call[0](
                input_ids=ids,
                position_ids=positions + self.first_position,
                use_cache=False,
                pattern=pattern,
                **more,
            ).last_hidden_state
        finally:
            self.current.pattern = None


# ---------------------------------------------------------------- loading


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Generator[None]:
    """Switch dropout off inside the context."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def encoder_from_hub(hub: Hub) -> Encoder:
    """Load the backbone of an existing model in fp32 with our attention; raise ModelError if it fails the probes."""
    trunk = hub_models.trunk(hub)
    refuse_own_attention(trunk, hub.source)
    if getattr(trunk, "pooler", None) is not None:
        trunk.pooler = None  # unused here, so it would never get a gradient
    try:
        encoder = Encoder(trunk, context=context_of(trunk), windows=hub.windows == "symmetric")
        probe_encoder(encoder)
    except ModelError:
        raise
    except Exception as wrong:  # forwards made for other inputs raise many types
        raise ModelError(
            f"{hub.source} ({type(trunk).__name__}) cannot read packed text ({one_line(wrong)}); give another model"
        ) from None
    return encoder


@torch.no_grad()
def refuse_own_attention(trunk: Any, source: str) -> None:
    """Raise ModelError if a model's layers never call our attention function."""
    calls: list[str] = []
    ids = torch.zeros(1, 4, dtype=torch.long, device=next(trunk.parameters()).device)
    with eval_mode(trunk):
        # Ignore errors: if attention was not called, that is reported below; else the probes report the error.
        with contextlib.suppress(Exception):
            positions = torch.arange(4, device=ids.device)[None]
            Encoder(trunk, context=4)(ids, positions, AttentionPattern(False, callers=calls))
        if not calls:
            _refuse_broken(trunk, ids, source)
            raise ModelError(
                f"{source} ({type(trunk).__name__}) computes by itself what its tokens see: its attention cannot be replaced, "
                "so it cannot be made to read in both directions; give another model"
            )


def _refuse_broken(trunk: Any, ids: Tensor, source: str) -> None:
    """Raise ModelError with transformers' own message if the model also fails with transformers' attention."""
    trunk.config._attn_implementation = "eager"
    try:
        trunk(input_ids=ids, use_cache=False)
    except Exception as wrong:  # many types
        raise ModelError(
            f"{source} ({type(trunk).__name__}) fails in transformers itself ({one_line(wrong)}); look at its config.json, "
            "or give another model"
        ) from None


def probe_encoder(encoder: Encoder) -> None:
    """Raise ModelError if an encoder ignores later tokens, or attends to other texts in a packed row."""
    trunk: Any = encoder.trunk
    vocab, name = int(trunk.config.vocab_size), type(trunk).__name__
    device = next(trunk.parameters()).device
    with eval_mode(encoder):
        # The output of a few models is narrower than their hidden size.
        encoder.width = probe_attention(encoder, vocab=vocab, name=name, device=device, causal=False)
        probe_own(trunk, encoder, vocab=vocab, name=name, device=device)


def context_of(trunk: nn.Module) -> int:
    """Return the maximum number of tokens that a model can read."""
    config: Any = trunk.config
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    within = int(longest if longest and longest > 0 else 2048)
    return min([within, *_longrope_limits(config)]) - _first_position(trunk)


def _longrope_limits(config: Any) -> list[int]:
    """Return the lengths beyond which LongRoPE's rotations depend on the longest text of a batch.

    Beyond them, texts in one batch would influence each other.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    default = getattr(config, "original_max_position_embeddings", None)
    lengths = [
        part.get("original_max_position_embeddings") or default
        for part in (rope, *rope.values())
        if isinstance(part, dict) and part.get("rope_type") == "longrope"
    ]
    return [int(length) for length in lengths if length]


def _first_position(trunk: nn.Module) -> int:
    """Return the first position: some families (RoBERTa's) count positions from their padding index + 1."""
    for name, module in trunk.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return int(module.padding_idx) + 1
    return 0


# ---------------------------------------------------------------- probes


PROBE_LENGTH = 16
HALF = PROBE_LENGTH // 2
PROBE_TOLERANCE = 1e-3  # relative to the largest value; a missing part of a computation changes it far more

Read = Callable[[Tensor, Tensor, AttentionPattern], Tensor]  # (1, T) ids and positions → (1, T, d)


@torch.no_grad()
def probe_attention(read: Read, *, vocab: int, name: str, device: torch.device, causal: bool) -> int:
    """Raise ModelError unless a model supports bidirectional, packed and, with `causal`, causal attention.

    Returns the width of its output. The changed tokens are next to the boundary on either side, since layers that mix
    tokens outside attention (convolutions, recurrences) may reach only the next token, and only in one direction.
    """
    ids = _ids(vocab, device)
    positions = torch.arange(PROBE_LENGTH, device=device)[None]
    restarted = positions % HALF
    apart = AttentionPattern(False, mask=segment_mask((positions >= HALF).long(), causal=False))

    def changes(pattern: AttentionPattern, at: int, positions: Tensor = positions) -> Tensor:
        """Return which positions' outputs change when the token at `at` changes."""
        changed = ids.clone()
        changed[0, at] = (changed[0, at] + 1) % vocab
        before, after = (read(tokens, positions, pattern)[0] for tokens in (ids, changed))
        return (before != after).any(-1)

    plain = read(ids, positions, AttentionPattern(causal=False))
    if not plain.isfinite().all():
        raise ModelError(f"{name} gives numbers that are not finite; look at its weights")
    if causal and changes(AttentionPattern(causal=True), HALF)[:HALF].any():
        raise ModelError(f"{name} sees the future in causal mode; it cannot be trained with CLM here")
    if not changes(AttentionPattern(causal=False), HALF)[:HALF].any():
        raise ModelError(
            f"{name} stays blind to later tokens whatever it is told; it cannot become an encoder here"
        )
    if changes(apart, HALF, restarted)[:HALF].any() or changes(apart, HALF - 1, restarted)[HALF:].any():
        raise ModelError(
            f"{name} looks across the boundary of a text in a packed row (it mixes tokens outside its attention); "
            "it would leak"
        )
    together = read(ids, restarted, apart)[:, HALF:]
    alone = read(ids[:, HALF:], positions[:, :HALF], AttentionPattern(causal=False))
    if not _close(together, alone):
        raise ModelError(
            f"{name} counts positions on from one text to the next in a packed row; it cannot be packed"
        )
    return plain.shape[-1]


@torch.no_grad()
def probe_own(model: Any, read: Read, *, vocab: int, name: str, device: torch.device) -> None:
    """Raise ModelError unless the model's output with our attention, in one direction, equals that of its own class.

    `read` returns what the model's own forward returns first: logits or hidden states.
    """
    ids = _ids(vocab, device)
    if isinstance(pad := model.config.pad_token_id, int):  # a few families give it no position by themselves
        ids[ids == pad] = (pad + 1) % vocab
    positions = torch.arange(PROBE_LENGTH, device=device)[None]
    try:
        model.set_attn_implementation("eager")
        own = model(input_ids=ids, use_cache=False)[0]
    except Exception as wrong:  # forwards made for other inputs raise many types
        raise ModelError(f"{name} cannot read a plain text ({one_line(wrong)}); give another model") from None
    finally:
        model.set_attn_implementation(NAME)
    if not any(_close(read(ids, positions, AttentionPattern(causal)), own) for causal in (True, False)):
        raise ModelError(
            f"{name} does in its attention, its positions or its head what is not known here: with our attention it "
            "gives other numbers than by itself; give another model"
        )


def _ids(vocab: int, device: torch.device) -> Tensor:
    return torch.randint(0, vocab, (1, PROBE_LENGTH), generator=torch.Generator().manual_seed(0)).to(device)


def _close(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= PROBE_TOLERANCE * theirs.abs().max())


# ---------------------------------------------------------------- task heads


def mean_pool(hidden: Tensor, packed: PackedTexts) -> Tensor:
    """Return the mean hidden state over all tokens of each text, in fp32. (B, T, d) → (n, d)

    Each sum runs in the order of the tokens, so the result is deterministic.
    """
    reduce = torch.segment_reduce  # ty: ignore[missing-attribute]  (missing in torch's stubs)
    # unsafe=True: lengths are not checked on the host, and padding after the last text is ignored.
    return reduce(packed.tokens(hidden).float(), "mean", lengths=packed.lengths, unsafe=True)


class TextHead(nn.Module):
    """EuroBERT's classification head: mean pooling → Linear → GELU → Linear."""

    def __init__(self, width: int, labels: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.out = nn.Linear(width, labels)

    def forward(self, hidden: Tensor, packed: PackedTexts) -> Tensor:
        """(B, T, d) → (n, labels)"""
        pooled = mean_pool(hidden, packed).to(self.dense.weight.dtype)
        return self.out(nn.functional.gelu(self.dense(pooled)))


class TokenHead(nn.Module):
    """One Linear on every token: for tags, answer tokens, or start and end."""

    def __init__(self, width: int, labels: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, labels)

    def forward(self, hidden: Tensor, packed: PackedTexts) -> Tensor:
        """(B, T, d) → (N, labels), the tokens text after text"""
        return self.out(packed.tokens(hidden))


class EmbeddingHead(nn.Module):
    """Mean pooling and normalization, without parameters: text embeddings."""

    def forward(self, hidden: Tensor, packed: PackedTexts) -> Tensor:
        """(B, T, d) → (n, d), each of norm 1"""
        return nn.functional.normalize(mean_pool(hidden, packed), dim=-1)


def embed_texts(
    embed: Callable[[PackedTexts], Tensor], inputs: Sequence[PackedTexts], order: Tensor
) -> Tensor:
    """Return the embeddings of packed texts in the order `order`.

    Several inputs are too large to keep for the backward pass, so each is recomputed there.
    """
    if len(inputs) == 1:
        vectors = embed(inputs[0])
    else:
        parts = [checkpoint(embed, packed, use_reentrant=False) for packed in inputs]
        vectors = torch.cat([part for part in parts if isinstance(part, Tensor)])
    return vectors.index_select(0, order)


def similarities(queries: Tensor, documents: Tensor, temperature: float) -> Tensor:
    """Return the logits of InfoNCE: each query's cosines with all documents, over the temperature. (n, d) → (n, n)

    In fp32 whatever the layers use: divided by 0.05, the rounding error of bf16 cosines would be large.
    """
    with torch.autocast(queries.device.type, enabled=False):
        return queries @ documents.T / temperature


def initialise(head: nn.Module, *, std: float, seed: int) -> None:
    """Initialize a head from the seed: weights normal with the backbone's `std`, biases 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
