"""Decoding question answering: a model's outputs per token → the answer to each question, as text and token positions.

`decode_tagged` is for heads that mark answer tokens (protocol "paper"), `decode_spans` for heads that score start
and end (protocol "standard"). SQuAD's metrics compare the text; the paper's metric compares the set of positions
with `EncodedQuestions.gold`. Both decoders return both.

A token that occurs in several windows counts with its highest value: per position for taggers, by the best span of
any window for spans. NaN is never chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from biphase.errors import SpecError
from biphase.tasks.encode import NULL, EncodedQuestions, Ragged

_HIGHEST = float(np.finfo(np.float32).max)  # replaces infinity, so that the sum of two is finite


@dataclass(frozen=True, slots=True)
class Decoded:
    """An answer: its text ("" for none), its token positions in the question's whole input, its span in the context."""

    text: str
    tokens: frozenset[int]
    span: tuple[int, int] = (-1, -1)  # start and end character in the context; -1: none


NOTHING = Decoded("", frozenset())


def decode_tagged(encoded: EncodedQuestions, margins: Ragged) -> list[Decoded]:
    """Return the answers of a tagger, from the margin logit(in) − logit(out) of each token of each window.

    The positions are those of every token with a margin above 0, as in the paper; this includes tokens of the
    question and special tokens, which can never be right. (The paper counted padding too; here there is none.) The
    text is the run of such tokens in the context with the highest sum, the first of equals.
    """
    heads = np.zeros(len(encoded), np.int64)
    heads[encoded.question_of] = encoded.context_from
    answers = []
    for question, (head, values) in enumerate(
        zip(heads, _over_windows(encoded, margins, heads), strict=True)
    ):
        run = _best_run(values[head : head + len(encoded.spans[question])])
        tokens = frozenset(np.flatnonzero(values > 0).tolist())
        found = (encoded.text(question, *run), tokens, encoded.span(question, *run)) if run else ("", tokens)
        answers.append(Decoded(*found))
    return answers


def decode_spans(
    encoded: EncodedQuestions, starts: Ragged, ends: Ragged, *, unanswerable: bool, longest: int = 30
) -> list[Decoded]:
    """Return the answers from two logits per token of each window: the token is the first, or the last, of the answer.

    An answer is the span of at most `longest` context tokens with the highest sum of its two logits; ties go to the
    first window, then the first start, then the shortest span. If questions may be unanswerable, the smallest sum
    at the null position over a question's windows is the score of "no answer", which wins if it is higher.
    """
    if longest < 1:
        raise SpecError(f"an answer of at most {longest} tokens is none; set longest to 1 or more")
    _same_shape(encoded, starts, ends)
    best = np.full(len(encoded), -np.inf)
    null = np.full(len(encoded), np.inf)
    # Question → start of its context, first and last context token.
    found: dict[int, tuple[int, int, int]] = {}
    windows = zip(
        encoded.question_of.tolist(),
        encoded.context_from.tolist(),
        encoded.context_to.tolist(),
        encoded.first.tolist(),
        Ragged(_numbers(starts), starts.starts),
        Ragged(_numbers(ends), ends.starts),
        strict=True,
    )
    for question, head, stop, first, start, end in windows:
        null[question] = min(null[question], start[NULL] + end[NULL])
        score, left, right = _best_span(start[head:stop], end[head:stop], longest)
        if score > best[question]:
            best[question] = score
            found[question] = (head, first + left, first + right)
    return [
        _span(encoded, question, found.get(question), bool(unanswerable and null[question] > best[question]))
        for question in range(len(encoded))
    ]


def _span(
    encoded: EncodedQuestions, question: int, found: tuple[int, int, int] | None, refused: bool
) -> Decoded:
    if found is None or refused:
        return NOTHING
    head, left, right = found
    tokens = frozenset(range(head + left, head + right + 1))
    return Decoded(encoded.text(question, left, right), tokens, encoded.span(question, left, right))


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
    best = np.add.reduceat(np.fmax(margins, 0), firsts).argmax()
    return int(firsts[best]), int(stops[best]) - 1


def _over_windows(encoded: EncodedQuestions, values: Ragged, heads: np.ndarray) -> Ragged:
    """Return the highest value at each position of each question's whole input."""
    _same_shape(encoded, values)
    context = encoded.spans.lengths
    starts = np.concatenate(([0], np.cumsum(heads + context + encoded.after)))
    window = np.repeat(np.arange(len(encoded.ids)), encoded.ids.lengths)
    at = np.arange(len(window)) - encoded.ids.starts[window]
    question = encoded.question_of[window]
    # Context tokens are shifted by the window's first one; the ids after it go behind the whole context.
    behind = heads[question] + context[question] - encoded.context_to[window]
    moved = np.where(at < encoded.context_to[window], encoded.first[window], behind)
    moved[at < heads[question]] = 0
    highest = np.full(starts[-1], -np.inf)
    np.fmax.at(highest, starts[question] + at + moved, _numbers(values))
    return Ragged(highest, starts)


def _numbers(values: Ragged) -> np.ndarray:
    """Return float64 values without NaN and +inf, which can be added and compared."""
    return np.nan_to_num(values.flat.astype(np.float64), nan=-np.inf, posinf=_HIGHEST, neginf=-np.inf)


def _same_shape(encoded: EncodedQuestions, *given: Ragged) -> None:
    for one in given:
        assert np.array_equal(one.starts, encoded.ids.starts), "one value for each token of each window"
