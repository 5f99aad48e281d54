"""Text → ids in bulk: tiktoken where it is proven to give the ids of `tokenizers`, four to seven times faster.

A byte-level BPE can be said in tiktoken's terms if
- each merge makes its own token, or tokens of equal rank stand together (tiktoken ranks tokens, not pairs);
- every token is reached by its own merges (else tiktoken would find whole words that `tokenizers` never makes);
- words are cut by one regular expression (ByteLevel's own, a Split, or digits apart before ByteLevel);
- nothing else touches the text: no normalizer, no dropout, no ordinary added tokens.
These are checked, then both encoders must agree on a sample of scripts, code, digits, white space and emoji, and
the caller asks again with the corpus' first documents. Any doubt ends with `tokenizers` and a message. A byte the
vocabulary lacks, a character younger than this Python's Unicode tables (on which two regex engines may disagree),
or white space without end sends that one document to `tokenizers`.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable, Iterable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from biphase.data.identity import TOKENIZER_FILES
from biphase.data.literals import deaf, merged_pairs
from biphase.data.tokenizer import Tokenizer, load_saved
from biphase.errors import DataError, one_line

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Digits are cut off before GPT-2's expression sees the rest, so white space before one counts as at the end.
_DIGITS_APART = r"%s|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"
_NEVER = "\x00<|biphase never|>\x00"  # tiktoken searches for special tokens; with none at all it would crawl

SAMPLE = (
    "The cat's pyjamas weren't WE'LL'S I'Ve it'ſ o'clock 'tis rock'n'roll. naïve café İstanbul straße ﬁne\n\n"
    "def f(x):\n\treturn {'a': [1, 22, 333, 4444]}  # 3.14159e-10 != 0x7fff\r\n\r\n    if x>=10: pass\n"
    "   leading,  double   triple\t\ttabs \n \n  \n\n\n trailing   \u00a0\u2003\u3000\u2028x\x85y\x0bz\x0c\u200b\u180e\ufeff\n"
    "Ελληνικά, русский текст, עברית, العربية ١٢٣, हिन्दी १२३, ไทย ๑๒๓, 中文字符，日本語テキスト、한국어 ½ ² Ⅷ ㊿ 𝟘𝟙\n"
    "👩‍👩‍👧‍👦🏳️‍🌈🇫🇷👍🏽 ☃ ∑∫√ a\u0301e\u0308 \U00020000 <|endoftext|> <|mask|> </s> [MASK] http://x.org/?q=1&r=%20#z\n"
    "aaaaaaaaaaaaaaaaaaaaaaaa 0000000000000 ================ ~~~~~~~ .......... ''''' \"\"\" !!!???     1  2   3\n\n  4 5th"
)


class Encoder:
    """Texts → ids, special tokens never among them.

    `proven` spares the checks of a tokenizer that passed them before; a saved one is then only loaded by
    `tokenizers` if a document asks for it.
    """

    def __init__(self, tokenizer: Tokenizer | Path, *, tiktoken: bool, proven: bool = False) -> None:
        self._source = tokenizer
        self.fast = _Tiktoken(self._spec(), proven) if tiktoken else None
        if self.fast and not proven and self._unspoken[self.fast.ids[self.fast.lacking :]].any():
            raise Inconvertible("text can spell its special tokens")

    def _spec(self) -> dict[str, Any]:
        if isinstance(self._source, Path):
            return json.loads((self._source / TOKENIZER_FILES[0]).read_bytes())
        return json.loads(self._source.model.to_str())

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_saved(self._source) if isinstance(self._source, Path) else self._source

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, as uint32 arrays."""
        fast = self.fast
        if fast is None:
            return self.plain(texts)
        made = [fast.encode(text) for text in texts]
        return [self.plain([text])[0] if ids is None else ids for text, ids in zip(texts, made, strict=True)]

    def plain(self, texts: list[str]) -> list[np.ndarray]:
        """The same by `tokenizers`, the judge of what is right."""
        try:
            found = self.tokenizer.model.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as wrong:  # a word list without an unknown token raises a plain Exception
            raise DataError(
                f"the tokenizer cannot encode this text ({one_line(wrong)}); use one with an unknown token"
            ) from None
        made = [np.array(one.ids, np.uint32) for one in found]
        return [
            self._literally(text) if self._unspoken[ids].any() else ids
            for text, ids in zip(texts, made, strict=True)
        ]

    @cached_property
    def _unspoken(self) -> np.ndarray:
        table = np.zeros(self.tokenizer.vocab, bool)
        table[list(self.tokenizer.unspoken)] = True
        return table

    @cached_property
    def _deaf(self) -> Any:
        return deaf(self.tokenizer.model, self.tokenizer.unspoken)

    def _literally(self, text: str) -> np.ndarray:
        """The ids of a text that spells a special token with a piece of its own."""
        ids = np.array(self._deaf.encode(text, add_special_tokens=False).ids, np.uint32)
        if self._unspoken[ids].any():
            name = self.tokenizer.model.id_to_token(int(ids[self._unspoken[ids]][0]))
            raise DataError(
                f"the tokenizer writes what it does not know as {name!r}, which has another meaning too; "
                "name another token in its tokenizer_config.json, or use another tokenizer"
            )
        return ids

    def agrees(self, texts: Iterable[str]) -> bool:
        """Do both ways give the same ids?"""
        texts = list(texts)
        return all(map(np.array_equal, self.encode(texts), self.plain(texts)))

    @property
    def name(self) -> str:
        return "tiktoken" if self.fast else "tokenizers"


def fastest(tokenizer: Tokenizer, report: Callable[[str], None]) -> Encoder:
    """The tiktoken encoder if it is proven equal on the sample, else that of `tokenizers`."""
    try:
        encoder = Encoder(tokenizer, tiktoken=True)
    except Inconvertible as reason:
        report(f"encoding with tokenizers: tiktoken cannot stand in for it here ({reason})")
        return Encoder(tokenizer, tiktoken=False)
    return confirmed(encoder, [SAMPLE, *SAMPLE.splitlines(keepends=True)], "a sample", report)


def confirmed(encoder: Encoder, texts: Iterable[str], what: str, report: Callable[[str], None]) -> Encoder:
    """The encoder itself if both ways agree on `texts`, else that of `tokenizers`."""
    if encoder.fast is None or encoder.agrees(texts):
        return encoder
    report(f"encoding with tokenizers: tiktoken gave other ids on {what}")
    return Encoder(encoder.tokenizer, tiktoken=False)


class Inconvertible(Exception):
    """Why tiktoken cannot stand in."""


class _Tiktoken:
    """A byte-level BPE in tiktoken's terms. Its ranks are the order of merges, mapped to the real ids."""

    def __init__(self, spec: dict[str, Any], proven: bool) -> None:
        import tiktoken

        pattern = _pattern(spec)
        ranks, ids, self.lacking = _ranks(spec, proven)
        self.ids = np.array(ids, np.uint32)
        self.core = tiktoken.Encoding(
            "biphase", pat_str=pattern, mergeable_ranks=ranks, special_tokens={_NEVER: len(ids)}
        )

    def encode(self, text: str) -> np.ndarray | None:
        """The ids, or None where `tokenizers` must decide."""
        if _has_young(text):
            return None
        try:
            ranks = self.core.encode_to_numpy(text, disallowed_special=())
        except ValueError:  # a million spaces in a row exceed the stack of its regular expressions
            return None
        if self.lacking and len(ranks) and (ranks < self.lacking).any():
            return None
        return self.ids[ranks]


_FIRST_UNKNOWN = 0x378  # no character below it is unassigned, and few texts have many above


def _has_young(text: str) -> bool:
    """Has it a character that this Python's Unicode tables do not know: newer than them, or never assigned?"""
    if text.isascii():
        return False
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    high = codes[codes >= _FIRST_UNKNOWN]
    return bool(len(high)) and bool(_unknown()[high].any())


@cache
def _unknown() -> np.ndarray:
    table = np.zeros(sys.maxunicode + 1, bool)
    table[0x40000:0xE0000] = True  # planes without a single character
    for code in (*range(_FIRST_UNKNOWN, 0x40000), *range(0xE0000, 0xF0000)):
        table[code] = unicodedata.category(chr(code)) == "Cn"
    return table


def _pattern(spec: dict[str, Any]) -> str:
    """The one regular expression that cuts words, or Inconvertible."""
    if spec.get("normalizer"):
        raise Inconvertible("it normalizes text")
    if any(not token["special"] for token in spec["added_tokens"]):
        raise Inconvertible("it has added tokens that are ordinary text")
    steps = spec["pre_tokenizer"] or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    last = steps[-1] if steps else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise Inconvertible("its words are not plain bytes")
    before, regex = steps[:-1], last.get("use_regex", True)
    if not before and regex:
        return _GPT2
    if len(before) == 1 and regex and before[0]["type"] == "Digits":
        return _DIGITS_APART % (r"\p{N}" if before[0]["individual_digits"] else r"\p{N}+")
    if len(before) == 1 and not regex and before[0]["type"] == "Split":
        split = before[0]
        if split["behavior"] == "Isolated" and not split["invert"] and "Regex" in split["pattern"]:
            return split["pattern"]["Regex"]
    raise Inconvertible("its way to cut words is not one regular expression")


def _ranks(spec: dict[str, Any], proven: bool) -> tuple[dict[bytes, int], list[int], int]:
    """Bytes of each token → rank, id of each rank, and how many of the first ranks stand for lacking bytes."""
    model = spec["model"]
    plain = not (
        model.get("continuing_subword_prefix") or model.get("end_of_word_suffix") or model.get("dropout")
    )
    if model["type"] != "BPE" or not plain or model.get("byte_fallback"):
        raise Inconvertible("it is not a plain byte-level BPE")
    vocab: dict[str, int] = model["vocab"]
    letters = _letters()
    lacking = [byte for byte, letter in enumerate(letters) if letter not in vocab]
    present = [byte for byte, letter in enumerate(letters) if letter in vocab]
    ranks = {bytes([byte]): rank for rank, byte in enumerate((*lacking, *present))}
    ids = [0] * len(lacking) + [vocab[letters[byte]] for byte in present]
    # As a table for `translate`, ten times faster than letter by letter; what stands for no byte cannot be encoded.
    table = dict.fromkeys(range(256), 0xFFFF) | {ord(letter): byte for byte, letter in enumerate(letters)}
    merges = merged_pairs(model)
    previous = ""
    for left, right in merges:
        token = left + right
        if token == previous:
            continue  # another pair for the same token, right after it
        try:
            as_bytes = token.translate(table).encode("latin-1")
        except UnicodeEncodeError:
            raise Inconvertible("it has letters that stand for no byte") from None
        if as_bytes in ranks:
            raise Inconvertible("two far merges make one token")
        ranks[as_bytes] = len(ids)
        ids.append(vocab[token])
        previous = token
    if not proven:
        added = {token["content"] for token in spec["added_tokens"]}
        _check_reached(model, set(vocab) - added, merges)
    return ranks, ids, len(lacking)


def _check_reached(model: dict[str, Any], ordinary: set[str], merges: list[tuple[str, str]]) -> None:
    """Every token must come out when its own letters are merged, as tiktoken takes for granted."""
    made = dict.fromkeys(left + right for left, right in merges)
    whole = model.get("ignore_merges", False)
    never = [token for token in ordinary if len(token) > 1 and token not in made]
    if whole and never:
        raise Inconvertible("it knows whole words that no merge makes")
    if whole:
        return
    from tokenizers import models

    bpe = models.BPE({token: rank for rank, token in enumerate(dict.fromkeys((*_letters(), *made)))}, merges)
    for token in made:
        if len(bpe.tokenize(token)) != 1:
            raise Inconvertible(f"merging does not lead to its token {token!r}")


@cache
def _letters() -> tuple[str, ...]:
    """The letter that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = iter(range(256, 512))
    return tuple(chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256))
