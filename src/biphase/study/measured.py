"""How fast a device is, from a few measured steps: `biphase bench scale --save` measures, `biphase plan` predicts.

A step costs what its parts cost, each an amount of work that is known beforehand times a speed that is fitted:

    gemm      FLOPs of the matrix products, head included      ┐ together a rate of peak × d / (d + d0):
    narrow    the same over the width d of the model           ┘ narrow matrices are slower
    rows      FLOPs of attention within whole rows             two kernels,
    varlen    FLOPs of attention within chunks or texts        so two speeds
    bytes     what is moved: activations, logits, weights, gradients and moments
    launches  layers × micro-batches: what a layer costs however little it has to do

A fine-tuning step is a share of the same work, at few tokens: reading the weights and updating them outweigh
computing there. (A product of M rows that must also read its weights reaches M / (M + M0) of its rate, so the two times
add up; their maximum is the same where one is much larger.) Scoring is a share of the forward pass.

There are about as many speeds as measured steps, and noise in these. So each speed is pulled, weakly, to what it
is on an H200, slowed by one factor to the device at hand: what the steps do not tell stays plausible, and a size that
was not measured is not extrapolated from noise. Speeds are never negative. Errors count relative to the step.

Prediction is plain arithmetic; only `fit` needs numpy and scipy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from biphase.errors import SpecError, nearest
from biphase.presets import SIZES
from biphase.specs import CLM, MLM, Chunks, Rows
from biphase.study.costs import Shape, attended_length, labelled_share, shape_of_size

FORM = 1  # of what `fit` gives; raised when its terms change, and devices are fitted anew from their cases

CAUSAL = 0.65  # of full attention; half the FLOPs, but blocks on the diagonal are computed whole
LOGIT_BYTES = 10  # a logit is written, read for its loss, replaced by its gradient, and read twice
WEIGHT_BYTES = 12  # a micro-batch reads a bf16 weight three times, and adds to its fp32 gradient
UPDATE_BYTES = {"fp32": 28, "bf16": 30, "fp8": 31, "pure-bf16": 14}  # AdamW, a parameter; and its bf16 copy
SCORED_LENGTH = 120  # tokens of the texts that bench scores

NOISE = 0.03  # of a measured step
# On an H200: seconds of a unit of work, and how far from this a device may be, as a share.
PRIOR = {
    "gemm": (1 / 800e12, 0.3),
    "narrow": (150 / 800e12, 1.0),
    "rows": (1 / 350e12, 0.5),
    "varlen": (1 / 250e12, 0.5),
    "bytes": (1 / 3.5e12, 0.5),
    "launches": (5e-5, 2.0),
}
# Shares of what pretraining takes, and then seconds: of a layer, of a step.
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
    """The fitted speeds of a device in one precision: seconds of a unit of each kind of work. Empty: not measured."""

    precision: str
    micro_tokens: float  # of a micro-batch, as they were measured
    base: Terms
    pretrain: bool
    finetune: Terms
    score: Terms
    worst: float  # relative error on the measured cases themselves

    def step(
        self, shape: Shape, packing: Chunks | Rows, tokens: float, *, causal: bool, labelled: float
    ) -> float:
        """Seconds of one optimizer step of pretraining."""
        micros = max(1, math.ceil(tokens / self.micro_tokens))
        work = _training(shape, tokens, _reach(packing, causal), labelled=labelled, micros=micros)
        return _time(self.base, _with_update(work, shape, self.precision))

    def forward(
        self, shape: Shape, packing: Chunks | Rows, tokens: float, *, causal: bool, labelled: float
    ) -> float:
        """Seconds of a forward pass with its loss: a third of what training on it takes."""
        work = _training(shape, tokens, _reach(packing, causal), labelled=labelled, micros=0)
        return _time(self.base, work) / 3

    def tuning_step(
        self, shape: Shape, tokens: float, texts: float, *, precision: str = "", micros: int = 1
    ) -> float:
        """Seconds of one optimizer step on `texts` texts of `tokens` tokens in all."""
        work = _tuning(self.base, shape, tokens, texts, precision or self.precision, micros)
        return _time(self.finetune, work)

    def scoring(self, shape: Shape, tokens: float, length: float = SCORED_LENGTH) -> float:
        """Seconds to read `tokens` tokens in texts of this mean length."""
        return _time(self.score, _scoring(self.base, shape, tokens, length))


def speeds_of(model: Mapping[str, Any], precision: str) -> Speeds | None:
    """What `fit` found in this precision, if it was measured."""
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
    """Which kernel attention takes, and over how many tokens each looks."""
    whole = isinstance(packing, Rows) and not packing.document_mask
    return "rows" if whole else "varlen", attended_length(packing) * (CAUSAL if causal else 1)


def _training(
    shape: Shape, tokens: float, reach: tuple[str, float], *, labelled: float, micros: float
) -> Terms:
    """Forward and backward over `tokens` tokens, without the update."""
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


def _activations(shape: Shape, tokens: float) -> float:
    """Bytes that norms, rotations, gates and sums move, forward and backward."""
    return tokens * shape.layers * (60 * shape.hidden + 18 * shape.ffn)


def _with_update(work: Terms, shape: Shape, precision: str) -> Terms:
    return work | {"bytes": work["bytes"] + UPDATE_BYTES[precision] * shape.parameters}


def _tuning(base: Terms, shape: Shape, tokens: float, texts: float, precision: str, micros: int) -> Terms:
    """The parts of a fine-tuning step; the first three in the seconds that pretraining would take for them."""
    body = _training(shape, tokens, ("varlen", tokens / texts), labelled=0, micros=0)
    parameters = shape.parameters - shape.head  # the vocabulary's head is not there
    return {
        "compute": _time(base, body),
        "weights": base["bytes"] * WEIGHT_BYTES * shape.matrices * micros,
        "update": base["bytes"] * UPDATE_BYTES[precision] * parameters,
        "launches": shape.layers * micros,
        "steps": 1,
    }


def _scoring(base: Terms, shape: Shape, tokens: float, length: float) -> Terms:
    work = _tuning(base, shape, tokens, tokens / length, "fp32", 1)
    return {"compute": work["compute"] / 3, "tokens": tokens}


def _time(speeds: Mapping[str, float], work: Mapping[str, float]) -> float:
    return sum(speeds[name] * amount for name, amount in work.items() if amount)


# ---------------------------------------------------------------- fitting


def fit(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The speeds of a device by measured cases, each precision by itself. The result is JSON."""
    by_precision: dict[str, list[Mapping[str, Any]]] = {}
    for case in cases:
        _check(case)
        if case.get("packing") == "documents":
            continue  # how far attention reaches there depends on the text
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
        # The largest error on the cases themselves: what the form of the model cannot follow.
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
    """How many times slower than an H200: in the middle of the pretraining cases, or else of the fine-tunings."""
    if steps:
        return median(seconds / _time(usual, work) for seconds, work in zip(took, steps, strict=True))
    shares = {name: value for name, (value, _) in TUNING_PRIOR.items()}
    ratios = [case["seconds"] / _time(shares, _tuned_work(usual, case, precision)) for case in finetune]
    return median(ratios) if ratios else 1.0


def _solve(
    works: list[Terms], took: list[float], prior: Mapping[str, tuple[float, float]]
) -> dict[str, float]:
    """Speeds ≥ 0 with the least squares of relative errors and of departures from the prior, each in its spread."""
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


def _case_shape(case: Mapping[str, Any]) -> Shape:
    return shape_of_size(SIZES[case["size"]], case["vocab"])


def _case_work(case: Mapping[str, Any], precision: str) -> Terms:
    """A measured step of pretraining: one micro-batch, one update."""
    packing = Chunks(case["length"]) if case["packing"] == "chunks" else Rows(case["length"])
    causal = case["objective"] == "clm"
    labelled = labelled_share(CLM() if causal else MLM(case["ratio"]), packing, 0, 1)
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
