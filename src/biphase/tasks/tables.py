"""Files of a task → rows: only the columns that are asked for, each row with its place, for messages.

    parquet, arrow   a row is a row; its place is its number
    jsonl, json      a row is a line that holds an object
    json             or the whole file is an array of rows, or an object with one under "data"; in SQuAD's own
                     layout a row is a question. Its place is its number
    csv              a header line, commas (or ; tab | where the header has more of them), quotes as usual
    tsv              a header line, tabs, no quotes: GLUE's files have stray ones
    conll, txt, …    CoNLL's columns, a word and its tags a line, sentences between blank lines: tokens and tags;
                     so is a tsv whose first line ends with a tag

Text files may be compressed (.gz, .zst); their places are line numbers. A column may be asked for by alternatives,
"tokens|words". Files are read in the order they are given, in pieces, so that of a large corpus only the rows that
are wanted need memory.
"""

from __future__ import annotations

import csv
import errno
import io
import json
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from biphase.errors import DataError, nearest, one_line
from biphase.tasks.places import COLUMNS, KINDS, kind_of
from biphase.wording import counted

PIECE_BYTES = 2**22
PIECE_ROWS = 2**14
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Only:
    """Take only the rows whose `column` is among `values` (as text)."""

    column: str
    values: Collection[str]


@dataclass(frozen=True)
class Rows:
    """Some rows of one file: the columns under the names they were asked for by."""

    file: str
    numbers: Sequence[int]  # of the rows in the file, from 1
    columns: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.numbers)

    def place(self, row: int) -> str:
        return f"{self.file}:{self.numbers[row]}"

    def taken(self, only: Only | None) -> Rows:
        """Those of the rows that are wanted."""
        if only is None:
            return self
        rows = [row for row, value in enumerate(self.columns[only.column]) if str(value) in only.values]
        columns = {name: [values[row] for row in rows] for name, values in self.columns.items()}
        return Rows(self.file, [self.numbers[row] for row in rows], columns)


def read(
    whose: str,
    files: Sequence[Path],
    wanted: Sequence[str],
    *,
    optional: Sequence[str] = (),
    only: Only | None = None,
) -> Iterator[Rows]:
    """The rows of the files. An optional column that is not there is all None."""
    for path in files:
        kind, _ = kind_of(path.name)
        asked = _Asked(f"{whose}: {path.name}", path.name, tuple(wanted), tuple(optional))
        try:
            if kind in (".parquet", ".arrow"):
                yield from _arrow(asked, path, only)
            elif kind in (".jsonl", ".json"):
                for rows in _json_rows(asked, path):
                    yield rows.taken(only)
            elif _is_conll(path):
                yield _conll_rows(asked, path).taken(only)
            else:
                yield _separated(asked, path).taken(only)
        except DataError:
            raise
        except Exception as wrong:  # pyarrow, csv and the file system each have their own
            raise _unreadable(whose, path, wrong) from wrong


def column_names(whose: str, path: Path) -> tuple[str, ...]:
    """The columns of a file; of JSON, those of the first row."""
    kind, _ = kind_of(path.name)
    try:
        if kind in (".parquet", ".arrow"):
            return tuple(schema_of(path).names)
        if kind in (".jsonl", ".json"):
            for _, _, row in _objects(f"{whose}: {path.name}", path):
                return tuple(row)
        elif _is_conll(path):
            return CONLL
        else:
            for _, line in lines(path):
                return tuple(next(_reader(path, line.decode())))
    except DataError:
        raise
    except Exception as wrong:
        raise _unreadable(whose, path, wrong) from wrong
    raise DataError(f"{whose}: {path} is empty; put rows into it")


def schema_of(path: Path) -> Any:
    """The columns of a parquet or arrow file with their types, and what its writer noted of them."""
    from pyarrow import ipc, parquet

    if kind_of(path.name)[0] == ".parquet":
        return parquet.read_schema(path)
    with ipc.open_stream(path) as stream:
        return stream.schema


def _unreadable(whose: str, path: Path, wrong: Exception) -> DataError:
    if isinstance(wrong, MemoryError) or getattr(wrong, "errno", None) == errno.ENOMEM:
        return DataError(
            f"{whose}: {path} does not fit into the memory that is free here; close other programs, use a machine "
            "with more memory, or take fewer rows"
        )
    if isinstance(wrong, UnicodeDecodeError):
        return DataError(f"{whose}: {path} is not UTF-8; convert the file")
    return DataError(f"{whose}: {path} cannot be read ({one_line(wrong)}); put a sound copy in its place")


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a text file that are not blank, with their numbers."""
    with _opened(path) as stream:
        number, rest, piece = 0, b"", stream.read(PIECE_BYTES).removeprefix(_BOM)
        while piece:
            *whole, rest = (rest + piece).split(b"\n")
            for number, line in enumerate(whole, number + 1):  # noqa: B020 - it goes on counting
                if line and not line.isspace():
                    yield number, line
            piece = stream.read(PIECE_BYTES)
        if rest and not rest.isspace():  # a last line without its newline is a line
            yield number + 1, rest


# ---------------------------------------------------------------- one file


@dataclass(frozen=True)
class _Asked:
    """The columns that are asked of one file."""

    where: str
    file: str
    wanted: tuple[str, ...]
    optional: tuple[str, ...]

    def chosen(self, present: Collection[str], where: str = "") -> dict[str, str]:
        """The name each column has in the file; an optional one that is not there is left out."""
        found = {}
        for column in (*self.wanted, *self.optional):
            name = next((one for one in column.split("|") if one in present), None)
            if name is not None:
                found[column] = name
            elif column not in self.optional:
                raise DataError(
                    f"{where or self.where} has no column {column!r}; {nearest(column.split('|')[0], present)}"
                )
        return found

    def rows(self, numbers: Sequence[int], columns: dict[str, list[Any]]) -> Rows:
        nothing = {name: [None] * len(numbers) for name in self.optional if name not in columns}
        return Rows(self.file, numbers, columns | nothing)


def _opened(path: Path) -> Any:
    codec = kind_of(path.name)[1]
    if not codec:
        return path.open("rb")
    import pyarrow

    return pyarrow.CompressedInputStream(str(path), codec)


def _arrow(asked: _Asked, path: Path, only: Only | None) -> Iterator[Rows]:
    from pyarrow import ipc, parquet

    is_parquet = kind_of(path.name)[0] == ".parquet"
    with parquet.ParquetFile(path) if is_parquet else ipc.open_stream(path) as table:
        chosen = asked.chosen((table.schema_arrow if is_parquet else table.schema).names)
        wanted = sorted(set(chosen.values()))
        first = 1
        for batch in table.iter_batches(batch_size=PIECE_ROWS, columns=wanted) if is_parquet else table:
            numbers: Sequence[int] = range(first, first + len(batch))
            first += len(batch)
            if only is not None:  # texts that are not wanted never become Python's
                values = batch.column(chosen[only.column]).to_pylist()
                rows = [row for row, value in enumerate(values) if str(value) in only.values]
                batch, numbers = (
                    batch.take(rows) if rows else batch.slice(0, 0),
                    [numbers[row] for row in rows],
                )
            yield asked.rows(numbers, {name: batch.column(one).to_pylist() for name, one in chosen.items()})


# ---------------------------------------------------------------- JSON


def _json_rows(asked: _Asked, path: Path) -> Iterator[Rows]:
    every = (*asked.wanted, *asked.optional)
    numbers: list[int] = []
    columns: dict[str, list[Any]] = {name: [] for name in every}
    chosen: dict[str, str] = {}
    size = 0
    for number, length, row in _objects(asked.where, path):
        if not all(name in row for name in chosen.values()) or len(chosen) < len(every):
            chosen = asked.chosen(row, f"{asked.where}:{number}")  # rows may differ in what they leave out
        numbers.append(number)
        for name in every:
            columns[name].append(row[chosen[name]] if name in chosen else None)
        size += length
        if size >= PIECE_BYTES:
            yield asked.rows(numbers, columns)
            numbers, columns, size = [], {name: [] for name in every}, 0
    yield asked.rows(numbers, columns)


def _objects(where: str, path: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The number, bytes and content of the rows of a JSON file: one object a line, or the file as a whole."""
    first = list(islice(lines(path), 2))
    in_lines = kind_of(path.name)[0] == ".jsonl"
    if first and _begins_document(where, [line for _, line in first], in_lines=in_lines):
        with _opened(path) as stream:
            document = _json(where, stream.read().removeprefix(_BOM))
        for number, row in enumerate(_rows_of_document(where, document), 1):
            yield number, 0, row
        return
    for number, line in lines(path):
        yield number, len(line), _object(f"{where}:{number}", _json(f"{where}:{number}", line))


def _begins_document(where: str, first: list[bytes], *, in_lines: bool) -> bool:
    """By its first two lines: is a file one JSON value, and not an object a line (`in_lines`: as its name says)?"""
    begins = first[0].strip()
    if begins.startswith(b"[") or begins == b"{":
        return True
    if len(first) > 1 and begins.startswith(b"{") and not in_lines and not _is_json(begins):
        return True
    if len(first) > 1 or b'"data"' not in begins:
        return False
    return isinstance(_object(where, _json(where, begins)).get("data"), list)


def _rows_of_document(where: str, document: Any) -> Iterator[dict[str, Any]]:
    rows = document.get("data") if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise DataError(f'{where} holds no rows; write one object a line, or an array of them under "data"')
    for number, row in enumerate(rows, 1):
        if "paragraphs" in _object(f"{where}:{number}", row):
            try:
                yield from _squad_questions(row)
            except (TypeError, KeyError, AttributeError):
                raise DataError(
                    f"{where}:{number} is no article as SQuAD writes it (paragraphs, each with a context and qas); "
                    "correct it, or write one object a line"
                ) from None
        else:
            yield row


def _squad_questions(article: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The questions of an article in SQuAD's own layout, as the hub has them."""
    for paragraph in article["paragraphs"]:
        context = paragraph["context"]
        if not isinstance(context, str):
            raise TypeError
        for asked in paragraph["qas"]:
            answers = asked.get("answers") or []
            yield {
                "id": asked.get("id"),
                "title": article.get("title"),
                "context": context,
                "question": asked["question"],
                "answers": {name: [one[name] for one in answers] for name in ("text", "answer_start")},
            }


def _json(where: str, raw: bytes) -> Any:
    try:
        found = json.loads(raw.decode())  # json's own guess of the encoding would hide bad UTF-8
        if b"\\u" in raw:
            json.dumps(found, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except UnicodeDecodeError:
        raise DataError(f"{where} is not UTF-8; convert the file") from None
    except UnicodeEncodeError:
        raise DataError(f"{where} holds half of a surrogate pair; write the character whole") from None
    except (ValueError, RecursionError) as wrong:
        raise DataError(f"{where} is no JSON ({one_line(wrong)}); write one object a line") from None
    return found


def _is_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return True


def _object(where: str, found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise DataError(f'{where} is no JSON object; write one object a line, e.g. {{"text": "…"}}')
    return found


# ---------------------------------------------------------------- separated values


def _reader(path: Path, text: str) -> Any:
    """The rows of a csv or tsv. Of a csv, the separator is the one that makes most columns of the header."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # documents are longer than the 128 KiB it allows
    if kind_of(path.name)[0] == ".tsv":
        return csv.reader(io.StringIO(text, newline=""), delimiter="\t", quoting=csv.QUOTE_NONE)
    header = next((line for line in io.StringIO(text) if line.strip()), "")

    def columns(separator: str) -> int:
        try:
            return len(next(csv.reader([header], delimiter=separator, strict=True), ()))
        except csv.Error:
            return 0

    separator = max(",;\t|", key=columns)  # of equals the first
    return csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)


def _separated(asked: _Asked, path: Path) -> Rows:
    with _opened(path) as stream:
        raw = stream.read().removeprefix(_BOM)
    try:
        reader = _reader(path, raw.decode())
    except UnicodeDecodeError as wrong:
        line = raw[: wrong.start].count(b"\n") + 1
        raise DataError(f"{asked.where}:{line} is not UTF-8; convert the file") from None
    header: list[str] = []
    numbers, rows = [], []
    start = 1
    try:
        for row in reader:
            number, start = start, reader.line_num + 1
            if not row:
                continue
            if not header:
                header = row
                continue
            if len(row) != len(header):
                raise DataError(
                    f"{asked.where}:{number} has {len(row)} columns where the header has {len(header)}; correct the row"
                )
            numbers.append(number)
            rows.append(row)
    except csv.Error as wrong:
        raise DataError(f"{asked.where}:{start} is malformed ({wrong}); correct the row") from None
    if not header:
        raise DataError(f"{asked.where} is empty; write a header line and rows")
    chosen = asked.chosen(header)
    at = {name: header.index(one) for name, one in chosen.items()}
    return asked.rows(numbers, {name: [row[place] for row in rows] for name, place in at.items()})


# ---------------------------------------------------------------- CoNLL's columns

CONLL = ("tokens", "tags")
_TAG = re.compile(r"O|[BI]-\S+")
Line = tuple[int, list[str]]  # its number, its columns


def _is_conll(path: Path) -> bool:
    """By its name; or, of a tsv, because its first line has a tag and so is no header."""
    kind, _ = kind_of(path.name)
    if kind == ".tsv":
        _, first = next(lines(path), (0, b""))
        return _has_tag(_fields(first.decode(errors="replace")))
    return kind in COLUMNS


def _fields(line: str) -> list[str]:
    return [one.strip() for one in line.split("\t")] if "\t" in line else line.split()


def _has_tag(fields: list[str]) -> bool:
    return any(_TAG.fullmatch(one) for one in fields[1:])


def _conll_rows(asked: _Asked, path: Path) -> Rows:
    """A row for each sentence. The tags are those of the last column that holds nothing else."""
    sentences = list(_sentences(asked.where, path))
    every = [line for sentence in sentences for line in sentence]
    if not every:
        raise DataError(f"{asked.where} is empty; put rows into it")
    width = len(every[0][1])
    for number, fields in every:
        where = f"{asked.where}:{number}"
        if not _has_tag(fields):
            raise DataError(
                f"{where} is not a word and its tag (O, B-PER, I-PER, …), as a {kind_of(path.name)[0]} file is read; "
                f"correct it, or write the data as {' '.join(KINDS)}"
            )
        if len(fields) != width:
            raise DataError(
                f"{where} has {counted(len(fields), 'column')} where others have {width}; correct the row"
            )
    tags = [at for at in range(1, width) if all(_TAG.fullmatch(fields[at]) for _, fields in every)]
    if not tags:
        raise DataError(f"{asked.where} has no column of tags (O, B-PER, I-PER, …) only; correct it")
    numbered = width > 2 and all(
        [fields[0] for _, fields in one] == [str(place + 1) for place in range(len(one))] for one in sentences
    )
    columns = {
        "tokens": [[fields[numbered] for _, fields in one] for one in sentences],
        "tags": [_iob2([fields[tags[-1]] for _, fields in one]) for one in sentences],
    }
    chosen = asked.chosen(CONLL)
    return asked.rows([one[0][0] for one in sentences], {name: columns[at] for name, at in chosen.items()})


def _sentences(where: str, path: Path) -> Iterator[list[Line]]:
    """The lines of each sentence, without comments and marks of documents."""
    sentence: list[Line] = []
    last, ended = 0, False
    for number, line in lines(path):
        ended, last = ended or number > last + 1, number  # blank lines have numbers too
        try:
            fields = _fields(line.decode().rstrip("\r"))
        except UnicodeDecodeError:
            raise DataError(f"{where}:{number} is not UTF-8; convert the file") from None
        if fields[0] == "-DOCSTART-" or (line.startswith(b"#") and not _has_tag(fields)):
            continue
        if ended and sentence:
            yield sentence
            sentence = []
        sentence.append((number, fields))
        ended = False
    if sentence:
        yield sentence


def _iob2(tags: list[str]) -> list[str]:
    """Tags in which every entity begins with B-; in IOB1, as CoNLL-2003 has it, most begin with I-."""
    before = ["O", *tags[:-1]]
    return [
        f"B{tag[1:]}" if tag[0] == "I" and old[2:] != tag[2:] else tag
        for old, tag in zip(before, tags, strict=True)
    ]
