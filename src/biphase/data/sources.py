"""Where the files of a corpus are: on this machine, or on the hub, from where they are streamed.

A hub corpus is read file by file, in the order of their names, without a copy on disk; of parquet only the text
column travels. Retries and waiting are the hub library's.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

from biphase.data.listing import (
    HubSource,
    Named,
    check_suffix,
    is_hidden,
    is_pattern,
    set_apart,
    tokenize_command,
)
from biphase.errors import DataError, one_line
from biphase.specs import Corpus


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
