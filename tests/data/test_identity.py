"""Fingerprints: content counts, place and time do not; a store keeps its keys without the raw text."""

import os
import subprocess
import sys

import pytest

from biphase.data.identity import (
    ASSETS,
    HubSource,
    corpus_fingerprint,
    read_link,
    resolve,
    shards_key,
    tokenizer_fingerprint,
    write_link,
)
from biphase.errors import DataError
from biphase.files import Store, publish, write_json
from biphase.presets import CORPORA
from biphase.records import encode
from biphase.specs import BPE, Corpus, Pretrained


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "corpus"
    (made / "sub").mkdir(parents=True)
    (made / "b.txt").write_text("b")
    (made / "sub" / "a.jsonl").write_text('{"text": "a"}\n')
    return made


def mine(source, **fields):
    return Corpus("mine", str(source), **{"tokenizer": BPE(300), **fields})


def test_importing_it_is_light():
    code = "import sys, biphase.data.identity; print([m for m in ('numpy', 'pyarrow', 'tokenizers') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )


def test_the_fingerprint_is_the_content_not_the_place(folder, store, tmp_path):
    before = corpus_fingerprint(mine(folder), store)
    moved = folder.rename(tmp_path / "elsewhere")
    assert corpus_fingerprint(mine(moved), store) == before
    (moved / "b.txt").rename(moved / "c.txt")
    assert corpus_fingerprint(mine(moved), store) != before


def test_a_relative_source_counts_from_the_current_folder(folder, store, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert corpus_fingerprint(mine("corpus"), store) == corpus_fingerprint(mine(folder), store)
    assert corpus_fingerprint(mine("./corpus"), store) == corpus_fingerprint(mine(folder), store)


def test_a_changed_file_is_seen_and_an_unchanged_one_is_not_read_again(folder, store):
    before = corpus_fingerprint(mine(folder), store)
    path = folder / "b.txt"
    stamp = path.stat()
    path.write_text("B")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # as if untouched: the memory answers
    assert corpus_fingerprint(mine(folder), store) == before
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    assert corpus_fingerprint(mine(folder), store) != before


def test_a_damaged_memory_or_a_store_that_cannot_be_written_costs_only_time(folder, store, tmp_path):
    before = corpus_fingerprint(mine(folder), store)
    for damage in ("{", "[]", '{"x": 1}'):
        (store.root / "corpora" / "cache.json").write_text(damage)
        assert corpus_fingerprint(mine(folder), store) == before
    (tmp_path / "file").touch()
    assert corpus_fingerprint(mine(folder), Store(tmp_path / "file" / "store")) == before


def test_a_pattern_and_a_folder_that_mean_the_same_files_are_the_same_content(folder, store):
    (folder / ".hidden").write_text("never text")
    assert [file.name for file in resolve(mine(folder)).train] == ["b.txt", "sub/a.jsonl"]
    assert [file.name for file in resolve(mine(folder / "*.txt")).train] == ["b.txt"]
    assert corpus_fingerprint(mine(folder / "**" / "*"), store) == corpus_fingerprint(mine(folder), store)


def test_held_out_files_stand_beside_the_source_and_are_not_trained_on(folder, store):
    whole = corpus_fingerprint(mine(folder), store)
    files = resolve(mine(folder, heldout="corpus/b.txt"))
    assert [file.name for file in files.train] == ["sub/a.jsonl"]
    assert [file.name for file in files.heldout] == ["b.txt"]
    assert corpus_fingerprint(mine(folder, heldout="corpus/b.txt"), store) != whole
    with pytest.raises(DataError, match=r"all files of .* are held out"):
        resolve(mine(folder / "b.txt", heldout="b.txt"))


def test_a_file_of_unknown_kind_an_absent_source_and_an_empty_folder_are_refused(folder, store, tmp_path):
    (tmp_path / "empty").mkdir()
    for source, words in (
        ("absent", "is not there"),
        ("empty", "holds no files"),
        ("corpus/*.parquet", "holds no"),
    ):
        with pytest.raises(DataError, match=words):
            corpus_fingerprint(mine(tmp_path / source), store)
    (folder / "README.md").touch()
    with pytest.raises(DataError, match=r"README.md .* is none of .txt.*by a pattern"):
        corpus_fingerprint(mine(folder), store)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_may_not_be_read_is_named(folder, store):
    (folder / "b.txt").chmod(0)
    with pytest.raises(DataError, match=r"b.txt cannot be read"):
        corpus_fingerprint(mine(folder), store)


def test_the_builtin_corpus_ships_with_the_package(store):
    files = resolve(CORPORA["builtin"])
    assert [file.path.parent for file in (*files.train, *files.heldout)] == [ASSETS, ASSETS]
    assert sum(file.path.stat().st_size for file in (*files.train, *files.heldout)) < 2_000_000
    assert len(shards_key(CORPORA["builtin"], store)) == 32


def test_the_tokenizer_counts_by_what_it_is_made_from(tmp_path, store):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    local = mine("./x", tokenizer=Pretrained(str(folder)))
    with pytest.raises(DataError, match=r"tokenizer.json is not there; type Pretrained"):
        tokenizer_fingerprint(local, "")
    (folder / "tokenizer.json").write_text("{}")
    plain = tokenizer_fingerprint(local, "")
    assert (
        tokenizer_fingerprint(mine("./x", tokenizer=Pretrained(str(folder / "tokenizer.json"))), "") == plain
    )
    (folder / "tokenizer_config.json").write_text("{}")
    assert tokenizer_fingerprint(local, "") != plain
    hub = [mine("./x", tokenizer=Pretrained("owner/name", revision=one)) for one in ("a", "b")]
    assert (
        tokenizer_fingerprint(hub[0], "1")
        == tokenizer_fingerprint(hub[0], "2")
        != tokenizer_fingerprint(hub[1], "1")
    )
    bpe = mine("./x")
    assert tokenizer_fingerprint(bpe, "1") != tokenizer_fingerprint(bpe, "2")


def publish_card(store, name, corpus, **card):
    build = store.root / f"build-{name}"
    build.mkdir(parents=True)
    write_json(build / "card.json", {"corpus": encode(corpus), **card})
    publish(build, store.shards / name)


def test_a_store_keeps_its_keys_on_a_machine_without_the_raw_text(folder, store, tmp_path):
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    corpus = mine(folder, tokenizer=Pretrained(str(tokenizer)))
    key = shards_key(corpus, store)
    content = corpus_fingerprint(corpus, store)
    marks = {"fingerprint": content, "tokenizer_fingerprint": tokenizer_fingerprint(corpus, content)}
    publish_card(store, "one", corpus, **marks)
    folder.rename(tmp_path / "away")
    tokenizer.unlink()
    assert shards_key(corpus, store) == key
    with pytest.raises(DataError, match="is not there"):
        shards_key(mine(folder, text="body"), store)  # another record: nothing is known about it
    publish_card(store, "two", corpus, fingerprint="other")
    with pytest.raises(DataError, match="several versions"):
        shards_key(corpus, store)


HUB = mine("hf://owner/name@abc/data/*.txt", heldout="held/*.txt")


def test_a_hub_corpus_is_its_pinned_source(store):
    assert HubSource.of(HUB) == HubSource("owner/name", "abc", "data/*.txt")
    assert corpus_fingerprint(HUB, store) == corpus_fingerprint(HUB, Store(store.root / "other"))
    assert corpus_fingerprint(HUB, store) != corpus_fingerprint(mine(HUB.source), store)
    with pytest.raises(DataError, match="--from FOLDER"):
        resolve(HUB)
    with pytest.raises(DataError, match="is not hf://owner/name@revision/glob"):
        HubSource.of(mine("hf://owner/name@/data/x"))


def test_a_sample_of_a_hub_corpus_never_passes_for_the_whole(store, tmp_path):
    whole = corpus_fingerprint(HUB, store)
    copy = tmp_path / "copy"
    for part in ("data", "held"):
        (copy / part).mkdir(parents=True)
        (copy / part / "0.txt").write_text(part)
    (copy / "README.md").touch()  # outside the pattern
    write_link(HUB, store, copy)
    sample = corpus_fingerprint(HUB, store)
    assert sample != whole
    (copy / "data" / "1.txt").write_text("more")
    assert corpus_fingerprint(HUB, store) not in (whole, sample)
    write_link(HUB, store, copy)
    linked = corpus_fingerprint(HUB, store)
    copy.rename(tmp_path / "away")
    assert corpus_fingerprint(HUB, store) == linked  # the store remembers
    assert read_link(mine("hf://owner/name@def/data/*.txt", heldout="held/*.txt"), store) is None
