"""Which content a corpus stands for, as a hash: the part of every key that lies outside the study file.

- A hub corpus is its pinned source: the revision *is* the content. If it was tokenized from a folder instead
  (`biphase tokenize NAME --from FOLDER`), the store holds a link, and the content of that folder counts: a
  sample never passes for the whole.
- A local or built-in corpus is the names and bytes of its files. Hashes are remembered by path, size and time
  of change, so that planning twice reads nothing twice.
- A store that was carried to a machine without the raw text keeps its keys: the published shards remember.

Only the standard library is used here, because planning passes through.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from biphase import keys
from biphase.errors import DataError
from biphase.files import MANIFEST, Store, read_json, sha256, write_json
from biphase.records import encode, key
from biphase.specs import BPE, Corpus, Pretrained

ASSETS = Path(__file__).resolve().parents[1] / "assets"
CARD = "card.json"
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_BUILTIN = "builtin:"


class _Absent(DataError):
    """The raw files are not on this machine; what was made from them may still be in the store."""


@dataclass(frozen=True, order=True)
class Named:
    """A file of a corpus and the name it has there, the same on every machine."""

    name: str
    path: Path


@dataclass(frozen=True)
class Files:
    train: tuple[Named, ...]
    heldout: tuple[Named, ...]


@dataclass(frozen=True)
class HubSource:
    """`hf://owner/name@revision/glob`, taken apart."""

    repository: str
    revision: str
    pattern: str

    @classmethod
    def of(cls, corpus: Corpus) -> HubSource:
        owner, rest = corpus.source.removeprefix("hf://").split("/", 1)
        name, _, tail = rest.partition("@")
        revision, _, pattern = tail.partition("/")
        if not (owner and name and revision and pattern):
            raise DataError(
                f"corpus {corpus.name!r}: {corpus.source!r} is not hf://owner/name@revision/glob; correct it"
            )
        return cls(f"{owner}/{name}", revision, pattern)


def shards_key(corpus: Corpus, store: Store) -> str:
    """The key of the tokenized corpus: where its shards are, or will be."""
    content = corpus_fingerprint(corpus, store)
    return keys.data_key(corpus, content, tokenizer_fingerprint(corpus, content, store))


def corpus_fingerprint(corpus: Corpus, store: Store) -> str:
    """The hash of the corpus' content."""
    if corpus.hub:
        link = read_link(corpus, store)
        if not link:
            return key({"hub": corpus.source, "heldout": corpus.heldout})
        if not Path(link["folder"]).is_dir():
            return link["fingerprint"]
        return folder_fingerprint(corpus, store, Path(link["folder"]))
    try:
        files = resolve(corpus)
    except _Absent:
        recorded = _recorded(corpus, store, "fingerprint")
        if recorded:
            return recorded
        raise
    return _content(files, store)


def folder_fingerprint(corpus: Corpus, store: Store, folder: Path) -> str:
    """The hash of a local copy of a hub corpus."""
    return _content(resolve(corpus, folder), store)


def tokenizer_fingerprint(corpus: Corpus, corpus_fp: str, store: Store | None = None) -> str:
    """The hash of what determines the tokenizer. With a store, its shards stand in for absent local files."""
    tokenizer = corpus.tokenizer
    if isinstance(tokenizer, BPE):
        return key({"bpe": tokenizer.vocab, "content": corpus_fp})
    if not tokenizer.local:
        return key({"tokenizer": tokenizer.source, "revision": tokenizer.revision})
    try:
        files = tokenizer_files(tokenizer)
    except _Absent:
        recorded = _recorded(corpus, store, "tokenizer_fingerprint") if store else ""
        if recorded:
            return recorded
        raise
    return key({"tokenizer_files": [[file.name, sha256(file.path)] for file in files]})


def tokenizer_files(tokenizer: Pretrained) -> tuple[Named, ...]:
    """The files of a local tokenizer, tokenizer.json first."""
    source = Path(tokenizer.source).expanduser()
    main = source if source.suffix == ".json" else source / TOKENIZER_FILES[0]
    if not main.is_file():
        raise _Absent(
            f"tokenizer {tokenizer.source!r}: {main} is not there; "
            "type Pretrained('./folder') for a folder that holds a tokenizer.json, or BPE(32_000) to train one"
        )
    beside = [Named(name, main.parent / name) for name in TOKENIZER_FILES[1:]]
    return Named(TOKENIZER_FILES[0], main), *(file for file in beside if file.path.is_file())


# ---------------------------------------------------------------- files of a corpus


def resolve(corpus: Corpus, folder: Path | None = None) -> Files:
    """The files of a local or built-in corpus, or those of a hub corpus in `folder`, a copy of its repository."""
    if corpus.hub:
        if folder is None:
            raise DataError(
                f"corpus {corpus.name!r} is on the hub; type: biphase tokenize {corpus.name} --from FOLDER"
            )
        base, main = folder, HubSource.of(corpus).pattern
    elif corpus.source.startswith(_BUILTIN):
        base, main = ASSETS, corpus.source.removeprefix(_BUILTIN)
    else:
        source = Path(corpus.source).expanduser()
        base, main = _split(source)
    heldout = _files(corpus, base, corpus.heldout) if corpus.heldout else ()
    apart = {file.path for file in heldout}
    train = tuple(file for file in _files(corpus, base, main) if file.path not in apart)
    if not train:
        raise DataError(
            f"corpus {corpus.name!r}: all files of {corpus.source!r} are held out; name others in heldout"
        )
    return Files(train, heldout)


def _split(source: Path) -> tuple[Path, str]:
    """A source as the folder it stands in and its name, or pattern, there."""
    for place, part in enumerate(source.parts):
        if _is_pattern(part):
            return Path(*source.parts[:place]), str(Path(*source.parts[place:]))
    return source.parent, source.name or "."


def _is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def _files(corpus: Corpus, base: Path, name: str) -> tuple[Named, ...]:
    """The files that `name` (a file, folder or pattern, beside the source) means, in the order of their names."""
    place = base / Path(name).expanduser()
    if _is_pattern(name) and not place.exists():
        found = [Named(path.relative_to(base).as_posix(), path) for path in base.glob(name) if path.is_file()]
    elif place.is_dir():
        found = [
            Named(path.relative_to(place).as_posix(), path) for path in place.rglob("*") if path.is_file()
        ]
    elif place.is_file():
        found = [Named(place.name, place)]
    else:
        raise _Absent(
            f"corpus {corpus.name!r}: {place} is not there; correct its source, or put the files there"
        )
    # Hidden files (.DS_Store, .cache/…) are never text.
    found = sorted(file for file in found if not any(part.startswith(".") for part in Path(file.name).parts))
    if not found:
        raise DataError(f"corpus {corpus.name!r}: {place} holds no files; put {', '.join(SUFFIXES)} there")
    for file in found:
        check_suffix(corpus, file.name, str(place))
    return tuple(found)


def check_suffix(corpus: Corpus, name: str, where: str) -> None:
    """Refuse a file that is not known to be text: nothing is left out silently."""
    if not name.lower().endswith(SUFFIXES):
        raise DataError(
            f"corpus {corpus.name!r}: {name} in {where} is none of {', '.join(SUFFIXES)}; "
            "move it away, or name the files by a pattern, e.g. source='folder/*.jsonl.zst'"
        )


# ---------------------------------------------------------------- links and memory


def link_path(corpus: Corpus, store: Store) -> Path:
    return store.root / "corpora" / f"{corpus.name}.json"


def read_link(corpus: Corpus, store: Store) -> dict[str, Any] | None:
    """The folder that stands for this hub corpus in this store, if one was named."""
    path = link_path(corpus, store)
    if not path.is_file():
        return None
    link = read_json(path)
    same = link.get("source") == corpus.source and link.get("heldout") == corpus.heldout
    return link if same else None


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
    write_json(path, here)


def _content(files: Files, store: Store) -> str:
    cache = _Cache(store)
    listed = {
        part: sorted([file.name, cache.sha256(file.path)] for file in group)
        for part, group in (("train", files.train), ("heldout", files.heldout))
    }
    cache.save()
    return key(listed)


class _Cache:
    """Hashes of files already read, by path, size and time of change. Losing it costs only time."""

    def __init__(self, store: Store) -> None:
        self.path = store.root / "corpora" / "cache.json"
        self.known: dict[str, Any] = {}
        self.changed = False
        with contextlib.suppress(OSError, ValueError):
            read = json.loads(self.path.read_text(encoding="utf-8"))
            self.known = read if isinstance(read, dict) else {}

    def sha256(self, path: Path) -> str:
        stat = path.stat()
        place, seen = str(path.resolve()), [stat.st_size, stat.st_mtime_ns]
        entry = self.known.get(place)
        if isinstance(entry, list) and len(entry) == 3 and entry[:2] == seen:
            return entry[2]
        try:
            digest = sha256(path)
        except OSError as wrong:
            raise DataError(f"{path} cannot be read ({wrong.strerror}); check its permissions") from None
        self.known[place] = [*seen, digest]
        self.changed = True
        return digest

    def save(self) -> None:
        if self.changed:
            with contextlib.suppress(OSError):  # a store that cannot be written can still be planned on
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_json(self.path, self.known)


def _recorded(corpus: Corpus, store: Store | None, field: str) -> str:
    """What the published shards of the same corpus record say, where its raw files are absent."""
    found = {
        card[field] for card in _cards(store) if card.get("corpus") == encode(corpus) and card.get(field)
    }
    if len(found) > 1:
        raise DataError(
            f"corpus {corpus.name!r}: its files are absent and {store.shards if store else ''} holds "
            "several versions of it; put the files back, or remove the shards that are not meant"
        )
    return found.pop() if found else ""


def _cards(store: Store | None) -> Iterable[dict[str, Any]]:
    if store is not None and store.shards.is_dir():
        for folder in sorted(store.shards.iterdir()):
            if (folder / MANIFEST).is_file() and (folder / CARD).is_file():
                yield read_json(folder / CARD)
