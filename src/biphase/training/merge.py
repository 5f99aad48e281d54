"""Merging: a checkpoint whose weights are the weighted mean of other checkpoints' weights.

    mean = w₁·a + w₂·b + …      in fp32, tensor by tensor, in the order of the checkpoints' keys

The order is that of keys and not the written one, so that two studies that write the same mean get the same bits. The
result is a checkpoint like any other, at step 0 of the run that starts from it, without optimizer state: moments of
other weights say nothing about their mean. Costs and losses up to it are those of its longest part; its held-out
losses are measured.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from biphase.attention import pattern_of, varlen_works
from biphase.data.shards import Shards
from biphase.data.stream import streams_of, training_stream
from biphase.errors import ModelError
from biphase.keys import Identities, Keyring
from biphase.models.backbone import LanguageModel, set_rope_base
from biphase.protocol import heldout_objectives, micro_rows
from biphase.records import encode
from biphase.specs import CLM, Corpus, Kept, Merge, Pretrain, RowObjective
from biphase.store import Store, publish, verify, write_json
from biphase.training import checkpoint, distributed
from biphase.training.checkpoint import Progress
from biphase.training.distributed import Ranks
from biphase.training.pretrain import heldout_losses, mask_words, starting_model
from biphase.training.tensors import PendingTensor, Tensors, write


@dataclass(frozen=True)
class Summand:
    """The weights of one part of a mean, read when they are asked for."""

    name: str
    weight: float
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    read: Callable[[str], Tensor]


def publish_merge(
    run: Pretrain, *, store: Store, sources: Mapping[Corpus, Shards], identities: Identities, ranks: Ranks
) -> None:
    """Publish the checkpoint that `run` starts from, the mean of its parts; one process does it alone."""
    shards = next(iter(sources.values()))
    merge = run.start
    assert isinstance(merge, Merge)
    run = replace(run, stages=(), keep=())  # the checkpoint is of the merge, not of what trains on after it
    keyring = Keyring(identities)
    key = keyring.at(run, 0)
    for leftover in store.attempts.glob(f"checkpoint-{key}-*"):  # of a killed worker
        store.discard(leftover)
    folder = store.new_attempt(f"checkpoint-{key}")
    try:
        with ExitStack() as files:
            parts = {keyring.at(part.run, part.step): part for part in merge.parts}
            summands = [
                _summand(parts[str(name)], str(name), float(str(weight)), store, shards, files)
                for name, weight in keyring.summands(merge)
            ]
            hashed = {"model.safetensors": write(folder / "model.safetensors", mean(summands))}
        hashed["optimizer.safetensors"] = write(folder / "optimizer.safetensors", {})
        main = run.sources[0]
        before = keyring.at(main.run, main.step)
        progress, lines = Progress(step=0, next_sample=run.origin_sample), []
        if store.has(store.checkpoints / before):
            progress = replace(checkpoint.progress_of(store, before), step=0, next_sample=run.origin_sample)
            lines = checkpoint.metrics_of(store, before)
        losses = _heldout(run, folder, sources, ranks)
        if losses:
            lines = [*lines, {"step": run.origin_step, "heldout": losses}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        about = {
            "key": key,
            "run": encode(run),
            "origin_step": run.origin_step,
            **training_stream(run, sources).reading(run.origin_sample),
            "progress": asdict(progress),
        }
        write_json(folder / "checkpoint.json", about)
        publish(folder, store.checkpoints / key, hashed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def mean(summands: list[Summand]) -> dict[str, PendingTensor]:
    """Return the weighted mean of each tensor, computed when it is written; other than weights must be equal."""
    first = summands[0]
    for other in summands[1:]:
        differing = [
            name
            for name in {**first.shapes, **other.shapes}
            if first.shapes.get(name) != other.shapes.get(name)
        ]
        if differing:
            raise ModelError(
                f"Merge: {first.name} and {other.name} are other models ({min(differing)}); merge models of one shape"
            )
    return {
        name: PendingTensor(shape, first.dtypes[name], partial(_mean, name, summands))
        for name, shape in first.shapes.items()
    }


def _mean(name: str, summands: list[Summand]) -> Tensor:
    first = summands[0].read(name)
    if not first.is_floating_point():
        if not all(torch.equal(first, other.read(name)) for other in summands[1:]):
            raise ModelError(
                f"Merge: {name} is no weight and differs in {summands[0].name}; merge other models"
            )
        return first
    total = torch.zeros(first.shape, dtype=torch.float32)
    for part in summands:
        total += part.weight * part.read(name).float()
    return total.to(first.dtype)


def _summand(part: Kept, key: str, weight: float, store: Store, shards: Shards, files: ExitStack) -> Summand:
    """Open a part: its checkpoint or, at the start of a run, the model that the run starts from."""
    folder = store.checkpoints / key
    if part.step or part.run.sources:
        verify(folder, only="model")
        saved = files.enter_context(Tensors(folder, "model"))
        name = f"{part.run.name} at step {part.step:,}"
        return Summand(name, weight, saved.shapes, saved.dtypes, saved.whole)
    model = starting_model(part.run, shards).model
    seen: dict[int, str] = {}  # of tied tensors only the first is saved
    weights = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if seen.setdefault(tensor.data_ptr(), name) == name or not tensor.numel()
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    dtypes = {name: tensor.dtype for name, tensor in weights.items()}
    return Summand(f"the start of {part.run.name}", weight, shapes, dtypes, weights.__getitem__)


def _heldout(run: Pretrain, folder: Path, sources: Mapping[Corpus, Shards], ranks: Ranks) -> dict[str, float]:
    """Return the held-out losses of the mean in `folder`, computed by this process alone."""
    own, device = _objectives(run.sources[0]), ranks.device
    stream = streams_of(run, sources, words=mask_words(own))[1]
    if not stream.rows:
        return {}
    model = starting_model(run, next(iter(sources.values())))
    with Tensors(folder, "model") as saved, torch.no_grad():
        weights = model.model.state_dict()
        for name in saved.shapes:
            weights[name].copy_(saved.whole(name))
    if run.initial_rope_base:
        set_rope_base(model.model, run.initial_rope_base)
    model.to(device).prepare(device, run.precision, compiled=False)
    model.eval()
    varlen, length = varlen_works(device, run.precision), run.packing.length
    rows = run.heldout_tokens // length
    losses = heldout_losses(
        lambda batch: _loss_sum(model, batch, varlen=varlen),
        stream,
        heldout_objectives(*own),
        rows=rows,
        micro_rows=micro_rows(distributed.memory_of(device), rows, length),
        ranks=Ranks(0, 1, device),
        autocast=lambda: distributed.autocast(device, run.precision),
        fixed=False,
    )
    return {name: loss for name, loss in losses.items() if math.isfinite(loss)}


def _loss_sum(model: LanguageModel, batch: Any, *, varlen: bool) -> Tensor:
    return model.loss_sum(batch, pattern_of(batch, varlen=varlen))


def _objectives(part: Kept) -> tuple[RowObjective, ...]:
    """Return the objectives that trained a part last, for what is measured besides the usual."""
    while not part.step and part.run.sources:
        part = part.run.sources[0]
    if not part.step:
        return (CLM(),)
    phase = part.run.phase_at(part.step - 1)
    inside = part.step - 1 - phase.first
    return tuple(one.objective.at(inside) for one in phase.objective.parts_at(inside))
