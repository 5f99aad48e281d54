"""Export a model as an ONNX graph: input_ids and attention_mask in, hidden states or logits out, with dynamic shapes.

The graph is run with onnxruntime and compared with torch before it is kept, on shapes other than the traced one.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModel

from biphase.errors import ModelError, SpecError, one_line
from biphase.export.tokenizer import ExportedTokenizer
from biphase.export.writing import load
from biphase.models.hub import quietly

GRAPH = Path("onnx") / "model.onnx"
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
INPUTS = ("input_ids", "attention_mask")
# Relative to the largest value. Thirty layers of a real model, summed in another order, differ by 1e-4; a wrong graph
# differs by far more.
CLOSE = 1e-3
LARGEST = (
    1_500_000_000  # bytes of weights stored in the graph's own file; larger weights go into a second file
)


def check_packages() -> None:
    """Refuse early if a required package is not installed."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise SpecError(
            f"--onnx needs {' and '.join(missing)}, not installed here; type pip install {' '.join(missing)}"
        )


class _Plain(nn.Module):
    """A model's forward with the graph's inputs and output."""

    def __init__(self, model: Any, output: str) -> None:
        super().__init__()
        self.model = model
        self.output = output

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return getattr(self.model(input_ids=input_ids, attention_mask=attention_mask), self.output)


def write_onnx(
    folder: Path, words: ExportedTokenizer, *, auto: Any = AutoModel, output: str = "last_hidden_state"
) -> None:
    """Write the graph of a folder's model into the folder; raise if its outputs differ from torch's."""
    model = load(folder, auto, attn_implementation="eager")
    plain = _Plain(model, output).eval()
    path = folder / GRAPH
    path.parent.mkdir()
    size = sum(one.numel() * one.element_size() for one in model.parameters())
    axes = {0: "batch", 1: "length"}
    try:
        with torch.no_grad(), quietly(), _in_silence():
            made: Any = torch.onnx.export(
                plain,
                _batch(words, (2, 7)),
                input_names=INPUTS,
                output_names=(output,),
                dynamic_shapes=(axes, axes),
                dynamo=True,
                verbose=False,
            )
            made.save(path, external_data=size > LARGEST)
    except Exception as wrong:  # the exporter raises many types for unsupported operations
        raise ModelError(
            f"{type(model).__name__} cannot be written as ONNX ({one_line(wrong)[:200]}); leave out --onnx"
        ) from None
    refuse_unlike(plain, path, words)


def refuse_unlike(plain: _Plain, path: Path, words: ExportedTokenizer) -> None:
    """Raise if the graph's outputs differ from the model's on several input shapes."""
    apart = max(_apart(plain, path, words, shape) for shape in ((1, 3), (3, min(words.context, 40))))
    if not apart <= CLOSE:
        raise ModelError(
            f"the ONNX graph of {type(plain.model).__name__} differs from torch by {apart:.0e} of its numbers' size; "
            "leave out --onnx"
        )


def _batch(words: ExportedTokenizer, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Random token ids; the last text is padded in its second half."""
    draw = torch.Generator().manual_seed(shape[1])
    ids = torch.randint(0, words.vocab, shape, generator=draw)
    mask = torch.ones_like(ids)
    if shape[0] > 1:
        mask[-1, (shape[1] + 1) // 2 :] = 0
        ids[mask == 0] = words.pad
    return ids, mask


@torch.no_grad()
def _apart(plain: _Plain, path: Path, words: ExportedTokenizer, shape: tuple[int, int]) -> float:
    """The largest difference of outputs on real tokens, relative to the largest value."""
    import onnxruntime

    ids, mask = _batch(words, shape)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    said = session.run([plain.output], dict(zip(INPUTS, (ids.numpy(), mask.numpy()), strict=True)))[0]
    right = plain(ids, mask).numpy()
    real = mask.numpy().astype(bool) if right.ndim == 3 else np.ones(len(right), bool)
    return float(np.abs(said - right)[real].max() / np.abs(right[real]).max())


@contextlib.contextmanager
def _in_silence() -> Generator[None]:
    """Silence the exporter's notes about other packages' operators and its deprecation warnings."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
