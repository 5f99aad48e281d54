"""The trunk of EuroBERT and Llama with its own backward pass: the same weights, fewer trips to memory, no compiler."""

from biphase.models.fused.trunk import FusedTrunk, refusal

__all__ = ["FusedTrunk", "refusal"]
