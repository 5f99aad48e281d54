"""Files of a task: where they are, their identity, and their rows.

`files_of` returns the local files of each split and downloads those on the hub; `task_key` identifies what a task
reads and how it is trained; `read_rows` yields the requested columns of each row; `column_names` lists the columns of
a file.

A source is a folder, one file (the train split; the others are beside it), `builtin:tasks/NAME` or
`hf://owner/name@revision/folder`. Splits are names or patterns below it, in which `*` does not match a slash:
"train*" matches train.parquet, train-00000-of-00002.parquet or train.jsonl.zst, but nothing in train_extra/. If no
file matches, the files in a folder of that name are used: "corpus*" finds corpus/corpus-00000-of-00001.parquet. A
name may omit .gz or .zst. Files of other kinds (README.md) are ignored, and so are files in CoNLL columns where there
are tables.

Hub files are in the hub library's own cache. Files already there are read without a network; an interrupted
download is never taken for a complete one, since the library keeps a list of the files.

    parquet         a row is a row; its place is its number
    jsonl, json     a row is a line that holds an object
    json            or the whole file is an array of rows, or an object with one under "data"; in SQuAD's own
                    layout a row is a question. Its place is its number
    csv             a header line, commas (or ; tab | if the header has more of them), usual quotes
    tsv             a header line, tabs, no quotes: GLUE's files have stray ones
    conll, txt, …   CoNLL columns, one word and its tags per line, sentences separated by blank lines: columns tokens
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
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from biphase.data.corpus import ASSETS, Absent, HashMemory
from biphase.data.documents import separated
from biphase.errors import DataError, SpecError, nearest, one_line
from biphase.records import content_key, encode
from biphase.remote import patiently, refusing, snapshot
from biphase.specs import Pairs, Task
from biphase.specs.sources import HUB, HubPlace
from biphase.store import Store
from biphase.text import counted


def _remedy(place: HubPlace) -> str:
    """How to do without the hub, for messages."""
    words = ["hf", "download", place.repository, "--repo-type", "dataset"]
    words += ["--revision", place.revision] if place.revision else []
    return (
        f"where there is a network, type: {shlex.join(words)} --local-dir FOLDER/{place.name}; "
        "and then add: --data FOLDER"
    )


def refuse_unpinned(whose: str, place: HubPlace) -> None:
    """Refuse a place on the hub without a pinned commit."""
    if not place.revision:
        raise DataError(
            f"{whose}: no commit of {place.repository} is pinned; name the one its page shows: task.pin('…'); "
            f"or read a copy: {_remedy(place)}"
        )


def _hub_files(whose: str, place: HubPlace) -> tuple[Path, ...]:
    """Return the local copies of the files on the hub that a place means; missing ones are downloaded."""
    refuse_unpinned(whose, place)
    which: Any = {"repo_type": "dataset", "revision": place.revision}
    what = f"{whose}: {place.repository} cannot be read from the hub"
    with refusing(DataError, what, f"datasets/{place.repository}", _remedy(place)):
        from huggingface_hub import HfApi, get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        try:
            names = [file.path for file in get_cached_repo_tree(place.repository, **which)]
        except CachedRepoTreeNotFoundError:
            names = patiently(lambda: HfApi().list_repo_files(place.repository, **which))
        chosen = _matching(partial(_among, names), place.path)
        there = sorted(PurePosixPath(name).name for name in names)
        _refuse_unless_one_kind(whose, place.address, place.path, chosen, there)
        allow = [glob.escape(name) for name in chosen]
        folder = snapshot(place.repository, place.revision, allow, kind="dataset")
    return tuple(folder / name for name in chosen)


# ---------------------------------------------------------------- which files, and their identity
# This section uses only the standard library, because planning calls it.


# Raise this when the same files and record would be read as other examples than before.
GENERATION = 1

JSON = (".jsonl", ".json")
KINDS = (".parquet", *JSON, ".csv", ".tsv")
# CoNLL columns
COLUMNS = (".conll", ".iob", ".iob2", ".bio", ".txt", ".train", ".dev", ".test", ".testa", ".testb")
# Files beside the rows of a dataset that describe it.
ABOUT = (
    "labels.json", "label.json", "dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json",
)  # fmt: skip
CODECS = {".gz": "gzip", ".zst": "zstd"}
_BUILTIN = "builtin:"


def kind_of(name: str) -> tuple[str, str]:
    """Return a file's kind and compression, such as (".jsonl", "zstd"); ("", "") if it is no table."""
    path = PurePosixPath(name.lower())
    codec = CODECS.get(path.suffix, "")
    kind = path.with_suffix("").suffix if codec else path.suffix
    if path.name in ABOUT or kind not in (*KINDS, *COLUMNS) or (codec and kind == ".parquet"):
        return "", ""
    return kind, codec


def whose_files(task: Task | Pairs) -> str:
    """Return how messages name what reads the files."""
    return f"task {task.name!r}" if isinstance(task, Task) else f"Pairs({task.source!r})"


def files_of(task: Task | Pairs) -> dict[str, tuple[Path, ...]]:
    """Return the local files of each split that the examples are made of; those on the hub are downloaded."""
    whose = whose_files(task)
    return {
        part: _hub_files(whose, place) if isinstance(place, HubPlace) else _local_files(whose, *place)
        for part, place in _places(task).items()
    }


def on_hub(task: Task | Pairs) -> list[HubPlace]:
    """Return the places of a task that are on the hub, cached or not."""
    return [place for place in _places(task).values() if isinstance(place, HubPlace)]


def local_files(task: Task | Pairs) -> dict[str, tuple[Path, ...]]:
    """Return the files of the splits that are not on the hub, without downloading anything."""
    return {
        part: _local_files(whose_files(task), *place)
        for part, place in _places(task).items()
        if not isinstance(place, HubPlace)
    }


def matching(folder: Path, pattern: str) -> tuple[Path, ...]:
    """Return the files in a folder that a pattern matches, sorted by name; there may be none."""
    return tuple(folder / name for name in _matching(partial(_in_folder, folder), pattern))


def task_fingerprint(task: Task | Pairs, store: Store, *, again: bool = False) -> str:
    """Hash what the examples are made from: pinned places on the hub, and names and bytes of local files."""
    memory = HashMemory(store, again=again)
    pinned = {part: place.address for part, place in _places(task).items() if isinstance(place, HubPlace)}
    local = {
        part: [[path.name, digest] for path, digest in zip(paths, memory.hashes(paths), strict=True)]
        for part, paths in local_files(task).items()
    }
    return content_key(pinned | local)


def refuse_changed(task: Task | Pairs, planned: str, store: Store) -> None:
    """Refuse a task whose content differs from its key in the plan; call it after its files were read."""
    if task_key(task, store, again=True) != planned:
        raise DataError(
            f"the files of {whose_files(task)} ({task.source}) are not those that the study was planned with; "
            "type the command again to plan with what is there now"
        )


def task_key(task: Task | Pairs, store: Store, *, again: bool = False) -> str:
    """Return a key of what a task asks and how long it is trained, whatever its name and its files' location.

    `again`: hash the files again instead of using remembered hashes.
    """
    if isinstance(task, Pairs):
        content = task_fingerprint(task, store, again=again)
        return content_key(
            {"generation": GENERATION, "content": content} | {**encode(task), "source": "in content"}
        )
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


def _places(task: Task | Pairs) -> dict[str, HubPlace | LocalPlace]:
    """Return the place of each split, before anything is looked up."""
    whose = whose_files(task)
    if isinstance(task, Pairs):
        base = ASSETS if task.source.startswith(_BUILTIN) else Path()
        return {"pairs": _place(whose, base, task.source.removeprefix(_BUILTIN))}
    parts = parts_of(task)
    if task.source.startswith(HUB):
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
    if place.startswith(HUB):
        return HubPlace.of(whose, place)
    if place.startswith(("/", "~")):  # a local copy of one of several repositories
        path = Path(place).expanduser()
        return Path(path.anchor), path.relative_to(path.anchor).as_posix()
    if isinstance(base, Path):
        return base, place
    return HubPlace.of(whose, f"{base.address.rstrip('/')}/{place}")


# ---------------------------------------------------------------- patterns → files


Look = Callable[[str], list[str]]  # gives the files that a pattern matches, by their relative names


def _in_folder(folder: Path, pattern: str) -> list[str]:
    if not _visible(folder):
        return []
    with _refusing_forbidden(folder):
        if (folder / pattern).is_file():  # it may have brackets in its name
            return [pattern]
        names = glob.glob(pattern, root_dir=folder)  # noqa: PTH207 - Path.glob gives hidden files too
        return [name for name in names if (folder / name).is_file()]


def _visible(folder: Path) -> list[str]:
    """Return the names in a folder, apart from hidden ones; there are none if it does not exist."""
    with _refusing_forbidden(folder), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    return []


@contextlib.contextmanager
def _refusing_forbidden(folder: Path) -> Generator[None]:
    try:
        yield
    except OSError as wrong:
        raise DataError(f"{folder} cannot be read ({wrong.strerror}); check its permissions") from None


def _among(files: Sequence[str], pattern: str) -> list[str]:
    """Return what `_in_folder` returns, of a repository with these files."""
    if pattern in files:
        return [pattern]
    parts = PurePosixPath(pattern).parts
    visible = [PurePosixPath(name) for name in files if not name.startswith(".") and "/." not in name]
    return [str(path) for path in visible if len(path.parts) == len(parts) and path.match(pattern)]


def _local_files(whose: str, folder: Path, pattern: str) -> tuple[Path, ...]:
    """Return the files in a folder that a pattern matches, sorted by name; raise an error if there are none."""
    shown = folder / PurePosixPath(pattern).parent
    shown = shown if shown.is_dir() else folder
    names = _matching(partial(_in_folder, folder), pattern)
    _refuse_unless_one_kind(whose, str(shown), pattern, names, _visible(shown))
    return tuple(folder / name for name in names)


def _refuse_unless_one_kind(
    whose: str, where: str, pattern: str, names: Sequence[str], there: Sequence[str]
) -> None:
    """Refuse a pattern that matches no files, or files of several kinds; `there`: the names in that place."""
    if not names:
        close = get_close_matches(PurePosixPath(pattern).name, there, n=4, cutoff=0.3) or there[:4]
        others = f"there are {', '.join(close)}" if close else "nothing like it is there"
        raise Absent(
            f"{whose}: no file in {where} matches {pattern!r} ({' '.join(KINDS)}, or with .gz or .zst); {others}; "
            "correct the place, or put the files there"
        )
    if len({kind_of(name)[0] for name in names}) > 1 or len({_unpacked(name) for name in names}) < len(names):
        raise DataError(
            f"{whose}: {pattern!r} in {where} means files of several kinds ({', '.join(names[:4])}), which may hold the "
            f"same rows; name one of them, e.g. {PurePosixPath(names[0]).name!r}"
        )


def _unpacked(name: str) -> str:
    """Return a name without .gz or .zst."""
    return str(PurePosixPath(name).with_suffix("")) if PurePosixPath(name.lower()).suffix in CODECS else name


def _matching(look: Look, pattern: str) -> list[str]:
    """Return the files that a pattern matches, sorted, or else the files in a folder of that name.

    They are tables, or else files in CoNLL columns. The pattern may omit .gz or .zst.
    """
    pattern = str(PurePosixPath(pattern))
    folder = pattern.removesuffix("*")
    inside = f"{folder}/*" if folder and not folder.endswith("/") else ""
    for meaning in filter(None, (pattern, inside)):
        files = {name for ending in ("", *CODECS) for name in look(meaning + ending)}
        for kinds in (KINDS, COLUMNS):
            if found := [name for name in files if kind_of(name)[0] in kinds]:
                return sorted(found)
    return []


# ---------------------------------------------------------------- rows of files


CHUNK_BYTES = 2**22
CHUNK_ROWS = 2**14
_BOM = b"\xef\xbb\xbf"
Only = tuple[str, Collection[str]]  # a column, and the values that it must have as text
Row = tuple[int, dict[str, Any]]  # its number in the file, from 1, and its columns
Choose = Callable[[str, Collection[str]], list[str | None]]


def read_rows(
    whose: str,
    files: Sequence[Path],
    wanted: Sequence[str],
    *,
    optional: Sequence[str] = (),
    only: Only | None = None,
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the place of each row, "file:number", and its values in the order of `wanted` and `optional`.

    An optional column that is absent is None; `only` filters the rows.
    """
    every = (*wanted, *optional)
    at = every.index(only[0]) if only else 0

    def choose(where: str, present: Collection[str]) -> list[str | None]:
        names = [name_in(column, present) for column in every]
        if None in names[: len(wanted)]:
            column = every[names.index(None)]
            raise DataError(f"{where} has no column {column!r}; {nearest(column.split('|')[0], present)}")
        return names

    for path in files:
        where, kind = f"{whose}: {path.name}", kind_of(path.name)[0]
        names: list[str | None] = []
        with _refusing_unreadable(whose, path):
            for number, row in _rows(where, path, choose, only):
                if not names or any(
                    name not in row for name in names
                ):  # rows of JSON may omit different columns
                    names = choose(f"{where}:{number}" if kind in JSON else where, row)
                values = tuple(None if name is None else row[name] for name in names)
                if only is None or str(values[at]) in only[1]:
                    yield f"{path.name}:{number}", values


def name_in(column: str, present: Collection[str]) -> str | None:
    """Return the first alternative of a column that is there."""
    return next((name for name in column.split("|") if name in present), None)


def column_names(whose: str, path: Path) -> tuple[str, ...]:
    """Return the columns of a file; for JSON, those of the first row."""
    kind, _ = kind_of(path.name)
    with _refusing_unreadable(whose, path):
        if kind == ".parquet":
            return tuple(schema_of(path).names)
        if kind in JSON:
            for _, row in _json_rows(f"{whose}: {path.name}", path):
                return tuple(row)
        elif _is_conll(path):
            return CONLL
        else:
            for _, line in lines(path):
                return tuple(next(_reader(path, line.decode())))
    raise DataError(f"{whose}: {path} is empty; put rows into it")


def schema_of(path: Path) -> Any:
    """Return the schema of a parquet file, with its metadata."""
    from pyarrow import parquet

    return parquet.read_schema(path)


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


def _opened(path: Path) -> Any:
    codec = kind_of(path.name)[1]
    if not codec:
        return path.open("rb")
    import pyarrow

    return pyarrow.CompressedInputStream(str(path), codec)


def _rows(where: str, path: Path, choose: Choose, only: Only | None) -> Iterator[Row]:
    kind, _ = kind_of(path.name)
    if kind == ".parquet":
        return _parquet_rows(where, path, choose, only)
    if kind in JSON:
        return _json_rows(where, path)
    return _conll_rows(where, path) if _is_conll(path) else _separated_rows(where, path, choose)


def _parquet_rows(where: str, path: Path, choose: Choose, only: Only | None) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    with parquet.ParquetFile(path) as table:
        present = table.schema_arrow.names
        names = sorted({name for name in choose(where, present) if name})
        key = name_in(only[0], present) if only else None
        first = 1
        for batch in table.iter_batches(batch_size=CHUNK_ROWS, columns=names):
            numbers: Sequence[int] = range(first, first + len(batch))
            first += len(batch)
            if only and key:  # filter first, so that unwanted texts are not converted to Python
                keys = batch.column(key).to_pylist()
                rows = [row for row, value in enumerate(keys) if str(value) in only[1]]
                batch, numbers = batch.take(pyarrow.array(rows, pyarrow.int64())), [numbers[r] for r in rows]
            values = (batch.column(name).to_pylist() for name in names)
            for number, *row in zip(numbers, *values, strict=True):
                yield number, dict(zip(names, row, strict=True))


# ---------------------------------------------------------------- JSON


def _json_rows(where: str, path: Path) -> Iterator[Row]:
    """Yield the rows of a JSON file: one object per line, or one document."""
    if _is_document(path):
        with _opened(path) as stream:
            document = _json(where, stream.read().removeprefix(_BOM))
        yield from enumerate(_rows_of_document(where, document), 1)
    else:
        for number, line in lines(path):
            yield number, _object(f"{where}:{number}", _json(f"{where}:{number}", line))


def _is_document(path: Path) -> bool:
    """Whether a file is one JSON document rather than an object per line, by its first two lines."""
    first = [line.strip() for _, line in islice(lines(path), 2)]
    if not first or first[0].startswith(b"[") or first[0] == b"{":
        return bool(first)
    try:
        row = json.loads(first[0])
    except (ValueError, RecursionError):
        # An object that goes on in the next line, unless the file's name says that it is one line.
        return first[0].startswith(b"{") and kind_of(path.name)[0] == ".json"
    return len(first) == 1 and isinstance(row, dict) and isinstance(row.get("data"), list)


def _rows_of_document(where: str, document: Any) -> Iterator[dict[str, Any]]:
    rows = document.get("data") if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise DataError(f'{where} holds no rows; write one object a line, or an array of them under "data"')
    for number, row in enumerate(rows, 1):
        try:
            yield from _squad_questions(row) if "paragraphs" in _object(f"{where}:{number}", row) else [row]
        except (TypeError, KeyError, AttributeError):
            raise DataError(
                f"{where}:{number} is no article as SQuAD writes it (paragraphs, each with a context and qas); "
                "correct it, or write one object a line"
            ) from None


def _squad_questions(article: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the questions of an article in SQuAD's own layout, with the columns that the hub's dataset has."""
    for paragraph in article["paragraphs"]:
        for question in paragraph["qas"]:
            answers = question.get("answers") or []
            yield {
                "id": question.get("id"),
                "title": article.get("title"),
                "context": paragraph["context"],
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


def _object(where: str, found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise DataError(f'{where} is no JSON object; write one object a line, e.g. {{"text": "…"}}')
    return found


# ---------------------------------------------------------------- separated values


def _reader(path: Path, text: str) -> Any:
    return separated(io.StringIO(text, newline=""), tsv=kind_of(path.name)[0] == ".tsv")


def _separated_rows(where: str, path: Path, choose: Choose) -> Iterator[Row]:
    with _opened(path) as stream:
        raw = stream.read().removeprefix(_BOM)
    try:
        reader = _reader(path, raw.decode())
    except UnicodeDecodeError as wrong:
        line = raw[: wrong.start].count(b"\n") + 1
        raise DataError(f"{where}:{line} is not UTF-8; convert the file") from None
    header: list[str] = []
    place: dict[str, int] = {}
    start = 1
    try:
        for row in reader:
            number, start = start, reader.line_num + 1
            if row and header:
                if len(row) != len(header):
                    raise DataError(
                        f"{where}:{number} has {len(row)} columns where the header has {len(header)}; correct the row"
                    )
                yield number, {name: row[at] for name, at in place.items()}
            elif row:
                header = row
                choose(where, header)  # a file without rows must have the columns too
                place = {name: header.index(name) for name in header}  # the first of two with one name
    except csv.Error as wrong:
        raise DataError(f"{where}:{start} is malformed ({wrong}); correct the row") from None
    if not header:
        raise DataError(f"{where} is empty; write a header line and rows")


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


def _conll_rows(where: str, path: Path) -> Iterator[Row]:
    """Yield one row per sentence; the tags are the last column that holds only tags."""
    sentences = list(_sentences(where, path))
    every = [line for sentence in sentences for line in sentence]
    if not every:
        raise DataError(f"{where} is empty; put rows into it")
    width = len(every[0][1])
    for number, fields in every:
        if not _has_tag(fields):
            raise DataError(
                f"{where}:{number} is not a word and its tag (O, B-PER, I-PER, …), as a {kind_of(path.name)[0]} file is "
                f"read; correct it, or write the data as {' '.join(KINDS)}"
            )
        if len(fields) != width:
            raise DataError(
                f"{where}:{number} has {counted(len(fields), 'column')} where others have {width}; correct the row"
            )
    tags = [at for at in range(1, width) if all(_TAG.fullmatch(fields[at]) for _, fields in every)]
    if not tags:
        raise DataError(f"{where} has no column of tags (O, B-PER, I-PER, …) only; correct it")
    numbered = width > 2 and all(
        [fields[0] for _, fields in one] == [str(place + 1) for place in range(len(one))] for one in sentences
    )
    for sentence in sentences:
        words, labels = zip(*((fields[numbered], fields[tags[-1]]) for _, fields in sentence), strict=True)
        yield sentence[0][0], dict(zip(CONLL, (list(words), _iob2(labels)), strict=True))


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


def _iob2(tags: Sequence[str]) -> list[str]:
    """Return tags in IOB2, where every entity begins with B-; in IOB1, as in CoNLL-2003, most begin with I-."""
    before = ["O", *tags[:-1]]
    return [
        f"B{tag[1:]}" if tag[0] == "I" and old[2:] != tag[2:] else tag
        for old, tag in zip(before, tags, strict=True)
    ]
