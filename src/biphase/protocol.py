"""Constants and rules that computing and planning share: the slicing of logits, the lengths of fine-tuning inputs.

The loss slices by these functions and memory estimates count by them; fine-tuning cuts texts at these lengths and
prices count by them. This module does not import torch.
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


# ---------------------------------------------------------------- fine-tuning


SHARE_OF_CONTEXT = 0.99  # longest input relative to the context, as in the paper: 2,028 of 2,048 tokens
STRIDE = 128  # tokens that consecutive windows of a long context share
TUNED_TOKENS = 32_768  # most tokens of a micro-batch on a GPU, for a model of the usual size
USUAL_SIZE = 12 * 768  # layers × width of that model; larger models get smaller micro-batches
