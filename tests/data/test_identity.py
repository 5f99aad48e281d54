"""Fingerprints: content counts, place and time do not; a store keeps its keys without the raw text."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from biphase.data import corpus as corpus_module
from biphase.data.corpus import (
    HashMemory,
    corpus_fingerprint,
    fingerprints,
    link_path,
    read_link,
    shards_key,
    tokenizer_fingerprint,
    write_link,
)
from biphase.errors import DataError
from biphase.keys import data_key
from biphase.presets import CORPORA
from biphase.records import encode
from biphase.specs import BPE, Corpus, Pretrained
from biphase.store import Store, publish, write_json


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "store")
    made.root.mkdir()
    return made


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
    code = "import sys, biphase.data.corpus; print([m for m in ('numpy', 'pyarrow', 'tokenizers') if m in sys.modules])"
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


def test_a_changed_file_is_seen_and_an_unchanged_one_is_not_read_again(folder, store, monkeypatch):
    before = corpus_fingerprint(mine(folder), store)
    read, real = [], corpus_module.sha256
    monkeypatch.setattr(corpus_module, "sha256", lambda path: read.append(path.name) or real(path))
    assert corpus_fingerprint(mine(folder), store) == before
    assert read == []
    path = folder / "b.txt"
    stamp = path.stat()
    path.write_text("B")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # its size and its time are as they were
    assert corpus_fingerprint(mine(folder), store) != before
    assert read == ["b.txt"]


def test_a_damaged_memory_or_a_store_that_cannot_be_written_costs_only_time(folder, store, tmp_path):
    before = corpus_fingerprint(mine(folder), store)
    for damage in ("{", "[]", '{"x": 1}'):
        (store.root / "corpora" / "cache.json").write_text(damage)
        assert corpus_fingerprint(mine(folder), store) == before
    (tmp_path / "file").touch()
    assert corpus_fingerprint(mine(folder), Store(tmp_path / "file" / "store")) == before


def test_a_file_that_may_not_be_read_is_named(folder, store, monkeypatch):
    real = Path.open

    def refused(path, *rest, **named):
        if path.name == "b.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *rest, **named)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(DataError, match=r"b.txt cannot be read \(Permission denied\); check its permissions"):
        corpus_fingerprint(mine(folder), store)


def test_a_file_that_is_being_written_has_no_fingerprint_yet(folder, store, monkeypatch):
    real = Path.open

    def written_meanwhile(path, *rest, **named):
        opened = real(path, *rest, **named)
        if path.name == "b.txt":
            with real(path, "a") as other:
                other.write("more")
        return opened

    monkeypatch.setattr(Path, "open", written_meanwhile)
    with pytest.raises(DataError, match=r"b.txt is being written; type the command again"):
        HashMemory(store).sha256(folder / "b.txt")


def test_the_builtin_corpus_has_a_key(store):
    assert len(shards_key(CORPORA["builtin"], store)) == 32


def test_the_tokenizer_counts_by_what_it_is_made_from(tmp_path, store):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    local = mine("./x", tokenizer=Pretrained(str(folder)))
    with pytest.raises(DataError, match=r"tokenizer.json is not there; type Pretrained"):
        tokenizer_fingerprint(local, "", store)
    (folder / "tokenizer.json").write_text("{}")
    plain = tokenizer_fingerprint(local, "", store)
    assert (
        tokenizer_fingerprint(mine("./x", tokenizer=Pretrained(str(folder / "tokenizer.json"))), "", store)
        == plain
    )
    (folder / "tokenizer_config.json").write_text("{}")
    assert tokenizer_fingerprint(local, "", store) != plain
    hub = [mine("./x", tokenizer=Pretrained("owner/name", revision=one)) for one in ("a", "b")]
    assert (
        tokenizer_fingerprint(hub[0], "1", store)
        == tokenizer_fingerprint(hub[0], "2", store)
        != tokenizer_fingerprint(hub[1], "1", store)
    )
    bpe = mine("./x")
    assert tokenizer_fingerprint(bpe, "1", store) != tokenizer_fingerprint(bpe, "2", store)


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
    corpus = mine(folder, tokenizer=Pretrained(str(tokenizer)))
    key = shards_key(corpus, store)
    marks = fingerprints(corpus, store)
    assert marks.key(corpus) == key
    publish_card(store, corpus, marks.content, marks.tokenizer)
    folder.rename(tmp_path / "away")
    tokenizer.unlink()
    assert shards_key(corpus, store) == key
    folder.mkdir()  # where a disk would be mounted
    assert shards_key(corpus, store) == key
    (folder / ".lost").touch()
    assert shards_key(corpus, store) == key
    with pytest.raises(DataError, match="holds no files"):
        shards_key(mine(folder, text="body"), store)  # another record: nothing is known about it
    publish_card(store, corpus, "f" * 32, marks.tokenizer)
    with pytest.raises(DataError, match="several versions"):
        shards_key(corpus, store)


HUB = mine("hf://owner/name@abc/data/*.txt", heldout="held/*.txt")


def test_a_hub_corpus_is_its_pinned_source(store):
    assert corpus_fingerprint(HUB, store) == corpus_fingerprint(HUB, Store(store.root / "other"))
    assert corpus_fingerprint(HUB, store) != corpus_fingerprint(mine(HUB.source), store)


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
    copy.mkdir()
    assert corpus_fingerprint(HUB, store) == linked  # also where the disk is not mounted
    assert read_link(mine("hf://owner/name@def/data/*.txt", heldout="held/*.txt"), store) is None


def test_a_link_belongs_to_a_source_and_not_to_a_name(store, tmp_path):
    sources = ("hf://owner/one@abc/*.txt", "hf://owner/two@abc/*.txt")
    for number, source in enumerate(sources):
        copy = tmp_path / str(number)
        copy.mkdir()
        (copy / "a.txt").write_text(source)
        write_link(Corpus("cache", source, BPE(300)), store, copy)
    for number, source in enumerate(sources):
        for name in ("cache", "another"):
            link = read_link(Corpus(name, source, BPE(300)), store)
            assert link is not None
            assert link["folder"] == str(tmp_path / str(number))
    assert link_path(Corpus("cache", sources[0], BPE(300)), store).name != HashMemory(store).path.name
