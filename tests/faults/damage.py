"""Ways to damage a file, each the same for the same seed."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def _cut(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(1, len(content)) if len(content) > 1 else 0])


def _flip(path: Path, chance: random.Random) -> None:
    """Flip one bit. The file keeps its size and maybe its times, so that only its content differs."""
    content, was = bytearray(path.read_bytes()), path.stat()
    if content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    if chance.random() < 0.5:
        os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def _replace(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "cut": _cut,
    "flipped": _flip,
    "emptied": lambda path, chance: path.write_bytes(b""),
    "deleted": lambda path, chance: path.unlink(),
    "a folder": _replace,
}
# A flipped bit may fall anywhere, so it is tried several times.
TRIES = [(name, seed) for name in DAMAGES for seed in range({"cut": 2, "flipped": 4}.get(name, 1))]


def campaign_but(few: list[tuple], every: list[tuple]) -> list:
    """Return test parameters: `few` run always, the others in campaigns."""
    return [pytest.param(*case, marks=[] if case in few else [pytest.mark.campaign]) for case in every]


def hurt(path: Path, name: str, seed: int) -> None:
    DAMAGES[name](path, random.Random(f"{path.name} {name} {seed}"))


def take_away(path: Path) -> None:
    """Remove a file or folder, as an error message says."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
