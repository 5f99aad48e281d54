"""An encoder with a head, and how inputs get through it: in micro-batches by tokens, grouped by length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from biphase.errors import ModelError
from biphase.models.encoder import Encoder
from biphase.models.packed import Packed, in_one_piece, pack, pieces
from biphase.tasks.encoding import Ragged, by_length
from biphase.training import devices

USUAL = 12 * 768  # layers × width of the model that the budgets of tokens are made for


@dataclass(frozen=True)
class Setting:
    """How to compute, never what: nothing here is part of a key but the precision."""

    device: torch.device
    precision: str  # "pure-bf16", "bf16" or "fp32"
    varlen: bool  # the kernel for texts end to end
    train_tokens: int  # the most tokens of a micro-batch, unless one text alone is longer
    score_tokens: int
    causal: bool = False  # read in one direction
    graphs: bool = True  # steps are captured as CUDA graphs, where device and encoder allow it
    sparing: bool = True  # of all words only those that occur are trained, where the encoder allows it
    pause: Callable[[], None] = lambda: None  # asked between micro-batches of scoring; raises to stop

    @classmethod
    def of(
        cls, device: torch.device, precision: str, *, varlen: bool, encoder: Encoder | None = None
    ) -> Setting:
        """What keeps this kind of device busy without filling it, also with a deep and wide `encoder`."""
        if device.type != "cuda":
            return cls(device, precision, varlen, 4_096, 4_096)
        share = min(1.0, USUAL / (encoder.layers * encoder.width)) if encoder else 1.0
        # Fitting texts into rows is work for the host, and the more of it at once the worse.
        scored = 131_072 if varlen else 16_384
        return cls(device, precision, varlen, int(32_768 * share), int(scored * share))

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return torch.bfloat16 if self.precision == "pure-bf16" else torch.float32

    def autocast(self) -> AbstractContextManager[object]:
        return devices.autocast(self.device, "bf16" if self.precision == "bf16" else "fp32")


@dataclass(frozen=True)
class TaskBatch:
    """A micro-batch of a task. Most have one input; retrieval has as many as memory asks for."""

    inputs: tuple[Packed, ...]
    targets: Tensor
    count: int
    draw: int = 0  # which one of the run this is, for dropout
    of_tokens: bool = False  # a target for each token; else for each text
    width: int = 0  # places it was padded to, like all batches of its size; 0: as it came
    buffer: Tensor | None = None  # that its tensors are views of

    @property
    def tensors(self) -> list[Tensor]:
        return [*(one for packed in self.inputs for one in packed.tensors.values()), self.targets]

    def gathered(self, *, pinned: bool) -> TaskBatch:
        """The same in one buffer, `pinned` to be copied to a device without waiting. Work for a loader's thread."""
        return self.within(in_one_piece(self.tensors, pinned=pinned))

    def within(self, buffer: Tensor) -> TaskBatch:
        """The same as views of a buffer, or of a copy of it elsewhere."""
        views = iter(pieces(buffer, self.tensors))
        inputs = [replace(one, **{name: next(views) for name in one.tensors}) for one in self.inputs]
        return replace(self, inputs=tuple(inputs), targets=next(views), buffer=buffer)

    def to(self, device: torch.device) -> TaskBatch:
        if self.targets.device.type == device.type:
            return self
        ready = self if self.buffer is not None else self.gathered(pinned=True)
        assert ready.buffer is not None
        return ready.within(ready.buffer.to(device, non_blocking=True))


class Tuned(nn.Module):
    """An encoder and the head of a task."""

    def __init__(self, encoder: Encoder, head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, packed: Packed) -> Tensor:
        return self.head(self.encoder(packed.ids, packed.positions, packed.sight), packed)


def packs(
    ids: Ragged, rows: np.ndarray, setting: Setting, budget: int
) -> Iterator[tuple[np.ndarray, Packed]]:
    """The texts of `rows` in micro-batches of at most `budget` tokens, similar lengths together."""
    lengths = ids.starts[rows + 1] - ids.starts[rows]  # of these alone: a dataset has millions
    for group in by_length(lengths, budget):
        chosen = rows[group]
        yield chosen, pack([ids[row] for row in chosen], varlen=setting.varlen, causal=setting.causal)


@torch.no_grad()
def per_text(model: Tuned, ids: Ragged, setting: Setting) -> Tensor:
    """What the head says of each text, in their order, in fp32 on the device. (n, …)"""
    rows, outputs = [], []
    for chosen, packed in packs(ids, np.arange(len(ids)), setting, setting.score_tokens):
        setting.pause()
        with setting.autocast():
            outputs.append(model(packed.to(setting.device)).float())
        rows.append(chosen)
    back = torch.from_numpy(np.argsort(np.concatenate(rows))).to(setting.device)
    every = torch.cat(outputs)[back]
    _refuse_unless(bool(every.isfinite().all()))
    return every


def per_token(model: Tuned, ids: Ragged, setting: Setting) -> np.ndarray:
    """What the head says of each token, text after text, as `ids.flat` lists them. (N, labels)"""
    result: np.ndarray | None = None
    parts: list[tuple[np.ndarray, Tensor]] = []
    with torch.no_grad():
        for chosen, packed in packs(ids, np.arange(len(ids)), setting, setting.score_tokens):
            setting.pause()
            with setting.autocast():
                parts.append((chosen, model(packed.to(setting.device)).float()))
    for (
        chosen,
        said,
    ) in parts:  # read back only when all is on its way: the device is never waited for in between
        values = said.cpu().numpy()
        _refuse_unless(bool(np.isfinite(values).all()))
        if result is None:
            result = np.empty((len(ids.flat), values.shape[1]), np.float32)
        places = np.concatenate([np.arange(ids.starts[row], ids.starts[row + 1]) for row in chosen])
        result[places] = values
    assert result is not None
    return result


def _refuse_unless(finite: bool) -> None:
    """The largest of numbers that are none is the first: such a model would pass for one that guesses."""
    if not finite:
        raise ModelError(
            "the model gives no finite numbers; take a lower learning rate, or look at its weights for NaN"
        )
