"""One label for a text: is it the right one?"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def accuracy(predicted: NDArray[np.integer], gold: NDArray[np.integer]) -> NDArray[np.float32]:
    """1 for each example whose label is right, 0 for each other."""
    if predicted.shape != gold.shape:  # comparing would stretch the shorter one
        raise ValueError(f"{predicted.shape} predicted labels cannot be held against {gold.shape} gold ones")
    return (predicted == gold).astype(np.float32)
