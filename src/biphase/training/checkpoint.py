"""A checkpoint is a state on disk: safetensors and JSON, published whole under the state's key.

    model.safetensors       fp32 weights, under transformers' names
    optimizer.safetensors   Adam's moments and counts, under the same names
    state.json              what it is, how it was made, what it cost
    metrics.jsonl           losses of every step from the root to here

On the way of a sharded run each process writes its own rows instead (model-0-of-4.safetensors, with an index); whoever
reads a state does not notice.

Every step of a run has a key, so a checkpoint on the way is a state like any other: to resume is to find the
nearest saved state behind the one that is wanted. When a state is published, those behind it on the same run
are removed, unless some plan of the store needs them, or a piece that is not done could go on from them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from biphase.errors import StoreError
from biphase.files import Store, verify
from biphase.keys import Identities, Keyring, act_at, decay_start, label, origin_step, state_key
from biphase.metadata import is_key, read_lines, read_state
from biphase.models.backbone import LanguageModel
from biphase.specs import Pretrain
from biphase.training import optimizer as adam
from biphase.training.tensors import Rows, Tensors


@dataclass
class Progress:
    """What a state carries beside tensors: how it was made and what it cost so far."""

    step: int  # of its run
    draw: int  # rows drawn: the position in the data
    seconds: float = 0.0  # of training, over the whole path from the root
    flops: float | None = 0.0  # None: not known for this model
    tokens: int = 0
    joules: float | None = None  # of the GPUs, over the whole path; None: some part of it was not measured
    skipped: int = 0  # steps left out because a number was not finite
    unsound_in_a_row: int = 0  # of these, the ones just before this state
    micro_rows: int = 0
    world: int = 1
    shard: str = "none"  # how weights were spread over the processes
    threads: int = 0
    machine: dict[str, str] = field(default_factory=dict)


def load_weights(store: Store, key: str, model: LanguageModel) -> Progress:
    """Put the weights of a state into `model`, which is whole; gives what it carries beside."""
    place = store.states / key
    verify(place)
    tensors: dict[str, Tensor] = dict(model.model.state_dict())
    try:
        with Tensors(place, "model") as saved, torch.no_grad():
            shapes = {name: tuple(one.shape) for name, one in tensors.items()}
            unexpected = [name for name, shape in saved.shapes.items() if shapes.get(name) != shape]
            absent = _absent(tensors, set(tensors) - set(saved.shapes))
            if unexpected or absent:
                raise StoreError(
                    f"{place} holds another model ({(unexpected or absent)[0]}); remove it and run again"
                )
            for name in saved.shapes:
                tensors[name].copy_(saved.whole(name))
    except (SafetensorError, KeyError) as wrong:
        raise StoreError(f"{place} cannot be read ({wrong}); remove it and run the study again") from None
    return progress_of(store, key)


def load_moments(store: Store, key: str, rows: dict[str, Rows], optimizer: torch.optim.AdamW) -> None:
    """Put the moments of a state into `optimizer`, whose parameters are these rows of those of the model."""
    place = store.states / key
    try:
        with Tensors(place, "optimizer") as saved:

            def of(what: str, name: str) -> Tensor | None:
                if f"{what}.{name}" not in saved.shapes:
                    return None
                one = rows[name]
                if what == "step" or tuple(one.tensor.shape) == one.whole:
                    return saved.whole(f"{what}.{name}")
                return saved.rows(f"{what}.{name}", one.first, one.first + len(one.tensor))

            adam.restore_moments({name: one.tensor for name, one in rows.items()}, optimizer, of)
    except (SafetensorError, KeyError) as wrong:
        raise StoreError(f"{place} cannot be read ({wrong}); remove it and run the study again") from None


def _absent(tensors: dict[str, Tensor], missing: set[str]) -> list[str]:
    """The names among `missing` that are not a second one of a tensor that was written: tied ones are, once."""
    written = {tensor.data_ptr() for name, tensor in tensors.items() if name not in missing}
    return sorted(name for name in missing if tensors[name].data_ptr() not in written)


def progress_of(store: Store, key: str) -> Progress:
    told = read_state(store.states / key)["progress"]
    return Progress(**{one.name: told[one.name] for one in fields(Progress) if one.name in told})


def metrics_of(store: Store, key: str) -> list[dict[str, Any]]:
    return read_lines(store.states / key)


def saved_on_path(run: Pretrain, until: int, store: Store, identities: Identities) -> dict[int, str]:
    """The saved states of the run itself up to step `until`, latest first.

    Damaged ones are among them: whoever loads one says so, and nothing is trained in its place in silence.
    """
    places = (place for place in store.states.glob("*") if is_key(place.name))
    saved = {place.name for place in places if store.has(place) or store.fault(place)}
    steps = _steps(store, saved)  # where any state stands: the only steps worth hashing
    if steps is None:
        steps = set(range(1, until + 1))  # one cannot say where it stands: it may be at any of them
    keyring = Keyring(identities)
    keys = {step: keyring.at(run, step) for step in sorted(steps, reverse=True) if 0 < step <= until}
    return {step: key for step, key in keys.items() if key in saved}


def nearest(run: Pretrain, step: int, store: Store, identities: Identities) -> tuple[int, str] | None:
    """The latest saved state at or before `step` on the run's path, as (step, key)."""
    for found in saved_on_path(run, step, store, identities).items():
        return found
    start = state_key(run, 0, identities)
    return (0, start) if isinstance(run.start, Pretrain) and store.has(store.states / start) else None


def prune(run: Pretrain, before: int, store: Store, identities: Identities, needed: set[str]) -> None:
    """Remove the run's states behind step `before`, but never one that a plan of the store needs."""
    for key in saved_on_path(run, before - 1, store, identities).values():
        if key not in needed and store.has(store.states / key):  # else it is somebody else's, in this place
            store.discard(store.states / key)


def resume_points(
    run: Pretrain, pieces: Iterable[dict[str, Any]], store: Store, identities: Identities
) -> set[str]:
    """Of each planned piece that is not done, the newest checkpoint of `run` that its training could go on from.

    `pieces` are the states of saved plans. One can share checkpoints with the run if it has the same root, and the
    objective and phase that the run had there.
    """
    root = run
    while isinstance(root.start, Pretrain):
        root = root.start
    at, origin = state_key(root, 0, identities), origin_step(run)
    saved = saved_on_path(run, run.steps, store, identities)
    found = set()
    for piece in pieces:
        first, until = piece["steps"]
        if piece["root"] != at or store.has(store.states / piece["key"]):
            continue
        for step, key in saved.items():  # latest first
            alike = label(act_at(run, step - 1).objective), step > decay_start(run)
            if first < origin + step <= until and alike == (piece["objective"], piece["decaying"]):
                found.add(key)
                break
    return found


def _steps(store: Store, keys: set[str]) -> set[int] | None:
    """The steps at which these states stand; None if one of them is damaged and does not say."""
    steps = set()
    for key in keys:
        try:
            steps.add(progress_of(store, key).step)
        except StoreError:
            if (store.states / key).exists():  # else another worker removed it a moment ago
                return None
    return steps
