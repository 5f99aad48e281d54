"""Which files a corpus means on this machine, and what each is called.

A source is a file, a folder (everything below it) or a pattern (`*`, `?`, `[…]`, and `**` for any folders). Held-out
files are named the same way, from where the source stands. Links are followed, unless back into a folder they
came from. What is hidden (.DS_Store, .cache/…) is never text; anything else that is not a readable kind of file
is refused, so that nothing is left out silently. A hub corpus is looked for in a copy of its repository.

Only the standard library is used here, because planning passes through.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar

from biphase import keys
from biphase.errors import DataError, StoreError, one_line
from biphase.metadata import read_card
from biphase.presets import CORPORA
from biphase.records import content_key, encode
from biphase.specs import BPE, Corpus, Pretrained
from biphase.store import Store, read_checked, read_json, sha256, stamp, with_checksum, write_json

ASSETS = Path(__file__).resolve().parents[1] / "assets"
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
_BUILTIN = "builtin:"


class Absent(DataError):
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
        for inside in (pattern, corpus.heldout):
            path = PurePosixPath(inside)
            if path.is_absolute() or ".." in path.parts or inside.startswith("~"):
                raise DataError(
                    f"corpus {corpus.name!r}: {inside!r} leaves the repository of {corpus.source}; "
                    "name files inside it, e.g. heldout='data/test.parquet'"
                )
        return cls(f"{owner}/{name}", revision, pattern)


def tokenize_command(corpus: Corpus) -> str:
    """What to type, short of its options, to tokenize this corpus."""
    if CORPORA.get(corpus.name) == corpus:
        return f"biphase tokenize {corpus.name}"
    words, tokenizer = ["biphase", "tokenize", corpus.source, "--tokenizer"], corpus.tokenizer
    if isinstance(tokenizer, BPE):
        words.append(f"bpe:{tokenizer.vocab}")
    else:
        words.append(f"{tokenizer.source}@{tokenizer.revision}" if tokenizer.revision else tokenizer.source)
    words += ["--text", corpus.text] if corpus.text != "text" else []
    words += ["--heldout", corpus.heldout] if corpus.heldout else []
    return shlex.join(words)


def resolve(corpus: Corpus, folder: Path | None = None) -> Files:
    """The files of a local or built-in corpus, or those of a hub corpus in `folder`, a copy of its repository."""
    if corpus.hub:
        if folder is None:
            raise DataError(
                f"corpus {corpus.name!r} is on the hub; type: {tokenize_command(corpus)} --from FOLDER"
            )
        base, main = folder, folder / HubSource.of(corpus).pattern
    elif corpus.source.startswith(_BUILTIN):
        base, main = ASSETS, ASSETS / corpus.source.removeprefix(_BUILTIN)
    else:
        main = Path(corpus.source).expanduser()
        base = _split(main)[0]
    root = base if corpus.hub else None
    train = _files(corpus, main, root)
    if not corpus.heldout:
        return Files(train, ())
    try:
        heldout = _files(corpus, base / Path(corpus.heldout).expanduser(), root)
    except Absent as wrong:  # the text itself is here, so nothing that is remembered may stand in for it
        raise DataError(str(wrong)) from None
    return Files(*set_apart(corpus, train, heldout, lambda file: file.path.resolve()))


Kind = TypeVar("Kind")


def set_apart(
    corpus: Corpus, train: tuple[Kind, ...], heldout: tuple[Kind, ...], identity: Callable[[Kind], object]
) -> tuple[tuple[Kind, ...], tuple[Kind, ...]]:
    """Training files without the held-out ones, however those are spelled, and the held-out ones."""
    apart = {identity(file) for file in heldout}
    left = tuple(file for file in train if identity(file) not in apart)
    if not left:
        raise DataError(
            f"corpus {corpus.name!r}: all files of {corpus.source!r} are held out; name others in heldout"
        )
    return left, heldout


def is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def is_hidden(name: str) -> bool:
    """Is it, or a folder it is in, hidden?"""
    return any(part.startswith(".") and part not in (".", "..") for part in PurePosixPath(name).parts)


def check_suffix(corpus: Corpus, name: str, where: str) -> None:
    """Refuse a file that is not known to be text: nothing is left out silently."""
    if not name.lower().endswith(SUFFIXES):
        raise DataError(
            f"corpus {corpus.name!r}: {name} in {where} is none of {', '.join(SUFFIXES)}; "
            "move it away, or name the files by a pattern, e.g. source='folder/*.jsonl.zst'"
        )


def _split(source: Path) -> tuple[Path, tuple[str, ...]]:
    """A source as the folder it stands in and its name, or pattern, there. What exists is no pattern."""
    for place, part in enumerate(source.parts):
        if is_pattern(part) and not Path(*source.parts[: place + 1]).exists():
            return Path(*source.parts[:place]), source.parts[place:]
    return source.parent, ()


def _files(corpus: Corpus, source: Path, root: Path | None) -> tuple[Named, ...]:
    """The files that a file, folder or pattern means, in the order of their names (counted from `root`, if any)."""
    base, pattern = _split(source)
    if pattern:
        for part in pattern:
            if "**" in part and part != "**":
                raise DataError(
                    f"corpus {corpus.name!r}: in {source}, ** stands for whole folders; type **/{part.replace('**', '*')}"
                )
        found = dict.fromkeys(_matching(base, pattern))
    elif source.is_dir():
        base, found = source, dict.fromkeys(_below(source))
    elif source.is_file():
        found = {source: None}
    else:
        raise Absent(
            f"corpus {corpus.name!r}: {source} is not there; correct its source, or put the files there"
        )
    files = []
    for path in found:
        name = path.relative_to(root or base).as_posix()
        if not path.is_file():
            raise DataError(
                f"corpus {corpus.name!r}: {path} is no file and no folder (a broken link?); mend it or move it away"
            )
        check_suffix(corpus, name, str(source))
        files.append(Named(name, path))
    if not files:  # a folder whose disk is not mounted looks like this too
        raise Absent(f"corpus {corpus.name!r}: {source} holds no files; put {', '.join(SUFFIXES)} there")
    return tuple(sorted(files))


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as wrong:
        raise DataError(f"{folder} cannot be read ({wrong.strerror}); check its permissions") from None


def _folders(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """A folder and all below it that are not hidden; links are followed, but never back up."""
    real = folder.resolve()
    if real in above:
        return
    yield folder
    for entry in _entries(folder):
        if not entry.name.startswith(".") and entry.is_dir():
            yield from _folders(entry, above | {real})


def _below(folder: Path) -> Iterator[Path]:
    """Everything below a folder but folders and what is hidden."""
    for one in _folders(folder):
        yield from (entry for entry in _entries(one) if not entry.name.startswith(".") and not entry.is_dir())


def _matching(folder: Path, pattern: tuple[str, ...]) -> Iterator[Path]:
    """Everything but folders that a pattern means; like a shell's, it finds hidden names only if it says the dot."""
    part, rest = pattern[0], pattern[1:]
    if part == "**":
        for one in _folders(folder):
            yield from _matching(one, rest or ("*",))
        return
    if not is_pattern(part):
        found = [folder / part]
    else:
        dotted = part.startswith(".")
        found = [
            entry
            for entry in _entries(folder)
            if fnmatchcase(entry.name, part) and entry.name.startswith(".") == dotted
        ]
    for entry in found:
        if rest:
            yield from _matching(entry, rest)
        elif not entry.is_dir() and (entry.exists() or entry.is_symlink()):
            yield entry


# ---------------------------------------------------------------- identity
# Which content a corpus stands for, as a hash: the part of every key that lies outside the study file.
#
# - A hub corpus is its pinned source: the revision *is* the content. If it was tokenized from a folder instead
#   (`biphase tokenize NAME --from FOLDER`), the store holds a link, and the content of that folder counts: a
#   sample never passes for the whole.
# - A local or built-in corpus is the names and bytes of its files. Hashes are remembered by path, size, times of change
#   and inode, so that planning twice reads nothing twice. Whoever is about to read the files anyway hashes them again.
# - A store that was carried to a machine without the raw text keeps its keys: the published shards remember.
#
# Only the standard library is used here, because planning passes through.


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
            return content_key({"hub": corpus.source, "heldout": corpus.heldout})
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
        return content_key({"bpe": tokenizer.vocab, "content": corpus_fp})
    if not tokenizer.local:
        return content_key({"tokenizer": tokenizer.source, "revision": tokenizer.revision})
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
    return content_key({"tokenizer_files": listed})


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
    return (
        store.root
        / "corpora"
        / f"link-{content_key({'source': corpus.source, 'heldout': corpus.heldout})}.json"
    )


def read_link(corpus: Corpus, store: Store) -> dict[str, Any] | None:
    """The folder that stands for this hub corpus in this store, if one was named.

    A link that came with results from another machine has no folder: it only says which text they were made from.
    """
    path = link_path(corpus, store)
    return read_checked(path) if path.exists() else None


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
    write_json(path, with_checksum(here))


def _content(files: Files, store: Store, *, again: bool) -> str:
    cache = HashMemory(store, again=again)
    listed = {
        part: sorted([file.name, cache.sha256(file.path)] for file in group)
        for part, group in (("train", files.train), ("heldout", files.heldout))
    }
    cache.save()
    return content_key(listed)


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
    return {"stamp": now, "sha256": digest, "seal": content_key([place, now, digest])}


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
    metadata = store.metadata / store.shards.name
    names = {path.name for path in (*store.shards.glob("*"), *metadata.glob("*"))}
    for name in sorted(names):
        with contextlib.suppress(StoreError):
            yield read_card(store.told(store.shards / name))


# ---------------------------------------------------------------- sources
# Where the files of a corpus are: on this machine, or on the hub, from where they are streamed.
#
# A hub corpus is read file by file, in the order of their names, without a copy on disk; of parquet only the text
# column travels. Retries and waiting are the hub library's.


@dataclass(frozen=True)
class File:
    """A file of a corpus: its name there, its size, how to open it for reading bytes, and what to do if it fails."""

    name: str
    size: int
    open: Callable[[], IO[bytes]]
    remedy: str = "put a sound copy in its place"


def local(files: tuple[Named, ...]) -> list[File]:
    """Files on this machine."""
    return [
        File(file.name, file.path.stat().st_size, lambda path=file.path: path.open("rb")) for file in files
    ]


def on_hub(corpus: Corpus, filesystem: Any = None) -> tuple[list[File], list[File]]:
    """Training and held-out files of a hub corpus, to be streamed. `filesystem` is any fsspec one."""
    source = HubSource.of(corpus)
    root = f"datasets/{source.repository}@{source.revision}"
    try:
        if filesystem is None:
            from huggingface_hub import HfFileSystem

            filesystem = HfFileSystem()
        train, heldout = (
            _listed(corpus, filesystem, root, pattern) if pattern else ()
            for pattern in (source.pattern, corpus.heldout)
        )
    except DataError:
        raise
    except Exception as wrong:  # the hub's library raises many kinds: offline, refused, absent, rate limits
        raise DataError(
            f"corpus {corpus.name!r} cannot be listed on the hub ({one_line(wrong)}); {_offline(corpus)}"
        ) from wrong
    train, heldout = set_apart(corpus, train, heldout, lambda file: file.name)
    return list(train), list(heldout)


def _offline(corpus: Corpus) -> str:
    """How to do without the hub."""
    source = HubSource.of(corpus)
    words = ["hf", "download", source.repository, "--repo-type", "dataset", "--revision", source.revision]
    for pattern in filter(None, (source.pattern, corpus.heldout)):
        words += ["--include", pattern]
        if not is_pattern(pattern):  # it may be a folder
            words += ["--include", f"{pattern.rstrip('/')}/*"]
    return (
        f"where there is a network, type: {shlex.join(words)} --local-dir FOLDER; "
        f"and then: {tokenize_command(corpus)} --from FOLDER"
    )


def _listed(corpus: Corpus, filesystem: Any, root: str, pattern: str) -> tuple[File, ...]:
    """The files that a file, folder or pattern of a repository means, as in a copy of it on disk."""
    place = f"{root}/{pattern.rstrip('/')}"
    found = filesystem.glob(place, detail=True)
    if not is_pattern(pattern) and any(about["type"] != "file" for about in found.values()):  # a folder
        found = filesystem.find(place, detail=True)
    remedy = f"type the command again: it goes on where it was; or do without the hub: {_offline(corpus)}"
    files = []
    for path, about in sorted(found.items()):
        name = path.rpartition(f"{root}/")[2]
        hidden = is_hidden(name) and not is_hidden(pattern)  # unless it was asked for
        if about["type"] != "file" or hidden:
            continue
        check_suffix(corpus, name, corpus.source)
        files.append(File(name, int(about["size"]), lambda path=path: filesystem.open(path, "rb"), remedy))
    if not files:
        raise DataError(f"corpus {corpus.name!r}: no file of {root} matches {pattern!r}; correct its source")
    return tuple(files)
