"""A corpus: which files it consists of, the hash of its content, and how to open its files.

Files (`resolve`). A source is a file, a folder (everything below it) or a pattern (`*`, `?`, `[…]`, and `**` for any
folders). Held-out files are named the same way, relative to the source's folder. Symbolic links are followed unless
they lead back into a parent folder. Hidden files (.DS_Store, .cache/…) are skipped; any other file of an unknown type
is an error, so that no text is left out silently. A hub corpus can be read from a local copy of its repository.

Content (`fingerprints`). The hash of a corpus's content is the part of every key that lies outside the study file:
- A hub corpus is identified by its source with the pinned revision. If it was tokenized from a folder
  (`biphase tokenize NAME --from FOLDER`), the store holds a link, and the content of that folder is hashed instead, so
  that a sample cannot pass for the whole corpus.
- A local or built-in corpus is identified by the names and bytes of its files. Hashes are cached by path, size, change
  times and inode, so that planning again reads nothing; tokenizing, which reads the files anyway, hashes them again.
- On a machine without the raw text, the fingerprints recorded in published shards are used, so that keys stay the same.

Reading (`local`, `on_hub`). Hub files are streamed in the order of their names without a copy on disk; of parquet files
only the text column is transferred. The hub library handles retries.

This module uses the standard library only (huggingface_hub is imported where a hub is read), since planning imports it.
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
    """The raw files are not on this machine; results made from them may still be in the store."""


@dataclass(frozen=True, order=True)
class Named:
    """A file of a corpus with its name inside the corpus, which is the same on every machine."""

    name: str
    path: Path


@dataclass(frozen=True)
class Files:
    train: tuple[Named, ...]
    heldout: tuple[Named, ...]


@dataclass(frozen=True)
class HubSource:
    """The parts of `hf://owner/name@revision/glob`."""

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
    """Return the command that tokenizes this corpus, without `--store`, `--from` and the like."""
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
    """Return the files of a local or built-in corpus, or of a hub corpus in `folder`, a copy of its repository."""
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
    except (
        Absent
    ) as wrong:  # not Absent: the training files are here, so recorded fingerprints must not be used
        raise DataError(str(wrong)) from None
    return Files(*set_apart(corpus, train, heldout, lambda file: file.path.resolve()))


Kind = TypeVar("Kind")


def set_apart(
    corpus: Corpus, train: tuple[Kind, ...], heldout: tuple[Kind, ...], identity: Callable[[Kind], object]
) -> tuple[tuple[Kind, ...], tuple[Kind, ...]]:
    """Remove the held-out files from the training files, comparing them by `identity`; return both."""
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
    """Return whether a file or one of its folders is hidden."""
    return any(part.startswith(".") and part not in (".", "..") for part in PurePosixPath(name).parts)


def check_suffix(corpus: Corpus, name: str, where: str) -> None:
    """Raise DataError for a file of an unknown type, so that nothing is left out silently."""
    if not name.lower().endswith(SUFFIXES):
        raise DataError(
            f"corpus {corpus.name!r}: {name} in {where} is none of {', '.join(SUFFIXES)}; "
            "move it away, or name the files by a pattern, e.g. source='folder/*.jsonl.zst'"
        )


def _split(source: Path) -> tuple[Path, tuple[str, ...]]:
    """Split a source into its folder and the parts of its pattern, () if it is no pattern.

    A part that exists on disk is taken literally even if it contains `*`, `?` or `[`.
    """
    for place, part in enumerate(source.parts):
        if is_pattern(part) and not Path(*source.parts[: place + 1]).exists():
            return Path(*source.parts[:place]), source.parts[place:]
    return source.parent, ()


def _files(corpus: Corpus, source: Path, root: Path | None) -> tuple[Named, ...]:
    """Return the files of a file, folder or pattern, sorted by name (relative to `root`, if given)."""
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
    if not files:  # Absent, since the mount point of an unmounted disk is an empty folder
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
    """Yield a folder and all folders below it that are not hidden; follow links, except to a parent folder."""
    real = folder.resolve()
    if real in above:
        return
    yield folder
    for entry in _entries(folder):
        if not entry.name.startswith(".") and entry.is_dir():
            yield from _folders(entry, above | {real})


def _below(folder: Path) -> Iterator[Path]:
    """Yield all entries below a folder that are neither folders nor hidden."""
    for one in _folders(folder):
        yield from (entry for entry in _entries(one) if not entry.name.startswith(".") and not entry.is_dir())


def _matching(folder: Path, pattern: tuple[str, ...]) -> Iterator[Path]:
    """Yield the entries that match a pattern, except folders; as in a shell, hidden names need an explicit dot."""
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
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class Fingerprints:
    """The hashes of the inputs of a tokenized corpus, taken at one time."""

    content: str
    tokenizer: str

    def key(self, corpus: Corpus) -> str:
        """Return the key of the shards."""
        return keys.data_key(corpus, self.content, self.tokenizer)


def fingerprints(corpus: Corpus, store: Store, *, again: bool = False) -> Fingerprints:
    """Return the hashes of a corpus's content and tokenizer; `again` ignores cached hashes of other processes."""
    content = corpus_fingerprint(corpus, store, again=again)
    return Fingerprints(content, tokenizer_fingerprint(corpus, content, store, again=again))


def shards_key(corpus: Corpus, store: Store) -> str:
    """Return the key of the tokenized corpus, whether or not its shards exist."""
    return fingerprints(corpus, store).key(corpus)


def corpus_fingerprint(corpus: Corpus, store: Store, *, again: bool = False) -> str:
    """Return the hash of the corpus's content."""
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
    """Return the content hash of a local copy of a hub corpus."""
    return _content(resolve(corpus, folder), store, again=again)


def tokenizer_fingerprint(corpus: Corpus, corpus_fp: str, store: Store, *, again: bool = False) -> str:
    """Return the hash of what determines the tokenizer; if local files are absent, the one recorded in the shards."""
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
    """Return the files of a local tokenizer, tokenizer.json first."""
    source = Path(tokenizer.source).expanduser()
    main = source if source.suffix == ".json" else source / TOKENIZER_FILES[0]
    if not main.is_file():
        raise Absent(
            f"tokenizer {tokenizer.source!r}: {main} is not there; "
            "type Pretrained('./folder') for a folder that holds a tokenizer.json, or BPE(32_000) to train one"
        )
    beside = [Named(name, main.parent / name) for name in TOKENIZER_FILES[1:]]
    return Named(TOKENIZER_FILES[0], main), *(file for file in beside if file.path.is_file())


# ---------------------------------------------------------------- links and cached hashes


def link_path(corpus: Corpus, store: Store) -> Path:
    """Return the path of a hub corpus's link, named by a hash of its source, since two corpora can share a name."""
    return (
        store.root
        / "corpora"
        / f"link-{content_key({'source': corpus.source, 'heldout': corpus.heldout})}.json"
    )


def read_link(corpus: Corpus, store: Store) -> dict[str, Any] | None:
    """Return the link to the folder that replaces this hub corpus in this store, if there is one.

    A link merged from another machine's archive has no "folder", only the fingerprint of the text that was used.
    """
    path = link_path(corpus, store)
    return read_checked(path) if path.exists() else None


def write_link(corpus: Corpus, store: Store, folder: Path) -> None:
    """Make `folder`, a copy of the repository or of a part of it, replace this hub corpus in this store."""
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
    """A cache of file hashes by path, size, change times and inode. Losing it costs only time.

    With `again`, only hashes that this process has computed itself are used.
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
        """Cache a file's hash for as long as its stamp does not change."""
        place = str(path.resolve())
        self.known[place] = _remembered(place, stamp(path), {"sha256": digest})
        self.changed = True

    def save(self) -> None:
        if self.changed and self.path.parents[1].is_dir():  # planning must not create a store
            with contextlib.suppress(OSError):  # planning also works on a read-only store
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_json(self.path, self.known)


def _remembered(place: str, now: list[int], entry: Any) -> dict[str, Any]:
    """Return a cache entry with a checksum, since a corrupt hash would change every key that depends on it."""
    digest = str(entry.get("sha256")) if isinstance(entry, dict) else ""
    return {"stamp": now, "sha256": digest, "seal": content_key([place, now, digest])}


def _recorded(corpus: Corpus, store: Store, field: str) -> str:
    """Return a fingerprint recorded in the published shards of the same corpus record, or ""."""
    found = {card[field] for card in cards(store) if card.get("corpus") == encode(corpus) and card.get(field)}
    if len(found) > 1:
        raise DataError(
            f"corpus {corpus.name!r}: its files are absent and {store.shards} holds "
            "several versions of it; put the files back, or remove the shards that are not meant"
        )
    return found.pop() if found else ""


def cards(store: Store) -> Iterable[dict[str, Any]]:
    """Yield the cards of a store's tokenized corpora, including metadata-only ones, skipping damaged ones."""
    metadata = store.metadata / store.shards.name
    names = {path.name for path in (*store.shards.glob("*"), *metadata.glob("*"))}
    for name in sorted(names):
        with contextlib.suppress(StoreError):
            yield read_card(store.readable(store.shards / name))


# ---------------------------------------------------------------- sources


@dataclass(frozen=True)
class File:
    """A readable file of a corpus: name, size, a function that opens it, and what to tell the user if reading fails."""

    name: str
    size: int
    open: Callable[[], IO[bytes]]
    remedy: str = "put a sound copy in its place"


def local(files: tuple[Named, ...]) -> list[File]:
    """Return files on this machine, ready to be opened."""
    return [
        File(file.name, file.path.stat().st_size, lambda path=file.path: path.open("rb")) for file in files
    ]


def on_hub(corpus: Corpus, filesystem: Any = None) -> tuple[list[File], list[File]]:
    """Return the training and held-out files of a hub corpus, to be streamed. `filesystem` is any fsspec one."""
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
    except Exception as wrong:  # the hub library raises many types: offline, refused, absent, rate limits
        raise DataError(
            f"corpus {corpus.name!r} cannot be listed on the hub ({one_line(wrong)}); {_offline(corpus)}"
        ) from wrong
    train, heldout = set_apart(corpus, train, heldout, lambda file: file.name)
    return list(train), list(heldout)


def _offline(corpus: Corpus) -> str:
    """Return the commands that get the corpus from another machine with network access."""
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
    """Return the files of a file, folder or pattern in a repository, by the same rules as on disk."""
    place = f"{root}/{pattern.rstrip('/')}"
    found = filesystem.glob(place, detail=True)
    if not is_pattern(pattern) and any(about["type"] != "file" for about in found.values()):  # a folder
        found = filesystem.find(place, detail=True)
    remedy = f"type the command again: it goes on where it was; or do without the hub: {_offline(corpus)}"
    files = []
    for path, about in sorted(found.items()):
        name = path.rpartition(f"{root}/")[2]
        hidden = is_hidden(name) and not is_hidden(pattern)  # the pattern may name it
        if about["type"] != "file" or hidden:
            continue
        check_suffix(corpus, name, corpus.source)
        files.append(File(name, int(about["size"]), lambda path=path: filesystem.open(path, "rb"), remedy))
    if not files:
        raise DataError(f"corpus {corpus.name!r}: no file of {root} matches {pattern!r}; correct its source")
    return tuple(files)
