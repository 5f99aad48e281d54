"""`biphase doctor`: examine the machine and the store, and name the command that fixes each problem.

`examine` runs one check per `Diagnosis` and never fails: a check that raises becomes a diagnosis, too. Versions are
compared with the requirements in the installed package's metadata, so pyproject.toml is the only place that states
them. Importing torch is slow (seconds); nothing is imported before its check.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import operator
import os
import platform
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from biphase.data.corpus import ASSETS
from biphase.errors import one_line
from biphase.leases import Leases
from biphase.presets import CORPORA, LLAMA3
from biphase.store import Store


@dataclass(frozen=True)
class Diagnosis:
    """The result of one check. `ok`: True works, None works but could be better, False does not work."""

    name: str
    ok: bool | None
    detail: str
    fix: str = ""


def install(name: str, requirement: str) -> str:
    """The command that installs a missing package."""
    if name == "python":
        return f"install Python {requirement.removeprefix('python')} and make the environment again with it"
    # An environment made without pip uses the system's pip.
    here = importlib.util.find_spec("pip")
    pip = [sys.executable, "-m", "pip"] if here else ["python3", "-m", "pip", "--python", sys.executable]
    return shlex.join([*pip, "install", requirement])


# ---------------------------------------------------------------- devices and compiler


TORCH_FOR_GPUS = "https://download.pytorch.org/whl/cu130"


def look_at_devices() -> list[Diagnosis]:
    """Check GPUs, and the CPU's bf16 support."""
    try:
        import torch
    except Exception as wrong:  # a broken install may raise anything
        fix = f"{install('torch', 'torch')} --force-reinstall"
        return [Diagnosis("torch loads", False, one_line(wrong), fix)]
    driver = Path("/proc/driver/nvidia/version")
    with warnings.catch_warnings(record=True) as complaints:  # torch reports an old driver as a warning
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [
        f"{one.name} ({one.total_memory / 2**30:.0f} GiB)"
        for one in (torch.cuda.get_device_properties(index) for index in range(count))
    ]
    complaint = str(complaints[0].message).splitlines()[0] if complaints else ""
    newest = max((torch.cuda.get_device_capability(index) for index in range(count)), default=(0, 0))
    wanted = torch.version.cuda is not None and newest >= (
        9,
        0,
    )  # the GPUs that nvidia-cudnn-frontend has kernels for
    gpu = describe_gpus(
        names,
        torch.version.cuda or torch.version.hip,
        driver.is_file(),
        complaint,
        lacks_frontend=wanted and not _loads("cudnn"),
    )
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    return [gpu, describe_cpu(flags, torch.get_num_threads(), has_gpu=count > 0)]


def _loads(package: str) -> bool:
    try:
        importlib.import_module(package)
    except (ImportError, OSError):  # not installed, or without its library
        return False
    return True


def describe_gpus(
    names: list[str], toolkit: str | None, driver: bool, complaint: str = "", *, lacks_frontend: bool = False
) -> Diagnosis:
    """The diagnosis of GPUs. `toolkit`: what torch was built for; `driver`: whether NVIDIA's driver is present."""
    if names:
        detail = f"{', '.join(names)}; torch built for {toolkit}"
        if not lacks_frontend:
            return Diagnosis("gpu", True, detail)
        slower = f"{detail}; without nvidia-cudnn-frontend attention takes half as long again"
        return Diagnosis("gpu", None, slower, install("", "nvidia-cudnn-frontend"))
    if driver and not toolkit:
        fix = f"{install('torch', 'torch')} --force-reinstall --index-url {TORCH_FOR_GPUS}"
        return Diagnosis("gpu", False, "a GPU driver is here, but this torch is built for CPUs only", fix)
    if driver:
        detail = f"a GPU driver is here, but torch cannot use it: {complaint or 'no device is visible'}"
        return Diagnosis("gpu", False, detail, "nvidia-smi; echo CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES")
    return Diagnosis("gpu", True, "none; training runs on the processor")


def describe_cpu(cpuinfo: str, threads: int, *, has_gpu: bool = False) -> Diagnosis:
    """The diagnosis of the CPU, from /proc/cpuinfo: x86 lists flags, ARM features."""
    words = set(re.findall(r"\w+", " ".join(re.findall(r"(?m)^(?:flags|Features)\s*:(.*)$", cpuinfo))))
    units = [word for word in ("amx_bf16", "avx512_bf16", "bf16") if word in words]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    detail = f"{threads} threads on {cores} cores, {f'bf16 by {units[0]}' if units else 'no bf16 units'}"
    if units or has_gpu:
        return Diagnosis("cpu", True, detail)
    detail += ": sizes from 60m up default to bf16, which is slow here"
    return Diagnosis("cpu", None, detail, 'in the study, say Pretrain(..., precision="fp32")')


def look_at_compiler() -> list[Diagnosis]:
    """Check for a C++ compiler and Python's headers, which torch.compile needs."""
    compiler = shutil.which(os.environ.get("CXX", "")) or shutil.which("g++") or shutil.which("clang++")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    lacks = [] if compiler else ["g++"]
    lacks += [] if header.is_file() else [f"python{sys.version_info.major}.{sys.version_info.minor}-dev"]
    if not lacks:
        return [Diagnosis("compiler", True, str(compiler))]
    detail = f"{' and '.join(lacks)} missing, so models run uncompiled and slower"
    return [Diagnosis("compiler", None, detail, f"apt-get install {' '.join(lacks)}")]


# ---------------------------------------------------------------- checks


GB = 1e9
HUB_SECONDS = 2.0
LEFT_BEHIND_SECONDS = 3600.0  # an attempt not written to for this long, whose job has no lease, is abandoned
OPERATORS = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
MARKS = {True: "✓", None: "!", False: "✗"}


def examine(store: Store) -> list[Diagnosis]:
    """Check this machine and this store, in the order in which things are needed."""
    looks: dict[str, Callable[[], list[Diagnosis]]] = {
        "versions": look_at_versions,
        "devices": look_at_devices,
        "compiler": look_at_compiler,
        "hub": look_at_hub,
        "built-in corpus": look_at_assets,
        "store": lambda: look_at_store(store),
        "attempts": lambda: look_at_attempts(store),
    }
    return [finding for name, look in looks.items() for finding in guarded(name, look)]


def guarded(name: str, look: Callable[[], list[Diagnosis]]) -> list[Diagnosis]:
    """Run a check; an exception becomes a diagnosis, so the other checks still run."""
    try:
        return look()
    except Exception as wrong:
        fix = "python3 run doctor in a fresh clone makes a fresh environment"
        return [Diagnosis(name, False, f"cannot be examined: {one_line(wrong)}", fix)]


def render(findings: Iterable[Diagnosis]) -> str:
    """One aligned line for each diagnosis, followed by the fix of a problem."""
    rows = list(findings)
    width = max((len(row.name) for row in rows), default=0)
    lines = []
    for row in rows:
        lines.append(f"{MARKS[row.ok]} {row.name:<{width}}  {row.detail}")
        if row.fix and row.ok is not True:
            lines.append(f"  {'':<{width}}  → {row.fix}")
    return "\n".join(lines)


def look_at_versions() -> list[Diagnosis]:
    """Check Python and the packages that biphase requires."""
    package = importlib.metadata.metadata("biphase")
    requirements = importlib.metadata.requires("biphase") or []
    names = [_split(text)[0] for text in requirements]
    python = {"python": platform.python_version()}
    return [
        *compare([f"python{package['Requires-Python']}"], python),
        *compare(requirements, {name: installed_version(name) for name in names}),
    ]


def compare(requirements: Iterable[str], installed: Mapping[str, str | None]) -> list[Diagnosis]:
    """Compare requirements, as package metadata writes them, with installed versions; None: not installed."""
    findings = []
    for text in requirements:
        wanted, _, marker = (part.strip() for part in text.partition(";"))
        optional = "track" in marker
        if "extra" in marker and not optional:  # for testing and development
            continue
        name, bounds = _split(wanted)
        version = installed.get(name)
        if version is not None and meets(version, bounds):
            findings.append(Diagnosis(name, True, version))
            continue
        state = f"{version} is installed, {bounds} is needed" if version else "is not installed"
        if optional:
            state += "; metrics go to metrics.jsonl only"
        findings.append(Diagnosis(name, None if optional else False, state, install(name, wanted)))
    return findings


def meets(version: str, bounds: str) -> bool:
    """Whether a version is within bounds such as "<6,>=5.17". Only release numbers count: 2.11.0a0+git is 2.11."""
    for bound in filter(None, bounds.split(",")):
        number = bound.lstrip("<>=! ")
        if not OPERATORS[bound.removesuffix(number).strip()](_release(version), _release(number)):
            return False
    return True


def _split(requirement: str) -> tuple[str, str]:
    """Split a requirement into name and bounds."""
    name = re.split(r"[^\w.-]", requirement)[0]
    return name, re.sub(r"\s|\[.*?\]|[()]", "", requirement.removeprefix(name))


def _release(version: str) -> tuple[int, ...]:
    numbers = [int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", version)[0])]
    while numbers and numbers[-1] == 0:  # 15 and 15.0 are equal
        numbers.pop()
    return tuple(numbers)


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def look_at_hub() -> list[Diagnosis]:
    """Check whether the hub answers. Without it, local copies work."""
    copy = (
        f"where there is a network: hf download {LLAMA3.source} --revision {LLAMA3.revision} --local-dir ./copy; "
        "then name the folder in the study: Pretrained('./copy'), Hub('./copy'), Corpus(..., './copy', ...)"
    )
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return [Diagnosis("hub", None, "HF_HUB_OFFLINE is set: cached and local copies only", copy)]
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    trouble = unreachable(endpoint)
    if trouble:
        return [Diagnosis("hub", None, f"{endpoint} does not answer: {trouble}", copy)]
    return [Diagnosis("hub", True, f"{endpoint} answers")]


def unreachable(address: str, seconds: float = HUB_SECONDS) -> str:
    """Why `address` cannot be reached within `seconds`; empty if it can."""
    answer = [f"nothing within {seconds:g} s"]

    def ask() -> None:
        try:
            request = urllib.request.Request(address, method="HEAD")
            with urllib.request.urlopen(request, timeout=seconds):
                answer[0] = ""
        except (OSError, ValueError) as wrong:  # HTTP errors too: a proxy's 403 is not the hub
            answer[0] = str(getattr(wrong, "reason", "") or wrong)

    # In a thread, because name resolution has no timeout of its own.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return answer[0]


def look_at_assets(folder: Path = ASSETS) -> list[Diagnosis]:
    """Check the built-in corpus, which the quickstart reads."""
    corpus = CORPORA["builtin"]
    names = [corpus.source.removeprefix("builtin:"), corpus.heldout]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        fix = install("biphase", "biphase") + " --force-reinstall --no-deps"
        return [Diagnosis("built-in corpus", False, f"{folder} lacks {', '.join(missing)}", fix)]
    size = sum((folder / name).stat().st_size for name in names)
    return [Diagnosis("built-in corpus", True, f"{size / 1e6:.1f} MB")]


def look_at_store(store: Store) -> list[Diagnosis]:
    """Check whether results can be written, published and leased in the store, and the free space."""
    elsewhere = "biphase run STUDY --store /another/folder (or set BIPHASE_STORE)"
    root = store.root.absolute()
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".biphase-doctor-", dir=there) as scratch:
            trouble = try_out(Path(scratch))
    except OSError as wrong:
        return [Diagnosis("store", False, f"{root} cannot be written: {wrong.strerror or wrong}", elsewhere)]
    if trouble:
        return [Diagnosis("store", False, f"{root}: {trouble}", elsewhere)]
    state = "is writable, renames are atomic" if there == root else "does not exist yet and can be made"
    room = describe_room(shutil.disk_usage(there).free, elsewhere)
    return [Diagnosis("store", True, f"{root} {state}"), room]


def try_out(folder: Path) -> str:
    """Test the file system operations that publishing and leases need; returns the first problem."""
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


def describe_room(free: float, elsewhere: str) -> Diagnosis:
    ok = False if free < 0.5 * GB else None if free < 10 * GB else True
    return Diagnosis("disk", ok, f"{free / GB:.1f} GB free", elsewhere)


def look_at_attempts(store: Store, *, old_seconds: float = LEFT_BEHIND_SECONDS) -> list[Diagnosis]:
    """Find unfinished results of killed runs. They never count as results, but they take space."""
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
        return [Diagnosis("attempts", True, "; ".join(detail))]
    return [Diagnosis("attempts", None, "; ".join(detail), shlex.join(["rm", "-r", *map(str, left)]))]


def _facts(folder: Path) -> list[os.stat_result]:
    """The lstat of a folder and everything in it, as far as it still exists."""
    inside = [Path(base, name) for base, *both in os.walk(folder) for names in both for name in names]
    found = []
    for path in (folder, *inside):
        with contextlib.suppress(FileNotFoundError):  # its worker may still be writing
            found.append(path.lstat())
    return found
