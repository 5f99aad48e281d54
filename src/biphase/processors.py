"""What this machine computes with: GPUs, the processor, a compiler. Importing torch is the slow part (seconds)."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
import sysconfig
import warnings
from pathlib import Path

from biphase.errors import one_line
from biphase.findings import Finding, install

TORCH_FOR_GPUS = "https://download.pytorch.org/whl/cu130"


def look_at_devices() -> list[Finding]:
    """GPUs, and what the processor is good at where there are none."""
    try:
        import torch
    except Exception as wrong:  # a broken install raises anything
        fix = f"{install('torch', 'torch')} --force-reinstall"
        return [Finding("torch loads", False, one_line(wrong), fix)]
    driver = Path("/proc/driver/nvidia/version")
    with warnings.catch_warnings(record=True) as complaints:  # an old driver is told by a warning
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [
        f"{one.name} ({one.total_memory / 2**30:.0f} GiB)"
        for one in (torch.cuda.get_device_properties(index) for index in range(count))
    ]
    complaint = str(complaints[0].message).splitlines()[0] if complaints else ""
    newest = max((torch.cuda.get_device_capability(index) for index in range(count)), default=(0, 0))
    wanted = torch.version.cuda is not None and newest >= (9, 0)  # what the package has kernels for
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
    except (ImportError, OSError):  # not there, or without the library it fronts
        return False
    return True


def describe_gpus(
    names: list[str], toolkit: str | None, driver: bool, complaint: str = "", *, lacks_frontend: bool = False
) -> Finding:
    """`toolkit`: what torch was built for; `driver`: whether the system has NVIDIA's."""
    if names:
        detail = f"{', '.join(names)}; torch built for {toolkit}"
        if not lacks_frontend:
            return Finding("gpu", True, detail)
        slower = f"{detail}; without nvidia-cudnn-frontend attention takes half as long again"
        return Finding("gpu", None, slower, install("", "nvidia-cudnn-frontend"))
    if driver and not toolkit:
        fix = f"{install('torch', 'torch')} --force-reinstall --index-url {TORCH_FOR_GPUS}"
        return Finding("gpu", False, "a GPU driver is here, but this torch is built for CPUs only", fix)
    if driver:
        detail = f"a GPU driver is here, but torch cannot use it: {complaint or 'no device is visible'}"
        return Finding("gpu", False, detail, "nvidia-smi; echo CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES")
    return Finding("gpu", True, "none; training runs on the processor")


def describe_cpu(cpuinfo: str, threads: int, *, has_gpu: bool = False) -> Finding:
    """`cpuinfo` as Linux writes it: x86 lists flags, ARM features."""
    words = set(re.findall(r"\w+", " ".join(re.findall(r"(?m)^(?:flags|Features)\s*:(.*)$", cpuinfo))))
    units = [word for word in ("amx_bf16", "avx512_bf16", "bf16") if word in words]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    detail = f"{threads} threads on {cores} cores, {f'bf16 by {units[0]}' if units else 'no bf16 units'}"
    if units or has_gpu:
        return Finding("cpu", True, detail)
    detail += ": sizes from 60m up default to bf16, which is slow here"
    return Finding("cpu", None, detail, 'in the study, say Pretrain(..., precision="fp32")')


def look_at_compiler() -> list[Finding]:
    """torch.compile builds its kernels with a C++ compiler and Python's headers."""
    compiler = shutil.which(os.environ.get("CXX", "")) or shutil.which("g++") or shutil.which("clang++")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    lacks = [] if compiler else ["g++"]
    lacks += [] if header.is_file() else [f"python{sys.version_info.major}.{sys.version_info.minor}-dev"]
    if not lacks:
        return [Finding("compiler", True, str(compiler))]
    detail = f"{' and '.join(lacks)} missing, so models run uncompiled and slower"
    return [Finding("compiler", None, detail, f"apt-get install {' '.join(lacks)}")]
