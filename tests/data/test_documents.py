"""Reading: every format, every kind of bad record, every place to go on from."""

import gzip
import json

import pyarrow
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import parquet

from biphase.data import corpus as corpus_module
from biphase.data import documents
from biphase.data.corpus import resolve
from biphase.data.documents import FilePosition, Tally
from biphase.errors import DataError
from biphase.specs import BPE, Corpus

TEXTS = [f"document {number} " + "word " * (number % 40) for number in range(300)]


def zstd(data: bytes) -> bytes:
    return pyarrow.Codec("zstd").compress(data, asbytes=True)


def jsonl(texts) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def write(path, texts):
    name = path.name
    if name.endswith(".parquet"):
        parquet.write_table(pyarrow.table({"id": range(len(texts)), "text": texts}), path, row_group_size=70)
    elif name.endswith(".zst"):
        data = jsonl(texts)
        path.write_bytes(zstd(data[:1000]) + zstd(data[1000:]))  # two frames, as appending makes
    else:
        path.write_bytes(gzip.compress(jsonl(texts)) if name.endswith(".gz") else jsonl(texts))


def corpus(source, **fields):
    return Corpus("mine", str(source), BPE(300), **fields)


def read(source, start=FilePosition(), **fields):  # noqa: B008
    mine = corpus(source, **fields)
    tally = Tally()
    files = corpus_module.local(resolve(mine).train)
    blocks = list(documents.blocks(mine, files, start))
    return [text for block in blocks for text, _ in documents.parse(block, mine.text, tally)], tally, blocks


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_every_format_gives_every_document_in_order(tmp_path, name, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK_BYTES", 2000)  # many blocks
    write(tmp_path / name, TEXTS)
    texts, tally, blocks = read(tmp_path / name)
    assert texts == TEXTS
    assert (tally.records, tally.bad) == (300, 0)
    assert len(blocks) > 3
    assert blocks[-1].read == (tmp_path / name).stat().st_size


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.parquet"])
def test_reading_goes_on_from_any_block(tmp_path, name, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK_BYTES", 2000)
    folder = tmp_path / "corpus"
    folder.mkdir()
    write(folder / name, TEXTS)
    write(folder / f"b{name[1:]}", TEXTS[:50])
    everything, _, blocks = read(folder)
    assert everything == TEXTS + TEXTS[:50]
    done = 0
    for block in blocks:
        done += len(list(documents.parse(block, "text", Tally())))
        assert read(folder, block.after)[0] == everything[done:]


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfone\ntwo\n")
    (tmp_path / "a.txt").write_text("first")
    assert read(tmp_path)[0] == ["first", "one\ntwo\n"]


def test_a_last_line_without_newline_and_windows_line_ends_are_lines(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}')
    assert read(tmp_path)[0] == ["a", "b"]


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
def test_a_bad_line_is_skipped_and_counted_with_its_place(tmp_path, line, reason):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "also good"}\n')
    texts, tally, _ = read(tmp_path)
    assert texts == ["good", "also good"]
    assert (tally.records, tally.skipped, tally.first) == (3, {reason: 1}, {reason: "a.jsonl:2"})


def test_blank_lines_are_no_records_but_count_as_lines(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\n{"text": "a"}\n\n \t\r\nbad\n\n{"text": "b"}\n\n')
    texts, tally, _ = read(tmp_path)
    assert texts == ["a", "b"]
    assert (tally.records, tally.skipped) == (3, {"malformed JSON": 1})
    assert tally.first == {"malformed JSON": "a.jsonl:5"}


def test_bad_rows_of_parquet_are_skipped_and_counted(tmp_path):
    column = pyarrow.array([b"good", None, b"\xff", b"", b"end"], pyarrow.binary())
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 5, column.buffers())  # as careless writers do
    parquet.write_table(pyarrow.table({"text": broken}), tmp_path / "a.parquet")
    texts, tally, _ = read(tmp_path)
    assert texts == ["good", "end"]
    assert tally.skipped == {"no text": 1, "invalid UTF-8": 1, "empty text": 1}
    assert tally.first["invalid UTF-8"] == "a.parquet:3"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.zst"])
def test_an_empty_file_is_counted(tmp_path, name):
    (tmp_path / name).touch()
    assert read(tmp_path)[:1] == ([],)
    assert read(tmp_path)[1].bad == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.zst", zstd(jsonl(TEXTS))[:-9]),
        ("a.jsonl.zst", b"this is not zstd"),
        ("a.jsonl.gz", gzip.compress(jsonl(TEXTS))[:-30]),
        ("a.parquet", b"PAR1 not really"),
        ("a.parquet", b""),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name} cannot be read"):
        read(tmp_path)


def test_a_missing_or_wrong_column_is_an_error_with_the_nearest_name(tmp_path):
    parquet.write_table(pyarrow.table({"texts": ["a"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="no column 'text'; did you mean 'texts'"):
        read(tmp_path)
    with pytest.raises(DataError, match=r"'id' of a.parquet is int64, not text"):
        read(tmp_path, text="id")


def test_too_many_bad_records_are_an_error_that_counts_them():
    tally = Tally(records=1000, skipped={"empty text": 10}, first={"empty text": "a:1"})
    tally.judge("mine")  # exactly 1%
    tally.add(Tally(records=1, skipped={"no text": 1}, first={"no text": "b:7"}))
    with pytest.raises(
        DataError, match=r"11 of the first 1001 records are bad \(10 × empty text, first a:1; 1 × no"
    ):
        tally.judge("mine")
    Tally(records=10, skipped={"empty text": 10}, first={"empty text": "a:1"}).judge("mine")  # few


def test_a_hub_corpus_is_streamed_in_the_order_of_its_files(tmp_path):
    hub = MemoryFileSystem()
    root = "/datasets/owner/name@abc/data"
    for number in (2, 0, 1):
        write(tmp_path / f"{number}.parquet", TEXTS[number * 100 : number * 100 + 100])
        hub.pipe_file(f"{root}/{number}.parquet", (tmp_path / f"{number}.parquet").read_bytes())
    hub.pipe_file("/datasets/owner/name@abc/README.md", b"about")
    mine = corpus("hf://owner/name@abc/data/*.parquet", heldout="data/1.parquet")
    train, heldout = corpus_module.on_hub(mine, hub)
    assert [file.name for file in train] == ["data/0.parquet", "data/2.parquet"]
    assert [file.name for file in heldout] == ["data/1.parquet"]
    texts = [
        text for block in documents.blocks(mine, train) for text, _ in documents.parse(block, "text", Tally())
    ]
    assert texts == TEXTS[:100] + TEXTS[200:]
    with pytest.raises(DataError, match=r"no file of .* matches"):
        corpus_module.on_hub(corpus("hf://owner/name@abc/other/*.parquet"), hub)
    with pytest.raises(DataError, match=r"none of .txt"):
        corpus_module.on_hub(corpus("hf://owner/name@abc/*"), hub)


def test_the_hub_and_a_copy_of_it_give_the_same_files(tmp_path):
    hub, copy = MemoryFileSystem(), tmp_path / "copy"
    for name in (
        "same/a.txt",
        "same/b.txt",
        "same/.hidden",
        "apart/c.txt",
        "apart/deep/d.txt",
        "apart/.cache/e.txt",
    ):
        hub.pipe_file(f"/datasets/owner/same@abc/{name}", name.encode())
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text(name)
    for source, heldout in (
        ("same/*", "apart"),
        ("same/*", "apart/"),
        ("**/*.txt", "apart/c.txt"),
        ("same", ""),
        ("apart/.cache/*.txt", ""),
        ("same/*.txt", "apart/.cache/e.txt"),
        ("same/a.txt", "same/b.txt"),
        ("*/*.txt", "same/*"),
    ):
        mine = corpus(f"hf://owner/same@abc/{source}", heldout=heldout)
        found = resolve(mine, copy)
        streamed = [[file.name for file in part] for part in corpus_module.on_hub(mine, hub)]
        assert streamed == [[file.name for file in part] for part in (found.train, found.heldout)]
    with pytest.raises(DataError, match="are held out; name others"):
        corpus_module.on_hub(corpus("hf://owner/same@abc/same/*", heldout="same"), hub)


def test_a_hub_that_cannot_be_reached_says_how_to_do_without():
    class Offline(MemoryFileSystem):
        def glob(self, *_, **__):
            raise ConnectionError("no route")

    with pytest.raises(DataError) as caught:
        corpus_module.on_hub(corpus("hf://owner/name@abc/*.parquet", heldout="held"), Offline())
    assert "no route" in str(caught.value)
    assert "--include '*.parquet' --include held --include 'held/*' --local-dir FOLDER" in str(caught.value)
    assert "biphase tokenize 'hf://owner/name@abc/*.parquet' --tokenizer bpe:300" in str(caught.value)
    assert str(caught.value).endswith("--from FOLDER")


def test_a_network_that_fails_amid_a_file_is_not_taken_for_a_bad_file():
    class Failing(MemoryFileSystem):
        def open(self, path, *_, **__):
            raise ConnectionError("reset by peer")

    MemoryFileSystem().pipe_file("/datasets/owner/fails@abc/a.jsonl", b"{}")
    mine = corpus("hf://owner/fails@abc/a.jsonl")
    train, _ = corpus_module.on_hub(mine, Failing())
    with pytest.raises(DataError, match=r"reset by peer\); type the command again: it goes on where it was"):
        list(documents.blocks(mine, train))
