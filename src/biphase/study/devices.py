"""The measured speed of a device: seconds of a training step, a fine-tuning step and scoring.

`biphase bench scale --save` measures steps, `fit` fits the speeds of a device to them, and `device_named` reads a
device from STORE/devices/NAME/PRECISION.json or from the shipped assets/devices. A step costs the sum of its parts, each a known
amount of work times a fitted speed:

    gemm      FLOPs of the matrix products, head included      ┐ together a rate of peak × d / (d + d0):
    narrow    the same divided by the model's width d          ┘ narrow matrices are slower
    rows      FLOPs of attention within whole rows             two kernels,
    varlen    FLOPs of attention within chunks or texts        so two speeds
    bytes     memory traffic: activations, logits, weights, gradients and optimizer state
    launches  layers × micro-batches: the fixed cost of a layer

A fine-tuning step is a share of the same work on few tokens, where reading and updating the weights outweighs
computing. (A product of M rows that must also read its weights reaches M / (M + M0) of its rate, so the two times
are added; their maximum is the same where one is much larger.) Scoring is a share of the forward pass.

There are about as many speeds as measured steps, and the measurements are noisy. So each speed has a weak prior:
its value on an H200, slowed by one factor to the device at hand. What the steps do not determine stays plausible,
and sizes that were not measured are not extrapolated from noise. Speeds are never negative. Errors are relative to
the step time. Only `fit` needs numpy and scipy.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from biphase.data.corpus import ASSETS
from biphase.errors import BiphaseError, SpecError, StoreError, nearest
from biphase.presets import DEVICES, SIZES
from biphase.specs import CLM, MLM, Chunks, Rows
from biphase.store import Store, read_checked
from biphase.study.costs import ModelShape, shape_of_size

# Version of the result of `fit`; raise it when the terms change, so that saved cases are fitted again.
FORM = 2

CAUSAL = 0.65  # relative to full attention: half the FLOPs, but blocks on the diagonal are computed whole
# Bytes moved per logit: written, read for the loss, replaced by its gradient, and read twice.
LOGIT_BYTES = 10
# Bytes moved per weight and micro-batch: a bf16 weight is read three times, an fp32 gradient updated.
WEIGHT_BYTES = 12
UPDATE_BYTES = {"fp32": 28, "bf16": 30, "pure-bf16": 14}  # per parameter: AdamW and the bf16 copy
# A host thread prepares the batches of a training job meanwhile: no step is faster. On the host of an H200, the median
# of masked studies of a 2M model, 5.2M to 6.2M tokens/s with one loader.
BATCH_SECONDS = 1.75e-7  # per token
SCORED_LENGTH = 120  # tokens per text in the scoring benchmark

NOISE = 0.03  # relative noise of a measured step
# On an H200: seconds per unit of work, and the relative standard deviation of the prior.
PRIOR = {
    "gemm": (1 / 800e12, 0.3),
    "narrow": (150 / 800e12, 1.0),
    "rows": (1 / 350e12, 0.5),
    "varlen": (1 / 250e12, 0.5),
    "bytes": (1 / 3.5e12, 0.25),
    "launches": (5e-5, 2.0),
}
# The first three are factors on the times of pretraining; then seconds per layer and seconds per step.
TUNING_PRIOR = {
    "compute": (1.0, 0.3),
    "weights": (1.0, 0.5),
    "update": (1.0, 0.3),
    "launches": (1.5e-4, 2.0),
    "steps": (3e-4, 2.0),
}
SCORING_PRIOR = {"compute": (1.0, 0.3), "tokens": (1e-8, 3.0)}
KINDS = ("pretrain", "finetune", "score")

MEASURE = "biphase bench scale --save"

Terms = dict[str, float]


@dataclass(frozen=True)
class Speeds:
    """Fitted speeds of a device in one precision, in seconds per unit of each kind of work."""

    precision: str
    measured: dict[str, int]  # kind of case → how many were measured; other kinds have the prior's speeds
    worst: dict[str, float]  # kind of case → largest relative error on its cases
    micro_tokens: float  # tokens per micro-batch in the measurements
    base: Terms
    finetune: Terms
    score: Terms
    form: int = FORM

    def step(
        self, shape: ModelShape, packing: Chunks | Rows, tokens: float, *, causal: float, labelled: float
    ) -> float:
        """Return the seconds of one optimizer step of pretraining on `tokens` tokens."""
        micros = max(1, math.ceil(tokens / self.micro_tokens))
        work = _training(shape, tokens, _reach(packing, causal), labelled=labelled, micros=micros)
        return max(_time(self.base, _with_update(work, shape, self.precision)), tokens * BATCH_SECONDS)

    def forward(
        self, shape: ModelShape, packing: Chunks | Rows, tokens: float, *, causal: float, labelled: float
    ) -> float:
        """Return the seconds of a forward pass with loss: a third of training, and batches that are not prepared ahead."""
        micros = math.ceil(tokens / self.micro_tokens)
        work = _training(shape, tokens, _reach(packing, causal), labelled=labelled, micros=micros)
        return _time(self.base, work) / 3 + tokens * BATCH_SECONDS

    def tuning_step(
        self, shape: ModelShape, tokens: float, texts: float, *, precision: str = "", micros: int = 1
    ) -> float:
        """Return the seconds of one optimizer step of fine-tuning on `texts` texts with `tokens` tokens in total."""
        work = _tuning(self.base, shape, tokens, texts, precision or self.precision, micros)
        return _time(self.finetune, work)

    def scoring(self, shape: ModelShape, tokens: float, length: float = SCORED_LENGTH) -> float:
        """Return the seconds to score `tokens` tokens in texts of this mean length."""
        return _time(self.score, _scoring(self.base, shape, tokens, length))


# ---------------------------------------------------------------- amounts of work


def _reach(packing: Chunks | Rows, causal: float) -> tuple[str, float]:
    """Return which attention kernel is used, and over how many tokens each token attends."""
    whole = isinstance(packing, Rows) and not packing.document_mask
    return "rows" if whole else "varlen", packing.attended_length * (1 - causal * (1 - CAUSAL))


def _training(
    shape: ModelShape, tokens: float, reach: tuple[str, float], *, labelled: float, micros: float
) -> Terms:
    """Return the work of forward and backward over `tokens` tokens, without the optimizer update."""
    gemm = 6 * tokens * (shape.matrices + shape.embedding * labelled)
    logits = LOGIT_BYTES * tokens * labelled * (shape.vocab or 0)
    weights = WEIGHT_BYTES * micros * (shape.matrices + shape.embedding)
    kernel, attended = reach
    return {
        "gemm": gemm,
        "narrow": gemm / shape.hidden,
        kernel: 12 * tokens * shape.layers * shape.width * attended,
        "bytes": _activations(shape, tokens) + logits + weights,
        "launches": shape.layers * micros,
    }


def _activations(shape: ModelShape, tokens: float) -> float:
    """Return the bytes that norms, rotary embeddings, gates and residual sums move, forward and backward."""
    return tokens * shape.layers * (60 * shape.hidden + 18 * shape.ffn)


def _with_update(work: Terms, shape: ModelShape, precision: str) -> Terms:
    return work | {"bytes": work["bytes"] + UPDATE_BYTES[precision] * shape.parameters}


def _tuning(
    base: Terms, shape: ModelShape, tokens: float, texts: float, precision: str, micros: int
) -> Terms:
    """Return the work of a fine-tuning step; its first three parts are in seconds that pretraining would take."""
    body = _training(shape, tokens, ("varlen", tokens / texts), labelled=0, micros=0)
    parameters = shape.parameters - shape.head  # there is no vocabulary head
    return {
        "compute": _time(base, body),
        "weights": base["bytes"] * WEIGHT_BYTES * shape.matrices * micros,
        "update": base["bytes"] * UPDATE_BYTES[precision] * parameters,
        "launches": shape.layers * micros,
        "steps": 1,
    }


def _scoring(base: Terms, shape: ModelShape, tokens: float, length: float) -> Terms:
    work = _tuning(base, shape, tokens, tokens / length, "fp32", 1)
    return {"compute": work["compute"] / 3, "tokens": tokens}


def _time(speeds: Mapping[str, float], work: Mapping[str, float]) -> float:
    return sum(speeds[name] * amount for name, amount in work.items() if amount)


# ---------------------------------------------------------------- fitting


def fit(cases: Sequence[Mapping[str, Any]]) -> Speeds:
    """Fit the speeds of a device to its measured cases of one precision."""
    # With document masking, the attended length depends on the text.
    cases = [case for case in cases if case.get("packing") != "documents"]
    if not cases:
        raise SpecError(f"there are no measured cases to fit; make some: {MEASURE}")
    precision = cases[0]["precision"]
    pretrain, finetune, score = ([case for case in cases if case["kind"] == kind] for kind in KINDS)
    steps = [_case_work(case, precision) for case in pretrain]
    took = [float(case["seconds"]) for case in pretrain]
    usual = {name: value for name, (value, _) in PRIOR.items()}
    slower = _slowness(usual, precision, steps, took, finetune)
    prior = {name: (value * slower, spread) for name, (value, spread) in PRIOR.items()}
    base = _solve(steps, took, prior)

    tuned = [_tuned_work(base, case, precision) for case in finetune]
    tuned_took = [float(case["seconds"]) for case in finetune]
    scored = [_scoring(base, _case_shape(case), 1, SCORED_LENGTH) for case in score]
    scored_took = [1 / float(case["tokens_per_second"]) for case in score]
    fits = {
        "pretrain": (base, steps, took),
        "finetune": (_solve(tuned, tuned_took, TUNING_PRIOR), tuned, tuned_took),
        "score": (_solve(scored, scored_took, SCORING_PRIOR), scored, scored_took),
    }
    micro_tokens = [case["rows"] * case["length"] for case in pretrain]
    return Speeds(
        precision,
        measured={kind: len(works) for kind, (_, works, _) in fits.items() if works},
        worst={kind: _worst(*fit) for kind, fit in fits.items() if fit[1]},
        micro_tokens=float(max(micro_tokens, default=1)),
        base=base,
        finetune=fits["finetune"][0],
        score=fits["score"][0],
    )


def _slowness(
    usual: Terms, precision: str, steps: list[Terms], took: list[float], finetune: list[Mapping[str, Any]]
) -> float:
    """Return how many times slower than an H200 a device is: the median of pretraining, or else fine-tuning cases."""
    if steps:
        return median(seconds / _time(usual, work) for seconds, work in zip(took, steps, strict=True))
    shares = {name: value for name, (value, _) in TUNING_PRIOR.items()}
    ratios = [case["seconds"] / _time(shares, _tuned_work(usual, case, precision)) for case in finetune]
    return median(ratios) if ratios else 1.0


def _solve(
    works: list[Terms], took: list[float], prior: Mapping[str, tuple[float, float]]
) -> dict[str, float]:
    """Solve for nonnegative speeds by least squares over relative errors and deviations from the prior."""
    if not works:
        return {name: value for name, (value, _) in prior.items()}
    import numpy as np
    from scipy.optimize import nnls

    names = list(prior)
    # In units of the prior, so that all unknowns are near 1.
    amounts = [[work.get(name, 0.0) * prior[name][0] for name in names] for work in works]
    measured = np.array(amounts) / (np.array(took)[:, None] * NOISE)
    expected = np.diag([1 / prior[name][1] for name in names])
    goal = np.concatenate([np.full(len(works), 1 / NOISE), expected.diagonal()])
    solution, _ = nnls(np.concatenate([measured, expected]), goal)
    return {name: float(share) * prior[name][0] for name, share in zip(names, solution, strict=True)}


def _worst(speeds: Terms, works: list[Terms], took: list[float]) -> float:
    return max(abs(_time(speeds, work) / seconds - 1) for work, seconds in zip(works, took, strict=True))


def _case_shape(case: Mapping[str, Any]) -> ModelShape:
    return shape_of_size(SIZES[case["size"]], case["vocab"])


def _case_work(case: Mapping[str, Any], precision: str) -> Terms:
    """Return the work of a measured pretraining step: one micro-batch, one update."""
    packing = Chunks(case["length"]) if case["packing"] == "chunks" else Rows(case["length"])
    objective = CLM() if case["objective"] == "clm" else MLM(case["ratio"])
    causal, labelled = objective.causal, objective.labelled_share(packing, 0, 1)
    shape, tokens = _case_shape(case), case["rows"] * case["length"]
    work = _training(shape, tokens, _reach(packing, causal), labelled=labelled, micros=1)
    return _with_update(work, shape, precision)


def _tuned_work(base: Terms, case: Mapping[str, Any], precision: str) -> Terms:
    return _tuning(base, _case_shape(case), case["tokens"], case["batch"], precision, 1)


# ---------------------------------------------------------------- devices
# A device is a folder with one file for each precision: the device's title, the date and versions, the measured cases
# and the speeds fitted to them. A file of the store takes precedence over the shipped one of the same precision.


SHIPPED = ASSETS / "devices"
PLANNED_DEVICE = "h200"  # assumed where this machine has no GPU
ASK_SECONDS = 5.0
# Cards that share a name with another but have fewer units or less power, or are a slice of one.
_VARIANTS = {"laptop", "mobile", "max", "d", "ti", "super", "mig"}
_MAKERS = re.compile(r"nvidia|amd|geforce|instinct|quadro|tesla|radeon|graphics|\(r\)|\(tm\)")


@dataclass(frozen=True)
class Measurement:
    """The measured steps of a device in one precision, and the speeds fitted to them."""

    title: str  # the manufacturer's name of the device
    date: str
    torch: str  # its version
    shipped: bool
    cases: tuple[dict[str, Any], ...]
    speeds: Speeds


@dataclass(frozen=True)
class PricedDevice:
    """A measured device."""

    name: str
    measurements: dict[str, Measurement]  # by precision
    measure: str = MEASURE  # the command that measures a device, for messages

    @property
    def title(self) -> str:
        return next(each.title for each in self.measurements.values())

    def speeds(self, precision: str) -> Speeds | None:
        """Return the speeds in this precision, or None if it was not measured."""
        measurement = self.measurements.get(precision)
        return measurement.speeds if measurement else None

    def when(self, precisions: Collection[str]) -> str:
        """Say when these precisions were measured, and with which torch version."""
        chosen = {name: self.measurements[name] for name in precisions}
        dates = {name: f"{each.date}, torch {each.torch}" for name, each in chosen.items()}
        if len(set(dates.values())) == 1:
            return f"measured {next(iter(dates.values()))}"
        return f"measured {'; '.join(f'{name} {when}' for name, when in dates.items())}"


def at_hand() -> str:
    """Return this machine's device as --device names it: its first NVIDIA GPU, or "cpu"."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "cpu"
    title = _first_gpu()
    return short_name(title) if title else "cpu"


@cache
def _first_gpu() -> str:
    """Return what nvidia-smi calls this machine's first GPU; empty if there is none."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        names = subprocess.run(
            command, capture_output=True, text=True, timeout=ASK_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return names.partition("\n")[0].strip()


def short_name(title: str) -> str:
    """Return the name to type after --device, such as h200 for "NVIDIA H200"."""
    words = re.findall(r"[a-z0-9]+", _MAKERS.sub(" ", title.lower()))
    if not _VARIANTS & set(words):
        names = {*words, *(first + second for first, second in pairwise(words))}  # "RTX 4090" is rtx4090
        for device in DEVICES:
            if device.removesuffix("-gcd") in names:
                return device
    return "-".join(words) or "gpu"


def measure_into(store: Store) -> str:
    """Return the command that measures a device into this store."""
    usual = os.environ.get("BIPHASE_STORE") or "store"
    where = "" if str(store.root) == usual else f"--store {shlex.quote(str(store.root))} "
    return MEASURE.replace("--save", f"{where}--save")


def known_devices(store: Store, shipped: Path = SHIPPED) -> set[str]:
    """Return the names of the devices that were measured, or whose peak is known."""
    return {*DEVICES, *_names(store.root / "devices"), *_names(shipped)}


def device_named(name: str, store: Store, shipped: Path = SHIPPED) -> PricedDevice | None:
    """Return the measured device of this name, or None if only its peak is known; refuse any other name."""
    known = known_devices(store, shipped)
    if name not in known:
        raise SpecError(f"there is no device {name!r}; {nearest(name, sorted(known))}")
    files = {path.stem: path for path in sorted((shipped / name).glob("*.json"))}
    files |= {path.stem: path for path in sorted((store.root / "devices" / name).glob("*.json"))}
    measure = measure_into(store)
    measured = {precision: _read(path, shipped, measure) for precision, path in files.items()}
    return PricedDevice(name, measured, measure) if measured else None


def _names(folder: Path) -> set[str]:
    return {path.parent.name for path in folder.glob("*/*.json")}


def _read(path: Path, shipped: Path, measure: str) -> Measurement:
    try:
        saved = read_checked(path)
        speeds = saved["speeds"]
        return Measurement(
            str(saved["device"]),
            str(saved["date"])[:10],
            str(saved["versions"]["torch"]).split("+")[0],
            path.is_relative_to(shipped),
            tuple(saved["cases"]),
            Speeds(**speeds) if speeds.get("form") == FORM else fit(saved["cases"]),
        )
    except (KeyError, TypeError, AttributeError, ValueError, BiphaseError):
        raise StoreError(f"{path} is no measured device; remove it, or measure it again: {measure}") from None
