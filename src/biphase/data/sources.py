"""Where the files of a corpus are: on this machine, or on the hub, from where they are streamed.

A hub corpus is read file by file, in the order of their names, without a copy on disk; of parquet only the text
column travels. Retries and waiting are the hub library's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from biphase.data.identity import Files, HubSource, Named, check_suffix
from biphase.errors import DataError
from biphase.specs import Corpus


@dataclass(frozen=True)
class File:
    """A file of a corpus: its name there, its size, and how to open it for reading bytes."""

    name: str
    size: int
    open: Callable[[], IO[bytes]]


def local(files: tuple[Named, ...]) -> list[File]:
    """Files on this machine."""
    return [File(file.name, file.path.stat().st_size, _opener(file.path)) for file in files]


def _opener(path: Path) -> Callable[[], IO[bytes]]:
    return lambda: path.open("rb")


def on_hub(corpus: Corpus, filesystem: Any = None) -> tuple[list[File], list[File]]:
    """Training and held-out files of a hub corpus, to be streamed. `filesystem` is any fsspec one."""
    source = HubSource.of(corpus)
    root = f"datasets/{source.repository}@{source.revision}"
    offline = (
        f"download the repository elsewhere and type: biphase tokenize {corpus.name} --from FOLDER; "
        f"on a machine with network: hf download {source.repository} --repo-type dataset "
        f"--revision {source.revision} --include '{source.pattern}' --local-dir FOLDER"
    )
    try:
        if filesystem is None:
            from huggingface_hub import HfFileSystem

            filesystem = HfFileSystem()
        train, heldout = (
            _listed(corpus, filesystem, root, pattern) if pattern else []
            for pattern in (source.pattern, corpus.heldout)
        )
    except DataError:
        raise
    except Exception as wrong:  # the hub's library raises many kinds: offline, refused, absent, rate limits
        reason = (str(wrong).splitlines() or [type(wrong).__name__])[0]
        raise DataError(
            f"corpus {corpus.name!r} cannot be listed on the hub ({reason}); {offline}"
        ) from wrong
    apart = {file.name for file in heldout}
    return [file for file in train if file.name not in apart], heldout


def _listed(corpus: Corpus, filesystem: Any, root: str, pattern: str) -> list[File]:
    found = filesystem.glob(f"{root}/{pattern}", detail=True)
    files = []
    for path, about in sorted(found.items()):
        if about["type"] != "file":
            continue
        name = path.rpartition(f"{root}/")[2]
        check_suffix(corpus, name, corpus.source)
        files.append(File(name, int(about["size"]), lambda path=path: filesystem.open(path, "rb")))
    if not files:
        raise DataError(f"corpus {corpus.name!r}: no file of {root} matches {pattern!r}; correct its source")
    return files


def open_files(corpus: Corpus, found: Files | None) -> tuple[list[File], list[File]]:
    """Training and held-out files: those found on this machine, or else on the hub."""
    return (local(found.train), local(found.heldout)) if found else on_hub(corpus)
