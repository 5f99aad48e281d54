"""Constants and small functions that planning and computing share, each written once. This module imports no torch.

What is computed by them: how logits are sliced, how many rows a micro-batch has, how long inputs of fine-tuning are,
which objectives are evaluated on held-out text.
"""

from __future__ import annotations

from biphase.specs import CLM, MLM, RowObjective

GIB = 2**30
KEY_DIGITS = 6  # hex digits of a key that people see and type

# ---------------------------------------------------------------- pretraining

# Tokens per micro-batch: on a CPU, on a GPU, and on a GPU with more memory than LARGE_GPU.
MICRO_TOKENS = {"cpu": 8_192, "cuda": 24_576, "large": 49_152}
LARGE_GPU = 100 * GIB
# Below this many tokens per micro-batch memory is assumed to be short, so our kernels recompute norms and the FFN's
# activations (1% of the time).
RECOMPUTE_TOKENS = 2**15
# Measured for every run; a run's own objectives are added if they are others.
HELDOUT_OBJECTIVES: tuple[RowObjective, ...] = (CLM(), MLM(0.4))


def micro_rows(memory: float, rows: int, length: int) -> int:
    """Return the default rows per micro-batch: enough tokens to keep a device with `memory` bytes busy; 0: a CPU."""
    tokens = MICRO_TOKENS["cpu" if not memory else "large" if memory > LARGE_GPU else "cuda"]
    most = max(1, min(rows, tokens // length))
    # Prefer equal micro-batches if they are at least half as large: a smaller last one is another shape to compile.
    return next((count for count in range(most, most // 2, -1) if rows % count == 0), most)


def supported_head_width(width: int) -> bool:
    """Return whether our GPU kernels support heads of this width."""
    return width % 16 == 0 and 16 <= width <= 128


def heldout_objectives(*own: RowObjective) -> tuple[RowObjective, ...]:
    """Return the held-out objectives to measure while `own` are trained."""
    return tuple(dict.fromkeys((*HELDOUT_OBJECTIVES, *own)))


# ---------------------------------------------------------------- the slicing of logits

# Logits per slice: 64 MB in fp32 for a CPU's caches and memory, 1 GB in 16 bits for a GPU, which needs large matmuls.
SLICE_LOGITS = {"cpu": 2**24, "cuda": 2**29}
# At least this many slices on a CPU, as long as each has SLICE_ROWS rows for an efficient matmul: it saves memory in
# small batches. On a GPU small batches need little memory, and fewer slices are up to 3% faster.
SLICES = {"cpu": 4, "cuda": 1}
SLICE_ROWS = 2**11
ROW_MULTIPLE = 128  # GPU matmuls are efficient with row counts that are a multiple of this
# Vocab rows are padded to a multiple of this: with 49,153 (a tokenizer plus its mask token) the rows of logits would
# begin at odd addresses.
VOCAB_MULTIPLE = 64


def rows_per_slice(count: int, vocab: int, device: str) -> int:
    """Return the rows per slice for `count` labelled rows: the fewest slices allowed, of equal size."""
    most = max(1, SLICE_LOGITS.get(device, SLICE_LOGITS["cpu"]) // vocab // ROW_MULTIPLE) * ROW_MULTIPLE
    least = SLICES.get(device, SLICES["cpu"])
    slices = max(-(-count // most), min(least, count // SLICE_ROWS), 1)
    return max(1, -(-count // slices // ROW_MULTIPLE)) * ROW_MULTIPLE


def padded_vocab(vocab: int, device: str) -> int:
    """Return the padded number of vocab rows that matmuls use; the rows beyond the vocabulary are zeros."""
    return -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE if device == "cuda" else vocab


# ---------------------------------------------------------------- fine-tuning

SHARE_OF_CONTEXT = 0.99  # 2,028 of 2,048 tokens
WINDOW_OVERLAP = 128
FINETUNE_TOKENS = 32_768  # most tokens per micro-batch on a GPU, for a model of REFERENCE_SIZE
REFERENCE_SIZE = 12 * 768  # layers × width


def input_length(context: int) -> int:
    """Return the longest input in tokens for a model's context, unless the study sets a length."""
    return round(SHARE_OF_CONTEXT * context)


def window_overlap(length: int) -> int:
    """Return the tokens that consecutive windows of `length` tokens over a long context share."""
    return min(WINDOW_OVERLAP, length // 4)


def token_share(layers: int, width: int) -> float:
    """Return the share of a token budget that a model gets: larger models than REFERENCE_SIZE get less."""
    return min(1.0, REFERENCE_SIZE / (layers * width))
