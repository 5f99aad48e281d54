"""A folder that appears whole or not at all: built beside its place, checked, and renamed."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Callable, Generator
from pathlib import Path

from biphase.errors import SpecError
from biphase.files import sync

Say = Callable[[str], None]  # tells a user how far it is


def refuse_taken(place: Path) -> None:
    """Refuse a place where something is."""
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise SpecError(f"{place} is a file; type the name of a folder that is not there yet")
    if place.is_dir() and any(place.iterdir()):
        raise SpecError(
            f"{place} is not empty, and an export never writes over anything; type another folder"
        )


@contextlib.contextmanager
def building(place: Path) -> Generator[Path]:
    """A folder to build in; it takes its place when the block ends well, and is gone when it does not."""
    refuse_taken(place)
    draft = place.parent / f".{place.name}-{uuid.uuid4().hex[:8]}.part"
    try:
        draft.mkdir(parents=True)
    except OSError as wrong:
        raise SpecError(f"{place} cannot be written ({wrong.strerror}); type another folder") from None
    try:
        yield draft
        for path in draft.rglob("*"):
            if path.is_file():
                path.chmod(0o644)  # safetensors writes for its owner alone
            sync(path)
        refuse_taken(place)  # whoever was faster keeps it
        draft.rename(place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
