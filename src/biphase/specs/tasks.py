"""What an encoder is evaluated on: a dataset as a record. A new dataset of a known family needs no code.

    family                        form       a row
    SC  sequence classification   Classify   a text and its label
    TC  token classification      Tag        words and their tags
    QA  question answering        Answer     a question, a context, and the answers in it
    IR  retrieval                 Retrieve   queries, documents, and which of them belong together

A column may be given as alternatives, `"tokens|words"`: the first that the files have is read. In a template,
`{title:. }` is the title and ". " after it, or nothing where a row has no title.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, cast

from biphase.errors import SpecError
from biphase.records import added, record
from biphase.specs.checks import one_name, pinned

Family = Literal["SC", "TC", "QA", "IR"]


@record
class Splits:
    """The files of each part: a name or pattern below the task's source, or a place on the hub of its own.

    For retrieval these are the judgments (qrels). Where `validation` names no files, it is cut off from `cut_from`:
    the share `cut` of it that comes first in a permutation by `seed` (as `datasets.train_test_split` does it).
    """

    train: str = "train*"
    validation: str = ""
    test: str = "test*"
    cut: float = 0.05
    cut_from: Literal["train", "test"] = "train"
    seed: int = 42
    rows: tuple[int, int, int] = (0, 0, 0)  # at most so many of train, validation and test; 0: all

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
    """One label for a text. `text` is a template over the columns: "Premise: {premise}\\nHypothesis: {hypothesis}"."""

    text: str
    labels: tuple[str, ...]  # in the order of their numbers; a file may hold either
    label: str = "label"
    numbered: bool = added(False)  # the files hold numbers alone, also where labels are called "1" to "5"

    def check(self) -> None:
        columns_of("Classify.text", self.text)
        _distinct("Classify.labels", self.labels)


@record
class Tag:
    """One tag for each word, in the IOB2 scheme (O, B-PER, I-PER, …)."""

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
    """A piece of `context` that answers `question`. `text` is what stands before the context.

    `answers` holds {"text": […], "answer_start": […]} as SQuAD does, or one text, whose first occurrence is meant.
    """

    question: str = "question"
    context: str = "context"
    answers: str = "answers"
    text: str = "Question: {question}\nContext: "
    unanswerable: bool = False  # no answer is a right answer to some questions

    def check(self) -> None:
        if columns_of("Answer.text", self.text) != ("question",) or "{question}" not in self.text:
            raise SpecError(f"Answer.text must name {{question}} and nothing else, not {self.text!r}")


@record
class Retrieve:
    """Queries and documents as BEIR lays them out, and pairs of both to train on.

    Without files of `pairs`, the pairs are the judgments of the train part. Templates name columns of the files.
    """

    query: str = "Query: {text}"
    document: str = "Document: {text}"
    queries: str = "queries*"
    corpus: str = "corpus*"
    pairs: str = ""
    pair: tuple[str, str] = ("query", "positive|document")  # their columns; the templates read them as {text}
    relevant: int = 1  # the lowest grade that counts as relevant where a metric asks yes or no

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
    """sequence classification (SC): a family at its first use."""
    name = FAMILIES[cast("Family", family)]
    return f"{name} ({family})"


@record
class Task:
    """A dataset to fine-tune on and to be scored by.

    `source` is a folder, one file, or `hf://owner/name@revision/folder`. (Without `@revision` a task can be planned
    and read from a local copy, but not from the hub: the content would not be pinned.) With `trained_on`, nothing is trained on
    this dataset: it is scored with the model that was fine-tuned on the task of that name. Retrieval with 0 steps is
    zero-shot: the model is scored as it is.
    """

    name: str
    form: Classify | Tag | Answer | Retrieve
    source: str
    splits: Splits = Splits()
    steps: int = 1_000
    epochs: int = 0  # if not 0, that often over the train part instead of `steps`
    batch: int = 32
    trained_on: str = ""

    def check(self) -> None:
        where = f"Task {self.name!r}"
        one_name("Task", self.name)
        if not self.source:
            raise SpecError(f"{where} needs a source: a folder, a file, or hf://owner/name@revision/folder")
        for place in self.places:
            if place.startswith("hf://") and "@" in place:
                after = place.split("@", 1)[1]
                pinned(where, after if after.startswith("refs/") else after.split("/")[0])
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
        """Is the model scored as it is, without any fine-tuning?"""
        return not (self.trained_on or self.steps or self.epochs)

    @property
    def is_trained(self) -> bool:
        """Is a model fine-tuned on this dataset?"""
        return not (self.trained_on or self.zero_shot)

    @property
    def trains(self) -> bool:
        """Does it have anything to train on?"""
        return bool(self.splits.train or (isinstance(self.form, Retrieve) and self.form.pairs))

    @property
    def places(self) -> tuple[str, ...]:
        """Every place its files are named by."""
        splits = (self.splits.train, self.splits.validation, self.splits.test)
        more = (
            (self.form.queries, self.form.corpus, self.form.pairs) if isinstance(self.form, Retrieve) else ()
        )
        return tuple(dict.fromkeys(one for one in (self.source, *splits, *more) if one))

    def pin(self, revision: str) -> Task:
        """The same task with its source on the hub at this commit."""
        if not self.source.startswith("hf://"):
            raise SpecError(f"Task {self.name!r} is not on the hub, its source is {self.source!r}")
        owner, name, *folder = self.source.removeprefix("hf://").split("/")
        place = "/".join([owner, f"{name.split('@')[0]}@{revision}", *folder])
        return replace(self, source=f"hf://{place}")

    def at(self, folder: str) -> Task:
        """The same task with its files in a local folder: the parts by name, or BEIR's layout for retrieval."""
        splits = {name: _last(getattr(self.splits, name)) for name in ("train", "validation", "test")}
        form = self.form
        if isinstance(form, Retrieve):
            splits = {name: f"qrels/{one}" if one else "" for name, one in splits.items()}
            form = replace(form, queries="queries*", corpus="corpus*", pairs=form.pairs and "pairs*")
        local = folder if folder.startswith((".", "/", "~")) else f"./{folder}"
        return replace(self, source=local, splits=replace(self.splits, **splits), form=form)


def columns_of(where: str, template: str) -> tuple[str, ...]:
    """The columns a template names."""
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
    """A template with its columns filled in; `{title:. }` is the title and ". ", or nothing where it is empty."""
    made = []
    for literal, name, after, _ in string.Formatter().parse(template):
        value = "" if name is None or values[name] is None else str(values[name])
        made += [literal, value, after or "" if value and not value.isspace() else ""]
    return "".join(made)


def optional_columns(template: str) -> set[str]:
    """The columns of a template that a row may leave empty: those that bring what stands after them."""
    return {name for _, name, after, _ in string.Formatter().parse(template) if name and after}


def _distinct(where: str, labels: tuple[str, ...]) -> None:
    if len(labels) < 2 or len(set(labels)) != len(labels):
        raise SpecError(f"{where} must be at least two, all different, not {labels}")


def _last(place: str) -> str:
    """The name or pattern at the end of a place."""
    return place.rsplit("/", 1)[-1]
