"""Everything random in the data path is a function of counters; there is no generator and no state.

`hash32(seed, purpose, draws, positions)` gives each (draw, position) 32 uniform bits by integer arithmetic
alone, so CPU and GPU, one process or a hundred, a fresh run or a resumed one, all see the same bits.
Values live in int64 tensors between 0 and 2³²: there shifts to the right bring in zeros, and of a product
only the low 32 bits are kept, which wrap the same way everywhere.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

LOW32 = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """Scramble 32-bit values so that each input bit turns half of the output bits (MurmurHash3's finaliser)."""
    x = x ^ (x >> 16)
    x = x.mul_(0x85EBCA6B).bitwise_and_(LOW32)
    x = x.bitwise_xor_(x >> 13)
    x = x.mul_(0xC2B2AE35).bitwise_and_(LOW32)
    return x.bitwise_xor_(x >> 16)


def mix_int(x: int) -> int:
    """`mix` of one Python integer."""
    x &= LOW32
    x ^= x >> 16
    x = x * 0x85EBCA6B & LOW32
    x ^= x >> 13
    x = x * 0xC2B2AE35 & LOW32
    return x ^ x >> 16


def salt(seed: int, purpose: str, epoch: int = 0) -> int:
    """One 32-bit number per (seed, purpose, epoch): what separates masks from cuts and seeds from seeds."""
    h = mix_int(zlib.crc32(purpose.encode()) ^ 0x9E3779B9)
    for part in (seed, epoch & LOW32, epoch >> 32):
        h = mix_int(h ^ mix_int(part + 0x7F4A7C15))
    return h


def hash_samples(seed: int, purpose: str, draws: Tensor) -> Tensor:
    """32 uniform bits for each draw. (B,) → (B,)"""
    low, high = draws & LOW32, draws >> 32
    return mix(mix(low ^ salt(seed, purpose)) ^ mix(high + 0x51ED270B))


def hash32(seed: int, purpose: str, draws: Tensor, length: int) -> Tensor:
    """32 uniform bits for each position of each draw. (B,) → (B, length)"""
    positions = torch.arange(length, device=draws.device)
    column = mix(positions ^ salt(seed, f"{purpose}/position"))  # one scramble per position, shared by rows
    return mix(hash_samples(seed, purpose, draws)[:, None] ^ column[None, :])


def threshold(share: float) -> int:
    """Hashes below this are the chosen ones. Lower shares choose subsets of what higher shares choose."""
    return int(share * 2**32)


def below(bits: Tensor, n: int) -> Tensor:
    """Uniform integers in [0, n) from 32 uniform bits."""
    return (bits * n) >> 32


def permute(index: Tensor, n: int, key: int) -> Tensor:
    """Where `index` goes in a pseudo-random permutation of range(n), without ever storing it.

    A Feistel network over the next power of two; what lands outside range(n) walks on until it is inside.
    At 48 million rows (100 billion tokens) a stored permutation would cost 390 MB a process; this costs
    six hashes a row.
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
