"""The model that a run starts with: from scratch, or from the hub and made ready to be trained."""

from __future__ import annotations

from biphase.data.shards import Shards
from biphase.keys import acts
from biphase.models.adapters import add_adapter
from biphase.models.backbone import LanguageModel, Words, from_hub, from_scratch, probe
from biphase.specs import Hub, Pretrain, Size


def root_of(run: Pretrain) -> Pretrain:
    """The run that this one goes on from in the end: the one with a start of its own."""
    return root_of(run.start) if isinstance(run.start, Pretrain) else run


def starting_model(run: Pretrain, shards: Shards, *, probed: bool = False) -> LanguageModel:
    """The model that a run's weights belong in, with those of its start."""
    root, length = root_of(run), run.packing.length
    if isinstance(root.start, Size):
        return from_scratch(
            root.start, vocab=shards.vocab, mask_id=shards.mask_id, length=length, seed=root.seed
        )
    assert isinstance(root.start, Hub)
    words = Words(shards.vocab, shards.mask_id, mask_is_new=shards.card["mask_rule"] != "own")
    stretched = any(act.rope_base for act in acts(run))
    model = from_hub(root.start, words, length=length, stretched=stretched)
    if probed:
        probe(model, vocab=shards.vocab)
    if run.adapter:
        add_adapter(model, run.adapter, seed=root.seed)
    return model
