"""`biphase bench` as records, without torch: the request, the cases by kind of device, results, saved devices.

`Report` shows results as tables and JSON. `save` writes `devices/NAME/PRECISION.json`, the cases of `bench scale` and
the speeds fitted to them, which `biphase plan --device NAME` reads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from biphase.errors import SpecError, nearest
from biphase.presets import CONFIGS, STARTS
from biphase.store import Store, with_checksum, write_json
from biphase.study import devices
from biphase.text import aligned, short

PEERS = ("trainer", "trainer-compiled")
NO_PEER = "none"
OURS = "biphase"
NAMES = {OURS: OURS, "trainer": "Trainer", "trainer-compiled": "Trainer compiled"}
PEER_ROWS = 12  # rows whose logits fit in memory for the Trainer at a vocabulary of 128,256

# The workloads an option applies to; elsewhere it is refused, since ignoring it would measure something else.
APPLIES = {
    **dict.fromkeys(("objective", "ratio", "packing", "vocab", "length"), ("pretrain", "job")),
    "rows": ("pretrain", "job", "scale"),
    "against": ("pretrain", "finetune"),
    "profile": ("pretrain", "finetune", "scale"),
    "save": ("scale",),
}


@dataclass(frozen=True)
class DeviceDefaults:
    """Default sizes that a kind of device measures in about a minute."""

    size: str
    vocab: int
    length: int
    rows: int  # of a micro-batch; 0: chosen by training
    batch: int  # examples of a fine-tuning step
    steps: int
    job_steps: int  # of `bench job`
    warm: int  # steps before the measured ones; includes one synchronization with the device
    precision: str
    peers: tuple[str, ...]
    passages: int
    scale: tuple[str, ...]  # sizes, the usual one first
    small: tuple[
        tuple[str, int, int, int], ...
    ] = ()  # small studies: size, vocabulary, tokens of a row, rows


DEFAULTS = {
    "cuda": DeviceDefaults(
        "210m",
        128_256,
        2_048,
        0,
        32,
        20,
        600,
        5,
        "bf16",
        PEERS,
        16_384,
        ("210m", "610m", "30m", "8m", "2m"),
        (("2m", 16_384, 256, 128), ("8m", 16_384, 256, 128), ("30m", 49_153, 512, 64)),
    ),
    "cpu": DeviceDefaults("8m", 2_048, 128, 8, 8, 3, 12, 3, "fp32", ("trainer",), 32, ("2m", "8m", "1m")),
}


def defaults_of(kind: str) -> DeviceDefaults:
    return DEFAULTS.get(kind, DEFAULTS["cpu"])


@dataclass(frozen=True)
class BenchRequest:
    """The command's options. Empty, 0 and None: not given, so the default of the device."""

    workload: str = "pretrain"  # or finetune, job, or scale
    size: str = ""
    objective: str | None = None
    ratio: float | None = None
    packing: str | None = None
    rows: int = 0
    vocab: int | None = None
    length: int | None = None
    steps: int = 0
    against: tuple[str, ...] = ()
    precision: str | None = None
    profile: bool = False
    save: bool = False

    def __post_init__(self) -> None:
        if self.size:
            STARTS[self.size]  # refuses an unknown name
        peers = {*self.against} - {NO_PEER}
        unknown = peers - {*PEERS}
        refusals = {
            f"--against {', '.join(sorted(unknown))} is not known; known: {', '.join(PEERS)}, none": unknown,
            "--against none stands alone; leave it out, or leave out the others": peers
            and NO_PEER in self.against,
            f"--against: peers have SIZES, and {self.size} is none of them; leave out --against": peers
            and self.size in CONFIGS,
            "--save needs every size of scale; leave out --size": self.save and self.size,
            "bench job is two jobs, each of a step or more; type --steps 2": self.workload == "job"
            and self.steps == 1,
        }
        for name, workloads in APPLIES.items():
            value = peers if name == "against" else getattr(self, name)
            typed = f"--{name}" if value is True or name == "against" else f"--{name} {value}"
            message = f"--{name} means nothing to bench {self.workload}; leave it out, or type bench {workloads[0]} {typed}"
            refusals[message] = value and self.workload not in workloads
        for message, wrong in refusals.items():
            if wrong:
                raise SpecError(message)

    def peers(self, defaults: DeviceDefaults) -> tuple[str, ...]:
        if NO_PEER in self.against or self.workload in ("scale", "job") or self.size in CONFIGS:
            return ()
        return tuple(dict.fromkeys(self.against)) or defaults.peers


# ---------------------------------------------------------------- cases


@dataclass(frozen=True, kw_only=True)
class BenchCase:
    """What all cases have. `FACTS` are the fields that identify a case in JSON and in a saved device."""

    kind: ClassVar[str]
    unit: ClassVar[str]
    FACTS: ClassVar[tuple[str, ...]]
    MEASURED: ClassVar[tuple[str, ...]]  # fields of its timing that the cost model is fitted to

    size: str
    vocab: int
    precision: str
    steps: int = 0  # measured ones
    warm: int = 0  # steps before those

    def facts(self) -> dict[str, Any]:
        return {"kind": self.kind, **{name: getattr(self, name) for name in self.FACTS}}


@dataclass(frozen=True, kw_only=True)
class PretrainCase(BenchCase):
    """Pretraining steps of one micro-batch, on random tokens."""

    kind = "pretrain"
    unit = "tokens/s"
    FACTS = ("size", "vocab", "objective", "ratio", "packing", "length", "rows", "precision")
    MEASURED = ("seconds",)

    objective: str
    ratio: float
    packing: str
    length: int
    rows: int

    @property
    def title(self) -> str:
        objective = f"MLM {self.ratio:.0%}" if self.objective == "mlm" else "CLM"
        return f"{self.size} {objective}, {self.packing} of {self.length:,}"


@dataclass(frozen=True, kw_only=True)
class JobCase(PretrainCase):
    """Two training jobs of a study, the second the child of the first, as a worker computes them."""

    kind = "job"
    FACTS = (*PretrainCase.FACTS, "steps")

    @property
    def title(self) -> str:
        return f"{super().title}, two jobs"


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
PASSAGES = Lengths("passages", devices.SCORED_LENGTH, 512, 6.0, 0)


@dataclass(frozen=True, kw_only=True)
class FinetuneCase(BenchCase):
    """Fine-tuning steps of one batch of texts."""

    kind = "finetune"
    unit = "ms/step"
    FACTS = ("like", "size", "vocab", "batch", "precision")
    MEASURED = ("tokens", "seconds")

    lengths: Lengths
    batch: int

    @property
    def like(self) -> str:
        return self.lengths.name

    @property
    def title(self) -> str:
        return f"{self.size} {self.like}, {self.lengths.mean:g} tokens a text"


@dataclass(frozen=True, kw_only=True)
class ScoreCase(BenchCase):
    """Inference on texts."""

    kind = "score"
    unit = "tokens/s"
    FACTS = ("size", "vocab", "precision")
    MEASURED = ("tokens_per_second",)

    passages: int

    @property
    def title(self) -> str:
        return f"{self.size} reading texts of {PASSAGES.mean:g} tokens"


Case = PretrainCase | FinetuneCase | ScoreCase


class CaseMaker:
    """Makes the cases for a request on a kind of device; `rows`: those that training would choose there."""

    def __init__(self, request: BenchRequest, kind: str, rows: int) -> None:
        self.request, self.defaults = request, defaults_of(kind)
        self.rows = request.rows or self.defaults.rows or rows
        self.size = request.size or self.defaults.size
        steps = self.defaults.job_steps if request.workload == "job" else self.defaults.steps
        self.common: dict[str, Any] = {
            "vocab": request.vocab or self.defaults.vocab,
            "precision": request.precision or self.defaults.precision,
            "steps": request.steps or steps,
            "warm": self.defaults.warm,
        }

    def cases(self) -> list[Case]:
        match self.request.workload:
            case "pretrain":
                return [self.pretrain(self.size)]
            case "job":
                return [JobCase(**vars(self.pretrain(self.size)))]
            case "finetune":
                return [self.finetune(lengths, self.size) for lengths in LIKE]
            case _:
                return self.scale()

    def pretrain(self, size: str, **other: Any) -> PretrainCase:
        request = self.request
        values: dict[str, Any] = {
            **self.common,
            "length": request.length or self.defaults.length,
            "objective": request.objective or "mlm",
            "ratio": request.ratio or 0.4,
            "packing": request.packing or "chunks",
            "rows": self.rows,
        }
        return PretrainCase(size=size, **(values | other))

    def finetune(self, lengths: Lengths, size: str) -> FinetuneCase:
        return FinetuneCase(size=size, **self.common, lengths=lengths, batch=self.defaults.batch)

    def scale(self) -> list[Case]:
        """The cases that characterize a device; together they cover each part of the cost of a step.

        With --size, only those of that size.
        """
        sizes, only = self.defaults.scale, self.request.size
        usual, larger, *smaller = sizes
        tuned = usual, smaller[0]
        cases: list[Case] = [
            self.pretrain(usual),
            self.pretrain(usual, objective="clm"),
            self.pretrain(usual, packing="rows"),
            *(self.pretrain(size) for size in (larger, *smaller)),
            *(
                self.pretrain(size, vocab=vocab, length=length, rows=rows, objective=objective)
                for size, vocab, length, rows in self.defaults.small
                for objective in ("mlm", "clm")
            ),
            *(self.finetune(lengths, size) for size in tuned for lengths in LIKE),
            *(ScoreCase(size=size, **self.common, passages=self.defaults.passages) for size in tuned),
        ]
        if only and only not in sizes:
            raise SpecError(f"bench scale has no size {only!r}; {nearest(only, sizes)}")
        return [case for case in cases if only in ("", case.size)]

    @property
    def peer_rows(self) -> int:
        """Rows of the Trainer's batch: as given, else at most `PEER_ROWS`."""
        return self.request.rows or min(self.rows, PEER_ROWS)


# ---------------------------------------------------------------- results


@dataclass(frozen=True)
class Timing:
    """One side's measurement of a case."""

    seconds: float  # of a step: the median
    mean_seconds: float
    tokens: float  # of a step, without padding
    peak_bytes: int | None = None  # None: not a GPU
    ready_seconds: float | None = None  # until the third step is done, with compilation
    path: str = ""  # how it was computed
    details: dict[str, float] = field(default_factory=dict)  # more measurements, by what they are
    failed: str = ""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def facts(self) -> dict[str, Any]:
        if self.failed:
            return {"failed": self.failed}
        facts = asdict(self) | {"tokens_per_second": self.tokens_per_second}
        del facts["failed"]
        return facts


def failure(why: str) -> Timing:
    """A timing that records only why the measurement failed."""
    return Timing(math.nan, math.nan, math.nan, failed=why)


@dataclass(frozen=True)
class Compared:
    """One case, measured on each side; ours is first."""

    case: Case
    sides: dict[str, Timing]
    note: str = ""  # differences between the sides other than their code

    def value(self, side: str) -> float:
        """The result in the unit of the case; NaN if that side failed."""
        timing = self.sides[side]
        return timing.seconds * 1000 if self.case.unit == "ms/step" else timing.tokens_per_second

    @property
    def ratios(self) -> dict[str, float]:
        """How many times faster ours is than each peer that did not fail; the sides may differ in their rows."""
        speeds = {side: timing.tokens_per_second for side, timing in self.sides.items()}
        ratios = {side: speeds[OURS] / speed for side, speed in speeds.items() if side != OURS}
        return {side: ratio for side, ratio in ratios.items() if math.isfinite(ratio)}

    def facts(self) -> dict[str, Any]:
        return {
            "title": self.case.title,
            "unit": self.case.unit,
            "note": self.note,
            **self.case.facts(),
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
        facts = {name: value for name, value in vars(self).items() if name != "compared"}
        return facts | {"results": [case.facts() for case in self.compared]}

    @property
    def measured(self) -> list[Compared]:
        """The cases that our side could measure."""
        return [case for case in self.compared if not case.sides[OURS].failed]

    def describe(self, study: str = "STUDY") -> str:
        """The report as text. `study`: how the study is typed after a verb, with its store."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        parts = [f"{self.device} · {self.date} · {versions}\n{self.command}", table(self.compared)]
        parts += [f"{title}, one step\n{profile_table(profile)}" for title, profile in self.profiles.items()]
        if self.saved:
            parts.append(f"kept in {self.saved}\nNext: biphase plan {study} --device {self.name}")
        return "\n\n".join(parts)


# Rows below a case: more facts of each side.
DETAILS: tuple[tuple[str, Callable[[Timing], str]], ...] = (
    ("  computed", lambda timing: timing.path),
    ("  peak GiB", lambda timing: f"{timing.peak_bytes / 2**30:.1f}" if timing.peak_bytes else ""),
    ("  s until step 3", lambda timing: f"{timing.ready_seconds:.1f}" if timing.ready_seconds else ""),
)


def table(compared: list[Compared]) -> str:
    """A line for each case, followed by more facts of each side. All cases have the same sides."""
    sides = list(compared[0].sides)
    peers = len(sides) > 1
    rows = [["", "unit", *(NAMES[side] for side in sides), *(["ratio"] if peers else [])]]
    notes = ["ratio: how many times faster than the fastest peer"] if peers else []
    for result in compared:
        case, ratio = result.case, min(result.ratios.values(), default=None)
        values = [_number(result.value(side), case.unit) for side in sides]
        rows.append([case.title, case.unit, *values, *([f"{ratio:.2f}×" if ratio else "–"] if peers else [])])
        notes += [f"{case.title}: {result.note}"] if result.note else []
        for name, detail in DETAILS:
            cells = ["" if timing.failed else detail(timing) for timing in result.sides.values()]
            if any(cells):
                rows.append([name, "", *cells, *([""] if peers else [])])
        rows += [[f"  {what}", "", short(value)] for what, value in result.sides[OURS].details.items()]
        notes += [
            f"{NAMES[side]}, {case.title}: {timing.failed}"
            for side, timing in result.sides.items()
            if timing.failed
        ]
    return "\n".join([*aligned(rows, left=2), *notes])


# The first pattern found in a name decides. Names of fused kernels list the fused operations.
KINDS = {
    "attention": r"flash|fmha|sdpa|attention|attn",
    "optimizer": r"adam|multi_tensor_apply|lpnorm|_foreach",
    "loss": r"cross_entropy|softmax|logsumexp|nll_loss|xent",
    "GEMMs": r"gemm|nvjet|cutlass|xmma|cublas|splitk|matmul|aten::(add|b|bad)?mm\b|scaled_mm|aten::linear",
    "rotary": r"rotary|rotate|rope|_cos_|_sin_|_neg_",
    "swiglu": r"swiglu|silu",
    "norm": r"norm|rsqrt|rms_",
    "copies": r"memcpy|memset|copy|(?<!broad)cast|fill|cat(?!ion)|clone|contiguous",
}
OTHER = "other"


def kind_of(name: str) -> str:
    """The kind of a kernel, or of a CPU operation, by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower())), OTHER)


def profile_table(profile: dict[str, float]) -> str:
    total = sum(profile.values())
    rows = [["", "ms", "share"]]
    rows += [[kind, f"{ms:.2f}", f"{ms / total:.0%}"] for kind, ms in profile.items()]
    return "\n".join(aligned([*rows, ["together", f"{total:.2f}", ""]]))


def _number(value: float, unit: str) -> str:
    if math.isnan(value):
        return "failed"
    return f"{value:.2f}" if unit == "ms/step" else short(value)


def save(report: Report, store: Store) -> Path:
    """Write `devices/NAME/PRECISION.json`, which `biphase plan --device NAME` reads; the cases have one precision."""
    cases = []
    for result in report.measured:
        timing, case = result.sides[OURS], result.case
        cases.append({**case.facts(), **{name: getattr(timing, name) for name in case.MEASURED}})
    content: dict[str, Any] = {
        "device": report.device,
        "date": report.date,
        "versions": report.versions,
        "cases": cases,
        "speeds": asdict(devices.fit(cases)),
    }
    path = store.root / "devices" / report.name / f"{cases[0]['precision']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, with_checksum(content))
    return path
