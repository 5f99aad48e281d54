"""Texts and words → tokens, as a model reads them; and which inputs go together.

    encode_texts   a text       before + its tokens, cut to fit + after
    encode_words   a sentence   the same of its words joined by a space, with the tag of each token
    by_length      inputs of like length, in groups of so many tokens

Everything is numpy arrays, end to end (`Ragged`); padding is the business of who makes batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from biphase.errors import DataError, SpecError, one_line
from biphase.objectives import IGNORE
from biphase.tasks.load import Question, TaggedSentence

BLOCK = 1_000  # texts given to the tokenizer at once; its results weigh far more than the ids


@dataclass(frozen=True)
class Tokenization:
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


def encode_texts(reading: Tokenization, texts: Sequence[str]) -> Ragged:
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


def encode_words(reading: Tokenization, sentences: Sequence[TaggedSentence]) -> EncodedWords:
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


def around(reading: Tokenization) -> tuple[np.ndarray, np.ndarray]:
    """The ids before and after every text, as arrays."""
    return np.array(reading.before, np.int32), np.array(reading.after, np.int32)


Tokens = tuple[np.ndarray, np.ndarray]  # ids (n,) and, where asked for, their characters (n, 2), else (0, 2)


def tokens(
    reading: Tokenization, texts: Sequence[str], name: Callable[[int], str], *, spans: bool = False
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


# ---------------------------------------------------------------- questions
# Questions and their contexts → the windows a model reads, with the answer's place in each.
#
# A window is: before + the question's part + a piece of the context + after; question and context are tokenised
# apart. Without a stride there is one window, whose context is cut to fit (protocol "paper"); with one there are as
# many as cover the context, and neighbours share `stride` tokens of it (protocol "standard").
#
# What gives way when room is scarce:
# - A question's part is cut at its front, so that 16 tokens of the context (or half of all tokens, if that is less)
#   and the words right before the context stay.
# - Where the question leaves little room, neighbours share less than `stride`: of each window at least a quarter is
#   new. Else a stride near the room would make a window of every few tokens.
#
# A position of a question counts tokens of its whole input: before + question + all the context that is read + after.


LEAST_CONTEXT = 16
NULL = 0  # the place in a window that means: the answer is not here


@dataclass(frozen=True, eq=False)
class EncodedQuestions:
    """Questions as windows. Those of a question stand together, in the order of the questions."""

    ids: Ragged  # int32, of each window
    question_of: np.ndarray  # the question of each window
    context_from: (
        np.ndarray
    )  # where in each window the context begins; the same for all windows of a question
    first: np.ndarray  # which of the question's context tokens stands there
    spans: Ragged  # of each question: the characters (from, to) of each context token that is read
    inside: Ragged  # int8, of each window: 1 where a token overlaps the first answer, else 0
    bounds: (
        np.ndarray
    )  # (windows, 2): its first and last token, or NULL twice where the window lacks some of it
    gold: list[frozenset[int]]  # of each question: the positions of its first answer
    contexts: tuple[str, ...]  # of each question
    after: int  # ids after the context in every window

    def __len__(self) -> int:
        return len(self.contexts)

    @property
    def context_to(self) -> np.ndarray:
        """Where in each window the context ends."""
        return self.ids.lengths - self.after

    def span(self, question: int, first: int, last: int) -> tuple[int, int]:
        """The characters of the context from its token `first` to its token `last`, without white space around them."""
        start, end = int(self.spans[question][first, 0]), int(self.spans[question][last, 1])
        text = self.contexts[question][start:end]
        start += len(text) - len(text.lstrip())
        return start, start + len(text.strip())

    def text(self, question: int, first: int, last: int) -> str:
        """What the context says there."""
        start, end = self.span(question, first, last)
        return self.contexts[question][start:end]


@dataclass
class _Windows:
    """The columns of an `EncodedQuestions`, as they grow."""

    ids: list[np.ndarray] = field(default_factory=list)
    inside: list[np.ndarray] = field(default_factory=list)
    rows: list[tuple[int, int, int, int, int]] = field(default_factory=list)


def encode_questions(
    reading: Tokenization, questions: Sequence[Question], *, stride: int | None, unanswerable: bool = True
) -> EncodedQuestions:
    """The windows of all questions. Without `unanswerable`, a question that has no answer is refused."""
    if stride is not None and stride < 0:
        raise SpecError(
            f"the stride is {stride}; windows share 0 tokens or more, or give None for a single one"
        )
    if reading.room < 2:
        raise SpecError(
            f"an input of {reading.length} tokens has no room for a question and its context; "
            f"set the length to {reading.length + 1} or more"
        )
    if not unanswerable:
        lacking = next((question for question in questions if not question.answers), None)
        if lacking:
            raise DataError(
                f"question {lacking.name!r} has no answer; correct its row, or type Answer(unanswerable=True)"
            )
    before, after = around(reading)
    made = _Windows()
    spans_of, gold = [], []
    for number, (question, part, (ids, spans)) in enumerate(_tokenised(reading, questions)):
        least = min(len(ids), LEAST_CONTEXT, (reading.room + 1) // 2)
        part = part[max(0, len(part) + least - reading.room) :]
        capacity = reading.room - len(part)
        answer = _answer_tokens(question, spans)
        if stride is None:
            ids, spans = ids[:capacity], spans[:capacity]
        begins = np.concatenate((before, part))
        spans_of.append(spans)
        gold.append(frozenset((len(begins) + answer[answer < len(ids)]).tolist()))
        for first in _firsts(len(ids), capacity, stride or 0):
            whole = np.concatenate((begins, ids[first : first + capacity], after))
            held = answer[(answer >= first) & (answer < first + capacity)] - first + len(begins)
            inside = np.zeros(len(whole), np.int8)
            inside[held] = 1
            here = (held[0], held[-1]) if len(held) and len(held) == len(answer) else (NULL, NULL)
            made.ids.append(whole)
            made.inside.append(inside)
            made.rows.append((number, len(begins), first, *here))
    rows = np.array(made.rows, np.int64).reshape(-1, 5)
    return EncodedQuestions(
        ids=refuse_empty(
            Ragged.from_lists(made.ids, np.int32), lambda at: f"question {questions[rows[at, 0]].name!r}"
        ),
        question_of=rows[:, 0],
        context_from=rows[:, 1],
        first=rows[:, 2],
        spans=Ragged.from_lists(spans_of, np.int32, item=(2,)),
        inside=Ragged.from_lists(made.inside, np.int8),
        bounds=rows[:, 3:],
        gold=gold,
        contexts=tuple(question.context for question in questions),
        after=len(after),
    )


def _tokenised(
    reading: Tokenization, questions: Sequence[Question]
) -> list[tuple[Question, np.ndarray, Tokens]]:
    """Each question with the ids of its part and the tokens of its context; a shared context is tokenised once."""
    owner: dict[str, int] = {}
    for number, question in enumerate(questions):
        owner.setdefault(question.context, number)
    texts, owners = list(owner), list(owner.values())
    blocks = tokens(
        reading, texts, lambda at: f"the context of question {questions[owners[at]].name!r}", spans=True
    )
    contexts = dict(zip(texts, (one for block in blocks for one in block), strict=True))
    asked = [question.before for question in questions]
    parts = [
        ids
        for block in tokens(reading, asked, lambda at: f"question {questions[at].name!r}")
        for ids, _ in block
    ]
    return [
        (question, part, contexts[question.context]) for question, part in zip(questions, parts, strict=True)
    ]


def _answer_tokens(question: Question, spans: np.ndarray) -> np.ndarray:
    """Which tokens overlap the first answer, white space around it aside.

    A token without characters (some tokenizers give none to a space) counts where it stands within the answer.
    """
    if not question.answers or not question.answers[0].text.strip():
        return np.empty(0, np.int64)
    text, start = question.answers[0].text, question.answers[0].start
    start += len(text) - len(text.lstrip())
    return np.flatnonzero((spans[:, 0] < start + len(text.strip())) & (spans[:, 1] > start))


def _firsts(count: int, capacity: int, stride: int) -> range:
    """Which of `count` tokens each window begins with; even a context without tokens has a window."""
    new = max(1, capacity // 4, capacity - stride)
    return range(0, max(1, count - capacity + new), new)
