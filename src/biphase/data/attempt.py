"""An attempt at a tokenized corpus: a folder under a name that only its worker knows.

Who goes on with another's unfinished attempt renames it first. So a worker that had only stalled, and was taken for
dead, finds its folder gone when it comes back, and ends; it can neither write into the new owner's files by their
paths nor publish them.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from biphase.errors import DataError, StoreError
from biphase.files import Store, read_sealed, sealed, sha256, write_json
from biphase.specs import Corpus


class TakenOver(DataError):
    """Another worker goes on with this corpus: nothing is wrong with it, and a worker may wait."""


class Attempt:
    """`build` becomes the result; the rest of the folder is scaffolding."""

    def __init__(self, corpus: Corpus, store: Store, key: str, lost: Callable[[], bool]) -> None:
        self.corpus, self.lost = corpus, lost
        # The lease's key stands in the name, so that others see whose it is.
        self.folder = store.attempts / f"shards-{key}-{uuid.uuid4().hex[:8]}"
        self.build, self.journal = self.folder / "build", self.folder / "journal.json"
        self.begun = False
        for left in _left(store, key):
            if lost():  # stalled before it began: what lies there is the other's
                raise self.refusal()
            with contextlib.suppress(FileNotFoundError):  # another worker was faster
                left.rename(self.folder)
                break

    def begin(self) -> None:
        self.build.mkdir(parents=True, exist_ok=True)
        self.begun = True

    def seal(self, folder: Path) -> None:
        """Remember the files of a folder of the result, to go on with them only if they are the same."""
        clear(self._seal(folder))
        write_json(self._seal(folder), sealed(_hashes(folder)))

    def is_sealed(self, folder: Path) -> bool:
        try:
            return folder.is_dir() and read_sealed(self._seal(folder)) == _hashes(folder)
        except StoreError:
            return False

    def _seal(self, folder: Path) -> Path:
        return self.folder / f"{folder.name}.sealed.json"

    def check_ours(self) -> None:
        """Refuse to go on with what somebody else does now."""
        if self.taken_over:
            raise self.refusal()

    @property
    def taken_over(self) -> bool:
        return self.begun and (self.lost() or not self.folder.is_dir())

    def refusal(self) -> TakenOver:
        return TakenOver(
            f"corpus {self.corpus.name!r}: another worker took this corpus over, because this one was silent for "
            "long; type the command again: it waits for the other, or goes on where that one ends"
        )

    def discard(self) -> None:
        """Leave nothing: what comes next has another key, or must begin again."""
        self.begun = False
        shutil.rmtree(self.folder, ignore_errors=True)


def clear(path: Path) -> None:
    """Remove what stands there, whatever it is."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _hashes(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in sorted(folder.iterdir()) if path.is_file()}


def remove_attempts(store: Store, key: str) -> None:
    """Remove what is left of attempts at a corpus that is there."""
    for folder in _left(store, key):
        shutil.rmtree(folder, ignore_errors=True)


def _left(store: Store, key: str) -> list[Path]:
    """The unfinished attempts at a corpus, those that can be gone on with first."""
    found = store.attempts.glob(f"shards-{key}*")
    return sorted(found, key=lambda folder: ((folder / "journal.json").is_file(), folder.name), reverse=True)
