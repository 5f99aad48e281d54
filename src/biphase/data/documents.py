"""The documents of a corpus's files.

`blocks` and `parse` give them in a fixed order:

    txt              one file is one document
    jsonl(.gz|.zst)  one line is one document, its text in the field that the corpus names
    csv, tsv         one row is one document, its text in the column that the corpus names, which the first row has;
                     separators and quotes as `separated` says; also .gz and .zst
    parquet          one row is one document, its text in the column that the corpus names

Errors at once: an unreadable file, an unknown file type, a missing column, no files, no documents. Skipped and counted,
with the position of the first: a line that is not a JSON object, a missing or non-text field, invalid Unicode, empty
text, an empty file. If more than 10 records and more than 1% are skipped, counted over all records so far at the end of
each file, that is an error too. A blank line is not a record. `blocks` reads files in order into blocks of raw records,
and `parse` turns a block into documents. They are separate so that other processes can parse and encode blocks and only
raw bytes are sent to them.
"""

from __future__ import annotations

import csv
import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice
from pathlib import Path, PurePosixPath
from typing import IO, Any

from biphase.data.corpus import SEPARATED, File, refusal
from biphase.errors import DataError, nearest
from biphase.specs import Corpus

BLOCK_BYTES = 2**21
_CODECS = {".zst": "zstd", ".gz": "gzip"}
_BOM = b"\xef\xbb\xbf"

Records = bytes | list[bytes | None]  # JSON lines, or texts


@dataclass(frozen=True)
class FilePosition:
    """A position in a list of files: all records before it have been read."""

    file: int = 0
    record: int = 0


@dataclass(frozen=True)
class RecordBlock:
    """Raw records of one file."""

    name: str
    first: int  # index of its first record in the file, from 0
    payload: Records
    after: FilePosition  # where the next block begins
    read: int  # bytes of all files read so far, in their size on disk

    @property
    def ends_file(self) -> bool:
        return self.after.record == 0


@dataclass
class Tally:
    """Counts of the records read and skipped, by reason, with the position of the first one for each reason."""

    records: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def skip(self, reason: str, where: str, count: int = 1) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + count
        self.first.setdefault(reason, where)

    def add(self, other: Tally) -> None:
        self.records += other.records
        for reason, count in other.skipped.items():
            self.skip(reason, other.first[reason], count)

    @property
    def bad(self) -> int:
        return sum(self.skipped.values())

    def judge(self, corpus: str) -> None:
        """Raise DataError if more than 10 records and more than 1% were skipped."""
        if self.bad > 10 and self.bad * 100 > self.records:
            raise DataError(
                f"corpus {corpus!r}: {self.bad} of the first {self.records} records are bad ({self.describe()}); "
                "correct the files, or the text field of the corpus"
            )

    def describe(self) -> str:
        return "; ".join(f"{count} × {why}, first {self.first[why]}" for why, count in self.skipped.items())


def texts_of(corpus: Corpus, files: Sequence[File]) -> Iterator[str]:
    """Yield the text of every document."""
    for block in blocks(corpus, files):
        yield from (text for text, _ in parse(block, corpus.text, Tally()))


def blocks(
    corpus: Corpus,
    files: Sequence[File],
    start: FilePosition = FilePosition(),  # noqa: B008
) -> Iterator[RecordBlock]:
    """Yield all records of `files` from `start` on, in blocks of about BLOCK_BYTES (2 MB)."""
    read = sum(file.size for file in files[: start.file])
    for number in range(start.file, len(files)):
        file = files[number]
        first = start.record if number == start.file else 0
        try:
            with file.open() as raw:
                if file.name.lower().endswith(".parquet"):
                    chunks = _parquet(corpus, file, raw, first)
                elif file.name.lower().endswith(SEPARATED):
                    chunks = _separated(corpus, file, raw, first)
                else:
                    chunks = _lines(file, raw, first)
                chunk = next(chunks, (first, []))  # a file without records is one empty block
                while chunk:
                    (first, payload), chunk = chunk, next(chunks, None)
                    count = payload.count(b"\n") if isinstance(payload, bytes) else len(payload)
                    after = FilePosition(number, first + count) if chunk else FilePosition(number + 1)
                    here = min(raw.tell(), file.size) if chunk else file.size
                    yield RecordBlock(file.name, first, payload, after, read + here)
        except DataError:
            raise
        except Exception as wrong:  # pyarrow, fsspec and the network each raise their own types
            raise refusal(corpus, f"{file.name} cannot be read: {file.explained(wrong)}") from wrong
        read += file.size


def _lines(file: File, raw: IO[bytes], first: int) -> Iterator[tuple[int, Records]]:
    """Yield JSON lines in chunks that end at a line break, from line `first` on; or a .txt file as one record."""
    if file.name.lower().endswith(".txt"):
        yield 0, [raw.read().removeprefix(_BOM)]
        return
    stream = _unpacked(file, raw)
    number, rest = 0, [stream.read(BLOCK_BYTES).removeprefix(_BOM)]
    while rest[-1]:
        cut = rest[-1].rfind(b"\n") + 1
        if cut:
            lines = b"".join((*rest[:-1], rest[-1][:cut]))
            rest = [rest[-1][cut:]]
            count = lines.count(b"\n")
            skip = min(max(first - number, 0), count)
            if skip < count:
                yield number + skip, lines if not skip else lines.split(b"\n", skip)[skip]
            number += count
        rest.append(stream.read(BLOCK_BYTES))
    last = b"".join(rest)
    if last and number >= first:  # the last line may lack its newline
        yield number, last


def _unpacked(file: File, raw: IO[bytes]) -> Any:
    codec = _CODECS.get(Path(file.name.lower()).suffix)
    if not codec:
        return raw
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), codec)


def separated(stream: Iterator[str], *, tsv: bool) -> Any:
    """Return a csv reader of a file's lines.

    A tsv has tabs and no quotes, since stray ones are common. A csv has the usual quotes, and of `,;\t|` the separator
    that gives its header the most columns.
    """
    csv.field_size_limit(2**31 - 1)  # documents are longer than the default limit of 128 KiB
    if tsv:
        return csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE)
    begin: list[str] = []
    for line in stream:
        begin.append(line)
        if line.strip():
            break

    def columns(separator: str) -> int:
        try:
            return len(next(csv.reader(begin[-1:], delimiter=separator, strict=True), ()))
        except csv.Error:
            return 0

    separator = max(",;\t|", key=columns)  # the first of equals
    return csv.reader(chain(begin, stream), delimiter=separator, strict=True)


def _text_lines(stream: Any) -> Iterator[str]:
    """Yield lines of text; invalid UTF-8 is passed through, so that `parse` detects it per record."""
    rest = stream.read(len(_BOM)).removeprefix(_BOM)
    for chunk in chain(
        iter(lambda: stream.read(BLOCK_BYTES), b""), [b"\n"]
    ):  # the last line may lack its newline
        *lines, rest = (rest + chunk).split(b"\n")
        yield from ((line + b"\n").decode(errors="surrogateescape") for line in lines)


def _separated(corpus: Corpus, file: File, raw: IO[bytes], first: int) -> Iterator[tuple[int, Records]]:
    """Yield rows of the text column of a csv or tsv file as bytes; cells may hold line breaks, blank lines are no rows."""
    stream = _unpacked(file, raw)  # freed with this frame: pyarrow's closes `raw`
    rows = filter(
        None, separated(_text_lines(stream), tsv=".tsv" in PurePosixPath(file.name.lower()).suffixes)
    )
    if not (header := next(rows, None)):
        return
    column = _column(corpus, file, header)
    cells = (row[column].encode(errors="surrogateescape") if column < len(row) else None for row in rows)
    yield from _grouped(islice(cells, first, None), first)


def _grouped(records: Iterable[bytes | None], start: int) -> Iterator[tuple[int, Records]]:
    """Yield records, of which the first has the number `start`, in groups of about BLOCK_BYTES."""
    held: list[bytes | None] = []
    size = 0
    for number, record in enumerate(records, start + 1):
        held.append(record)
        size += len(record or b"")
        if size >= BLOCK_BYTES:
            yield start, held
            held, size, start = [], 0, number
    if held:
        yield start, held


def _column(corpus: Corpus, file: File, names: list[str]) -> int:
    """Return which column holds the text; raise DataError if none has the name that the corpus gives."""
    if corpus.text not in names:
        hint = nearest(corpus.text, names)
        raise refusal(corpus, f"{file.name} has no column {corpus.text!r}; {hint}")
    return names.index(corpus.text)


def _parquet(corpus: Corpus, file: File, raw: IO[bytes], first: int) -> Iterator[tuple[int, Records]]:
    """Yield rows of the text column as bytes, so that `parse` detects invalid UTF-8 per record."""
    import pyarrow
    from pyarrow import parquet, types

    table = parquet.ParquetFile(raw)
    schema = table.schema_arrow
    _column(corpus, file, schema.names)
    kind = schema.field(corpus.text).type
    if not (types.is_string(kind) or types.is_large_string(kind)):
        why = f"column {corpus.text!r} of {file.name} is {kind}, not text"
        raise refusal(corpus, f"{why}; name another: text='…', one of {', '.join(schema.names)}")
    groups = range(table.num_row_groups)
    ends = [0, *accumulate(table.metadata.row_group(group).num_rows for group in groups)]
    whole = bisect_right(ends, first) - 1  # groups that were read before
    values = (
        value
        for group in groups[whole:]
        for batch in table.iter_batches(batch_size=256, row_groups=[group], columns=[corpus.text])
        for value in batch.column(0).cast(pyarrow.large_binary()).to_pylist()
    )
    yield from _grouped(islice(values, first - ends[whole], None), first)


def parse(block: RecordBlock, text: str, tally: Tally) -> Iterator[tuple[str, bytes]]:
    """Yield the documents of a block, each as text and as UTF-8 bytes; count skipped records in `tally`.

    `text` is the field of a JSON line that holds the document.
    """
    if block.ends_file and not block.payload and block.first == 0:
        tally.records += 1
        tally.skip("empty file", block.name)
        return
    lines = isinstance(block.payload, bytes)
    records = block.payload.split(b"\n") if isinstance(block.payload, bytes) else block.payload
    for number, record in enumerate(records, block.first + 1):
        if lines and (not record or record.isspace()):
            continue
        tally.records += 1
        try:
            document = _document(record, text if lines else None)
        except _Skipped as reason:
            tally.skip(str(reason), f"{block.name}:{number}" if lines or number > 1 else block.name)
        else:
            yield document


class _Skipped(Exception):
    """A record is no document; the message is the reason."""


def _document(record: bytes | None, field: str | None) -> tuple[str, bytes]:
    """Return a record's text and its UTF-8 bytes; `field` is that of a JSON line, None if the record is the text."""
    if record is None:
        raise _Skipped("no text")
    try:
        text = record.decode()  # before json.loads, which would guess the encoding and hide bad UTF-8
        if field is not None:
            value = json.loads(text)
            if not isinstance(value, dict):
                raise _Skipped("not a JSON object")
            if field not in value:
                raise _Skipped(f"no field {field!r}")
            text = value[field]
            if not isinstance(text, str):
                raise _Skipped(f"field {field!r} is not text")
        if not text or text.isspace():
            raise _Skipped("empty text")
        return text, record if field is None else text.encode()
    except UnicodeDecodeError:
        raise _Skipped("invalid UTF-8") from None
    except UnicodeEncodeError:
        raise _Skipped("half of a surrogate pair") from None
    except (ValueError, RecursionError):
        raise _Skipped("malformed JSON") from None


def text_hash(text: bytes) -> int:
    """Return the 64-bit hash that decides whether a document is held out."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
