"""Loading a task: the rows of its files as checked examples, divided into train, validation and test.

`load` returns the `Examples` of any task; `load_retrieval` does so for retrieval, from documents, queries and judgments
(qrels). The labels of a task that lists none are found in its files. Texts are already filled into the task's template. Nothing here knows of tokens or models.
"""

from __future__ import annotations

import contextlib
import json
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy

from biphase.errors import DataError, SpecError
from biphase.specs import Pairs, Retrieve, Splits, Task
from biphase.specs.rows import columns_of, filled, whole
from biphase.tasks.collection import LARGE_BYTES, Keep, RaggedWriter, Texts, as_bytes, temporary
from biphase.tasks.files import (
    COLUMNS,
    column_names,
    fields_of,
    files_of,
    kind_of,
    lines,
    name_in,
    read_rows,
    schema_of,
    whose_files,
)


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

    names: Sequence[str]  # both `Texts` if the collection is large
    texts: Sequence[str]


@dataclass(frozen=True)
class Search:
    """IR: queries, and for each the grades of its judged documents by their index in the library."""

    library: Library  # one object, shared by validation and test
    names: tuple[str, ...]
    queries: tuple[str, ...]
    judged: tuple[dict[int, int], ...]

    def __len__(self) -> int:
        return len(self.queries)


@dataclass(frozen=True)
class Examples:
    """A dataset in its splits; `train` is empty if the task is scored with another task's model or zero-shot.

    Each split is a sequence of what the form's `example` returns. For retrieval, `train` has pairs, the others are a
    `Search`.
    """

    train: Sequence[Any]
    validation: Any
    test: Any
    # By split: the row number of each example in its files, from 0; retrieval has ids instead.
    rows: dict[str, Sequence[int]] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, Any]:
        return {"train": self.train, "validation": self.validation, "test": self.test}


PARTS = ("train", "validation", "test")
Files = dict[str, tuple[Path, ...]]
Grades = dict[str, dict[str, int]]  # by query and document


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
# The columns of a file without a header, by their number.
BARE = {
    3: ("query-id", "corpus-id", "score"),
    4: ("query-id", "iteration", "corpus-id", "score"),
}


class Judgment(NamedTuple):
    query: str
    document: str
    grade: int
    place: str


class Judgments(NamedTuple):
    """All judgments of a split in the order of the files, and the queries' texts if the files have them."""

    rows: list[Judgment]
    texts: dict[str, str]

    def by_query(self) -> Grades:
        """Return the grades of each query's documents, for queries with a relevant document, in order of appearance."""
        graded: Grades = {}
        for row in self.rows:
            graded.setdefault(row.query, {})[row.document] = row.grade
        return {query: grades for query, grades in graded.items() if max(grades.values()) >= 1}


def read_judgments(whose: str, files: Sequence[Path]) -> Judgments:
    """Read judgments; duplicates count once, and two different grades for one document are refused."""
    judgments = Judgments([], {})
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
    """Yield judgments from columns separated by tabs or spaces, with BEIR's header or TREC's four columns without one."""
    order: tuple[str, ...] = ()  # the names of the columns
    chosen: list[str] = []  # those of query, document and grade
    for number, line in lines(path):
        place = f"{path.parent.name}/{path.name}:{number}"  # other folders may have such a file too
        fields = fields_of(line.decode(errors="replace").rstrip("\r"))
        if not order:
            header = _grade(fields[-1]) is None
            order = tuple(fields) if header else BARE.get(len(fields), ())
            every = (name_in(column, order) for column in (QUERY, DOCUMENT, GRADE))
            chosen = [name for name in every if name]
            if len(chosen) < 3:
                raise DataError(
                    f"{whose}: {place} is neither a header nor a judgment; begin with a line query-id, corpus-id, score, "
                    "separated by tabs"
                )
            if header:
                continue
        if len(fields) != len(order):
            raise DataError(f"{whose}: {place} has {len(fields)} columns, not {len(order)}; correct the row")
        row = dict(zip(order, fields, strict=True))
        query, document, grade = (row[name] for name in chosen)
        yield _judgment(whose, query, document, grade, place)


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
EMPTY = 0.01  # share of judged documents that may have no text, as a few in old collections


def load_retrieval(
    task: Task, files: Files, documents: Literal["judged", "all"], keep: Keep = temporary
) -> Examples:
    """Return the examples of a retrieval task; `keep` says where a large collection is."""
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
    corpus, whole = files["corpus"], documents == "all"
    rows = [row for part in judged.values() for row in part.rows]
    queries = _queries(whose, form, files, judged, {row.query for row in rows})
    if whole and sum(path.stat().st_size for path in corpus) > LARGE_BYTES:
        library, place = _large_library(whose, form.document, corpus, wanted, keep)
        texts = {name: library.texts[number] for name, number in place.items()}
    else:
        texts = _document_texts(whose, form.document, corpus, DOCUMENT_ID, None if whole else wanted)
        names = tuple(name for name in texts if whole or name in searched)
        library = Library(names, tuple(texts[name] for name in names))
        place = {name: number for number, name in enumerate(names)}
    _refuse_missing(whose, rows, queries, texts, wanted)
    blank = _without_text(form.document, {name: texts[name] for name in sorted(wanted)})
    if len(blank) > EMPTY * len(wanted):
        raise DataError(
            f"{whose}: {len(blank)} of {len(wanted)} judged documents have no text, {blank[0]!r} among them; name "
            "their columns in document='…', or remove them and their judgments"
        )

    if "pairs" in files:
        pairs = _pairs(whose, form, files["pairs"])
    else:
        pairs = [Pair(queries[row.query], texts[row.document]) for row in positive]

    def search(part: str, limit: int) -> Search:
        chosen = tuple(graded[part])[: limit or None]
        grades = tuple(
            {place[name]: grade for name, grade in graded[part][query].items()} for query in chosen
        )
        return Search(library, chosen, tuple(queries[query] for query in chosen), grades)

    limits = task.splits.rows
    examples = Examples(
        pairs[: limits[0] or None], search("validation", limits[1]), search("test", limits[2])
    )
    for part, rows in examples.parts.items():
        if not len(rows) and (part != "train" or task.is_trained):
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
        texts = _document_texts(whose, form.query, files["queries"], QUERY_ID, wanted)
        if empty := _without_text(form.query, texts):
            raise DataError(
                f"{whose}: query {empty[0]!r} is judged and has no text; correct it, or remove it and its judgments"
            )
        return texts
    queries: dict[str, str] = {}
    for part in judged.values():
        for name, text in part.texts.items():
            query = _filled(form.query, text)
            if queries.setdefault(name, query) != query:
                raise DataError(
                    f"{whose}: two parts have the query {name!r} with other texts; give one another id"
                )
    return queries


def _without_text(template: str, texts: dict[str, str]) -> list[str]:
    """Return the names of texts that are the template alone, because its columns are blank."""
    nothing = filled(template, dict.fromkeys(columns_of("Retrieve", template), "")).strip()
    return [name for name, text in texts.items() if text.strip() == nothing]


def _document_texts(
    whose: str, template: str, files: Sequence[Path], name_column: str, wanted: set[str] | None
) -> dict[str, str]:
    """Return texts by id in the order of the files: those in `wanted`, or all if it is None."""
    texts: dict[str, str] = {}
    for place, document, text in _rows_of_texts(whose, template, files, name_column, wanted):
        if document in texts:
            raise _second(whose, place, document)
        texts[document] = text
    return texts


def _rows_of_texts(
    whose: str, template: str, files: Sequence[Path], name_column: str, wanted: set[str] | None
) -> Iterator[tuple[str, str, str]]:
    """Yield the place, the id and the text of each row; `wanted`: ids; None: all."""
    columns = columns_of("Retrieve", template)
    only = None if wanted is None else (name_column, wanted)
    for place, (name, *values) in read_rows(whose, files, (name_column, *columns), only=only):
        document = identity(whose, name, place)
        fields = {
            column: _text(whose, value, column, place) for column, value in zip(columns, values, strict=True)
        }
        yield place, document, filled(template, fields)


def _second(whose: str, place: str, document: str) -> DataError:
    return DataError(f"{whose}: {place} is the second with the id {document!r}; remove one")


def _large_library(
    whose: str, template: str, files: Sequence[Path], wanted: set[str], keep: Keep
) -> tuple[Library, dict[str, int]]:
    """Return a large collection as memory maps, and the index of each wanted document."""

    def build(folder: Path) -> None:
        hashes = array("q")  # since a set of all ids would take a gigabyte
        with RaggedWriter(folder, "names") as names, RaggedWriter(folder, "texts") as texts:
            for _, document, text in _rows_of_texts(whose, template, files, DOCUMENT_ID, None):
                names.add(as_bytes(document))
                texts.add(as_bytes(text))
                hashes.append(hash(document))
        values, counts = numpy.unique(numpy.frombuffer(hashes, numpy.int64), return_counts=True)
        twice, seen = set(values[counts > 1].tolist()), set()
        rows = _rows_of_texts(whose, template, files, DOCUMENT_ID, None) if twice else ()
        for place, document, _ in rows:
            if document in seen:
                raise _second(whose, place, document)
            if hash(document) in twice:
                seen.add(document)

    folder = keep("documents", build)
    library = Library(Texts(folder, "names"), Texts(folder, "texts"))
    place = {name: number for number, name in enumerate(library.names) if name in wanted}
    return library, place


def load_pairs(source: Pairs | Task) -> list[Pair]:
    """Return the pairs of files with two columns, or the training pairs of a retrieval task."""
    if isinstance(source, Task):
        return [*load(source, documents="judged").train]
    whose, columns = whose_files(source), (source.query, source.positive)
    pairs = [Pair(*texts) for texts in _pair_texts(whose, columns, files_of(source)["pairs"])]
    if not pairs:
        raise DataError(f"{whose} has no rows; put a query and a positive into each")
    return pairs[: source.rows or None]


def _pairs(whose: str, form: Retrieve, files: Sequence[Path]) -> list[Pair]:
    templates = form.query, form.document
    return [Pair(*map(_filled, templates, texts)) for texts in _pair_texts(whose, form.pair, files)]


def _pair_texts(whose: str, columns: tuple[str, str], files: Sequence[Path]) -> Iterator[list[str]]:
    for place, values in read_rows(whose, files, columns):
        yield [
            _text(whose, value, name, place, needed=True) for name, value in zip(columns, values, strict=True)
        ]


def _filled(template: str, text: str) -> str:
    """Fill a template of which only the column "text" is known."""
    return filled(template, defaultdict(str, text=text))


def _text(whose: str, value: Any, column: str, place: str, *, needed: bool = False) -> str:
    """Return a column's value as text; with `needed`, refuse an empty one (an empty title is usual)."""
    if value is None and not needed:
        return ""
    if not isinstance(value, (str, int, float)) or (needed and not str(value).strip()):
        raise DataError(f"{whose}: {place} has no text in {column!r}; correct or remove the row")
    return str(value)


# ---------------------------------------------------------------- load


def load(task: Task, *, documents: Literal["judged", "all"], keep: Keep = temporary) -> Examples:
    """Return the examples of a task. Retrieval searches `documents`: the judged ones, or the whole corpus ("all")."""
    files = files_of(task)
    if isinstance(task.form, Retrieve):
        return load_retrieval(task, files, documents, keep)
    parts = {part: _examples(task, paths) for part, paths in files.items()}
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


def _examples(task: Task, files: Sequence[Path]) -> list[Any]:
    whose, form, examples = f"task {task.name!r}", task.form, []
    for place, values in read_rows(whose, files, form.columns, optional=form.optional):
        try:
            examples.append(form.example(values, place))
        except ValueError as wrong:
            raise DataError(f"{whose}: {place} {wrong}") from None
    return examples


def _more(splits: Splits, part: str) -> str:
    if splits.validation or part not in ("validation", splits.cut_from):
        return "put rows into its files"
    return f"it is cut at {splits.cut:g} from the {splits.cut_from} part, which is too small; add rows, or change Splits.cut"


# ---------------------------------------------------------------- labels that a task does not list
# `values_of` and `in_order` collect the labels of a column; `named` finds names for numeric labels: in what the
# `datasets` library recorded in a parquet file, or in the header of README.md.


MOST_LABELS = 1_000
_WHOLE = re.compile(r"-?\d+")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def values_of(whose: str, files: Sequence[Path], column: str, *, lists: bool = False) -> set[Any]:
    """Return the values of a column, or of the lists it holds; refuse missing labels and labels with spaces around."""
    labels: set[Any] = set()
    for place, (value,) in read_rows(whose, files, (column,)):
        wrong = "has no list of labels" if lists and not isinstance(value, list) else ""
        if isinstance(value, list) and not lists:
            wrong = "has a list, and one label a row is read unless you type --family ML,"
        for label in value if isinstance(value, list) and lists else (value,):
            wrong = wrong or _no_label(label)
        if wrong:
            raise SpecError(f"{whose}: {place} {wrong} in {column!r}; correct or remove the row")
        labels.update(value) if lists else labels.add(value)
        if len(labels) > MOST_LABELS:
            raise SpecError(
                f"{whose}: column {column!r} has over {MOST_LABELS:,} values; name that of the labels: --label COLUMN"
            )
    return labels


def in_order(whose: str, column: str, values: set[Any]) -> tuple[str, ...]:
    """Return labels in order: numbers by size, everything else by name."""
    numbers = (value for value in values if is_number(value) and not isinstance(value, int))
    measure = next((number for number in numbers if not float(number).is_integer()), None)
    if measure is not None:
        raise SpecError(
            f"{whose}: column {column!r} holds measures, not labels, e.g. {measure}; "
            "name another: --label COLUMN, say the labels: --labels NAMES, or predict the numbers: --family SR"
        )
    names = {str(int(value)) if isinstance(value, float) else str(value) for value in values}
    return tuple(sorted(names, key=int) if all(map(_WHOLE.fullmatch, names)) else sorted(names))


def is_number(value: Any) -> bool:
    """Whether a value is a number, or the text of one."""
    return isinstance(value, (int, float)) or (isinstance(value, str) and bool(_NUMBER.fullmatch(value)))


def _no_label(value: Any) -> str:
    """Return why a value cannot be a label, or ""."""
    if value is None or isinstance(value, (list, dict)) or value != value:  # NaN differs from itself
        return "has no label"
    if isinstance(value, str) and not value.strip():
        return "has no label"
    if isinstance(value, str) and value != value.strip():
        return f"has the label {value!r}, with a space before or after it,"
    return ""


# ---------------------------------------------------------------- names of numeric labels


def named(whose: str, files: Sequence[Path], root: Path, column: str, values: set[Any]) -> tuple[str, ...]:
    """Return the names of numeric labels in order, from the data's own metadata or a card beside them; () if none.

    `root`: the folder that the user named. Labels that are names already return ().
    """
    numbers = {whole(str(value)) for value in values}
    if not numbers or None in numbers:
        return ()
    path, names = _recorded_names(files[0].resolve(), root.resolve(), column)
    strange = sorted(number for number in numbers if number is not None and not 0 <= number < len(names))
    if names and strange and not {str(value) for value in values} <= set(names):
        raise SpecError(
            f"{whose}: {path} names {len(names)} labels, and column {column!r} holds the number {strange[0]}; correct it, "
            "or say the labels: --labels NAMES"
        )
    return names


def are_places(names: Sequence[str], values: set[Any]) -> bool:
    """Whether all values are indices into `names`, some of which look like numbers themselves."""
    numeric = any(whole(name) is not None for name in names)
    return numeric and all(whole(str(value)) in range(len(names)) for value in values)


def _recorded_names(file: Path, top: Path, column: str) -> tuple[Path, tuple[str, ...]]:
    """Return the first names found for a column, and the file they are from.

    A repository's card is above the folder of a configuration; from there only the names of that configuration count.
    """
    inside = [folder for folder in file.parents if folder.is_relative_to(top)] or [file.parent]
    for path in (file, *(folder / "README.md" for folder in (*inside, top.parent))):
        with contextlib.suppress(Exception):  # a file that is absent or has no metadata is skipped
            by_config = {
                config: names for config, info in _infos(path) if (names := _label_names(info, column))
            }
            own = {config: names for config, names in by_config.items() if config in file.parts}
            if path.parent == top.parent and top.name != "data":
                by_config = own
            if len(found := set((own or by_config).values())) == 1:
                return path, found.pop()
    return file, ()


def _infos(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the descriptions of a dataset's columns in a parquet file or a card, by configuration."""
    if path.name == "README.md":
        from huggingface_hub import metadata_load

        card = (metadata_load(path) or {})["dataset_info"]
        for info in card if isinstance(card, list) else [card]:
            columns = {feature.get("name"): feature for feature in info["features"]}
            yield info.get("config_name", ""), columns
    elif kind_of(path.name)[0] == ".parquet":
        yield "", json.loads(schema_of(path).metadata[b"huggingface"])["info"]["features"]


def _label_names(columns: dict[str, Any], column: str) -> tuple[str, ...]:
    """Return a column's label names in the order of their numbers; () if there are none, or invalid ones."""
    names = _names(columns.get(column))
    if isinstance(names, dict):
        by_number = {int(number): name for number, name in names.items()}
        names = [by_number[number] for number in range(len(by_number))]
    labels = tuple(map(str, names or ()))
    return labels if 1 < len(labels) == len(set(labels)) and all(map(str.strip, labels)) else ()


def _names(feature: Any) -> Any:
    """Return the label names in a column's description, which may be nested for lists."""
    if not isinstance(feature, dict):
        return None
    if "names" in feature:
        return feature["names"]
    return next((names for inner in feature.values() if (names := _names(inner))), None)
