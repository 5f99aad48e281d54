"""What several records check of their values."""

from __future__ import annotations

from typing import Any

from biphase.errors import SpecError


def positive(made: Any, name: str) -> None:
    if getattr(made, name) < 1:
        raise SpecError(f"{type(made).__name__}.{name} must be at least 1, it is {getattr(made, name)}")


def ratio_between_0_and_1(where: str, value: float) -> None:
    if not 0 < value < 1:
        hint = f"; did you mean {value / 100:g}?" if 1 <= value < 100 else ""
        raise SpecError(f"{where}: a masking ratio lies between 0 and 1, not {value:g}{hint}")
