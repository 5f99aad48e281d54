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
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace

import torch
from torch import Tensor

from biphase.attention import pattern_of, varlen_works
from biphase.data.shards import Shards
from biphase.data.stream import streams_of, training_stream
from biphase.errors import ModelError
from biphase.keys import Identities, Keyring
from biphase.models.backbone import set_rope_base
from biphase.objectives import Batch
from biphase.protocol import heldout_objectives, micro_rows
from biphase.records import encode
from biphase.specs import CLM, Corpus, Kept, Merge, Pretrain, RowObjective
from biphase.store import Store, publish, write_json
from biphase.training import checkpoint, distributed
from biphase.training.checkpoint import Progress, saved_weights
from biphase.training.distributed import Ranks
from biphase.training.pretrain import heldout_losses, mask_words, starting_model
from biphase.training.tensors import write

Part = tuple[str, float, Mapping[str, Tensor]]  # of a mean: its name, its share, its weights


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
        parts = {keyring.at(part.run, part.step): part for part in merge.parts}
        weights = mean(
            _part(parts[str(name)], str(name), float(str(share)), store, shards)
            for name, share in keyring.summands(merge)
        )
        tensors = {"model.safetensors": weights, "optimizer.safetensors": {}}
        hashed = {name: write(folder / name, content) for name, content in tensors.items()}
        main = run.sources[0]
        before = keyring.at(main.run, main.step)
        progress, lines = Progress(step=0, next_sample=run.origin_sample), []
        if store.has(store.checkpoints / before):
            progress = replace(checkpoint.progress_of(store, before), step=0, next_sample=run.origin_sample)
            lines = checkpoint.metrics_of(store, before)
        losses = _heldout(run, weights, sources, ranks)
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


def mean(parts: Iterable[Part]) -> dict[str, Tensor]:
    """Return the weighted mean of each tensor; other than weights must be equal. One part is in memory at a time."""
    first, found, dtypes = "", {}, {}
    for name, share, tensors in parts:
        if not found:
            first, dtypes = name, {key: tensor.dtype for key, tensor in tensors.items()}
            found = {
                key: torch.zeros(tensor.shape) if tensor.is_floating_point() else tensor
                for key, tensor in tensors.items()
            }
        shapes = [{key: tensor.shape for key, tensor in each.items()} for each in (found, tensors)]
        if differing := [key for key in {**found, **tensors} if shapes[0].get(key) != shapes[1].get(key)]:
            raise ModelError(
                f"Merge: {first} and {name} are other models ({min(differing)}); merge models of one shape"
            )
        for key, tensor in tensors.items():
            if tensor.is_floating_point():
                found[key] += share * tensor.float()
            elif not torch.equal(found[key], tensor):
                raise ModelError(f"Merge: {key} is no weight and differs in {name}; merge other models")
        del tensors  # before the next part is read
    return {key: tensor.to(dtypes[key]) for key, tensor in found.items()}


def _part(part: Kept, key: str, share: float, store: Store, shards: Shards) -> Part:
    """Read a part: its checkpoint or, at the start of a run, the model that the run starts from."""
    model, name = starting_model(part.run, shards), f"the start of {part.run.name}"
    if part.step or part.run.sources:
        checkpoint.load_weights(store, key, model)
        name = f"{part.run.name} at step {part.step:,}"
    return name, share, saved_weights(model)


def _heldout(
    run: Pretrain, weights: Mapping[str, Tensor], sources: Mapping[Corpus, Shards], ranks: Ranks
) -> dict[str, float]:
    """Return the held-out losses of a model with these weights, computed by this process alone."""
    own, device = _objectives(run.sources[0]), ranks.device
    stream = streams_of(run, sources, words=mask_words(own))[1]
    if not stream.rows:
        return {}
    model = starting_model(run, next(iter(sources.values())))
    unknown = model.model.load_state_dict(
        weights, strict=False
    ).unexpected_keys  # of tied weights there is one
    assert not unknown, unknown
    if run.initial_rope_base:
        set_rope_base(model.model, run.initial_rope_base)
    model.to(device).prepare(device, run.precision, compiled=False)
    model.eval()
    varlen, length = varlen_works(device, run.precision), run.packing.length
    rows = run.heldout_tokens // length

    def loss_sum(batch: Batch) -> Tensor:
        with distributed.autocast(device, run.precision):
            return model.loss_sum(batch, pattern_of(batch, varlen=varlen))

    losses = heldout_losses(
        loss_sum,
        stream,
        heldout_objectives(*own),
        rows=rows,
        micro_rows=micro_rows(distributed.memory_of(device), rows, length),
        ranks=Ranks(0, 1, device),
        fixed=False,
    )
    return {name: loss for name, loss in losses.items() if math.isfinite(loss)}


def _objectives(part: Kept) -> tuple[RowObjective, ...]:
    """Return the objectives that trained a part last, for what is measured besides the usual."""
    while not part.step and part.run.sources:
        part = part.run.sources[0]
    if not part.step:
        return (CLM(),)
    phase = part.run.phase_at(part.step - 1)
    inside = part.step - 1 - phase.first
    return tuple(one.objective.at(inside) for one in phase.objective.parts_at(inside))
