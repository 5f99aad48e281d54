"""Any model as an encoder: a trunk that reads packed text in both directions, whatever it was trained for.

Differences between families are read from the model itself: an offset of its positions, a second kind of
embedding, the longest text it can read.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from biphase import kernels
from biphase.errors import ModelError, one_line
from biphase.models import hub as hub_models
from biphase.models.attention import SAID, Said, Sight
from biphase.models.fused import FusedTrunk, refusal
from biphase.models.fused.eight import without_eight
from biphase.models.probe import probe_own, probe_sight
from biphase.specs import Hub


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
        self.said = Said()
        for module in trunk.modules():
            setattr(module, SAID, self.said)  # a few families do not hand extra arguments on to their layers
        # GPT-2's forward takes types too, but looks them up among its words: zeros would add its first word to each.
        self.typed = any(name.endswith("token_type_embeddings") for name, _ in trunk.named_modules())

    def prepare(self, device: torch.device, precision: str) -> str:
        """Choose how to compute on `device`, once the weights are there: "fused", or "plain" as transformers does it."""
        why = refusal(self.trunk, in_eight=precision == "fp8") or kernels.lacking(device)
        if precision == "fp8":
            why = why or without_eight(device)
            if why:
                raise ModelError(f"precision='fp8' cannot be had ({why}); say precision='bf16'")
        suits = not why and precision in ("bf16", "pure-bf16", "fp8")
        self.fused = FusedTrunk(self.trunk, in_eight=precision == "fp8") if suits else None
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

    def forward(self, ids: Tensor, positions: Tensor, sight: Sight) -> Tensor:
        if self.fused is not None:
            return self.fused(ids, positions, sight)
        more = {"token_type_ids": torch.zeros_like(ids)} if self.typed else {}
        if not self.windows:
            sight = replace(sight, windows=False)
        self.said.sight = sight
        try:
            return self.call[0](
                input_ids=ids,
                position_ids=positions + self.first_position,
                use_cache=False,
                sight=sight,
                **more,
            ).last_hidden_state
        finally:
            self.said.sight = None


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
        Encoder(trunk, context=4)(ids, torch.arange(4, device=ids.device)[None], Sight(False, asked=asked))
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
        encoder.width = probe_sight(encoder, **about, causal=False)
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
