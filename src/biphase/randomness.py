"""Counter-based randomness for the data path: every random value is a hash of counters, without a generator or state.

`hash32(seed, purpose, samples, length)` gives each (sample index, position) 32 uniform bits by integer arithmetic
alone, so CPU and GPU, any number of processes, and fresh and resumed runs all get the same bits. `permute` shuffles
without storing the permutation.

Values are int64 tensors in [0, 2³²): right shifts bring in zeros, and only the low 32 bits of a product are kept, which
overflow the same way on every device.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

LOW32 = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """Hash 32-bit values with MurmurHash3's finalizer: each input bit flips half of the output bits on average."""
    x = x ^ (x >> 16)
    x = x.mul_(0x85EBCA6B).bitwise_and_(LOW32)
    x = x.bitwise_xor_(x >> 13)
    x = x.mul_(0xC2B2AE35).bitwise_and_(LOW32)
    return x.bitwise_xor_(x >> 16)


def mix_int(x: int) -> int:
    """Apply `mix` to one Python integer."""
    x &= LOW32
    x ^= x >> 16
    x = x * 0x85EBCA6B & LOW32
    x ^= x >> 13
    x = x * 0xC2B2AE35 & LOW32
    return x ^ x >> 16


def salt(seed: int, purpose: str, epoch: int = 0) -> int:
    """Return a 32-bit number for (seed, purpose, epoch), so that e.g. masks and cuts get independent hashes."""
    h = mix_int(zlib.crc32(purpose.encode()) ^ 0x9E3779B9)
    for part in (seed, epoch & LOW32, epoch >> 32):
        h = mix_int(h ^ mix_int(part + 0x7F4A7C15))
    return h


def hash_samples(seed: int, purpose: str, samples: Tensor) -> Tensor:
    """Return 32 uniform bits for each sample index. (B,) → (B,)"""
    low, high = samples & LOW32, samples >> 32
    return mix(mix(low ^ salt(seed, purpose)) ^ mix(high + 0x51ED270B))


def hash32(seed: int, purpose: str, samples: Tensor, length: int) -> Tensor:
    """Return 32 uniform bits for each position of each sample index. (B,) → (B, length)"""
    positions = torch.arange(length, device=samples.device)
    column = mix(positions ^ salt(seed, f"{purpose}/position"))  # one hash per position, shared by all rows
    return mix(hash_samples(seed, purpose, samples)[:, None] ^ column[None, :])


def threshold(share: float) -> int:
    """Return the bound below which hashes are selected. A lower share selects a subset of what a higher one selects."""
    return int(share * 2**32)


def below(bits: Tensor, n: int) -> Tensor:
    """Map 32 uniform bits to uniform integers in [0, n)."""
    return (bits * n) >> 32


def permute(index: Tensor, n: int, key: int) -> Tensor:
    """Map `index` through a pseudo-random permutation of range(n) that is never stored.

    A Feistel network permutes the next power of two; a value outside range(n) is permuted again until it is inside
    (cycle walking). At 48 million rows (100 billion tokens) a stored permutation would take 390 MB per process; this
    takes six hashes per row.
    """
    right_bits = (max(n - 1, 1).bit_length() + 1) // 2
    left_bits = max(max(n - 1, 1).bit_length() - right_bits, 1)
    x = _feistel(index, left_bits, right_bits, key)
    while (outside := x >= n).any():
        x = torch.where(outside, _feistel(x, left_bits, right_bits, key), x)
    return x


def _feistel(x: Tensor, left_bits: int, right_bits: int, key: int) -> Tensor:
    left, right = x >> right_bits, x & ((1 << right_bits) - 1)
    for turn in range(6):
        width = left_bits if turn % 2 == 0 else right_bits
        left, right = right, left ^ (mix(right ^ mix_int(key + turn * 0x9E3779B9)) & ((1 << width) - 1))
    return left << right_bits | right
