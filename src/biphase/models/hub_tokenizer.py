"""The tokenizer beside a model of the hub or of a folder: loaded, or converted and checked. No code of others is run."""

from __future__ import annotations

import unicodedata
from collections.abc import Set
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from transformers import AutoTokenizer, LlamaTokenizer

from biphase.errors import ModelError, one_line
from biphase.models.hub import needs_code
from biphase.models.silence import quietly
from biphase.specs import Hub

# What a conversion may need: the names of packages on PyPI, and what they are imported as.
CONVERTING = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf", "tiktoken": "tiktoken"}
PIECES = 500  # of a vocabulary, by which a conversion is checked


def load_tokenizer(hub: Hub) -> Any:
    """The tokenizer beside a model, as transformers loads or converts it."""
    address: Any = hub.address
    try:
        with quietly():
            made: Any = AutoTokenizer.from_pretrained(**address, trust_remote_code=False)
            known = made.backend_tokenizer.get_vocab(with_added_tokens=False)
            if known.keys() <= set(made.all_special_tokens):
                raise ValueError("its vocabulary is empty")  # what transformers makes of a folder without one
            file = str(getattr(made, "vocab_file", None) or "")
            if hub.gguf or not file.endswith(".model") or has_tokenizer_json(hub) or _reads_as(file, made):
                return made
            # Without a tokenizer_config.json transformers leaves out the space before the first word.
            made = LlamaTokenizer.from_pretrained(**address)
        if _reads_as(file, made):
            return made
        why = f"transformers cuts text into other pieces than {Path(file).name}"
    except Exception as wrong:  # absent, damaged, without a fast form: many kinds
        if "trust_remote_code" in str(wrong):
            raise needs_code(hub.source) from None
        needed = [name for name, package in CONVERTING.items() if find_spec(package) is None]
        if needed and not has_tokenizer_json(hub):
            raise ModelError(
                f"{hub.source}: converting its tokenizer needs {' and '.join(needed)}; type: pip install {' '.join(needed)}"
            ) from None
        why = one_line(wrong)
    raise ModelError(
        f"{hub.source} has no tokenizer that can be loaded ({why}); put its tokenizer.json beside it"
    )


def has_tokenizer_json(hub: Hub) -> bool:
    """Need it not be converted? Where the hub does not answer, whoever loads it says so."""
    if hub.local:
        return (Path(hub.source).expanduser() / "tokenizer.json").is_file()
    try:
        hf_hub_download(hub.source, "tokenizer.json", revision=hub.revision)
    except Exception as wrong:  # offline, refused, absent: many kinds
        return not isinstance(wrong, EntryNotFoundError) or isinstance(wrong, LocalEntryNotFoundError)
    return True


def refuse_larger(vocab: int, spare: Set[int | None], rows: int, source: str) -> None:
    """Refuse a tokenizer of `vocab` ids for a model whose embedding has `rows`; `spare` ids stand in no text."""
    needed = next((number + 1 for number in reversed(range(vocab)) if number not in spare), 0)
    if needed > rows:
        raise ModelError(
            f"{source} has {rows:,} embeddings and its tokenizer {needed:,} tokens; give the tokenizer that belongs to the "
            f"model, or make room first, in Python: model.resize_token_embeddings({needed}), model.save_pretrained(FOLDER)"
        )


def _reads_as(file: str, made: Any) -> bool:
    """Does a converted tokenizer cut text into the same pieces as the SentencePiece model it was made from?"""
    from sentencepiece import SentencePieceProcessor

    own: Any = SentencePieceProcessor(model_file=file)
    special = (own.is_control, own.is_unknown, own.is_byte, own.is_unused)
    plain = [number for number in range(own.get_piece_size()) if not any(is_(number) for is_ in special)]
    # Signs that a model's own rules change are left out: few conversions know those.
    pieces = [one for number in plain if unicodedata.is_normalized("NFKC", one := own.id_to_piece(number))]
    unknown = (
        " ☃" if any(map(own.is_byte, range(own.get_piece_size()))) else ""
    )  # which is then cut into bytes
    text = own.decode(pieces[:PIECES]) + unknown
    theirs = made.backend_tokenizer.encode(text, add_special_tokens=False)
    return theirs.tokens == own.encode(text, out_type=str)
