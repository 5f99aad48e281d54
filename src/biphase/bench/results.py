"""Run `biphase bench`, compare the sides, and keep a device's measurements in the store.

`run` measures biphase first, then each peer, one after another on an otherwise idle device. `Report` shows the results
as tables and JSON. `save` writes `devices/NAME.json`, the cases of `bench scale` and the cost model fitted to them,
which `biphase plan --device NAME` reads.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from biphase.bench import measure as measure_module
from biphase.bench import peers
from biphase.bench.cases import LIKE, BenchRequest, FinetuneCase, Maker, PretrainCase, ScoreCase
from biphase.bench.measure import Breakdown, Dataset, Timing
from biphase.errors import BiphaseError, TrainingError
from biphase.fast.trunk import fp8_refusal
from biphase.store import Store, read_checked, with_checksum, write_json
from biphase.study import devices
from biphase.text import counted, short
from biphase.training import distributed
from biphase.training.distributed import machine

_BESIDE = ("triton", "accelerate", "sentence-transformers")  # other packages that affect the results


def report_of(device: torch.device, command: str) -> Report:
    """An empty report with the device, date and versions."""
    facts = machine(device)
    name = facts.pop("device")
    if device.type == "cpu":
        name = f"{name}, {counted(torch.get_num_threads(), 'thread')}"
    today = datetime.now().astimezone().date().isoformat()
    others = {one: found for one in _BESIDE if (found := _version(one))}
    return Report(name, short_name(device, name), today, facts | others, command)


def short_name(device: torch.device, name: str) -> str:
    """The name to type after --device: "h200" for "NVIDIA H200"."""
    return "cpu" if device.type == "cpu" else devices.short_name(name)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def save(report: Report, store: Store) -> Path:
    """Write `devices/NAME.json`, which `biphase plan --device NAME` reads.

    Earlier measurements in other precisions are kept, each with its date and versions.
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
        "model": devices.fit(cases),
    }
    place.parent.mkdir(parents=True, exist_ok=True)
    write_json(place, with_checksum(content))
    return place


def _earlier(place: Path, device: str, again: set[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Saved cases of other precisions than those measured now, and when each was measured.

    Empty if the file is of another device with this name, or damaged; then it is overwritten.
    """
    if not place.exists():
        return [], {}
    try:
        told = read_checked(place)
        devices.fit(told["cases"])
        kept = [case for case in told["cases"] if case.get("precision", "bf16") not in again]
        last = {"date": told["date"], "versions": told["versions"]}
        since = {case.get("precision", "bf16"): last for case in kept} | told.get("earlier", {})
        same = told["device"] == device
    except (KeyError, TypeError, AttributeError, ValueError, BiphaseError):
        return [], {}
    return (kept, {name: when for name, when in since.items() if name not in again}) if same else ([], {})


# ---------------------------------------------------------------- results


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
    sides: dict[str, Timing]
    passages: int = 0  # of one measurement, if the unit is passages/s
    note: str = ""  # differences between the sides other than their code

    def value(self, side: str) -> float:
        """The result in the unit of the case; NaN if that side failed."""
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
        """The ratio to the fastest peer; None if there is none."""
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
    """All measurements of one command, with the device and versions."""

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
        """Whether any of our measurements succeeded."""
        return any(not one.sides[OURS].failed for one in self.compared)

    def words(self, study: str = "STUDY") -> str:
        """The report as text. `study`: how the study is typed after a verb, with its store."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        parts = [f"{self.device} · {self.date} · {versions}\n{self.command}"]
        parts += [table(some) for some in _by_sides(self.compared)]
        parts += [f"{title}, one step\n{profile_table(one)}" for title, one in self.profiles.items()]
        if self.saved:
            parts.append(f"kept in {self.saved}\nNext: biphase plan {study} --device {self.name}")
        return "\n\n".join(parts)


def _by_sides(compared: list[Compared]) -> list[list[Compared]]:
    """Group cases that have the same sides, for one table each."""
    tables: dict[tuple[str, ...], list[Compared]] = {}
    for one in compared:
        tables.setdefault(tuple(one.sides), []).append(one)
    return list(tables.values())


# ---------------------------------------------------------------- tables

Row = list[str]


def table(compared: list[Compared]) -> str:
    """A line for each case, followed by more facts of each side."""
    sides = list(compared[0].sides)
    peers = len(sides) > 1
    head = ["", "unit", *(NAMES[side] for side in sides), *(["ratio"] if peers else [])]
    lines: list[Row] = [head]
    for one in compared:
        values = [_number(one.value(side), one.unit) for side in sides]
        ratio = one.least_ratio
        lines.append([one.title, one.unit, *values, *([f"{ratio:.2f}×" if ratio else "–"] if peers else [])])
    asides: list[tuple[str, Callable[[Timing], str]]] = [
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
    """The breakdown of a step as text: time by kind, then the longest kernels."""
    rows = [["", "ms", "share"]]
    rows += [[kind, f"{ms:.2f}", f"{ms / one.total:.0%}"] for kind, ms in one.by_kind.items()]
    rows.append(["together", f"{one.total:.2f}", ""])
    longest = [["longest", "ms"], *([name[:90], f"{ms:.2f}"] for name, ms in one.longest)]
    return f"{aligned(rows)}\n\n{aligned(longest)}"


def aligned(rows: list[Row]) -> str:
    """Align columns: text to the left, numbers to the right."""
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
    """The cases that `study.devices` fits a device's cost model to: all that did not fail."""
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


# ---------------------------------------------------------------- run


SENTENCES = "sentence-transformers"
WHOLE_ROWS = "the Trainer's attention spans whole rows, which is more work; --packing rows makes it equal"
FEWER_ROWS, SMALLER = "type fewer --rows, or a smaller --size", "type a smaller --size"
LEFT_OUT = "this case is left out"
MANY_ROWS = 1_152  # rows of 2,048 in the paper's step, from which the micro-batch is derived


class Measuring:
    """One command: the device, the request, and the growing report."""

    def __init__(
        self, asked: BenchRequest, device: torch.device, command: str, tell: Callable[[str], None]
    ) -> None:
        self.asked, self.device, self.tell = asked, device, tell
        length = Maker(asked, device.type, 1).length
        self.make = Maker(asked, device.type, distributed.micro_rows(device, MANY_ROWS, length))
        self.peers = asked.peers(self.make.place)
        self.report = report_of(device, command)
        self._refuse_missing()
        if poor := distributed.poor_precision(device, self.make.precision, "--precision"):
            tell(f"note: {poor}")

    def _refuse_missing(self) -> None:
        """Refuse before the first measurement if a package or precision is not available."""
        if self.make.precision == "fp8" and (why := fp8_refusal(self.device)):
            raise TrainingError(f"--precision fp8 cannot be had ({why}); type --precision bf16")
        subjects = self.asked.subjects()
        if self.peers and set(subjects) & {"pretrain", "finetune", "retrieval"}:
            peers.refuse_missing("accelerate", "transformers' Trainer")
        if self.peers and "retrieval" in subjects:
            for package in ("sentence_transformers", "datasets"):
                peers.refuse_missing(package, "sentence-transformers")

    def all(self) -> Report:
        steps = {
            "pretrain": self.pretrain,
            "finetune": self.finetune,
            "retrieval": self.retrieval,
            "scale": self.scale,
        }
        for subject in self.asked.subjects():
            steps[subject]()
        return self.report

    # ------------------------------------------------------------ subjects

    def pretrain(self) -> None:
        case, rows = self.make.pretrain(), self.make.peer_rows()
        sides = {OURS: self._pretrained(case)}
        for peer in self.peers:
            sides[peer] = self._theirs(
                peer, case.title, lambda peer=peer: peers.pretrain(case, self.device, peer=peer, rows=rows)
            )
        note = WHOLE_ROWS if self.peers and case.packing != "rows" else ""
        about = case.about() | {
            "micro_batches": case.micro_batches,
            "deterministic": case.deterministic,
            "peer_rows": rows,
        }
        self._note(Compared(case.title, "tokens/s", about, sides, note=note))

    def finetune(self) -> None:
        for lengths in LIKE:
            case = self.make.finetune(lengths)
            sides = {OURS: self._tuned(case)}
            for peer in self.peers:
                sides[peer] = self._theirs(
                    peer, case.title, lambda peer=peer, case=case: self._peer(case, peer)
                )
            tokens = Dataset(case).tokens
            self._note(Compared(case.title, "ms/step", case.about() | {"tokens": tokens}, sides))

    def _peer(self, case: FinetuneCase, peer: str) -> Timing:
        return peers.finetune(
            case, self.device, peer=peer, rate=measure_module.TUNING_RATE, length=measure_module.CONTEXT
        )

    def retrieval(self) -> None:
        case, device = self.make.retrieval(), self.device
        texts = peers.RetrievalTexts(case)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            peers.write_folder(texts, folder)
            for what, unit, mine, other in (
                ("training", "ms/step", peers.train_ours, peers.train_sentences),
                ("reading", "passages/s", peers.read_ours, peers.read_sentences),
            ):
                title = f"{case.title}, training" if what == "training" else f"{case.size} reading passages"
                sides = {OURS: self._ours(title, SMALLER, lambda mine=mine: mine(texts, folder, device))}
                tokens = sides[OURS].tokens
                if self.peers:
                    sides[SENTENCES] = self._theirs(
                        SENTENCES,
                        title,
                        lambda other=other, tokens=tokens: other(texts, folder, device, tokens=tokens),
                    )
                about = case.about() | {"what": what}
                self._note(Compared(title, unit, about, sides, passages=case.passages))

    def scale(self) -> None:
        """Measure our side only. A case that does not fit in memory is left out of the device's cases."""
        cases = self.make.scale()
        works: list[tuple[Any, str, Callable[[], Timing]]] = [
            *(
                (one, "tokens/s", lambda one=one: self._pretrained(one, LEFT_OUT, idle=False))
                for one in cases.pretrain
            ),
            *((one, "ms/step", lambda one=one: self._tuned(one, LEFT_OUT)) for one in cases.finetune),
            *((one, "tokens/s", lambda one=one: self._scored(one)) for one in cases.score),
        ]
        for case, unit, measure in works:
            self._note(Compared(case.title, unit, case.about(), {OURS: measure()}))

    # ------------------------------------------------------------ sides

    def _pretrained(self, case: PretrainCase, advice: str = FEWER_ROWS, *, idle: bool = True) -> Timing:
        keep = self._keeper(case.title)
        return self._ours(
            case.title,
            advice,
            lambda: measure_module.measure_pretraining(case, self.device, idle=idle, profile=keep),
        )

    def _tuned(self, case: FinetuneCase, advice: str = SMALLER) -> Timing:
        keep = self._keeper(case.title)
        return self._ours(
            case.title, advice, lambda: measure_module.measure_finetuning(case, self.device, profile=keep)
        )

    def _scored(self, case: ScoreCase) -> Timing:
        return self._ours(case.title, LEFT_OUT, lambda: measure_module.score(case, self.device))

    def _keeper(self, title: str) -> Callable[[Breakdown], None] | None:
        if not self.asked.profile:
            return None
        return lambda found: self.report.profiles.update({title: found})

    def _ours(self, title: str, advice: str, measure: Callable[[], Timing]) -> Timing:
        self.tell(f"{title}: biphase …")
        return measure_module.ours(self.device, LEFT_OUT if self.asked.save else advice, measure)

    def _theirs(self, peer: str, title: str, measure: Callable[[], Timing]) -> Timing:
        self.tell(f"{title}: {peer} …")
        return measure_module.theirs(self.device, measure)

    def _note(self, compared: Compared) -> None:
        self.report.compared.append(compared)


def run(
    asked: BenchRequest, store: Store, *, device: torch.device, command: str, tell: Callable[[str], None]
) -> Report:
    """Measure everything requested; save it if requested and if any case succeeded."""
    report = Measuring(asked, device, command, tell).all()
    if asked.save and cases_of(report.compared):
        report.saved = str(save(report, store))
    elif asked.save:
        tell("nothing was saved: no case fits into the memory of this device")
    return report
