"""Files of a task → rows: only the columns that are asked for, each row with its place, for messages.

    parquet          a row is a row; its place is its number
    jsonl, json      a row is a line that holds an object
    csv              a header line, commas, quotes as usual
    tsv              a header line, tabs, no quotes: GLUE's files have stray ones

Text files may be compressed (.gz, .zst); their places are line numbers. A column may be asked for by alternatives,
"tokens|words". Files are read in the order they are given, in pieces, so that of a large corpus only the rows that
are wanted need memory.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from biphase.errors import DataError, nearest, one_line
from biphase.tasks.places import kind_of

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
            if kind == ".parquet":
                yield from _parquet(asked, path, only)
            elif kind in (".jsonl", ".json"):
                for rows in _json_lines(asked, path):
                    yield rows.taken(only)
            else:
                for rows in _separated(asked, path, "," if kind == ".csv" else "\t"):
                    yield rows.taken(only)
        except DataError:
            raise
        except Exception as wrong:  # pyarrow, csv and the file system each have their own
            raise DataError(
                f"{whose}: {path} cannot be read ({one_line(wrong)}); put a sound copy in its place"
            ) from wrong


def column_names(whose: str, path: Path) -> tuple[str, ...]:
    """The columns of a file; of JSON lines, those of the first."""
    kind, _ = kind_of(path.name)
    try:
        if kind == ".parquet":
            from pyarrow import parquet

            return tuple(parquet.read_schema(path).names)
        for number, line in lines(path):
            if kind in (".jsonl", ".json"):
                return tuple(_object(f"{whose}: {path.name}:{number}", line))
            return tuple(next(_reader(line.decode(), "," if kind == ".csv" else "\t")))
    except DataError:
        raise
    except Exception as wrong:
        raise DataError(
            f"{whose}: {path} cannot be read ({one_line(wrong)}); put a sound copy in its place"
        ) from wrong
    raise DataError(f"{whose}: {path} is empty; put rows into it")


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


def _parquet(asked: _Asked, path: Path, only: Only | None) -> Iterator[Rows]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as table:
        chosen = asked.chosen(table.schema_arrow.names)
        first = 1
        for batch in table.iter_batches(batch_size=PIECE_ROWS, columns=sorted(set(chosen.values()))):
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


def _json_lines(asked: _Asked, path: Path) -> Iterator[Rows]:
    every = (*asked.wanted, *asked.optional)
    numbers: list[int] = []
    columns: dict[str, list[Any]] = {name: [] for name in every}
    chosen: dict[str, str] = {}
    size = 0
    for number, line in lines(path):
        where = f"{asked.where}:{number}"
        row = _object(where, line)
        if not all(name in row for name in chosen.values()) or len(chosen) < len(every):
            chosen = asked.chosen(row, where)  # rows may differ in what they leave out
        numbers.append(number)
        for name in every:
            columns[name].append(row[chosen[name]] if name in chosen else None)
        size += len(line)
        if size >= PIECE_BYTES:
            yield asked.rows(numbers, columns)
            numbers, columns, size = [], {name: [] for name in every}, 0
    yield asked.rows(numbers, columns)


def _object(where: str, line: bytes) -> dict[str, Any]:
    if line.lstrip().startswith(b"["):
        raise DataError(
            f"{where}: one object a line is expected, this file holds an array; write it as JSON lines"
        )
    try:
        found = json.loads(line.decode())  # json's own guess of the encoding would hide bad UTF-8
        if b"\\u" in line:
            json.dumps(found, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except UnicodeDecodeError:
        raise DataError(f"{where} is not UTF-8; convert the file") from None
    except UnicodeEncodeError:
        raise DataError(f"{where} holds half of a surrogate pair; write the character whole") from None
    except (ValueError, RecursionError) as wrong:
        raise DataError(f"{where} is no JSON ({one_line(wrong)}); write one object a line") from None
    if not isinstance(found, dict):
        raise DataError(f'{where} is no JSON object; write one object a line, e.g. {{"text": "…"}}')
    return found


def _reader(text: str, separator: str) -> Any:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # documents are longer than the 128 KiB it allows
    if separator == "\t":
        return csv.reader(io.StringIO(text, newline=""), delimiter="\t", quoting=csv.QUOTE_NONE)
    return csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)


def _separated(asked: _Asked, path: Path, separator: str) -> Iterator[Rows]:
    with _opened(path) as stream:
        raw = stream.read().removeprefix(_BOM)
    try:
        reader = _reader(raw.decode(), separator)
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
    yield asked.rows(numbers, {name: [row[place] for row in rows] for name, place in at.items()})
