"""Text that spells a special token stays text: "</s>" in a document is four letters, not its end.

`tokenizers` does not look for special tokens in text when told so, but some vocabularies hold them as ordinary
pieces too (Unigram models such as XLM-R's, word lists), and their models then find them all the same. `deaf` makes
a copy of such a tokenizer in which these pieces, under the same ids, bear names that no text has, so that the
letters are spelled with other pieces, or are unknown where there are none.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from biphase.errors import DataError


def merged_pairs(bpe: dict[str, Any]) -> list[tuple[str, str]]:
    """The merges of a BPE in tokenizer.json, in both ways to write them."""
    return [tuple(one.split(" ") if isinstance(one, str) else one) for one in bpe["merges"]]


def unknown_id(model: Any) -> int | None:
    """The id of what the vocabulary cannot spell, if it has one."""
    named = getattr(model.model, "unk_token", None)
    if named:
        return model.token_to_id(named)
    if type(model.model).__name__ == "Unigram":  # it alone keeps a number, and shows it nowhere else
        return json.loads(model.to_str())["model"].get("unk_id")
    return None


def deaf(model: Any, special: frozenset[int]) -> Any:
    """A copy of a tokenizer that gives the same ids, but for text that spells one of `special`."""
    from tokenizers import Tokenizer as Model

    spec = json.loads(model.to_str())
    mark = uuid.uuid4().hex
    names = {model.id_to_token(number): f"\ufdd0{mark}{number}\ufdd0" for number in special}
    for token in spec["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    inner = spec["model"]
    if isinstance(inner["vocab"], dict):
        inner["vocab"] = {names.get(piece, piece): number for piece, number in inner["vocab"].items()}
    else:
        inner["vocab"] = [[names.get(piece, piece), score] for piece, score in inner["vocab"]]
    if inner.get("merges"):
        inner["merges"] = [pair for pair in merged_pairs(inner) if not names.keys() & {*pair, "".join(pair)}]
    if inner.get("unk_token"):
        inner["unk_token"] = names.get(inner["unk_token"], inner["unk_token"])
    spec["post_processor"] = None  # it adds special tokens by name, and none are added to text
    made = Model.from_str(json.dumps(spec))
    made.encode_special_tokens = True
    return made


def literal(model: Any, special: frozenset[int], source: str) -> Any:
    """The tokenizer, or its deaf copy where text spells one of `special`; refused where nothing else would spell it."""
    spelled = _spelled(model, special)
    copy = deaf(model, special) if spelled else model
    for token, text in spelled.items():
        ids = _ids(copy, text)
        if not ids or special & ids:
            raise DataError(
                f"tokenizer {source!r}: its special token {token!r} is also the only way to write that text; name "
                "another in its tokenizer_config.json, or use another tokenizer"
            )
    return copy


def refuse_unspeakable(model: Any, special: frozenset[int], source: str) -> None:
    """Refuse a tokenizer one of whose special tokens is the only way to write some text."""
    literal(model, special, source)


def _spelled(model: Any, special: frozenset[int]) -> dict[str, str]:
    """Those of `special` that come out of text, each with that text."""
    added = {one.content for one in model.get_added_tokens_decoder().values()}
    spelled = {}
    for number in sorted(special):
        token = model.id_to_token(number)
        plain = token in added or model.decoder is None
        text = (
            token if plain else model.decoder.decode([token])
        )  # a piece may be letters that stand for bytes
        if special & _ids(model, text):
            spelled[token] = text
    return spelled


def _ids(model: Any, text: str) -> set[int]:
    try:
        return set(model.encode(text, add_special_tokens=False).ids)
    except Exception:  # a word list without an unknown token raises a plain Exception
        return set()
