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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from biphase.errors import one_line
from biphase.leases import Leases
from biphase.presets import LLAMA3
from biphase.store import Store


@dataclass(frozen=True)
class Diagnosis:
    """The result of one check. `ok`: True works, None works but could be better, False does not work."""

    name: str
    ok: bool | None
    detail: str
    fix: str = ""


def install(name: str, requirement: str) -> str:
    """Return the command that installs a missing package."""
    if name == "python":
        return f"install Python {requirement.removeprefix('python')} and make the environment again with it"
    # An environment made without pip uses the system's pip.
    here = importlib.util.find_spec("pip")
    pip = [sys.executable, "-m", "pip"] if here else ["python3", "-m", "pip", "--python", sys.executable]
    return shlex.join([*pip, "install", requirement])


# ---------------------------------------------------------------- devices and compiler


TORCH_FOR_GPUS = "https://download.pytorch.org/whl/cu130"


def check_devices() -> list[Diagnosis]:
    """Check GPUs, and the CPU's bf16 support."""
    try:
        import torch
    except Exception as error:  # a broken install may raise anything
        fix = f"{install('torch', 'torch')} --force-reinstall"
        return [Diagnosis("torch loads", False, one_line(error), fix)]
    driver = Path("/proc/driver/nvidia/version")
    with warnings.catch_warnings(record=True) as complaints:  # torch reports an old driver as a warning
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    names = [f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in gpus]
    complaint = str(complaints[0].message).splitlines()[0] if complaints else ""
    # nvidia-cudnn-frontend has kernels for GPUs of compute capability 9 and above.
    newest = max((gpu.major for gpu in gpus), default=0) if torch.version.cuda else 0
    lacks_frontend = newest >= 9 and not _loads("cudnn")
    toolkit = torch.version.cuda or torch.version.hip
    gpu = describe_gpus(names, toolkit, driver.is_file(), complaint, lacks_frontend=lacks_frontend)
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
    """Return the diagnosis of GPUs. `toolkit`: what torch was built for; `driver`: whether NVIDIA's driver is present."""
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
    return Diagnosis("gpu", True, "none; training runs on the CPU")


def describe_cpu(cpuinfo: str, threads: int, *, has_gpu: bool = False) -> Diagnosis:
    """Return the diagnosis of the CPU from /proc/cpuinfo: x86 lists flags, ARM features."""
    flags = set(re.findall(r"\w+", " ".join(re.findall(r"(?m)^(?:flags|Features)\s*:(.*)$", cpuinfo))))
    units = [flag for flag in ("amx_bf16", "avx512_bf16", "bf16") if flag in flags]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    detail = f"{threads} threads on {cores} cores, {f'bf16 by {units[0]}' if units else 'no bf16 units'}"
    if units or has_gpu:
        return Diagnosis("cpu", True, detail)
    detail += ": sizes from 60m up default to bf16, which is slow here"
    return Diagnosis("cpu", None, detail, 'in the study, write Pretrain(..., precision="fp32")')


def check_compiler() -> list[Diagnosis]:
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


HUB_SECONDS = 2.0
LEFT_BEHIND_SECONDS = 3600.0  # an attempt not written to for this long, whose job has no lease, is abandoned
MARKS = {True: "✓", None: "!", False: "✗"}


def examine(store: Store) -> list[Diagnosis]:
    """Check this machine and this store, in the order in which things are needed."""
    checks: dict[str, Callable[[], list[Diagnosis]]] = {
        "versions": check_versions,
        "devices": check_devices,
        "compiler": check_compiler,
        "hub": check_hub,
        "store": lambda: check_store(store),
        "attempts": lambda: check_attempts(store),
    }
    diagnoses = []
    for name, check in checks.items():
        try:
            diagnoses += check()
        except Exception as error:  # the other checks still run
            fix = "python3 run doctor in a fresh clone makes a fresh environment"
            diagnoses.append(Diagnosis(name, False, f"cannot be examined: {one_line(error)}", fix))
    return diagnoses


def render(rows: list[Diagnosis]) -> str:
    """Return one aligned line for each diagnosis, followed by the fix of a problem."""
    width = max((len(row.name) for row in rows), default=0)
    lines = []
    for row in rows:
        lines.append(f"{MARKS[row.ok]} {row.name:<{width}}  {row.detail}")
        if row.fix and row.ok is not True:
            lines.append(f"  {'':<{width}}  → {row.fix}")
    return "\n".join(lines)


def check_versions() -> list[Diagnosis]:
    """Check Python and the packages that biphase requires."""
    package = importlib.metadata.metadata("biphase")
    return [
        *compare([f"python{package['Requires-Python']}"], lambda name: platform.python_version()),
        *compare(importlib.metadata.requires("biphase") or [], installed_version),
    ]


def compare(requirements: Iterable[str], installed: Callable[[str], str | None]) -> list[Diagnosis]:
    """Compare requirements, as package metadata writes them, with installed versions; None: not installed.

    Only release numbers count: 2.11.0a0+git is 2.11.0.
    """
    from packaging.requirements import Requirement
    from packaging.version import Version

    diagnoses = []
    for text in requirements:
        requirement, marker = Requirement(text), text.partition(";")[2]
        optional = bool(re.search(r"""extra == ["']track["']""", marker))
        if "extra" in marker and not optional:  # for testing and development
            continue
        name, bounds = requirement.name, requirement.specifier
        version = installed(name)
        if version is not None and bounds.contains(Version(version).base_version):
            diagnoses.append(Diagnosis(name, True, version))
            continue
        state = f"{version} is installed, {bounds} is needed" if version else "is not installed"
        if optional:
            state += "; metrics go to metrics.jsonl only"
        fix = install(name, text.partition(";")[0].strip())
        diagnoses.append(Diagnosis(name, None if optional else False, state, fix))
    return diagnoses


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_hub() -> list[Diagnosis]:
    """Check whether the hub answers. Without it, local copies work."""
    copy = (
        f"where there is a network: hf download {LLAMA3.source} --revision {LLAMA3.revision} --local-dir ./copy; "
        "then name the folder in the study: Pretrained('./copy'), Hub('./copy'), Corpus(..., './copy', ...)"
    )
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return [Diagnosis("hub", None, "HF_HUB_OFFLINE is set: cached and local copies only", copy)]
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    problem = unreachable(endpoint)
    if problem:
        return [Diagnosis("hub", None, f"{endpoint} does not answer: {problem}", copy)]
    from huggingface_hub import get_token

    token = get_token()  # the hub refuses everything with a wrong one, public repositories too
    if token and "Unauthorized" in unreachable(f"{endpoint}/api/whoami-v2", token=token):
        refused = f"{endpoint} answers, and refuses your token"
        return [Diagnosis("hub", False, refused, "hf auth login, or correct HF_TOKEN")]
    return [Diagnosis("hub", True, f"{endpoint} answers")]


def unreachable(address: str, seconds: float = HUB_SECONDS, *, token: str = "") -> str:
    """Return why `address` cannot be reached within `seconds`; "" if it can."""
    answer = [f"nothing within {seconds:g} s"]

    def ask() -> None:
        try:
            request = urllib.request.Request(address, method="GET" if token else "HEAD")
            if token:
                request.add_unredirected_header("Authorization", f"Bearer {token}")
            with urllib.request.urlopen(request, timeout=seconds):
                answer[0] = ""
        except (OSError, ValueError) as error:  # HTTP errors too: a proxy's 403 is not the hub
            answer[0] = str(getattr(error, "reason", "") or error)

    # In a thread, because name resolution has no timeout of its own.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0]


def check_store(store: Store) -> list[Diagnosis]:
    """Check whether results can be written, published and leased in the store, and the free space."""
    elsewhere = "biphase run STUDY --store /another/folder (or set BIPHASE_STORE)"
    root = store.root.absolute()
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".biphase-doctor-", dir=existing) as scratch:
            problem = _test_operations(Path(scratch))
    except OSError as error:
        return [Diagnosis("store", False, f"{root} cannot be written: {error.strerror or error}", elsewhere)]
    if problem:
        return [Diagnosis("store", False, f"{root}: {problem}", elsewhere)]
    state = "is writable, renames are atomic" if existing == root else "does not exist yet and can be made"
    free = shutil.disk_usage(existing).free / 1e9
    enough = False if free < 0.5 else None if free < 10 else True
    disk = Diagnosis("disk", enough, f"{free:.1f} GB free", elsewhere)
    return [Diagnosis("store", True, f"{root} {state}"), disk]


def _test_operations(folder: Path) -> str:
    """Test the file system operations that publishing and leases need; return the first problem, or ""."""
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / "file").write_text(name)
    try:
        (folder / "one").rename(folder / "two")
        return "a folder replaces another there, so two workers could overwrite each other's results"
    except OSError:
        pass
    (folder / "one").rename(folder / "three")
    contents = [(folder / name / "file").read_text() for name in ("three", "two")]
    return "" if contents == ["one", "two"] else "files change under a rename there"


def check_attempts(store: Store, *, old_seconds: float = LEFT_BEHIND_SECONDS) -> list[Diagnosis]:
    """Find unfinished results of killed runs. They never count as results, but they take space."""
    held = tuple(key for key, holder in Leases(store.leases).holders().items() if holder.alive is not False)
    left, size, resumable = [], 0, 0
    for folder in sorted(store.attempts.iterdir()) if store.attempts.is_dir() else ():
        stats = _stats(folder)
        idle = time.time() - max((stat.st_mtime for stat in stats), default=time.time())
        if idle <= old_seconds or any(key in folder.name for key in held):
            continue
        if folder.name.startswith("shards-"):
            resumable += 1
        else:
            left.append(folder)
            size += sum(stat.st_size for stat in stats)
    detail = [f"{len(left)} left by killed runs, {size / 1e6:.1f} MB" if left else "none left by killed runs"]
    if resumable:
        detail.append(f"{resumable} unfinished in tokenizing: biphase tokenize resumes them")
    if not left:
        return [Diagnosis("attempts", True, "; ".join(detail))]
    return [Diagnosis("attempts", None, "; ".join(detail), shlex.join(["rm", "-r", *map(str, left)]))]


def _stats(folder: Path) -> list[os.stat_result]:
    """Return the lstat of a folder and of everything in it that still exists."""
    inside = [Path(base, name) for base, *both in os.walk(folder) for names in both for name in names]
    stats = []
    for path in (folder, *inside):
        with contextlib.suppress(FileNotFoundError):  # its worker may still be writing
            stats.append(path.lstat())
    return stats
