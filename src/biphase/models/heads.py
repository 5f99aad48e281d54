"""What stands on an encoder for a task: pooling, and small heads with weights from a seed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from biphase.models.encoder import PackedTexts


def mean_pool(hidden: Tensor, packed: PackedTexts) -> Tensor:
    """The mean hidden state of each text, all its tokens counted, in fp32. (B, T, d) → (n, d)

    One sum for each text and width, in the order of its tokens: no result depends on which thread came first.
    """
    reduce = torch.segment_reduce  # ty: ignore[missing-attribute]  (torch's stubs forget it)
    # Unsafe: lengths are not read on the host, and what stands behind the last text is passed over.
    return reduce(packed.tokens(hidden).float(), "mean", lengths=packed.lengths, unsafe=True)


class TextHead(nn.Module):
    """Mean pooling → Linear → GELU → Linear, as the paper classifies texts."""

    def __init__(self, width: int, labels: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.out = nn.Linear(width, labels)

    def forward(self, hidden: Tensor, packed: PackedTexts) -> Tensor:
        """(B, T, d) → (n, labels)"""
        pooled = mean_pool(hidden, packed).to(self.dense.weight.dtype)
        return self.out(nn.functional.gelu(self.dense(pooled)))


class TokenHead(nn.Module):
    """One Linear on every token: tags, answer or not, start and end."""

    def __init__(self, width: int, labels: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, labels)

    def forward(self, hidden: Tensor, packed: PackedTexts) -> Tensor:
        """(B, T, d) → (N, labels): the real tokens, text after text."""
        return self.out(packed.tokens(hidden))


class EmbeddingHead(nn.Module):
    """Mean pooling and nothing to learn: a text as a direction."""

    def forward(self, hidden: Tensor, packed: PackedTexts) -> Tensor:
        """(B, T, d) → (n, d), of length 1"""
        return nn.functional.normalize(mean_pool(hidden, packed), dim=-1)


def initialise(head: nn.Module, *, std: float, seed: int) -> None:
    """Weights as the backbone's own were drawn, from the seed alone; biases 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
