"""What a task asks, read and checked: the rows of its files as examples.

Texts are already filled into the task's template. Nothing here knows of tokens or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Text:
    """SC: a text and the number of its label."""

    text: str
    label: int


@dataclass(frozen=True, slots=True)
class Words:
    """TC: the words of a sentence and the number of the tag of each."""

    words: tuple[str, ...]
    tags: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a context: `context[start : start + len(text)] == text`."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class Question:
    """QA: what stands before the context, the context, and the answers (none: it has no answer there)."""

    name: str  # the id of the row, or its place
    before: str
    context: str
    answers: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """IR: a query and a document that belong together."""

    query: str
    document: str


@dataclass(frozen=True)
class Library:
    """IR: all documents that are searched."""

    names: tuple[str, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Search:
    """IR: queries, and for each the grades of the judged documents, by their place in the library."""

    library: Library  # one object, shared by validation and test
    names: tuple[str, ...]
    queries: tuple[str, ...]
    judged: tuple[dict[int, int], ...]

    def __len__(self) -> int:
        return len(self.queries)


Part = Sequence[Text] | Sequence[Words] | Sequence[Question] | Search


@dataclass(frozen=True)
class Examples:
    """A dataset, cut into its parts. `train` is empty where the task borrows another's model."""

    train: Sequence[Text] | Sequence[Words] | Sequence[Question] | Sequence[Pair]
    validation: Part
    test: Part
    # By part, for each example the number of its row in the files it was read from, from 0 on; retrieval has ids.
    rows: dict[str, Sequence[int]] = field(default_factory=dict)
