"""A corpus: every spelling means its files, and content decides the key."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from biphase.data import corpus as corpora
from biphase.data.corpus import Absent, on_hub, resolve
from biphase.data.documents import blocks, texts_of
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
        assert list(texts_of(corpus, part)) == list(texts_of(corpus, other))


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
