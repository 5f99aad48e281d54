"""The cases of `biphase bench` as records, their defaults by kind of device, and the cases that describe a device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from biphase.errors import SpecError, nearest
from biphase.presets import SIZES

SUBJECTS = ("pretrain", "finetune", "retrieval", "scale", "all")
OBJECTIVES = ("mlm", "clm")
PACKINGS = ("chunks", "rows", "documents")
USUAL_RATIO = 0.4
PRECISIONS = ("bf16", "fp32", "fp8")
PEERS = ("trainer", "trainer-compiled")
NO_PEER = "none"

# The subjects an option applies to; elsewhere it is refused, since ignoring it would measure something else.
COUNTS_FOR = {
    **dict.fromkeys(("objective", "ratio", "packing", "micro_batches"), ("pretrain", "all")),
    **dict.fromkeys(("vocab", "length", "deterministic"), ("pretrain",)),
    "rows": ("pretrain", "scale", "all"),
    "profile": ("pretrain", "finetune", "scale", "all"),
}

LEAST, MOST = 64, 2**20  # limits of vocabulary size and of tokens in a row
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


PLACES = {
    "cuda": DeviceDefaults(
        "210m", 128_256, 2_048, 0, 32, 20, 5, "bf16", PEERS, 16_384, ("210m", "610m", "30m", "8m")
    ),
    "cpu": DeviceDefaults("8m", 2_048, 128, 8, 8, 3, 3, "fp32", ("trainer",), 32, ("2m", "8m", "1m")),
}


@dataclass(frozen=True)
class BenchRequest:
    """The command's options, checked. Empty, 0 and None: not given, so the default of the device."""

    subject: str = "pretrain"
    size: str = ""
    objective: str = ""
    ratio: float | None = None
    packing: str = ""
    rows: int = 0
    micro_batches: int = 0
    vocab: int = 0
    length: int = 0
    deterministic: bool = False
    steps: int = 0
    against: tuple[str, ...] = ()
    precision: str = ""
    profile: bool = False
    save: bool = False

    def __post_init__(self) -> None:
        _known("bench", self.subject, SUBJECTS)
        for name, known in (
            ("objective", OBJECTIVES), ("packing", PACKINGS), ("size", SIZES), ("precision", PRECISIONS),
        ):  # fmt: skip
            if typed := getattr(self, name):
                _known(f"--{name}", typed, known)
        for peer in self.against:
            _known("--against", peer, (*PEERS, NO_PEER))
        if NO_PEER in self.against and len(self.against) > 1:
            raise SpecError("--against none stands alone; leave it out, or leave out the others")
        if self.ratio is not None and not 0 < self.ratio < 1:
            raise SpecError(f"--ratio is a share between 0 and 1, not {self.ratio:g}; usual: --ratio 0.4")
        if min(self.rows, self.micro_batches, self.steps) < 0:
            raise SpecError(
                "--rows, --micro-batches and --steps must not be negative; 0 takes what suits the device"
            )
        for name in ("vocab", "length"):
            typed = getattr(self, name)
            if typed and not LEAST <= typed <= MOST:
                raise SpecError(f"--{name} is {typed:,}; give {LEAST} to {MOST:,}, or 0 for what is usual")
        if self.deterministic and set(self.against) - {NO_PEER}:
            raise SpecError("--deterministic measures biphase alone; leave out --against")
        if self.save and self.subject not in ("scale", "all"):
            raise SpecError(
                f"--save keeps the cases of scale, not of {self.subject}; type bench scale --save"
            )
        if self.save and self.size:
            raise SpecError("--save needs every size of scale; leave out --size")
        if self.precision == "fp8" and self.subject not in ("pretrain", "scale"):
            raise SpecError("--precision fp8 is for pretraining; type bench pretrain --precision fp8")
        self._refuse_what_would_be_ignored()

    def _refuse_what_would_be_ignored(self) -> None:
        for name, subjects in COUNTS_FOR.items():
            typed = getattr(self, name)
            if typed and self.subject not in subjects:
                option = f"--{name.replace('_', '-')}"
                said = option if typed is True else f"{option} {typed}"
                raise SpecError(
                    f"{option} means nothing to bench {self.subject}; leave it out, or type bench pretrain {said}"
                )

    def subjects(self) -> tuple[str, ...]:
        return SUBJECTS[:-1] if self.subject == "all" else (self.subject,)

    def peers(self, place: DeviceDefaults) -> tuple[str, ...]:
        if NO_PEER in self.against or self.deterministic:
            return ()
        return tuple(dict.fromkeys(self.against)) or place.peers


def _known(what: str, value: str, names: Any) -> None:
    if value not in names:
        raise SpecError(f"{what} {value!r} is not known; {nearest(value, names)}")


# ---------------------------------------------------------------- cases


@dataclass(frozen=True)
class PretrainCase:
    """Pretraining steps of one or more micro-batches, on random tokens."""

    size: str
    vocab: int
    objective: str
    ratio: float
    packing: str
    length: int
    rows: int
    steps: int
    warm: int
    precision: str
    micro_batches: int = 1  # of an optimizer step
    deterministic: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of an optimizer step."""
        return self.rows * self.micro_batches * self.length

    @property
    def title(self) -> str:
        asked = f"MLM {self.ratio:.0%}" if self.objective == "mlm" else "CLM"
        several = f", {self.micro_batches} micro-batches a step" if self.micro_batches > 1 else ""
        same = ", deterministic" if self.deterministic else ""
        return f"{self.size} {asked}, {self.packing} of {self.length:,}{several}{same}"

    def about(self) -> dict[str, Any]:
        names = ("size", "vocab", "objective", "ratio", "packing", "length", "rows", "precision")
        return {"kind": "pretrain", **{name: getattr(self, name) for name in names}}


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


@dataclass(frozen=True)
class FinetuneCase:
    """Fine-tuning steps of one batch of texts."""

    size: str
    vocab: int
    lengths: Lengths
    batch: int
    steps: int
    warm: int
    precision: str

    @property
    def title(self) -> str:
        return f"{self.size} {self.lengths.name}, {self.lengths.mean:g} tokens a text"

    def about(self) -> dict[str, Any]:
        names = ("size", "vocab", "batch", "precision")
        return {
            "kind": "finetune",
            "like": self.lengths.name,
            **{name: getattr(self, name) for name in names},
        }


@dataclass(frozen=True)
class RetrievalCase:
    """Training steps of one batch of pairs; then inference on passages."""

    size: str
    vocab: int
    batch: int
    steps: int
    warm: int
    precision: str
    passages: int

    @property
    def title(self) -> str:
        return f"{self.size} {self.batch} pairs"

    def about(self) -> dict[str, Any]:
        return {
            "kind": "retrieval",
            **{name: getattr(self, name) for name in ("size", "vocab", "batch", "precision")},
        }


@dataclass(frozen=True)
class ScoreCase:
    """Inference on texts."""

    size: str
    vocab: int
    passages: int
    precision: str

    @property
    def title(self) -> str:
        return f"{self.size} reading texts of {PASSAGES.mean:g} tokens"

    def about(self) -> dict[str, Any]:
        return {"kind": "score", **{name: getattr(self, name) for name in ("size", "vocab", "precision")}}


@dataclass(frozen=True)
class ScaleCases:
    """The cases that characterize a device; together they cover each part of the cost of a step."""

    pretrain: list[PretrainCase] = field(default_factory=list)
    finetune: list[FinetuneCase] = field(default_factory=list)
    score: list[ScoreCase] = field(default_factory=list)


class Maker:
    """Makes the cases for a request on a kind of device."""

    def __init__(self, asked: BenchRequest, kind: str, rows: int) -> None:
        self.asked, self.place = asked, PLACES.get(kind, PLACES["cpu"])
        self.rows = asked.rows or self.place.rows or rows
        self.length, self.vocab = asked.length or self.place.length, asked.vocab or self.place.vocab
        self.size = asked.size or self.place.size
        self.steps = asked.steps or self.place.steps
        self.precision = asked.precision or self.place.precision

    def pretrain(self, size: str = "", **other: Any) -> PretrainCase:
        asked = self.asked
        values: dict[str, Any] = {
            "objective": asked.objective or OBJECTIVES[0],
            "ratio": asked.ratio or USUAL_RATIO,
            "packing": asked.packing or PACKINGS[0],
            "rows": self.rows,
            "micro_batches": asked.micro_batches or 1,
            "deterministic": asked.deterministic,
        }
        return PretrainCase(
            size=size or self.size, vocab=self.vocab, length=self.length, steps=self.steps, warm=self.place.warm,
            precision=self.precision, **(values | other),
        )  # fmt: skip

    def peer_rows(self) -> int:
        """Rows of the Trainer's batch: as given, else at most `PEER_ROWS`."""
        return self.asked.rows or min(self.rows, PEER_ROWS)

    def finetune(self, lengths: Lengths, size: str = "") -> FinetuneCase:
        place = self.place
        return FinetuneCase(
            size or self.size, place.vocab, lengths, place.batch, self.steps, place.warm, self.precision
        )

    def retrieval(self) -> RetrievalCase:
        place = self.place
        return RetrievalCase(
            self.size, place.vocab, place.batch, self.steps, place.warm, self.precision, place.passages
        )

    def score(self, size: str) -> ScoreCase:
        return ScoreCase(size, self.place.vocab, self.place.passages, self.precision)

    def scale(self) -> ScaleCases:
        """The cases of `bench scale`; with --size, only those of that size; with fp8, pretraining only."""
        usual, larger, *smaller = self.place.scale
        small = smaller[0]
        plain = {"objective": "mlm", "ratio": USUAL_RATIO, "packing": "chunks", "micro_batches": 1}
        tuned = () if self.precision == "fp8" else (usual, small)
        made = ScaleCases(
            [
                self.pretrain(usual, **plain),
                self.pretrain(usual, **(plain | {"objective": "clm"})),
                self.pretrain(usual, **(plain | {"packing": "rows"})),
                *(self.pretrain(size, **plain) for size in (larger, *smaller)),
            ],
            [self.finetune(lengths, size) for size in tuned for lengths in LIKE],
            [self.score(size) for size in tuned],
        )
        if not self.asked.size:
            return made
        known = (usual, larger, *smaller)
        _known("bench scale --size", self.asked.size, known)
        return ScaleCases(
            *([case for case in some if case.size == self.asked.size] for some in vars(made).values())
        )
