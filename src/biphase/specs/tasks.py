"""Evaluation tasks: datasets as records. A new dataset of a known family needs no code.

    family                        form       a row
    SC  sequence classification   Classify   a text and its label
    TC  token classification      Tag        words and their tags
    QA  question answering        Answer     a question, a context, and the answers in it
    IR  retrieval                 Retrieve   queries, documents, and relevance judgments
    SR  sequence regression       Regress    a text, or two, and a number
    ML  multilabel classification MultiLabel a text and its labels: none, one or several
    MC  multiple choice           Choose     a question, its choices, and the right one

A column can be given as alternatives, `"tokens|words"`: the first one that the files have is read. In a template,
`{title:. }` inserts the title followed by ". ", or nothing if a row has no title.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from biphase.errors import SpecError
from biphase.records import added, ranged, record
from biphase.specs.rows import TRUTH, Numbering, check_distinct, columns_of, filled_row
from biphase.specs.sources import HUB, HubPlace, check_name

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
    # The most rows of train, validation and test; 0: all
    rows: tuple[int, int, int] = ranged((0, 0, 0), least=0)

    def check(self) -> None:
        if not self.test:
            raise SpecError("Splits.test names no files; a task is scored on its test part")
        if not self.validation and not 0 < self.cut < 1:
            raise SpecError(
                f"Splits.cut is {self.cut:g}; where validation has no files of its own, it is a share between 0 and 1"
            )


class Form:
    """A family of tasks: what its rows are, its metrics, and how it is treated.

    Subclasses are records that name columns and templates. Apart from them, a family has a trainer
    (`finetune.families`) and a class in transformers (`export.tuned`).
    """

    name: ClassVar[str]
    pipeline: ClassVar[str]  # what the hub and transformers call such a task
    metrics: ClassVar[tuple[str, ...]]  # of a trial; `tasks.metrics` computes them
    selects: ClassVar[Mapping[str, str]]  # protocol → the metric that selects the learning rate
    # Standard deviation of one score over fine-tuning seeds in points, assumed until one is measured: of a model, and
    # of a model below 100M parameters (measured with a 30M model on one task of each family, docs/results/replica).
    # SC: Figure 1 of arXiv:2507.00994 has half widths of 0.11 to 0.18 over five seeds for means of three tasks, so 0.12
    # for such a mean and √3 times as much for one task. It does not give the others: TC is assumed equal to SC, QA and
    # IR noisier (ReCoRD; 43 queries of MS MARCO).
    assumed_sd: ClassVar[tuple[float, float]]
    # The same over pretraining seeds of a model below 100M parameters, beside the noise of fine-tuning; None: not
    # measured. Pooled over 23 recipes of a 2M model with three seeds each, docs/results/crossing.
    pretraining_sd: ClassVar[float | None] = None
    options: ClassVar[tuple[str, ...]] = ()  # of the command line, that describe own data of this family
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {}  # of metrics that are not from 0 to 1
    # Metrics that are no mean over examples, but are computed from some numbers of each: the array that is stored for
    # intervals over examples, and how many numbers it has for each example.
    arrays: ClassVar[Mapping[str, tuple[str, int]]] = {}
    zero_shot: ClassVar[bool] = False  # can be scored without fine-tuning
    windows: ClassVar[tuple[str, ...]] = ()  # protocols that read a long text in several windows
    optional: ClassVar[tuple[str, ...]] = ()  # columns that are read if the files have them

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read; the last one holds the label, tags or answers."""
        raise NotImplementedError

    @property
    def templates(self) -> dict[str, str]:
        """The templates of a model's inputs by name: the field `text`, if there is one."""
        text = getattr(self, "text", "")
        return {"text": text} if text else {}

    @property
    def files(self) -> dict[str, str]:
        """The files besides the splits, by purpose: a name or pattern each, or empty."""
        return {}

    def example(self, values: Sequence[Any], place: str) -> Any:
        """Return the example of a row with these values of `columns` and `optional`; raise ValueError if it is wrong.

        An example has the attribute `text`, the model's input, and a method `describe` that returns it in one line.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class LabelledText:
    """A text and the number of its label."""

    text: str
    label: int

    def describe(self, labels: Sequence[str], quote: Callable[[str], str]) -> str:
        return f"{quote(self.text)} → {labels[self.label]}"


@record
class Classify(Form):
    """One label per text. `text` is a template over the columns: "Premise: {premise}\\nHypothesis: {hypothesis}"."""

    text: str
    labels: tuple[str, ...]  # in the order of their numbers; files may contain names or numbers
    label: str = "label"
    numbered: bool = added(False)  # files contain numbers only, even if labels are named "1" to "5"

    name = "sequence classification"
    pipeline = "text-classification"
    metrics = ("accuracy", "macro_f1", "mcc")
    selects: ClassVar = {"paper": "accuracy", "standard": "accuracy"}
    assumed_sd = (0.2, 0.7)
    pretraining_sd = 2.0
    options = ("--text", "--label", "--labels")
    ranges: ClassVar = {"mcc": (-1.0, 1.0)}

    def check(self) -> None:
        columns_of("Classify.text", self.text)
        check_distinct("Classify.labels", self.labels)

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return (*columns_of("Classify.text", self.text), self.label)

    @cached_property
    def number(self) -> Numbering:
        return Numbering(self.labels, numbered=self.numbered)

    def example(self, values: Sequence[Any], place: str) -> LabelledText:
        *texts, label = values
        number = self.number.of(label)
        return LabelledText(filled_row(self.text, dict(zip(self.columns, texts, strict=False))), number)


@dataclass(frozen=True, slots=True)
class TaggedSentence:
    """The words of a sentence and the number of each word's tag."""

    words: tuple[str, ...]
    tags: tuple[int, ...]

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def describe(self, labels: Sequence[str], quote: Callable[[str], str]) -> str:
        tagged = zip(self.words, self.tags, strict=True)
        return quote(" ".join(f"{word}/{labels[tag]}" for word, tag in tagged))


@record
class Tag(Form):
    """One tag per word, in the IOB2 scheme (O, B-PER, I-PER, …)."""

    labels: tuple[str, ...]
    words: str = "tokens"
    tags: str = "tags|ner_tags"

    name = "token classification"
    pipeline = "token-classification"
    metrics = ("entity_f1", "sentence_f1")
    selects: ClassVar = {"paper": "sentence_f1", "standard": "entity_f1"}
    assumed_sd = (0.2, 0.45)
    pretraining_sd = 0.2
    options = ("--label", "--labels")
    arrays: ClassVar = {"entity_f1": ("entity_counts", 3)}  # correct, predicted and true entities

    def check(self) -> None:
        check_distinct("Tag.labels", self.labels)
        wrong = [label for label in self.labels if label != "O" and label[:2] not in ("B-", "I-")]
        if wrong or "O" not in self.labels:
            raise SpecError(
                f"Tag.labels must be O, B-… and I-…, not {', '.join(wrong) or 'without O'}; write them in IOB2"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        return self.words, self.tags

    @cached_property
    def number(self) -> Numbering:
        return Numbering(self.labels)

    def example(self, values: Sequence[Any], place: str) -> TaggedSentence:
        words, tags = values
        if not isinstance(words, list) or not isinstance(tags, list):
            raise ValueError(
                "does not hold a list of words and one of tags; write them as lists, in jsonl or parquet"
            )
        if len(words) != len(tags):
            raise ValueError(f"has {len(words)} words and {len(tags)} tags; give each word its tag")
        if not words:
            raise ValueError("has no words; remove the row")
        if not all(isinstance(word, str) and word for word in words):
            raise ValueError("has a word that is empty or no text; correct or remove the row")
        return TaggedSentence(tuple(words), tuple(self.number.of(tag) for tag in tags))


@dataclass(frozen=True, slots=True)
class AnswerSpan:
    """A span of a context: `context[start : start + len(text)] == text`."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class Question:
    """The text before the context, the context, and the answers (empty: unanswerable)."""

    name: str  # the id of the row, or its place
    before: str
    context: str
    answers: tuple[AnswerSpan, ...]

    @property
    def text(self) -> str:
        return self.before + self.context

    def describe(self, labels: Sequence[str], quote: Callable[[str], str]) -> str:
        return f"{quote(self.text)} → {quote(self.answers[0].text) if self.answers else 'no answer'}"


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

    name = "question answering"
    pipeline = "question-answering"
    metrics = ("f1", "exact_match", "token_f1")
    selects: ClassVar = {"paper": "token_f1", "standard": "f1"}
    assumed_sd = (0.85, 3.0)
    pretraining_sd = 10.4
    options = ("--label",)
    windows = ("standard",)
    optional = ("id|_id|qid|query_id",)

    def check(self) -> None:
        if columns_of("Answer.text", self.text) != ("question",) or "{question}" not in self.text:
            raise SpecError(f"Answer.text must name {{question}} and nothing else, not {self.text!r}")

    @property
    def columns(self) -> tuple[str, ...]:
        return self.question, self.context, self.answers

    @property
    def templates(self) -> dict[str, str]:
        return {"text": f"{self.text}{{{self.context}}}"}

    def example(self, values: Sequence[Any], place: str) -> Question:
        question, context, answers, name = values
        if not isinstance(question, str) or not isinstance(context, str) or not context.strip():
            raise ValueError("has no question or no context; correct or remove the row")
        spans = _spans(answers, context)
        if not spans and not self.unanswerable:
            raise ValueError(
                "has no answer; remove the row, or type Answer(unanswerable=True) if that is right"
            )
        before = self.text.format(question=question)
        return Question(place if name is None else str(name), before, context, spans)


def _spans(answers: Any, context: str) -> tuple[AnswerSpan, ...]:
    """Return the answers of one row, in any supported format."""
    if isinstance(answers, dict) and {"text", "answer_start"} <= set(answers):
        texts, starts = _listed(answers["text"]), _listed(answers["answer_start"])
    else:
        each = [answer for answer in _listed(answers) if answer not in ("", None)]
        texts = [answer.get("text") if isinstance(answer, dict) else answer for answer in each]
        starts = [answer.get("answer_start") if isinstance(answer, dict) else None for answer in each]
    if len(texts) != len(starts):
        raise ValueError(f"has {len(texts)} answers and {len(starts)} starts; give each its own")
    return tuple(_span(text, start, context) for text, start in zip(texts, starts, strict=True))


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _span(text: Any, start: Any, context: str) -> AnswerSpan:
    if not isinstance(text, str) or not text:
        raise ValueError("has an answer without text; correct the row")
    shown = repr(text if len(text) <= 40 else f"{text[:39]}…")
    if start is None:
        start = context.find(text)
        if start < 0:
            raise ValueError(f"has the answer {shown}, which is not in its context; correct the row")
    if not isinstance(start, int) or isinstance(start, bool) or start < 0:
        raise ValueError(f"has an answer that starts at {start!r}; give the number of its first character")
    there = context[start : start + len(text)]
    if there != text:
        raise ValueError(
            f"has the answer {shown} at {start}, where the context says {there[:40]!r}; correct answer_start"
        )
    return AnswerSpan(text, start)


@record
class Retrieve(Form):
    """Queries and documents in BEIR's layout, and pairs of both to train on; `tasks.load` reads its files together.

    Without `pairs` files, the training pairs are the judgments of the train split. Templates name columns of the files.
    """

    query: str = "Query: {text}"
    document: str = "Document: {text}"
    queries: str = "queries*"
    corpus: str = "corpus*"
    pairs: str = ""
    # Columns of the pairs; templates get them as {text}.
    pair: tuple[str, str] = ("query", "positive|document")
    # The lowest grade that counts as relevant for metrics with binary relevance
    relevant: int = ranged(1, least=1)

    name = "retrieval"
    pipeline = "sentence-similarity"
    metrics = ("ndcg@10", "mrr@10", "recall@100", "paper_ndcg@10")
    selects: ClassVar = {"paper": "paper_ndcg@10", "standard": "ndcg@10"}
    assumed_sd = (0.5, 1.4)
    pretraining_sd = 0.5
    options = ("--query",)
    zero_shot = True

    def check(self) -> None:
        columns_of("Retrieve.query", self.query)
        columns_of("Retrieve.document", self.document)

    @property
    def columns(self) -> tuple[str, ...]:
        return columns_of("Retrieve.document", self.document)

    @property
    def templates(self) -> dict[str, str]:
        return {"query": self.query, "document": self.document}

    @property
    def files(self) -> dict[str, str]:
        return {"queries": self.queries, "corpus": self.corpus, "pairs": self.pairs}


@dataclass(frozen=True, slots=True)
class NumberedText:
    """A text and its number."""

    text: str
    number: float
    columns: tuple[str, ...] = ()  # the texts that the template was filled with

    def describe(self, labels: Sequence[str], quote: Callable[[str], str]) -> str:
        return f"{quote(self.text)} → {self.number:g}"


@record
class Regress(Form):
    """One number per text. `text` is a template over the columns; for pairs it names two of them.

    The loss is the mean squared error of the numbers as they are, so they should be of the order of 1, as the 0 to 5
    of STS-B.
    """

    text: str
    number: str = "label|score|similarity_score"

    name = "sequence regression"
    pipeline = "text-classification"
    metrics = ("pearson_spearman", "pearson", "spearman")
    selects: ClassVar = {"paper": "pearson_spearman", "standard": "pearson_spearman"}
    assumed_sd = (0.3, 1.0)  # not measured
    options = ("--text", "--label")
    ranges: ClassVar = dict.fromkeys(metrics, (-1.0, 1.0))
    arrays: ClassVar = dict.fromkeys(metrics, ("number_pairs", 2))  # predicted and true number

    def check(self) -> None:
        columns_of("Regress.text", self.text)

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return (*columns_of("Regress.text", self.text), self.number)

    def example(self, values: Sequence[Any], place: str) -> NumberedText:
        *texts, value = values
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not abs(number) < LARGEST_NUMBER:  # NaN too
            raise ValueError(
                f"has {value!r} in {self.number!r}, where a number is needed; correct or remove the row"
            )
        text = filled_row(self.text, dict(zip(self.columns, texts, strict=False)))
        return NumberedText(text, number, tuple("" if one is None else str(one) for one in texts))


@dataclass(frozen=True, slots=True)
class MultiLabelledText:
    """A text and the numbers of its labels, ascending."""

    text: str
    labels: tuple[int, ...]

    def describe(self, labels: Sequence[str], quote: Callable[[str], str]) -> str:
        return f"{quote(self.text)} → {', '.join(labels[number] for number in self.labels) or 'no label'}"


@record
class MultiLabel(Form):
    """Any number of labels per text, each right or wrong by itself.

    The column `label` holds a list of labels, or is empty: then every label has a column of its name that holds 0 or 1.
    """

    text: str
    labels: tuple[str, ...]  # in the order of their numbers; a list may contain names or numbers
    label: str = "labels"

    name = "multilabel classification"
    pipeline = "text-classification"
    metrics = ("micro_f1", "macro_f1")
    selects: ClassVar = {"paper": "micro_f1", "standard": "micro_f1"}
    assumed_sd = (0.3, 1.0)  # not measured
    options = ("--text", "--label", "--labels")
    arrays: ClassVar = {"micro_f1": ("label_counts", 3)}  # correct, predicted and true labels

    def check(self) -> None:
        columns_of("MultiLabel.text", self.text)
        check_distinct("MultiLabel.labels", self.labels)

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return (*columns_of("MultiLabel.text", self.text), *((self.label,) if self.label else self.labels))

    @cached_property
    def number(self) -> Numbering:
        return Numbering(self.labels)

    def example(self, values: Sequence[Any], place: str) -> MultiLabelledText:
        texts = values[: -1 if self.label else -len(self.labels)]
        text = filled_row(self.text, dict(zip(self.columns, texts, strict=False)))
        if self.label:
            if not isinstance(values[-1], list):
                raise ValueError(
                    f"has no list of labels in {self.label!r}; write one, empty if no label is right, in jsonl or parquet"
                )
            return MultiLabelledText(text, tuple(sorted({self.number.of(label) for label in values[-1]})))
        marks = [TRUTH.get(str(mark).lower(), mark) for mark in values[len(texts) :]]
        for name, mark in zip(self.labels, marks, strict=True):
            if str(mark) not in ("0", "1", "0.0", "1.0"):
                raise ValueError(f"has {mark!r} in {name!r}; write 1 if the label is right, else 0")
        return MultiLabelledText(text, tuple(number for number, mark in enumerate(marks) if float(mark)))


@dataclass(frozen=True, slots=True)
class ChoiceQuestion:
    """The text of each choice, the question included, and the index of the right one."""

    texts: tuple[str, ...]
    answer: int

    @property
    def text(self) -> str:
        return "\n".join(self.texts)

    def describe(self, labels: Sequence[str], quote: Callable[[str], str]) -> str:
        return f"{quote(self.texts[self.answer])}, the right one of {len(self.texts)}"


@record
class Choose(Form):
    """One of several choices per question. `text` is the template of a choice: "{question} {choice}".

    `choices` is a column with a list of texts, or {"label": […], "text": […]} as in CommonsenseQA, or the names of one
    column for each choice. `answer` holds the label of the right choice, or else its text, its number from 0, or its
    letter from A; what fits several choices in these ways is refused.
    """

    text: str = "{question} {choice}"
    choices: tuple[str, ...] = ("choices|options",)
    answer: str = "answer|answerKey|label"

    name = "multiple choice"
    pipeline = "multiple-choice"
    metrics = ("accuracy",)
    selects: ClassVar = {"paper": "accuracy", "standard": "accuracy"}
    assumed_sd = (0.4, 1.0)  # not measured
    options = ("--text", "--label")

    def check(self) -> None:
        if "choice" not in columns_of("Choose.text", self.text):
            raise SpecError(f"Choose.text must name {{choice}}, the text of a choice, not only {self.text!r}")
        if not self.choices or "choice" in self.choices:
            raise SpecError(
                "Choose.choices names the column of the choices, or one column for each; 'choice' is its text"
            )

    @cached_property
    def columns(self) -> tuple[str, ...]:
        asked = tuple(name for name in columns_of("Choose.text", self.text) if name != "choice")
        return (*asked, *self.choices, self.answer)

    def example(self, values: Sequence[Any], place: str) -> ChoiceQuestion:
        *known, answer = values
        asked = len(known) - len(self.choices)
        names, texts = _choices(known[asked:])
        if not 1 < len(texts) <= MOST_CHOICES:
            raise ValueError(f"has {len(texts)} choices; give it 2 to {MOST_CHOICES}, or remove the row")
        if not all(isinstance(text, (str, int, float)) and str(text).strip() for text in texts):
            raise ValueError("has a choice without text; correct or remove the row")
        shown = dict(zip(self.columns, known[:asked], strict=False))
        filled_choices = [filled_row(self.text, shown | {"choice": text}) for text in texts]
        return ChoiceQuestion(tuple(filled_choices), _answer_among(answer, names, texts))


def _choices(values: Sequence[Any]) -> tuple[list[str], list[Any]]:
    """Return the labels of the choices of one row, if it has some, and their texts."""
    found = values[0] if len(values) == 1 else list(values)
    if isinstance(found, dict) and isinstance(found.get("text"), list):
        names = [str(name) for name in _listed(found.get("label"))]
        return (names if len(names) == len(found["text"]) else []), found["text"]
    if not isinstance(found, list) or any(isinstance(one, (list, dict)) for one in found):
        raise ValueError(
            'has no list of choices as texts; write one, or {"label": […], "text": […]}, or a column for each choice'
        )
    return [], found


def _answer_among(answer: Any, names: Sequence[str], texts: Sequence[Any]) -> int:
    """Return the index of the right choice."""
    said = str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer)
    places, letters = zip(*((str(place), chr(ord("A") + place)) for place in range(len(texts))), strict=True)
    written = [str(text) for text in texts] if isinstance(answer, str) else []  # a number is a place
    ways = (names,) if said in names else (written, places, letters)
    found = {place for way in ways for place, one in enumerate(way) if one == said}
    if len(found) == 1:
        return found.pop()
    if found:
        raise ValueError(
            f"has the answer {answer!r}, which fits {len(found)} choices by label, text, number or letter; write the "
            "number from 0 without quotes (jsonl, parquet), or a letter that is no choice"
        )
    if said in ("-1", "", "None"):
        raise ValueError(
            "has no answer: these rows are unlabelled; score on a part that has answers, e.g. --test FILE, or "
            "Splits(test='validation*')"
        )
    raise ValueError(
        f"has the answer {answer!r}, which is none of its {len(texts)} choices; write its label, number from 0, or text"
    )


MOST_CHOICES = 26  # each has a letter
LARGEST_NUMBER = 1e6  # its square and the sums of many are finite in fp32

FAMILIES: dict[Family, type[Form]] = {
    "SC": Classify,
    "TC": Tag,
    "QA": Answer,
    "IR": Retrieve,
    "SR": Regress,
    "ML": MultiLabel,
    "MC": Choose,
}
FAMILY_OF: dict[type[Form], Family] = {form: short for short, form in FAMILIES.items()}
RANGES = {metric: ends for form in FAMILIES.values() for metric, ends in form.ranges.items()}
ARRAYS = {metric: array for form in FAMILIES.values() for metric, array in form.arrays.items()}


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
    form: Classify | Tag | Answer | Retrieve | Regress | MultiLabel | Choose
    source: str
    splits: Splits = Splits()
    steps: int = ranged(1_000, least=0)
    epochs: int = ranged(0, least=0)  # if not 0, train this many epochs instead of `steps`
    batch: int = ranged(32, least=1)
    trained_on: str = ""

    def check(self) -> None:
        where = f"Task {self.name!r}"
        check_name("Task", self.name)
        if not self.source:
            raise SpecError(f"{where} needs a source: a folder, a file, or hf://owner/name@revision/folder")
        for source in self.places:
            if source.startswith(HUB):
                HubPlace.of(where, source)
        if not self.steps and not FAMILIES[self.family].zero_shot:
            raise SpecError(f"{where}: steps must be at least 1; only retrieval may have 0 steps")
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
        if not self.source.startswith(HUB):
            raise SpecError(f"Task {self.name!r} is not on the hub, its source is {self.source!r}")
        place = replace(HubPlace.of(f"Task {self.name!r}", self.source), revision=revision)
        return replace(self, source=place.address.rstrip("/"))

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
