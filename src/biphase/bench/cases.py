"""`biphase bench` as records, without torch: the request, the cases by kind of device, results, tables, saved devices.

`Report` shows results as tables and JSON. `save` writes `devices/NAME.json`, the cases of `bench scale` and the cost
model fitted to them, which `biphase plan --device NAME` reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from biphase.errors import BiphaseError, SpecError, nearest
from biphase.presets import SIZES
from biphase.store import Store, read_checked, with_checksum, write_json
from biphase.study import devices
from biphase.text import short

WORKLOADS = ("pretrain", "finetune", "retrieval", "scale")
USUAL_RATIO = 0.4
PEERS = ("trainer", "trainer-compiled")
NO_PEER = "none"

# The workloads an option applies to; elsewhere it is refused, since ignoring it would measure something else.
COUNTS_FOR = {
    **dict.fromkeys(("objective", "ratio", "packing", "micro_batches"), ("pretrain", "all")),
    **dict.fromkeys(("vocab", "length", "deterministic"), ("pretrain",)),
    "rows": ("pretrain", "scale", "all"),
    "profile": ("pretrain", "finetune", "scale", "all"),
}

PEER_ROWS = 12  # rows whose logits fit in memory for the Trainer at a vocabulary of 128,256


@dataclass(frozen=True)
class DeviceDefaults:
    """Default sizes that a kind of device measures in about a minute."""

    size: str
    vocab: int
    length: int
    rows: int  # of a micro-batch; 0: chosen by training
    batch: int  # examples of a fine-tuning step
    steps: int
    warm: int  # steps before the measured ones; includes one synchronization with the device
    precision: str
    peers: tuple[str, ...]
    passages: int
    scale: tuple[str, ...]  # sizes, the usual one first


DEFAULTS = {
    "cuda": DeviceDefaults(
        "210m", 128_256, 2_048, 0, 32, 20, 5, "bf16", PEERS, 16_384, ("210m", "610m", "30m", "8m")
    ),
    "cpu": DeviceDefaults("8m", 2_048, 128, 8, 8, 3, 3, "fp32", ("trainer",), 32, ("2m", "8m", "1m")),
}


@dataclass(frozen=True)
class BenchRequest:
    """The command's options. Empty, 0 and None: not given, so the default of the device."""

    workload: str = "pretrain"  # one of WORKLOADS, or all
    size: str = ""
    objective: str | None = None
    ratio: float | None = None
    packing: str | None = None
    rows: int = 0
    micro_batches: int = 0
    vocab: int | None = None
    length: int | None = None
    deterministic: bool = False
    steps: int = 0
    against: tuple[str, ...] = ()
    precision: str | None = None
    profile: bool = False
    save: bool = False

    def __post_init__(self) -> None:
        if self.size:
            SIZES[self.size]  # refuses an unknown name
        workload = self.workload
        unknown = sorted(set(self.against) - {*PEERS, NO_PEER})
        refusals = {
            f"--against {', '.join(unknown)} is not known; known: {', '.join(PEERS)}, none": unknown,
            "--against none stands alone; leave it out, or leave out the others": (
                NO_PEER in self.against and len(self.against) > 1
            ),
            "--deterministic measures biphase alone; leave out --against": (
                self.deterministic and set(self.against) - {NO_PEER}
            ),
            f"--save keeps the cases of scale, not of {workload}; type bench scale --save": (
                self.save and workload not in ("scale", "all")
            ),
            "--save needs every size of scale; leave out --size": self.save and self.size,
            "--precision fp8 is for pretraining; type bench pretrain --precision fp8": (
                self.precision == "fp8" and workload not in ("pretrain", "scale")
            ),
        }
        for name, workloads in COUNTS_FOR.items():
            value, option = getattr(self, name), f"--{name.replace('_', '-')}"
            typed = option if value is True else f"{option} {value}"
            message = (
                f"{option} means nothing to bench {workload}; leave it out, or type bench pretrain {typed}"
            )
            refusals[message] = value and workload not in workloads
        for message, wrong in refusals.items():
            if wrong:
                raise SpecError(message)

    def workloads(self) -> tuple[str, ...]:
        return WORKLOADS if self.workload == "all" else (self.workload,)

    def peers(self, defaults: DeviceDefaults) -> tuple[str, ...]:
        if NO_PEER in self.against or self.deterministic:
            return ()
        return tuple(dict.fromkeys(self.against)) or defaults.peers


# ---------------------------------------------------------------- cases


@dataclass(frozen=True, kw_only=True)
class BenchCase:
    """What all cases have. `FACTS` are the fields that identify a case in JSON and in a saved device."""

    kind: ClassVar[str]
    unit: ClassVar[str]
    FACTS: ClassVar[tuple[str, ...]]

    size: str
    vocab: int
    precision: str
    steps: int = 0  # measured ones
    warm: int = 0  # steps before those

    def facts(self) -> dict[str, Any]:
        return {"kind": self.kind, **{name: getattr(self, name) for name in self.FACTS}}


@dataclass(frozen=True, kw_only=True)
class PretrainCase(BenchCase):
    """Pretraining steps of one or more micro-batches, on random tokens."""

    kind = "pretrain"
    unit = "tokens/s"
    FACTS = ("size", "vocab", "objective", "ratio", "packing", "length", "rows", "precision")

    objective: str
    ratio: float
    packing: str
    length: int
    rows: int
    micro_batches: int = 1  # of an optimizer step
    deterministic: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of an optimizer step."""
        return self.rows * self.micro_batches * self.length

    @property
    def title(self) -> str:
        objective = f"MLM {self.ratio:.0%}" if self.objective == "mlm" else "CLM"
        several = f", {self.micro_batches} micro-batches a step" if self.micro_batches > 1 else ""
        same = ", deterministic" if self.deterministic else ""
        return f"{self.size} {objective}, {self.packing} of {self.length:,}{several}{same}"


@dataclass(frozen=True)
class Lengths:
    """The distribution of a dataset's text lengths in tokens: a gamma distribution, cut off."""

    name: str
    mean: float
    most: int
    shape: float  # of the gamma distribution; larger: more equal lengths
    labels: int  # of a text; 0: a span in the text is predicted


# Mean, spread and maximum of these datasets with common tokenizers.
LIKE = (
    Lengths("SST-2-like", 13, 64, 2.0, 2),
    Lengths("MNLI-like", 40, 256, 5.0, 3),
    Lengths("SQuAD-like", 180, 512, 7.5, 0),
)
QUERIES, PASSAGES = Lengths("queries", 16, 64, 6.0, 0), Lengths("passages", 120, 512, 6.0, 0)


@dataclass(frozen=True, kw_only=True)
class FinetuneCase(BenchCase):
    """Fine-tuning steps of one batch of texts."""

    kind = "finetune"
    unit = "ms/step"
    FACTS = ("like", "size", "vocab", "batch", "precision")

    lengths: Lengths
    batch: int

    @property
    def like(self) -> str:
        return self.lengths.name

    @property
    def title(self) -> str:
        return f"{self.size} {self.like}, {self.lengths.mean:g} tokens a text"


@dataclass(frozen=True, kw_only=True)
class RetrievalCase(BenchCase):
    """Training steps of one batch of pairs; then inference on passages."""

    kind = "retrieval"
    unit = "ms/step"
    FACTS = ("size", "vocab", "batch", "precision")

    batch: int
    passages: int

    @property
    def title(self) -> str:
        return f"{self.size} {self.batch} pairs"


@dataclass(frozen=True, kw_only=True)
class ScoreCase(BenchCase):
    """Inference on texts."""

    kind = "score"
    unit = "tokens/s"
    FACTS = ("size", "vocab", "precision")

    passages: int

    @property
    def title(self) -> str:
        return f"{self.size} reading texts of {PASSAGES.mean:g} tokens"


class CaseMaker:
    """Makes the cases for a request on a kind of device; `rows`: those that training would choose there."""

    def __init__(self, request: BenchRequest, kind: str, rows: int) -> None:
        self.request, self.defaults = request, DEFAULTS.get(kind, DEFAULTS["cpu"])
        self.rows = request.rows or self.defaults.rows or rows
        self.length = request.length or self.defaults.length
        self.size = request.size or self.defaults.size
        self.steps = request.steps or self.defaults.steps
        self.precision = request.precision or self.defaults.precision

    def _common(self, size: str = "") -> dict[str, Any]:
        return {
            "size": size or self.size,
            "vocab": self.defaults.vocab,
            "precision": self.precision,
            "steps": self.steps,
            "warm": self.defaults.warm,
        }

    def pretrain(self, size: str = "", **other: Any) -> PretrainCase:
        request = self.request
        values: dict[str, Any] = self._common(size) | {
            "vocab": request.vocab or self.defaults.vocab,
            "length": self.length,
            "objective": request.objective or "mlm",
            "ratio": request.ratio or USUAL_RATIO,
            "packing": request.packing or "chunks",
            "rows": self.rows,
            "micro_batches": request.micro_batches or 1,
            "deterministic": request.deterministic,
        }
        return PretrainCase(**(values | other))

    def peer_rows(self) -> int:
        """Rows of the Trainer's batch: as given, else at most `PEER_ROWS`."""
        return self.request.rows or min(self.rows, PEER_ROWS)

    def finetune(self, lengths: Lengths, size: str = "") -> FinetuneCase:
        return FinetuneCase(**self._common(size), lengths=lengths, batch=self.defaults.batch)

    def retrieval(self) -> RetrievalCase:
        defaults = self.defaults
        return RetrievalCase(**self._common(), batch=defaults.batch, passages=defaults.passages)

    def score(self, size: str) -> ScoreCase:
        return ScoreCase(**self._common(size), passages=self.defaults.passages)

    def scale(self) -> list[PretrainCase | FinetuneCase | ScoreCase]:
        """The cases that characterize a device; together they cover each part of the cost of a step.

        With --size, only those of that size; with fp8, pretraining only.
        """
        sizes = self.defaults.scale
        usual, larger, *smaller = sizes
        plain = {"objective": "mlm", "ratio": USUAL_RATIO, "packing": "chunks", "micro_batches": 1}
        tuned = () if self.precision == "fp8" else (usual, smaller[0])
        cases: list[PretrainCase | FinetuneCase | ScoreCase] = [
            self.pretrain(usual, **plain),
            self.pretrain(usual, **(plain | {"objective": "clm"})),
            self.pretrain(usual, **(plain | {"packing": "rows"})),
            *(self.pretrain(size, **plain) for size in (larger, *smaller)),
            *(self.finetune(lengths, size) for size in tuned for lengths in LIKE),
            *(self.score(size) for size in tuned),
        ]
        if self.request.size and self.request.size not in sizes:
            raise SpecError(
                f"bench scale has no size {self.request.size!r}; {nearest(self.request.size, sizes)}"
            )
        return [case for case in cases if self.request.size in ("", case.size)]


# ---------------------------------------------------------------- results


@dataclass(frozen=True)
class Timing:
    """One side's measurement of a case."""

    seconds: float  # of a step: the median
    mean_seconds: float
    tokens: float  # of a step, without padding
    peak_bytes: int | None = None  # None: not a GPU
    ready_seconds: float | None = None  # until the third step is done, with compilation
    graphs: int = 0  # compiled graphs
    recompilations: int = 0  # graphs compiled after the third step
    path: str = ""  # how it was computed
    idle: float | None = None  # share of the time that the device waits for data
    failed: str = ""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def facts(self) -> dict[str, Any]:
        if self.failed:
            return {"failed": self.failed}
        facts = asdict(self) | {"tokens_per_second": self.tokens_per_second}
        del facts["failed"]
        # Our side counts the tokens of a step; if it failed, they are NaN for the peers, too.
        return {name: value for name, value in facts.items() if value == value}  # drop NaN


def failure(why: str) -> Timing:
    """A timing that records only why the measurement failed."""
    return Timing(math.nan, math.nan, math.nan, failed=why)


OURS = "biphase"
SENTENCES = "sentence-transformers"
NAMES = {OURS: OURS, "trainer": "Trainer", "trainer-compiled": "Trainer compiled", SENTENCES: SENTENCES}


@dataclass(frozen=True)
class Compared:
    """One case, measured on each side; ours is first."""

    title: str
    unit: str  # tokens/s, ms/step or passages/s
    case: dict[str, Any]  # the facts of the case
    sides: dict[str, Timing]
    passages: int = 0  # of one measurement, if the unit is passages/s
    note: str = ""  # differences between the sides other than their code

    def value(self, side: str) -> float:
        """The result in the unit of the case; NaN if that side failed."""
        timing = self.sides[side]
        if timing.failed:
            return math.nan
        if self.unit == "ms/step":
            return timing.seconds * 1000
        return (self.passages if self.unit == "passages/s" else timing.tokens) / timing.seconds

    @property
    def ratios(self) -> dict[str, float]:
        """How many times faster ours is than each peer that did not fail."""
        ours = self.value(OURS)
        others = {side: self.value(side) for side in self.sides if side != OURS}
        slower = self.unit == "ms/step"
        ratios = {side: other / ours if slower else ours / other for side, other in others.items()}
        return {side: ratio for side, ratio in ratios.items() if math.isfinite(ratio)}

    def facts(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "unit": self.unit,
            "note": self.note,
            **self.case,
            "sides": {
                side: timing.facts() | ({} if timing.failed else {"value": self.value(side)})
                for side, timing in self.sides.items()
            },
            "ratios": self.ratios,
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
    profiles: dict[str, dict[str, float]] = field(default_factory=dict)  # ms of one step by kind, by title
    saved: str = ""

    def facts(self) -> dict[str, Any]:
        facts = {name: value for name, value in vars(self).items() if name not in ("compared", "saved")}
        return facts | {
            "results": [case.facts() for case in self.compared],
            "profiles": {
                title: {"ms": profile, "total_ms": sum(profile.values())}
                for title, profile in self.profiles.items()
            },
            "saved": self.saved,
        }

    @property
    def measured(self) -> bool:
        """Whether any of our measurements succeeded."""
        return any(not case.sides[OURS].failed for case in self.compared)

    def describe(self, study: str = "STUDY") -> str:
        """The report as text. `study`: how the study is typed after a verb, with its store."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        parts = [f"{self.device} · {self.date} · {versions}\n{self.command}"]
        tables: dict[tuple[str, ...], list[Compared]] = {}
        for case in self.compared:  # cases with the same sides share a table
            tables.setdefault(tuple(case.sides), []).append(case)
        parts += [table(cases) for cases in tables.values()]
        parts += [f"{title}, one step\n{profile_table(profile)}" for title, profile in self.profiles.items()]
        if self.saved:
            parts.append(f"kept in {self.saved}\nNext: biphase plan {study} --device {self.name}")
        return "\n\n".join(parts)


# Rows below a case: more facts of each side.
DETAILS: tuple[tuple[str, Callable[[Timing], str]], ...] = (
    ("  computed", lambda timing: timing.path),
    ("  peak GiB", lambda timing: f"{timing.peak_bytes / 2**30:.1f}" if timing.peak_bytes else ""),
    ("  s until step 3", lambda timing: f"{timing.ready_seconds:.1f}" if timing.ready_seconds else ""),
    ("  recompilations", lambda timing: str(timing.recompilations) if timing.graphs else ""),
    ("  waits for data", lambda timing: "" if timing.idle is None else f"{timing.idle:.1%}"),
)


def table(compared: list[Compared]) -> str:
    """A line for each case, followed by more facts of each side."""
    sides = list(compared[0].sides)
    peers = len(sides) > 1
    rows = [["", "unit", *(NAMES[side] for side in sides), *(["ratio"] if peers else [])]]
    notes = ["ratio: how many times faster than the fastest peer"] if peers else []
    for case in compared:
        values = [_number(case.value(side), case.unit) for side in sides]
        ratio = min(case.ratios.values(), default=None)
        rows.append([case.title, case.unit, *values, *([f"{ratio:.2f}×" if ratio else "–"] if peers else [])])
        notes += [f"{case.title}: {case.note}"] if case.note else []
        for name, detail in DETAILS:
            cells = ["" if timing.failed else detail(timing) for timing in case.sides.values()]
            if any(cells):
                rows.append([name, "", *cells, *([""] if peers else [])])
        notes += [
            f"{NAMES[side]}, {case.title}: {timing.failed}"
            for side, timing in case.sides.items()
            if timing.failed
        ]
    return "\n".join([aligned(rows), *notes])


def profile_table(profile: dict[str, float]) -> str:
    total = sum(profile.values())
    rows = [["", "ms", "share"]]
    rows += [[kind, f"{ms:.2f}", f"{ms / total:.0%}"] for kind, ms in profile.items()]
    return aligned([*rows, ["together", f"{total:.2f}", ""]])


def aligned(rows: list[list[str]]) -> str:
    """Align columns: text to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if column == 0 or rows[0][column] == "unit" else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _number(value: float, unit: str) -> str:
    if math.isnan(value):
        return "failed"
    return f"{value:.2f}" if unit == "ms/step" else short(value)


# ---------------------------------------------------------------- saved devices


def saved_cases(compared: list[Compared]) -> list[dict[str, Any]]:
    """The cases that `study.devices` fits a device's cost model to: all that did not fail."""
    measured = {
        "pretrain": ("seconds",),
        "finetune": ("tokens", "seconds"),
        "score": ("tokens_per_second",),
    }
    return [
        {**result.case, **{name: getattr(result.sides[OURS], name) for name in measured[result.case["kind"]]}}
        for result in compared
        if result.case["kind"] in measured and not result.sides[OURS].failed
    ]


def save(report: Report, store: Store) -> Path:
    """Write `devices/NAME.json`, which `biphase plan --device NAME` reads.

    Earlier measurements in other precisions are kept, each with its date and versions.
    """
    path = store.root / "devices" / f"{report.name}.json"
    fresh = saved_cases(report.compared)
    earlier, since = _earlier(path, report.device, {case["precision"] for case in fresh})
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
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, with_checksum(content))
    return path


def _earlier(path: Path, device: str, fresh: set[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Saved cases of other precisions than those measured now, and when each was measured.

    Empty if the file is of another device with this name, or damaged; then it is overwritten.
    """
    if not path.exists():
        return [], {}
    try:
        content = read_checked(path)
        devices.fit(content["cases"])
        kept = [case for case in content["cases"] if case.get("precision", "bf16") not in fresh]
        last = {"date": content["date"], "versions": content["versions"]}
        since = {case.get("precision", "bf16"): last for case in kept} | content.get("earlier", {})
        same = content["device"] == device
    except (KeyError, TypeError, AttributeError, ValueError, BiphaseError):
        return [], {}
    return (kept, {name: when for name, when in since.items() if name not in fresh}) if same else ([], {})
