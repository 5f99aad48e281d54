"""Tokenizers of corpora: loaded (`load`, `load_saved`, `read`) or trained (`train`), and text to ids (`TextEncoder`).

The end token of a document is the one that the tokenizer's configuration names, else a well-known name (`ENDS`).
The mask token is found in this order; `Special.mask_rule` records which rule applied:
    own       the configuration names it, or it has a well-known name
    reserved  a free slot of the vocabulary, e.g. <|reserved_special_token_0|> of Llama 3; no id changes
    added     a new token <|mask|> at the end of the vocabulary
A tokenizer trained here has <|end_of_text|>, <|mask|> and <|pad|> as ids 0, 1 and 2.

The name of a special token in a document is ordinary text: "</s>" is four characters, not the end of the document.
`tokenizers` can be told not to match special tokens in text, but some vocabularies also contain them as ordinary
pieces (Unigram models such as XLM-R's, word-level vocabularies), so their models produce them anyway. `without_special`
copies such a tokenizer and gives these pieces, under the same ids, names that no text contains. The characters are then
encoded with other pieces, or as unknown if there are none.

Text is encoded with tiktoken, four to seven times faster than `tokenizers`, if it provably gives the same ids
(`fastest`). A byte-level BPE can be converted to tiktoken if
- each merge makes its own token, or merges that make the same token are adjacent (tiktoken ranks tokens, not pairs);
- every token is reached by its own merges (else tiktoken would produce whole words that `tokenizers` never makes);
- text is split by one regular expression (ByteLevel's own, a Split, or Digits before ByteLevel);
- nothing else changes the text: no normalizer, no dropout, no non-special added tokens.
These conditions are checked, then both encoders must agree on a sample of scripts, code, digits, white space and emoji,
and on the corpus's first documents. If any check fails, `tokenizers` is used and a message says why. Single documents go to `tokenizers` if they contain a byte that the vocabulary lacks, a character
newer than this Python's Unicode tables (on which the two regex engines may disagree), or an extreme run of white space.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from biphase.data.corpus import TOKENIZER_FILES, tokenizer_files
from biphase.errors import DataError, one_line
from biphase.remote import refusing, snapshot
from biphase.specs import BPE, Corpus, Pretrained
from biphase.store import write_json


def merged_pairs(bpe: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the merges of a BPE in tokenizer.json, which are strings or pairs depending on the version."""
    return [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in bpe["merges"]]


def unknown_id(model: Any) -> int | None:
    """Return the id of the unknown token, if there is one."""
    named = getattr(model.model, "unk_token", None)
    if named:
        return model.token_to_id(named)
    if type(model.model).__name__ == "Unigram":  # it stores an id, which only its JSON shows
        return json.loads(model.to_str())["model"].get("unk_id")
    return None


def without_special(model: Any, special: frozenset[int]) -> Any:
    """Return a copy of a tokenizer that gives the same ids, but never produces those in `special` from text."""
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
    spec["post_processor"] = None  # it refers to special tokens by name, and we add none
    copy = Model.from_str(json.dumps(spec))
    copy.encode_special_tokens = True
    return copy


def literal(model: Any, special: frozenset[int], source: str) -> Any:
    """Return the tokenizer, or its `without_special` copy if text can produce one of `special`.

    Raises DataError if a special token is the only encoding of some text.
    """
    spelled = _spelled(model, special)
    copy = without_special(model, special) if spelled else model
    for token, text in spelled.items():
        ids = _ids(copy, text)
        if not ids or special & ids:
            raise DataError(
                f"tokenizer {source!r}: its special token {token!r} is also the only way to write that text; name "
                "another in its tokenizer_config.json, or use another tokenizer"
            )
    return copy


def _spelled(model: Any, special: frozenset[int]) -> dict[str, str]:
    """Return those of `special` that encoding text can produce, each with that text."""
    added = {token.content for token in model.get_added_tokens_decoder().values()}
    spelled = {}
    for number in sorted(special):
        token = text = model.id_to_token(number)
        if token not in added and model.decoder is not None:  # the characters of a piece may stand for bytes
            text = model.decoder.decode([token])
        if special & _ids(model, text):
            spelled[token] = text
    return spelled


def _ids(model: Any, text: str) -> set[int]:
    try:
        return set(model.encode(text, add_special_tokens=False).ids)
    except Exception:  # a word-level vocabulary without an unknown token raises a plain Exception
        return set()


# ---------------------------------------------------------------- tokenizer


END, MASK, PAD = "<|end_of_text|>", "<|mask|>", "<|pad|>"
ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
BEGINNINGS = ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "[BOS]", "[CLS]")
MASKS = ("<|mask|>", "<mask>", "[MASK]")
_RESERVED = re.compile(r"reserved|unused", re.IGNORECASE)

# Llama 3's pre-tokenization: contractions, letters, up to three digits, punctuation, white space.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_LONG_RUN = re.compile(r"(?<!\S)(\S{1000})\S+|(?<!\s)(\s{1000})\s+")


@dataclass(frozen=True)
class Special:
    """The ids of the special tokens."""

    eos: int
    mask: int
    pad: int
    bos: int | None
    ids: tuple[int, ...]  # all special ids: never masked, never used as a random replacement
    mask_rule: str  # "own", "reserved" or "added"


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer of the `tokenizers` library with its special tokens."""

    model: Any
    special: Special
    vocab: int  # the largest id + 1

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """The special ids that no text may produce: all but the unknown token, unless that has another role too."""
        roles = {self.special.eos, self.special.mask, self.special.bos}
        return frozenset(self.special.ids) - ({unknown_id(self.model)} - roles)

    def save(self, folder: Path) -> None:
        """Write the tokenizer so that transformers' AutoTokenizer loads it with its special tokens."""
        folder.mkdir(parents=True, exist_ok=True)
        self.model.save(str(folder / TOKENIZER_FILES[0]))
        roles = {
            "eos_token": self.special.eos,
            "mask_token": self.special.mask,
            "pad_token": self.special.pad,
            "bos_token": self.special.bos,
            "unk_token": unknown_id(self.model),
        }
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **{name: self.model.id_to_token(number) for name, number in roles.items() if number is not None},
            "biphase": {"mask_rule": self.special.mask_rule},
        }
        write_json(folder / TOKENIZER_FILES[1], config)


# ---------------------------------------------------------------- words


def continues_word(tokenizer: Tokenizer) -> list[bool]:
    """Return for each id whether it continues the word of the token before it, by the tokenizer's own sign.

    WordPiece marks these tokens (##), the others mark the beginning of a word by the space before it: byte-level BPE as
    Ġ, SentencePiece as ▁. There a token without a space continues a word if it begins with a letter or digit, or inside
    a character of several bytes; punctuation begins a word, and letters right after an opening quote are in that word.
    """
    spec = json.loads(tokenizer.model.to_str())
    kind, prefix = spec["model"]["type"], spec["model"].get("continuing_subword_prefix") or ""
    byte_level = "ByteLevel" in json.dumps([spec["pre_tokenizer"], spec["decoder"]])
    vocabulary = tokenizer.model.get_vocab(with_added_tokens=False)
    if kind != "WordLevel" and not prefix and not byte_level and not any("▁" in text for text in vocabulary):
        raise DataError(
            "this tokenizer does not mark where words begin (##, Ġ or ▁), so whole words cannot be masked; "
            "say unit='span' or unit='token'"
        )
    table = [False] * tokenizer.vocab
    for text, number in vocabulary.items():
        if prefix:
            table[number] = text.startswith(prefix)
        elif kind != "WordLevel":
            table[number] = _first_character(text, byte_level=byte_level).isalnum()
    return table


def _first_character(text: str, *, byte_level: bool) -> str:
    """Return the character that a token begins with; a letter if it begins inside one."""
    fallback = re.fullmatch(
        r"<0x([0-9A-F]{2})>", text
    )  # SentencePiece: a byte of a character that it does not have
    if not byte_level and fallback is None:
        return text[:1]
    if byte_level:
        start = bytes(_bytes()[letter] for letter in text[:4] if letter in _bytes())
    else:
        start = bytes([int(fallback[1], 16)]) if fallback else b""
    character = start.decode(errors="replace")[:1]
    return "a" if character == "\ufffd" else character


# ---------------------------------------------------------------- load


def load(corpus: Corpus) -> Tokenizer:
    """Load the existing tokenizer of a corpus from its folder or the hub."""
    spec = corpus.tokenizer
    assert isinstance(spec, Pretrained)
    tokenizer = read(tokenizer_files(spec) if spec.local else _download(spec), spec.source)
    if spec.vocab and spec.vocab != tokenizer.vocab:
        raise DataError(
            f"corpus {corpus.name!r}: Pretrained({spec.source!r}, vocab={spec.vocab}) has {tokenizer.vocab} tokens, "
            f"mask token ({tokenizer.special.mask_rule}) included; type vocab={tokenizer.vocab}"
        )
    if corpus.bos and tokenizer.special.bos is None:
        raise DataError(f"corpus {corpus.name!r}: {spec.source!r} has no begin token; type bos=False")
    return tokenizer


def load_saved(folder: Path) -> Tokenizer:
    """Load a tokenizer that `Tokenizer.save` wrote."""
    config = json.loads((folder / TOKENIZER_FILES[1]).read_text("utf-8"))
    rule = config.get("biphase", {}).get("mask_rule", "own")
    paths = {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}
    tokenizer = read(paths, str(folder))
    return replace(tokenizer, special=replace(tokenizer.special, mask_rule=rule))


def read(paths: dict[str, Path], source: str) -> Tokenizer:
    """Load a tokenizer from its files."""
    from tokenizers import Tokenizer as Model

    try:
        model = Model.from_file(str(paths[TOKENIZER_FILES[0]]))
        config: dict[str, Any] = {}
        for name in (TOKENIZER_FILES[2], TOKENIZER_FILES[1]):  # tokenizer_config.json takes precedence
            if name in paths:
                config.update(json.loads(paths[name].read_text("utf-8")))
    except Exception as wrong:  # the Rust library raises plain Exception
        raise DataError(
            f"tokenizer {source!r} cannot be read ({one_line(wrong)}); put an intact tokenizer.json there"
        ) from None
    model.no_truncation()
    model.no_padding()
    # The string "<|endoftext|>" in a document is text, not the end of the document.
    model.encode_special_tokens = True
    tokenizer = _with_special(model, config, source)
    literal(tokenizer.model, tokenizer.control_ids, source)  # raises if text needs a special token
    return tokenizer


def _download(spec: Pretrained) -> dict[str, Path]:
    what = f"tokenizer {spec.source}@{spec.revision} cannot be had from the hub"
    remedy = "put its tokenizer.json and tokenizer_config.json in a folder and type Pretrained('./folder')"
    with refusing(DataError, what, spec.source, remedy):
        folder = snapshot(spec.source, spec.revision, TOKENIZER_FILES)
    paths = {name: path for name in TOKENIZER_FILES if (path := folder / name).is_file()}
    if TOKENIZER_FILES[0] not in paths:
        raise DataError(f"{what}: it has no {TOKENIZER_FILES[0]}; {remedy}")
    return paths


def _with_special(model: Any, config: dict[str, Any], source: str) -> Tokenizer:
    from tokenizers import AddedToken

    eos = _named(model, config, source, "eos_token", ENDS)
    if eos is None:
        raise DataError(
            f"tokenizer {source!r} does not say which token ends a text; put "
            '{"eos_token": "…"} in a tokenizer_config.json beside its tokenizer.json'
        )
    mask, rule = _named(model, config, source, "mask_token", MASKS), "own"
    added = model.get_added_tokens_decoder()
    if mask is None:
        reserved = (
            number
            for number, token in sorted(added.items())
            if token.special and _RESERVED.search(token.content)
        )
        mask, rule = next(reserved, None), "reserved"
    if mask is None:
        model.add_special_tokens([AddedToken(MASK, normalized=False, special=True)])
        mask, rule = model.token_to_id(MASK), "added"
        added = model.get_added_tokens_decoder()
    bos = _named(model, config, source, "bos_token", BEGINNINGS)
    pad = _named(model, config, source, "pad_token", (PAD, "<pad>", "[PAD]"))
    ids = {number for number, token in added.items() if token.special}
    ids |= {number for number in (eos, mask, bos, pad, unknown_id(model)) if number is not None}
    vocab = max(model.get_vocab(with_added_tokens=True).values()) + 1
    special = Special(eos, mask, eos if pad is None else pad, bos, tuple(sorted(ids)), rule)
    return Tokenizer(model, special, vocab)


def _named(model: Any, config: dict[str, Any], source: str, name: str, usual: tuple[str, ...]) -> int | None:
    """Return the id of the token that the configuration calls `name`, else of an added token with a usual name."""
    token = config.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    if token is not None and not isinstance(token, str):
        raise DataError(f"tokenizer {source!r}: {name} in tokenizer_config.json is {token!r}, not text")
    number = model.token_to_id(token) if token else None
    if token and number is None and name in ("eos_token", "mask_token"):
        raise DataError(
            f"tokenizer {source!r}: its configuration says {name} is {token!r}, which its tokenizer.json lacks; "
            "correct tokenizer_config.json, or put the tokenizer.json that belongs to it there"
        )
    if number is not None:
        return number
    added = {token.content for token in model.get_added_tokens_decoder().values()}
    return next((model.token_to_id(usual_name) for usual_name in usual if usual_name in added), None)


# ---------------------------------------------------------------- train


def _without_long_runs(text: str) -> str:
    """Shorten runs of over 1,000 (non-)space characters: BPE training is quadratic in word length.

    Such runs teach a BPE nothing.
    """
    # A long run covers at least one of these windows entirely; checking them is much cheaper than the regex.
    windows = (text[start : start + 500] for start in range(0, len(text) - 499, 500))
    if any(" " not in window or window.isspace() for window in windows):
        return _LONG_RUN.sub(r"\1\2", text)
    return text


def train(corpus: Corpus, texts: Iterable[str], report: Callable[[str], None]) -> Tokenizer:
    """Train a byte-level BPE on `texts`; the result does not depend on the number of threads."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Model

    assert isinstance(corpus.tokenizer, BPE)
    if corpus.bos:
        raise DataError(f"corpus {corpus.name!r}: a BPE trained here has no begin token; type bos=False")
    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    model.decoder = decoders.ByteLevel()
    model.encode_special_tokens = True
    trainer = trainers.BpeTrainer(
        vocab_size=corpus.tokenizer.vocab,
        special_tokens=[END, MASK, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(map(_without_long_runs, texts), trainer)
    tokenizer = _with_special(model, {}, corpus.name)
    if tokenizer.vocab != corpus.tokenizer.vocab:
        report(f"{corpus.name}: its text gave only {tokenizer.vocab} of {corpus.tokenizer.vocab} tokens")
    return tokenizer


# ---------------------------------------------------------------- text → ids


_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Digits are split off before GPT-2's expression sees the rest, so white space before a digit is at the end of a piece.
_DIGITS_APART = r"%s|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"
_NEVER = "\x00<|biphase never|>\x00"  # tiktoken is very slow without any special token to search for

SAMPLE = (
    "The cat's pyjamas weren't WE'LL'S I'Ve it'ſ o'clock 'tis rock'n'roll. naïve café İstanbul straße ﬁne\n\n"
    "def f(x):\n\treturn {'a': [1, 22, 333, 4444]}  # 3.14159e-10 != 0x7fff\r\n\r\n    if x>=10: pass\n"
    "   leading,  double   triple\t\ttabs \n \n  \n\n\n trailing   \u00a0\u2003\u3000\u2028x\x85y\x0bz\x0c\u200b\u180e\ufeff\n"
    "Ελληνικά, русский текст, עברית, العربية ١٢٣, हिन्दी १२३, ไทย ๑๒๓, 中文字符，日本語テキスト、한국어 ½ ² Ⅷ ㊿ 𝟘𝟙\n"
    "👩‍👩‍👧‍👦🏳️‍🌈🇫🇷👍🏽 ☃ ∑∫√ a\u0301e\u0308 \U00020000 <|endoftext|> <|mask|> </s> [MASK] http://x.org/?q=1&r=%20#z\n"
    "aaaaaaaaaaaaaaaaaaaaaaaa 0000000000000 ================ ~~~~~~~ .......... ''''' \"\"\" !!!???     1  2   3\n\n  4 5th"
)


class TextEncoder:
    """Encodes texts to ids that never include special tokens.

    `proven` skips the checks for a tokenizer that has passed them before; a saved tokenizer is then loaded with
    `tokenizers` only when a document needs it.
    """

    def __init__(self, tokenizer: Tokenizer | Path, *, tiktoken: bool, proven: bool = False) -> None:
        self._source = tokenizer
        self.fast = None
        if tiktoken:
            saved = isinstance(tokenizer, Path)
            spec = (tokenizer / TOKENIZER_FILES[0]).read_bytes() if saved else tokenizer.model.to_str()
            self.fast = _Tiktoken(json.loads(spec), proven)
            if not proven and self._is_control[self.fast.ids[self.fast.lacking :]].any():
                raise Inconvertible("text can spell its special tokens")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_saved(self._source) if isinstance(self._source, Path) else self._source

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text as uint32 arrays."""
        fast = self.fast
        if fast is None:
            return self.plain(texts)
        encoded = ((text, fast.encode(text)) for text in texts)
        return [self.plain([text])[0] if ids is None else ids for text, ids in encoded]

    def plain(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text from `tokenizers`, the reference."""
        try:
            encodings = self._literal.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as wrong:  # plain, from a word-level vocabulary without an unknown token
            raise DataError(
                f"the tokenizer cannot encode this text ({one_line(wrong)}); use one with an unknown token"
            ) from None
        encoded = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        for ids in encoded:
            if self._is_control[ids].any():
                name = self.tokenizer.model.id_to_token(int(ids[self._is_control[ids]][0]))
                raise DataError(
                    f"the tokenizer writes what it does not know as {name!r}, which has another meaning too; "
                    "name another token in its tokenizer_config.json, or use another tokenizer"
                )
        return encoded

    @cached_property
    def _literal(self) -> Any:
        """The tokenizer, which treats the name of a special token in a text as ordinary text."""
        return literal(self.tokenizer.model, self.tokenizer.control_ids, "")

    @cached_property
    def _is_control(self) -> np.ndarray:
        table = np.zeros(self.tokenizer.vocab, bool)
        table[list(self.tokenizer.control_ids)] = True
        return table

    def agrees(self, texts: Iterable[str]) -> bool:
        """Return whether tiktoken and `tokenizers` give the same ids."""
        texts = list(texts)
        return all(map(np.array_equal, self.encode(texts), self.plain(texts)))

    @property
    def name(self) -> str:
        return "tiktoken" if self.fast else "tokenizers"


def fastest(tokenizer: Tokenizer, texts: list[str], report: Callable[[str], None]) -> TextEncoder:
    """Return a tiktoken encoder if it passes the checks and agrees on SAMPLE and `texts`, else one with `tokenizers`."""
    try:
        encoder = TextEncoder(tokenizer, tiktoken=True)
        if encoder.agrees([SAMPLE, *SAMPLE.splitlines(keepends=True), *texts]):
            return encoder
        reason = "it gave other ids on a sample or on the first documents"
    except Inconvertible as wrong:
        reason = str(wrong)
    report(f"encoding with tokenizers: tiktoken cannot stand in for it here ({reason})")
    return TextEncoder(tokenizer, tiktoken=False)


class Inconvertible(Exception):
    """The tokenizer cannot be converted to tiktoken; the message says why."""


class _Tiktoken:
    """A byte-level BPE converted to tiktoken. Its ranks are the order of merges; `ids` maps them to the real ids."""

    def __init__(self, spec: dict[str, Any], proven: bool) -> None:
        import tiktoken

        pattern = _pattern(spec)
        ranks, ids, self.lacking = _ranks(spec, proven)
        self.ids = np.array(ids, np.uint32)
        self.core = tiktoken.Encoding(
            "biphase", pat_str=pattern, mergeable_ranks=ranks, special_tokens={_NEVER: len(ids)}
        )

    def encode(self, text: str) -> np.ndarray | None:
        """Return the ids, or None if `tokenizers` must encode this text."""
        if _has_unassigned(text):
            return None
        try:
            ranks = self.core.encode_to_numpy(text, disallowed_special=())
        except ValueError:  # a million spaces in a row overflow the stack of its regex engine
            return None
        if self.lacking and len(ranks) and (ranks < self.lacking).any():
            return None
        return self.ids[ranks]


_FIRST_UNASSIGNED = 0x378  # all code points below are assigned, and most texts have few above


def _has_unassigned(text: str) -> bool:
    """Return whether a text has a character that is unassigned in this Python's Unicode tables."""
    if text.isascii():
        return False
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    high = codes[codes >= _FIRST_UNASSIGNED]
    return bool(len(high)) and bool(_unassigned()[high].any())


@cache
def _unassigned() -> np.ndarray:
    table = np.zeros(sys.maxunicode + 1, bool)
    table[0x40000:0xE0000] = True  # planes without any assigned character
    for code in (*range(_FIRST_UNASSIGNED, 0x40000), *range(0xE0000, 0xF0000)):
        table[code] = unicodedata.category(chr(code)) == "Cn"
    return table


def _pattern(spec: dict[str, Any]) -> str:
    """Return the regular expression that splits text into words, or raise Inconvertible."""
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
    raise Inconvertible("it does not split text by one regular expression")


def _ranks(spec: dict[str, Any], proven: bool) -> tuple[dict[bytes, int], list[int], int]:
    """Return the rank of each token's bytes, the id of each rank, and the number of bytes that the vocabulary lacks.

    Lacking bytes have the first ranks.
    """
    model = spec["model"]
    unusual = ("continuing_subword_prefix", "end_of_word_suffix", "dropout", "byte_fallback")
    if model["type"] != "BPE" or any(map(model.get, unusual)):
        raise Inconvertible("it is not a plain byte-level BPE")
    vocab: dict[str, int] = model["vocab"]
    letters = _letters()
    lacking = [byte for byte, letter in enumerate(letters) if letter not in vocab]
    present = [byte for byte, letter in enumerate(letters) if letter in vocab]
    ranks = {bytes([byte]): rank for rank, byte in enumerate((*lacking, *present))}
    ids = [0] * len(lacking) + [vocab[letters[byte]] for byte in present]
    # A table for `translate` is ten times faster than a loop; characters that stand for no byte map to 0xFFFF, which
    # latin-1 cannot encode.
    table = dict.fromkeys(range(256), 0xFFFF) | {ord(letter): byte for byte, letter in enumerate(letters)}
    merges = merged_pairs(model)
    previous = ""
    for left, right in merges:
        token = left + right
        if token == previous:
            continue  # an adjacent merge that makes the same token
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
    """Raise Inconvertible unless merging each token's own bytes yields that token, as tiktoken assumes."""
    merged = dict.fromkeys(left + right for left, right in merges)
    if model.get("ignore_merges", False):
        if any(len(token) > 1 and token not in merged for token in ordinary):
            raise Inconvertible("it knows whole words that no merge makes")
        return
    from tokenizers import models

    tokens = dict.fromkeys((*_letters(), *merged))
    bpe = models.BPE({token: rank for rank, token in enumerate(tokens)}, merges)
    for token in merged:
        if len(bpe.tokenize(token)) != 1:
            raise Inconvertible(f"merging does not lead to its token {token!r}")


@cache
def _bytes() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary represents."""
    return {letter: byte for byte, letter in enumerate(_letters())}


@cache
def _letters() -> tuple[str, ...]:
    """Return the character that represents each byte in a byte-level vocabulary (GPT-2's table)."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = iter(range(256, 512))
    return tuple(chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256))
