"""What was found when something was looked at, and the command that mends it."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `ok`: True fine, None works but could be better, False does not work."""

    name: str
    ok: bool | None
    detail: str
    fix: str = ""


def install(name: str, requirement: str) -> str:
    """The command that installs what is missing."""
    if name == "python":
        return f"install Python {requirement.removeprefix('python')} and make the environment again with it"
    # An environment made without pip is served by the system's.
    here = importlib.util.find_spec("pip")
    pip = [sys.executable, "-m", "pip"] if here else ["python3", "-m", "pip", "--python", sys.executable]
    return shlex.join([*pip, "install", requirement])
