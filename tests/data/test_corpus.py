"""A corpus: every spelling means its files, content decides the key, and no record is lost without being counted."""

import gzip
import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import parquet

from biphase.data import corpus as corpora
from biphase.data.corpus import Absent, FilePosition, Tally, blocks, on_hub, parse, resolve
from biphase.errors import DataError, SpecError
from biphase.keys import data_key
from biphase.records import encode
from biphase.specs import BPE, Corpus, Pretrained
from biphase.specs.sources import HubPlace
from biphase.store import Store, publish, write_json


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store")
    store.root.mkdir()
    return store


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "corpus"
    write_files(folder, "b.txt", "sub/a.jsonl", "sub/deep/c.txt")
    return folder


def write_files(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def corpus_of(source, **fields):
    return Corpus("mine", str(source), **{"tokenizer": BPE(300), **fields})


def names(source, **fields):
    return [file.name for file in resolve(corpus_of(source, **fields)).train]


HUB = corpus_of("hf://owner/name@abc/data/*.txt", heldout="held")


# ---------------------------------------------------------------- files


EVERYTHING = ["b.txt", "sub/a.jsonl", "sub/deep/c.txt"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("", EVERYTHING),
        ("**/*", EVERYTHING),
        ("**", EVERYTHING),
        ("b.txt", ["b.txt"]),
        ("*.txt", ["b.txt"]),
        ("[ab].txt", ["b.txt"]),
        ("**/*.txt", ["b.txt", "sub/deep/c.txt"]),
        ("s?b/*", ["sub/a.jsonl"]),
        ("*/deep/c.txt", ["sub/deep/c.txt"]),
        ("**/deep/**/*", ["sub/deep/c.txt"]),
    ],
)
def test_a_file_a_folder_or_a_pattern_means_its_files_without_hidden_ones(folder, source, expected):
    write_files(folder, ".hidden", ".cache/x.txt")
    assert names(folder / source) == expected


@pytest.mark.parametrize(
    "spelled",
    ["./corpus/sub/../b.txt", "{folder}/b.txt", "link.txt", "corpus/*.txt", "{folder}/*.txt", "~/corpus/b.txt",
     "../{parent}/corpus/*.txt"],
)  # fmt: skip
def test_heldout_files_are_not_trained_on_however_they_are_spelled(folder, spelled, monkeypatch):
    (folder.parent / "link.txt").symlink_to(folder / "b.txt")
    monkeypatch.setenv("HOME", str(folder.parent))
    files = resolve(corpus_of(folder, heldout=spelled.format(folder=folder, parent=folder.parent.name)))
    assert [file.name for file in files.train] == ["sub/a.jsonl", "sub/deep/c.txt"]
    assert [file.path.resolve() for file in files.heldout] == [folder / "b.txt"]


def test_links_are_followed_but_not_in_circles(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    write_files(elsewhere, "d.txt")
    (folder / "linked").symlink_to(elsewhere)
    (folder / "sub" / "round").symlink_to(folder)
    (elsewhere / "itself").symlink_to(elsewhere)
    expected = ["b.txt", "linked/d.txt", "sub/a.jsonl", "sub/deep/c.txt"]
    assert names(folder) == names(folder / "**" / "*") == expected


def broken_link(folder):
    (folder / "gone.txt").symlink_to(folder / "nowhere")


@pytest.mark.parametrize(
    ("prepare", "source", "fields", "facts"),
    [
        (broken_link, "", {}, ["gone.txt", "link"]),
        (broken_link, "*.txt", {}, ["gone.txt", "link"]),
        (lambda folder: os.mkfifo(folder / "pipe.jsonl"), "", {}, ["pipe.jsonl", "no file"]),
        (lambda folder: write_files(folder, "README.md"), "", {}, ["README.md", ".txt", "pattern"]),
        (lambda folder: None, "**.jsonl", {}, ["**/*.jsonl"]),
        (lambda folder: None, "b.txt", {"heldout": "b.txt"}, ["b.txt", "held out"]),
        (lambda folder: None, "", {"heldout": "held.txt"}, ["held.txt", "not there"]),
    ],
)
def test_bad_files_are_refused_and_not_taken_for_absent(folder, prepare, source, fields, facts):
    prepare(folder)
    with pytest.raises(DataError) as caught:
        resolve(corpus_of(folder / source, **fields))
    assert not isinstance(caught.value, Absent)
    assert all(fact in str(caught.value) for fact in facts)


@pytest.mark.parametrize("source", ["absent", "empty", "corpus/*.parquet", "absent/**/*.txt"])
def test_an_absent_source_and_an_empty_folder_are_absent(folder, tmp_path, source):
    (tmp_path / "empty").mkdir()
    with pytest.raises(Absent, match=source.split("/")[0]):
        resolve(corpus_of(tmp_path / source))


def test_a_hub_source_is_parsed_and_stays_inside_its_repository():
    assert HUB.place == HubPlace("owner/name", "abc", "data/*.txt")
    for heldout in ("/etc/held.txt", "../held.txt", "~/held.txt"):
        with pytest.raises(SpecError, match=f"'{heldout}' leaves"):
            corpus_of(HUB.source, heldout=heldout)
    with pytest.raises(DataError) as caught:
        resolve(HUB)
    assert f"{corpora.tokenize_command(HUB)} --from FOLDER" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "heldout"),
    [
        ("same/*", "apart"),
        ("same/*", "apart/"),
        ("**/*.txt", "apart/c.txt"),
        ("same", ""),
        ("apart/.cache/*.txt", ""),
        ("same/*.txt", "apart/.cache/f.txt"),
        ("same/a.txt", "same/b.txt"),
        ("*/*.txt", "same/*"),
    ],
)
def test_the_hub_and_a_copy_of_it_have_the_same_files(tmp_path, source, heldout):
    hub, copy = MemoryFileSystem(), tmp_path / "copy"
    for name in (
        "same/a.txt",
        "same/b.txt",
        "same/.hidden",
        "apart/c.txt",
        "apart/d/e.txt",
        "apart/.cache/f.txt",
    ):
        hub.pipe_file(f"/datasets/owner/same@abc/{name}", name.encode())
        write_files(copy, name)
    corpus = corpus_of(f"hf://owner/same@abc/{source}", heldout=heldout)
    local, streamed = resolve(corpus, copy), on_hub(corpus, hub)
    for part, other in zip(local, streamed, strict=True):
        assert [(file.name, file.size) for file in part] == [(file.name, file.size) for file in other]
        assert list(corpora.texts_of(corpus, part)) == list(corpora.texts_of(corpus, other))


@pytest.mark.parametrize("method", ["glob", "open"])
def test_a_hub_that_cannot_be_reached_gives_the_commands_to_do_without(method, monkeypatch):
    def broken(*_, **__):
        raise ConnectionError("no route")

    for name in ("a.jsonl", "held/b.jsonl"):
        MemoryFileSystem().pipe_file(f"/datasets/owner/fails@abc/{name}", b"{}")
    monkeypatch.setattr(MemoryFileSystem, method, broken)
    corpus = corpus_of("hf://owner/fails@abc/*.jsonl", heldout="held")
    with pytest.raises(DataError) as caught:
        list(blocks(corpus, on_hub(corpus, MemoryFileSystem()).train))
    for fact in (
        "no route",
        "--include '*.jsonl' --include held --include 'held/*' --local-dir FOLDER",
        "biphase tokenize 'hf://owner/fails@abc/*.jsonl' --tokenizer bpe:300 --heldout held --from FOLDER",
    ):
        assert fact in str(caught.value)


# ---------------------------------------------------------------- content


def test_the_fingerprint_depends_on_names_and_bytes_not_on_the_location(folder, store, tmp_path, monkeypatch):
    before = corpora.corpus_fingerprint(corpus_of(folder), store)
    monkeypatch.chdir(tmp_path)
    assert corpora.corpus_fingerprint(corpus_of("./corpus"), store) == before
    moved = folder.rename(tmp_path / "elsewhere")
    assert corpora.corpus_fingerprint(corpus_of(moved), store) == before
    (moved / "b.txt").rename(moved / "c.txt")
    assert corpora.corpus_fingerprint(corpus_of(moved), store) != before


def test_a_changed_file_is_hashed_and_an_unchanged_one_is_not_read_again(folder, store, monkeypatch):
    before = corpora.corpus_fingerprint(corpus_of(folder), store)
    opened, real = [], Path.open
    monkeypatch.setattr(
        Path, "open", lambda path, *rest, **named: opened.append(path.name) or real(path, *rest, **named)
    )
    assert corpora.corpus_fingerprint(corpus_of(folder), store) == before
    assert not {"b.txt", "a.jsonl"} & set(opened)
    path = folder / "b.txt"
    stamp = path.stat()
    path.write_text("B.txt")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # size and modification time are as before
    opened.clear()
    assert corpora.corpus_fingerprint(corpus_of(folder), store) != before
    assert "b.txt" in opened
    assert "a.jsonl" not in opened


def test_the_tokenizer_fingerprint_depends_on_what_determines_it(tmp_path, store):
    def fingerprint(tokenizer, content="1"):
        return corpora.tokenizer_fingerprint(corpus_of("./x", tokenizer=tokenizer), content, store)

    folder = tmp_path / "tokenizer"
    folder.mkdir()
    with pytest.raises(DataError, match=r"tokenizer.json .*Pretrained"):
        fingerprint(Pretrained(str(folder)))
    (folder / "tokenizer.json").write_text("{}")
    plain = fingerprint(Pretrained(str(folder)))
    assert fingerprint(Pretrained(str(folder / "tokenizer.json"))) == plain
    (folder / "tokenizer_config.json").write_text("{}")
    assert fingerprint(Pretrained(str(folder))) != plain
    assert fingerprint(Pretrained("o/n", revision="a")) == fingerprint(Pretrained("o/n", revision="a"), "2")
    assert fingerprint(Pretrained("o/n", revision="a")) != fingerprint(Pretrained("o/n", revision="b"))
    assert fingerprint(BPE(300)) != fingerprint(BPE(300), "2")


def publish_card(store, corpus, content, tokenizer):
    build = store.root / "build"
    build.mkdir(parents=True)
    card = {"corpus": encode(corpus), "fingerprint": content, "tokenizer_fingerprint": tokenizer}
    counts = dict.fromkeys(("vocab", "eos_id", "mask_id", "train_tokens", "heldout_tokens"), 9)
    write_json(build / "card.json", card | counts | {"special_ids": [], "unigram_entropy": 1.5})
    publish(build, store.shards / data_key(corpus, content, tokenizer))


def test_a_store_keeps_its_keys_on_a_machine_without_the_raw_text(folder, store, tmp_path):
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    corpus = corpus_of(folder, tokenizer=Pretrained(str(tokenizer)))
    key, hashes = corpora.shards_key(corpus, store), corpora.fingerprints(corpus, store)
    assert hashes.key(corpus) == key
    publish_card(store, corpus, hashes.content, hashes.tokenizer)
    folder.rename(tmp_path / "away")
    tokenizer.unlink()
    assert corpora.shards_key(corpus, store) == key
    folder.mkdir()  # where a disk would be mounted
    assert corpora.shards_key(corpus, store) == key
    (folder / ".lost").touch()
    assert corpora.shards_key(corpus, store) == key
    with pytest.raises(Absent):
        corpora.shards_key(corpus_of(folder, text="body"), store)  # nothing is recorded for another record
    publish_card(store, corpus, "f" * 32, hashes.tokenizer)
    with pytest.raises(DataError, match="several versions"):
        corpora.shards_key(corpus, store)


def test_a_sample_of_a_hub_corpus_never_passes_for_the_whole(store, tmp_path):
    whole = corpora.corpus_fingerprint(HUB, store)
    assert corpora.corpus_fingerprint(HUB, Store(tmp_path / "other")) == whole
    assert corpora.corpus_fingerprint(corpus_of(HUB.source), store) != whole
    copy = tmp_path / "copy"
    write_files(copy, "data/0.txt", "held/0.txt", "README.md")
    corpora.write_link(HUB, store, copy)
    sample = corpora.corpus_fingerprint(HUB, store)
    assert sample != whole
    # A link belongs to a source, not to a name.
    assert corpora.read_link(replace(HUB, name="another"), store)["folder"] == str(copy)
    assert corpora.read_link(replace(HUB, source=HUB.source.replace("abc", "def")), store) is None
    write_files(copy, "data/1.txt")
    assert corpora.corpus_fingerprint(HUB, store) not in (whole, sample)
    corpora.write_link(HUB, store, copy)
    linked = corpora.corpus_fingerprint(HUB, store)
    copy.rename(tmp_path / "away")
    assert corpora.corpus_fingerprint(HUB, store) == linked  # recorded in the link
    copy.mkdir()
    assert corpora.corpus_fingerprint(HUB, store) == linked  # also where the disk is not mounted


# ---------------------------------------------------------------- documents


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
    corpus, tally = corpus_of(source, **fields), Tally()
    read = list(blocks(corpus, resolve(corpus).train, start))
    return [text for block in read for text, _ in parse(block, corpus.text, tally)], tally, read


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "csv", "tsv.zst"])
def test_every_format_gives_every_document_in_order_from_any_block_on(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(corpora, "BLOCK_BYTES", 2000)  # many blocks
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
        ("a.csv", b"text,n\n\xff,1\ngood,2\n,3\n", ["good"], {"invalid UTF-8": "a.csv:1", "empty text": "a.csv:3"}),
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
