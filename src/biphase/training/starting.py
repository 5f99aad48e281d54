"""The model that a run starts with: from scratch, or from the hub and made ready to be trained."""

from __future__ import annotations

import torch

from biphase.data.shards import Shards
from biphase.data.tokenizer import Special, load
from biphase.errors import ModelError
from biphase.keys import acts
from biphase.models.adapters import add_adapter
from biphase.models.backbone import LanguageModel, Words, from_hub, from_scratch, probe
from biphase.models.fused import refusal
from biphase.models.fused.eight import without_eight
from biphase.models.native import is_masked, masked_forms
from biphase.presets import corpus_of
from biphase.specs import MLM, Hub, Pretrain, Pretrained, Size


def root_of(run: Pretrain) -> Pretrain:
    """The run that this one goes on from in the end: the one with a start of its own."""
    return root_of(run.start) if isinstance(run.start, Pretrain) else run


def reads_otherwise(run: Pretrain) -> bool:
    """Does a run go on from one whose held-out losses are of other text, or of rows of another length?"""
    if not isinstance(run.start, Pretrain):
        return False
    return any(
        getattr(run, name) != getattr(run.start, name) for name in ("corpus", "packing", "heldout_tokens")
    )


def starting_model(run: Pretrain, shards: Shards, *, probed: bool = False) -> LanguageModel:
    """The model that a run's weights belong in, with those of its start."""
    root = root_of(run)
    if isinstance(root.start, Size):
        return from_scratch(
            root.start, vocab=shards.vocab, mask_id=shards.mask_id, length=run.packing.length, seed=root.seed
        )
    card = shards.card
    special = Special(
        **{name: card[f"{name}_id"] for name in ("eos", "mask", "pad", "bos")},
        ids=shards.special_ids,
        mask_rule=card["mask_rule"],
    )
    return _existing(run, root, _words(run, shards.vocab, special), probed=probed)


def refuse_unfit(run: Pretrain, device: torch.device) -> None:
    """Refuse what cannot be trained as the run says, on this device, before its text is looked at."""
    in_eight = run.precision == "fp8"
    why = without_eight(device) if in_eight else ""
    root = root_of(run)
    if isinstance(root.start, Hub):
        corpus = corpus_of(run)
        words = None  # of a tokenizer that the corpus is to train
        if isinstance(corpus.tokenizer, Pretrained):
            tokenizer = load(corpus)
            words = _words(run, tokenizer.vocab, tokenizer.special)
        model = _existing(run, root, words, probed=True)
    elif isinstance(root.start, Size) and in_eight and not why:
        with torch.device("meta"):  # its shape alone
            model = from_scratch(root.start, vocab=16, mask_id=0, length=run.packing.length, seed=0)
    else:
        model = None
    if in_eight and model is not None:
        why = why or refusal(model.model.base_model, in_eight=True)
    if why:
        raise ModelError(f"{run.name}: precision='fp8' cannot be had ({why}); say precision='bf16'")


def _words(run: Pretrain, vocab: int, special: Special) -> Words:
    used = {special.eos, special.bos if corpus_of(run).bos else None}
    return Words(vocab, special.mask, special.mask_rule != "own", frozenset(special.ids) - used)


def _existing(run: Pretrain, root: Pretrain, words: Words | None, *, probed: bool) -> LanguageModel:
    assert isinstance(root.start, Hub)
    stretched = bool(run.stages) and acts(run)[0].rope_base > 0  # from its first step on
    model = from_hub(root.start, words, length=run.packing.length, stretched=stretched)
    if probed:
        probe(model, vocab=len(model.head) if words is None else words.vocab)
        if run.stages and isinstance(run.stages[-1].objective, MLM):
            model.note = _without_masked_class(model, run.packing.length)
    if run.adapter:
        add_adapter(model, run.adapter, seed=root.seed)
    return model


def _without_masked_class(model: LanguageModel, length: int) -> str:
    """What to say before the work where transformers will not be able to fill masks with the result."""
    name = type(model.model).__name__
    if is_masked(name) or next(masked_forms(model, length), None) is not None:
        return ""
    return (
        f"transformers has no masked-language-model class for {name}: the exported encoder gives hidden states and "
        "embeddings there, but fills masks only by biphase.load(FOLDER).fill_mask(…)"
    )
