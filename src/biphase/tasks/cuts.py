"""Validation cut off from another part, exactly as `datasets.Dataset.train_test_split` does it."""

from __future__ import annotations

import numpy

from biphase.specs import Splits


def cut(count: int, splits: Splits) -> tuple[list[int], list[int]]:
    """Of `count` rows, the places of those that go to validation and of the rest, each in a permuted order."""
    order = numpy.random.default_rng(splits.seed).permutation(count).tolist()
    first = count - int((1 - splits.cut) * count)
    return order[:first], order[first:]
