"""Which documents answer which queries (qrels), as they are written.

a table                       query-id, corpus-id, score                       BEIR, MTEB
four columns, no header       query, iteration, document, grade                TREC
a row for each query          query_id, query, positive_passages: [{docid}]    MLDR: the query's text stands there too
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from biphase.errors import DataError
from biphase.tasks.places import COLUMNS, kind_of
from biphase.tasks.tables import column_names, lines, read

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
    """All judgments of a part, in the order of the files; and the queries' texts, where they stand there too."""

    rows: list[Judgment] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)

    def by_query(self) -> dict[str, dict[str, int]]:
        """The grades of each query's documents, queries in the order they appear, if any document is relevant."""
        found: dict[str, dict[str, int]] = {}
        for one in self.rows:
            found.setdefault(one.query, {})[one.document] = one.grade
        return {query: grades for query, grades in found.items() if max(grades.values()) >= 1}


def read_judgments(whose: str, files: Sequence[Path]) -> Judgments:
    """The judgments of the files. The same one twice counts once; two grades for one document are refused."""
    made = Judgments()
    known: dict[tuple[str, str], int] = {}
    for path in files:
        if kind_of(path.name)[0] in (".tsv", *COLUMNS):  # TREC's are .txt
            found = _separated(whose, path)
        elif PASSAGES in column_names(whose, path):
            found = _passages(whose, path, made.texts)
        else:
            found = _table(whose, path)
        for one in found:
            pair = one.query, one.document
            if known.setdefault(pair, one.grade) != one.grade:
                raise DataError(
                    f"{whose}: {one.place} grades document {one.document!r} for query {one.query!r} as {one.grade}, "
                    f"and an earlier row as {known[pair]}; remove one"
                )
            if len(known) > len(made.rows):
                made.rows.append(one)
    return made


def _table(whose: str, path: Path) -> Iterator[Judgment]:
    for rows in read(whose, [path], (QUERY, DOCUMENT, GRADE)):
        columns = (rows.columns[QUERY], rows.columns[DOCUMENT], rows.columns[GRADE])
        for row, (query, document, grade) in enumerate(zip(*columns, strict=True)):
            yield _judgment(whose, query, document, grade, f"{path.parent.name}/{rows.place(row)}")


def _separated(whose: str, path: Path) -> Iterator[Judgment]:
    """Tabs or spaces, with BEIR's header or without one."""
    order: tuple[int, ...] = ()
    width = 0
    for number, line in lines(path):
        place = f"{path.parent.name}/{path.name}:{number}"  # a test.tsv may stand elsewhere too
        text = line.decode(errors="replace").rstrip("\r")
        fields = [one.strip() for one in text.split("\t")] if "\t" in text else text.split()
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
    """Which columns are query, document and grade."""
    if not header and len(fields) in (3, 4):
        return (0, 1, 2) if len(fields) == 3 else (0, 2, 3)
    found = [
        next((fields.index(one) for one in column.split("|") if one in fields), -1)
        for column in (QUERY, DOCUMENT, GRADE)
    ]
    if not header or min(found) < 0:
        raise DataError(
            f"{where} is neither a header nor a judgment; begin with a line query-id, corpus-id, score, separated by tabs"
        )
    return tuple(found)


def _passages(whose: str, path: Path, texts: dict[str, str]) -> Iterator[Judgment]:
    for rows in read(whose, [path], (QUERY_ID, "query", PASSAGES)):
        for row, (name, text, passages) in enumerate(
            zip(rows.columns[QUERY_ID], rows.columns["query"], rows.columns[PASSAGES], strict=True)
        ):
            query = identity(whose, name, rows.place(row))
            if query in texts:
                raise DataError(
                    f"{whose}: {rows.place(row)} is the second query {query!r}; give it another id"
                )
            if not isinstance(text, str) or not text.strip():
                raise DataError(f"{whose}: {rows.place(row)} has no text in 'query'; correct the row")
            if not isinstance(passages, list) or not all(isinstance(one, dict) for one in passages):
                raise DataError(
                    f"{whose}: {rows.place(row)} has passages that are no list of objects; correct the row"
                )
            texts[query] = text
            for passage in passages:
                document = next((passage[one] for one in ("docid", "_id", "id") if one in passage), None)
                yield Judgment(query, identity(whose, document, rows.place(row)), 1, rows.place(row))


def identity(whose: str, value: Any, place: str) -> str:
    """An id as text; numbers are ids too."""
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
