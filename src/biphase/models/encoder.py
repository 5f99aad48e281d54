"""Any model as an encoder: a trunk that reads packed text in both directions, whatever it was trained for.

Differences between families are read from the model itself: an offset of its positions, a second kind of
embedding, the longest text it can read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel
from transformers.utils.logging import disable_progress_bar

from biphase.errors import ModelError, one_line
from biphase.models.attention import NAME, Sight, segment_mask, without_attention_dropout
from biphase.specs import Hub

PROBE_LENGTH = 16


class Encoder(nn.Module):
    """(B, T) ids → (B, T, width) hidden states."""

    def __init__(self, trunk: nn.Module, *, context: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.context = context  # the most tokens it can read
        config: Any = trunk.config
        self.width: int = config.hidden_size
        self.layers: int = getattr(config, "num_hidden_layers", None) or 12
        self.init_std: float = getattr(config, "initializer_range", None) or 0.02
        self.first_position = _first_position(trunk)
        # GPT-2's forward takes types too, but looks them up among its words: zeros would add its first word to each.
        self.typed = any(name.endswith("token_type_embeddings") for name, _ in trunk.named_modules())

    def forward(self, ids: Tensor, positions: Tensor, sight: Sight) -> Tensor:
        more = {"token_type_ids": torch.zeros_like(ids)} if self.typed else {}
        return self.trunk(
            input_ids=ids, position_ids=positions + self.first_position, use_cache=False, sight=sight, **more
        ).last_hidden_state


def encoder_from_hub(hub: Hub) -> Encoder:
    """The trunk of an existing model, in fp32, with our attention; refused if it cannot read in both directions."""
    if hub.local:  # a bar is for downloads; files here are read in a moment
        disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(**hub.address, trust_remote_code=False)
        without_attention_dropout(config)
        loaded: Any = AutoModel.from_pretrained(
            **hub.address,
            config=config,
            attn_implementation=NAME,
            dtype=torch.float32,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as wrong:  # absent, damaged, of other shapes: many kinds
        if isinstance(wrong, KeyError) and wrong.args == (NAME,):
            raise ModelError(
                f"{hub.source}: its class does not let its attention be replaced, so it cannot be made to read in "
                "both directions; give another model"
            ) from None
        raise ModelError(
            f"{hub.source} cannot be loaded: {one_line(wrong)}; check the name, or give a local folder"
        ) from None
    trunk, said = loaded
    lacking = sorted(name for name in said["missing_keys"] if not name.startswith("pooler."))
    if lacking:
        raise ModelError(
            f"{hub.source} lacks {len(lacking)} of its weights, {lacking[0]} among them, which would be random; "
            "give a complete checkpoint"
        )
    if getattr(trunk.config, "is_encoder_decoder", False):
        raise ModelError(f"{hub.source} is an encoder and a decoder; give a model that is one of them")
    if getattr(trunk, "pooler", None) is not None:
        trunk.pooler = None  # a head for another purpose: not evaluated, and it would never get a gradient
    try:
        encoder = Encoder(trunk, context=_context(trunk))
        probe_encoder(encoder)
    except ModelError:
        raise
    except Exception as wrong:  # a forward made for other inputs fails in its own way
        raise ModelError(
            f"{hub.source} ({type(trunk).__name__}) cannot read packed text ({one_line(wrong)}); give another model"
        ) from None
    return encoder


@torch.no_grad()
def probe_encoder(encoder: Encoder) -> None:
    """Refuse a model that does not look ahead, or looks into its neighbour in a packed row.

    The tokens that change stand right at the boundary, on either side: what mixes tokens outside attention
    (convolutions, recurrences) may reach only the next one, and only in one direction.
    """
    was_training, name = encoder.training, type(encoder.trunk).__name__
    encoder.eval()
    config: Any = encoder.trunk.config
    vocab = int(config.vocab_size)
    ids = torch.randint(0, vocab, (1, PROBE_LENGTH), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(PROBE_LENGTH)[None]
    half = PROBE_LENGTH // 2

    def moved(sight: Sight, at: int) -> Tensor:
        """Which positions feel a change of the token there."""
        changed = ids.clone()
        changed[0, at] = (changed[0, at] + 1) % vocab
        before, after = (encoder(one, positions, sight)[0] for one in (ids, changed))
        return (before != after).any(-1)

    apart = Sight(False, mask=segment_mask((positions >= half).long(), causal=False))
    try:
        plain = encoder(ids, positions, Sight(causal=False))
        if not plain.isfinite().all():
            raise ModelError(f"{name} gives numbers that are not finite; look at its weights")
        encoder.width = plain.shape[-1]  # which a few models make narrower than they are inside
        if not moved(Sight(causal=False), half)[:half].any():
            raise ModelError(f"{name} stays blind to later tokens; it cannot be used as an encoder here")
        if moved(apart, half)[:half].any() or moved(apart, half - 1)[half:].any():
            raise ModelError(f"{name} looks across the boundary of a text in a packed row; it would leak")
    finally:
        encoder.train(was_training)


def _first_position(trunk: nn.Module) -> int:
    """Some families (RoBERTa's) count positions from behind their padding index."""
    for name, module in trunk.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return int(module.padding_idx) + 1
    return 0


def _context(trunk: nn.Module) -> int:
    config: Any = trunk.config
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return int(longest or 2048) - _first_position(trunk)
