"""The bootstrap over test examples: what the scores would be on other test sets like this one.

All models and seeds of a task are scored on the same resamples, in one call or in several: a resample follows from the
task's name and the number of its examples. So differences of draws are paired, and a mean over seeds, or over tasks,
is a mean of draws.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from biphase.report.statistics.intervals import quantile

Floats = NDArray[np.float64]
Values = NDArray[np.float32] | NDArray[np.float64]

DRAWS = 1000
BLOCK = 64 * 2**20  # bytes of weights at a time
RESOLUTION = 2e-6  # sums of float32 differ by less; a spread below it is none


def scores(values: Values) -> Floats:
    """Of values (K, examples): their mean. Of counts (K, examples, 3) of right, said and true: micro F1."""
    return _scored([part.sum(axis=1, dtype=np.float64) for part in _parts(values)], values.shape[1])


def resample(values: Values, *, seed: str, draws: int = DRAWS) -> Floats:
    """The scores (draws, K) of values (K, examples), or of counts (K, examples, 3), on resampled examples.

    `seed` is the task's name. A row with NaN gives NaN, and disturbs no other.
    """
    parts = _parts(values)
    sums = [np.empty((draws, len(values))) for _ in parts]
    done = 0
    for weights in _weights(seed, values.shape[1], draws):
        block = slice(done, done + len(weights))
        for part, total in zip(parts, sums, strict=True):
            with np.errstate(invalid="ignore"):
                total[block] = weights @ part.T
        done += len(weights)
    return _scored(sums, values.shape[1])


def interval(draws: Floats, point: Floats, *, examples: int, level: float = 0.95) -> tuple[Floats, Floats]:
    """Low and high for points (…) from their draws (draws, …): the wider, on each side, of two intervals.

    One is point ∓ t · se, which skew misleads. The other is BCa widened as t is wider than a normal (Hesterberg 2015),
    which follows skew but is too narrow for differences that are mostly 0. Together they hold their level also for 43
    queries: docs/statistics.md. NaN: the draws do not differ.
    """
    from scipy.special import ndtr

    wide = quantile(examples - 1, 1 - level)
    small = np.sqrt(
        examples / (examples - 1)
    )  # a resample's variance is that of the population, not of a sample
    centred = draws - draws.mean(axis=0)
    sd = np.sqrt(np.square(centred).mean(axis=0))
    known = sd > RESOLUTION * np.maximum(1, np.abs(point))
    sd = np.where(known, sd, np.nan)
    half = wide * small * sd
    # Of a mean, bias correction and acceleration are the same: a sixth of the skewness of its draws.
    skew = (centred**3).mean(axis=0) / sd**3 / 6
    ordered = np.sort(draws, axis=0)
    low, high = (
        _at(ordered, ndtr(skew + (skew + z) / (1 - skew * (skew + z)))) for z in (-small * wide, small * wide)
    )
    return np.minimum(point - half, low), np.maximum(point + half, high)


def _parts(values: Values) -> list[NDArray[np.float32]]:
    """What is summed over examples: the values; or right, and said + true."""
    if values.ndim == 2:
        return [values.astype(np.float32, copy=False)]
    if values.ndim != 3 or values.shape[2] != 3:
        raise ValueError(
            f"values of shape {values.shape} where (K, examples) or (K, examples, 3) is expected"
        )
    return [
        values[:, :, 0].astype(np.float32),
        (values[:, :, 1] + values[:, :, 2]).astype(np.float32, copy=False),
    ]


def _scored(sums: list[Floats], examples: int) -> Floats:
    if len(sums) == 1:
        return sums[0] / examples
    right, named = sums
    # As seqeval: 0 where nothing is found rightly, also where there was nothing to find.
    return np.divide(2 * right, named, out=np.where(np.isnan(named), np.nan, 0.0), where=named > 0)


def _weights(seed: str, examples: int, draws: int) -> Iterator[NDArray[np.float32]]:
    """How often each example is drawn in each resample, (draws, examples), a block of draws at a time."""
    digest = hashlib.sha256(f"{seed}:{examples}".encode()).digest()
    chance = np.random.default_rng(int.from_bytes(digest[:16]))
    rows = max(1, min(draws, BLOCK // (4 * examples)))
    block = np.empty((rows, examples), dtype=np.float32)
    for first in range(0, draws, rows):
        some = block[: min(rows, draws - first)]
        for row in some:
            row[:] = np.bincount(chance.integers(0, examples, examples), minlength=examples)
        yield some


def _at(ordered: Floats, share: Floats) -> Floats:
    """The value of sorted draws below which this share of them lies, each point at its own share."""
    most = len(ordered) - 1
    place = np.clip(np.nan_to_num(share) * (most + 2) - 1, 0, most)
    below = np.floor(place).astype(np.intp)[None]
    lower, upper = (np.take_along_axis(ordered, at, axis=0)[0] for at in (below, np.minimum(below + 1, most)))
    return np.where(np.isnan(share), np.nan, lower + (place - below[0]) * (upper - lower))
