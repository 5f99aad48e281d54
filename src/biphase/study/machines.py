"""Devices that a plan can be priced on: measured ones, of this store or shipped, and known peaks of others.

`biphase bench scale --save` leaves a device in STORE/devices/NAME.json: what it is, when it was measured, with which
versions, the measured cases, and the speeds fitted to them. Shipped ones lie in assets/devices. Of two of one name that
of the store counts; the shipped one still tells of the precisions that were not measured there.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

from biphase.data.listing import ASSETS
from biphase.errors import BiphaseError, SpecError, StoreError, nearest
from biphase.files import Store, read_sealed
from biphase.presets import DEVICES, SIZES
from biphase.study.measured import FORM, fit, speeds_of

SHIPPED = ASSETS / "devices"
MEASURE = "biphase bench scale --save"
USUAL = "h200"  # GPUs that are planned for where none is here
DRIVER = Path("/proc/driver/nvidia/gpus")
ASK_SECONDS = 5.0
# Of one name and yet another card: with fewer units or less power, or a slice of one.
_VARIANTS = {"laptop", "mobile", "max", "d", "ti", "super", "mig"}
_MAKERS = re.compile(r"nvidia|amd|geforce|instinct|quadro|tesla|radeon|graphics|\(r\)|\(tm\)")


@dataclass(frozen=True)
class Origin:
    """When one precision was measured, and with what."""

    date: str
    torch: str
    shipped: bool


@dataclass(frozen=True)
class Machine:
    """A measured device."""

    name: str
    title: str  # as its maker calls it
    model: dict[str, Any]  # what `measured.fit` gives
    origins: dict[str, Origin]  # by precision
    cases: tuple[dict[str, Any], ...] = ()  # the measured steps that the model is fitted to

    def when(self, precisions: Collection[str]) -> str:
        """When these precisions were measured, and with what."""
        each = {one: f"{self.origins[one].date}, torch {self.origins[one].torch}" for one in precisions}
        if len(set(each.values())) == 1:
            return f"measured {next(iter(each.values()))}"
        return f"measured {'; '.join(f'{one} {when}' for one, when in each.items())}"

    def completed_by(self, other: Machine) -> Machine:
        """With the precisions that only the other one knows: each is fitted by itself, so they stand side by side."""
        precisions = other.model["precisions"] | self.model["precisions"]
        return replace(
            self,
            model=self.model | {"precisions": precisions},
            origins=other.origins | self.origins,
            cases=(*self.cases, *(one for one in other.cases if _precision(one) not in self.origins)),
        )

    def steps_behind(self, precisions: Collection[str]) -> str:
        """Which measured steps the speeds in these precisions are fitted to, and how well."""
        found: dict[str, dict[str, None]] = {}
        for case in self.cases:
            if _precision(case) in precisions:
                found.setdefault(_measured_step(case), {})[case["size"]] = None
        order = list(SIZES)
        steps = [
            f"{step} at {', '.join(sorted(sizes, key=lambda one: order.index(one) if one in order else len(order)))}"
            for step, sizes in found.items()
        ]
        worst = max((max(self.model["precisions"][one]["worst"].values()) for one in precisions), default=0.0)
        return f"measured steps behind these hours: {'; '.join(steps)}; fitted within {worst:.0%}"

    def not_measured(self, sizes: Collection[str]) -> list[str]:
        """Those of these sizes of which no pretraining step was measured."""
        measured = {case["size"] for case in self.cases if case["kind"] == "pretrain"}
        return [one for one in sizes if one not in measured]


def _precision(case: dict[str, Any]) -> str:
    return case.get("precision", "bf16")


def _measured_step(case: dict[str, Any]) -> str:
    if case["kind"] != "pretrain":
        return {"finetune": "fine-tuning", "score": "scoring"}[case["kind"]]
    objective = "CLM" if case["objective"] == "clm" else f"MLM {100 * case['ratio']:g}%"
    return f"{objective} in {case['packing']} of {case['length']:,}"


def at_hand() -> str:
    """The device that this machine computes on, as --device names it: its first NVIDIA GPU, or the processor."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "cpu"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        for about in sorted(DRIVER.glob("*/information")):
            model = re.search(r"(?m)^Model:\s*(.+)$", about.read_text(encoding="utf-8", errors="replace"))
            if model:
                return short_name(model[1])
        if not DRIVER.exists() and shutil.which("nvidia-smi"):  # as in containers that hide the driver
            command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS)
            if done.returncode == 0 and done.stdout.strip():
                return short_name(done.stdout.splitlines()[0])
    return "cpu"


def short_name(title: str) -> str:
    """h200 of NVIDIA H200: what is typed after --device."""
    words = re.findall(r"[a-z0-9]+", _MAKERS.sub(" ", title.lower()))
    if not _VARIANTS & set(words):
        whole = {*words, *(one + other for one, other in pairwise(words))}  # "RTX 4090" is rtx4090
        for known in DEVICES:
            if known.removesuffix("-gcd") in whole:
                return known
    return "-".join(words) or "gpu"


def is_known(name: str, store: Store, shipped: Path = SHIPPED) -> bool:
    """Was it measured, or is its peak known?"""
    return name in DEVICES or name in _names(store.root / "devices") or name in _names(shipped)


def machine_named(
    name: str, store: Store, shipped: Path = SHIPPED, *, measure: str = MEASURE
) -> Machine | None:
    """The measured device of this name; None where only its peak is known. Any other name is refused.

    `measure`: what to type to measure one into this store.
    """
    folders = [folder for folder in (store.root / "devices", shipped) if name in _names(folder)]
    found = [_read(one / f"{name}.json", name, shipped=one == shipped, measure=measure) for one in folders]
    if found:
        return reduce(Machine.completed_by, found)
    if name in DEVICES:
        return None
    known = sorted({*DEVICES, *_names(store.root / "devices"), *_names(shipped)})
    raise SpecError(f"there is no device {name!r}; {nearest(name, known)}")


def _names(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.json")}


def _read(path: Path, name: str, *, shipped: bool, measure: str) -> Machine:
    try:
        told = read_sealed(path)
        model = told.get("model")
        if not isinstance(model, dict) or model.get("form") != FORM:  # fitted by another version
            model = fit(told["cases"])
        for precision in model["precisions"]:
            speeds_of(model, precision)
        earlier = told.get("earlier", {})
        origins = {one: _origin(earlier.get(one, told), shipped) for one in model["precisions"]}
        return Machine(name, str(told.get("device", name)), model, origins, tuple(told["cases"]))
    except (KeyError, TypeError, AttributeError, ValueError, BiphaseError):
        raise StoreError(f"{path} is no measured device; remove it, or measure it again: {measure}") from None


def _origin(told: dict[str, Any], shipped: bool) -> Origin:
    return Origin(str(told["date"])[:10], str(told["versions"]["torch"]).split("+")[0], shipped)
