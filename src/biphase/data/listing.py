"""Which files a corpus means on this machine, and what each is called.

A source is a file, a folder (everything below it) or a pattern (`*`, `?`, `[…]`, and `**` for any folders). Held-out
files are named the same way, from where the source stands. Links are followed, unless back into a folder they
came from. What is hidden (.DS_Store, .cache/…) is never text; anything else that is not a readable kind of file
is refused, so that nothing is left out silently. A hub corpus is looked for in a copy of its repository.

Only the standard library is used here, because planning passes through.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TypeVar

from biphase.errors import DataError
from biphase.presets import CORPORA
from biphase.specs import BPE, Corpus

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
