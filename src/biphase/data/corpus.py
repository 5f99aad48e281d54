"""A corpus: which files it consists of, and the hash of its content; documents.py reads them.

Files (`resolve`, `on_hub`). A source is a file, a folder (everything below it) or a pattern (`*`, `?`, `[…]`, and `**`
for any folders). Held-out files are named the same way, relative to the source's folder. Symbolic links are followed
unless they lead back into a parent folder. Hidden files (.DS_Store, .cache/…) are skipped; any other file of an unknown
type is an error, so that no text is left out silently. A hub corpus is streamed in the order of its files' names
without a copy on disk, or read from a local copy of its repository.

Content (`fingerprints`). The hash of a corpus's content is the part of every key that lies outside the study file:
- A hub corpus is identified by its source with the pinned revision. If it was tokenized from a folder
  (`biphase tokenize NAME --from FOLDER`), the store holds a link, and the content of that folder is hashed instead, so
  that a sample cannot pass for the whole corpus.
- A local or built-in corpus is identified by the names and bytes of its files. Hashes are cached by path, size, change
  times and inode, so that planning again reads nothing. Tokenizing hashes again what was not hashed within a day.
- On a machine without the raw text, the fingerprints recorded in published shards are used, so that keys stay the same.

Planning imports this module, so it imports pyarrow and huggingface_hub only where they are used.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from biphase import keys
from biphase.errors import DataError, StoreError, one_line
from biphase.leases import Lease, Leases
from biphase.metadata import read_card
from biphase.presets import CORPORA
from biphase.records import content_key, encode
from biphase.remote import explained, patiently, refuse_branch, refusing
from biphase.specs import BPE, Corpus, Pretrained
from biphase.store import Store, read_checked, sha256, stamp, with_checksum, write_json

ASSETS = Path(__file__).resolve().parents[1] / "assets"
SEPARATED = tuple(f".{kind}{packed}" for kind in ("csv", "tsv") for packed in ("", ".gz", ".zst"))
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", *SEPARATED, ".parquet")
_BUILTIN = "builtin:"


class Absent(DataError):
    """The raw files are not on this machine; results made from them may still be in the store."""


def refusal(corpus: Corpus, why: str, kind: type[DataError] = DataError) -> DataError:
    return kind(f"corpus {corpus.name!r}: {why}")


@dataclass(frozen=True)
class File:
    """A file of a corpus."""

    name: str  # inside the corpus, the same on every machine
    path: Any  # a Path on this machine, or a str in `filesystem`
    size: int
    filesystem: Any = None  # of the hub, as fsspec defines file systems
    page: str = ""  # of its repository on the hub
    remedy: str = "replace it with an intact copy"  # for the message if reading fails

    def open(self) -> IO[bytes]:
        return self.filesystem.open(self.path, "rb") if self.filesystem else self.path.open("rb")

    def explained(self, wrong: Exception) -> str:
        """Return why it cannot be read, and what to type."""
        return explained(wrong, self.page, self.remedy) if self.page else f"{one_line(wrong)}; {self.remedy}"

    @property
    def identity(self) -> object:
        """The same for two spellings of one file."""
        return self.path if self.filesystem else self.path.resolve()


class Files(NamedTuple):
    train: tuple[File, ...]
    heldout: tuple[File, ...] = ()


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


# ---------------------------------------------------------------- files on this machine


def resolve(corpus: Corpus, folder: Path | None = None) -> Files:
    """Return the files of a local or built-in corpus, or of a hub corpus in `folder`, a copy of its repository."""
    root = folder if corpus.hub else None
    if corpus.hub:
        if folder is None:
            raise refusal(corpus, f"it is on the hub; type: {tokenize_command(corpus)} --from FOLDER")
        base, source = folder, folder / corpus.place.path
    elif corpus.source.startswith(_BUILTIN):
        base, source = ASSETS, ASSETS / corpus.source.removeprefix(_BUILTIN)
    else:
        source = Path(corpus.source).expanduser()
        base = _split(source)[0]
    train = _files(corpus, source, root)
    if not corpus.heldout:
        return Files(train)
    try:
        heldout = _files(corpus, base / Path(corpus.heldout).expanduser(), root)
    except Absent as wrong:
        # Not Absent: the training files are here, so recorded fingerprints must not be used.
        raise DataError(str(wrong)) from None
    return _set_apart(corpus, train, heldout)


def _set_apart(corpus: Corpus, train: tuple[File, ...], heldout: tuple[File, ...]) -> Files:
    """Remove the held-out files from the training files."""
    apart = {file.identity for file in heldout}
    left = tuple(file for file in train if file.identity not in apart)
    if not left:
        raise refusal(corpus, f"all files of {corpus.source!r} are held out; name others in heldout")
    return Files(left, heldout)


def is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def _check_suffix(corpus: Corpus, name: str, where: str) -> None:
    """Raise DataError for a file of an unknown type, so that nothing is left out silently."""
    if not name.lower().endswith(SUFFIXES):
        why = f"{name} in {where} is none of {', '.join(SUFFIXES)}"
        raise refusal(corpus, f"{why}; move it away, or name a pattern, e.g. source='folder/*.jsonl.zst'")


def _split(source: Path) -> tuple[Path, tuple[str, ...]]:
    """Split a source into its folder and the parts of its pattern, () if it is no pattern.

    A part that exists on disk is taken literally even if it contains `*`, `?` or `[`.
    """
    for depth, part in enumerate(source.parts):
        if is_pattern(part) and not Path(*source.parts[: depth + 1]).exists():
            return Path(*source.parts[:depth]), source.parts[depth:]
    return source.parent, ()


def _files(corpus: Corpus, source: Path, root: Path | None) -> tuple[File, ...]:
    """Return the files of a file, folder or pattern, sorted by name (relative to `root`, if given)."""
    base, pattern = _split(source)
    for part in pattern:
        if "**" in part and part != "**":
            mended = part.replace("**", "*")
            raise refusal(corpus, f"in {source}, ** stands for whole folders; type **/{mended}")
    if not pattern and source.is_file():
        paths = {source}
    elif not pattern and not source.is_dir():
        raise refusal(corpus, f"{source} is not there; correct its source, or put the files there", Absent)
    else:
        base, pattern = (base, pattern) if pattern else (source, ("**",))
        paths = set(_matching(base, pattern))
    files = []
    for path in paths:
        name = path.relative_to(root or base).as_posix()
        if not path.is_file():
            why = "is no file and no folder (a broken link?)"
            raise refusal(corpus, f"{path} {why}; mend it or move it away")
        _check_suffix(corpus, name, str(source))
        files.append(File(name, path, path.stat().st_size))
    if not files:  # Absent, since the mount point of an unmounted disk is an empty folder
        raise refusal(corpus, f"{source} holds no files; put {', '.join(SUFFIXES)} there", Absent)
    return tuple(sorted(files, key=lambda file: file.name))


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
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


def _matching(folder: Path, pattern: tuple[str, ...]) -> Iterator[Path]:
    """Yield the entries that match a pattern, except folders; as in a shell, hidden names need an explicit dot."""
    part, rest = pattern[0], pattern[1:]
    if part == "**":
        for below in _folders(folder):
            yield from _matching(below, rest or ("*",))
        return
    entries = [folder / part]
    if is_pattern(part):
        shown = (entry for entry in _entries(folder) if entry.name.startswith(".") == part.startswith("."))
        entries = [entry for entry in shown if fnmatchcase(entry.name, part)]
    for entry in entries:
        if rest:
            yield from _matching(entry, rest)
        elif not entry.is_dir() and (entry.exists() or entry.is_symlink()):
            yield entry


# ---------------------------------------------------------------- files on the hub


def on_hub(corpus: Corpus, filesystem: Any = None) -> Files:
    """Return the files of a hub corpus, to be streamed. `filesystem` is any fsspec one."""
    source = corpus.place
    page, what = f"datasets/{source.repository}", str(refusal(corpus, "it cannot be listed on the hub"))
    root = f"{page}@{source.revision}"
    with refusing(DataError, what, page, _offline(corpus)):
        if filesystem is None:
            from huggingface_hub import HfFileSystem

            refuse_branch(source.repository, source.revision, "dataset")
            filesystem = HfFileSystem()
        train, heldout = patiently(
            lambda: [
                _listed(corpus, filesystem, root, pattern) if pattern else ()
                for pattern in (source.path, corpus.heldout)
            ]
        )
    return _set_apart(corpus, train, heldout)


def _offline(corpus: Corpus) -> str:
    """Return the commands that get the corpus from another machine with network access."""
    source = corpus.place
    words = ["hf", "download", source.repository, "--repo-type", "dataset", "--revision", source.revision]
    for pattern in filter(None, (source.path, corpus.heldout)):
        words += ["--include", pattern]
        if not is_pattern(pattern):  # it may be a folder
            words += ["--include", f"{pattern.rstrip('/')}/*"]
    return (
        f"where there is a network, type: {shlex.join(words)} --local-dir FOLDER; "
        f"and then: {tokenize_command(corpus)} --from FOLDER"
    )


def _listed(corpus: Corpus, filesystem: Any, root: str, pattern: str) -> tuple[File, ...]:
    """Return the files of a file, folder or pattern in a repository, by the same rules as on disk."""
    path = f"{root}/{pattern.rstrip('/')}"
    entries = filesystem.glob(path, detail=True)
    if not is_pattern(pattern) and any(entry["type"] != "file" for entry in entries.values()):  # a folder
        entries = filesystem.find(path, detail=True)
    page = f"datasets/{corpus.place.repository}"
    remedy = f"type the command again: it goes on where it was; or do without the hub: {_offline(corpus)}"
    files = []
    for path, entry in sorted(entries.items()):
        name = path.rpartition(f"{root}/")[2]
        hidden = _is_hidden(name) and not _is_hidden(pattern)  # the pattern may name it
        if entry["type"] == "file" and not hidden:
            _check_suffix(corpus, name, corpus.source)
            files.append(File(name, path, int(entry["size"]), filesystem, page, remedy))
    if not files:
        raise refusal(corpus, f"no file of {root} matches {pattern!r}; correct its source")
    return tuple(files)


def _is_hidden(name: str) -> bool:
    """Return whether a file or one of its folders is hidden."""
    return any(part.startswith(".") and part not in (".", "..") for part in PurePosixPath(name).parts)


# ---------------------------------------------------------------- content


READERS = min(8, os.cpu_count() or 1)  # files hashed in parallel
BATCH_BYTES = 2**30  # of files that one worker hashes for all
SMALL_BYTES = 2**26  # less is hashed faster than a lease is taken
LARGE_BYTES = 2**24  # of a file that is not hashed again within a day
DAY = 24 * 3600.0
WAIT_SECONDS = 1.0  # between two looks at what another worker hashes
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
    """Return the hash of the corpus's content; if local files are absent, the one recorded in link or shards."""
    link = read_link(corpus, store) if corpus.hub else None
    if corpus.hub and not link:
        return content_key({"hub": corpus.source, "heldout": corpus.heldout})
    if link and "folder" not in link:
        return link["fingerprint"]
    try:
        return _content(resolve(corpus, Path(link["folder"]) if link else None), store, again=again)
    except Absent as absent:
        return link["fingerprint"] if link else _recorded(corpus, store, "fingerprint", absent)


def tokenizer_fingerprint(corpus: Corpus, corpus_fp: str, store: Store, *, again: bool = False) -> str:
    """Return the hash of what determines the tokenizer; if local files are absent, the one recorded in the shards."""
    tokenizer = corpus.tokenizer
    if isinstance(tokenizer, BPE) and not tokenizer.on:
        return content_key({"bpe": tokenizer.vocab, "content": corpus_fp})
    if isinstance(tokenizer, Pretrained) and not tokenizer.local:
        return content_key({"tokenizer": tokenizer.source, "revision": tokenizer.revision})
    try:
        if isinstance(tokenizer, BPE):
            assert tokenizer.on
            return content_key(
                {"of_shards": fingerprints(tokenizer.on, store, again=again).key(tokenizer.on)}
            )
        paths = tokenizer_files(tokenizer)
    except Absent as absent:
        return _recorded(corpus, store, "tokenizer_fingerprint", absent)
    hashes = HashMemory(store, again=again).hashes(list(paths.values()))
    return content_key({"tokenizer_files": [list(pair) for pair in zip(paths, hashes, strict=True)]})


def tokenizer_files(tokenizer: Pretrained) -> dict[str, Path]:
    """Return the paths of a local tokenizer's files by their names, tokenizer.json first."""
    source = Path(tokenizer.source).expanduser()
    main = source if source.suffix == ".json" else source / TOKENIZER_FILES[0]
    if not main.is_file():
        raise Absent(
            f"tokenizer {tokenizer.source!r}: {main} is not there; "
            "type Pretrained('./folder') for a folder that holds a tokenizer.json, or BPE(32_000) to train one"
        )
    beside = {name: main.parent / name for name in TOKENIZER_FILES[1:]}
    return {TOKENIZER_FILES[0]: main} | {name: path for name, path in beside.items() if path.is_file()}


def link_path(corpus: Corpus, store: Store) -> Path:
    """Return the path of a hub corpus's link, named by a hash of its source, since two corpora can share a name."""
    name = content_key({"source": corpus.source, "heldout": corpus.heldout})
    return store.root / "corpora" / f"link-{name}.json"


def read_link(corpus: Corpus, store: Store) -> dict[str, Any] | None:
    """Return the link to the folder that replaces this hub corpus in this store, if there is one.

    A link merged from another machine's archive has no "folder", only the fingerprint of the text that was used.
    """
    path = link_path(corpus, store)
    return read_checked(path) if path.exists() else None


def write_link(corpus: Corpus, store: Store, folder: Path) -> None:
    """Make `folder`, a copy of the repository or of a part of it, replace this hub corpus in this store."""
    if not corpus.hub:
        raise refusal(corpus, f"it is not on the hub, its source is {corpus.source!r}; leave out --from")
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; --from takes a copy of the repository of {corpus.source}")
    folder = folder.resolve()
    content = _content(resolve(corpus, folder), store)
    link = {"source": corpus.source, "heldout": corpus.heldout, "folder": str(folder), "fingerprint": content}
    path = link_path(corpus, store)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, with_checksum(link))


def _content(files: Files, store: Store, *, again: bool = False) -> str:
    every = [file.path for group in files for file in group]
    hashes = iter(HashMemory(store, again=again).hashes(every, at_once=READERS))
    return content_key(
        {part: sorted([file.name, next(hashes)] for file in group) for part, group in files._asdict().items()}
    )


class HashMemory:
    """A cache of file hashes by path, size, change times and inode, shared by all workers of a store.

    Losing it costs only time. Of the workers that need the hashes of the same files, one hashes each batch of
    BATCH_BYTES under a lease and the others take its result: a corpus of 400 GB is read once and not once a worker.
    With `again`, a hash counts only if this process has computed it, or if the file is larger than LARGE_BYTES and a
    worker has hashed it within a day.
    """

    def __init__(self, store: Store, *, again: bool = False) -> None:
        self.path = store.root / "corpora" / "cache.json"
        self.leases = Leases(store.leases)
        self.hashed, self.again, self.verify = store.hashed, again or store.verify, store.verify
        self.entries: dict[str, Any] = {}  # of each file, its stamp, its hash, and when its content was read
        self.changed: dict[str, Any] = {}  # those that are not saved yet
        self._reload()

    def _reload(self) -> None:
        with contextlib.suppress(StoreError):  # checked, since a corrupt hash would change keys
            self.entries = read_checked(self.path) | self.changed

    def sha256(self, path: Path) -> str:
        try:
            before = stamp(path)
            if digest := self._known(path, before):
                return digest
            digest = sha256(path)
            after = stamp(path)
        except OSError as wrong:
            raise DataError(f"{path} cannot be read ({wrong.strerror}); check its permissions") from None
        if after != before:
            raise DataError(f"{path} is being written; type the command again when it is whole")
        self.hashed[str(path.resolve())] = before
        self.remember(path, digest, at=time.time())
        return digest

    def hashes(self, paths: Sequence[Path], *, at_once: int = 1) -> list[str]:
        """Return the hashes of files, and save those that were not known; `at_once` is the number of threads."""
        shared = self.path.parents[1].is_dir() and not self.verify
        batches = list(_batches(paths)) if shared else []
        while batches := [batch for batch in batches if self._unknown(batch) > SMALL_BYTES]:
            began = len(batches)
            for batch in list(batches):
                lease = self._lease(f"hashes-{content_key([str(path.resolve()) for path in batch])}")
                if lease is None:  # another worker hashes it
                    continue
                with lease:
                    self._reload()  # its last holder may have just ended
                    self._hash(batch, at_once)
                    self.save()
                batches.remove(batch)
            if len(batches) == began:
                time.sleep(WAIT_SECONDS)
            self._reload()
        digests = self._hash(paths, at_once)
        self.save()
        return digests

    def _hash(self, paths: Sequence[Path], at_once: int) -> list[str]:
        with ThreadPoolExecutor(at_once) as pool:  # hashlib releases the GIL
            return list(pool.map(self.sha256, paths))

    def _known(self, path: Path, now: list[int]) -> str:
        """Return the remembered hash of a file with the stamp `now`, or "" if its content must be read."""
        real = str(path.resolve())
        known, digest, *at = self.entries.get(_entry(real, now), (None, ""))
        if known != now:
            return ""
        fresh = now[0] > LARGE_BYTES and bool(at) and 0 <= time.time() - at[0] < DAY and not self.verify
        return digest if not self.again or fresh or self.hashed.get(real) == now else ""

    def _unknown(self, paths: Sequence[Path]) -> int:
        """Return how many bytes of files are to be hashed; unreadable ones are reported when that is tried."""
        size = 0
        for path in paths:
            with contextlib.suppress(OSError):
                now = stamp(path)
                size += 0 if self._known(path, now) else now[0]
        return size

    def remember(self, path: Path, digest: str, *, at: float = 0.0) -> None:
        """Cache a file's hash for as long as its stamp does not change; `at`: when its content was read, if it was."""
        now = stamp(path)
        name = _entry(str(path.resolve()), now)
        self.entries[name] = self.changed[name] = [now, digest, at]

    def save(self) -> None:
        """Add the new hashes to those that other processes have saved meanwhile."""
        if not self.changed or not self.path.parents[1].is_dir():  # planning must not create a store
            return
        with contextlib.suppress(OSError):  # planning also works on a read-only store
            self.path.parent.mkdir(parents=True, exist_ok=True)
            until = time.monotonic() + WAIT_SECONDS * 20
            while (lease := self.leases.take("hashes")) is None and time.monotonic() < until:
                time.sleep(WAIT_SECONDS / 20)
            try:
                self._reload()
                write_json(self.path, with_checksum(self.entries))
                self.changed = {}
            finally:
                if lease:
                    lease.release()

    def _lease(self, key: str) -> Lease | contextlib.AbstractContextManager[None] | None:
        try:
            return self.leases.take(key)
        except OSError:  # a read-only store: nobody can share anything there
            return contextlib.nullcontext()


def _entry(real: str, now: list[int]) -> str:
    """Name a file in the cache: copies at one path on several machines differ in their inodes."""
    return f"{now[3]}:{real}"


def _batches(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield the files in groups of BATCH_BYTES or one file, the same in every process."""
    batch: list[Path] = []
    size = 0
    for path in paths:
        with contextlib.suppress(OSError):
            batch.append(path)
            size += path.stat().st_size
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    yield batch


def _recorded(corpus: Corpus, store: Store, field: str, absent: Absent) -> str:
    """Return the fingerprint recorded in the published shards of the same corpus record; raise `absent` if none."""
    recorded = {card[field] for card in cards(store) if card["corpus"] == encode(corpus)}
    if not recorded:
        raise absent
    if len(recorded) > 1:
        why = f"its files are absent and {store.shards} holds several versions of it"
        raise refusal(corpus, f"{why}; put the files back, or remove the shards that are not meant")
    return recorded.pop()


def cards(store: Store) -> Iterable[dict[str, Any]]:
    """Yield the cards of a store's tokenized corpora, including metadata-only ones, skipping damaged ones."""
    metadata = store.metadata / store.shards.name
    names = {path.name for path in (*store.shards.glob("*"), *metadata.glob("*"))}
    for name in sorted(names):
        with contextlib.suppress(StoreError):
            yield read_card(store.readable(store.shards / name))
