"""Who sees whom in a model, found by changing one token at a time; and whether it reads as transformers' own does."""

from __future__ import annotations

from typing import Any

import torch
from families.build import VOCAB, reaches
from torch import Tensor

from biphase.attention import AttentionPattern, segment_mask
from biphase.models.backbone import LanguageModel

LENGTH = 24  # longer than two layers of windows reach
SEGMENTS = (5, 11, 8)
CLOSE = 2e-5  # of the largest number


def texts(rows: int, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(5))


def whole(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1]).expand_as(ids)


def close(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= CLOSE * theirs.abs().max().clamp(min=1))


@torch.no_grad()
def check_own_forward(model: LanguageModel, own: Any, *, causal: bool) -> None:
    """Our logits are those of transformers' own forward with its own attention.

    The one that is written out: its others leave out caps and sinks in some versions.
    """
    ids = texts(2)
    own.set_attn_implementation("eager")
    theirs = own(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    ours = model.logits(ids, whole(ids), AttentionPattern(causal))[..., :VOCAB]
    assert close(ours, theirs), f"logits differ by {(ours - theirs).abs().max():.1e}"


@torch.no_grad()
def check_sight(model: LanguageModel) -> None:
    """At every position: exactly those tokens that the direction and the windows allow are felt."""
    layers = reaches(model.model.config)
    told = {
        "causal": (AttentionPattern(causal=True), layers),
        "both ways": (AttentionPattern(causal=False), layers),
        "both ways, windows opened": (AttentionPattern(causal=False, windows=False), [None] * len(layers)),
    }
    for said, (pattern, reach) in told.items():
        felt = _felt(model, pattern)
        wrong = (felt != _allowed(reach, causal=pattern.causal)).nonzero().tolist()
        assert not wrong, f"{said}: token {wrong[0][0]} felt at {wrong[0][1]}: {bool(felt[tuple(wrong[0])])}"


@torch.no_grad()
def check_segments(model: LanguageModel) -> None:
    """Packed segments are blind to one another and read as if each stood alone, positions from 0."""
    ids = texts(1, sum(SEGMENTS))
    numbers = torch.repeat_interleave(torch.arange(len(SEGMENTS)), torch.tensor(SEGMENTS))[None]
    places = torch.cat([torch.arange(length) for length in SEGMENTS])[None]
    for causal in (True, False):
        pattern = AttentionPattern(causal, mask=segment_mask(numbers, causal=causal))
        together = model.hidden(ids, places, pattern)
        for number in range(len(SEGMENTS)):
            here = numbers[0] == number
            alone = model.hidden(ids[:, here], whole(ids[:, here]), AttentionPattern(causal))
            assert close(together[:, here], alone), f"segment {number} reads otherwise than alone"
            changed = torch.where(here, (ids + 1) % VOCAB, ids)
            moved = (model.hidden(changed, places, pattern) != together).any(-1)[0]
            assert not moved[~here].any(), f"segment {number} is seen by another"


def _felt(model: LanguageModel, pattern: AttentionPattern) -> Tensor:
    """True where a change of the token (row) is felt at a position (column)."""
    ids = texts(1)
    plain = model.hidden(ids, whole(ids), pattern)
    rows = []
    for at in range(LENGTH):
        changed = ids.clone()
        changed[0, at] = (ids[0, at] + 1) % VOCAB
        rows.append((model.hidden(changed, whole(ids), pattern) != plain).any(-1)[0])
    return torch.stack(rows)


def _allowed(layers: list[int | None], *, causal: bool) -> Tensor:
    """What layers of these reaches let through, one after the other."""
    places = torch.arange(LENGTH)
    ahead = (
        places[None, :] - places[:, None]
    )  # how far after the changed token (row) a position (column) stands
    felt = torch.eye(LENGTH, dtype=torch.bool)
    for reach in layers:
        near = torch.ones_like(felt) if reach is None else ahead.abs() <= reach
        passes = near & (ahead >= 0) if causal else near
        felt = (felt.float() @ passes.float()) > 0
    return felt
