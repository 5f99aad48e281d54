"""Evaluation tasks: datasets as records. A new dataset of a known family needs no code.

    family                        form       a row
    SC  sequence classification   Classify   a text and its label
    TC  token classification      Tag        words and their tags
    QA  question answering        Answer     a question, a context, and the answers in it
    IR  retrieval                 Retrieve   queries, documents, and relevance judgments

`FAMILIES` has one record per family with all that the rest of biphase knows of it, apart from reading its rows
(`tasks.load`), its head, loss and scores (`finetune.families`) and its class in transformers (`export.tuned`).

A column can be given as alternatives, `"tokens|words"`: the first one that the files have is read. In a template,
`{title:. }` inserts the title followed by ". ", or nothing if a row has no title.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from biphase.errors import SpecError
from biphase.records import added, record
from biphase.specs.sources import check_name, check_pinned

Family = str  # the abbreviation of a task family, a key of FAMILIES


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


class Form:
    """What the rows of a task are. Subclasses are records that name columns and templates."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read, for descriptions."""
        raise NotImplementedError

    @property
    def templates(self) -> dict[str, str]:
        """The templates of a model's inputs by name; empty if an input is not made by a template."""
        return {}

    @property
    def target(self) -> str:
        """The column with the label, tags or answers; empty if there is none."""
        return ""

    @property
    def files(self) -> dict[str, str]:
        """The files besides the splits, by purpose: a name or pattern each, or empty."""
        return {}


@record
class Classify(Form):
    """One label per text. `text` is a template over the columns: "Premise: {premise}\\nHypothesis: {hypothesis}"."""

    text: str
    labels: tuple[str, ...]  # in the order of their numbers; files may contain names or numbers
    label: str = "label"
    numbered: bool = added(False)  # files contain numbers only, even if labels are named "1" to "5"

    def check(self) -> None:
        columns_of("Classify.text", self.text)
        _distinct("Classify.labels", self.labels)

    @property
    def columns(self) -> tuple[str, ...]:
        return (*columns_of("Classify.text", self.text), self.label)

    @property
    def templates(self) -> dict[str, str]:
        return {"text": self.text}

    @property
    def target(self) -> str:
        return self.label


@record
class Tag(Form):
    """One tag per word, in the IOB2 scheme (O, B-PER, I-PER, …)."""

    labels: tuple[str, ...]
    words: str = "tokens"
    tags: str = "tags|ner_tags"

    def check(self) -> None:
        _distinct("Tag.labels", self.labels)
        wrong = [label for label in self.labels if label != "O" and label[:2] not in ("B-", "I-")]
        if wrong or "O" not in self.labels:
            raise SpecError(
                f"Tag.labels must be O, B-… and I-…, not {', '.join(wrong) or 'without O'}; write them in IOB2"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        return self.words, self.tags

    @property
    def target(self) -> str:
        return self.tags


@record
class Answer(Form):
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

    @property
    def columns(self) -> tuple[str, ...]:
        return self.question, self.context, self.answers

    @property
    def templates(self) -> dict[str, str]:
        return {"text": f"{self.text}{{{self.context}}}"}

    @property
    def target(self) -> str:
        return self.answers


@record
class Retrieve(Form):
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

    @property
    def columns(self) -> tuple[str, ...]:
        return columns_of("Retrieve.document", self.document)

    @property
    def templates(self) -> dict[str, str]:
        return {"query": self.query, "document": self.document}

    @property
    def files(self) -> dict[str, str]:
        return {"queries": self.queries, "corpus": self.corpus, "pairs": self.pairs}


@dataclass(frozen=True)
class TaskFamily:
    """A family of tasks: its form, its metrics, and how it is treated."""

    name: str
    form: type[Form]
    metrics: tuple[str, ...]  # of a trial; `tasks.metrics` computes them
    selects: dict[str, str]  # protocol → the metric that selects the learning rate
    options: tuple[str, ...]  # options of the command line that describe own data of this family
    # Standard deviation of one score over fine-tuning seeds in points, assumed until one is measured: of a model, and
    # of a model below 100M parameters (measured with a 30M model on one task of each family, docs/results/replica).
    assumed_sd: tuple[float, float]
    ranges: dict[str, tuple[float, float]] = field(
        default_factory=dict
    )  # of metrics that are not from 0 to 1
    zero_shot: bool = False  # can be scored without fine-tuning
    windows: tuple[str, ...] = ()  # protocols that read a long text in several windows


# Assumed standard deviations. SC: Figure 1 of arXiv:2507.00994 has half widths of 0.11 to 0.18 over five seeds for means of
# three tasks, so 0.12 for such a mean and √3 times as much for one task. It does not give the others: TC is
# assumed equal to SC, QA and IR noisier (ReCoRD; 43 queries of MS MARCO).
FAMILIES: dict[Family, TaskFamily] = {
    "SC": TaskFamily(
        name="sequence classification",
        form=Classify,
        metrics=("accuracy", "macro_f1", "mcc"),
        selects={"paper": "accuracy", "standard": "accuracy"},
        ranges={"mcc": (-1.0, 1.0)},
        options=("--text", "--label", "--labels"),
        assumed_sd=(0.2, 0.7),
    ),
    "TC": TaskFamily(
        name="token classification",
        form=Tag,
        metrics=("entity_f1", "sentence_f1"),
        selects={"paper": "sentence_f1", "standard": "entity_f1"},
        options=("--label", "--labels"),
        assumed_sd=(0.2, 0.45),
    ),
    "QA": TaskFamily(
        name="question answering",
        form=Answer,
        metrics=("f1", "exact_match", "token_f1"),
        selects={"paper": "token_f1", "standard": "f1"},
        options=("--label",),
        assumed_sd=(0.85, 3.0),
        windows=("standard",),
    ),
    "IR": TaskFamily(
        name="retrieval",
        form=Retrieve,
        metrics=("ndcg@10", "mrr@10", "recall@100", "paper_ndcg@10"),
        selects={"paper": "paper_ndcg@10", "standard": "ndcg@10"},
        options=("--query",),
        assumed_sd=(0.5, 1.4),
        zero_shot=True,
    ),
}
FAMILY_OF: dict[type[Form], Family] = {family.form: short for short, family in FAMILIES.items()}
RANGES = {metric: ends for family in FAMILIES.values() for metric, ends in family.ranges.items()}


def family_name(family: Family) -> str:
    """Return a family's full name with its abbreviation: sequence classification (SC)."""
    return f"{FAMILIES[family].name} ({family})"


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
        for source in self.places:
            if source.startswith("hf://") and "@" in source:
                after = source.split("@", 1)[1]
                check_pinned(where, after if after.startswith("refs/") else after.split("/")[0])
        fewest = 0 if FAMILIES[self.family].zero_shot else 1
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
        return bool(self.splits.train or self.form.files.get("pairs"))

    @property
    def places(self) -> tuple[str, ...]:
        """All paths, patterns and hub addresses that name the task's files."""
        splits = (self.splits.train, self.splits.validation, self.splits.test)
        every = (self.source, *splits, *self.form.files.values())
        return tuple(dict.fromkeys(source for source in every if source))

    def pin(self, revision: str) -> Task:
        """Return the task with its hub source pinned to a commit."""
        if not self.source.startswith("hf://"):
            raise SpecError(f"Task {self.name!r} is not on the hub, its source is {self.source!r}")
        owner, name, *folder = self.source.removeprefix("hf://").split("/")
        source = "/".join([owner, f"{name.split('@')[0]}@{revision}", *folder])
        return replace(self, source=f"hf://{source}")

    def at(self, folder: str) -> Task:
        """Return the task with its files in a local folder: the splits by file name, or BEIR's layout for retrieval."""
        splits = {
            part: getattr(self.splits, part).rsplit("/", 1)[-1] for part in ("train", "validation", "test")
        }
        form = self.form
        if isinstance(form, Retrieve):
            splits = {part: f"qrels/{name}" if name else "" for part, name in splits.items()}
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
    texts = []
    for literal, name, after, _ in string.Formatter().parse(template):
        value = "" if name is None or values[name] is None else str(values[name])
        texts += [literal, value, after or "" if value and not value.isspace() else ""]
    return "".join(texts)


def optional_columns(template: str) -> set[str]:
    """Return the columns that a row may leave empty: those written with a suffix, as `{title:. }`."""
    return {name for _, name, after, _ in string.Formatter().parse(template) if name and after}


def _distinct(where: str, labels: tuple[str, ...]) -> None:
    if len(labels) < 2 or len(set(labels)) != len(labels):
        raise SpecError(f"{where} must be at least two, all different, not {labels}")
