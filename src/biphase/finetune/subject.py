"""The model that is evaluated: its encoder, and how it reads text.

A model trained here reads a text as it read documents: the text, then the end token (and a beginning token before it
if its corpus had one). A hub model that was not trained further reads it as its tokenizer's own template says; where
that ends with nothing, the end token follows. Under the paper's protocol it too reads the text and its end token, if it
has one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from biphase.data.literals import literal, unknown_id
from biphase.data.shards import Shards
from biphase.data.tokenizer import load_saved
from biphase.errors import ModelError, SpecError, one_line
from biphase.files import Store
from biphase.models.encoder import Encoder, encoder_from_hub
from biphase.models.hub_tokenizer import load_tokenizer, refuse_larger
from biphase.presets import corpus_of
from biphase.records import key
from biphase.specs import Finetune, Hub, Pretrain
from biphase.tasks.encoding import Reading
from biphase.training.finished import model_of_state

SHARE_OF_CONTEXT = 0.99  # the paper's longest input is 2,028 of 2,048 tokens


@dataclass(frozen=True)
class Subject:
    encoder: Encoder
    reading: Reading


def subject_of_state(
    run: Pretrain, state: str | None, store: Store, shards: Shards, spec: Finetune
) -> Subject:
    """A model that was trained here: the state with that key, or its start where there is none."""
    model = model_of_state(run, state, store, shards)
    saved = load_saved(shards.tokenizer)
    special = saved.special
    before = (special.bos,) if corpus_of(run).bos and special.bos is not None else ()
    encoder = Encoder(model.model.base_model, context=run.packing.length, windows=model.reader[0].windows)
    reading = _reading(saved.model, before, (special.eos,), encoder.context, spec)
    return Subject(encoder, _literally(reading, saved.unspoken, str(shards.tokenizer)))


def subject_of_hub(hub: Hub, spec: Finetune) -> Subject:
    """A hub model or local folder, as it is."""
    encoder = encoder_from_hub(hub)
    tokenizer = load_tokenizer(hub)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    before, after = _template(backend, hub)
    if tokenizer.eos_token_id is not None and (spec.protocol == "paper" or not after):
        before = () if spec.protocol == "paper" else before
        after = (int(tokenizer.eos_token_id),)
    trunk: Any = encoder.trunk
    unspoken = _unspoken(tokenizer)
    vocab = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    spare = {*unspoken, unknown_id(backend)} - {*before, *after}
    refuse_larger(vocab, spare, trunk.get_input_embeddings().weight.shape[0], hub.source)
    reading = _reading(backend, before, after, encoder.context, spec)
    return Subject(encoder, _literally(reading, unspoken, hub.source))


def _template(backend: Any, hub: Hub) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer puts before and after a text."""
    try:
        bare, full = (backend.encode("a b", add_special_tokens=more).ids for more in (False, True))
    except Exception as wrong:  # a word list without an unknown token raises a plain Exception
        raise ModelError(
            f"{hub.source}: its tokenizer cannot read a plain text ({one_line(wrong)}); give it an unknown token"
        ) from None
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    raise ModelError(
        f"{hub.source}: its tokenizer changes a text when it adds special tokens; it cannot be used"
    )


def _unspoken(tokenizer: Any) -> frozenset[int]:
    """The special ids that no text may give. The unknown one may, unless it means something else as well."""
    backend = tokenizer.backend_tokenizer
    names = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id", "pad_token_id")
    meant = {int(number) for name in names if (number := getattr(tokenizer, name, None)) is not None}
    added = {number for number, token in backend.get_added_tokens_decoder().items() if token.special}
    return frozenset((added - {unknown_id(backend)}) | meant)


def _literally(reading: Reading, special: frozenset[int], source: str) -> Reading:
    """In a text, "[SEP]" is text."""
    reading.tokenizer.encode_special_tokens = True
    return replace(reading, tokenizer=literal(reading.tokenizer, special, source))


def _reading(
    tokenizer: Any, before: tuple[int, ...], after: tuple[int, ...], context: int, spec: Finetune
) -> Reading:
    if spec.length > context:
        raise SpecError(
            f"Finetune.length is {spec.length:,} and the model reads {context:,} tokens; say length={context} or 0"
        )
    length = spec.length or round(SHARE_OF_CONTEXT * context)
    identity = key({"tokenizer": tokenizer.to_str(), "around": [list(before), list(after)], "length": length})
    return Reading(tokenizer, before, after, length, identity)
