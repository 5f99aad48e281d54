"""Task heads on an encoder: pooling, and small layers whose weights are initialized from a seed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from biphase.models.encoder import PackedTexts


def mean_pool(hidden: Tensor, packed: PackedTexts) -> Tensor:
    """Return the mean hidden state over all tokens of each text, in fp32. (B, T, d) → (n, d)

    Each sum runs in the order of the tokens, so the result is deterministic.
    """
    reduce = torch.segment_reduce  # ty: ignore[missing-attribute]  (missing in torch's stubs)
    # unsafe=True: lengths are not checked on the host, and padding after the last text is ignored.
    return reduce(packed.tokens(hidden).float(), "mean", lengths=packed.lengths, unsafe=True)


class TextHead(nn.Module):
    """The paper's classification head: mean pooling → Linear → GELU → Linear."""

    def __init__(self, width: int, labels: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.out = nn.Linear(width, labels)

    def forward(self, hidden: Tensor, packed: PackedTexts) -> Tensor:
        """(B, T, d) → (n, labels)"""
        pooled = mean_pool(hidden, packed).to(self.dense.weight.dtype)
        return self.out(nn.functional.gelu(self.dense(pooled)))


class TokenHead(nn.Module):
    """One Linear on every token: for tags, answer tokens, or start and end."""

    def __init__(self, width: int, labels: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, labels)

    def forward(self, hidden: Tensor, packed: PackedTexts) -> Tensor:
        """(B, T, d) → (N, labels), the tokens text after text"""
        return self.out(packed.tokens(hidden))


class EmbeddingHead(nn.Module):
    """Mean pooling and normalization, without parameters: text embeddings."""

    def forward(self, hidden: Tensor, packed: PackedTexts) -> Tensor:
        """(B, T, d) → (n, d), each of norm 1"""
        return nn.functional.normalize(mean_pool(hidden, packed), dim=-1)


def initialise(head: nn.Module, *, std: float, seed: int) -> None:
    """Initialize a head from the seed: weights normal with the backbone's `std`, biases 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
