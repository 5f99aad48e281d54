"""Predicted hours of a plan on a device, from a few measured steps.

`biphase bench scale --save` measures steps, `fit` fits the speeds of a device to them, and `price` predicts every
training job and fine-tuning of a plan with them. A step costs the sum of its parts, each a known amount of work
times a fitted speed:

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
the step time.

Prediction is plain arithmetic; only `fit` needs numpy and scipy.

`device_named` reads a device from STORE/devices/NAME.json or from the shipped assets/devices.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from biphase.data.corpus import ASSETS
from biphase.errors import BiphaseError, SpecError, StoreError, nearest
from biphase.presets import DEVICES, SIZES
from biphase.protocol import FINETUNE_TOKENS, heldout_objectives, input_length, token_share
from biphase.specs import CLM, MLM, Chunks, Finetune, Pretrain, Rows, Size, Task
from biphase.store import Store, read_checked
from biphase.study.costs import (
    ModelShape,
    Sizes,
    shape_of,
    shape_of_size,
    sizes_of,
)
from biphase.study.ledger import finetunings, finished, lenders
from biphase.study.plan import Plan, TrainingJob
from biphase.text import counted

# Version of the result of `fit`; raise it when the terms change, so that saved cases are fitted again.
FORM = 1

CAUSAL = 0.65  # relative to full attention: half the FLOPs, but blocks on the diagonal are computed whole
# Bytes moved per logit: written, read for the loss, replaced by its gradient, and read twice.
LOGIT_BYTES = 10
# Bytes moved per weight and micro-batch: a bf16 weight is read three times, an fp32 gradient updated.
WEIGHT_BYTES = 12
UPDATE_BYTES = {"fp32": 28, "bf16": 30, "fp8": 31, "pure-bf16": 14}  # per parameter: AdamW and the bf16 copy
SCORED_LENGTH = 120  # tokens per text in the scoring benchmark

NOISE = 0.03  # relative noise of a measured step
# On an H200: seconds per unit of work, and the relative standard deviation of the prior.
PRIOR = {
    "gemm": (1 / 800e12, 0.3),
    "narrow": (150 / 800e12, 1.0),
    "rows": (1 / 350e12, 0.5),
    "varlen": (1 / 250e12, 0.5),
    "bytes": (1 / 3.5e12, 0.5),
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

Terms = dict[str, float]


@dataclass(frozen=True)
class Speeds:
    """Fitted speeds of a device in one precision, in seconds per unit of each kind of work; empty: not measured."""

    precision: str
    micro_tokens: float  # tokens per micro-batch in the measurements
    base: Terms
    pretrain: bool
    finetune: Terms
    score: Terms
    worst: float  # largest relative error on the measured cases

    def step(
        self, shape: ModelShape, packing: Chunks | Rows, tokens: float, *, causal: bool, labelled: float
    ) -> float:
        """Return the seconds of one optimizer step of pretraining on `tokens` tokens."""
        micros = max(1, math.ceil(tokens / self.micro_tokens))
        work = _training(shape, tokens, _reach(packing, causal), labelled=labelled, micros=micros)
        return _time(self.base, _with_update(work, shape, self.precision))

    def forward(
        self, shape: ModelShape, packing: Chunks | Rows, tokens: float, *, causal: bool, labelled: float
    ) -> float:
        """Return the seconds of a forward pass with loss: a third of training on the same tokens."""
        work = _training(shape, tokens, _reach(packing, causal), labelled=labelled, micros=0)
        return _time(self.base, work) / 3

    def tuning_step(
        self, shape: ModelShape, tokens: float, texts: float, *, precision: str = "", micros: int = 1
    ) -> float:
        """Return the seconds of one optimizer step of fine-tuning on `texts` texts with `tokens` tokens in total."""
        work = _tuning(self.base, shape, tokens, texts, precision or self.precision, micros)
        return _time(self.finetune, work)

    def scoring(self, shape: ModelShape, tokens: float, length: float = SCORED_LENGTH) -> float:
        """Return the seconds to score `tokens` tokens in texts of this mean length."""
        return _time(self.score, _scoring(self.base, shape, tokens, length))


def speeds_of(model: Mapping[str, Any], precision: str) -> Speeds | None:
    """Return the speeds that `fit` found in this precision, or None if it was not measured."""
    found = model["precisions"].get(precision)
    if found is None:
        return None
    kinds = found["measured"]
    return Speeds(
        precision,
        found["micro_tokens"],
        found["base"],
        pretrain="pretrain" in kinds,
        finetune=found["finetune"] if "finetune" in kinds else {},
        score=found["score"] if "score" in kinds else {},
        worst=max(found["worst"].values()),
    )


# ---------------------------------------------------------------- amounts of work


def _reach(packing: Chunks | Rows, causal: bool) -> tuple[str, float]:
    """Return which attention kernel is used, and over how many tokens each token attends."""
    whole = isinstance(packing, Rows) and not packing.document_mask
    return "rows" if whole else "varlen", packing.attended_length * (CAUSAL if causal else 1)


def _training(
    shape: ModelShape, tokens: float, reach: tuple[str, float], *, labelled: float, micros: float
) -> Terms:
    """Return the work of forward and backward over `tokens` tokens, without the optimizer update."""
    gemm = 6 * tokens * (shape.matrices + shape.embedding * labelled)
    logits = LOGIT_BYTES * tokens * labelled * (shape.vocab or 0)
    weights = WEIGHT_BYTES * micros * (shape.matrices + shape.embedding)
    kernel, looked_at = reach
    return {
        "gemm": gemm,
        "narrow": gemm / shape.hidden,
        kernel: 12 * tokens * shape.layers * shape.width * looked_at,
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


def fit(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Fit the speeds of a device to measured cases, separately for each precision; the result is JSON."""
    by_precision: dict[str, list[Mapping[str, Any]]] = {}
    for case in cases:
        _check(case)
        if case.get("packing") == "documents":
            continue  # the attended length depends on the text
        by_precision.setdefault(case.get("precision", "bf16"), []).append(case)
    if not by_precision:
        raise SpecError("there are no measured cases to fit; make some: biphase bench scale --save")
    return {"form": FORM, "precisions": {name: _fit(name, some) for name, some in by_precision.items()}}


def _fit(precision: str, cases: list[Mapping[str, Any]]) -> dict[str, Any]:
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
    finetune_speeds = _solve(tuned, tuned_took, TUNING_PRIOR)
    score_speeds = _solve(scored, scored_took, SCORING_PRIOR)
    sides = (
        (base, steps, took),
        (finetune_speeds, tuned, tuned_took),
        (score_speeds, scored, scored_took),
    )
    return {
        "measured": {kind: len(some) for kind, (_, some, _) in zip(KINDS, sides, strict=True) if some},
        # The largest error on the fitted cases themselves: what the form of the model cannot express.
        "worst": {kind: _worst(*side) for kind, side in zip(KINDS, sides, strict=True) if side[1]},
        "micro_tokens": float(median(case["rows"] * case["length"] for case in pretrain))
        if pretrain
        else 1.0,
        "base": base,
        "finetune": finetune_speeds,
        "score": score_speeds,
    }


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
    told = np.array(amounts) / (np.array(took)[:, None] * NOISE)
    expected = np.diag([1 / prior[name][1] for name in names])
    goal = np.concatenate([np.full(len(works), 1 / NOISE), expected.diagonal()])
    found, _ = nnls(np.concatenate([told, expected]), goal)
    return {name: float(share) * prior[name][0] for name, share in zip(names, found, strict=True)}


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


def _check(case: Mapping[str, Any]) -> None:
    needed = {
        "pretrain": ("size", "vocab", "objective", "packing", "length", "rows", "seconds"),
        "finetune": ("size", "vocab", "batch", "tokens", "seconds"),
        "score": ("size", "vocab", "tokens_per_second"),
    }
    kind = case.get("kind", "")
    if kind not in needed:
        raise SpecError(f"a measured case is of the kind {kind!r}; {nearest(kind, KINDS)}")
    lacking = [name for name in needed[kind] if name not in case]
    if lacking:
        raise SpecError(
            f"a measured {kind} case lacks {', '.join(lacking)}; measure again: biphase bench scale --save"
        )
    if case["size"] not in SIZES:
        raise SpecError(f"a measured case has the size {case['size']!r}; {nearest(case['size'], SIZES)}")
    number = case["tokens_per_second" if kind == "score" else "seconds"]
    if not (isinstance(number, int | float) and math.isfinite(number) and number > 0):
        raise SpecError(f"a measured {kind} case took {number!r}; measure again: biphase bench scale --save")


# ---------------------------------------------------------------- devices
# A device file holds its title, date and versions, the measured cases and the speeds fitted to them. If both the
# store and the shipped assets have a device, the store's file takes precedence; the shipped one adds precisions
# that it lacks.


SHIPPED = ASSETS / "devices"
MEASURE = "biphase bench scale --save"
PLANNED_DEVICE = "h200"  # assumed where this machine has no GPU
DRIVER = Path("/proc/driver/nvidia/gpus")
ASK_SECONDS = 5.0
# Cards that share a name with another but have fewer units or less power, or are a slice of one.
_VARIANTS = {"laptop", "mobile", "max", "d", "ti", "super", "mig"}
_MAKERS = re.compile(r"nvidia|amd|geforce|instinct|quadro|tesla|radeon|graphics|\(r\)|\(tm\)")


@dataclass(frozen=True)
class Origin:
    """When one precision was measured, and with which torch version."""

    date: str
    torch: str
    shipped: bool


@dataclass(frozen=True)
class PricedDevice:
    """A measured device: fitted speeds, and the measurements they come from."""

    name: str
    title: str  # the manufacturer's name
    model: dict[str, Any]  # the result of `fit`
    origins: dict[str, Origin]  # by precision
    cases: tuple[dict[str, Any], ...] = ()  # the measured steps that the model is fitted to

    def when(self, precisions: Collection[str]) -> str:
        """Say when these precisions were measured, and with which torch version."""
        each = {one: f"{self.origins[one].date}, torch {self.origins[one].torch}" for one in precisions}
        if len(set(each.values())) == 1:
            return f"measured {next(iter(each.values()))}"
        return f"measured {'; '.join(f'{one} {when}' for one, when in each.items())}"

    def completed_by(self, other: PricedDevice) -> PricedDevice:
        """Add the precisions that only `other` has; each precision is fitted separately, so they are independent."""
        precisions = other.model["precisions"] | self.model["precisions"]
        return replace(
            self,
            model=self.model | {"precisions": precisions},
            origins=other.origins | self.origins,
            cases=(*self.cases, *(one for one in other.cases if _precision(one) not in self.origins)),
        )

    def steps_behind(self, precisions: Collection[str]) -> str:
        """Say which measured steps the speeds in these precisions are fitted to, and how well."""
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
        """Return the sizes of which no pretraining step was measured."""
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
    """Return this machine's device as --device names it: its first NVIDIA GPU, or "cpu"."""
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
    """Return the name to type after --device, such as h200 for "NVIDIA H200"."""
    words = re.findall(r"[a-z0-9]+", _MAKERS.sub(" ", title.lower()))
    if not _VARIANTS & set(words):
        whole = {*words, *(one + other for one, other in pairwise(words))}  # "RTX 4090" is rtx4090
        for known in DEVICES:
            if known.removesuffix("-gcd") in whole:
                return known
    return "-".join(words) or "gpu"


def is_known(name: str, store: Store, shipped: Path = SHIPPED) -> bool:
    """Whether a device was measured, or its peak is known."""
    return name in DEVICES or name in _names(store.root / "devices") or name in _names(shipped)


def device_named(
    name: str, store: Store, shipped: Path = SHIPPED, *, measure: str = MEASURE
) -> PricedDevice | None:
    """Return the measured device of this name, or None if only its peak is known; refuse any other name.

    `measure`: the command that measures a device into this store, for messages.
    """
    folders = [folder for folder in (store.root / "devices", shipped) if name in _names(folder)]
    found = [_read(one / f"{name}.json", name, shipped=one == shipped, measure=measure) for one in folders]
    if found:
        return reduce(PricedDevice.completed_by, found)
    if name in DEVICES:
        return None
    known = sorted({*DEVICES, *_names(store.root / "devices"), *_names(shipped)})
    raise SpecError(f"there is no device {name!r}; {nearest(name, known)}")


def _names(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.json")}


def _read(path: Path, name: str, *, shipped: bool, measure: str) -> PricedDevice:
    try:
        told = read_checked(path)
        model = told.get("model")
        if not isinstance(model, dict) or model.get("form") != FORM:  # fitted by another version
            model = fit(told["cases"])
        for precision in model["precisions"]:
            speeds_of(model, precision)
        earlier = told.get("earlier", {})
        origins = {one: _origin(earlier.get(one, told), shipped) for one in model["precisions"]}
        return PricedDevice(name, str(told.get("device", name)), model, origins, tuple(told["cases"]))
    except (KeyError, TypeError, AttributeError, ValueError, BiphaseError):
        raise StoreError(f"{path} is no measured device; remove it, or measure it again: {measure}") from None


def _origin(told: dict[str, Any], shipped: bool) -> Origin:
    return Origin(str(told["date"])[:10], str(told["versions"]["torch"]).split("+")[0], shipped)


# ---------------------------------------------------------------- prices
#     training job   steps × seconds per step, and the held-out evaluations
#     fine-tuning    steps × seconds per step, scoring, and a fixed cost to start one and publish its scores
#
# Not counted: tokenizing, downloads, loading and compiling a model, checkpoints, and waiting for other processes.
# What has no price is left out and named in `notes`: a precision that was not measured, a model of unknown shape, a
# dataset of unknown text lengths.


DOUBTFUL = 0.15  # if a fit is off by more than this, other work probably ran during the measurement
LEAF_SECONDS = 0.3  # to restore weights, initialize a head, and publish scores

Grid = tuple[str, str]  # (key of a model, name of a task)


@dataclass(frozen=True)
class Prices:
    """Predicted seconds on one device; what is unknown is missing here and named in `notes`."""

    machine: PricedDevice
    jobs: dict[str, float]  # by the key of the job's checkpoint
    tunings: dict[Grid, float]  # seconds of one fine-tuning
    grids: dict[Grid, int]  # number of fine-tunings, including those without a price
    notes: tuple[str, ...]
    unmeasured: tuple[str, ...]  # the notes about precisions that were not measured
    precisions: tuple[str, ...]  # the precisions whose speeds were used
    priced: bool  # whether every training job has a price

    def pretraining(self, keys: Collection[str] | None = None) -> float:
        """Return the seconds of the training jobs `keys`, or of all."""
        return sum(seconds for key, seconds in self.jobs.items() if keys is None or key in keys)

    def finetuning(self, counts: Mapping[Grid, int] | None = None) -> float:
        """Return the seconds of `counts` fine-tunings of each grid, or of all."""
        counts = self.grids if counts is None else counts
        return sum(seconds * counts.get(grid, 0) for grid, seconds in self.tunings.items())


def price(plan: Plan, machine: PricedDevice, *, measure: str = MEASURE) -> Prices:
    """Predict the seconds of every training job and fine-tuning of a plan.

    `measure`: the command that measures a device, for messages.
    """
    made = _Pricing(plan, machine, measure)
    jobs = {key: took for key, job in plan.jobs.items() if (took := made.job(job)) is not None}
    tunings, grids = {}, {}
    runs = {key: one.run for key, one in (*plan.roots.items(), *plan.jobs.items())}
    for model, part in plan.tuned.items():
        for task, scored in lenders(part).items():
            grids[model, task.name] = len(part.lrs) * len(part.seeds)
            took = made.tuning(runs[model], part, task, list(scored))
            if took is not None:
                tunings[model, task.name] = took
    unmeasured = made.not_measured()
    return Prices(
        machine,
        jobs,
        tunings,
        grids,
        notes=(*made.told(), *unmeasured),
        unmeasured=unmeasured,
        precisions=tuple(made.used),
        priced=len(jobs) == plan.job_count,
    )


def left_of(plan: Plan, store: Store) -> dict[Grid, int]:
    """Return how many fine-tunings of each grid are left to run."""
    counts: dict[Grid, int] = {}
    for one in finetunings(plan):
        if not finished(one, store):
            counts[one.model, one.task.name] = counts.get((one.model, one.task.name), 0) + 1
    return counts


def prices_json(made: Prices, left: Collection[str], counts: Mapping[Grid, int]) -> dict[str, Any]:
    """Return prices for programs; `left` and `counts`: the training jobs and fine-tunings that are not done."""
    machine = made.machine
    return {
        "measured": {
            "device": machine.title,
            "precisions": {one: asdict(machine.origins[one]) for one in made.precisions},
        },
        "pretraining_hours": made.pretraining() / 3600,
        "finetuning_hours": made.finetuning() / 3600,
        "pretraining_hours_left": made.pretraining(left) / 3600,
        "finetuning_hours_left": made.finetuning(counts) / 3600,
        "jobs": [{"key": key, "seconds": seconds} for key, seconds in made.jobs.items()],
        "grids": [
            {
                "model": model,
                "task": task,
                "finetunings": count,
                "left": counts.get((model, task), 0),
                "seconds_each": made.tunings.get((model, task)),
            }
            for (model, task), count in made.grids.items()
        ],
    }


@dataclass
class _Pricing:
    """Prices a plan; caches shapes and sizes, and collects notes."""

    plan: Plan
    machine: PricedDevice
    measure: str  # the command that measures a device
    used: dict[str, None] = field(default_factory=dict)  # precisions by which something was priced
    notes: dict[str, None] = field(default_factory=dict)
    shapeless: dict[str, None] = field(default_factory=dict)  # names of models with unknown shape
    unmeasured: dict[str, dict[str, None]] = field(default_factory=dict)  # precision → kinds of work
    shapes: dict[Any, ModelShape | None] = field(default_factory=dict)
    sizes: dict[str, Sizes | None] = field(default_factory=dict)
    tunings: dict[tuple[ModelShape, int, str, tuple[str, ...]], float] = field(default_factory=dict)

    def job(self, job: TrainingJob) -> float | None:
        run = job.run
        shape, speeds = self._shape(run), self._speeds(run.precision, "pretraining")
        if shape is None or speeds is None:
            return None
        self.used[run.precision] = None
        if not isinstance(run.root.start, Size):
            self._say("models from elsewhere are priced as if they were of the shape that was measured")
        if run.adapter or run.freeze != "nothing":
            self._say("LoRA and frozen weights are priced as if all weights were trained: an upper bound")
        share, causal = run.labelled_share(job.first, job.step), job.objective.causal
        step = speeds.step(shape, run.packing, run.batch_tokens, causal=causal, labelled=share)
        return job.steps * step + self._heldout(job, shape, speeds)

    def _heldout(self, job: TrainingJob, shape: ModelShape, speeds: Speeds) -> float:
        """Return the seconds of held-out evaluation."""
        run, every = job.run, job.run.heldout_every
        often = job.step // every - job.first // every + (job.step % every != 0)
        began = run.phase_at(job.first).first
        tokens = run.heldout_tokens // run.packing.length * run.packing.length
        return often * sum(
            speeds.forward(
                shape,
                run.packing,
                tokens,
                causal=objective.causal,
                labelled=objective.labelled_share(run.packing, job.first - began, job.step - began),
            )
            for objective in heldout_objectives(job.objective)
        )

    def tuning(self, run: Pretrain, spec: Finetune, task: Task, scored: list[Task]) -> float | None:
        """Return the seconds of one fine-tuning on `task` and of scoring its model on the tasks `scored`."""
        shape = self._shape(run)
        precision = "fp32" if spec.precision == "fp32" else "bf16"
        speeds = self._speeds(precision, "fine-tuning")
        sizes = [self._sizes(one, spec) for one in (task, *scored)]
        if shape is None or speeds is None or any(one is None for one in sizes):
            return None
        self.used[precision] = None
        context = shape.context if not run.stages and shape.context else run.packing.length
        limit = spec.length or input_length(context)
        place = shape, limit, task.name, tuple(one.name for one in scored)
        if place not in self.tunings:
            reading = _Reading(speeds, shape, limit, spec)
            known = [one for one in sizes if one is not None]
            self.tunings[place] = reading.train(task, known[0]) + sum(
                reading.score(one, size) + LEAF_SECONDS for one, size in zip(scored, known[1:], strict=True)
            )
        return self.tunings[place]

    def _shape(self, run: Pretrain) -> ModelShape | None:
        start = run.root.start
        place = start, run.corpus if isinstance(start, Size) else ""
        if place not in self.shapes:
            try:
                self.shapes[place] = shape_of(run)
            except BiphaseError:  # a size that no run trains has no corpus to give its vocabulary
                self.shapes[place] = None
        if self.shapes[place] is None:
            self.shapeless[getattr(start, "source", "") or getattr(start, "name", "")] = None
        return self.shapes[place]

    def _speeds(self, precision: str, what: str) -> Speeds | None:
        speeds = speeds_of(self.machine.model, precision)
        kinds = {"pretraining": ["pretrain"], "fine-tuning": ["finetune", "score"]}[what]
        if speeds and all(getattr(speeds, kind) for kind in kinds):
            if speeds.worst > DOUBTFUL:
                self._say(
                    f"the measured steps of {self.machine.name} contradict each other by up to {speeds.worst:.0%}, so these "
                    f"hours are rough. With nothing else running, type: {self.measure}"
                )
            return speeds
        self.unmeasured.setdefault(precision, {})[what] = None
        return None

    def _sizes(self, task: Task, spec: Finetune) -> Sizes | None:
        if task.name not in self.sizes:
            self.sizes[task.name] = sizes_of(task, spec.documents)
        sizes = self.sizes[task.name]
        countable = sizes is not None and not (task.epochs and sizes.train and not sizes.train[0].rows)
        if not countable:
            self._say(f"lengths of {task.name} are not known: its fine-tunings are left out")
        return sizes if countable else None

    def _say(self, note: str) -> None:
        self.notes[note] = None

    def told(self) -> tuple[str, ...]:
        """Return the notes, except those about precisions."""
        lines = list(self.notes)
        if self.shapeless:
            name, *others = self.shapeless
            these = f"{name} and {counted(len(others), 'other')}" if others else name
            lines.append(f"the shape of {these} is not known here: what is made of it is left out")
        return tuple(lines)

    def not_measured(self) -> tuple[str, ...]:
        """Return a note for each precision that was not measured."""
        lines = []
        for precision, what in self.unmeasured.items():
            verb = "were" if len(what) > 1 else "was"
            lines.append(
                f"{' and '.join(what)} in {precision} {verb} not measured on {self.machine.name} and left out. "
                f"There, type: {self.measure} --precision {precision}"
            )
        return tuple(lines)


@dataclass(frozen=True)
class _Reading:
    """Predicts training and scoring seconds of one model on the tasks of a study."""

    speeds: Speeds
    shape: ModelShape
    limit: int
    spec: Finetune

    @property
    def vocab(self) -> int:
        return self.shape.vocab or 2**17  # unknown: so large that its exact size hardly matters

    def train(self, task: Task, sizes: Sizes) -> float:
        examples, tokens = (
            float(sizes.train[0].rows),
            sum(one.tokens(self.vocab, self.limit) for one in sizes.train),
        )
        if self._in_windows(task):
            windows, tokens = sizes.train[0].windows(self.vocab, self.limit)
            examples *= windows
        steps = math.ceil(examples / task.batch) * task.epochs if task.epochs else task.steps
        batch = min(task.batch, examples) if examples else task.batch
        share = token_share(self.shape.layers, self.shape.width)
        micros = math.ceil(batch * tokens / (FINETUNE_TOKENS * share))
        precision = self.spec.precision
        texts = batch * len(sizes.train)
        return steps * self.speeds.tuning_step(
            self.shape, batch * tokens, texts, precision=precision, micros=micros
        )

    def score(self, task: Task, sizes: Sizes) -> float:
        seconds = 0.0
        for texts in sizes.scored:
            count, tokens = 1.0, texts.tokens(self.vocab, self.limit)
            if self._in_windows(task):
                count, tokens = texts.windows(self.vocab, self.limit)
            seconds += self.speeds.scoring(self.shape, texts.rows * count * tokens, tokens)
        return seconds

    def _in_windows(self, task: Task) -> bool:
        return task.family == "QA" and self.spec.protocol == "standard"
