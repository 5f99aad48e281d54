"""Devices that a plan can be priced on: measured ones, of this store or shipped, and known peaks of others.

`biphase bench scale --save` leaves a device in STORE/devices/NAME.json: what it is, when it was measured, with which
versions, the measured cases, and the speeds fitted to them. Shipped ones lie in assets/devices. Of two of one name that
of the store counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from biphase.data.listing import ASSETS
from biphase.errors import BiphaseError, SpecError, StoreError, nearest
from biphase.files import Store, read_json
from biphase.presets import DEVICES
from biphase.study.measured import FORM, fit, speeds_of

SHIPPED = ASSETS / "devices"
MEASURE = "biphase bench scale --save"


@dataclass(frozen=True)
class Machine:
    """A measured device."""

    name: str
    title: str  # as its maker calls it
    date: str
    torch: str
    shipped: bool
    model: dict[str, Any]  # what `measured.fit` gives

    @property
    def when(self) -> str:
        """When it was measured, and with what."""
        return f"measured {self.date}, torch {self.torch}"


def machine_named(name: str, store: Store, shipped: Path = SHIPPED) -> Machine | None:
    """The measured device of this name; None where only its peak is known. Any other name is refused."""
    for folder in (store.root / "devices", shipped):
        if name in _names(folder):
            return _read(folder / f"{name}.json", name, shipped=folder == shipped)
    if name in DEVICES:
        return None
    known = sorted({*DEVICES, *_names(store.root / "devices"), *_names(shipped)})
    raise SpecError(f"there is no device {name!r}; {nearest(name, known)}")


def _names(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.json")}


def _read(path: Path, name: str, *, shipped: bool) -> Machine:
    try:
        told = read_json(path)
        model = told.get("model")
        if not isinstance(model, dict) or model.get("form") != FORM:  # fitted by another version
            model = fit(told["cases"])
        for precision in model["precisions"]:
            speeds_of(model, precision)
        date, torch = str(told["date"])[:10], str(told["versions"]["torch"]).split("+")[0]
        return Machine(name, str(told.get("device", name)), date, torch, shipped, model)
    except (KeyError, TypeError, AttributeError, ValueError, BiphaseError):
        raise StoreError(f"{path} is no measured device; remove it, or measure it again: {MEASURE}") from None
