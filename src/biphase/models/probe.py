"""Probes that run before training: does this model do what the study will ask of it?

They change one token and look at exact differences of the outputs, so they do not depend on what a model is
called. A model that leaks, stays blind, or whose logits are not hidden states times its head is refused.
"""

from __future__ import annotations

import torch

from biphase.errors import ModelError
from biphase.models.attention import Sight, segment_mask
from biphase.models.backbone import LanguageModel

LENGTH = 16


@torch.no_grad()
def probe(model: LanguageModel, *, vocab: int) -> None:
    """Refuse a model that cannot be causal, bidirectional and segment-blind by argument."""
    was_training = model.training
    model.eval()
    try:
        device = model.head.device
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocab, (1, LENGTH), generator=generator).to(device)
        positions = torch.arange(LENGTH, device=device)[None]
        half = LENGTH // 2

        def moved(sight: Sight, at: int) -> torch.Tensor:
            """Which positions feel a change of the token there."""
            changed = ids.clone()
            changed[0, at] = (changed[0, at] + 1) % vocab
            before, after = (model.hidden(one, positions, sight)[0] for one in (ids, changed))
            return (before != after).any(-1)

        name = type(model.model).__name__
        if moved(Sight(causal=True), half)[:half].any():
            raise ModelError(f"{name} sees the future in causal mode; it cannot be trained with CLM here")
        if not moved(Sight(causal=False), half)[:half].any():
            raise ModelError(
                f"{name} stays blind to later tokens in bidirectional mode; it cannot become an encoder"
            )
        # Right at the boundary, on either side: a convolution or a recurrence may reach only the next token, and
        # only in one direction.
        apart = Sight(False, mask=segment_mask((positions >= half).long(), causal=False))
        if moved(apart, half)[:half].any() or moved(apart, half - 1)[half:].any():
            raise ModelError(f"{name} looks across the boundary of a segment; packed training would leak")
        _same_logits(model, ids, positions)
    finally:
        model.train(was_training)


def _same_logits(model: LanguageModel, ids: torch.Tensor, positions: torch.Tensor) -> None:
    sight = Sight(causal=True)
    ours = model.hidden(ids, positions, sight) @ model.head.T
    theirs = model.model(input_ids=ids, position_ids=positions, use_cache=False, sight=sight).logits
    if not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4):
        raise ModelError(
            f"the logits of {type(model.model).__name__} are not its hidden states times its head "
            "(scaled or capped logits are not supported yet)"
        )
