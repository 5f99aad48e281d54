"""The version of the code, with the commit if it runs from a git checkout."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

__version__ = "0.2.0"


@cache
def code_version() -> str:
    """Return 0.2.0, or 0.2.0+2a3f7c4 in a git checkout; uncommitted changes do not show."""
    commit = _commit(Path(__file__).resolve().parents[2] / ".git")
    return f"{__version__}+{commit[:7]}" if commit else __version__


def source_hash() -> str:
    """Return a hash of the source files, which also shows uncommitted changes."""
    folder = Path(__file__).resolve().parent
    files = sorted(folder.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def _commit(git: Path) -> str:
    """Return the commit that is checked out, read from git's own files, so that git need not be installed."""
    try:
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if (git / name).is_file():
            return (git / name).read_text(encoding="utf-8").strip()
        packed = (git / "packed-refs").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split()[0] for line in packed if line.endswith(f" {name}")), "")
