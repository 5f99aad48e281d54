"""Devices that a plan can be priced on: measured ones, of this store or shipped, and known peaks of others.

`biphase bench scale --save` leaves a device in STORE/devices/NAME.json: what it is, when it was measured, with which
versions, the measured cases, and the speeds fitted to them. Shipped ones lie in assets/devices. Of two of one name that
of the store counts; the shipped one still tells of the precisions that were not measured there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from biphase.data.listing import ASSETS
from biphase.errors import BiphaseError, SpecError, StoreError, nearest
from biphase.files import Store, read_sealed
from biphase.presets import DEVICES
from biphase.study.measured import FORM, fit, speeds_of

SHIPPED = ASSETS / "devices"
MEASURE = "biphase bench scale --save"


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
            self, model=self.model | {"precisions": precisions}, origins=other.origins | self.origins
        )


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
        return Machine(name, str(told.get("device", name)), model, origins)
    except (KeyError, TypeError, AttributeError, ValueError, BiphaseError):
        raise StoreError(f"{path} is no measured device; remove it, or measure it again: {measure}") from None


def _origin(told: dict[str, Any], shipped: bool) -> Origin:
    return Origin(str(told["date"])[:10], str(told["versions"]["torch"]).split("+")[0], shipped)
