"""What is known of a device, in the store: the cases that were measured on it and the cost model they fit."""

from __future__ import annotations

import re
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from biphase.bench.results import Report, cases_of
from biphase.files import Store, write_json
from biphase.presets import DEVICES
from biphase.study import measured
from biphase.training.devices import machine
from biphase.wording import counted

_MAKERS = re.compile(r"nvidia|amd|geforce|instinct|quadro|tesla|radeon|graphics|\(r\)|\(tm\)")
_BESIDE = ("triton", "accelerate", "sentence-transformers")  # what else moves the figures


def report_of(device: torch.device, command: str) -> Report:
    """An empty one, with what a reader of figures must know."""
    facts = machine(device)
    name = facts.pop("device")
    if device.type == "cpu":
        name = f"{name}, {counted(torch.get_num_threads(), 'thread')}"
    today = datetime.now().astimezone().date().isoformat()
    others = {one: found for one in _BESIDE if (found := _version(one))}
    return Report(name, short_name(device, name), today, facts | others, command)


def short_name(device: torch.device, name: str) -> str:
    """h200 of NVIDIA H200: what is typed after --device."""
    if device.type == "cpu":
        return "cpu"
    plain = _MAKERS.sub(" ", name.lower())
    joined = re.sub(r"[^a-z0-9]", "", plain)
    for known in sorted(DEVICES, key=len, reverse=True):
        if known.removesuffix("-gcd") in joined:
            return known
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-") or "gpu"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def save(report: Report, store: Store) -> Path:
    """Write `devices/NAME.json`, which `biphase plan --device NAME` reads."""
    cases = cases_of(report.compared)
    content: dict[str, Any] = {
        "device": report.device,
        "name": report.name,
        "date": report.date,
        "versions": report.versions,
        "cases": cases,
        "model": measured.fit(cases),
    }
    place = store.root / "devices" / f"{report.name}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    write_json(place, content)
    return place
