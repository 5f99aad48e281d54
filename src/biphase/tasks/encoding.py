"""Texts and words → tokens, as a model reads them; and which inputs go together.

    encode_texts   a text       before + its tokens, cut to fit + after
    encode_words   a sentence   the same of its words joined by a space, with the tag of each token
    by_length      inputs of like length, in groups of so many tokens

Everything is numpy arrays, end to end (`Ragged`); padding is the business of who makes batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from biphase.batch import IGNORE
from biphase.errors import DataError, SpecError, one_line
from biphase.tasks.examples import Words

BLOCK = 1_000  # texts given to the tokenizer at once; its results weigh far more than the ids


@dataclass(frozen=True)
class Reading:
    """How a model reads text: its tokenizer, what it expects around a text, and how much it can take."""

    tokenizer: (
        Any  # of the `tokenizers` library, without truncation or padding, deaf to special tokens in text
    )
    before: tuple[int, ...]  # ids before every text (a beginning token, [CLS])
    after: tuple[int, ...]  # ids after it (the end token, [SEP])
    length: int  # the most tokens of an input, before and after included
    identity: str  # the hash of all this, for caches

    def __post_init__(self) -> None:
        if self.room < 1:
            around = len(self.before) + len(self.after)
            raise SpecError(
                f"an input of {self.length} tokens, {around} of them special, has no room for text; "
                f"set the length to {around + 2} or more"
            )

    @property
    def room(self) -> int:
        """The most tokens of the text itself."""
        return self.length - len(self.before) - len(self.after)


@dataclass(frozen=True, eq=False)
class Ragged:
    """Arrays of different lengths, end to end: number i is `flat[starts[i] : starts[i + 1]]`."""

    flat: np.ndarray
    starts: np.ndarray  # one more than there are arrays

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> np.ndarray:
        at = range(len(self))[number]  # the last is -1, and one too far is an IndexError
        return self.flat[self.starts[at] : self.starts[at + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self.flat[start:end] for start, end in zip(self.starts[:-1], self.starts[1:], strict=True))

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    @classmethod
    def from_lists(cls, lists: Sequence[Any], dtype: Any = None, *, item: tuple[int, ...] = ()) -> Ragged:
        """From lists or arrays, as they are or as `dtype`; `item` is the shape of one entry."""
        rows = [np.asarray(one, dtype).reshape(-1, *item) for one in lists]
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=starts[1:])
        return cls(np.concatenate(rows) if rows else np.empty((0, *item), dtype or np.int64), starts)

    @classmethod
    def joined(cls, parts: Sequence[Ragged], dtype: Any) -> Ragged:
        """All arrays of `parts`, one after the other."""
        starts = np.zeros(sum(map(len, parts)) + 1, np.int64)
        lengths = [np.empty(0, np.int64), *(part.lengths for part in parts)]
        np.cumsum(np.concatenate(lengths), out=starts[1:])
        return cls(np.concatenate([np.empty(0, dtype), *(part.flat for part in parts)]), starts)


def encode_texts(reading: Reading, texts: Sequence[str]) -> Ragged:
    """The input for each text, as int32 ids: before + as many of its tokens as fit + after."""
    before, after = around(reading)
    blocks = [
        Ragged.from_lists(
            [np.concatenate((before, ids[: reading.room], after)) for ids, _ in block], np.int32
        )
        for block in tokens(reading, texts, lambda number: f"text {number + 1}")
    ]
    return refuse_empty(Ragged.joined(blocks, np.int32), lambda number: f"text {number + 1}")


# ---------------------------------------------------------------- words


@dataclass(frozen=True, eq=False)
class EncodedWords:
    """Sentences as tokens, and which word each token belongs to.

    A token belongs to the first word that its characters overlap. The space a byte-level token begins with, a token
    of white space only, and the ids before and after belong to none. A word may have no token: it was cut off, is
    empty, or the tokenizer drops its characters; `words` and `gold` count it all the same.
    """

    ids: Ragged  # int32
    labels: Ragged  # int64: the tag of its word, IGNORE without one
    word_of: Ragged  # int32: the number of its word in the sentence, -1 without one
    words: np.ndarray  # words of each sentence
    gold: Ragged  # int64: the tag of each word


def encode_words(reading: Reading, sentences: Sequence[Words]) -> EncodedWords:
    """The inputs for sentences whose words are tagged; every token of a word carries the word's tag."""
    before, after = around(reading)
    ids: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    word_of: list[np.ndarray] = []
    texts = [" ".join(sentence.words) for sentence in sentences]
    blocks = tokens(reading, texts, lambda number: f"sentence {number + 1}", spans=True)
    for sentence, (found, spans) in zip(sentences, (one for block in blocks for one in block), strict=True):
        inner = _words_of(sentence.words, spans[: reading.room])
        whole = np.full(len(before) + len(inner) + len(after), -1, np.int32)
        whole[len(before) : len(before) + len(inner)] = inner
        # One entry more, for "no word": number -1 finds it.
        labels.append(np.array([*sentence.tags, IGNORE], np.int64)[whole])
        word_of.append(whole)
        ids.append(np.concatenate((before, found[: reading.room], after)))
    return EncodedWords(
        refuse_empty(Ragged.from_lists(ids, np.int32), lambda number: f"sentence {number + 1}"),
        Ragged.from_lists(labels, np.int64),
        Ragged.from_lists(word_of, np.int32),
        np.array([len(sentence.words) for sentence in sentences], np.int64),
        Ragged.from_lists([sentence.tags for sentence in sentences], np.int64),
    )


def _words_of(words: Sequence[str], spans: np.ndarray) -> np.ndarray:
    """For each token, by its characters in the words joined by a space, the first word it overlaps, or -1."""
    lengths = np.array([len(word) for word in words], np.int64)
    ends = np.cumsum(lengths + 1) - 1
    real = np.flatnonzero(lengths)  # an empty word has a place but nothing to overlap
    if not len(real) or not len(spans):
        return np.full(len(spans), -1, np.int32)
    candidate = np.searchsorted(ends[real], spans[:, 0], side="right")  # the first that ends after it begins
    word = real[np.minimum(candidate, len(real) - 1)]
    overlaps = (candidate < len(real)) & (ends[word] - lengths[word] < spans[:, 1])
    return np.where(overlaps, word, -1).astype(np.int32)


# ---------------------------------------------------------------- tokens


def around(reading: Reading) -> tuple[np.ndarray, np.ndarray]:
    """The ids before and after every text, as arrays."""
    return np.array(reading.before, np.int32), np.array(reading.after, np.int32)


Tokens = tuple[np.ndarray, np.ndarray]  # ids (n,) and, where asked for, their characters (n, 2), else (0, 2)


def tokens(
    reading: Reading, texts: Sequence[str], name: Callable[[int], str], *, spans: bool = False
) -> Iterator[list[Tokens]]:
    """All tokens of each text, in blocks; `name` says in messages which text that is."""
    none = np.empty((0, 2), np.int32)
    for first in range(0, len(texts), BLOCK):
        yield [
            (
                np.array(one.ids, np.int32),
                np.array(one.offsets, np.int32).reshape(-1, 2) if spans else none,
            )
            for one in _encodings(reading.tokenizer, texts, first, name, spans)
        ]


def _encodings(
    tokenizer: Any, texts: Sequence[str], first: int, name: Callable[[int], str], spans: bool
) -> list[Any]:
    encode = tokenizer.encode_batch if spans else tokenizer.encode_batch_fast  # the fast one has no offsets
    block = list(texts[first : first + BLOCK])
    try:
        return encode(block, add_special_tokens=False)
    except Exception:  # half a surrogate pair, or a word list without an unknown token: many kinds
        for number, text in enumerate(block, first):
            try:
                encode([text], add_special_tokens=False)
            except Exception as wrong:
                raise DataError(
                    f"{name(number)} ({text[:40]!r}) cannot be written in tokens ({one_line(wrong)}); "
                    "correct that row, or use a tokenizer with an unknown token"
                ) from None
        raise


def refuse_empty(inputs: Ragged, name: Callable[[int], str]) -> Ragged:
    """The same inputs, each of at least one token; a text without any has none unless something is put around it."""
    empty = np.flatnonzero(inputs.lengths == 0)
    if len(empty):
        raise DataError(
            f"{name(int(empty[0]))} has no tokens; take that row out, or put the tokenizer's end token after each text"
        )
    return inputs


# ---------------------------------------------------------------- groups


def by_length(lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """Numbers of inputs, shortest first, equal ones in order, in groups of at most `budget` tokens together.

    An input longer than the budget is a group of its own.
    """
    order = np.argsort(lengths, kind="stable")
    ends = np.cumsum(np.asarray(lengths, np.int64)[order])
    groups = []
    start = done = 0
    while start < len(order):
        stop = max(start + 1, int(np.searchsorted(ends, done + budget, side="right")))
        groups.append(order[start:stop])
        start, done = stop, int(ends[stop - 1])
    return groups
