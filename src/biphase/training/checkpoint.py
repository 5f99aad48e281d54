"""Checkpoints: loading, finding, pruning, and writing them in the background while training continues.

    model.safetensors       fp32 weights, under transformers' names
    optimizer.safetensors   the optimizer's state, under the same names
    checkpoint.json         run, step, cost so far, machine
    metrics.jsonl           losses of every step since the beginning of the first run

During a sharded run each process writes its own rows instead (model-0-of-4.safetensors, with an index), which readers
handle transparently. The checkpoint at the end of a training job is joined into whole files, so that a store's results
look the same however they were trained.

Every step of a run has a key, so an intermediate checkpoint is a checkpoint like any other: to resume is to find the
nearest saved one before the wanted step (`nearest`). When a checkpoint is published, earlier ones of the same run are
removed (`prune`), unless a plan of the store needs them or an unfinished training job could resume from them
(`resume_points`).

`Saver` writes a checkpoint in the background:

    begin    each process copies what it has to write to the host, and threads write and hash it
    complete at the end of a training job: give the record, which includes the held-out losses measured meanwhile
    settle   after each step: once all processes have written, the first one publishes; if one failed, all stop
    finish   wait for that: before the next checkpoint, at the end of a training job, before a clean stop

At most one checkpoint is being written. It is in a folder of its own until `publish` writes its manifest and renames
it, so a killed process leaves no partial checkpoint.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from biphase.errors import StoreError, one_line
from biphase.keys import Identities, Keyring, checkpoint_key
from biphase.metadata import read_checkpoint_file, read_lines
from biphase.models.backbone import LanguageModel
from biphase.records import is_key
from biphase.specs import Pretrain
from biphase.store import Store, publish, verify, wait_for, write_json
from biphase.training import optimizer as adam
from biphase.training.distributed import ALONE, Placed, Ranks
from biphase.training.tensors import RowRange, Tensors, join_parts, write, write_part


@dataclass
class Progress:
    """What a checkpoint records besides tensors: its position, its cost so far and how it was computed."""

    step: int  # of its run
    next_sample: int  # sample index: the position in the data
    seconds: float = 0.0  # training time since the beginning of the first run
    flops: float | None = 0.0  # None: not known for this model
    tokens: int = 0
    joules: float | None = None  # GPU energy since the beginning; None: some part was not measured
    skipped: int = 0  # steps skipped because of a nonfinite loss or gradient
    nonfinite_in_a_row: int = 0  # consecutive skipped steps just before this checkpoint
    micro_rows: int = 0
    world: int = 1
    shard: str = "none"  # how weights were sharded over the processes
    threads: int = 0
    machine: dict[str, str] = field(default_factory=dict)
    # The same five for every part of the path, with its first step: a run may go on elsewhere.
    segments: list[dict[str, Any]] = field(default_factory=list)

    def begin_segment(self, first_step: int) -> None:
        """Record how the steps from `first_step` on are computed, if it differs from the steps before."""
        now = {name: getattr(self, name) for name in ("micro_rows", "world", "shard", "threads", "machine")}
        if not self.segments or self.segments[-1] != {**now, "first_step": self.segments[-1]["first_step"]}:
            self.segments = [*self.segments, {"first_step": first_step, **now}]


def load_weights(store: Store, key: str, model: LanguageModel, ranks: Ranks = ALONE) -> Progress:
    """Load a checkpoint's weights into `model`, which must not be sharded, and return its progress.

    Of several processes the first reads them, and sends them to the others.
    """
    if ranks.first:
        _read_weights(store.checkpoints / key, model)
    ranks.equalize(model)
    return Progress(**ranks.share(asdict(progress_of(store, key)) if ranks.first else None))


def _read_weights(folder: Path, model: LanguageModel) -> None:
    files = verify(folder, only="model")
    tensors: dict[str, Tensor] = dict(model.model.state_dict())
    try:
        with Tensors(folder, "model", files) as saved, torch.no_grad():
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            unexpected = [name for name, shape in saved.shapes.items() if shapes.get(name) != shape]
            absent = _absent(tensors, set(tensors) - set(saved.shapes))
            if unexpected or absent:
                raise StoreError(
                    f"{folder} holds another model ({(unexpected or absent)[0]}); remove it and run again"
                )
            for name in saved.shapes:
                tensors[name].copy_(saved.whole(name))
    except (SafetensorError, KeyError) as wrong:
        raise StoreError(f"{folder} cannot be read ({wrong}); remove it and run the study again") from None


def load_optimizer_state(store: Store, key: str, placed: Placed, ranks: Ranks = ALONE) -> None:
    """Load a checkpoint's optimizer state into the optimizer of a placed model.

    Of several processes with whole weights, the first reads it and sends it to the others. Of those of a sharded model
    each reads its own rows, after one on each machine has verified them.
    """
    folder, rows = store.checkpoints / key, placed.rows
    sends = placed.sharded is None and ranks.world > 1
    if sends and not ranks.first:
        sent = ranks.share(None)

        def receive(kind: str, name: str) -> Tensor | None:
            shape, dtype = sent.get(f"{kind}.{name}", (None, ""))
            return None if shape is None else ranks.broadcast(torch.empty(shape, dtype=getattr(torch, dtype)))

        adam.restore_optimizer_state(_tensors(rows), placed.optimizer, receive)
        return
    wait_for(lambda: ranks.first or store.has(folder))
    files = verify(folder, only="optimizer", contents=ranks.verifies)
    try:
        with Tensors(folder, "optimizer", files) as saved:
            if sends:
                dtypes = {name: str(dtype).removeprefix("torch.") for name, dtype in saved.dtypes.items()}
                ranks.share({name: [shape, dtypes[name]] for name, shape in saved.shapes.items()})

            def read(kind: str, name: str) -> Tensor | None:
                if f"{kind}.{name}" not in saved.shapes:
                    return None
                part = rows[name]
                if kind == "step" or tuple(part.tensor.shape) == part.whole:
                    tensor = saved.whole(f"{kind}.{name}")
                    return ranks.broadcast(tensor) if sends else tensor
                return saved.rows(f"{kind}.{name}", part.first, part.first + len(part.tensor))

            adam.restore_optimizer_state(_tensors(rows), placed.optimizer, read)
    except (SafetensorError, KeyError) as wrong:
        raise StoreError(f"{folder} cannot be read ({wrong}); remove it and run the study again") from None


def _absent(tensors: dict[str, Tensor], missing: set[str]) -> list[str]:
    """Return the names in `missing` that are not tied to a saved tensor: of tied tensors only one is saved."""
    written = {tensor.data_ptr() for name, tensor in tensors.items() if name not in missing}
    return sorted(name for name in missing if tensors[name].data_ptr() not in written)


def saved_weights(model: LanguageModel) -> dict[str, Tensor]:
    """Return the weights as they are saved: of tied tensors the first."""
    seen: dict[int, str] = {}
    return {
        name: tensor
        for name, tensor in model.model.state_dict().items()
        if seen.setdefault(tensor.data_ptr(), name) == name or tensor.numel() == 0
    }


def progress_of(store: Store, key: str) -> Progress:
    progress = read_checkpoint_file(store.checkpoints / key)["progress"]
    names = {field.name for field in fields(Progress)}
    return Progress(**{name: value for name, value in progress.items() if name in names})


def metrics_of(store: Store, key: str) -> list[dict[str, Any]]:
    return read_lines(store.checkpoints / key)


def saved_on_path(run: Pretrain, until: int, store: Store, identities: Identities) -> dict[int, str]:
    """Return the saved checkpoints of the run itself up to step `until`, as step → key, latest first.

    Damaged ones are included: loading one raises an error, instead of silently training it again.
    """
    folders = (folder for folder in store.checkpoints.glob("*") if is_key(folder.name))
    saved = {folder.name for folder in folders if store.has(folder) or store.fault(folder)}
    steps = _steps(store, saved)  # hash only the keys of steps at which some checkpoint exists
    if steps is None:
        steps = set(range(1, until + 1))  # a damaged checkpoint may be at any step
    keyring = Keyring(identities)
    keys = {step: keyring.at(run, step) for step in sorted(steps, reverse=True) if 0 < step <= until}
    return {step: key for step, key in keys.items() if key in saved}


def nearest(run: Pretrain, step: int, store: Store, identities: Identities) -> tuple[int, str] | None:
    """Return the latest saved checkpoint of the run at or before `step`, as (step, key).

    Step 0 is the end of the run that this one continues, or the merge that it starts from.
    """
    latest = next(iter(saved_on_path(run, step, store, identities).items()), None)
    if latest or not run.sources:
        return latest
    start = checkpoint_key(run, 0, identities)
    return (0, start) if store.has(store.checkpoints / start) else None


def prune(run: Pretrain, before: int, store: Store, identities: Identities, needed: set[str]) -> None:
    """Remove the run's checkpoints before step `before`, except those in `needed`."""
    for key in saved_on_path(run, before - 1, store, identities).values():
        folder = store.checkpoints / key
        if key not in needed and store.has(folder):  # never remove files that are not this result
            store.discard(folder)


def resume_points(
    run: Pretrain, jobs: Iterable[dict[str, Any]], store: Store, identities: Identities
) -> set[str]:
    """Return, for each unfinished training job in `jobs`, the latest checkpoint of `run` it could resume from.

    `jobs` are the training jobs of saved plans. A job can share a checkpoint with the run if it has the same root, and
    the same objective and decay phase at that step.
    """
    at, origin = checkpoint_key(run.root, 0, identities), run.origin_step
    saved = saved_on_path(run, run.steps, store, identities)
    points = set()
    for job in jobs:
        first, until = job["steps"]
        if job["root"] != at or store.has(store.checkpoints / job["key"]):
            continue
        for step, key in saved.items():  # latest first
            alike = run.phase_at(step - 1).objective.label, step > run.decay_start
            if first < origin + step <= until and alike == (job["objective"], job["decaying"]):
                points.add(key)
                break
    return points


def _steps(store: Store, keys: set[str]) -> set[int] | None:
    """Return the steps of these checkpoints; None if the step of a damaged one is unknown."""
    steps = set()
    for key in keys:
        try:
            steps.add(progress_of(store, key).step)
        except StoreError:
            if (store.checkpoints / key).exists():  # else another worker has just removed it
                return None
    return steps


# ---------------------------------------------------------------- saving


SAVED_KINDS = ("model", "optimizer")


@dataclass(frozen=True)
class CheckpointRecord:
    """The contents of checkpoint.json and metrics.jsonl, with the checkpoint's key."""

    key: str
    about: dict[str, Any] = field(default_factory=dict)  # empty: not known yet, see `complete`
    metrics: str = ""


@dataclass
class _Unpublished:
    folder: Path
    record: CheckpointRecord
    whole: bool  # join the parts before publishing
    then: Callable[[], None]
    thread: threading.Thread | None = None  # None in a process that has nothing to write
    entries: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None


class Saver:
    """Writes the checkpoints of one training job in the background, one after another."""

    def __init__(self, store: Store, ranks: Ranks, model: LanguageModel, placed: Placed, *, job: str) -> None:
        self.store, self.ranks, self.model, self.placed = store, ranks, model, placed
        self.sharded, self.optimizer = placed.sharded, placed.optimizer
        self.unpublished: _Unpublished | None = None
        self.published = ""  # the key of the last checkpoint that this process published itself
        self.attempt = f"checkpoint-{job}"

    def remove_leftovers(self) -> None:
        """Remove what a killed worker left: this one holds the training job's lease.

        A suspended worker may wake up and go on writing there. The folder is renamed away first, so that it cannot
        publish what is left of it.
        """
        if self.ranks.first:
            for folder in self.store.attempts.glob(f"{self.attempt}-*"):
                self.store.discard(folder)

    def begin(self, record: CheckpointRecord, *, last: bool, then: Callable[[], None] = lambda: None) -> None:
        """Start writing a checkpoint, after finishing an earlier one.

        `last` marks the end of the training job. The first process calls `then` once the checkpoint is published.
        """
        self.finish()
        name = ""
        if self.ranks.first and not self.store.has(self.store.checkpoints / record.key):
            name = self.store.new_attempt(self.attempt).name
        name = self.ranks.share(name)
        if not name:  # another worker has published it
            if self.ranks.first:
                then()
            return
        wait_for((self.store.attempts / name).is_dir)
        now = _Unpublished(self.store.attempts / name, record, last and self.sharded is not None, then)
        try:
            if self.ranks.first if self.sharded is None else self.sharded.writes:
                work = (now, self._copied())
                now.thread = threading.Thread(target=self._write, args=work, name="checkpoint", daemon=True)
                now.thread.start()
        except (
            BaseException
        ):  # out of memory for the copy, or an asynchronous device error that surfaces here
            shutil.rmtree(now.folder, ignore_errors=True)
            raise
        self.unpublished = now  # set last, so that a checkpoint whose writing never began cannot be published

    def complete(self, record: CheckpointRecord) -> None:
        """Give the record of a checkpoint that was begun without, and publish it."""
        if self.unpublished is not None:
            self.unpublished.record = record
        self.finish()

    def settle(self) -> None:
        """Publish the checkpoint if its record is known and all processes have written it; raise if one failed.

        Every process must call this at the same step.
        """
        now = self.unpublished
        if now is None or not now.record.about:
            return
        ended = now.thread is None or not now.thread.is_alive()
        written, failed = self.ranks.sum(ended and now.error is None, ended and now.error is not None)
        if failed:
            messages = self.ranks.gather(one_line(now.error) if now.error else "")
            self.abandon()
            if now.error is not None:
                raise now.error
            raise StoreError(f"a checkpoint could not be written ({next(filter(None, messages))}); run again")
        if written == self.ranks.world:
            self._publish(now)

    def finish(self) -> None:
        """Wait until the checkpoint being written, if any, is published."""
        if self.unpublished is None:
            return
        if self.unpublished.thread is not None:
            self.unpublished.thread.join()
        self.settle()
        self.ranks.wait()  # afterwards all processes can read what the first one published

    def abandon(self) -> None:
        """Discard the checkpoint being written, after its thread has ended."""
        now, self.unpublished = self.unpublished, None
        if now is None:
            return
        if now.thread is not None:
            now.thread.join()
        if self.ranks.first:
            shutil.rmtree(now.folder, ignore_errors=True)

    def drop(self) -> None:
        """Discard the checkpoint being written without waiting for its thread."""
        now, self.unpublished = self.unpublished, None
        if now is not None:
            self.store.discard(now.folder)  # renamed away first, so that the thread adds nothing to it

    def salvage(self, *, lost: bool) -> None:
        """After an error in a step, publish the checkpoint that was copied before it, which is valid.

        With several processes or a lost lease it is discarded, since processes are no longer in step.
        """
        with contextlib.suppress(Exception):
            unknown = self.unpublished is not None and not self.unpublished.record.about
            self.abandon() if self.ranks.world > 1 or lost or unknown else self.finish()

    # ------------------------------------------------------------ parts

    def _publish(self, now: _Unpublished) -> None:
        entries: dict[str, Any] = {}
        for part in self.ranks.gather(now.entries):
            entries |= part
        self.unpublished = None
        if not self.ranks.first:
            return
        try:
            for name in sorted(entries.keys() - now.entries.keys()):  # those of other machines
                wait_for((now.folder / name).is_file)
            for kind in SAVED_KINDS if now.whole else ():
                parts = [name for name in entries if name.startswith(f"{kind}-")]
                entries[f"{kind}.safetensors"] = join_parts(now.folder, kind, parts)
                for name in parts:
                    (now.folder / name).unlink()
                    del entries[name]
            (now.folder / "metrics.jsonl").write_text(now.record.metrics)
            write_json(now.folder / "checkpoint.json", {"key": now.record.key, **now.record.about})
            _refuse_part(entries)
            if publish(now.folder, self.store.checkpoints / now.record.key, entries):
                self.published = now.record.key
        finally:
            shutil.rmtree(now.folder, ignore_errors=True)
        now.then()

    def _write(self, now: _Unpublished, copied: dict[str, dict[str, RowRange]]) -> None:
        folder = now.folder

        def write_kind(kind: str, rows: dict[str, RowRange]) -> None:
            try:
                if self.sharded is None:
                    now.entries[f"{kind}.safetensors"] = write(folder / f"{kind}.safetensors", _tensors(rows))
                else:
                    now.entries.update(write_part(folder, kind, self.ranks.rank, self.sharded.group, rows))
            except BaseException as wrong:
                now.error = wrong

        # Side by side, since hashing releases the GIL; daemons, so that a second ^C ends the process at once.
        threads = [threading.Thread(target=write_kind, args=item, daemon=True) for item in copied.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _copied(self) -> dict[str, dict[str, RowRange]]:
        """Return host copies of what this process has to write, so that training can continue."""
        own = self._sharded_rows() if self.sharded else self._whole()
        return {
            kind: {name: replace(part, tensor=_host(part.tensor)) for name, part in rows.items()}
            for kind, rows in zip(SAVED_KINDS, own, strict=True)
        }

    def _whole(self) -> tuple[dict[str, RowRange], dict[str, RowRange]]:
        """Return all weights and optimizer state."""
        weights = {name: RowRange.all_of(tensor) for name, tensor in saved_weights(self.model).items()}
        learned = adam.optimizer_state(_tensors(self.placed.rows), self.optimizer)
        return weights, {name: RowRange.all_of(tensor) for name, tensor in learned.items()}

    def _sharded_rows(self) -> tuple[dict[str, RowRange], dict[str, RowRange]]:
        assert self.sharded is not None
        weights = dict(self.placed.rows)
        learned: dict[str, RowRange] = {}
        for name, tensor in adam.optimizer_state(_tensors(weights), self.optimizer).items():
            part = weights[name.partition(".")[2]]
            if tensor.ndim:
                learned[name] = RowRange(tensor, part.whole, part.first)
            elif part.first == 0:
                learned[name] = RowRange.all_of(tensor)
        if self.ranks.first:  # buffers are not sharded, so one process writes them
            buffers = _persistent_buffers(self.model.model)
            weights |= {name: RowRange.all_of(buffer) for name, buffer in buffers.items()}
        return weights, learned


def _refuse_part(entries: Mapping[str, Any]) -> None:
    """Raise StoreError if a checkpoint lacks tensors."""
    lacking = [kind for kind in SAVED_KINDS if not any(name.startswith(kind) for name in entries)]
    if lacking:
        raise StoreError(f"a checkpoint has no {', '.join(lacking)}; it was not published, run again")


def _tensors(rows: Mapping[str, RowRange]) -> dict[str, Tensor]:
    return {name: part.tensor for name, part in rows.items()}


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's persistent buffers."""
    return {
        f"{path}.{name}".lstrip("."): buffer
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
