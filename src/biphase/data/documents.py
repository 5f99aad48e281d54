"""Reads the files of a corpus into documents, in a fixed order, counting every skipped record.

    txt              one file is one document
    jsonl(.gz|.zst)  one line is one document, its text in the field that the corpus names
    parquet          one row is one document, its text in the column that the corpus names

Errors at once: an unreadable file, an unknown file type, a missing column, no files, no documents. Skipped and counted,
with the position of the first: a line that is not a JSON object, a missing or non-text field, invalid Unicode, empty
text, an empty file. If more than 10 records and more than 1% are skipped, counted over all records so far at the end of
each file, that is an error too. A blank line is not a record.

`blocks` reads files in order into blocks of raw records, and `parse` turns a block into documents. They are separate so
that other processes can parse and encode blocks and only raw bytes are sent to them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from biphase.data.corpus import File
from biphase.errors import DataError, nearest, one_line
from biphase.specs import Corpus

BLOCK_BYTES = 2**21
_CODECS = {".zst": "zstd", ".gz": "gzip"}
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class FilePosition:
    """A position in a list of files: all records before it have been read."""

    file: int = 0
    record: int = 0


@dataclass(frozen=True)
class RecordBlock:
    """Raw records of one file: JSON lines as one bytes object, or a list of texts."""

    name: str
    first: int  # index of its first record in the file, from 0
    payload: bytes | list[bytes | None]  # JSON lines, or texts
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

    def skip(self, reason: str, where: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        self.first.setdefault(reason, where)

    def add(self, other: Tally) -> None:
        self.records += other.records
        for reason, count in other.skipped.items():
            self.skipped[reason] = self.skipped.get(reason, 0) + count
            self.first.setdefault(reason, other.first[reason])

    @property
    def bad(self) -> int:
        return sum(self.skipped.values())

    def judge(self, corpus: str) -> None:
        """Raise DataError if more than 10 records and more than 1% were skipped."""
        if self.bad > 10 and self.bad * 100 > self.records:
            raise DataError(
                f"corpus {corpus!r}: {self.bad} of the first {self.records} records are bad ({self.words()}); "
                "correct the files, or the text field of the corpus"
            )

    def words(self) -> str:
        return "; ".join(f"{count} × {why}, first {self.first[why]}" for why, count in self.skipped.items())


# ---------------------------------------------------------------- files → blocks


def blocks(corpus: Corpus, files: list[File], start: FilePosition = FilePosition()) -> Iterator[RecordBlock]:  # noqa: B008
    """Yield all records of `files` from `start` on, in blocks of about BLOCK_BYTES (2 MB)."""
    before = sum(file.size for file in files[: start.file])
    for number in range(start.file, len(files)):
        file = files[number]
        first = start.record if number == start.file else 0
        try:
            with file.open() as raw:
                for block in _records(corpus, file, raw, first):
                    last = block.after.record == 0
                    after = FilePosition(number + 1) if last else FilePosition(number, block.after.record)
                    yield replace(block, after=after, read=before + block.read)
        except DataError:
            raise
        except Exception as wrong:  # pyarrow, fsspec and the network each raise their own types
            raise DataError(
                f"corpus {corpus.name!r}: {file.name} cannot be read ({one_line(wrong)}); {file.remedy}"
            ) from wrong
        before += file.size


def _records(corpus: Corpus, file: File, raw: IO[bytes], first: int) -> Iterator[RecordBlock]:
    """Yield the blocks of one file; the last one has `after.record == 0`."""
    name = file.name.lower()
    if name.endswith(".parquet"):
        jobs = _parquet(corpus, file, raw, first)
    elif name.endswith(".txt"):
        jobs = _whole(raw)
    else:
        jobs = _lines(file, raw, first)
    held: RecordBlock | None = None
    for number, payload in jobs:
        if held:
            yield held
        count = payload.count(b"\n") if isinstance(payload, bytes) else len(payload)
        read = file.size if raw.closed else min(raw.tell(), file.size)
        held = RecordBlock(file.name, number, payload, FilePosition(0, number + count), read)
    held = held or RecordBlock(file.name, first, [], FilePosition(), file.size)  # a file without records
    yield replace(held, after=FilePosition(), read=file.size)


Piece = tuple[int, bytes | list[bytes | None]]


def _whole(raw: IO[bytes]) -> Iterator[Piece]:
    yield 0, [raw.read().removeprefix(_BOM)]


def _lines(file: File, raw: IO[bytes], first: int) -> Iterator[Piece]:
    """Yield JSON lines in pieces that end at a line break, skipping the first `first` lines."""
    codec = _CODECS.get(Path(file.name.lower()).suffix)
    stream: Any = raw
    if codec:
        import pyarrow

        stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), codec)
    number, rest = 0, [stream.read(BLOCK_BYTES).removeprefix(_BOM)]
    while rest[-1]:
        cut = rest[-1].rfind(b"\n") + 1
        if cut:
            whole = b"".join((*rest[:-1], rest[-1][:cut]))
            rest = [rest[-1][cut:]]
            count = whole.count(b"\n")
            skip = min(max(first - number, 0), count)
            if skip < count:
                yield number + skip, whole if not skip else whole.split(b"\n", skip)[skip]
            number += count
        rest.append(stream.read(BLOCK_BYTES))
    last = b"".join(rest)
    if last and number >= first:  # the last line may lack its newline
        yield number, last


def _parquet(corpus: Corpus, file: File, raw: IO[bytes], first: int) -> Iterator[Piece]:
    """Yield rows of the text column as bytes, so that `parse` detects invalid UTF-8 per record."""
    import pyarrow
    from pyarrow import parquet, types

    table = parquet.ParquetFile(raw)
    schema = table.schema_arrow
    if corpus.text not in schema.names:
        raise DataError(
            f"corpus {corpus.name!r}: {file.name} has no column {corpus.text!r}; {nearest(corpus.text, schema.names)}"
        )
    kind = schema.field(corpus.text).type
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise DataError(
            f"corpus {corpus.name!r}: column {corpus.text!r} of {file.name} is {kind}, not text; "
            f"name another: text='…', one of {', '.join(schema.names)}"
        )
    number = 0
    for group in range(table.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if number + rows <= first:
            number += rows
            continue
        held, size, start = [], 0, max(first, number)
        for batch in table.iter_batches(batch_size=256, row_groups=[group], columns=[corpus.text]):
            passed = min(max(first - number, 0), len(batch))
            column = batch.column(0).cast(pyarrow.large_binary()).slice(passed)
            number += len(batch)
            values = column.to_pylist()
            held += values
            size += sum(len(one) for one in values if one)
            if size >= BLOCK_BYTES:
                yield start, held
                held, size, start = [], 0, number
        if held:
            yield start, held


# ---------------------------------------------------------------- blocks → documents


def parse(block: RecordBlock, text: str, tally: Tally) -> Iterator[tuple[str, bytes]]:
    """Yield the documents of a block, each as text and as UTF-8 bytes; count skipped records in `tally`."""
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
        value, reason = _line(record, text) if lines else _text(record)
        if value is None:
            tally.skip(reason, f"{block.name}:{number}" if lines or number > 1 else block.name)
            continue
        yield value


Parsed = tuple[tuple[str, bytes] | None, str]


def _text(record: bytes | None) -> Parsed:
    if record is None:
        return None, "no text"
    try:
        text = record.decode()
    except UnicodeDecodeError:
        return None, "invalid UTF-8"
    return ((text, record), "") if text and not text.isspace() else (None, "empty text")


def _line(record: bytes | None, field: str) -> Parsed:
    try:
        found = json.loads((record or b"").decode())  # json would guess the encoding and hide bad UTF-8
    except UnicodeDecodeError:
        return None, "invalid UTF-8"
    except (ValueError, RecursionError):
        return None, "malformed JSON"
    if not isinstance(found, dict):
        return None, "not a JSON object"
    if field not in found:
        return None, f"no field {field!r}"
    text = found[field]
    if not isinstance(text, str):
        return None, f"field {field!r} is not text"
    if not text or text.isspace():
        return None, "empty text"
    try:
        return (text, text.encode()), ""
    except UnicodeEncodeError:
        return None, "half of a surrogate pair"


def text_hash(text: bytes) -> int:
    """Return the 64-bit hash that decides whether a document is held out."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
