"""Probes that check, before training, that a model follows the attention pattern it is given.

They change one token and compare outputs exactly, so they work for any architecture. A model is rejected if it attends
where it must not, ignores later tokens under bidirectional attention, continues positions into the next text of a
packed row, or computes something else with our attention than with its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from biphase.attention import NAME, AttentionPattern, segment_mask
from biphase.errors import ModelError, one_line

LENGTH = 16
HALF = LENGTH // 2
CLOSE = 1e-3  # relative to the largest value; a missing part of a computation changes it far more

Read = Callable[[Tensor, Tensor, AttentionPattern], Tensor]  # (1, T) ids and positions → (1, T, d)


@torch.no_grad()
def probe_attention(read: Read, *, vocab: int, name: str, device: torch.device, causal: bool) -> int:
    """Raise ModelError unless a model supports bidirectional, packed and, with `causal`, causal attention.

    Returns the width of its output. The changed tokens are next to the boundary on either side, since layers that mix
    tokens outside attention (convolutions, recurrences) may reach only the next token, and only in one direction.
    """
    ids = _ids(vocab, device)
    positions = torch.arange(LENGTH, device=device)[None]
    restarted = positions % HALF
    apart = AttentionPattern(False, mask=segment_mask((positions >= HALF).long(), causal=False))

    def moved(pattern: AttentionPattern, at: int, places: Tensor = positions) -> Tensor:
        """Return which positions' outputs change when the token at `at` changes."""
        changed = ids.clone()
        changed[0, at] = (changed[0, at] + 1) % vocab
        before, after = (read(one, places, pattern)[0] for one in (ids, changed))
        return (before != after).any(-1)

    plain = read(ids, positions, AttentionPattern(causal=False))
    if not plain.isfinite().all():
        raise ModelError(f"{name} gives numbers that are not finite; look at its weights")
    if causal and moved(AttentionPattern(causal=True), HALF)[:HALF].any():
        raise ModelError(f"{name} sees the future in causal mode; it cannot be trained with CLM here")
    if not moved(AttentionPattern(causal=False), HALF)[:HALF].any():
        raise ModelError(
            f"{name} stays blind to later tokens whatever it is told; it cannot become an encoder here"
        )
    if moved(apart, HALF, restarted)[:HALF].any() or moved(apart, HALF - 1, restarted)[HALF:].any():
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
    positions = torch.arange(LENGTH, device=device)[None]
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
    return torch.randint(0, vocab, (1, LENGTH), generator=torch.Generator().manual_seed(0)).to(device)


def _close(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= CLOSE * theirs.abs().max())
