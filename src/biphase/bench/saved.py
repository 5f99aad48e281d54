"""What is known of a device, in the store: the cases that were measured on it and the cost model they fit."""

from __future__ import annotations

from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from biphase.bench.results import Report, cases_of
from biphase.errors import BiphaseError
from biphase.files import Store, read_sealed, sealed, write_json
from biphase.study import machines, measured
from biphase.training.devices import machine
from biphase.wording import counted

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
    return "cpu" if device.type == "cpu" else machines.short_name(name)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def save(report: Report, store: Store) -> Path:
    """Write `devices/NAME.json`, which `biphase plan --device NAME` reads.

    What was measured earlier in other precisions stays, each with its date and versions.
    """
    place = store.root / "devices" / f"{report.name}.json"
    fresh = cases_of(report.compared)
    earlier, since = _earlier(place, report.device, {case["precision"] for case in fresh})
    cases = [*earlier, *fresh]
    content: dict[str, Any] = {
        "device": report.device,
        "name": report.name,
        "date": report.date,
        "versions": report.versions,
        "earlier": since,
        "cases": cases,
        "model": measured.fit(cases),
    }
    place.parent.mkdir(parents=True, exist_ok=True)
    write_json(place, sealed(content))
    return place


def _earlier(place: Path, device: str, again: set[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Cases of other precisions than those measured again, and when each was measured.

    None where the file is of another device by this name, or damaged: then this measurement mends it.
    """
    if not place.exists():
        return [], {}
    try:
        told = read_sealed(place)
        measured.fit(told["cases"])
        kept = [case for case in told["cases"] if case.get("precision", "bf16") not in again]
        last = {"date": told["date"], "versions": told["versions"]}
        since = {case.get("precision", "bf16"): last for case in kept} | told.get("earlier", {})
        same = told["device"] == device
    except (KeyError, TypeError, AttributeError, ValueError, BiphaseError):
        return [], {}
    return (kept, {name: when for name, when in since.items() if name not in again}) if same else ([], {})
