"""Retrieval: judgments, queries and documents → pairs to train on, and searches to be scored by.

A query counts if some document is relevant to it (a grade of 1 or more), as pytrec_eval and BEIR do it. Where
validation is cut from another part, it is the queries that are cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from biphase.errors import DataError
from biphase.specs import Retrieve, Task
from biphase.specs.tasks import columns_of, filled
from biphase.tasks.cuts import cut
from biphase.tasks.examples import Examples, Library, Pair, Search
from biphase.tasks.judgments import QUERY_ID, Judgment, Judgments, identity, read_judgments
from biphase.tasks.tables import Only, Rows, read

DOCUMENT_ID = "_id|id|docid|doc_id|corpus-id|corpus_id|pid"
Files = dict[str, tuple[Path, ...]]
Grades = dict[str, dict[str, int]]


EMPTY = 0.01  # the share of judged documents that may lack any text, as a few do in old collections


def load_retrieval(task: Task, files: Files, documents: Literal["judged", "all"]) -> Examples:
    """The examples of a retrieval task."""
    form = task.form
    assert isinstance(form, Retrieve)
    whose = f"task {task.name!r}"
    judged = {
        part: read_judgments(whose, files[part]) for part in ("train", "validation", "test") if part in files
    }
    graded, trained = _cut(task, judged)
    searched = {one.document for one in judged["test"].rows}
    searched |= {one.document for one in judged["validation"].rows} if "validation" in judged else set()
    searched |= {name for grades in graded["validation"].values() for name in grades}
    pairs_of = [one for one in trained if one.grade >= form.relevant] if task.is_trained else []

    wanted = searched | {one.document for one in pairs_of}
    whole = documents == "all"
    texts = _texts(whose, form.document, files["corpus"], DOCUMENT_ID, wanted, whole=whole, spared=EMPTY)
    asked = [one for part in judged.values() for one in part.rows]
    queries = _queries(whose, form, files, judged, {one.query for one in asked})
    _refuse_missing(whose, asked, queries, texts, wanted)

    names = tuple(name for name in texts if whole or name in searched)
    library = Library(names, tuple(texts[name] for name in names))
    if "pairs" in files:
        pairs = _pairs(whose, form, files["pairs"])
    else:
        pairs = [Pair(queries[one.query], texts[one.document]) for one in pairs_of]
    limits = task.splits.rows
    place = {name: number for number, name in enumerate(names)}
    validation, test = (
        _search(library, place, queries, graded[part], limit)
        for part, limit in (("validation", limits[1]), ("test", limits[2]))
    )
    found = {"train": pairs[: limits[0] or None], "validation": validation, "test": test}
    for part, rows in found.items():
        if not len(rows) and (part != "train" or task.is_trained):
            raise DataError(
                f"{whose}: its {part} part has no query with a relevant document; put judgments into its files"
            )
    return Examples(found["train"], validation, test)


def _cut(task: Task, judged: dict[str, Judgments]) -> tuple[dict[str, Grades], list[Judgment]]:
    """Grades of validation and test, and the judgments that are left to train on."""
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
        trained = [one for one in trained if one.query not in graded["validation"]]
    return graded, trained


def _search(
    library: Library, place: dict[str, int], queries: dict[str, str], graded: Grades, limit: int
) -> Search:
    names = tuple(graded)[: limit or None]
    judged = tuple({place[document]: grade for document, grade in graded[name].items()} for name in names)
    return Search(library, names, tuple(queries[name] for name in names), judged)


def _refuse_missing(
    whose: str, asked: Iterable[Judgment], queries: dict[str, str], texts: dict[str, str], wanted: set[str]
) -> None:
    """Every judgment that counts must name a query and a document that are there."""
    for one in asked:
        if one.query not in queries:
            raise DataError(
                f"{whose}: {one.place} judges query {one.query!r}, which is not among the queries; add it, or remove the row"
            )
        if one.document in wanted and one.document not in texts:
            raise DataError(
                f"{whose}: {one.place} judges document {one.document!r}, which is not in the corpus; "
                "add it, or remove the row"
            )


# ---------------------------------------------------------------- texts


def _queries(
    whose: str, form: Retrieve, files: Files, judged: dict[str, Judgments], wanted: set[str]
) -> dict[str, str]:
    """The text of each query that is judged: from the files of queries, or beside its judgments."""
    if "queries" in files:
        return _texts(whose, form.query, files["queries"], QUERY_ID, wanted)
    columns = columns_of("Retrieve.query", form.query)
    found: dict[str, str] = {}
    for part in judged.values():
        for name, text in part.texts.items():
            made = _filled(form.query, columns, text)
            if found.setdefault(name, made) != made:
                raise DataError(
                    f"{whose}: two parts have the query {name!r} with other texts; give one another id"
                )
    return found


def _texts(
    whose: str,
    template: str,
    files: Sequence[Path],
    name_column: str,
    wanted: set[str],
    *,
    whole: bool = False,
    spared: float = 0.0,
) -> dict[str, str]:
    """Texts by id, in the order of the files: those that are wanted, or all. Of the wanted, so many may be empty."""
    columns = columns_of("Retrieve", template)
    only = None if whole else Only(name_column, wanted)
    found: dict[str, str] = {}
    empty: list[str] = []
    for rows in read(whose, files, (name_column, *columns), only=only):
        values = zip(*(rows.columns[column] for column in columns), strict=True)
        for row, (name, fields) in enumerate(zip(rows.columns[name_column], values, strict=True)):
            known = identity(whose, name, rows.place(row))
            if known in found:
                raise DataError(f"{whose}: {rows.place(row)} is the second with the id {known!r}; remove one")
            named = {
                column: _text(whose, value, column, rows, row)
                for column, value in zip(columns, fields, strict=True)
            }
            if known in wanted and not any(value.strip() for value in named.values()):
                empty.append(rows.place(row))
            found[known] = filled(template, named)
    if len(empty) > spared * len(wanted):
        raise DataError(
            f"{whose}: {empty[0]} is judged and has no text in {' or '.join(map(repr, columns))}; "
            "correct it, or remove it and its judgments"
        )
    return found


def _pairs(whose: str, form: Retrieve, files: Sequence[Path]) -> list[Pair]:
    columns = [columns_of("Retrieve", template) for template in (form.query, form.document)]
    made = []
    for rows in read(whose, files, form.pair):
        left, right = (rows.columns[name] for name in form.pair)
        for row, (query, document) in enumerate(zip(left, right, strict=True)):
            query = _text(whose, query, form.pair[0], rows, row, needed=True)
            document = _text(whose, document, form.pair[1], rows, row, needed=True)
            made.append(
                Pair(
                    _filled(form.query, columns[0], query),
                    _filled(form.document, columns[1], document),
                )
            )
    return made


def _filled(template: str, columns: tuple[str, ...], text: str) -> str:
    """A template where only the text is known."""
    return filled(template, dict.fromkeys(columns, "") | {"text": text})


def _text(whose: str, value: Any, column: str, rows: Rows, row: int, *, needed: bool = False) -> str:
    """A column as text. An empty title is usual; an empty document is one that nobody finds."""
    if value is None and not needed:
        return ""
    if not isinstance(value, (str, int, float)) or (needed and not str(value).strip()):
        raise DataError(f"{whose}: {rows.place(row)} has no text in {column!r}; correct or remove the row")
    return str(value)
