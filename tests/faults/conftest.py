"""A tiny study, finished once without disturbance; each test breaks something in a copy of it."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from common import sentences
from faults.tiny import ended, write_study

from biphase.store import Store


@dataclass(frozen=True)
class Calm:
    """The study and its store after an undisturbed run."""

    study: Path
    store: Store
    ended: dict[str, Any]

    def copied(self, folder: Path) -> Store:
        shutil.copytree(self.store.root, folder)
        return Store(folder)


@pytest.fixture(scope="session")
def calm() -> Iterator[Calm]:
    from biphase.cli import app

    folder = Path(tempfile.mkdtemp(prefix="biphase-faults-"))  # where another user may come too
    folder.chmod(0o755)
    study = write_study(folder / "input", sentences(300))
    store = folder / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["biphase"])
        with pytest.raises(SystemExit) as end:
            app(["run", str(study), "--store", str(store), "--quiet"], standalone_mode=False)
    assert not end.value.code
    yield Calm(study, Store(store), ended(store))
    shutil.rmtree(folder)
