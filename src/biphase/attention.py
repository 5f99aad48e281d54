"""The attention function of every model: direction and segment boundaries are arguments that select the kernel.

`attend` is registered with transformers under the name `biphase`, and transformers' own masks are switched off, so
this module alone decides which tokens attend to which. An `AttentionPattern` is passed through the model as a forward
argument:

    whole rows                           scaled_dot_product_attention(is_causal=…)
    segments, CUDA, 16-bit               varlen kernel: no mask and no work across segments
    segments, otherwise                  scaled_dot_product_attention with a mask (the reference path)
    logit softcap or attention sinks     computed step by step with a mask: no kernel supports them

Every path is tested against the reference path. A layer's sliding window restricts attention backwards if attention is
causal, and to both sides if it is bidirectional. Other model-specific arguments that change the scores (position
biases) raise an error instead of being ignored.
"""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from biphase.errors import ModelError
from biphase.objectives import Batch

varlen_attn: Any = None
with contextlib.suppress(ImportError):  # older torch: masks are used instead
    from torch.nn.attention.varlen import varlen_attn

NAME = "biphase"
CHANGES_THE_SCORES = ("position_bias", "cache_position_bias")


@dataclass(frozen=True)
class AttentionPattern:
    """Which tokens attend to which in one forward pass: the direction, and the segments attention stays inside."""

    causal: bool
    boundaries: Tensor | None = None  # (S+1,) int32, for the varlen kernel
    longest: int = 0  # upper bound on the length of a segment
    steady: bool = False  # every batch has the same number of segments
    mask: Tensor | None = None  # (B, 1, T, T) bool, for scaled_dot_product_attention
    windows: bool = True  # sliding windows also apply to bidirectional attention
    asked: list[str] | None = None  # for probes: collects the class names of the modules that call `attend`


@dataclass
class CurrentPattern:
    """The attention pattern of the current forward pass, for layers whose model does not pass the argument on."""

    pattern: AttentionPattern | None = None


CURRENT_PATTERN = "biphase_said"  # attribute of each module of a backbone that holds its CurrentPattern


def pattern_of(batch: Batch, *, varlen: bool) -> AttentionPattern:
    """Return the attention pattern of a batch; `varlen` says whether the varlen kernel can be used."""
    if batch.segments is None:
        return AttentionPattern(batch.causal)
    if varlen:
        return AttentionPattern(batch.causal, batch.boundaries, batch.ids.shape[1], steady=batch.steady)
    return AttentionPattern(batch.causal, mask=segment_mask(batch.segments, causal=batch.causal))


def segment_mask(segments: Tensor, *, causal: bool) -> Tensor:
    """Return a mask that is True where a query (row) may attend to a key (column). (B, T) → (B, 1, T, T)"""
    mask = segments[:, None, :, None] == segments[:, None, None, :]
    if causal:
        length = segments.shape[1]
        mask = mask & torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    return mask


def without_attention_dropout(config: Any) -> None:
    """Set attention dropout to 0 in a model's config, since the varlen kernel has none. Other dropout stays."""
    for name in ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"):
        if getattr(config, name, None):
            setattr(config, name, 0.0)


def varlen_works(device: torch.device, precision: str) -> bool:
    return device.type == "cuda" and precision != "fp32" and varlen_attn is not None


# B rows, H query heads, K key heads, T tokens, D head dimension
def attend(
    module: nn.Module,
    query: Tensor,  # (B, H, T, D)
    key: Tensor,  # (B, K, T, D)
    value: Tensor,  # (B, K, T, D)
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    pattern: AttentionPattern | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Compute attention under `pattern`. Returns (B, T, H, D), as transformers expects."""
    if pattern is None:
        pattern = getattr(module, CURRENT_PATTERN, CurrentPattern()).pattern
    if pattern is None:
        raise ModelError(
            f"{type(module).__name__} was not told who may see whom; read with an Encoder, or set its attention back"
        )
    if pattern.asked is not None:
        pattern.asked.append(type(module).__name__)
    for name in CHANGES_THE_SCORES:
        if rest.get(name) is not None:
            asked = "…" if isinstance(rest[name], Tensor) else rest[name]  # a tensor would print many lines
            raise ModelError(f"{type(module).__name__} asks for {name}={asked}, which is not supported yet")
    reach = -1
    if sliding_window is not None and (pattern.causal or pattern.windows):
        reach = sliding_window - 1  # transformers counts the token itself
    if softcap is not None or s_aux is not None:
        mask = _whole_mask(pattern, reach, query)
        return _written_out(query, key, value, mask, scaling, dropout, softcap, s_aux), None
    if pattern.boundaries is not None:
        return _varlen(query, key, value, pattern, reach, scaling, dropout), None
    mask = pattern.mask
    if 0 <= reach < query.shape[2] - 1:
        near = _near(query.shape[2], reach, causal=pattern.causal, device=query.device)
        mask = near if mask is None else mask & near
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=pattern.causal and mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None


def _whole_mask(pattern: AttentionPattern, reach: int, query: Tensor) -> Tensor:
    """Return the pattern as a mask (B or 1, 1, T, T), computed from the boundaries if there are any."""
    rows, _, length, _ = query.shape
    mask = pattern.mask
    if pattern.boundaries is not None:
        places = torch.arange(rows * length, device=query.device)
        segments = torch.bucketize(places, pattern.boundaries[1:].long(), right=True).view(rows, length)
        mask = segment_mask(segments, causal=pattern.causal)
    near = _near(length, length if reach < 0 else reach, causal=pattern.causal, device=query.device)[
        None, None
    ]
    return near if mask is None else mask & near


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,  # (H,): the score of an extra key without a value
) -> Tensor:
    """Compute attention without a fused kernel; scores and softmax are in fp32."""
    heads, width = query.shape[1], query.shape[3]
    if heads != key.shape[1]:
        key, value = (one.repeat_interleave(heads // one.shape[1], dim=1) for one in (key, value))
    scores = (query @ key.mT).float() * (width**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        aside = sinks.float().view(1, -1, 1, 1).expand(len(scores), -1, scores.shape[2], 1)
        scores = torch.cat([scores, aside], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    weights = F.dropout(weights, dropout)
    return (weights @ value).transpose(1, 2).contiguous()


def _near(length: int, reach: int, *, causal: bool, device: torch.device) -> Tensor:
    """Return a mask that is True where a key is within `reach` of its query, and not after it if causal."""
    places = torch.arange(length, device=device)
    distance = places[:, None] - places[None, :]
    return (distance <= reach) & (distance >= (0 if causal else -reach))


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: AttentionPattern,
    reach: int,
    scaling: float | None,
    dropout: float,
) -> Tensor:
    if dropout:
        raise ModelError(
            "attention dropout is not supported on packed rows; set attention_dropout to 0 in the model's config"
        )
    rows, heads, length, width = query.shape
    if heads != key.shape[1] and not _GROUPED:
        key, value = (one.repeat_interleave(heads // one.shape[1], dim=1) for one in (key, value))
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
    # (B, heads, T, D) → (B·T, heads, D): all rows as one varlen sequence
    flat = [one.transpose(1, 2).reshape(rows * length, -1, width).to(dtype) for one in (query, key, value)]
    grouped = {"enable_gqa": True} if _GROUPED and heads != key.shape[1] else {}
    out = varlen_attn(
        *flat,
        pattern.boundaries,
        pattern.boundaries,
        pattern.longest,
        pattern.longest,
        scale=scaling,
        window_size=(reach, 0) if pattern.causal else (reach, reach),
        **grouped,
    )
    return out.view(rows, length, heads, width)


_GROUPED = varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Replaces transformers' mask builders: build no mask, since `attend` decides."""


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, _no_mask)
