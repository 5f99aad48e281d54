"""Questions and their contexts → the windows a model reads, with the answer's place in each.

A window is: before + the question's part + a piece of the context + after; question and context are tokenised
apart. Without a stride there is one window, whose context is cut to fit (protocol "paper"); with one there are as
many as cover the context, and neighbours share `stride` tokens of it (protocol "standard").

What gives way when room is scarce:
- A question's part is cut at its front, so that 16 tokens of the context (or half of all tokens, if that is less)
  and the words right before the context stay.
- Where the question leaves little room, neighbours share less than `stride`: of each window at least a quarter is
  new. Else a stride near the room would make a window of every few tokens.

A position of a question counts tokens of its whole input: before + question + all the context that is read + after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from biphase.errors import DataError, SpecError
from biphase.tasks.encoding import Ragged, Reading, Tokens, around, refuse_empty, tokens
from biphase.tasks.examples import Question

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
    reading: Reading, questions: Sequence[Question], *, stride: int | None, unanswerable: bool = True
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


def _tokenised(reading: Reading, questions: Sequence[Question]) -> list[tuple[Question, np.ndarray, Tokens]]:
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
