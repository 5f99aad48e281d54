"""Documents: every format is read in order from any block on, and no record is lost without being counted."""

import gzip
import io
import json

import pyarrow
import pytest
from pyarrow import parquet

from biphase.data import documents
from biphase.data.corpus import resolve
from biphase.data.documents import FilePosition, Tally, blocks, parse
from biphase.errors import DataError
from biphase.specs import BPE, Corpus

TEXTS = [f"document {number} " + "word " * (number % 40) for number in range(300)]


def zstd(data: bytes) -> bytes:
    return pyarrow.Codec("zstd").compress(data, asbytes=True)


def jsonl(texts) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def table(texts, separator) -> bytes:
    lines = [["id", "text"], *enumerate(texts)]
    return "".join(f"{number}{separator}{text}\n" for number, text in lines).encode()


def write(path, texts):
    data, name = jsonl(texts), path.name
    if ".csv" in name or ".tsv" in name:
        data = table(texts, "\t" if ".tsv" in name else ",")
    if name.endswith(".parquet"):
        parquet.write_table(pyarrow.table({"id": range(len(texts)), "text": texts}), path, row_group_size=70)
    elif name.endswith(".zst"):
        path.write_bytes(zstd(data[:1000]) + zstd(data[1000:]))  # two frames, as appending makes
    else:
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)


def read(source, start=FilePosition(), **fields):  # noqa: B008
    corpus, tally = Corpus("mine", str(source), BPE(300), **fields), Tally()
    read = list(blocks(corpus, resolve(corpus).train, start))
    return [text for block in read for text, _ in parse(block, corpus.text, tally)], tally, read


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "csv", "tsv.zst"])
def test_every_format_gives_every_document_in_order_from_any_block_on(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK_BYTES", 2000)  # many blocks
    write(tmp_path / f"a.{suffix}", TEXTS)
    write(tmp_path / f"b.{suffix}", TEXTS[:50])
    everything, tally, read_blocks = read(tmp_path)
    assert everything == TEXTS + TEXTS[:50]
    assert (tally.records, tally.bad) == (350, 0)
    assert len(read_blocks) > 5
    assert read_blocks[-1].read == sum(path.stat().st_size for path in tmp_path.iterdir())
    done = 0
    for block in read_blocks:
        done += len(list(parse(block, "text", Tally())))
        assert read(tmp_path, block.after)[0] == everything[done:]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', "malformed JSON"),
        (b"[" * 100_000, "malformed JSON"),
        (b'["text"]', "not a JSON object"),
        (b'{"body": "a"}', "no field 'text'"),
        (b'{"text": null}', "field 'text' is not text"),
        (b'{"text": 0}', "field 'text' is not text"),
        (b'{"text": "\xff"}', "invalid UTF-8"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b'{"text": ""}', "empty text"),
        (b'{"text": " \\n"}', "empty text"),
    ],
)
def test_a_bad_line_is_skipped_and_counted_with_its_line_number(tmp_path, line, reason):
    lines = (b"", b'{"text": "good"}', b" \t\r", line, b"", b'{"text": "also good"}', b"", b"")
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    texts, tally, _ = read(tmp_path)
    assert texts == ["good", "also good"]
    assert (tally.records, tally.skipped, tally.first) == (3, {reason: 1}, {reason: "a.jsonl:4"})


def careless_parquet():
    column = pyarrow.array([b"good", None, b"\xff", b"", b"end"], pyarrow.binary())
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 5, column.buffers())  # as careless writers do
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": broken}), file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "texts", "bad"),
    [
        ("a.txt", "first", ["first"], {}),
        ("a.txt", "\ufeffone\ntwo\n", ["one\ntwo\n"], {}),
        ("a.jsonl", '\ufeff{"text": "a"}\r\n{"text": "b"}', ["a", "b"], {}),
        ("a.csv", 'n,text\r\n1,"two\nlines, ""quoted"""\r\n\r\n2,b\r\n', ['two\nlines, "quoted"', "b"], {}),
        ("a.csv", "\ufeff\nn;text;x\n1;a, b;\n2;c;\n", ["a, b", "c"], {}),
        ("a.tsv", 'text\tn\na "stray quote\t1\nb, c\t2\n', ['a "stray quote', "b, c"], {}),
        ("a.csv", b"text,n\n\xff,1\ngood,2\n,3\n", ["good"], {"invalid UTF-8": "a.csv", "empty text": "a.csv:3"}),
        ("a.csv", "n,text\n1,a\n2\n3,b", ["a", "b"], {"no text": "a.csv:2"}),
        ("a.parquet", careless_parquet(), ["good", "end"],
         {"no text": "a.parquet:2", "invalid UTF-8": "a.parquet:3", "empty text": "a.parquet:4"}),
        *((name, "", [], {"empty file": name}) for name in ("a.jsonl", "a.jsonl.zst", "a.csv")),
        ("a.txt", "", [], {"empty text": "a.txt"}),
    ],
)  # fmt: skip
def test_files_are_read_as_people_write_them_and_what_is_no_document_is_counted(
    tmp_path, name, content, texts, bad
):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    found, tally, _ = read(tmp_path)
    assert (found, tally.first) == (texts, bad)
    assert tally.skipped == dict.fromkeys(bad, 1)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.zst", zstd(jsonl(TEXTS))[:-9]),
        ("a.jsonl.zst", b"this is not zstd"),
        ("a.jsonl.gz", gzip.compress(jsonl(TEXTS))[:-30]),
        ("a.csv", b'text\n"the quote is never closed\n'),
        ("a.parquet", b"PAR1 not really"),
        ("a.parquet", b""),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        read(tmp_path)


@pytest.mark.parametrize(
    ("text", "facts"), [("text", ["'text'", "'texts'"]), ("id", ["'id'", "int64", "a.parquet"])]
)
def test_a_missing_or_wrong_column_is_an_error_with_the_other_names(tmp_path, text, facts):
    parquet.write_table(pyarrow.table({"texts": ["a"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError) as caught:
        read(tmp_path, text=text)
    assert all(fact in str(caught.value) for fact in facts)


def test_more_than_ten_bad_records_and_more_than_one_percent_are_an_error():
    tally = Tally(records=1000, skipped={"empty text": 10}, first={"empty text": "a:1"})
    tally.judge("mine")  # exactly 1%
    tally.add(Tally(records=1, skipped={"no text": 1}, first={"no text": "b:7"}))
    with pytest.raises(DataError) as caught:
        tally.judge("mine")
    for fact in ("11 of", "1001", "10 × empty text, first a:1", "1 × no text, first b:7"):
        assert fact in str(caught.value)
    Tally(records=10, skipped={"empty text": 10}, first={"empty text": "a:1"}).judge("mine")  # few
