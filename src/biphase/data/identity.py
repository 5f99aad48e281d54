"""Which content a corpus stands for, as a hash: the part of every key that lies outside the study file.

- A hub corpus is its pinned source: the revision *is* the content. If it was tokenized from a folder instead
  (`biphase tokenize NAME --from FOLDER`), the store holds a link, and the content of that folder counts: a
  sample never passes for the whole.
- A local or built-in corpus is the names and bytes of its files. Hashes are remembered by path, size, times of change
  and inode, so that planning twice reads nothing twice. Whoever is about to read the files anyway hashes them again.
- A store that was carried to a machine without the raw text keeps its keys: the published shards remember.

Only the standard library is used here, because planning passes through.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from biphase import keys
from biphase.data.listing import Absent, Files, Named, resolve
from biphase.errors import DataError, StoreError
from biphase.files import Store, read_json, read_sealed, sealed, sha256, stamp, write_json
from biphase.metadata import read_card
from biphase.records import encode, key
from biphase.specs import BPE, Corpus, Pretrained

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class Fingerprints:
    """What a tokenized corpus is made from, as hashes taken at one time."""

    content: str
    tokenizer: str

    def key(self, corpus: Corpus) -> str:
        """Where its shards are, or will be."""
        return keys.data_key(corpus, self.content, self.tokenizer)


def fingerprints(corpus: Corpus, store: Store, *, again: bool = False) -> Fingerprints:
    """The hashes of the corpus' content and of its tokenizer, as they are now; `again`: not from memory."""
    content = corpus_fingerprint(corpus, store, again=again)
    return Fingerprints(content, tokenizer_fingerprint(corpus, content, store, again=again))


def shards_key(corpus: Corpus, store: Store) -> str:
    """The key of the tokenized corpus: where its shards are, or will be."""
    return fingerprints(corpus, store).key(corpus)


def corpus_fingerprint(corpus: Corpus, store: Store, *, again: bool = False) -> str:
    """The hash of the corpus' content."""
    if corpus.hub:
        link = read_link(corpus, store)
        if not link:
            return key({"hub": corpus.source, "heldout": corpus.heldout})
        if "folder" not in link:
            return link["fingerprint"]
        try:
            return folder_fingerprint(corpus, store, Path(link["folder"]), again=again)
        except Absent:
            return link["fingerprint"]
    try:
        files = resolve(corpus)
    except Absent:
        recorded = _recorded(corpus, store, "fingerprint")
        if recorded:
            return recorded
        raise
    return _content(files, store, again=again)


def folder_fingerprint(corpus: Corpus, store: Store, folder: Path, *, again: bool = False) -> str:
    """The hash of a local copy of a hub corpus."""
    return _content(resolve(corpus, folder), store, again=again)


def tokenizer_fingerprint(corpus: Corpus, corpus_fp: str, store: Store, *, again: bool = False) -> str:
    """The hash of what determines the tokenizer. Where local files are absent, the store's shards remember."""
    tokenizer = corpus.tokenizer
    if isinstance(tokenizer, BPE):
        return key({"bpe": tokenizer.vocab, "content": corpus_fp})
    if not tokenizer.local:
        return key({"tokenizer": tokenizer.source, "revision": tokenizer.revision})
    try:
        files = tokenizer_files(tokenizer)
    except Absent:
        recorded = _recorded(corpus, store, "tokenizer_fingerprint")
        if recorded:
            return recorded
        raise
    memory = HashMemory(store, again=again)
    listed = [[file.name, memory.sha256(file.path)] for file in files]
    memory.save()
    return key({"tokenizer_files": listed})


def tokenizer_files(tokenizer: Pretrained) -> tuple[Named, ...]:
    """The files of a local tokenizer, tokenizer.json first."""
    source = Path(tokenizer.source).expanduser()
    main = source if source.suffix == ".json" else source / TOKENIZER_FILES[0]
    if not main.is_file():
        raise Absent(
            f"tokenizer {tokenizer.source!r}: {main} is not there; "
            "type Pretrained('./folder') for a folder that holds a tokenizer.json, or BPE(32_000) to train one"
        )
    beside = [Named(name, main.parent / name) for name in TOKENIZER_FILES[1:]]
    return Named(TOKENIZER_FILES[0], main), *(file for file in beside if file.path.is_file())


# ---------------------------------------------------------------- links and memory


def link_path(corpus: Corpus, store: Store) -> Path:
    """Named by what is linked, since two corpora may bear one name."""
    return store.root / "corpora" / f"link-{key({'source': corpus.source, 'heldout': corpus.heldout})}.json"


def read_link(corpus: Corpus, store: Store) -> dict[str, Any] | None:
    """The folder that stands for this hub corpus in this store, if one was named.

    A link that came with results from another machine has no folder: it only says which text they were made from.
    """
    path = link_path(corpus, store)
    return read_sealed(path) if path.exists() else None


def write_link(corpus: Corpus, store: Store, folder: Path) -> None:
    """Let `folder`, a copy of its repository or of a part, stand for this hub corpus in this store."""
    if not corpus.hub:
        raise DataError(
            f"corpus {corpus.name!r} is not on the hub, its source is {corpus.source!r}; leave out --from"
        )
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; --from takes a copy of the repository of {corpus.source}")
    folder = folder.resolve()
    path = link_path(corpus, store)
    path.parent.mkdir(parents=True, exist_ok=True)
    fingerprint = folder_fingerprint(corpus, store, folder)
    here = {
        "source": corpus.source,
        "heldout": corpus.heldout,
        "folder": str(folder),
        "fingerprint": fingerprint,
    }
    write_json(path, sealed(here))


def _content(files: Files, store: Store, *, again: bool) -> str:
    cache = HashMemory(store, again=again)
    listed = {
        part: sorted([file.name, cache.sha256(file.path)] for file in group)
        for part, group in (("train", files.train), ("heldout", files.heldout))
    }
    cache.save()
    return key(listed)


class HashMemory:
    """Hashes of files already read, by path, size, times of change and inode. Losing it costs only time.

    `again`: believe only what this process has hashed itself.
    """

    def __init__(self, store: Store, *, again: bool = False) -> None:
        self.path = store.root / "corpora" / "cache.json"
        self.hashed, self.again = store.hashed, again or store.verify
        self.known: dict[str, Any] = {}
        self.changed = False
        with contextlib.suppress(StoreError):
            read = read_json(self.path)
            self.known = read if isinstance(read, dict) else {}

    def sha256(self, path: Path) -> str:
        try:
            before, place = stamp(path), str(path.resolve())
            entry = self.known.get(place)
            if entry == _remembered(place, before, entry) and not (
                self.again and self.hashed.get(place) != before
            ):
                return entry["sha256"]
            digest = sha256(path)
            after = stamp(path)
        except OSError as wrong:
            raise DataError(f"{path} cannot be read ({wrong.strerror}); check its permissions") from None
        if after != before:
            raise DataError(f"{path} is being written; type the command again when it is whole")
        self.hashed[place] = before
        self.remember(path, digest)
        return digest

    def remember(self, path: Path, digest: str) -> None:
        """The hash of a file, as long as it is as it is now."""
        place = str(path.resolve())
        self.known[place] = _remembered(place, stamp(path), {"sha256": digest})
        self.changed = True

    def save(self) -> None:
        if self.changed and self.path.parents[1].is_dir():  # who only plans makes no store
            with contextlib.suppress(OSError):  # a store that cannot be written can still be planned on
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_json(self.path, self.known)


def _remembered(place: str, now: list[int], entry: Any) -> dict[str, Any]:
    """An entry of the memory, with a hash of itself: a wrong one would give everything after it another key."""
    digest = str(entry.get("sha256")) if isinstance(entry, dict) else ""
    return {"stamp": now, "sha256": digest, "seal": key([place, now, digest])}


def _recorded(corpus: Corpus, store: Store, field: str) -> str:
    """What the published shards of the same corpus record say, where its raw files are absent."""
    found = {card[field] for card in cards(store) if card.get("corpus") == encode(corpus) and card.get(field)}
    if len(found) > 1:
        raise DataError(
            f"corpus {corpus.name!r}: its files are absent and {store.shards} holds "
            "several versions of it; put the files back, or remove the shards that are not meant"
        )
    return found.pop() if found else ""


def cards(store: Store) -> Iterable[dict[str, Any]]:
    """What the corpora of a store say of themselves, also those whose tokens are elsewhere; not what is damaged."""
    receipts = store.receipts / store.shards.name
    names = {path.name for path in (*store.shards.glob("*"), *receipts.glob("*"))}
    for name in sorted(names):
        with contextlib.suppress(StoreError):
            yield read_card(store.told(store.shards / name))
