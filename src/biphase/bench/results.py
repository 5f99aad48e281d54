"""What was measured, side by side: as a table for people, as JSON, and as the cases of a cost model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from biphase.bench.clock import Measured
from biphase.bench.kernels import Breakdown
from biphase.wording import short

OURS = "biphase"
NAMES = {
    OURS: "biphase",
    "trainer": "Trainer",
    "trainer-compiled": "Trainer compiled",
    "sentence-transformers": "sentence-transformers",
}


@dataclass(frozen=True)
class Compared:
    """One case, measured on each side; ours is first."""

    title: str
    unit: str  # tokens/s, ms/step or passages/s
    about: dict[str, Any]
    sides: dict[str, Measured]
    passages: int = 0  # of one measurement, where that is the unit
    note: str = ""  # in what the sides differ, beyond how they compute

    def value(self, side: str) -> float:
        """In the unit of the case; not a number where that side failed."""
        measured = self.sides[side]
        if measured.failed:
            return math.nan
        if self.unit == "ms/step":
            return measured.seconds * 1000
        return (self.passages if self.unit == "passages/s" else measured.tokens) / measured.seconds

    def ratio(self, side: str) -> float:
        """How many times faster ours is."""
        mine, other = self.value(OURS), self.value(side)
        return other / mine if self.unit == "ms/step" else mine / other

    @property
    def least_ratio(self) -> float | None:
        """Against the fastest peer; None where there is none."""
        every = [self.ratio(side) for side in self.sides if side != OURS]
        return min((one for one in every if math.isfinite(one)), default=None)

    def facts(self) -> dict[str, Any]:
        ratios = {side: self.ratio(side) for side in self.sides if side != OURS}
        return {
            "title": self.title,
            "unit": self.unit,
            "note": self.note,
            **self.about,
            "sides": {
                side: measured.facts() | ({} if measured.failed else {"value": self.value(side)})
                for side, measured in self.sides.items()
            },
            "ratios": {side: one for side, one in ratios.items() if math.isfinite(one)},
        }


@dataclass
class Report:
    """All that one command measured, and on what."""

    device: str
    name: str
    date: str
    versions: dict[str, str]
    command: str
    compared: list[Compared] = field(default_factory=list)
    profiles: dict[str, Breakdown] = field(default_factory=dict)
    saved: str = ""

    def facts(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "name": self.name,
            "date": self.date,
            "versions": self.versions,
            "command": self.command,
            "results": [one.facts() for one in self.compared],
            "profiles": {title: one.facts() for title, one in self.profiles.items()},
            "saved": self.saved,
        }

    @property
    def measured(self) -> bool:
        """Something of ours was."""
        return any(not one.sides[OURS].failed for one in self.compared)

    def words(self, study: str = "STUDY") -> str:
        """For people. `study`: as it is typed after a verb, with its store."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        parts = [f"{self.device} · {self.date} · {versions}\n{self.command}"]
        parts += [table(some) for some in _by_sides(self.compared)]
        parts += [f"{title}, one step\n{profile_table(one)}" for title, one in self.profiles.items()]
        if self.saved:
            parts.append(f"kept in {self.saved}\nNext: biphase plan {study} --device {self.name}")
        return "\n\n".join(parts)


def _by_sides(compared: list[Compared]) -> list[list[Compared]]:
    """Those with the same sides stand in one table."""
    tables: dict[tuple[str, ...], list[Compared]] = {}
    for one in compared:
        tables.setdefault(tuple(one.sides), []).append(one)
    return list(tables.values())


# ---------------------------------------------------------------- tables

Row = list[str]


def table(compared: list[Compared]) -> str:
    """A line for each case, then what else is known of each side."""
    sides = list(compared[0].sides)
    peers = len(sides) > 1
    head = ["", "unit", *(NAMES[side] for side in sides), *(["ratio"] if peers else [])]
    lines: list[Row] = [head]
    for one in compared:
        values = [_number(one.value(side), one.unit) for side in sides]
        ratio = one.least_ratio
        lines.append([one.title, one.unit, *values, *([f"{ratio:.2f}×" if ratio else "–"] if peers else [])])
    asides: list[tuple[str, Callable[[Measured], str]]] = [
        ("  computed", lambda one: one.path),
        ("  peak GiB", lambda one: f"{one.peak_bytes / 2**30:.1f}" if one.peak_bytes else ""),
        ("  s until step 3", lambda one: f"{one.ready_seconds:.1f}" if one.ready_seconds else ""),
        ("  recompilations", lambda one: str(one.recompilations) if one.graphs else ""),
        ("  waits for data", lambda one: "" if one.idle is None else f"{one.idle:.1%}"),
    ]
    notes = ["ratio: how many times faster than the fastest peer"] if peers else []
    made = [lines[0]]
    for one, line in zip(compared, lines[1:], strict=True):
        made.append(line)
        notes += [f"{one.title}: {one.note}"] if one.note else []
        for name, tell in asides:
            cells = ["" if side.failed else tell(side) for side in one.sides.values()]
            if any(cells):
                made.append([name, "", *cells, *([""] if peers else [])])
        notes += [
            f"{NAMES[side]}, {one.title}: {measured.failed}"
            for side, measured in one.sides.items()
            if measured.failed
        ]
    return "\n".join([aligned(made), *notes])


def profile_table(one: Breakdown) -> str:
    rows = [["", "ms", "share"]]
    rows += [[kind, f"{ms:.2f}", f"{ms / one.total:.0%}"] for kind, ms in one.by_kind.items()]
    rows.append(["together", f"{one.total:.2f}", ""])
    longest = [["longest", "ms"], *([name[:90], f"{ms:.2f}"] for name, ms in one.longest)]
    return f"{aligned(rows)}\n\n{aligned(longest)}"


def aligned(rows: list[Row]) -> str:
    """Columns under each other: words to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    texts = (
        "  ".join(
            cell.ljust(width) if column == 0 or rows[0][column] == "unit" else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(text.rstrip() for text in texts)


def _number(value: float, unit: str) -> str:
    if math.isnan(value):
        return "failed"
    return f"{value:.2f}" if unit == "ms/step" else short(value)


# ---------------------------------------------------------------- cases


def cases_of(compared: list[Compared]) -> list[dict[str, Any]]:
    """What `study.measured` fits a device by: all that did not fail."""
    cases = []
    for one in compared:
        mine = one.sides[OURS]
        if mine.failed:
            continue
        match one.about["kind"]:
            case "pretrain":
                cases.append({**one.about, "seconds": mine.seconds})
            case "finetune":
                cases.append({**one.about, "tokens": mine.tokens, "seconds": mine.seconds})
            case "score":
                cases.append({**one.about, "tokens_per_second": mine.tokens_per_second})
    return cases
