"""The slicing of logits: how many rows exist at a time, and how wide they are padded for a GPU.

The loss slices by these functions and memory estimates count by them. This module does not import torch.
"""

from __future__ import annotations

# Logits per slice: 64 MB in fp32 for a CPU's caches and memory, 1 GB in 16 bits for a GPU, which needs large matmuls.
SLICE = {"cpu": 2**24, "cuda": 2**29}
# At least this many slices, as long as each has ENOUGH rows for an efficient matmul: it saves memory in small batches.
SLICES = 4
ENOUGH = 2**11
EVEN = 128  # GPU matmuls are efficient with row counts that are a multiple of this
# Vocab rows are padded to a multiple of this: with 49,153 (a tokenizer plus its mask token) the rows of logits would
# begin at odd addresses.
WORDS = 64


def rows_of_a_slice(count: int, vocab: int, kind: str) -> int:
    """Return the rows per slice for `count` labelled rows: the fewest slices allowed, of equal size."""
    most = max(1, SLICE.get(kind, SLICE["cpu"]) // vocab // EVEN) * EVEN
    slices = max(-(-count // most), min(SLICES, count // ENOUGH), 1)
    return max(1, -(-count // slices // EVEN)) * EVEN


def words_of_a_row(vocab: int, kind: str) -> int:
    """Return the padded number of vocab rows that matmuls use; the rows beyond the vocabulary are zeros."""
    return -(-vocab // WORDS) * WORDS if kind == "cuda" else vocab
