"""One label for a text: accuracy example by example, and macro F1 and MCC of a whole set.

Macro F1 and Matthews' correlation are computed from a confusion matrix, as scikit-learn defines them; they are no means
over examples. A model that gives every text the same label has an MCC of 0, whatever its accuracy.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def accuracy(predicted: NDArray[np.integer], gold: NDArray[np.integer]) -> NDArray[np.float32]:
    """1 for each example whose label is right, 0 for each other."""
    if predicted.shape != gold.shape:  # comparing would stretch the shorter one
        raise ValueError(f"{predicted.shape} predicted labels cannot be held against {gold.shape} gold ones")
    return (predicted == gold).astype(np.float32)


def confusion(predicted: NDArray[np.integer], gold: NDArray[np.integer], labels: int) -> NDArray[np.float64]:
    """How often each gold label (rows) was predicted as each label (columns)."""
    return np.bincount(gold * labels + predicted, minlength=labels**2).reshape(labels, labels).astype(float)


def confusion_by_chance(gold: NDArray[np.integer], labels: int) -> NDArray[np.float64]:
    """The expected confusion of guessing each label equally often, whatever the text."""
    return np.outer(np.bincount(gold, minlength=labels), np.full(labels, 1 / labels))


def label_scores(counts: NDArray[np.float64]) -> dict[str, float]:
    """Every score of a confusion matrix."""
    right = float(np.trace(counts) / counts.sum())
    return {"accuracy": right, "macro_f1": macro_f1(counts), "mcc": mcc(counts)}


def macro_f1(counts: NDArray[np.float64]) -> float:
    """The unweighted mean of each label's F1, over the labels that occur among gold or predicted ones."""
    occurs = counts.sum(axis=0) + counts.sum(axis=1)  # F1 = 2 right / (predicted + gold)
    return float((2 * np.diag(counts)[occurs > 0] / occurs[occurs > 0]).mean())


def mcc(counts: NDArray[np.float64]) -> float:
    """Matthews' correlation of any number of labels, between -1 and 1; 0 where all predicted or all gold are alike."""
    total, predicted, gold = counts.sum(), counts.sum(axis=0), counts.sum(axis=1)
    spread = (total**2 - predicted @ predicted) * (total**2 - gold @ gold)
    return float((np.trace(counts) * total - predicted @ gold) / math.sqrt(spread)) if spread > 0 else 0.0
