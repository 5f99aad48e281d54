"""Evaluation tasks: datasets as records. A new dataset of a known family needs no code.

    family                        form       a row
    SC  sequence classification   Classify   a text and its label
    TC  token classification      Tag        words and their tags
    QA  question answering        Answer     a question, a context, and the answers in it
    IR  retrieval                 Retrieve   queries, documents, and relevance judgments

A column can be given as alternatives, `"tokens|words"`: the first one that the files have is read. In a template,
`{title:. }` inserts the title followed by ". ", or nothing if a row has no title.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, cast

from biphase.errors import SpecError
from biphase.records import added, record
from biphase.specs.sources import check_name, check_pinned

Family = Literal["SC", "TC", "QA", "IR"]


@record
class Splits:
    """The files of each split: a name or pattern below the task's source, or a separate hub address.

    For retrieval these are the judgments (qrels). If `validation` names no files, it is split off from `cut_from`: the
    first share `cut` of a permutation by `seed`, as `datasets.train_test_split` does.
    """

    train: str = "train*"
    validation: str = ""
    test: str = "test*"
    cut: float = 0.05
    cut_from: Literal["train", "test"] = "train"
    seed: int = 42
    rows: tuple[int, int, int] = (0, 0, 0)  # maximum for train, validation and test; 0: all

    def check(self) -> None:
        if not self.test:
            raise SpecError("Splits.test names no files; a task is scored on its test part")
        if not self.validation and not 0 < self.cut < 1:
            raise SpecError(
                f"Splits.cut is {self.cut:g}; where validation has no files of its own, it is a share between 0 and 1"
            )
        if min(self.rows) < 0:
            raise SpecError(f"Splits.rows must not be negative, they are {self.rows}")


@record
class Classify:
    """One label per text. `text` is a template over the columns: "Premise: {premise}\\nHypothesis: {hypothesis}"."""

    text: str
    labels: tuple[str, ...]  # in the order of their numbers; files may contain names or numbers
    label: str = "label"
    numbered: bool = added(False)  # files contain numbers only, even if labels are named "1" to "5"

    def check(self) -> None:
        columns_of("Classify.text", self.text)
        _distinct("Classify.labels", self.labels)


@record
class Tag:
    """One tag per word, in the IOB2 scheme (O, B-PER, I-PER, …)."""

    labels: tuple[str, ...]
    words: str = "tokens"
    tags: str = "tags|ner_tags"

    def check(self) -> None:
        _distinct("Tag.labels", self.labels)
        wrong = [one for one in self.labels if one != "O" and one[:2] not in ("B-", "I-")]
        if wrong or "O" not in self.labels:
            raise SpecError(
                f"Tag.labels must be O, B-… and I-…, not {', '.join(wrong) or 'without O'}; write them in IOB2"
            )


@record
class Answer:
    """A span of `context` that answers `question`. `text` is the template of what precedes the context.

    The column `answers` holds {"text": […], "answer_start": […]} as in SQuAD, or one text, whose first occurrence in
    the context is the answer.
    """

    question: str = "question"
    context: str = "context"
    answers: str = "answers"
    text: str = "Question: {question}\nContext: "
    unanswerable: bool = False  # some questions have no answer

    def check(self) -> None:
        if columns_of("Answer.text", self.text) != ("question",) or "{question}" not in self.text:
            raise SpecError(f"Answer.text must name {{question}} and nothing else, not {self.text!r}")


@record
class Retrieve:
    """Queries and documents in BEIR's layout, and pairs of both to train on.

    Without `pairs` files, the training pairs are the judgments of the train split. Templates name columns of the files.
    """

    query: str = "Query: {text}"
    document: str = "Document: {text}"
    queries: str = "queries*"
    corpus: str = "corpus*"
    pairs: str = ""
    pair: tuple[str, str] = (
        "query",
        "positive|document",
    )  # columns of the pairs; templates get them as {text}
    relevant: int = 1  # the lowest grade that counts as relevant for metrics with binary relevance

    def check(self) -> None:
        columns_of("Retrieve.query", self.query)
        columns_of("Retrieve.document", self.document)
        if self.relevant < 1:
            raise SpecError(f"Retrieve.relevant must be at least 1, it is {self.relevant}")


FAMILIES: dict[Family, str] = {
    "SC": "sequence classification",
    "TC": "token classification",
    "QA": "question answering",
    "IR": "retrieval",
}
FAMILY_OF: dict[type, Family] = {Classify: "SC", Tag: "TC", Answer: "QA", Retrieve: "IR"}


def family_name(family: str) -> str:
    """Return a family's full name with its abbreviation: sequence classification (SC)."""
    name = FAMILIES[cast("Family", family)]
    return f"{name} ({family})"


@record
class Task:
    """A dataset to fine-tune and score encoders on.

    `source` is a folder, one file, or `hf://owner/name@revision/folder`. (Without `@revision` a task can be planned
    and read from a local copy, but not from the hub: the content would not be pinned.) With `trained_on`, no model is
    trained on this dataset: it scores the model that was fine-tuned on the task of that name. Retrieval with 0 steps
    is zero-shot: the model is scored without fine-tuning.
    """

    name: str
    form: Classify | Tag | Answer | Retrieve
    source: str
    splits: Splits = Splits()
    steps: int = 1_000
    epochs: int = 0  # if not 0, train this many epochs instead of `steps`
    batch: int = 32
    trained_on: str = ""

    def check(self) -> None:
        where = f"Task {self.name!r}"
        check_name("Task", self.name)
        if not self.source:
            raise SpecError(f"{where} needs a source: a folder, a file, or hf://owner/name@revision/folder")
        for place in self.places:
            if place.startswith("hf://") and "@" in place:
                after = place.split("@", 1)[1]
                check_pinned(where, after if after.startswith("refs/") else after.split("/")[0])
        fewest = 0 if isinstance(self.form, Retrieve) else 1
        if self.steps < fewest or self.batch < 1 or self.epochs < 0:
            raise SpecError(
                f"{where}: steps and batch must be at least 1, epochs not negative; only retrieval may have 0 steps"
            )
        if self.is_trained and not self.trains:
            raise SpecError(
                f"{where} has no train part; name its files, or the task whose model it is scored with: trained_on='…'"
            )

    @property
    def family(self) -> Family:
        return FAMILY_OF[type(self.form)]

    @property
    def zero_shot(self) -> bool:
        """Whether the model is scored without any fine-tuning."""
        return not (self.trained_on or self.steps or self.epochs)

    @property
    def is_trained(self) -> bool:
        """Whether a model is fine-tuned on this dataset."""
        return not (self.trained_on or self.zero_shot)

    @property
    def trains(self) -> bool:
        """Whether the task has training data."""
        return bool(self.splits.train or (isinstance(self.form, Retrieve) and self.form.pairs))

    @property
    def places(self) -> tuple[str, ...]:
        """All paths, patterns and hub addresses that name the task's files."""
        splits = (self.splits.train, self.splits.validation, self.splits.test)
        more = (
            (self.form.queries, self.form.corpus, self.form.pairs) if isinstance(self.form, Retrieve) else ()
        )
        return tuple(dict.fromkeys(one for one in (self.source, *splits, *more) if one))

    def pin(self, revision: str) -> Task:
        """Return the task with its hub source pinned to a commit."""
        if not self.source.startswith("hf://"):
            raise SpecError(f"Task {self.name!r} is not on the hub, its source is {self.source!r}")
        owner, name, *folder = self.source.removeprefix("hf://").split("/")
        place = "/".join([owner, f"{name.split('@')[0]}@{revision}", *folder])
        return replace(self, source=f"hf://{place}")

    def at(self, folder: str) -> Task:
        """Return the task with its files in a local folder: the splits by file name, or BEIR's layout for retrieval."""
        splits = {name: _last(getattr(self.splits, name)) for name in ("train", "validation", "test")}
        form = self.form
        if isinstance(form, Retrieve):
            splits = {name: f"qrels/{one}" if one else "" for name, one in splits.items()}
            form = replace(form, queries="queries*", corpus="corpus*", pairs=form.pairs and "pairs*")
        local = folder if folder.startswith((".", "/", "~")) else f"./{folder}"
        return replace(self, source=local, splits=replace(self.splits, **splits), form=form)


def columns_of(where: str, template: str) -> tuple[str, ...]:
    """Return the columns that a template names; raise SpecError if it is not a valid template."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as wrong:
        raise SpecError(f"{where}: {template!r} is no template ({wrong}); write {{column}}") from None
    names = tuple(dict.fromkeys(name for _, name, _, _ in parts if name is not None))
    plain = all(
        not re.search(r"[\w{}]", spec or "") and not conversion
        for _, name, spec, conversion in parts
        if name is not None
    )
    if not names or not plain or not all(name.isidentifier() for name in names):
        raise SpecError(f"{where}: {template!r} must name columns and nothing else, e.g. '{{sentence}}'")
    return names


def filled(template: str, values: Mapping[str, Any]) -> str:
    """Fill in a template's columns; `{title:. }` inserts the title and ". ", or nothing if it is empty."""
    made = []
    for literal, name, after, _ in string.Formatter().parse(template):
        value = "" if name is None or values[name] is None else str(values[name])
        made += [literal, value, after or "" if value and not value.isspace() else ""]
    return "".join(made)


def optional_columns(template: str) -> set[str]:
    """Return the columns that a row may leave empty: those written with a suffix, as `{title:. }`."""
    return {name for _, name, after, _ in string.Formatter().parse(template) if name and after}


def _distinct(where: str, labels: tuple[str, ...]) -> None:
    if len(labels) < 2 or len(set(labels)) != len(labels):
        raise SpecError(f"{where} must be at least two, all different, not {labels}")


def _last(place: str) -> str:
    """Return the last component of a path or pattern."""
    return place.rsplit("/", 1)[-1]
