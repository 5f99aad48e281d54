"""Token files: rows across file ends, writing that survives a kill, and refusals of damaged folders."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from biphase.data.corpus import HashMemory
from biphase.data.shards import Shards, Tokens, Writer
from biphase.errors import DataError, StoreError
from biphase.keys import data_key
from biphase.records import encode
from biphase.specs import BPE, Corpus
from biphase.store import Store, publish, read_json, write_json

U2 = np.dtype("<u2")


def written(folder, ids, shard_tokens):
    writer = Writer(folder, "train", U2, shard_tokens)
    writer.begin()
    for part in np.array_split(ids, 7):
        writer.append(part)
    writer.close()
    return sorted(folder.glob("train-*.bin"))


@pytest.mark.parametrize(
    ("shard_tokens", "length"), [(5, 1), (5, 7), (64, 64), (100, 7), (100, 333), (4096, 333)]
)
def test_rows_are_slices_of_the_whole_wherever_files_end(tmp_path, shard_tokens, length):
    ids = np.random.default_rng(0).integers(0, 60_000, 1000).astype(U2)
    tokens = Tokens(written(tmp_path, ids, shard_tokens), U2)
    rows = np.random.default_rng(1).permutation(1000 // length)
    assert len(tokens) == 1000
    np.testing.assert_array_equal(
        tokens.rows(rows, length), ids[: 1000 // length * length].reshape(-1, length)[rows]
    )
    assert tokens.rows(rows, length).dtype == U2
    for wrong in (-1, 1000 // length):
        with pytest.raises(IndexError, match=f"from 0 to {1000 // length - 1}"):
            tokens.rows(np.array([wrong]), length)


@pytest.mark.parametrize("stop", [1, 4, 9])
def test_a_writer_restored_after_a_kill_ends_in_the_same_files(tmp_path, stop):
    parts = np.array_split(np.random.default_rng(0).integers(0, 9, 1000), 10)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    written(whole, np.concatenate(parts), 128)
    first = Writer(killed, "train", U2, 128)
    first.begin()
    for part in parts[:stop]:
        first.append(part)
    state = first.state()
    first.append(np.full(77, 5))  # written after the last safe point, lost by the kill
    first.abandon()
    second = Writer(killed, "train", U2, 128)
    assert second.restore(state)
    for part in parts[stop:]:
        second.append(part)
    second.close()
    assert {path.name: path.read_bytes() for path in killed.iterdir()} == {
        path.name: path.read_bytes() for path in whole.iterdir()
    }


@pytest.mark.parametrize("damage", ["changed", "gone", "short tail", "changed tail", "tail gone"])
def test_a_writer_does_not_go_on_from_damaged_files(tmp_path, damage):
    writer = Writer(tmp_path, "train", U2, 128)
    writer.begin()
    writer.append(np.arange(200))
    state = writer.state()
    writer.abandon()
    full, tail = tmp_path / "train-00000.bin", tmp_path / "train-00001.bin"
    path = tail if "tail" in damage else full
    if "gone" in damage:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-2] + (b"" if "short" in damage else b"!!"))
    second = Writer(tmp_path, "train", U2, 128)
    assert not second.restore(state)
    second.abandon()


def published(tmp_path, **changes):
    build = tmp_path / "build"
    build.mkdir()
    written(build, np.arange(100), 64)
    (build / "heldout-00000.bin").touch()
    corpus, content, tokenizer = Corpus("mine", "./text", BPE(300)), "a" * 32, "b" * 32
    card = {
        "corpus": encode(corpus), "fingerprint": content, "tokenizer_fingerprint": tokenizer, "unigram_entropy": 1.5,
        "vocab": 100, "eos_id": 0, "mask_id": 1, "special_ids": [0, 1], "train_tokens": 100, "heldout_tokens": 0,
    }  # fmt: skip
    write_json(build / "card.json", card | changes)
    folder = tmp_path / data_key(corpus, content, tokenizer)
    publish(build, folder)
    return folder


def test_shards_under_the_key_of_another_corpus_are_refused(tmp_path, shards):
    mine = published(tmp_path)
    with pytest.raises(StoreError, match=rf"{mine.name}.*another key, {shards.name}"):
        Shards.open(shutil.copytree(shards, mine, dirs_exist_ok=True))
    write_json(mine / "manifest.json", read_json(mine / "manifest.json") | {"key": mine.name})
    with pytest.raises(StoreError, match=f"is not the card of the corpus {mine.name}"):
        Shards.open(mine)


def test_damaged_and_unfinished_shards_are_refused(tmp_path):
    (tmp_path / "other").mkdir()
    with pytest.raises(StoreError, match="card"):
        Shards.open(published(tmp_path / "other", train_tokens=99))
    with pytest.raises(DataError, match="biphase tokenize"):
        Shards.open(tmp_path)
    folder = published(tmp_path)
    shards = Shards.open(folder, verify=True)
    assert (shards.vocab, shards.eos_id, shards.mask_id, shards.special_ids) == (100, 0, 1, (0, 1))
    assert (len(shards.train), len(shards.heldout)) == (100, 0)
    path = folder / "train-00000.bin"
    path.write_bytes(b"\0" * 128)
    Shards.open(folder)  # the size is right, and the content is not hashed
    with pytest.raises(StoreError, match=path.name):
        Shards.open(folder, verify=True)
    path.write_bytes(b"\0" * 126)
    with pytest.raises(StoreError, match=path.name):
        Shards.open(folder)


def test_tokens_are_hashed_once_and_again_when_they_have_changed(shards, tmp_path, monkeypatch):
    corpus, store = Shards.open(shutil.copytree(shards, tmp_path / shards.name)), Store(tmp_path / "store")
    store.root.mkdir()
    opened, real = [], Path.open
    monkeypatch.setattr(
        Path, "open", lambda path, *rest, **named: opened.append(path.name) or real(path, *rest, **named)
    )
    corpus.check_tokens(HashMemory(store))
    assert "train-00000.bin" in opened
    opened.clear()
    corpus.check_tokens(HashMemory(store))
    assert "train-00000.bin" not in opened
    path = corpus.folder / "train-00000.bin"
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    with pytest.raises(StoreError, match=path.name):
        corpus.check_tokens(HashMemory(store))
