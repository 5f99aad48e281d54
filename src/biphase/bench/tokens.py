"""Random tokens in place of a corpus and of datasets: what a step costs does not depend on what they say."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from biphase.bench.cases import FinetuneCase, Lengths, PretrainCase
from biphase.data.stream import Stream
from biphase.objectives import Vocabulary
from biphase.specs import Answer, Chunks, Classify, Rows, Splits, Task
from biphase.tasks.encoding import Reading
from biphase.tasks.examples import Examples, Question, Span, Text

BEGIN, END, PAD, MASK = range(4)
FIRST_WORD = 4
DOCUMENT = 700  # tokens of a document, on average
BATCHES = 64  # that differ; then they come again in another order
QUESTION = 12  # tokens of what is asked, before the text that answers


class RandomTokens:
    """Rows drawn once, with ends of documents here and there; read as the shards of a corpus are."""

    def __init__(self, rows: int, length: int, vocab: int) -> None:
        chance = np.random.default_rng(0)
        self.data = chance.integers(FIRST_WORD, vocab, (rows, length), dtype=np.uint32)
        self.data[chance.random((rows, length)) < 1 / DOCUMENT] = END

    def __len__(self) -> int:
        return self.data.size

    def rows(self, indices: np.ndarray, length: int) -> np.ndarray:
        return np.take(self.data, indices, axis=0)


def stream_of(case: PretrainCase, *, whole_rows: bool = False) -> Stream:
    """The real stream over random tokens; with `whole_rows`, without the cuts of its packing."""
    packing: Chunks | Rows
    if case.packing == "chunks" and not whole_rows:
        packing = Chunks(case.length)
    else:
        packing = Rows(case.length, document_mask=case.packing == "documents" and not whole_rows)
    tokens: Any = RandomTokens(case.rows * BATCHES, case.length, case.vocab)
    return Stream(tokens, packing, 0, END, Vocabulary.of(case.vocab, MASK, (BEGIN, END, PAD)))


# ---------------------------------------------------------------- texts


def drawn_lengths(lengths: Lengths, count: int) -> np.ndarray:
    """The same ones every time."""
    drawn = np.random.default_rng(0).gamma(lengths.shape, lengths.mean / lengths.shape, count)
    drawn *= lengths.mean / drawn.mean()
    return np.clip(np.round(drawn), 3, lengths.most).astype(np.int64)


def drawn_ids(lengths: Lengths, count: int, vocab: int) -> list[np.ndarray]:
    """Texts as ids, each ended by the end token.

    Words come as often as Zipf's law says, the n-th an n-th as often as the first: fine-tuning trains those that occur,
    and of real texts these are few.
    """
    chance, words = np.random.default_rng(1), vocab - FIRST_WORD
    return [
        np.append(FIRST_WORD - 1 + (words ** chance.random(length - 1)).astype(np.int64), END)
        for length in drawn_lengths(lengths, count)
    ]


def reading_of(vocab: int, length: int) -> Reading:
    """Texts are numbers with spaces between them, and each number is its own token."""
    words = Tokenizer(WordLevel({str(number): number for number in range(vocab)}, unk_token=str(PAD)))
    words.pre_tokenizer = WhitespaceSplit()
    return Reading(words, (), (END,), length, "numbers")


@dataclass(frozen=True)
class Dataset:
    """Texts of a case with labels: in ids for a peer, as examples for us. Both read the same tokens."""

    case: FinetuneCase

    @cached_property
    def ids(self) -> list[np.ndarray]:
        return drawn_ids(self.case.lengths, self.case.batch * BATCHES, self.case.vocab)

    @cached_property
    def labels(self) -> np.ndarray:
        """(n,) the class of each text; or (n, 2) the first and last token of the answer in it."""
        chance, kinds = np.random.default_rng(2), self.case.lengths.labels
        if kinds:
            return chance.integers(0, kinds, len(self.ids))
        ends = np.array([len(ids) - 1 for ids in self.ids])  # before the end token
        first = chance.integers(np.minimum(QUESTION, ends - 1), ends)
        return np.stack([first, np.minimum(first + 2, ends - 1)], axis=1)

    @property
    def tokens(self) -> float:
        """Of a step, on average."""
        return float(np.mean([len(ids) for ids in self.ids])) * self.case.batch

    def task(self) -> Task:
        kinds = self.case.lengths.labels
        form = Classify("{text}", tuple(f"label{number}" for number in range(kinds))) if kinds else Answer()
        steps = self.case.warm + self.case.steps
        return Task("bench", form, ".", Splits(test="train*"), steps=steps, batch=self.case.batch)

    def examples(self) -> Examples:
        made: Any = [
            self._text(ids, label) if self.case.lengths.labels else self._question(ids, label)
            for ids, label in zip(self.ids, self.labels, strict=True)
        ]
        return Examples(made, made[:1], made[:1])

    @staticmethod
    def _text(ids: np.ndarray, label: Any) -> Text:
        return Text(_spelled(ids[:-1]), int(label))

    @staticmethod
    def _question(ids: np.ndarray, bounds: np.ndarray) -> Question:
        first, last = bounds.tolist()
        begins = min(QUESTION, len(ids) - 2)
        ahead = _spelled(ids[begins:first])
        answer = Span(_spelled(ids[first : last + 1]), len(ahead) + (1 if ahead else 0))
        return Question("bench", _spelled(ids[:begins]) + " ", _spelled(ids[begins:-1]), (answer,))


def _spelled(ids: np.ndarray) -> str:
    return " ".join(map(str, ids.tolist()))
