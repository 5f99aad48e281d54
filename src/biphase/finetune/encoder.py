"""The encoder under test, its tokenization, and how texts are run through it.

`encoder_of_checkpoint` and `encoder_of_hub` load an `EncoderUnderTest`. `TaskModel` is an encoder with a task's
head; `packs` makes micro-batches by number of tokens, grouped by length; `per_text` and `per_token` return a head's
outputs. `TuningOptions` are the runtime options of fine-tuning.

A model trained here gets a text as it got documents: the text, then the EOS token, and a BOS token before it if its
corpus had one. A hub model that was not trained further gets the special tokens of its tokenizer's template, and
the EOS token if nothing follows the text there. Under the "paper" protocol it too gets the text and its EOS token,
if it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from biphase.data.shards import Shards
from biphase.data.tokenizer import literal, load_saved, unknown_id
from biphase.errors import ModelError, SpecError, one_line
from biphase.models.encoder import Encoder, PackedTexts, encoder_from_hub, pack
from biphase.models.hub import load_tokenizer, refuse_larger
from biphase.objectives import LossTerm, in_one_buffer, views_of
from biphase.presets import sources_of
from biphase.protocol import FINETUNE_TOKENS, input_length, token_share
from biphase.records import content_key
from biphase.specs import Finetune, Hub, Pretrain
from biphase.store import Store
from biphase.tasks.collection import Ragged
from biphase.tasks.encode import Tokenization, by_length
from biphase.training import distributed
from biphase.training.pretrain import model_of_checkpoint

Around = tuple[tuple[int, ...], tuple[int, ...]]  # the ids before and after every text


@dataclass(frozen=True)
class EncoderUnderTest:
    encoder: Encoder
    tokenization: Tokenization


def encoder_of(
    run: Pretrain, checkpoint: str | None, store: Store, shards: Callable[[Pretrain], Shards], spec: Finetune
) -> EncoderUnderTest:
    """Load the model of a run: a checkpoint by its key or, if that is None, the start of the run."""
    if checkpoint is None and isinstance(run.start, Hub):
        return encoder_of_hub(run.start, spec)
    return encoder_of_checkpoint(run, checkpoint, store, shards(run), spec)


def encoder_of_checkpoint(
    run: Pretrain, checkpoint: str | None, store: Store, shards: Shards, spec: Finetune
) -> EncoderUnderTest:
    """Load a model that was trained here: the checkpoint with this key, or the run's start if that is None."""
    model = model_of_checkpoint(run, checkpoint, store, shards)
    saved = load_saved(shards.tokenizer)
    special = saved.special
    before = (special.bos,) if sources_of(run)[0].bos and special.bos is not None else ()
    encoder = Encoder(model.model.base_model, context=run.packing.length, windows=model.encoder.windows)
    around = before, (special.eos,)
    return _under_test(encoder, saved.model, around, saved.control_ids, str(shards.tokenizer), spec)


def encoder_of_hub(hub: Hub, spec: Finetune) -> EncoderUnderTest:
    """Load a hub model or local folder, without further training."""
    encoder = encoder_from_hub(hub)
    tokenizer = load_tokenizer(hub)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    before, after = _template(backend, hub)
    if tokenizer.eos_token_id is not None and (spec.protocol == "paper" or not after):
        before = () if spec.protocol == "paper" else before
        after = (int(tokenizer.eos_token_id),)
    trunk: Any = encoder.trunk
    special = _special_ids(tokenizer)
    vocab = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    spare = {*special, unknown_id(backend)} - {*before, *after}
    refuse_larger(vocab, spare, trunk.get_input_embeddings().weight.shape[0], hub.source)
    return _under_test(encoder, backend, (before, after), special, hub.source, spec)


def _template(backend: Any, hub: Hub) -> Around:
    """Return the ids that the tokenizer's template puts before and after a text."""
    try:
        bare, full = (backend.encode("a b", add_special_tokens=more).ids for more in (False, True))
    except Exception as wrong:  # a vocabulary without an unknown token raises a plain Exception
        raise ModelError(
            f"{hub.source}: its tokenizer cannot read a plain text ({one_line(wrong)}); give it an unknown token"
        ) from None
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    raise ModelError(
        f"{hub.source}: its tokenizer changes a text when it adds special tokens; it cannot be used"
    )


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the special ids that no text may produce; the unknown token may be, unless it has another role too."""
    backend = tokenizer.backend_tokenizer
    names = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id", "pad_token_id")
    meant = {int(number) for name in names if (number := getattr(tokenizer, name, None)) is not None}
    added = {number for number, token in backend.get_added_tokens_decoder().items() if token.special}
    return frozenset((added - {unknown_id(backend)}) | meant)


def _under_test(
    encoder: Encoder, tokenizer: Any, around: Around, special: frozenset[int], source: str, spec: Finetune
) -> EncoderUnderTest:
    """Return an encoder that reads the names of special tokens in a text, such as "[SEP]", as plain text."""
    if spec.length > encoder.context:
        raise SpecError(
            f"Finetune.length is {spec.length:,} and the model reads {encoder.context:,} tokens; "
            f"say length={encoder.context} or 0"
        )
    length = spec.length or input_length(encoder.context)
    identity = content_key(
        {"tokenizer": tokenizer.to_str(), "around": [*map(list, around)], "length": length}
    )
    tokenizer.encode_special_tokens = True
    return EncoderUnderTest(
        encoder, Tokenization(literal(tokenizer, special, source), *around, length, identity)
    )


# ---------------------------------------------------------------- task model


@dataclass(frozen=True)
class TuningOptions:
    """Runtime options of fine-tuning: how to compute, not what. Only the precision is part of a key."""

    device: torch.device
    precision: str  # "pure-bf16", "bf16" or "fp32"
    varlen: bool  # whether the varlen attention kernel is used
    train_tokens: int  # most tokens of a micro-batch, unless a single text is longer
    score_tokens: int
    causal: bool = False  # use causal attention
    graphs: bool = True  # capture steps as CUDA graphs, where device and encoder allow it
    sparse_rows: bool = True  # train only the vocab rows that occur in the task, where the encoder allows it
    pause: Callable[[], None] = lambda: None  # called between micro-batches of scoring; raises to stop

    @classmethod
    def of(
        cls, device: torch.device, precision: str, *, varlen: bool, encoder: Encoder | None = None
    ) -> TuningOptions:
        """Return options whose micro-batches keep a device busy without filling it, given the encoder's size."""
        if device.type != "cuda":
            return cls(device, precision, varlen, 4_096, 4_096)
        share = token_share(encoder.layers, encoder.width) if encoder else 1.0
        # Without varlen, texts are fitted into rows on the host, which gets slower with larger batches.
        scored = 131_072 if varlen else 16_384
        return cls(device, precision, varlen, int(FINETUNE_TOKENS * share), int(scored * share))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return torch.bfloat16 if self.precision == "pure-bf16" else torch.float32

    def autocast(self) -> AbstractContextManager[object]:
        return distributed.autocast(self.device, "bf16" if self.precision == "bf16" else "fp32")


@dataclass(frozen=True)
class TaskBatch:
    """A micro-batch of a task. Most have one input; retrieval has as many as memory requires."""

    inputs: tuple[PackedTexts, ...]
    targets: Tensor
    count: int
    index: int = 0  # of the micro-batch in the run, which seeds dropout
    of_tokens: bool = False  # one target per token; otherwise one per text
    width: int = 0  # tokens it was padded to, for CUDA graphs; 0: not padded
    buffer: Tensor | None = None  # the buffer that its tensors are views of

    @property
    def graph_key(self) -> int | None:
        """What a captured step depends on besides the tensors' contents: the width, since graphs belong to a task."""
        return self.width or None

    @property
    def term(self) -> LossTerm:
        return LossTerm(self.count)

    @property
    def tensors(self) -> list[Tensor]:
        return [*(tensor for packed in self.inputs for tensor in packed.tensors.values()), self.targets]

    def gathered(self, *, pinned: bool) -> TaskBatch:
        """Return a copy in one buffer, `pinned` for asynchronous transfer; meant for a data loader's thread."""
        return self.within(in_one_buffer(self.tensors, pinned=pinned))

    def within(self, buffer: Tensor) -> TaskBatch:
        """Return the batch with its tensors as views of `buffer`, or of a copy of it on another device."""
        views = iter(views_of(buffer, self.tensors))
        inputs = [replace(packed, **{name: next(views) for name in packed.tensors}) for packed in self.inputs]
        return replace(self, inputs=tuple(inputs), targets=next(views), buffer=buffer)

    def to(self, device: torch.device) -> TaskBatch:
        if self.targets.device.type == device.type:
            return self
        ready = self if self.buffer is not None else self.gathered(pinned=True)
        assert ready.buffer is not None
        return ready.within(ready.buffer.to(device, non_blocking=True))


class TaskModel(nn.Module):
    """An encoder and the head of a task."""

    def __init__(self, encoder: Encoder, head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, packed: PackedTexts) -> Tensor:
        return self.head(self.encoder(packed.ids, packed.positions, packed.pattern), packed)


def packs(
    ids: Ragged, rows: np.ndarray, options: TuningOptions, budget: int
) -> Iterator[tuple[np.ndarray, PackedTexts]]:
    """Yield the texts of `rows` in micro-batches of at most `budget` tokens, with similar lengths together."""
    lengths = ids.starts[rows + 1] - ids.starts[rows]  # only of these rows: a dataset may have millions
    for group in by_length(lengths, budget):
        chosen = rows[group]
        yield chosen, pack([ids[row] for row in chosen], varlen=options.varlen, causal=options.causal)


@torch.no_grad()
def _outputs(model: TaskModel, ids: Ragged, options: TuningOptions) -> tuple[list[np.ndarray], list[Tensor]]:
    """Return the rows of each micro-batch, and the head's output for them in fp32, without waiting for the device."""
    rows, outputs = [], []
    for chosen, packed in packs(ids, np.arange(len(ids)), options, options.score_tokens):
        options.pause()
        with options.autocast():
            outputs.append(model(packed.to(options.device)).float())
        rows.append(chosen)
    return rows, outputs


def per_text(model: TaskModel, ids: Ragged, options: TuningOptions) -> Tensor:
    """Return the head's output for each text in order, fp32, on the device: (n, …)."""
    rows, outputs = _outputs(model, ids, options)
    back = torch.from_numpy(np.argsort(np.concatenate(rows))).to(options.device)
    every = torch.cat(outputs)[back]
    _refuse_unless(bool(every.isfinite().all()))
    return every


def per_token(model: TaskModel, ids: Ragged, options: TuningOptions) -> np.ndarray:
    """Return the head's output for each token, in the order of `ids.flat`: (N, labels)."""
    rows, outputs = _outputs(model, ids, options)
    result = np.empty((len(ids.flat), outputs[0].shape[1]), np.float32)
    for chosen, output in zip(rows, outputs, strict=True):  # read back after all batches were launched
        positions = np.concatenate([np.arange(ids.starts[row], ids.starts[row + 1]) for row in chosen])
        result[positions] = output.cpu().numpy()
    _refuse_unless(bool(np.isfinite(result).all()))
    return result


def _refuse_unless(finite: bool) -> None:
    """Raise an error for nonfinite outputs: argmax of NaNs returns 0, so the model would look like one that guesses."""
    if not finite:
        raise ModelError(
            "the model gives no finite numbers; take a lower learning rate, or look at its weights for NaN"
        )
