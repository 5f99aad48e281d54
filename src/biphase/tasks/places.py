"""Which files a task means, and their identity.

A source is a folder, one file (the train part; the others stand beside it), `builtin:tasks/NAME` or
`hf://owner/name@revision/folder`. The parts are names or patterns below it, and `*` never passes a slash: "train*"
means train.parquet, train-00000-of-00002.parquet or train.jsonl.zst, not what lies in train_extra/. Where no file
matches, the files of a folder of that very name are meant: "corpus*" finds corpus/corpus-00000-of-00001.parquet.
A name may leave out .gz or .zst, and be written in other capitals where none fits as it is. Files of other kinds (README.md) are passed over, and files in CoNLL's columns where
there are tables.

Only the standard library is used here, because planning passes through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path, PurePosixPath

from biphase.data.identity import HashMemory
from biphase.data.listing import ASSETS, Absent, is_pattern
from biphase.errors import DataError, SpecError
from biphase.files import Store
from biphase.records import encode, key
from biphase.specs import Retrieve, Task
from biphase.tasks.hub import SIGN, HubPlace, download, listing

# Raised when the same files and record would be read as other examples than before.
GENERATION = 1

KINDS = (".parquet", ".arrow", ".jsonl", ".json", ".csv", ".tsv")
COLUMNS = (
    ".conll",
    ".iob",
    ".iob2",
    ".bio",
    ".txt",
    ".train",
    ".dev",
    ".test",
    ".testa",
    ".testb",
)  # CoNLL's
# What stands beside the rows of a dataset and says something about them.
LISTS = ("labels.json", "label.json")  # of the names of labels alone
INFOS = ("dataset_infos.json", "dataset_info.json")  # of its columns
ABOUT = (*LISTS, *INFOS, "dataset_dict.json", "state.json")
CODECS = {".gz": "gzip", ".zst": "zstd"}
_BUILTIN = "builtin:"


def kind_of(name: str) -> tuple[str, str]:
    """The kind of a file and how it is compressed: (".jsonl", "zstd"). The kind of no table is ""."""
    path = PurePosixPath(name.lower())
    codec = CODECS.get(path.suffix, "")
    kind = path.with_suffix("").suffix if codec else path.suffix
    if path.name in ABOUT or kind not in (*KINDS, *COLUMNS) or (codec and kind in (".parquet", ".arrow")):
        return "", ""
    return kind, codec


def files_of(task: Task) -> dict[str, tuple[Path, ...]]:
    """The files of each part the examples are made of, on this machine; those on the hub are downloaded."""
    whose = f"task {task.name!r}"
    found = {}
    for part, place in _places(task).items():
        if isinstance(place, HubPlace):
            names = _chosen(whose, place.address, place.path, _in_names(listing(whose, place), place.path))
            found[part] = download(whose, place, names)
        else:
            found[part] = _local_files(whose, *place)
    return found


def on_hub(task: Task) -> list[HubPlace]:
    """The places of a task that are not on this machine, its cache aside."""
    return [place for place in _places(task).values() if isinstance(place, HubPlace)]


def local_files(task: Task) -> dict[str, tuple[Path, ...]]:
    """The files of those parts that are not on the hub. Nothing is downloaded."""
    return {
        part: _local_files(f"task {task.name!r}", *place)
        for part, place in _places(task).items()
        if not isinstance(place, HubPlace)
    }


def matching(folder: Path, pattern: str) -> tuple[Path, ...]:
    """The files in a folder that a pattern means, in the order of their names; there may be none."""
    return tuple(folder / name for name in _in_folder(folder, pattern)[0])


def task_fingerprint(task: Task, store: Store, *, again: bool = False) -> str:
    """The hash of what the examples are made from: pinned places on the hub; here, the files' names and bytes."""
    memory = HashMemory(store, again=again)
    pinned = {part: one.address for part, one in _places(task).items() if isinstance(one, HubPlace)}
    local = {
        part: [[path.name, memory.sha256(path)] for path in paths]
        for part, paths in local_files(task).items()
    }
    memory.save()
    return key(pinned | local)


def refuse_changed(task: Task, planned: str, store: Store) -> None:
    """After its files were read: refuse a task whose content is not what its key in the plan stands for."""
    if task_key(task, store, again=True) != planned:
        raise DataError(
            f"the files of task {task.name!r} ({task.source}) are not those that the study was planned with; "
            "type the command again to plan with what is there now"
        )


def task_key(task: Task, store: Store, *, again: bool = False) -> str:
    """What is asked and how long is trained for it, whatever the task is called and wherever its files stand.

    `again`: remembered hashes of its files are not believed.
    """
    splits, form = task.splits, encode(task.form)
    used = parts_of(task)
    if isinstance(task.form, Retrieve):
        form = {name: value for name, value in form.items() if name not in ("queries", "corpus", "pairs")}
        if "pairs" not in used:
            del form["pair"]
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
    return key(meaning)


def parts_of(task: Task) -> dict[str, str]:
    """The places the examples are read from, by part. What a task does not use is left out."""
    splits, form = task.splits, task.form
    pairs = form.pairs if isinstance(form, Retrieve) and task.is_trained else ""
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
    if isinstance(form, Retrieve):
        if not form.corpus:
            raise SpecError(f"task {task.name!r}: Retrieve.corpus names no files; type corpus='corpus*'")
        named |= {"queries": form.queries, "corpus": form.corpus, "pairs": pairs}
    return {part: place for part, place in named.items() if place}


LocalPlace = tuple[Path, str]  # a folder, and a name or pattern in it


def _places(task: Task) -> dict[str, HubPlace | LocalPlace]:
    """Where each part stands, before anything is looked up."""
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
    """The parts where the source is one file: it is the train part."""
    if isinstance(task.form, Retrieve):
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
    """The files in a folder that a pattern means, in the order of their names."""
    found = _in_folder(folder, pattern)
    shown = folder / PurePosixPath(pattern).parent
    names = _chosen(whose, str(shown if shown.is_dir() else folder), pattern, found)
    return tuple(folder / name for name in names)


def _chosen(whose: str, where: str, pattern: str, found: tuple[list[str], list[str]]) -> list[str]:
    """The names that were found, in order, if they can be meant together."""
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
    """A name without .gz or .zst."""
    return str(PurePosixPath(name).with_suffix("")) if PurePosixPath(name.lower()).suffix in CODECS else name


def _readings(pattern: str) -> Iterator[tuple[str, ...]]:
    """What a pattern may mean: files, or else those in the folder of that name."""
    *folders, last = PurePosixPath(pattern).parts
    yield *folders, last
    if last.removesuffix("*"):
        yield *folders, last.removesuffix("*"), "*"


def _fits(name: str, part: str, *, last: bool, anyhow: bool) -> bool:
    """Does one name in a path fit one part of a pattern, `anyhow` it is capitalised? What is hidden never does."""
    if name.startswith("."):
        return False
    if anyhow:
        name, part = name.lower(), part.lower()
    return name == part or fnmatchcase(name, part) or (last and fnmatchcase(_unpacked(name), part))


def _readable(names: Iterable[str]) -> list[str]:
    """Those of the names that can be read: tables, or else files in CoNLL's columns."""
    kinds = {name: kind_of(name)[0] for name in names}
    for some in (KINDS, COLUMNS):
        if found := [name for name, kind in kinds.items() if kind in some]:
            return found
    return []


def _in_names(names: Iterable[str], pattern: str) -> tuple[list[str], list[str]]:
    """The names a pattern means among those of a repository, and those in the same folder."""
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
    """The names a pattern means below a folder, and those that stand where it looks."""
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
    """All that a pattern means below a folder. What exists is no pattern."""
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
