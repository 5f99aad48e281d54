"""What this machine has, what it lacks, and the command that mends it.

`examine` asks one small question per finding and never fails: what cannot be found out is a finding too.
Versions are compared with the requirements in the installed package's own metadata, so pyproject.toml is the
only place that states them. Importing torch is the slow part (seconds); nothing is imported before it is asked.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import operator
import os
import platform
import re
import shlex
import shutil
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from biphase.data.listing import ASSETS
from biphase.errors import one_line
from biphase.files import Store
from biphase.findings import Finding, install
from biphase.leases import Leases
from biphase.presets import CORPORA, LLAMA3
from biphase.processors import look_at_compiler, look_at_devices

GB = 1e9
HUB_SECONDS = 2.0
LEFT_BEHIND_SECONDS = 3600.0  # an attempt nobody has written to for so long, and whose job nobody holds
OPERATORS = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
MARKS = {True: "✓", None: "!", False: "✗"}


def examine(store: Store) -> list[Finding]:
    """Everything worth knowing about this machine and this store, in the order it is needed."""
    looks: dict[str, Callable[[], list[Finding]]] = {
        "versions": look_at_versions,
        "devices": look_at_devices,
        "compiler": look_at_compiler,
        "hub": look_at_hub,
        "built-in corpus": look_at_assets,
        "store": lambda: look_at_store(store),
        "attempts": lambda: look_at_attempts(store),
    }
    return [finding for name, look in looks.items() for finding in guarded(name, look)]


def guarded(name: str, look: Callable[[], list[Finding]]) -> list[Finding]:
    """A machine broken in a way nobody thought of still gets its other findings."""
    try:
        return look()
    except Exception as wrong:
        fix = "python3 run doctor in a fresh clone makes a fresh environment"
        return [Finding(name, False, f"cannot be examined: {one_line(wrong)}", fix)]


def render(findings: Iterable[Finding]) -> str:
    """One aligned line each; under a problem, what to type."""
    rows = list(findings)
    width = max((len(row.name) for row in rows), default=0)
    lines = []
    for row in rows:
        lines.append(f"{MARKS[row.ok]} {row.name:<{width}}  {row.detail}")
        if row.fix and row.ok is not True:
            lines.append(f"  {'':<{width}}  → {row.fix}")
    return "\n".join(lines)


def look_at_versions() -> list[Finding]:
    package = importlib.metadata.metadata("biphase")
    requirements = importlib.metadata.requires("biphase") or []
    names = [_split(text)[0] for text in requirements]
    python = {"python": platform.python_version()}
    return [
        *compare([f"python{package['Requires-Python']}"], python),
        *compare(requirements, {name: installed_version(name) for name in names}),
    ]


def compare(requirements: Iterable[str], installed: Mapping[str, str | None]) -> list[Finding]:
    """Requirements as package metadata writes them, against versions; None or no entry is not installed."""
    findings = []
    for text in requirements:
        wanted, _, marker = (part.strip() for part in text.partition(";"))
        optional = "track" in marker
        if "extra" in marker and not optional:  # for those who test and develop
            continue
        name, bounds = _split(wanted)
        version = installed.get(name)
        if version is not None and meets(version, bounds):
            findings.append(Finding(name, True, version))
            continue
        state = f"{version} is installed, {bounds} is needed" if version else "is not installed"
        if optional:
            state += "; metrics go to metrics.jsonl only"
        findings.append(Finding(name, None if optional else False, state, install(name, wanted)))
    return findings


def meets(version: str, bounds: str) -> bool:
    """Is `version` within e.g. "<6,>=5.17"? Only release numbers count: 2.11.0a0+git is a 2.11."""
    for bound in filter(None, bounds.split(",")):
        number = bound.lstrip("<>=! ")
        if not OPERATORS[bound.removesuffix(number).strip()](_release(version), _release(number)):
            return False
    return True


def _split(requirement: str) -> tuple[str, str]:
    """Name and bounds."""
    name = re.split(r"[^\w.-]", requirement)[0]
    return name, re.sub(r"\s|\[.*?\]|[()]", "", requirement.removeprefix(name))


def _release(version: str) -> tuple[int, ...]:
    numbers = [int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", version)[0])]
    while numbers and numbers[-1] == 0:  # 15 and 15.0 are one version
        numbers.pop()
    return tuple(numbers)


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def look_at_hub() -> list[Finding]:
    """Does the hub answer? Without it, local copies do."""
    copy = (
        f"where there is a network: hf download {LLAMA3.source} --revision {LLAMA3.revision} --local-dir ./copy; "
        "then name the folder in the study: Pretrained('./copy'), Hub('./copy'), Corpus(..., './copy', ...)"
    )
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return [Finding("hub", None, "HF_HUB_OFFLINE is set: cached and local copies only", copy)]
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    trouble = unreachable(endpoint)
    if trouble:
        return [Finding("hub", None, f"{endpoint} does not answer: {trouble}", copy)]
    return [Finding("hub", True, f"{endpoint} answers")]


def unreachable(address: str, seconds: float = HUB_SECONDS) -> str:
    """Why `address` cannot be reached within `seconds`; nothing if it can."""
    answer = [f"nothing within {seconds:g} s"]

    def ask() -> None:
        try:
            request = urllib.request.Request(address, method="HEAD")
            with urllib.request.urlopen(request, timeout=seconds):
                answer[0] = ""
        except (OSError, ValueError) as wrong:  # HTTP errors too: a proxy that says 403 is no hub
            answer[0] = str(getattr(wrong, "reason", "") or wrong)

    # A thread, since looking up a name has no timeout of its own.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return answer[0]


def look_at_assets(folder: Path = ASSETS) -> list[Finding]:
    """The built-in corpus, which the quickstart reads."""
    corpus = CORPORA["builtin"]
    names = [corpus.source.removeprefix("builtin:"), corpus.heldout]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        fix = install("biphase", "biphase") + " --force-reinstall --no-deps"
        return [Finding("built-in corpus", False, f"{folder} lacks {', '.join(missing)}", fix)]
    size = sum((folder / name).stat().st_size for name in names)
    return [Finding("built-in corpus", True, f"{size / 1e6:.1f} MB")]


def look_at_store(store: Store) -> list[Finding]:
    """Can results be written, published and leased there, and is there room?"""
    elsewhere = "biphase run STUDY --store /another/folder (or set BIPHASE_STORE)"
    root = store.root.absolute()
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".biphase-doctor-", dir=there) as scratch:
            trouble = try_out(Path(scratch))
    except OSError as wrong:
        return [Finding("store", False, f"{root} cannot be written: {wrong.strerror or wrong}", elsewhere)]
    if trouble:
        return [Finding("store", False, f"{root}: {trouble}", elsewhere)]
    state = "is writable, renames are atomic" if there == root else "does not exist yet and can be made"
    room = describe_room(shutil.disk_usage(there).free, elsewhere)
    return [Finding("store", True, f"{root} {state}"), room]


def try_out(folder: Path) -> str:
    """What publishing and leases rest on, tried; the first thing that does not hold."""
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / "file").write_text(name)
    try:
        (folder / "one").rename(folder / "two")
        return "a folder replaces another there, so two workers could overwrite each other's results"
    except OSError:
        pass
    (folder / "one").rename(folder / "three")
    found = [(folder / name / "file").read_text() for name in ("three", "two")]
    return "" if found == ["one", "two"] else "files change under a rename there"


def describe_room(free: float, elsewhere: str) -> Finding:
    ok = False if free < 0.5 * GB else None if free < 10 * GB else True
    return Finding("disk", ok, f"{free / GB:.1f} GB free", elsewhere)


def look_at_attempts(store: Store, *, old_seconds: float = LEFT_BEHIND_SECONDS) -> list[Finding]:
    """Half-built results of killed runs: they never count as results, but they take room."""
    held = tuple(key for key, holder in Leases(store.leases).holders().items() if holder.alive is not False)
    left, size, resumable = [], 0, 0
    for folder in sorted(store.attempts.iterdir()) if store.attempts.is_dir() else ():
        facts = _facts(folder)
        idle = time.time() - max((fact.st_mtime for fact in facts), default=time.time())
        if idle <= old_seconds or any(key in folder.name for key in held):
            continue
        if folder.name.startswith("shards-"):
            resumable += 1
        else:
            left.append(folder)
            size += sum(fact.st_size for fact in facts)
    detail = [f"{len(left)} left by killed runs, {size / 1e6:.1f} MB" if left else "none left by killed runs"]
    if resumable:
        detail.append(f"{resumable} unfinished in tokenizing: biphase tokenize goes on with them")
    if not left:
        return [Finding("attempts", True, "; ".join(detail))]
    return [Finding("attempts", None, "; ".join(detail), shlex.join(["rm", "-r", *map(str, left)]))]


def _facts(folder: Path) -> list[os.stat_result]:
    """What the file system knows of a folder and all in it, as far as it is still there."""
    inside = [Path(base, name) for base, *both in os.walk(folder) for names in both for name in names]
    found = []
    for path in (folder, *inside):
        with contextlib.suppress(FileNotFoundError):  # its worker goes on writing while we look
            found.append(path.lstat())
    return found
