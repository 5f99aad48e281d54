"""Checkpoints are written beside the training: copied to the host, then to the disk while steps go on.

    begin    every process that has something to write copies it, and a thread of its own writes and hashes it
    settle   after each step: when all have written, the first process publishes; if one could not, all stop
    finish   wait for that: before the next checkpoint, at the end of a piece, before a clean stop

At most one is under way. It lies in a folder of its own and counts for nothing until its manifest stands, which is
written last and moved to its place with it, so whoever is killed on the way leaves no state. A state at the end of a
piece is put together from its parts: what others read of a store is one file of weights, however it was trained.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from biphase.errors import StoreError, one_line
from biphase.files import Store, publish, write_json
from biphase.models.backbone import LanguageModel
from biphase.training import optimizer as adam
from biphase.training.devices import Ranks
from biphase.training.placing import Placed
from biphase.training.tensors import Rows, join_parts, write_part, write_whole

KINDS = ("model", "optimizer")


@dataclass(frozen=True)
class Told:
    """What is said of a state beside its tensors."""

    key: str
    state: dict[str, Any]
    metrics: list[dict[str, Any]]


@dataclass
class _UnderWay:
    folder: Path
    told: Told
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

    def begin(self, told: Told, *, last: bool, then: Callable[[], None] = lambda: None) -> None:
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
            for kind in KINDS if now.whole else ():
                parts, entries[f"{kind}.safetensors"] = join_parts(now.folder, kind)
                for path in parts:
                    path.unlink()
                    del entries[path.name]
            _refuse_part(now.folder, entries)
            publish(now.folder, self.store.states / now.told.key, entries)
        finally:
            shutil.rmtree(now.folder, ignore_errors=True)
        now.then()

    def _write(self, now: _UnderWay, copied: dict[str, dict[str, Rows]]) -> None:
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

    def _copied(self) -> dict[str, dict[str, Rows]]:
        """What this process has to write, as it is now: the training may go on."""
        made = self._rows_here() if self.sharded else self._all_of_it()
        return {
            kind: {name: Rows(_host(one.tensor), one.whole, one.first) for name, one in rows.items()}
            for kind, rows in zip(KINDS, made, strict=True)
        }

    def _all_of_it(self) -> tuple[dict[str, Rows], dict[str, Rows]]:
        """Of tied tensors only the first is written."""
        seen: dict[int, str] = {}
        weights = {
            name: Rows.all_of(tensor)
            for name, tensor in self.model.model.state_dict().items()
            if seen.setdefault(tensor.data_ptr(), name) == name or tensor.numel() == 0
        }
        learned = adam.moments(_tensors(self.placed.rows), self.optimizer)
        return weights, {name: Rows.all_of(tensor) for name, tensor in learned.items()}

    def _rows_here(self) -> tuple[dict[str, Rows], dict[str, Rows]]:
        assert self.sharded is not None
        weights = dict(self.placed.rows)
        learned: dict[str, Rows] = {}
        for name, tensor in adam.moments(_tensors(weights), self.optimizer).items():
            part = weights[name.partition(".")[2]]
            if tensor.ndim:
                learned[name] = Rows(tensor, part.whole, part.first)
            elif part.first == 0:
                learned[name] = Rows.all_of(tensor)
        if self.ranks.first:  # what is no parameter, every process has
            weights |= {name: Rows.all_of(one) for name, one in _kept_buffers(self.model.model).items()}
        return weights, learned


def _refuse_part(folder: Path, entries: Mapping[str, Any]) -> None:
    """A state is its tensors and what is said of them: a folder that lacks one is none."""
    lacking = [kind for kind in KINDS if not any(name.startswith(kind) for name in entries)]
    lacking += [name for name in ("state.json", "metrics.jsonl") if not (folder / name).is_file()]
    if lacking:
        raise StoreError(f"a checkpoint has no {', '.join(lacking)}; it was not published, run again")


def _tensors(rows: Mapping[str, Rows]) -> dict[str, Tensor]:
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
