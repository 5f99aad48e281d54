"""Shared by tests in all folders: a tiny model, files of rows, a task of toys, stores with the tiny corpus, waiting."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sysconfig
import time
import uuid
import venv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from biphase import Size
from biphase.store import MANIFEST, Store, publish

TINY = Size("tiny", layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, precision="fp32")
SUBJECTS = ("the cat", "a dog", "our teacher", "the river", "every student", "the old house")
VERBS = ("sees", "likes", "crosses", "remembers", "paints")
OBJECTS = ("the mountain", "a small boat", "the garden", "its own shadow", "the long road", "two birds")
BEASTS = ("the cat", "a dog", "two birds"), ("the river", "a mountain", "the long road")


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """Rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sentences(count: int) -> list[str]:
    """Documents with some structure to learn, each another one."""
    made = []
    for number in range(count):
        parts = [
            f"{SUBJECTS[(number * 7 + k) % 6]} {VERBS[(number * 3 + k * 5) % 5]} {OBJECTS[(number + k * k) % 6]}"
            for k in range(3 + number % 6)
        ]
        made.append(f"{'. '.join(parts)}. {number}")
    return made


def toys(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Texts about a beast or a place."""
    return [
        {"text": f"{BEASTS[n % 2][n % 3]} sees {BEASTS[n % 2][(n + 1) % 3]} {first + n}", "label": n % 2}
        for n in range(count)
    ]


def write_task(folder: Path, rows=toys) -> Path:
    """A task with 40, 12 and 16 examples."""
    for part, count, first in (("train", 40, 0), ("validation", 12, 40), ("test", 16, 60)):
        write_lines(folder / f"{part}.jsonl", rows(count, first))
    return folder


def store_with(shards: Path, folder: Path) -> Store:
    """A store that has nothing but a tokenized corpus."""
    store = Store(folder)
    store.shards.mkdir(parents=True)
    (store.shards / shards.name).symlink_to(shards)
    return store


def republish(folder: Path, files: dict[str, bytes], to: Path | None = None) -> None:
    """Publish a result again with other content of some files, where it was or in another place."""
    built = folder.with_name(f"{folder.name}-again")
    folder.rename(built)
    (built / MANIFEST).unlink()
    for name, content in files.items():
        (built / name).unlink(missing_ok=True)
        (built / name).write_bytes(content)
    assert publish(built, to or folder)


def republish_json(
    folder: Path, name: str, change: Callable[[dict[str, Any]], object], to: Path | None = None
) -> None:
    """Publish a result again after a change of one of its JSON files."""
    about = json.loads((folder / name).read_text())
    change(about)
    republish(folder, {name: json.dumps(about).encode()}, to)


def wait_until(claim: Callable[[], object], seconds: float = 4.0, what: str = "it is so") -> object:
    """Ask 200 times, and not more than five times a second; return the first answer that counts as true."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if value := claim():
            return value
        time.sleep(min(0.2, seconds / 200))
    raise AssertionError(f"after {seconds:g} s still not: {what}")


def python_with(*requirements: str) -> Path:
    """A Python that imports these packages, and everything else from this environment; installed once, by pip."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "biphase-tests"
    name = "-".join(requirement.replace("==", "-") for requirement in requirements)
    folder = cache / f"{name}-python-{sysconfig.get_python_version()}"
    if not folder.is_dir():
        draft = cache / uuid.uuid4().hex
        venv.create(draft, with_pip=True)
        command = [draft / "bin" / "python", "-m", "pip", "install", "--quiet", *requirements]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{name} cannot be installed: {done.stderr}"
        draft.rename(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "tests.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "bin" / "python"


BROWSER_ARGUMENTS = ["--no-sandbox", "--disable-background-networking"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def browser_executable() -> str:
    """The browser, or one line about its absence."""
    named = os.environ.get("BIPHASE_BROWSER", "")
    found = named or next((path for name in BROWSERS if (path := shutil.which(name))), "")
    if not found:
        why = "no browser: run tests/system-packages, or name one in BIPHASE_BROWSER"
        if os.environ.get("CI") or os.environ.get("BIPHASE_CI"):
            pytest.fail(why, pytrace=False)
        pytest.skip(why, allow_module_level=True)
    return found


class Terminal(io.StringIO):
    """An output that is a terminal; COLUMNS says how wide."""

    def isatty(self) -> bool:
        return True
