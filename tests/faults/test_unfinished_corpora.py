"""A corpus that was left unfinished, and hurt: what is not as it was written is made again, and the shards are the same."""

from __future__ import annotations

import shutil

import pytest
from faults.damage import TRIES, hurt

from biphase.data.tokenize import tokenize
from biphase.store import Store, verify

FILES = (
    "journal.json", "tokenizer/manifest.json", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json",
    "build/train-00000.bin", "build/train-00001.bin", "build/heldout-00000.bin",
)  # fmt: skip
EVERY = [(name, *one) for name in FILES for one in TRIES]
FEW = [(name, *TRIES[2 + place % 4]) for place, name in enumerate(FILES)]
SHARD_TOKENS = 4_000


class Ended(Exception):
    """As good as a kill: what was written stays."""


@pytest.fixture(scope="module")
def unfinished(corpus, tmp_path_factory):
    """A store with an attempt that ended after its training text was written."""
    store = Store(tmp_path_factory.mktemp("unfinished"))
    shown: list[str] = []

    def report(text: str) -> None:
        shown.append(text)
        if sum("MB of text" in one for one in shown) == 2:
            raise Ended

    with pytest.raises(Ended):
        tokenize(corpus, store, report=report, processes=1, shard_tokens=SHARD_TOKENS)
    return store


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    place = tokenize(
        corpus,
        Store(tmp_path_factory.mktemp("whole")),
        report=lambda text: None,
        processes=1,
        shard_tokens=SHARD_TOKENS,
    )
    return verify(place)


def check(corpus, unfinished, whole, tmp_path, name, damage, seed):
    shutil.copytree(unfinished.root, tmp_path / "store")
    store = Store(tmp_path / "store")
    (attempt,) = store.attempts.iterdir()
    hurt(attempt / name, damage, seed)
    place = tokenize(corpus, store, report=lambda text: None, processes=1, shard_tokens=SHARD_TOKENS)
    assert verify(place) == whole
    assert not list(store.attempts.iterdir())


def test_an_unfinished_corpus_is_gone_on_with(corpus, unfinished, whole, tmp_path):
    shutil.copytree(unfinished.root, tmp_path / "store")
    said: list[str] = []
    place = tokenize(
        corpus, Store(tmp_path / "store"), report=said.append, processes=1, shard_tokens=SHARD_TOKENS
    )
    assert any("going on after" in text for text in said)
    assert verify(place) == whole


@pytest.mark.parametrize(("name", "damage", "seed"), FEW)
def test_what_was_hurt_is_made_again(corpus, unfinished, whole, tmp_path, name, damage, seed):
    check(corpus, unfinished, whole, tmp_path, name, damage, seed)


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "damage", "seed"), [one for one in EVERY if one not in FEW])
def test_no_damage_to_an_unfinished_corpus_changes_a_token(
    corpus, unfinished, whole, tmp_path, name, damage, seed
):
    check(corpus, unfinished, whole, tmp_path, name, damage, seed)
