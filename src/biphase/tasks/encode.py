"""Encoding: texts, tagged words and questions → token ids; groups of inputs for batches; logits → answers.

    encode_texts      a text       before + its tokens, truncated to fit + after
    encode_words      a sentence   the same for its words joined by a space, with the tag of each token
    encode_questions  a question   one or more windows over its context, with the answer's place in each
    by_length         inputs of similar length in groups of at most so many tokens
    decode_tagged     a question's logits per token → its answer, as text and token positions
    decode_spans      the same from logits of start and end

All results are concatenated numpy arrays (`Ragged`); padding is left to the code that makes batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from biphase.errors import DataError, SpecError, one_line
from biphase.objectives import IGNORE
from biphase.specs.tasks import Question, TaggedSentence
from biphase.tasks.collection import Ragged

BLOCK = 1_000  # texts per tokenizer call; its results take far more memory than the ids


@dataclass(frozen=True)
class Tokenization:
    """How text becomes model input: the tokenizer, the ids around a text, and the longest input."""

    # From `tokenizers`, without truncation or padding, treating special tokens in a text as text.
    tokenizer: Any
    before: tuple[int, ...]  # ids before every text (BOS, [CLS])
    after: tuple[int, ...]  # ids after it (EOS, [SEP])
    length: int  # most tokens of an input, including before and after
    identity: str  # hash of all this, for caches

    def __post_init__(self) -> None:
        if self.room < 1:
            around = len(self.before) + len(self.after)
            raise SpecError(
                f"an input of {self.length} tokens, {around} of them special, has no room for text; "
                f"set the length to {around + 2} or more"
            )

    @property
    def room(self) -> int:
        """Most tokens of the text itself."""
        return self.length - len(self.before) - len(self.after)

    def framed(self, ids: np.ndarray) -> np.ndarray:
        """Return the input ids of a text: before + as many of its tokens as fit + after."""
        before, after = (np.array(side, np.int32) for side in (self.before, self.after))
        return np.concatenate((before, ids[: self.room], after))


def encode_texts(tokenization: Tokenization, texts: Sequence[str], *, keep_end: bool = False) -> Ragged:
    """Return the int32 input ids of each text, truncated to fit: at its end, or with `keep_end` at its beginning."""
    return Ragged.from_lists(list(encoded_texts(tokenization, texts, keep_end=keep_end)), np.int32)


def encoded_texts(
    tokenization: Tokenization, texts: Sequence[str], *, keep_end: bool = False
) -> Iterator[np.ndarray]:
    """Yield what `encode_texts` returns, text by text."""
    first = -tokenization.room if keep_end else 0
    for number, (ids, _) in enumerate(tokens(tokenization, texts)):
        framed = tokenization.framed(ids[first:])
        if not len(framed):
            raise _without_tokens(f"text {number + 1}")
        yield framed


# ---------------------------------------------------------------- words


@dataclass(frozen=True, eq=False)
class EncodedWords:
    """Sentences as tokens, and the word that each token belongs to.

    A token belongs to the first word that its characters overlap. Tokens of white space only, and the ids before
    and after, belong to none; the leading space of a byte-level token does not count. A word may have no token: it
    was truncated, is empty, or the tokenizer drops its characters; `gold` counts it all the same.
    """

    ids: Ragged  # int32
    labels: Ragged  # int64: the tag of the token's word, or IGNORE
    word_of: Ragged  # int32: the index of the token's word in the sentence, or -1
    gold: Ragged  # int64: the tag of each word


def encode_words(tokenization: Tokenization, sentences: Sequence[TaggedSentence]) -> EncodedWords:
    """Encode tagged sentences; every token of a word has the word's tag."""
    ids: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    word_of: list[np.ndarray] = []
    encoded = tokens(tokenization, [sentence.text for sentence in sentences], spans=True)
    for sentence, (token_ids, spans) in zip(sentences, encoded, strict=True):
        inner = _words_of(sentence.words, spans[: tokenization.room])
        input_ids = tokenization.framed(token_ids)
        whole = np.full(len(input_ids), -1, np.int32)
        whole[len(tokenization.before) :][: len(inner)] = inner
        # An extra last entry for "no word", which index -1 selects.
        labels.append(np.array([*sentence.tags, IGNORE], np.int64)[whole])
        word_of.append(whole)
        ids.append(input_ids)
    return EncodedWords(
        _refuse_empty(Ragged.from_lists(ids, np.int32), lambda at: f"sentence {at + 1}"),
        Ragged.from_lists(labels, np.int64),
        Ragged.from_lists(word_of, np.int32),
        Ragged.from_lists([sentence.tags for sentence in sentences], np.int64),
    )


def _words_of(words: Sequence[str], spans: np.ndarray) -> np.ndarray:
    """Return for each token, by its characters in the joined words, the first word it overlaps, or -1."""
    lengths = np.array([len(word) for word in words], np.int64)
    ends = np.cumsum(lengths + 1) - 1
    real = np.flatnonzero(lengths)  # an empty word overlaps nothing
    if not len(real) or not len(spans):
        return np.full(len(spans), -1, np.int32)
    # The first word that ends after the token begins.
    candidate = np.searchsorted(ends[real], spans[:, 0], side="right")
    word = real[np.minimum(candidate, len(real) - 1)]
    overlaps = (candidate < len(real)) & (ends[word] - lengths[word] < spans[:, 1])
    return np.where(overlaps, word, -1).astype(np.int32)


# ---------------------------------------------------------------- tokens


Tokens = tuple[np.ndarray, np.ndarray]  # ids (n,) and, if requested, character spans (n, 2), else (0, 2)


def tokens(tokenization: Tokenization, texts: Sequence[str], *, spans: bool = False) -> Iterator[Tokens]:
    """Yield all tokens of each text."""
    tokenizer = tokenization.tokenizer
    encode = tokenizer.encode_batch if spans else tokenizer.encode_batch_fast  # the fast one has no offsets
    for first in range(0, len(texts), BLOCK):
        try:
            encodings = encode(list(texts[first : first + BLOCK]), add_special_tokens=False)
        except Exception as wrong:  # many kinds of errors
            raise DataError(
                f"a text of {len(texts):,} cannot be written in tokens ({one_line(wrong)}); use a tokenizer with an "
                "unknown token"
            ) from None
        for encoding in encodings:
            offsets = encoding.offsets if spans else []
            yield np.array(encoding.ids, np.int32), np.array(offsets, np.int32).reshape(-1, 2)


def _refuse_empty(inputs: Ragged, name: Callable[[int], str]) -> Ragged:
    """Raise an error if an input has no tokens; otherwise return the inputs."""
    empty = np.flatnonzero(inputs.lengths == 0)
    if len(empty):
        raise _without_tokens(name(int(empty[0])))
    return inputs


def _without_tokens(which: str) -> DataError:
    return DataError(
        f"{which} has no tokens; take that row out, or put the tokenizer's end token after each text"
    )


# ---------------------------------------------------------------- groups


def by_length(lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """Return indices of inputs, shortest first and stable, in groups of at most `budget` tokens.

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
# A window is: before + question + part of the context + after; question and context are tokenized separately.
# Without a stride there is one window with a truncated context (protocol "paper"); with one, as many windows as
# cover the context, and consecutive ones share `stride` tokens (protocol "standard").
#
# When there is little room:
# - The question is truncated at its front, so that 16 tokens of the context (or half of all tokens, if fewer) and the
#   words right before the context remain.
# - Windows share less than `stride`, so that at least a quarter of each is new. Otherwise a stride near the room would
#   make a window for every few tokens.
#
# A position of a question counts tokens of its whole input: before + question + all of the context that is read +
# after.


LEAST_CONTEXT = 16
NULL = 0  # the position in a window that means "no answer here"


@dataclass(frozen=True, slots=True)
class Decoded:
    """An answer: its text ("" for none), its token positions in the question's whole input, its span in the context."""

    text: str
    tokens: frozenset[int]
    span: tuple[int, int] = (-1, -1)  # start and end character in the context; -1: none


NOTHING = Decoded("", frozenset())


@dataclass(frozen=True, eq=False)
class EncodedQuestions:
    """Questions as windows; the windows of a question are adjacent, in the order of the questions."""

    ids: Ragged  # int32, of each window
    question_of: np.ndarray  # the question of each window
    first: np.ndarray  # of each window: index of the question's context token that it begins with
    inside: Ragged  # int8, of each window: 1 where a token overlaps the first answer, else 0
    # (windows, 2): the answer's first and last token, or NULL twice if the window lacks part of it
    bounds: np.ndarray
    head: np.ndarray  # of each question: where the context begins in its windows
    spans: Ragged  # of each question: character span (from, to) of each context token that is read
    gold: list[frozenset[int]]  # of each question: the positions of its first answer
    contexts: tuple[str, ...]  # of each question
    after: int  # number of ids after the context in every window

    def __len__(self) -> int:
        return len(self.contexts)

    def answer(self, question: int, first: int, last: int, tokens: frozenset[int] | None = None) -> Decoded:
        """Return the answer from context token `first` to `last`, without surrounding white space.

        `tokens`: its positions, if they are others than these.
        """
        start, end = int(self.spans[question][first, 0]), int(self.spans[question][last, 1])
        text = self.contexts[question][start:end]
        start += len(text) - len(text.lstrip())
        head = int(self.head[question])
        here = frozenset(range(head + first, head + last + 1)) if tokens is None else tokens
        return Decoded(text.strip(), here, (start, start + len(text.strip())))


def encode_questions(
    tokenization: Tokenization, questions: Sequence[Question], *, stride: int | None
) -> EncodedQuestions:
    """Encode questions as windows."""
    room = tokenization.room
    if room < 2:
        raise SpecError(
            f"an input of {tokenization.length} tokens has no room for a question and its context; "
            f"set the length to {tokenization.length + 1} or more"
        )
    windows: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    numbers: list[tuple[int, int, int, int]] = []
    heads, spans_of, gold = [], [], []
    for number, (question, part, (ids, spans)) in enumerate(_tokenised(tokenization, questions)):
        least = min(len(ids), LEAST_CONTEXT, (room + 1) // 2)
        part = part[max(0, len(part) + least - room) :]
        capacity = room - len(part)
        head = len(tokenization.before) + len(part)
        answer = _answer_tokens(question, spans)
        if stride is None:
            ids, spans = ids[:capacity], spans[:capacity]
        heads.append(head)
        spans_of.append(spans)
        gold.append(frozenset((head + answer[answer < len(ids)]).tolist()))
        for first in _firsts(len(ids), capacity, stride or 0):
            whole = tokenization.framed(np.concatenate((part, ids[first : first + capacity])))
            held = answer[(answer >= first) & (answer < first + capacity)] - first + head
            inside = np.zeros(len(whole), np.int8)
            inside[held] = 1
            here = (held[0], held[-1]) if len(held) and len(held) == len(answer) else (NULL, NULL)
            windows.append(whole)
            labels.append(inside)
            numbers.append((number, first, *here))
    rows = np.array(numbers, np.int64).reshape(-1, 4)
    return EncodedQuestions(
        ids=_refuse_empty(
            Ragged.from_lists(windows, np.int32), lambda at: f"question {questions[rows[at, 0]].name!r}"
        ),
        question_of=rows[:, 0],
        first=rows[:, 1],
        inside=Ragged.from_lists(labels, np.int8),
        bounds=rows[:, 2:],
        head=np.array(heads, np.int64),
        spans=Ragged.from_lists(spans_of, np.int32, item=(2,)),
        gold=gold,
        contexts=tuple(question.context for question in questions),
        after=len(tokenization.after),
    )


def _tokenised(
    tokenization: Tokenization, questions: Sequence[Question]
) -> Iterator[tuple[Question, np.ndarray, Tokens]]:
    """Yield each question with its own ids and the tokens of its context; a shared context is tokenized once."""
    different = list(dict.fromkeys(question.context for question in questions))
    contexts = dict(zip(different, tokens(tokenization, different, spans=True), strict=True))
    parts = tokens(tokenization, [question.before for question in questions])
    for question, (ids, _) in zip(questions, parts, strict=True):
        yield question, ids, contexts[question.context]


def _answer_tokens(question: Question, spans: np.ndarray) -> np.ndarray:
    """Return the tokens that overlap the first answer, ignoring white space around it.

    A token without characters (some tokenizers give none to a space) counts if it is within the answer.
    """
    if not question.answers or not question.answers[0].text.strip():
        return np.empty(0, np.int64)
    text, start = question.answers[0].text, question.answers[0].start
    start += len(text) - len(text.lstrip())
    return np.flatnonzero((spans[:, 0] < start + len(text.strip())) & (spans[:, 1] > start))


def _firsts(count: int, capacity: int, stride: int) -> range:
    """Return the context token that each window begins with; a context without tokens has a window too."""
    new = max(1, capacity // 4, capacity - stride)
    return range(0, max(1, count - capacity + new), new)


# ---------------------------------------------------------------- answers
# `decode_tagged` is for heads that mark answer tokens (protocol "paper"), `decode_spans` for heads that score start and
# end (protocol "standard"). SQuAD's metrics compare the text; the paper's metric compares the set of positions with
# `EncodedQuestions.gold`. Both decoders return both.
#
# A token that occurs in several windows counts with its highest value: per position for taggers, by the best span of
# any window for spans. Logits are finite, since `per_token` refuses others.


def decode_tagged(encoded: EncodedQuestions, margins: Ragged) -> list[Decoded]:
    """Return the answers of a tagger, from the margin logit(in) − logit(out) of each token of each window.

    The positions are those of every token with a margin above 0, as in the paper; this includes tokens of the
    question and special tokens, which can never be right. (The paper counted padding too; here there is none.) The
    text is the run of such tokens in the context with the highest sum, the first of equals.
    """
    answers = []
    for question, values in enumerate(_over_windows(encoded, margins)):
        head = encoded.head[question]
        run = _best_run(values[head : head + len(encoded.spans[question])])
        marked = frozenset(np.flatnonzero(values > 0).tolist())
        answers.append(encoded.answer(question, *run, marked) if run else Decoded("", marked))
    return answers


def decode_spans(
    encoded: EncodedQuestions, starts: Ragged, ends: Ragged, *, unanswerable: bool, longest: int = 30
) -> list[Decoded]:
    """Return the answers from two logits per token of each window: the token is the first, or the last, of the answer.

    An answer is the span of at most `longest` context tokens with the highest sum of its two logits; ties go to the
    first window, then the first start, then the shortest span. If questions may be unanswerable, the smallest sum
    at the null position over a question's windows is the score of "no answer", which wins if it is higher.
    """
    best = [(-np.inf, 0, 0)] * len(encoded)  # score, first and last context token
    null = [np.inf] * len(encoded)
    windows = zip(encoded.question_of.tolist(), encoded.first.tolist(), starts, ends, strict=True)
    for question, first, *logits in windows:
        start, end = (values.astype(np.float64) for values in logits)
        null[question] = min(null[question], start[NULL] + end[NULL])
        context = slice(encoded.head[question], len(start) - encoded.after)
        score, left, right = _best_span(start[context], end[context], longest)
        if score > best[question][0]:
            best[question] = score, first + left, first + right
    return [
        NOTHING
        if score == -np.inf or (unanswerable and null[question] > score)
        else encoded.answer(question, first, last)
        for question, (score, first, last) in enumerate(best)
    ]


def _best_span(start: np.ndarray, end: np.ndarray, longest: int) -> tuple[float, int, int]:
    """Return the best sum with its first and last token; −inf if there are no tokens."""
    if not len(start):
        return -np.inf, 0, 0
    reach = min(longest, len(end))
    padded = np.concatenate((end, np.full(reach - 1, -np.inf)))
    sums = start + np.lib.stride_tricks.sliding_window_view(padded, reach).max(axis=1)
    left = int(sums.argmax())
    return float(sums[left]), left, left + int(end[left : left + reach].argmax())


def _best_run(margins: np.ndarray) -> tuple[int, int] | None:
    """Return the first and last token of the run of positive margins with the highest sum."""
    edges = np.flatnonzero(np.diff(margins > 0, prepend=False, append=False))
    if not len(edges):
        return None
    firsts, stops = edges[::2], edges[1::2]
    best = np.add.reduceat(np.maximum(margins, 0), firsts).argmax()
    return int(firsts[best]), int(stops[best]) - 1


def _over_windows(encoded: EncodedQuestions, values: Ragged) -> Ragged:
    """Return the highest value at each position of each question's whole input."""
    context = encoded.spans.lengths
    starts = np.concatenate(([0], np.cumsum(encoded.head + context + encoded.after)))
    window = np.repeat(np.arange(len(encoded.ids)), encoded.ids.lengths)
    at = np.arange(len(window)) - encoded.ids.starts[window]
    question = encoded.question_of[window]
    end = encoded.ids.lengths[window] - encoded.after  # of the window's context
    # Context tokens are shifted by the window's first one; the ids after it go behind the whole context.
    moved = np.where(at < end, encoded.first[window], encoded.head[question] + context[question] - end)
    moved[at < encoded.head[question]] = 0
    highest = np.full(starts[-1], -np.inf)
    np.maximum.at(highest, starts[question] + at + moved, values.flat.astype(np.float64))
    return Ragged(highest, starts)
