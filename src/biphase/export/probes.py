"""Does what was written read as what was trained? Hidden states of the same tokens, compared number by number.

Ours come from the trained model with our attention, as fine-tuning reads. Theirs come from the folder through plain
transformers: each text alone and without a mask, and some of them padded in one batch. The longest text is longer than
any window of the model's layers, as far as its context allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from biphase.export.words import Words
from biphase.finetune.model import Tuned
from biphase.models.backbone import LanguageModel
from biphase.models.encoder import Encoder
from biphase.models.heads import TextHead
from biphase.models.packed import pack
from biphase.models.windows import windows_of

# The most that a token's vector may differ, as a share of its length. Sums in another order come to about 1e-6.
TOLERANCE = 5e-5
LONGEST = 256  # of the probe texts, where no window asks for more
BEYOND = 32  # tokens more than the widest window


@dataclass(frozen=True)
class Probes:
    """Texts, shortest first, and what the trained model makes of them."""

    texts: tuple[np.ndarray, ...]
    numbers: tuple[
        Tensor, ...
    ]  # of each text: (tokens, n) hidden states or logits; or (n,) logits of the text


def probe_texts(config: Any, words: Words) -> tuple[np.ndarray, ...]:
    """Texts of several lengths, of words drawn at random."""
    longest = min(words.context, max(LONGEST, max(windows_of(config).values(), default=0) + BEYOND))
    plain = np.array([number for number in range(words.vocab) if number not in words.special])
    draw = np.random.default_rng(0)
    lengths = sorted({min(length, longest) for length in (1, 3, 8, 21, 55)} | {longest})
    return tuple(draw.choice(plain, length).astype(np.int64) for length in lengths)


@torch.no_grad()
def ours(encoder: Encoder, texts: tuple[np.ndarray, ...]) -> Probes:
    """What the trained model makes of the texts."""
    device = next(encoder.parameters()).device
    hidden = []
    for text in texts:
        packed = pack([text], varlen=False).to(device)
        read = encoder(packed.ids, packed.positions, packed.sight).flatten(0, 1)
        hidden.append(read[packed.at].float().cpu())
    return Probes(texts, tuple(hidden))


@torch.no_grad()
def ours_tuned(model: Tuned, texts: tuple[np.ndarray, ...]) -> Probes:
    """What a fine-tuned model's head says of the texts, or of each of their tokens."""
    said = [model(pack([text], varlen=False)).float() for text in texts]
    per_text = isinstance(model.head, TextHead)
    return Probes(texts, tuple(one[0] if per_text else one for one in said))


@torch.no_grad()
def ours_logits(model: LanguageModel, texts: tuple[np.ndarray, ...]) -> Probes:
    """What the trained model's head makes of the shorter texts: a vocabulary of numbers for every token is much."""
    few = tuple(text for text in texts if len(text) < LONGEST) or texts[:1]
    said = []
    for text in few:
        packed = pack([text], varlen=False).to(model.head.device)
        logits = model.logits(packed.ids, packed.positions, packed.sight).flatten(0, 1)
        said.append(logits[packed.at].float().cpu())
    return Probes(few, tuple(said))


@torch.no_grad()
def deviation(probes: Probes, read: Callable[..., Tensor], *, pad: int) -> float:
    """The largest difference of any vector; `read` is a transformers model's forward, as numbers of one kind."""
    worst = 0.0
    for texts, ids, mask in _inputs(probes, pad):
        said = read(input_ids=ids, **({} if mask is None else {"attention_mask": mask})).float().cpu()
        for row, text in enumerate(texts):
            theirs = said[row] if said.ndim == 2 else said[row, : len(probes.texts[text])]
            worst = max(worst, _apart(probes.numbers[text], theirs))
    return worst


def _inputs(probes: Probes, pad: int) -> Iterator[tuple[list[int], Tensor, Tensor | None]]:
    """Each text alone; and the shortest, one between and the longest side by side, padded."""
    for number, text in enumerate(probes.texts):
        yield [number], torch.from_numpy(text)[None], None
    last = len(probes.texts) - 1
    few = sorted({0, (last + 1) // 2, last})
    ids = torch.full((len(few), len(probes.texts[last])), pad)
    mask = torch.zeros_like(ids)
    for row, number in enumerate(few):
        text = torch.from_numpy(probes.texts[number])
        ids[row, : len(text)], mask[row, : len(text)] = text, 1
    yield few, ids, mask


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """Of the token that differs most: the length of the difference, as a share of the vector's."""
    if not bool(theirs.isfinite().all()):
        return float("inf")
    share = (ours - theirs).norm(dim=-1) / ours.norm(dim=-1).clamp_min(1e-12)
    return float(share.max())
