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

import contextlib
import json
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from biphase.errors import StoreError, one_line
from biphase.keys import (
    Identities,
    Keyring,
    checkpoint_key,
    decay_start,
    label,
    origin_step,
    phase_at,
    root_of,
)
from biphase.metadata import read_checkpoint_file, read_lines
from biphase.models.backbone import LanguageModel
from biphase.records import is_key
from biphase.specs import Pretrain
from biphase.store import Store, publish, verify, write_json
from biphase.training import optimizer as adam
from biphase.training.distributed import Placed, Ranks
from biphase.training.tensors import RowRange, Tensors, join_parts, write_part, write_whole


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


def load_optimizer_state(
    store: Store, key: str, rows: dict[str, RowRange], optimizer: torch.optim.AdamW
) -> None:
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

            adam.restore_optimizer_state({name: one.tensor for name, one in rows.items()}, optimizer, of)
    except (SafetensorError, KeyError) as wrong:
        raise StoreError(f"{place} cannot be read ({wrong}); remove it and run the study again") from None


def _absent(tensors: dict[str, Tensor], missing: set[str]) -> list[str]:
    """The names among `missing` that are not a second one of a tensor that was written: tied ones are, once."""
    written = {tensor.data_ptr() for name, tensor in tensors.items() if name not in missing}
    return sorted(name for name in missing if tensors[name].data_ptr() not in written)


def progress_of(store: Store, key: str) -> Progress:
    told = read_checkpoint_file(store.states / key)["progress"]
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
    start = checkpoint_key(run, 0, identities)
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
    at, origin = checkpoint_key(root_of(run), 0, identities), origin_step(run)
    saved = saved_on_path(run, run.steps, store, identities)
    found = set()
    for piece in pieces:
        first, until = piece["steps"]
        if piece["root"] != at or store.has(store.states / piece["key"]):
            continue
        for step, key in saved.items():  # latest first
            alike = label(phase_at(run, step - 1).objective), step > decay_start(run)
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


# ---------------------------------------------------------------- saving
# Checkpoints are written beside the training: copied to the host, then to the disk while steps go on.
#
#     begin    every process that has something to write copies it, and a thread of its own writes and hashes it
#     settle   after each step: when all have written, the first process publishes; if one could not, all stop
#     finish   wait for that: before the next checkpoint, at the end of a piece, before a clean stop
#
# At most one is under way. It lies in a folder of its own and counts for nothing until its manifest stands, which is
# written last and moved to its place with it, so whoever is killed on the way leaves no state. A state at the end of a
# piece is put together from its parts: what others read of a store is one file of weights, however it was trained.


SAVED_KINDS = ("model", "optimizer")


@dataclass(frozen=True)
class CheckpointRecord:
    """What is said of a state beside its tensors."""

    key: str
    state: dict[str, Any]
    metrics: list[dict[str, Any]]


@dataclass
class _UnderWay:
    folder: Path
    told: CheckpointRecord
    whole: bool  # to be put together before it is published
    then: Callable[[], None]
    thread: threading.Thread | None = None  # of a process that has something to write
    entries: dict[str, Any] = field(default_factory=dict)
    wrong: BaseException | None = None


class Saver:
    """Writes the states of one piece, one after another."""

    def __init__(
        self, store: Store, ranks: Ranks, model: LanguageModel, placed: Placed, *, piece: str
    ) -> None:
        self.store, self.ranks, self.model, self.placed = store, ranks, model, placed
        self.sharded, self.optimizer = placed.sharded, placed.optimizer
        self.under_way: _UnderWay | None = None
        self.attempt = f"checkpoint-{piece}"
        if ranks.first:  # who holds the lease of a piece is alone with it: what is left here was cut off
            for left in store.attempts.glob(f"{self.attempt}-*"):
                shutil.rmtree(left, ignore_errors=True)

    def begin(self, told: CheckpointRecord, *, last: bool, then: Callable[[], None] = lambda: None) -> None:
        """Start writing a state. `last`: of its piece. `then`: for the first process, once it is published."""
        self.finish()
        name = ""
        if self.ranks.first and not self.store.has(self.store.states / told.key):
            name = self.store.new_attempt(self.attempt).name
        name = self.ranks.share(name)
        if not name:  # somebody published it before
            if self.ranks.first:
                then()
            return
        now = _UnderWay(self.store.attempts / name, told, last and self.sharded is not None, then)
        try:
            if self.ranks.first if self.sharded is None else self.sharded.writes:
                work = (now, self._copied())
                now.thread = threading.Thread(target=self._write, args=work, name="checkpoint", daemon=True)
                now.thread.start()
        except BaseException:  # no memory for a copy, or a fault of the device that comes to light here
            shutil.rmtree(now.folder, ignore_errors=True)
            raise
        self.under_way = now  # only now: what was not begun must never be taken for written

    def settle(self) -> None:
        """Publish what all have written by now. Every process asks at the same step."""
        now = self.under_way
        if now is None:
            return
        ended = now.thread is None or not now.thread.is_alive()
        written, failed = self.ranks.sum(ended and now.wrong is None, ended and now.wrong is not None)
        if failed:
            said = self.ranks.gather(one_line(now.wrong) if now.wrong else "")
            self.abandon()
            if now.wrong is not None:
                raise now.wrong
            raise StoreError(
                f"a checkpoint could not be written ({next(one for one in said if one)}); run again"
            )
        if written == self.ranks.world:
            self._publish(now)

    def finish(self) -> None:
        """Wait until nothing is under way."""
        if self.under_way is None:
            return
        if self.under_way.thread is not None:
            self.under_way.thread.join()
        self.settle()
        self.ranks.wait()  # what the first process has published, all can read

    def abandon(self) -> None:
        """Give up what is under way; nothing of it counts."""
        now, self.under_way = self.under_way, None
        if now is None:
            return
        if now.thread is not None:
            now.thread.join()
        if self.ranks.first:
            shutil.rmtree(now.folder, ignore_errors=True)

    def drop(self) -> None:
        """Give up at once, without waiting for the disk."""
        now, self.under_way = self.under_way, None
        if now is not None:
            shutil.rmtree(now.folder, ignore_errors=True)

    def salvage(self, *, lost: bool) -> None:
        """After an error in a step: what was copied before is sound. But several processes no longer agree."""
        with contextlib.suppress(Exception):
            self.abandon() if self.ranks.world > 1 or lost else self.finish()

    # ------------------------------------------------------------ parts

    def _publish(self, now: _UnderWay) -> None:
        entries: dict[str, Any] = {}
        for some in self.ranks.gather(now.entries):
            entries |= some
        self.under_way = None
        if not self.ranks.first:
            return
        try:
            for kind in SAVED_KINDS if now.whole else ():
                parts, entries[f"{kind}.safetensors"] = join_parts(now.folder, kind)
                for path in parts:
                    path.unlink()
                    del entries[path.name]
            _refuse_part(now.folder, entries)
            publish(now.folder, self.store.states / now.told.key, entries)
        finally:
            shutil.rmtree(now.folder, ignore_errors=True)
        now.then()

    def _write(self, now: _UnderWay, copied: dict[str, dict[str, RowRange]]) -> None:
        folder, told = now.folder, now.told
        try:
            for kind, rows in copied.items():
                if self.sharded is None:
                    now.entries[f"{kind}.safetensors"] = write_whole(folder / f"{kind}.safetensors", rows)
                else:
                    now.entries |= write_part(folder, kind, self.ranks.rank, self.sharded.together, rows)
            if self.ranks.first:
                (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in told.metrics))
                write_json(folder / "state.json", {"key": told.key, **told.state})
        except BaseException as wrong:
            now.wrong = wrong

    def _copied(self) -> dict[str, dict[str, RowRange]]:
        """What this process has to write, as it is now: the training may go on."""
        made = self._rows_here() if self.sharded else self._all_of_it()
        return {
            kind: {name: RowRange(_host(one.tensor), one.whole, one.first) for name, one in rows.items()}
            for kind, rows in zip(SAVED_KINDS, made, strict=True)
        }

    def _all_of_it(self) -> tuple[dict[str, RowRange], dict[str, RowRange]]:
        """Of tied tensors only the first is written."""
        seen: dict[int, str] = {}
        weights = {
            name: RowRange.all_of(tensor)
            for name, tensor in self.model.model.state_dict().items()
            if seen.setdefault(tensor.data_ptr(), name) == name or tensor.numel() == 0
        }
        learned = adam.optimizer_state(_tensors(self.placed.rows), self.optimizer)
        return weights, {name: RowRange.all_of(tensor) for name, tensor in learned.items()}

    def _rows_here(self) -> tuple[dict[str, RowRange], dict[str, RowRange]]:
        assert self.sharded is not None
        weights = dict(self.placed.rows)
        learned: dict[str, RowRange] = {}
        for name, tensor in adam.optimizer_state(_tensors(weights), self.optimizer).items():
            part = weights[name.partition(".")[2]]
            if tensor.ndim:
                learned[name] = RowRange(tensor, part.whole, part.first)
            elif part.first == 0:
                learned[name] = RowRange.all_of(tensor)
        if self.ranks.first:  # what is no parameter, every process has
            weights |= {name: RowRange.all_of(one) for name, one in _kept_buffers(self.model.model).items()}
        return weights, learned


def _refuse_part(folder: Path, entries: Mapping[str, Any]) -> None:
    """A state is its tensors and what is said of them: a folder that lacks one is none."""
    lacking = [kind for kind in SAVED_KINDS if not any(name.startswith(kind) for name in entries)]
    lacking += [name for name in ("state.json", "metrics.jsonl") if not (folder / name).is_file()]
    if lacking:
        raise StoreError(f"a checkpoint has no {', '.join(lacking)}; it was not published, run again")


def _tensors(rows: Mapping[str, RowRange]) -> dict[str, Tensor]:
    return {name: one.tensor for name, one in rows.items()}


def _kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Those that belong to a model's state."""
    return {
        f"{where}.{name}".lstrip("."): buffer
        for where, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
