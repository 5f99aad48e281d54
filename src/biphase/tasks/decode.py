"""What a model says of each token → its answer to each question: a text, and a set of positions.

A text is for the metrics of SQuAD, a set of positions for the paper's, which compares it with
`EncodedQuestions.gold`; both kinds of head give both.

A token that several windows hold counts with the highest of its values there: for taggers position by position, for
spans by the best span of any window. What is not a number is never chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from biphase.errors import SpecError
from biphase.tasks.encode import NULL, EncodedQuestions, Ragged

_HIGHEST = float(np.finfo(np.float32).max)  # for infinity: two of them still have a sum


@dataclass(frozen=True, slots=True)
class Decoded:
    """An answer: its text, "" for none, its positions in the whole input of its question, its place in the context."""

    text: str
    tokens: frozenset[int]
    span: tuple[int, int] = (-1, -1)  # the characters of the context that are the text; -1: none


NOTHING = Decoded("", frozenset())


def decode_tagged(encoded: EncodedQuestions, margins: Ragged) -> list[Decoded]:
    """The answers of a tagger, by the margin logit(in) - logit(out) of each token of each window.

    The positions are those of every token with a margin above 0, as the paper counts: also of the question and of
    the ids around it, which can never be right. (The paper counted padding too; here there is none.) The text is the
    best run of such tokens in the context: the one with the highest sum, of equal ones the first.
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
    """The answers by two logits of each token of each window: it is the first one, it is the last one.

    An answer is the span of at most `longest` context tokens with the highest sum of its two logits; of equal ones the
    first window's, the first there, the shortest. Where a question may have no answer, the smallest sum at the null
    position of any of its windows is the score of saying so, and wins if it is higher.
    """
    if longest < 1:
        raise SpecError(f"an answer of at most {longest} tokens is none; set longest to 1 or more")
    _same_shape(encoded, starts, ends)
    best = np.full(len(encoded), -np.inf)
    null = np.full(len(encoded), np.inf)
    found: dict[int, tuple[int, int, int]] = {}  # by question: its head, its first and its last context token
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
    """The best sum and its place; no place has a sum above -infinity where there are no tokens."""
    if not len(start):
        return -np.inf, 0, 0
    reach = min(longest, len(end))
    padded = np.concatenate((end, np.full(reach - 1, -np.inf)))
    sums = start + np.lib.stride_tricks.sliding_window_view(padded, reach).max(axis=1)
    left = int(sums.argmax())
    return float(sums[left]), left, left + int(end[left : left + reach].argmax())


def _best_run(margins: np.ndarray) -> tuple[int, int] | None:
    """The first and last token of the run of positive margins with the highest sum."""
    edges = np.flatnonzero(np.diff(margins > 0, prepend=False, append=False))
    if not len(edges):
        return None
    firsts, stops = edges[::2], edges[1::2]
    best = np.add.reduceat(np.fmax(margins, 0), firsts).argmax()
    return int(firsts[best]), int(stops[best]) - 1


def _over_windows(encoded: EncodedQuestions, values: Ragged, heads: np.ndarray) -> Ragged:
    """The highest value at each position of each question's whole input."""
    _same_shape(encoded, values)
    context = encoded.spans.lengths
    starts = np.concatenate(([0], np.cumsum(heads + context + encoded.after)))
    window = np.repeat(np.arange(len(encoded.ids)), encoded.ids.lengths)
    at = np.arange(len(window)) - encoded.ids.starts[window]
    question = encoded.question_of[window]
    # Tokens of the context move on by the window's first one; what comes after stands behind the whole context.
    behind = heads[question] + context[question] - encoded.context_to[window]
    moved = np.where(at < encoded.context_to[window], encoded.first[window], behind)
    moved[at < heads[question]] = 0
    highest = np.full(starts[-1], -np.inf)
    np.fmax.at(highest, starts[question] + at + moved, _numbers(values))
    return Ragged(highest, starts)


def _numbers(values: Ragged) -> np.ndarray:
    """As float64 that can be added and compared."""
    return np.nan_to_num(values.flat.astype(np.float64), nan=-np.inf, posinf=_HIGHEST, neginf=-np.inf)


def _same_shape(encoded: EncodedQuestions, *given: Ragged) -> None:
    for one in given:
        assert np.array_equal(one.starts, encoded.ids.starts), "one value for each token of each window"
