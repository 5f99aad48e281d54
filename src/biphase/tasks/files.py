"""Files of a task: where they are, their identity, and their rows.

`files_of` returns the local files of each split and downloads those on the hub; `task_key` identifies what a task
reads and how it is trained; `read` yields rows with only the requested columns; `column_names` lists the columns of
a file.

A source is a folder, one file (the train split; the others are beside it), `builtin:tasks/NAME` or
`hf://owner/name@revision/folder`. Splits are names or patterns below it, in which `*` does not match a slash:
"train*" matches train.parquet, train-00000-of-00002.parquet or train.jsonl.zst, but nothing in train_extra/. If no
file matches, the files in a folder of that name are used: "corpus*" finds corpus/corpus-00000-of-00001.parquet. A
name may omit .gz or .zst, and case is ignored if nothing matches exactly. Files of other kinds (README.md) are
ignored, and so are files in CoNLL columns where there are tables.

Hub files are in the hub library's own cache. Files already there are read without a network; an interrupted
download is never taken for a complete one, since the library keeps a list of the files.

    parquet, arrow   a row is a row; its place is its number
    jsonl, json      a row is a line that holds an object
    json             or the whole file is an array of rows, or an object with one under "data"; in SQuAD's own
                     layout a row is a question. Its place is its number
    csv              a header line, commas (or ; tab | if the header has more of them), usual quotes
    tsv              a header line, tabs, no quotes: GLUE's files have stray ones
    conll, txt, …    CoNLL columns, one word and its tags per line, sentences separated by blank lines: columns tokens
                     and tags; also a tsv whose first line has a tag

Text files may be compressed (.gz, .zst); their places are line numbers. A column may be requested by alternatives,
"tokens|words". Files are read in the given order and in chunks, so that only the wanted rows of a large corpus need
memory.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import glob
import io
import json
import re
import shlex
import sys
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import islice, product
from pathlib import Path, PurePosixPath
from typing import Any

from biphase.data.corpus import ASSETS, Absent, HashMemory, is_pattern
from biphase.errors import DataError, SpecError, nearest, one_line
from biphase.records import content_key, encode
from biphase.specs import Task
from biphase.store import Store
from biphase.text import counted

SIGN = "hf://"


@dataclass(frozen=True)
class HubPlace:
    """The parts of `hf://owner/name@revision/path`; the path may be a pattern, and path and revision may be empty."""

    repository: str
    revision: str
    path: str

    @classmethod
    def of(cls, whose: str, text: str) -> HubPlace:
        owner, _, rest = text.removeprefix(SIGN).partition("/")
        repository, _, path = rest.partition("/")
        name, at, revision = repository.partition("@")
        if not owner or not name or bool(at) != bool(revision):
            raise DataError(f"{whose}: {text!r} is not hf://owner/name@revision/folder; correct it")
        if ".." in PurePosixPath(path).parts or path.startswith(("/", "~")):
            raise DataError(f"{whose}: {text!r} leaves its repository; name files inside it")
        return cls(f"{owner}/{name}", revision, path.rstrip("/"))

    def below(self, place: str) -> HubPlace:
        """Return a place in this folder."""
        return replace(self, path=f"{self.path}/{place}" if self.path else place)

    @property
    def address(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"{SIGN}{self.repository}{at}/{self.path}"

    @property
    def name(self) -> str:
        """The repository without its owner: the name of a local copy's folder."""
        return self.repository.split("/")[1]

    @property
    def remedy(self) -> str:
        """How to do without the hub, for messages."""
        words = ["hf", "download", self.repository, "--repo-type", "dataset"]
        words += ["--revision", self.revision] if self.revision else []
        return (
            f"where there is a network, type: {shlex.join(words)} --local-dir FOLDER/{self.name}; "
            "and then add: --data FOLDER"
        )


def refuse_unpinned(whose: str, place: HubPlace) -> None:
    """Refuse a place on the hub without a pinned commit."""
    if not place.revision:
        raise DataError(
            f"{whose}: no commit of {place.repository} is pinned; name the one its page shows: task.pin('…'); "
            f"or read a copy: {place.remedy}"
        )


def listing(whose: str, place: HubPlace) -> list[str]:
    """Return the names of all files of the repository."""
    refuse_unpinned(whose, place)
    try:
        from huggingface_hub import HfApi, get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        try:
            known = get_cached_repo_tree(place.repository, repo_type="dataset", revision=place.revision)
            return [file.path for file in known]
        except CachedRepoTreeNotFoundError:
            return HfApi().list_repo_files(place.repository, repo_type="dataset", revision=place.revision)
    except Exception as wrong:  # the hub's library raises many kinds: offline, refused, absent, rate limits
        raise DataError(
            f"{whose}: {place.repository} cannot be listed on the hub ({one_line(wrong)}); {place.remedy}"
        ) from wrong


def download(whose: str, place: HubPlace, names: list[str]) -> tuple[Path, ...]:
    """Download these files of the repository and return their local paths."""
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            place.repository,
            repo_type="dataset",
            revision=place.revision,
            allow_patterns=[glob.escape(name) for name in names],
        )
    except Exception as wrong:
        raise DataError(
            f"{whose}: {place.repository} cannot be downloaded from the hub ({one_line(wrong)}); {place.remedy}"
        ) from wrong
    return tuple(Path(folder) / name for name in names)


# ---------------------------------------------------------------- which files, and their identity
# This section uses only the standard library, because planning calls it.


# Raise this when the same files and record would be read as other examples than before.
GENERATION = 1

KINDS = (".parquet", ".arrow", ".jsonl", ".json", ".csv", ".tsv")
# CoNLL columns
COLUMNS = (".conll", ".iob", ".iob2", ".bio", ".txt", ".train", ".dev", ".test", ".testa", ".testb")
# Files beside the rows of a dataset that describe them.
LISTS = ("labels.json", "label.json")  # names of labels only
INFOS = ("dataset_infos.json", "dataset_info.json")  # columns of a dataset
ABOUT = (*LISTS, *INFOS, "dataset_dict.json", "state.json")
CODECS = {".gz": "gzip", ".zst": "zstd"}
_BUILTIN = "builtin:"


def kind_of(name: str) -> tuple[str, str]:
    """Return a file's kind and compression, such as (".jsonl", "zstd"); ("", "") if it is no table."""
    path = PurePosixPath(name.lower())
    codec = CODECS.get(path.suffix, "")
    kind = path.with_suffix("").suffix if codec else path.suffix
    if path.name in ABOUT or kind not in (*KINDS, *COLUMNS) or (codec and kind in (".parquet", ".arrow")):
        return "", ""
    return kind, codec


def files_of(task: Task) -> dict[str, tuple[Path, ...]]:
    """Return the local files of each split that the examples are made of; those on the hub are downloaded."""
    whose = f"task {task.name!r}"
    files = {}
    for part, place in _places(task).items():
        if isinstance(place, HubPlace):
            names = _chosen(whose, place.address, place.path, _in_names(listing(whose, place), place.path))
            files[part] = download(whose, place, names)
        else:
            files[part] = _local_files(whose, *place)
    return files


def on_hub(task: Task) -> list[HubPlace]:
    """Return the places of a task that are on the hub, cached or not."""
    return [place for place in _places(task).values() if isinstance(place, HubPlace)]


def local_files(task: Task) -> dict[str, tuple[Path, ...]]:
    """Return the files of the splits that are not on the hub, without downloading anything."""
    return {
        part: _local_files(f"task {task.name!r}", *place)
        for part, place in _places(task).items()
        if not isinstance(place, HubPlace)
    }


def matching(folder: Path, pattern: str) -> tuple[Path, ...]:
    """Return the files in a folder that a pattern matches, sorted by name; there may be none."""
    return tuple(folder / name for name in _in_folder(folder, pattern)[0])


def task_fingerprint(task: Task, store: Store, *, again: bool = False) -> str:
    """Hash what the examples are made from: pinned places on the hub, and names and bytes of local files."""
    memory = HashMemory(store, again=again)
    pinned = {part: place.address for part, place in _places(task).items() if isinstance(place, HubPlace)}
    local = {
        part: [[path.name, memory.sha256(path)] for path in paths]
        for part, paths in local_files(task).items()
    }
    memory.save()
    return content_key(pinned | local)


def refuse_changed(task: Task, planned: str, store: Store) -> None:
    """Refuse a task whose content differs from its key in the plan; call it after its files were read."""
    if task_key(task, store, again=True) != planned:
        raise DataError(
            f"the files of task {task.name!r} ({task.source}) are not those that the study was planned with; "
            "type the command again to plan with what is there now"
        )


def task_key(task: Task, store: Store, *, again: bool = False) -> str:
    """Return a key of what a task asks and how long it is trained, whatever its name and its files' location.

    `again`: hash the files again instead of using remembered hashes.
    """
    splits, form = task.splits, encode(task.form)
    used = parts_of(task)
    form = {name: value for name, value in form.items() if name not in task.form.files}
    if "pairs" not in used:
        form.pop("pair", None)
    borrowed = not task.is_trained
    cut = None if "validation" in used else [splits.cut, splits.cut_from, splits.seed]
    length = {"epochs": task.epochs} if task.epochs else {"steps": task.steps}
    meaning = {
        "generation": GENERATION,
        "form": form,
        "cut": cut,
        "rows": [0 if borrowed else splits.rows[0], *splits.rows[1:]],
        "training": None if borrowed else {"batch": task.batch, **length},
        "content": task_fingerprint(task, store, again=again),
    }
    return content_key(meaning)


def parts_of(task: Task) -> dict[str, str]:
    """Return the places that the examples are read from, by split; what a task does not use is left out."""
    splits, form = task.splits, task.form
    pairs = form.files.get("pairs", "") if task.is_trained else ""
    cut_from_train = not splits.validation and splits.cut_from == "train"
    if cut_from_train and (pairs or not splits.train):
        why = "is pairs without judgments" if pairs else "it does not have"
        raise SpecError(
            f"task {task.name!r}: validation is to be cut from the train part, which {why}; "
            "type Splits(cut_from='test', cut=0.5), or name its files: Splits(validation='…')"
        )
    trained_on_rows = task.is_trained and not pairs
    named = {
        "train": splits.train if trained_on_rows or cut_from_train else "",
        "validation": splits.validation,
        "test": splits.test,
    }
    if form.files.get("corpus") == "":
        raise SpecError(f"task {task.name!r}: Retrieve.corpus names no files; type corpus='corpus*'")
    named |= form.files | {"pairs": pairs}
    return {part: place for part, place in named.items() if place}


LocalPlace = tuple[Path, str]  # a folder, and a name or pattern in it


def _places(task: Task) -> dict[str, HubPlace | LocalPlace]:
    """Return the place of each split, before anything is looked up."""
    whose = f"task {task.name!r}"
    parts = parts_of(task)
    if task.source.startswith(SIGN):
        base: HubPlace | Path = HubPlace.of(whose, task.source)
    elif task.source.startswith(_BUILTIN):
        base = ASSETS / task.source.removeprefix(_BUILTIN)
    else:
        base = Path(task.source).expanduser()
        if kind_of(base.name)[0] and not base.is_dir():
            parts = _beside_one_file(task, parts, base.name)
            base = base.parent
    return {part: _place(whose, base, place) for part, place in parts.items()}


def _beside_one_file(task: Task, parts: dict[str, str], name: str) -> dict[str, str]:
    """Return the splits of a task whose source is one file, which is the train split."""
    if "corpus" in task.form.files:
        raise SpecError(
            f"task {task.name!r}: retrieval needs a folder, and its source is {name}; name the folder"
        )
    if "train" in parts and parts["train"] not in ("train*", name):
        raise SpecError(
            f"task {task.name!r}: its source is the file {name}, and its train part {parts['train']!r}; "
            "let the source be the folder"
        )
    return parts | {"train": name} if "train" in parts else parts


def _place(whose: str, base: HubPlace | Path, place: str) -> HubPlace | LocalPlace:
    if "**" in place:
        raise DataError(f"{whose}: {place!r}: ** is not known here; name the folders, e.g. 'data/*/train*'")
    if place.startswith(SIGN):
        return HubPlace.of(whose, place)
    if place.startswith(("/", "~")):  # a local copy of one of several repositories
        path = Path(place).expanduser()
        return Path(path.anchor), path.relative_to(path.anchor).as_posix()
    if isinstance(base, Path):
        return base, place
    return HubPlace.of(whose, base.below(place).address)


# ---------------------------------------------------------------- patterns → files


def _local_files(whose: str, folder: Path, pattern: str) -> tuple[Path, ...]:
    """Return the files in a folder that a pattern matches, sorted by name; raise an error if there are none."""
    found = _in_folder(folder, pattern)
    shown = folder / PurePosixPath(pattern).parent
    names = _chosen(whose, str(shown if shown.is_dir() else folder), pattern, found)
    return tuple(folder / name for name in names)


def _chosen(whose: str, where: str, pattern: str, found: tuple[list[str], list[str]]) -> list[str]:
    """Return the names that were found, if there are some and they are of one kind."""
    names, others = found
    if not names:
        close = get_close_matches(pattern, others, n=4, cutoff=0.3) or sorted(others)[:4]
        there = f"there are {', '.join(close)}" if close else "nothing like it is there"
        raise Absent(
            f"{whose}: no file in {where} matches {pattern!r} ({' '.join(KINDS)}, or with .gz or .zst); {there}; "
            "correct the place, or put the files there"
        )
    if len({kind_of(name)[0] for name in names}) > 1 or len({_unpacked(name) for name in names}) < len(names):
        raise DataError(
            f"{whose}: {pattern!r} in {where} means files of several kinds ({', '.join(names[:4])}), which may hold the "
            f"same rows; name one of them, e.g. {PurePosixPath(names[0]).name!r}"
        )
    return names


def _unpacked(name: str) -> str:
    """Return a name without .gz or .zst."""
    return str(PurePosixPath(name).with_suffix("")) if PurePosixPath(name.lower()).suffix in CODECS else name


def _readings(pattern: str) -> Iterator[tuple[str, ...]]:
    """Yield the interpretations of a pattern: files, or else the files in a folder of that name."""
    *folders, last = PurePosixPath(pattern).parts
    yield *folders, last
    if last.removesuffix("*"):
        yield *folders, last.removesuffix("*"), "*"


def _fits(name: str, part: str, *, last: bool, anyhow: bool) -> bool:
    """Whether a component of a path matches one of a pattern, with `anyhow` ignoring case; hidden ones never do."""
    if name.startswith("."):
        return False
    if anyhow:
        name, part = name.lower(), part.lower()
    return name == part or fnmatchcase(name, part) or (last and fnmatchcase(_unpacked(name), part))


def _readable(names: Iterable[str]) -> list[str]:
    """Return the names that can be read: tables, or else files in CoNLL columns."""
    kinds = {name: kind_of(name)[0] for name in names}
    for some in (KINDS, COLUMNS):
        if found := [name for name, kind in kinds.items() if kind in some]:
            return found
    return []


def _in_names(names: Iterable[str], pattern: str) -> tuple[list[str], list[str]]:
    """Return the names in a repository that a pattern matches, and others in the same folder for messages."""
    tables = [name for name in names if kind_of(name)[0]]
    folder = PurePosixPath(pattern).parent
    others = [
        name for name in tables if not is_pattern(str(folder)) and PurePosixPath(name).is_relative_to(folder)
    ]
    for anyhow, parts in product((False, True), _readings(pattern)):
        found = []
        for name in tables:
            steps = PurePosixPath(name).parts
            if len(steps) == len(parts) and all(
                _fits(step, part, last=place == len(parts), anyhow=anyhow)
                for place, (step, part) in enumerate(zip(steps, parts, strict=True), 1)
            ):
                found.append(name)
        if found := _readable(found):
            return sorted(found), others
    return [], others or tables


def _in_folder(folder: Path, pattern: str) -> tuple[list[str], list[str]]:
    """Return the names below a folder that a pattern matches, or else the others there for messages."""
    for anyhow, parts in product((False, True), _readings(pattern)):
        every = [
            name
            for name in _expand(folder, PurePosixPath(), parts, anyhow=anyhow)
            if (folder / name).is_file()
        ]
        if found := _readable(every):
            return sorted(found), []
    parent = folder / PurePosixPath(pattern).parent
    return [], [path.name for path in _entries(parent if parent.is_dir() else folder)]


def _expand(folder: Path, below: PurePosixPath, parts: tuple[str, ...], *, anyhow: bool) -> Iterator[str]:
    """Yield everything below a folder that a pattern matches; a component that exists is taken literally."""
    part, rest = parts[0], parts[1:]
    if part == ".." or (rest and (folder / below / part).exists()):
        steps = [part]
    else:
        names = (path.name for path in _entries(folder / below))
        steps = [name for name in names if _fits(name, part, last=not rest, anyhow=anyhow)]
    for step in steps:
        if rest:
            yield from _expand(folder, below / step, rest, anyhow=anyhow)
        else:
            yield str(below / step)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as wrong:
        raise DataError(f"{folder} cannot be read ({wrong.strerror}); check its permissions") from None


# ---------------------------------------------------------------- rows of files


CHUNK_BYTES = 2**22
CHUNK_ROWS = 2**14
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Only:
    """A filter for the rows whose `column`, as text, is in `values`."""

    column: str
    values: Collection[str]


@dataclass(frozen=True)
class TableRows:
    """Some rows of one file, with columns under the names they were requested by."""

    file: str
    numbers: Sequence[int]  # row numbers in the file, from 1
    columns: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.numbers)

    def place(self, row: int) -> str:
        return f"{self.file}:{self.numbers[row]}"

    def taken(self, only: Only | None) -> TableRows:
        """Return the rows that pass the filter."""
        if only is None:
            return self
        rows = [row for row, value in enumerate(self.columns[only.column]) if str(value) in only.values]
        columns = {name: [values[row] for row in rows] for name, values in self.columns.items()}
        return TableRows(self.file, [self.numbers[row] for row in rows], columns)


def read(
    whose: str,
    files: Sequence[Path],
    wanted: Sequence[str],
    *,
    optional: Sequence[str] = (),
    only: Only | None = None,
) -> Iterator[TableRows]:
    """Yield the rows of the files in chunks; an optional column that is absent is all None."""
    for path in files:
        kind, _ = kind_of(path.name)
        request = _Request(f"{whose}: {path.name}", path.name, tuple(wanted), tuple(optional))
        with _refusing_unreadable(whose, path):
            if kind in (".parquet", ".arrow"):
                yield from _arrow(request, path, only)
            elif kind in (".jsonl", ".json"):
                for rows in _json_rows(request, path):
                    yield rows.taken(only)
            elif _is_conll(path):
                yield _conll_rows(request, path).taken(only)
            else:
                yield _separated(request, path).taken(only)


def read_rows(
    whose: str,
    files: Sequence[Path],
    wanted: Sequence[str],
    *,
    optional: Sequence[str] = (),
    only: Only | None = None,
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the place of each row, "file:number", and its values in the order of `wanted` and `optional`."""
    for rows in read(whose, files, wanted, optional=optional, only=only):
        values = zip(*(rows.columns[name] for name in (*wanted, *optional)), strict=True)
        for row, value in enumerate(values):
            yield rows.place(row), value


def column_names(whose: str, path: Path) -> tuple[str, ...]:
    """Return the columns of a file; for JSON, those of the first row."""
    kind, _ = kind_of(path.name)
    with _refusing_unreadable(whose, path):
        if kind in (".parquet", ".arrow"):
            return tuple(schema_of(path).names)
        if kind in (".jsonl", ".json"):
            for _, _, row in _objects(f"{whose}: {path.name}", path):
                return tuple(row)
        elif _is_conll(path):
            return CONLL
        else:
            for _, line in lines(path):
                return tuple(next(_reader(path, line.decode())))
    raise DataError(f"{whose}: {path} is empty; put rows into it")


def schema_of(path: Path) -> Any:
    """Return the schema of a parquet or arrow file, with its metadata."""
    from pyarrow import ipc, parquet

    if kind_of(path.name)[0] == ".parquet":
        return parquet.read_schema(path)
    with ipc.open_stream(path) as stream:
        return stream.schema


@contextlib.contextmanager
def _refusing_unreadable(whose: str, path: Path) -> Generator[None]:
    """Raise a DataError instead of the errors of pyarrow, csv and the file system."""
    try:
        yield
    except DataError:
        raise
    except UnicodeDecodeError:
        raise DataError(f"{whose}: {path} is not UTF-8; convert the file") from None
    except Exception as error:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            raise DataError(
                f"{whose}: {path} does not fit into the memory that is free here; close other programs, use a machine "
                "with more memory, or take fewer rows"
            ) from error
        raise DataError(
            f"{whose}: {path} cannot be read ({one_line(error)}); put an undamaged copy in its place"
        ) from error


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a text file that are not blank, with their numbers."""
    with _opened(path) as stream:
        number, rest, chunk = 0, b"", stream.read(CHUNK_BYTES).removeprefix(_BOM)
        while chunk:
            *whole, rest = (rest + chunk).split(b"\n")
            for number, line in enumerate(whole, number + 1):  # noqa: B020 - it goes on counting
                if line and not line.isspace():
                    yield number, line
            chunk = stream.read(CHUNK_BYTES)
        if rest and not rest.isspace():  # a last line without a newline
            yield number + 1, rest


# ---------------------------------------------------------------- one file


@dataclass(frozen=True)
class _Request:
    """The columns requested of one file."""

    where: str
    file: str
    wanted: tuple[str, ...]
    optional: tuple[str, ...]

    def chosen(self, present: Collection[str], where: str = "") -> dict[str, str]:
        """Return the name of each column in the file; an absent optional one is left out."""
        names = {}
        for column in (*self.wanted, *self.optional):
            name = next((name for name in column.split("|") if name in present), None)
            if name is not None:
                names[column] = name
            elif column not in self.optional:
                raise DataError(
                    f"{where or self.where} has no column {column!r}; {nearest(column.split('|')[0], present)}"
                )
        return names

    def rows(self, numbers: Sequence[int], columns: dict[str, list[Any]]) -> TableRows:
        absent = {name: [None] * len(numbers) for name in self.optional if name not in columns}
        return TableRows(self.file, numbers, columns | absent)


def _opened(path: Path) -> Any:
    codec = kind_of(path.name)[1]
    if not codec:
        return path.open("rb")
    import pyarrow

    return pyarrow.CompressedInputStream(str(path), codec)


def _arrow(request: _Request, path: Path, only: Only | None) -> Iterator[TableRows]:
    from pyarrow import ipc, parquet

    is_parquet = kind_of(path.name)[0] == ".parquet"
    with parquet.ParquetFile(path) if is_parquet else ipc.open_stream(path) as table:
        chosen = request.chosen((table.schema_arrow if is_parquet else table.schema).names)
        wanted = sorted(set(chosen.values()))
        first = 1
        for batch in table.iter_batches(batch_size=CHUNK_ROWS, columns=wanted) if is_parquet else table:
            numbers: Sequence[int] = range(first, first + len(batch))
            first += len(batch)
            if only is not None:  # filter first, so that unwanted texts are not converted to Python
                values = batch.column(chosen[only.column]).to_pylist()
                rows = [row for row, value in enumerate(values) if str(value) in only.values]
                batch, numbers = (
                    batch.take(rows) if rows else batch.slice(0, 0),
                    [numbers[row] for row in rows],
                )
            yield request.rows(numbers, {name: batch.column(one).to_pylist() for name, one in chosen.items()})


# ---------------------------------------------------------------- JSON


def _json_rows(request: _Request, path: Path) -> Iterator[TableRows]:
    every = (*request.wanted, *request.optional)
    numbers: list[int] = []
    columns: dict[str, list[Any]] = {name: [] for name in every}
    chosen: dict[str, str] = {}
    size = 0
    for number, length, row in _objects(request.where, path):
        if not all(name in row for name in chosen.values()) or len(chosen) < len(every):
            chosen = request.chosen(row, f"{request.where}:{number}")  # rows may omit different columns
        numbers.append(number)
        for name in every:
            columns[name].append(row[chosen[name]] if name in chosen else None)
        size += length
        if size >= CHUNK_BYTES:
            yield request.rows(numbers, columns)
            numbers, columns, size = [], {name: [] for name in every}, 0
    yield request.rows(numbers, columns)


def _objects(where: str, path: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield number, bytes and content of the rows of a JSON file: one object per line, or one document."""
    first = list(islice(lines(path), 2))
    in_lines = kind_of(path.name)[0] == ".jsonl"
    if first and _begins_document(where, [line for _, line in first], in_lines=in_lines):
        with _opened(path) as stream:
            document = _json(where, stream.read().removeprefix(_BOM))
        for number, row in enumerate(_rows_of_document(where, document), 1):
            yield number, 0, row
        return
    for number, line in lines(path):
        yield number, len(line), _object(f"{where}:{number}", _json(f"{where}:{number}", line))


def _begins_document(where: str, first: list[bytes], *, in_lines: bool) -> bool:
    """Whether a file is one JSON document rather than an object per line, by its first two lines.

    `in_lines`: the file's name says that it holds an object per line.
    """
    begins = first[0].strip()
    if begins.startswith(b"[") or begins == b"{":
        return True
    if len(first) > 1 and begins.startswith(b"{") and not in_lines and not _is_json(begins):
        return True
    if len(first) > 1 or b'"data"' not in begins:
        return False
    return isinstance(_object(where, _json(where, begins)).get("data"), list)


def _rows_of_document(where: str, document: Any) -> Iterator[dict[str, Any]]:
    rows = document.get("data") if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise DataError(f'{where} holds no rows; write one object a line, or an array of them under "data"')
    for number, row in enumerate(rows, 1):
        if "paragraphs" in _object(f"{where}:{number}", row):
            try:
                yield from _squad_questions(row)
            except (TypeError, KeyError, AttributeError):
                raise DataError(
                    f"{where}:{number} is no article as SQuAD writes it (paragraphs, each with a context and qas); "
                    "correct it, or write one object a line"
                ) from None
        else:
            yield row


def _squad_questions(article: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the questions of an article in SQuAD's own layout, with the columns that the hub's dataset has."""
    for paragraph in article["paragraphs"]:
        context = paragraph["context"]
        if not isinstance(context, str):
            raise TypeError
        for question in paragraph["qas"]:
            answers = question.get("answers") or []
            yield {
                "id": question.get("id"),
                "title": article.get("title"),
                "context": context,
                "question": question["question"],
                "answers": {name: [one[name] for one in answers] for name in ("text", "answer_start")},
            }


def _json(where: str, raw: bytes) -> Any:
    try:
        found = json.loads(raw.decode())  # json's own detection of the encoding would hide bad UTF-8
        if b"\\u" in raw:
            json.dumps(found, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except UnicodeDecodeError:
        raise DataError(f"{where} is not UTF-8; convert the file") from None
    except UnicodeEncodeError:
        raise DataError(f"{where} holds half of a surrogate pair; write the character whole") from None
    except (ValueError, RecursionError) as wrong:
        raise DataError(f"{where} is no JSON ({one_line(wrong)}); write one object a line") from None
    return found


def _is_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return True


def _object(where: str, found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise DataError(f'{where} is no JSON object; write one object a line, e.g. {{"text": "…"}}')
    return found


# ---------------------------------------------------------------- separated values


def _reader(path: Path, text: str) -> Any:
    """Return a csv or tsv reader; the separator of a csv is the one that gives the header the most columns."""
    # Documents are longer than the default limit of 128 KiB.
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    if kind_of(path.name)[0] == ".tsv":
        return csv.reader(io.StringIO(text, newline=""), delimiter="\t", quoting=csv.QUOTE_NONE)
    header = next((line for line in io.StringIO(text) if line.strip()), "")

    def columns(separator: str) -> int:
        try:
            return len(next(csv.reader([header], delimiter=separator, strict=True), ()))
        except csv.Error:
            return 0

    separator = max(",;\t|", key=columns)  # the first of equals
    return csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)


def _separated(request: _Request, path: Path) -> TableRows:
    with _opened(path) as stream:
        raw = stream.read().removeprefix(_BOM)
    try:
        reader = _reader(path, raw.decode())
    except UnicodeDecodeError as wrong:
        line = raw[: wrong.start].count(b"\n") + 1
        raise DataError(f"{request.where}:{line} is not UTF-8; convert the file") from None
    header: list[str] = []
    numbers, rows = [], []
    start = 1
    try:
        for row in reader:
            number, start = start, reader.line_num + 1
            if not row:
                continue
            if not header:
                header = row
                continue
            if len(row) != len(header):
                raise DataError(
                    f"{request.where}:{number} has {len(row)} columns where the header has {len(header)}; correct the row"
                )
            numbers.append(number)
            rows.append(row)
    except csv.Error as wrong:
        raise DataError(f"{request.where}:{start} is malformed ({wrong}); correct the row") from None
    if not header:
        raise DataError(f"{request.where} is empty; write a header line and rows")
    chosen = request.chosen(header)
    at = {name: header.index(one) for name, one in chosen.items()}
    return request.rows(numbers, {name: [row[place] for row in rows] for name, place in at.items()})


# ---------------------------------------------------------------- CoNLL columns

CONLL = ("tokens", "tags")
_TAG = re.compile(r"O|[BI]-\S+")
Line = tuple[int, list[str]]  # (line number, columns)


def _is_conll(path: Path) -> bool:
    """Whether a file is in CoNLL columns: by its name, or for a tsv because its first line has a tag."""
    kind, _ = kind_of(path.name)
    if kind == ".tsv":
        _, first = next(lines(path), (0, b""))
        return _has_tag(fields_of(first.decode(errors="replace")))
    return kind in COLUMNS


def fields_of(line: str) -> list[str]:
    """Return the columns of a line, separated by tabs or, if it has none, by white space."""
    return [field.strip() for field in line.split("\t")] if "\t" in line else line.split()


def _has_tag(fields: list[str]) -> bool:
    return any(_TAG.fullmatch(one) for one in fields[1:])


def _conll_rows(request: _Request, path: Path) -> TableRows:
    """Return one row per sentence; the tags are the last column that holds only tags."""
    sentences = list(_sentences(request.where, path))
    every = [line for sentence in sentences for line in sentence]
    if not every:
        raise DataError(f"{request.where} is empty; put rows into it")
    width = len(every[0][1])
    for number, fields in every:
        where = f"{request.where}:{number}"
        if not _has_tag(fields):
            raise DataError(
                f"{where} is not a word and its tag (O, B-PER, I-PER, …), as a {kind_of(path.name)[0]} file is read; "
                f"correct it, or write the data as {' '.join(KINDS)}"
            )
        if len(fields) != width:
            raise DataError(
                f"{where} has {counted(len(fields), 'column')} where others have {width}; correct the row"
            )
    tags = [at for at in range(1, width) if all(_TAG.fullmatch(fields[at]) for _, fields in every)]
    if not tags:
        raise DataError(f"{request.where} has no column of tags (O, B-PER, I-PER, …) only; correct it")
    numbered = width > 2 and all(
        [fields[0] for _, fields in one] == [str(place + 1) for place in range(len(one))] for one in sentences
    )
    columns = {
        "tokens": [[fields[numbered] for _, fields in one] for one in sentences],
        "tags": [_iob2([fields[tags[-1]] for _, fields in one]) for one in sentences],
    }
    chosen = request.chosen(CONLL)
    return request.rows([one[0][0] for one in sentences], {name: columns[at] for name, at in chosen.items()})


def _sentences(where: str, path: Path) -> Iterator[list[Line]]:
    """Yield the lines of each sentence, without comments and document marks."""
    sentence: list[Line] = []
    last, ended = 0, False
    for number, line in lines(path):
        ended, last = ended or number > last + 1, number  # a gap in the numbers is a blank line
        try:
            fields = fields_of(line.decode().rstrip("\r"))
        except UnicodeDecodeError:
            raise DataError(f"{where}:{number} is not UTF-8; convert the file") from None
        if fields[0] == "-DOCSTART-" or (line.startswith(b"#") and not _has_tag(fields)):
            continue
        if ended and sentence:
            yield sentence
            sentence = []
        sentence.append((number, fields))
        ended = False
    if sentence:
        yield sentence


def _iob2(tags: list[str]) -> list[str]:
    """Return tags in IOB2, where every entity begins with B-; in IOB1, as in CoNLL-2003, most begin with I-."""
    before = ["O", *tags[:-1]]
    return [
        f"B{tag[1:]}" if tag[0] == "I" and old[2:] != tag[2:] else tag
        for old, tag in zip(before, tags, strict=True)
    ]
