"""Loading a task: the rows of its files as checked examples, divided into train, validation and test.

`load` returns the `Examples` of any task; `load_retrieval` does so for retrieval, from documents, queries and judgments
(qrels). Texts are already filled into the task's template. Nothing here knows of tokens or models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy

from biphase.errors import DataError
from biphase.specs import Answer, Classify, Retrieve, Splits, Tag, Task
from biphase.specs.tasks import FAMILY_OF, Form, columns_of, filled, optional_columns
from biphase.tasks.files import COLUMNS, column_names, fields_of, files_of, kind_of, lines, read_rows
from biphase.tasks.labels import Numbering


class Example(Protocol):
    """One example of a task: what every family's class has."""

    @property
    def text(self) -> str:
        """The model input, without label or answer; of a pair, the query."""
        ...

    def describe(self, labels: Sequence[str], quote: Callable[[str], str]) -> str:
        """Return the example in one line; `labels` are the task's label names, `quote` shortens a text."""
        ...


@dataclass(frozen=True, slots=True)
class LabelledText:
    """SC: a text and the number of its label."""

    text: str
    label: int

    def describe(self, labels: Sequence[str], quote: Callable[[str], str]) -> str:
        return f"{quote(self.text)} → {labels[self.label]}"


@dataclass(frozen=True, slots=True)
class TaggedSentence:
    """TC: the words of a sentence and the number of each word's tag."""

    words: tuple[str, ...]
    tags: tuple[int, ...]

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def describe(self, labels: Sequence[str], quote: Callable[[str], str]) -> str:
        tagged = zip(self.words, self.tags, strict=True)
        return quote(" ".join(f"{word}/{labels[tag]}" for word, tag in tagged))


@dataclass(frozen=True, slots=True)
class AnswerSpan:
    """A span of a context: `context[start : start + len(text)] == text`."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class Question:
    """QA: the text before the context, the context, and the answers (empty: unanswerable)."""

    name: str  # the id of the row, or its place
    before: str
    context: str
    answers: tuple[AnswerSpan, ...]

    @property
    def text(self) -> str:
        return self.before + self.context

    def describe(self, labels: Sequence[str], quote: Callable[[str], str]) -> str:
        return f"{quote(self.text)} → {quote(self.answers[0].text) if self.answers else 'no answer'}"


@dataclass(frozen=True, slots=True)
class Pair:
    """IR: a query and a relevant document."""

    query: str
    document: str

    @property
    def text(self) -> str:
        return self.query

    def describe(self, labels: Sequence[str], quote: Callable[[str], str]) -> str:
        return f"{quote(self.query)} → {quote(self.document)}"


@dataclass(frozen=True)
class Library:
    """IR: all documents that are searched."""

    names: tuple[str, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Search:
    """IR: queries, and for each the grades of its judged documents by their index in the library."""

    library: Library  # one object, shared by validation and test
    names: tuple[str, ...]
    queries: tuple[str, ...]
    judged: tuple[dict[int, int], ...]

    def __len__(self) -> int:
        return len(self.queries)


Part = Sequence[Example] | Search


@dataclass(frozen=True)
class Examples:
    """A dataset in its splits; `train` is empty if the task is scored with another task's model or zero-shot."""

    train: Sequence[Example]
    validation: Part
    test: Part
    # By split: the row number of each example in its files, from 0; retrieval has ids instead.
    rows: dict[str, Sequence[int]] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, Any]:
        return {"train": self.train, "validation": self.validation, "test": self.test}


PARTS = ("train", "validation", "test")


# ---------------------------------------------------------------- splitting
# Validation is cut from another split exactly as `datasets.Dataset.train_test_split` does it.


def cut(count: int, splits: Splits) -> tuple[list[int], list[int]]:
    """Return the indices of `count` rows that go to validation, and of the rest, each in a permuted order."""
    order = numpy.random.default_rng(splits.seed).permutation(count).tolist()
    first = count - int((1 - splits.cut) * count)
    return order[:first], order[first:]


# ---------------------------------------------------------------- judgments
# Formats of qrels (which documents answer which queries):
#
# a table                       query-id, corpus-id, score                       BEIR, MTEB
# four columns, no header       query, iteration, document, grade                TREC
# one row per query             query_id, query, positive_passages: [{docid}]    MLDR: includes the query's text


QUERY = "query-id|query_id|qid|query"
DOCUMENT = "corpus-id|corpus_id|document-id|doc_id|docid|pid|document"
GRADE = "score|relevance|grade|label"
PASSAGES = "positive_passages"
QUERY_ID = "query_id|query-id|_id|id|qid"


@dataclass(frozen=True, slots=True)
class Judgment:
    query: str
    document: str
    grade: int
    place: str


@dataclass
class Judgments:
    """All judgments of a split in the order of the files, and the queries' texts if the files have them."""

    rows: list[Judgment] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)

    def by_query(self) -> dict[str, dict[str, int]]:
        """Return the grades of each query's documents, for queries with a relevant document, in order of appearance."""
        graded: dict[str, dict[str, int]] = {}
        for row in self.rows:
            graded.setdefault(row.query, {})[row.document] = row.grade
        return {query: grades for query, grades in graded.items() if max(grades.values()) >= 1}


def read_judgments(whose: str, files: Sequence[Path]) -> Judgments:
    """Read judgments; duplicates count once, and two different grades for one document are refused."""
    judgments = Judgments()
    grades: dict[tuple[str, str], int] = {}
    for path in files:
        if kind_of(path.name)[0] in (".tsv", *COLUMNS):  # TREC's files are .txt
            rows = _separated(whose, path)
        elif PASSAGES in column_names(whose, path):
            rows = _passages(whose, path, judgments.texts)
        else:
            rows = _table(whose, path)
        for row in rows:
            pair = row.query, row.document
            if grades.setdefault(pair, row.grade) != row.grade:
                raise DataError(
                    f"{whose}: {row.place} grades document {row.document!r} for query {row.query!r} as {row.grade}, "
                    f"and an earlier row as {grades[pair]}; remove one"
                )
            if len(grades) > len(judgments.rows):
                judgments.rows.append(row)
    return judgments


def _table(whose: str, path: Path) -> Iterator[Judgment]:
    for place, (query, document, grade) in read_rows(whose, [path], (QUERY, DOCUMENT, GRADE)):
        yield _judgment(whose, query, document, grade, f"{path.parent.name}/{place}")


def _separated(whose: str, path: Path) -> Iterator[Judgment]:
    """Yield judgments from columns separated by tabs or spaces, with BEIR's header or without one."""
    order: tuple[int, ...] = ()
    width = 0
    for number, line in lines(path):
        place = f"{path.parent.name}/{path.name}:{number}"  # other folders may have such a file too
        fields = fields_of(line.decode(errors="replace").rstrip("\r"))
        if not order:
            header = _grade(fields[-1]) is None
            order, width = _order(f"{whose}: {place}", fields, header), len(fields)
            if header:
                continue
        if len(fields) != width:
            raise DataError(
                f"{whose}: {place} has {len(fields)} columns where others have {width}; correct the row"
            )
        query, document, grade = (fields[column] for column in order)
        yield _judgment(whose, query, document, grade, place)


def _order(where: str, fields: list[str], header: bool) -> tuple[int, ...]:
    """Return which columns are query, document and grade."""
    if not header and len(fields) in (3, 4):
        return (0, 1, 2) if len(fields) == 3 else (0, 2, 3)
    order = tuple(
        next((fields.index(name) for name in column.split("|") if name in fields), -1)
        for column in (QUERY, DOCUMENT, GRADE)
    )
    if not header or min(order) < 0:
        raise DataError(
            f"{where} is neither a header nor a judgment; begin with a line query-id, corpus-id, score, separated by tabs"
        )
    return order


def _passages(whose: str, path: Path, texts: dict[str, str]) -> Iterator[Judgment]:
    for place, (name, text, passages) in read_rows(whose, [path], (QUERY_ID, "query", PASSAGES)):
        query = identity(whose, name, place)
        if query in texts:
            raise DataError(f"{whose}: {place} is the second query {query!r}; give it another id")
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{whose}: {place} has no text in 'query'; correct the row")
        if not isinstance(passages, list) or not all(isinstance(passage, dict) for passage in passages):
            raise DataError(f"{whose}: {place} has passages that are no list of objects; correct the row")
        texts[query] = text
        for passage in passages:
            document = next((passage[name] for name in ("docid", "_id", "id") if name in passage), None)
            yield Judgment(query, identity(whose, document, place), 1, place)


def identity(whose: str, value: Any, place: str) -> str:
    """Return an id as text; integers are accepted."""
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise DataError(f"{whose}: {place} has the id {value!r}; give it a text or a whole number")
    return str(value)


def _judgment(whose: str, query: Any, document: Any, grade: Any, place: str) -> Judgment:
    number = _grade(grade)
    if number is None:
        raise DataError(f"{whose}: {place} has the grade {grade!r}; write a whole number")
    return Judgment(identity(whose, query, place), identity(whose, document, place), number, place)


def _grade(value: Any) -> int | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return int(number) if number.is_integer() else None


# ---------------------------------------------------------------- retrieval
# A query counts if a document is relevant to it (grade 1 or more), as in pytrec_eval and BEIR. If validation is cut
# from another split, its queries are divided.


DOCUMENT_ID = "_id|id|docid|doc_id|corpus-id|corpus_id|pid"
Files = dict[str, tuple[Path, ...]]
Grades = dict[str, dict[str, int]]


EMPTY = 0.01  # share of judged documents that may have no text, as a few in old collections


def load_retrieval(task: Task, files: Files, documents: Literal["judged", "all"]) -> Examples:
    """Return the examples of a retrieval task."""
    form = task.form
    assert isinstance(form, Retrieve)
    whose = f"task {task.name!r}"
    judged = {part: read_judgments(whose, files[part]) for part in PARTS if part in files}
    graded, trained = _cut(task, judged)
    searched = {
        row.document for part in ("validation", "test") if part in judged for row in judged[part].rows
    }
    searched |= {name for grades in graded["validation"].values() for name in grades}
    positive = [row for row in trained if row.grade >= form.relevant] if task.is_trained else []

    wanted = searched | {row.document for row in positive}
    whole = documents == "all"
    texts = _document_texts(
        whose, form.document, files["corpus"], DOCUMENT_ID, wanted, whole=whole, spared=EMPTY
    )
    rows = [row for part in judged.values() for row in part.rows]
    queries = _queries(whose, form, files, judged, {row.query for row in rows})
    _refuse_missing(whose, rows, queries, texts, wanted)

    names = tuple(name for name in texts if whole or name in searched)
    library = Library(names, tuple(texts[name] for name in names))
    if "pairs" in files:
        pairs = _pairs(whose, form, files["pairs"])
    else:
        pairs = [Pair(queries[row.query], texts[row.document]) for row in positive]
    limits = task.splits.rows
    place = {name: number for number, name in enumerate(names)}
    validation, test = (
        _search(library, place, queries, graded[part], limit)
        for part, limit in (("validation", limits[1]), ("test", limits[2]))
    )
    examples = Examples(pairs[: limits[0] or None], validation, test)
    for part in PARTS:
        if not len(getattr(examples, part)) and (part != "train" or task.is_trained):
            raise DataError(
                f"{whose}: its {part} part has no query with a relevant document; put judgments into its files"
            )
    return examples


def _cut(task: Task, judged: dict[str, Judgments]) -> tuple[dict[str, Grades], list[Judgment]]:
    """Return the grades of validation and test, and the judgments left for training."""
    graded = {part: rows.by_query() for part, rows in judged.items()}
    trained = judged["train"].rows if "train" in judged else []
    if "validation" in graded:
        return graded, trained
    donor = graded[task.splits.cut_from]
    queries = list(donor)
    first, rest = cut(len(queries), task.splits)
    graded["validation"] = {queries[place]: donor[queries[place]] for place in first}
    graded[task.splits.cut_from] = {queries[place]: donor[queries[place]] for place in rest}
    if task.splits.cut_from == "train":
        trained = [row for row in trained if row.query not in graded["validation"]]
    return graded, trained


def _search(
    library: Library, place: dict[str, int], queries: dict[str, str], graded: Grades, limit: int
) -> Search:
    names = tuple(graded)[: limit or None]
    judged = tuple({place[document]: grade for document, grade in graded[name].items()} for name in names)
    return Search(library, names, tuple(queries[name] for name in names), judged)


def _refuse_missing(
    whose: str, rows: Iterable[Judgment], queries: dict[str, str], texts: dict[str, str], wanted: set[str]
) -> None:
    """Refuse judgments of queries or documents that do not exist."""
    for row in rows:
        if row.query not in queries:
            raise DataError(
                f"{whose}: {row.place} judges query {row.query!r}, which is not among the queries; add it, or remove the row"
            )
        if row.document in wanted and row.document not in texts:
            raise DataError(
                f"{whose}: {row.place} judges document {row.document!r}, which is not in the corpus; "
                "add it, or remove the row"
            )


# ---------------------------------------------------------------- texts


def _queries(
    whose: str, form: Retrieve, files: Files, judged: dict[str, Judgments], wanted: set[str]
) -> dict[str, str]:
    """Return the text of each judged query, from the query files or beside its judgments."""
    if "queries" in files:
        return _document_texts(whose, form.query, files["queries"], QUERY_ID, wanted)
    columns = columns_of("Retrieve.query", form.query)
    queries: dict[str, str] = {}
    for part in judged.values():
        for name, text in part.texts.items():
            query = _filled(form.query, columns, text)
            if queries.setdefault(name, query) != query:
                raise DataError(
                    f"{whose}: two parts have the query {name!r} with other texts; give one another id"
                )
    return queries


def _document_texts(
    whose: str,
    template: str,
    files: Sequence[Path],
    name_column: str,
    wanted: set[str],
    *,
    whole: bool = False,
    spared: float = 0.0,
) -> dict[str, str]:
    """Return texts by id in the order of the files: those in `wanted`, or all if `whole`.

    A share `spared` of the wanted texts may be empty.
    """
    columns = columns_of("Retrieve", template)
    only = None if whole else (name_column, wanted)
    texts: dict[str, str] = {}
    empty: list[str] = []
    for place, (name, *values) in read_rows(whose, files, (name_column, *columns), only=only):
        document = identity(whose, name, place)
        if document in texts:
            raise DataError(f"{whose}: {place} is the second with the id {document!r}; remove one")
        fields = {
            column: _text(whose, value, column, place) for column, value in zip(columns, values, strict=True)
        }
        if document in wanted and not any(value.strip() for value in fields.values()):
            empty.append(place)
        texts[document] = filled(template, fields)
    if len(empty) > spared * len(wanted):
        raise DataError(
            f"{whose}: {empty[0]} is judged and has no text in {' or '.join(map(repr, columns))}; "
            "correct it, or remove it and its judgments"
        )
    return texts


def _pairs(whose: str, form: Retrieve, files: Sequence[Path]) -> list[Pair]:
    templates = form.query, form.document
    columns = [columns_of("Retrieve", template) for template in templates]
    pairs = []
    for place, values in read_rows(whose, files, form.pair):
        texts = (
            _text(whose, value, name, place, needed=True)
            for name, value in zip(form.pair, values, strict=True)
        )
        pairs.append(Pair(*map(_filled, templates, columns, texts)))
    return pairs


def _filled(template: str, columns: tuple[str, ...], text: str) -> str:
    """Fill a template of which only the column "text" is known."""
    return filled(template, dict.fromkeys(columns, "") | {"text": text})


def _text(whose: str, value: Any, column: str, place: str, *, needed: bool = False) -> str:
    """Return a column's value as text; with `needed`, refuse an empty one (an empty title is usual)."""
    if value is None and not needed:
        return ""
    if not isinstance(value, (str, int, float)) or (needed and not str(value).strip()):
        raise DataError(f"{whose}: {place} has no text in {column!r}; correct or remove the row")
    return str(value)


# ---------------------------------------------------------------- load


def load(task: Task, *, documents: Literal["judged", "all"]) -> Examples:
    """Return the examples of a task. Retrieval searches `documents`: the judged ones, or the whole corpus ("all")."""
    files = files_of(task)
    if isinstance(task.form, Retrieve):
        return load_retrieval(task, files, documents)
    read = READERS[type(task.form)]
    parts = {part: read(f"task {task.name!r}", task.form, paths) for part, paths in files.items()}
    places: dict[str, Sequence[int]] = {part: range(len(rows)) for part, rows in parts.items()}
    if "validation" not in parts:
        donor = task.splits.cut_from
        first, rest = cut(len(parts[donor]), task.splits)
        rows = parts[donor]
        parts |= {"validation": [rows[place] for place in first], donor: [rows[place] for place in rest]}
        places |= {"validation": first, donor: rest}
    if not task.is_trained:
        parts["train"] = []
    limited = [parts[part][: limit or None] for part, limit in zip(PARTS, task.splits.rows, strict=True)]
    for part, rows in zip(PARTS, limited, strict=True):
        if not rows and (part != "train" or task.is_trained):
            raise DataError(f"task {task.name!r}: its {part} part has no rows; {_more(task.splits, part)}")
    kept = {part: places.get(part, ())[: len(rows)] for part, rows in zip(PARTS, limited, strict=True)}
    return Examples(*limited, rows=kept)


def _more(splits: Splits, part: str) -> str:
    if splits.validation or part not in ("validation", splits.cut_from):
        return "put rows into its files"
    return f"it is cut at {splits.cut:g} from the {splits.cut_from} part, which is too small; add rows, or change Splits.cut"


# ---------------------------------------------------------------- sequence classification


def _texts(whose: str, form: Classify, files: Sequence[Path]) -> list[LabelledText]:
    columns, optional = columns_of("Classify.text", form.text), optional_columns(form.text)
    number = Numbering(form.labels, numbered=form.numbered)
    examples = []
    for place, (*values, label) in read_rows(whose, files, (*columns, form.label)):
        label_number = number(label)
        if label_number is None:
            raise DataError(f"{whose}: {place} {number.refusal(label)}")
        fields = dict(zip(columns, values, strict=True))
        for name, value in fields.items():
            if not isinstance(value, (str, int, float)) and (value is not None or name not in optional):
                raise DataError(f"{whose}: {place} has no text in {name!r}; correct the row")
        text = filled(form.text, fields)
        if not text or text.isspace():
            raise DataError(f"{whose}: {place} has no text; correct or remove the row")
        examples.append(LabelledText(text, label_number))
    return examples


# ---------------------------------------------------------------- token classification


def _sentences(whose: str, form: Tag, files: Sequence[Path]) -> list[TaggedSentence]:
    number = Numbering(form.labels)
    examples = []
    for place, (words, tags) in read_rows(whose, files, (form.words, form.tags)):
        if wrong := _wrong_sentence(words, tags):
            raise DataError(f"{whose}: {place} {wrong}")
        numbers = []
        for tag in tags:
            tag_number = number(tag)
            if tag_number is None:
                raise DataError(f"{whose}: {place} {number.refusal(tag)}")
            numbers.append(tag_number)
        examples.append(TaggedSentence(tuple(words), tuple(numbers)))
    return examples


def _wrong_sentence(words: Any, tags: Any) -> str:
    if not isinstance(words, list) or not isinstance(tags, list):
        return "does not hold a list of words and one of tags; write them as lists, in jsonl or parquet"
    if len(words) != len(tags):
        return f"has {len(words)} words and {len(tags)} tags; give each word its tag"
    if not words:
        return "has no words; remove the row"
    if not all(isinstance(word, str) and word for word in words):
        return "has a word that is empty or no text; correct or remove the row"
    return ""


# ---------------------------------------------------------------- question answering


def _questions(whose: str, form: Answer, files: Sequence[Path]) -> list[Question]:
    examples = []
    ids = ("id|_id|qid|query_id",)
    for place, (question, context, answers, name) in read_rows(whose, files, form.columns, optional=ids):
        try:
            if not isinstance(question, str) or not isinstance(context, str) or not context.strip():
                raise ValueError("has no question or no context; correct or remove the row")
            spans = spans_of(answers, context)
            if not spans and not form.unanswerable:
                raise ValueError(
                    "has no answer; remove the row, or type Answer(unanswerable=True) if that is right"
                )
        except ValueError as wrong:
            raise DataError(f"{whose}: {place} {wrong}") from None
        before = form.text.format(question=question)
        examples.append(Question(place if name is None else str(name), before, context, spans))
    return examples


def spans_of(answers: Any, context: str) -> tuple[AnswerSpan, ...]:
    """Return the answers of one row, in any supported format; raise ValueError with the reason if they are wrong."""
    texts: list[Any]
    starts: list[Any]
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
    if start is None:
        start = context.find(text)
        if start < 0:
            raise ValueError(f"has the answer {_short(text)}, which is not in its context; correct the row")
    if not isinstance(start, int) or isinstance(start, bool) or start < 0:
        raise ValueError(f"has an answer that starts at {start!r}; give the number of its first character")
    there = context[start : start + len(text)]
    if there != text:
        raise ValueError(
            f"has the answer {_short(text)} at {start}, where the context says {_short(there)}; correct answer_start"
        )
    return AnswerSpan(text, start)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:39]}…")


# How the rows of a form are read; `load_retrieval` reads several kinds of files together.
READERS: dict[type[Form], Callable[[str, Any, Sequence[Path]], list[Any]]] = {
    Classify: _texts,
    Tag: _sentences,
    Answer: _questions,
}
if missing := FAMILY_OF.keys() - READERS.keys() - {Retrieve}:
    raise NotImplementedError(f"tasks.load has no reader for {missing} of specs.tasks.FAMILIES")
