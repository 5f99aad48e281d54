"""How many rows of logits exist at a time (the loss cuts by it, plans of memory count by it), and how wide a GPU wants them. No torch."""

from __future__ import annotations

# Logits that exist at a time: 64 MB in fp32 for a CPU's caches and memory, 1 GB in 16 bits for a GPU that wants large
# products.
SLICE = {"cpu": 2**24, "cuda": 2**29}
SLICES = (
    4  # at least, where a quarter of the rows is enough for such products: small batches are short of memory
)
ENOUGH = 2**11
EVEN = 128  # a GPU's products want rows in such numbers
WORDS = 64  # and words: of 49,153 (a tokenizer and its mask) each row of logits would begin at an odd address


def rows_of_a_slice(count: int, vocab: int, kind: str) -> int:
    """Slices of `count` rows, as few as memory allows and all alike."""
    most = max(1, SLICE.get(kind, SLICE["cpu"]) // vocab // EVEN) * EVEN
    slices = max(-(-count // most), min(SLICES, count // ENOUGH), 1)
    return max(1, -(-count // slices // EVEN)) * EVEN


def words_of_a_row(vocab: int, kind: str) -> int:
    """How many words products are made with: those behind the vocabulary are zeros."""
    return -(-vocab // WORDS) * WORDS if kind == "cuda" else vocab
