"""Bulk tokenization: text to ids in several processes, with tiktoken if it provably gives the ids of `tokenizers`.

tiktoken is four to seven times faster. `TextEncoder` encodes texts; `fastest` and `confirmed` choose the library.

A byte-level BPE can be converted to tiktoken if
- each merge makes its own token, or merges that make the same token are adjacent (tiktoken ranks tokens, not pairs);
- every token is reached by its own merges (else tiktoken would produce whole words that `tokenizers` never makes);
- text is split by one regular expression (ByteLevel's own, a Split, or Digits before ByteLevel);
- nothing else changes the text: no normalizer, no dropout, no non-special added tokens.
These conditions are checked, then both encoders must agree on a sample of scripts, code, digits, white space and emoji,
and the caller compares them again on the corpus's first documents. If any check fails, `tokenizers` is used and a
message says why. Single documents go to `tokenizers` if they contain a byte that the vocabulary lacks, a character
newer than this Python's Unicode tables (on which the two regex engines may disagree), or an extreme run of white space.

`Helpers` are the processes that parse and encode blocks of raw records, in the order of the blocks. They are started
with spawn, because a process with threads or a GPU context must not be forked, and each loads the tokenizer once. Raw
bytes go in and one array of ids per block comes out. A few blocks per process are in flight, so memory use does not
depend on the corpus's size. A helper exits when its parent dies, even by SIGKILL.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from biphase.data.corpus import TOKENIZER_FILES
from biphase.data.documents import RecordBlock, Tally, parse, text_hash
from biphase.data.tokenizer import Tokenizer, load_saved, merged_pairs, without_special
from biphase.errors import DataError, one_line

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
        """Return the ids of each text as uint32 arrays."""
        fast = self.fast
        if fast is None:
            return self.plain(texts)
        made = [fast.encode(text) for text in texts]
        return [self.plain([text])[0] if ids is None else ids for text, ids in zip(texts, made, strict=True)]

    def plain(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text from `tokenizers`, the reference."""
        try:
            found = self.tokenizer.model.encode_batch_fast(texts, add_special_tokens=False)
        except (
            Exception
        ) as wrong:  # a word-level vocabulary without an unknown token raises a plain Exception
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
        return without_special(self.tokenizer.model, self.tokenizer.unspoken)

    def _literally(self, text: str) -> np.ndarray:
        """Return the ids of a text that contains the name of a special token, treating that name as ordinary text."""
        ids = np.array(self._deaf.encode(text, add_special_tokens=False).ids, np.uint32)
        if self._unspoken[ids].any():
            name = self.tokenizer.model.id_to_token(int(ids[self._unspoken[ids]][0]))
            raise DataError(
                f"the tokenizer writes what it does not know as {name!r}, which has another meaning too; "
                "name another token in its tokenizer_config.json, or use another tokenizer"
            )
        return ids

    def agrees(self, texts: Iterable[str]) -> bool:
        """Return whether tiktoken and `tokenizers` give the same ids."""
        texts = list(texts)
        return all(map(np.array_equal, self.encode(texts), self.plain(texts)))

    @property
    def name(self) -> str:
        return "tiktoken" if self.fast else "tokenizers"


def fastest(tokenizer: Tokenizer, report: Callable[[str], None]) -> TextEncoder:
    """Return a tiktoken encoder if it passes the checks and the sample, else one with `tokenizers`."""
    try:
        encoder = TextEncoder(tokenizer, tiktoken=True)
    except Inconvertible as reason:
        report(f"encoding with tokenizers: tiktoken cannot stand in for it here ({reason})")
        return TextEncoder(tokenizer, tiktoken=False)
    return confirmed(encoder, [SAMPLE, *SAMPLE.splitlines(keepends=True)], "a sample", report)


def confirmed(
    encoder: TextEncoder, texts: Iterable[str], what: str, report: Callable[[str], None]
) -> TextEncoder:
    """Return the encoder if both libraries agree on `texts`, else one with `tokenizers`."""
    if encoder.fast is None or encoder.agrees(texts):
        return encoder
    report(f"encoding with tokenizers: tiktoken gave other ids on {what}")
    return TextEncoder(encoder.tokenizer, tiktoken=False)


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
        if _has_young(text):
            return None
        try:
            ranks = self.core.encode_to_numpy(text, disallowed_special=())
        except ValueError:  # a million spaces in a row overflow the stack of its regex engine
            return None
        if self.lacking and len(ranks) and (ranks < self.lacking).any():
            return None
        return self.ids[ranks]


_FIRST_UNKNOWN = 0x378  # all code points below are assigned, and most texts have few above


def _has_young(text: str) -> bool:
    """Return whether a text has a character that is unassigned in this Python's Unicode tables."""
    if text.isascii():
        return False
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    high = codes[codes >= _FIRST_UNKNOWN]
    return bool(len(high)) and bool(_unknown()[high].any())


@cache
def _unknown() -> np.ndarray:
    table = np.zeros(sys.maxunicode + 1, bool)
    table[0x40000:0xE0000] = True  # planes without any assigned character
    for code in (*range(_FIRST_UNKNOWN, 0x40000), *range(0xE0000, 0xF0000)):
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
    raise Inconvertible("its way to cut words is not one regular expression")


def _ranks(spec: dict[str, Any], proven: bool) -> tuple[dict[bytes, int], list[int], int]:
    """Return the rank of each token's bytes, the id of each rank, and the number of bytes that the vocabulary lacks.

    Lacking bytes have the first ranks.
    """
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
    """Return the character that represents each byte in a byte-level vocabulary (GPT-2's table)."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = iter(range(256, 512))
    return tuple(chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256))


# ---------------------------------------------------------------- parallel


BLOCKS_AHEAD = 3  # per process


@dataclass(frozen=True)
class Encoded:
    """The documents of a block: their concatenated ids, including begin and end tokens."""

    ids: np.ndarray
    lengths: np.ndarray  # tokens per document
    sizes: np.ndarray  # UTF-8 bytes per document
    held: np.ndarray  # whether its text hash is 0 modulo 1,000
    tally: Tally


@dataclass(frozen=True)
class BlockEncoder:
    """The options for encoding a block, as plain values that can be sent to other processes."""

    tokenizer: Path
    text: str
    begin: tuple[int, ...]  # ids before each document
    end: int  # id after each document
    dtype: str


class LoadedEncoder:
    """A block encoder with its tokenizer in memory."""

    def __init__(self, how: BlockEncoder) -> None:
        self.how = how
        try:  # the caller checks whether tiktoken may be used; here it is only loaded
            self.encoder = TextEncoder(how.tokenizer, tiktoken=True, proven=True)
        except Inconvertible:
            self.encoder = TextEncoder(how.tokenizer, tiktoken=False)

    def encode(self, block: RecordBlock, tiktoken: bool) -> Encoded:
        """Parse and encode the documents of a block."""
        how, begin, tally = self.how, self.how.begin, Tally()
        parsed = list(parse(block, how.text, tally))
        texts = [text for text, _ in parsed]
        ids = self.encoder.encode(texts) if tiktoken else self.encoder.plain(texts)
        lengths = np.array([len(one) + 1 + len(begin) for one in ids], np.int64)
        made, at = np.empty(int(lengths.sum()), how.dtype), 0
        for one, length in zip(ids, lengths.tolist(), strict=True):
            made[at : at + len(begin)] = begin
            made[at + len(begin) : at + length - 1] = one
            made[at + length - 1] = how.end
            at += length
        sizes = np.array([len(as_bytes) for _, as_bytes in parsed], np.int64)
        held = np.array([text_hash(as_bytes) % 1000 == 0 for _, as_bytes in parsed], bool)
        return Encoded(made, lengths, sizes, held, tally)


class Helpers:
    """Processes that encode blocks; they start immediately and load while the caller still checks the encoder.

    `processes` 0 means one per core; 1 encodes in the caller's process.
    """

    def __init__(self, how: BlockEncoder, processes: int) -> None:
        self.how, self.processes = how, processes or _cores()
        self.pool: ProcessPoolExecutor | None = None
        if self.processes > 1:
            spawn = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(self.processes, spawn, initializer=_begin, initargs=(how,))
            for _ in range(self.processes):  # the pool starts a process per task while none is idle
                self.pool.submit(_ready)

    def __enter__(self) -> Helpers:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool:
            self.pool.shutdown(wait=True, cancel_futures=True)

    def encode(
        self, blocks: Iterator[RecordBlock], *, tiktoken: bool
    ) -> Iterator[tuple[RecordBlock, Encoded]]:
        """Yield each block with its encoded documents, in order."""
        if self.pool is None:
            loaded = LoadedEncoder(self.how)
            yield from ((block, loaded.encode(block, tiktoken)) for block in blocks)
            return
        waiting: deque[tuple[RecordBlock, Future[Encoded]]] = deque()
        try:
            for block in blocks:
                waiting.append((_light(block), self.pool.submit(_encode, block, tiktoken)))
                if len(waiting) >= self.processes * BLOCKS_AHEAD:
                    yield _next(waiting)
            while waiting:
                yield _next(waiting)
        except BrokenProcessPool:
            raise DataError(
                "a process that encodes text was killed, perhaps for want of memory; "
                "type the command again with fewer --processes: it goes on where it was"
            ) from None


def _next(waiting: deque[tuple[RecordBlock, Future[Encoded]]]) -> tuple[RecordBlock, Encoded]:
    block, future = waiting.popleft()
    return block, future.result()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _light(block: RecordBlock) -> RecordBlock:
    """Return the block without its text, which a helper has received."""
    return replace(block, payload=b"")


_here: LoadedEncoder | str = (
    "it was never made ready"  # in a helper process: its encoder, or why there is none
)


def _begin(how: BlockEncoder) -> None:
    """Initialize a helper: single-threaded, ignoring ^C (the parent handles it), exiting when the parent dies."""
    global _here
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _here = LoadedEncoder(how)
    except Exception as wrong:  # raised here, it would break the pool without its message
        _here = one_line(wrong)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _ready() -> None:
    """Do nothing; submitting this task makes the pool start a helper."""


def _encode(block: RecordBlock, tiktoken: bool) -> Encoded:
    if isinstance(_here, str):
        raise DataError(
            f"a process that encodes text could not begin ({_here}); type the command again with --processes 1"
        )
    return _here.encode(block, tiktoken)
